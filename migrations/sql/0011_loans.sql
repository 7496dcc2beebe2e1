-- Loans: a child that its parent waits for acts under the parent's lanes.
--
-- A loan is a row: the lane, who lends it and who borrows it. The borrower gets a new token, so what the lender still
-- has under way is fenced off. A lane may be lent on, to any depth; the row with the largest depth is who has it now.
-- When the borrower ends, gives the lane back or lets it expire, it goes to the nearest lender that is alive, with a new
-- token again; when a lender stops waiting, everything that was lent from there on comes back to it. Who may borrow is
-- the executions' business: agent_lends() says so from parent_id and inherits. Locks are taken as everywhere: executions
-- by id, then lanes by name.

alter table agent_executions add column inherits boolean not null default false;
comment on column agent_executions.inherits is 'May borrow the lanes of its parent, which waits for it.';

create table agent_lock_loans (
  lane     text not null,
  depth    int not null check (depth > 0),
  lender   uuid not null,
  borrower uuid not null,
  lent_at  timestamptz not null default clock_timestamp(),
  primary key (lane, depth)
);
create index agent_lock_loans_lender on agent_lock_loans (lender);

create function agent_lends(p_borrower uuid, p_holder uuid, p_lane text) returns boolean
language plpgsql volatile as $$
declare
  child record;
  above record;
begin
  select x.id, x.parent_id, x.inherits into child from agent_executions x where x.id = p_borrower;
  while child.inherits and child.parent_id is not null loop
    select x.id, x.parent_id, x.inherits, x.status, x.waiting_for, x.waiting_key into above
      from agent_executions x where x.id = child.parent_id;
    -- A parent that has started its child and not begun to wait yet does so next: a thread is lent already.
    if not (above.status = 'waiting' and above.waiting_for = 'agent' and above.waiting_key = child.id::text
            or above.status = 'running' and p_lane like 'thread:%') then
      return false;
    end if;
    if above.id = p_holder then
      return true;
    end if;
    child := above;
  end loop;
  return false;
end $$;
comment on function agent_lends is 'Whether an execution may borrow a lane from the one that holds it: every parent on the way waits for its child.';

create function borrow_agent_lock(p_lane text, p_execution_id uuid, p_claim bigint, p_ttl_seconds int default 300)
returns table (acquired boolean, fencing_token bigint, expires_at timestamptz, lender uuid)
language plpgsql volatile as $$
#variable_conflict use_column
declare
  held agent_locks;
  now_ timestamptz;
begin
  perform agent_lock_check(p_lane, p_execution_id || '#' || p_claim, p_ttl_seconds);
  perform fence_agent_execution(p_execution_id, p_claim);
  select l.* into held from agent_locks l where l.lane = p_lane for update;
  now_ := clock_timestamp();
  if not found or held.expires_at <= now_ or held.execution_id is null or held.execution_id = p_execution_id
     or not agent_lends(p_execution_id, held.execution_id, p_lane) then
    return query select false, held.fencing_token, held.expires_at, null::uuid;
    return;
  end if;
  insert into agent_lock_loans (lane, depth, lender, borrower)
  values (p_lane, coalesce((select max(n.depth) from agent_lock_loans n where n.lane = p_lane), 0) + 1, held.execution_id,
          p_execution_id);
  return query
  update agent_locks l
     set locked_by = p_execution_id || '#' || p_claim, execution_id = p_execution_id, parked = false, locked_at = now_,
         fencing_token = agent_lock_token(l.fencing_token, now_), ttl_seconds = p_ttl_seconds,
         expires_at = now_ + make_interval(secs => p_ttl_seconds)
   where l.lane = p_lane
  returning true, l.fencing_token, l.expires_at, held.execution_id;
end $$;
comment on function borrow_agent_lock is
  'Take a lane from a parent that waits for this execution, as a loan. No error when it may not, or nobody of its line holds '
  'the lane: acquired is false.';

create function hand_agent_lock(p_lane text, p_to uuid, p_claim bigint, p_parked boolean) returns void
language sql volatile as $$
  update agent_locks l
     set locked_by = p_to || '#' || p_claim, execution_id = p_to, parked = p_parked,
         fencing_token = agent_lock_token(l.fencing_token, clock_timestamp()),
         expires_at = case when p_parked then timestamptz '9000-01-01 00:00+00'
                           else clock_timestamp() + make_interval(secs => l.ttl_seconds) end
   where l.lane = p_lane
$$;

create function return_agent_lock(p_lane text) returns uuid
language plpgsql volatile as $$
declare
  loan record;
  above record;
begin
  for loan in select n.depth, n.lender from agent_lock_loans n where n.lane = p_lane order by n.depth desc loop
    delete from agent_lock_loans n where n.lane = p_lane and n.depth = loan.depth;
    -- A lender whose row is locked is being ended or claimed: then it has stopped waiting, and the next above is asked.
    select x.id, x.claim, x.status into above from agent_executions x
     where x.id = loan.lender and x.status in ('running', 'waiting') for key share skip locked;
    if found then
      perform hand_agent_lock(p_lane, above.id, above.claim, above.status = 'waiting' and agent_lock_parks(p_lane));
      perform agent_lane_freed(p_lane);
      return above.id;
    end if;
  end loop;
  return null;
end $$;
comment on function return_agent_lock is
  'End the last loan of a lane, whose row the caller has locked: to the nearest lender that is alive. Null when there is none.';

create function recall_agent_loans(p_lender uuid) returns int
language plpgsql volatile as $$
declare
  loan record;
  claim_ bigint;
  n int := 0;
begin
  if not exists (select from agent_lock_loans l where l.lender = p_lender) then
    return 0;
  end if;
  select x.claim into claim_ from agent_executions x where x.id = p_lender;
  perform 1 from agent_locks l where l.lane in (select n.lane from agent_lock_loans n where n.lender = p_lender)
    order by l.lane for update;
  for loan in select l.lane, min(l.depth) as depth from agent_lock_loans l where l.lender = p_lender group by l.lane loop
    delete from agent_lock_loans l where l.lane = loan.lane and l.depth >= loan.depth;
    perform hand_agent_lock(loan.lane, p_lender, claim_, false);
    n := n + 1;
  end loop;
  return n;
end $$;
comment on function recall_agent_loans is 'Take back what an execution has lent, because it does not wait any more.';

create function agent_lane_freed(p_lane text) returns void
language plpgsql volatile as $$
begin
  if p_lane like 'thread:%' and exists (
       select from agent_messages m where m.thread_id = substr(p_lane, 8) and m.status = 'queued') then
    perform pg_notify('agent_threads', substr(p_lane, 8));
  end if;
end $$;
comment on function agent_lane_freed is 'Tell who delivers messages that a thread with queued ones has changed hands.';

create or replace function acquire_agent_lock(p_lane text, p_locked_by text, p_ttl_seconds int default 300)
returns table (acquired boolean, fencing_token bigint, expires_at timestamptz, locked_by text)
language plpgsql volatile as $$
#variable_conflict use_column
declare
  held   agent_locks;
  now_   timestamptz;
  head   text;
  ends   timestamptz;
begin
  perform agent_lock_check(p_lane, p_locked_by, p_ttl_seconds);
  select l.* into held from agent_locks l where l.lane = p_lane;
  if not found then
    -- The very first hold of this lane: no row to lock yet, so racers are told apart by an advisory lock.
    if not pg_try_advisory_xact_lock(hashtextextended('lane ' || p_lane, 0)) then
      return query select false, null::bigint, null::timestamptz, null::text;
      return;
    end if;
    now_ := clock_timestamp();
    insert into agent_locks as l (lane, locked_by, fencing_token, locked_at, expires_at, ttl_seconds, execution_id)
    values (p_lane, p_locked_by, agent_lock_token(0, now_), now_, now_ + make_interval(secs => p_ttl_seconds),
            p_ttl_seconds, agent_lock_execution(p_locked_by))
    on conflict (lane) do nothing
    returning l.* into held;
    return query select held.lane is not null, held.fencing_token, held.expires_at, held.locked_by;
    return;
  end if;

  now_ := clock_timestamp();
  if held.expires_at > now_ and held.locked_by <> p_locked_by then
    return query select false, held.fencing_token, held.expires_at, held.locked_by;   -- busy: a read, no write
    return;
  end if;
  if held.expires_at <= now_ and held.waited_until > now_ then
    head := agent_lock_head(p_lane, now_);
    if head <> p_locked_by then
      return query select false, held.fencing_token, held.expires_at, head;           -- promised to who waits
      return;
    end if;
  end if;

  if held.expires_at > now_ then
    -- Ours already. A refresh leaves the key alone, so writes under this token do not hold it up.
    select l.* into held from agent_locks l where l.lane = p_lane for no key update skip locked;
  else
    select l.* into held from agent_locks l where l.lane = p_lane for update skip locked;
  end if;
  if not found then
    return query select false, null::bigint, null::timestamptz, null::text;           -- being changed right now
    return;
  end if;

  now_ := clock_timestamp();                                                          -- after the lock
  ends := now_ + make_interval(secs => p_ttl_seconds);
  if held.expires_at > now_ then
    if held.locked_by = p_locked_by then
      update agent_locks l
         set expires_at = case when l.parked then l.expires_at else ends end, ttl_seconds = p_ttl_seconds
       where l.lane = p_lane;
      return query select true, held.fencing_token, case when held.parked then held.expires_at else ends end, p_locked_by;
    else
      return query select false, held.fencing_token, held.expires_at, held.locked_by;
    end if;
    return;
  end if;

  if held.waited_until > now_ then
    head := agent_lock_head(p_lane, now_);
    if head <> p_locked_by then
      return query select false, held.fencing_token, held.expires_at, head;           -- somebody came just now
      return;
    end if;
  end if;

  -- Free or expired. If the lease was ours and ended between the read and the lock, the row is locked
  -- too weakly to change its key; ask again for the full lock, still without waiting.
  perform 1 from agent_locks l where l.lane = p_lane for update skip locked;
  if not found then
    return query select false, null::bigint, null::timestamptz, null::text;
    return;
  end if;
  if held.locked_by <> '' and return_agent_lock(p_lane) is not null then
    -- The borrower let it expire, and who lent it is alive: it has gone back.
    select l.* into held from agent_locks l where l.lane = p_lane;
    return query select held.locked_by = p_locked_by, held.fencing_token, held.expires_at, held.locked_by;
    return;
  end if;
  now_ := clock_timestamp();
  return query
  update agent_locks l
     set locked_by = p_locked_by, fencing_token = agent_lock_token(l.fencing_token, now_), locked_at = now_,
         expires_at = now_ + make_interval(secs => p_ttl_seconds), ttl_seconds = p_ttl_seconds, parked = false,
         execution_id = agent_lock_execution(p_locked_by)
   where l.lane = p_lane
  returning true, l.fencing_token, l.expires_at, l.locked_by;
end $$;

create or replace function release_agent_lock(p_lane text, p_locked_by text, p_fencing_token bigint default null)
returns boolean language plpgsql volatile as $$
declare
  held agent_locks;
begin
  perform agent_lock_check(p_lane, p_locked_by, 1);
  select l.* into held from agent_locks l
   where l.lane = p_lane and l.locked_by = p_locked_by and l.expires_at > clock_timestamp()
     and (p_fencing_token is null or l.fencing_token = p_fencing_token) for update;
  if not found or held.parked or held.expires_at <= clock_timestamp() then            -- after the lock
    return false;
  end if;
  if return_agent_lock(p_lane) is not null then
    return true;                                                                      -- to the ancestor who lent it
  end if;
  update agent_locks l
     set locked_by = '', fencing_token = l.fencing_token + 1, expires_at = clock_timestamp(), parked = false,
         execution_id = null
   where l.lane = p_lane;
  if held.waited_until > clock_timestamp() then
    perform pg_notify('agent_lanes', p_lane);
  end if;
  perform agent_lane_freed(p_lane);
  return true;
end $$;

create or replace function release_agent_locks(p_execution_id uuid) returns int
language plpgsql volatile as $$
declare
  freed record;
  n int := 0;
begin
  for freed in
    select l.lane, l.waited_until from agent_locks l where l.execution_id = p_execution_id order by l.lane for update
  loop
    n := n + 1;
    continue when return_agent_lock(freed.lane) is not null;
    update agent_locks l
       set locked_by = '', fencing_token = l.fencing_token + 1, parked = false, execution_id = null,
           expires_at = least(l.expires_at, clock_timestamp())
     where l.lane = freed.lane;
    if freed.waited_until > clock_timestamp() then
      perform pg_notify('agent_lanes', freed.lane);
    end if;
    perform agent_lane_freed(freed.lane);
  end loop;
  return n;
end $$;

create or replace function break_agent_lock(p_lane text, p_reason text) returns boolean
language plpgsql volatile as $$
declare
  held agent_locks;
  e record;
  trace text;
begin
  perform agent_lock_check(p_lane, 'admin', 1);
  if p_reason is null or btrim(p_reason) = '' then
    raise exception 'breaking lane % needs a reason', quote_literal(p_lane) using errcode = '22023';
  end if;
  select l.* into held from agent_locks l where l.lane = p_lane for update;
  if not found or held.expires_at <= clock_timestamp() then
    return false;
  end if;
  update agent_locks l
     set locked_by = '', fencing_token = l.fencing_token + 1, expires_at = clock_timestamp(), parked = false,
         execution_id = null
   where l.lane = p_lane;
  select x.trace_id, x.surface, x.agent, x.id into e from agent_executions x where x.id = held.execution_id;
  trace := coalesce(e.trace_id, substring(held.locked_by from '^(?:hb|op|ch|wh|fl)_[0-9A-HJKMNP-TV-Z]{26}'),
                    agent_trace_id('op'));
  insert into agent_activity (trace_id, execution_id, kind, agent, surface, skill_name, status, input, lane, finished_at, duration_ms)
  values (trace, e.id, 'note', coalesce(e.agent, 'flowpilot'), coalesce(e.surface, 'operate'), 'break_lane', 'success',
          jsonb_build_object('lane', p_lane, 'reason', p_reason, 'holder', held.locked_by,
                             'fencing_token', held.fencing_token), p_lane, clock_timestamp(), 0);
  delete from agent_lock_loans n where n.lane = p_lane;
  perform pg_notify('agent_lanes', p_lane);
  perform agent_lane_freed(p_lane);
  return true;
end $$;
