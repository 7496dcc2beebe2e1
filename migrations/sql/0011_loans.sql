-- Loans: a child that its parent waits for acts under the parent's lanes.
--
-- A loan is a row: the lane, who lends it and who borrows it. The borrower gets a new token, so what the lender still
-- has under way is fenced off. A lane may be lent on, to any depth; the row with the largest depth is who has it now. Who
-- borrows past parents that never had the lane makes a loan of each link, so that the lane comes back when any of them stops waiting.
-- When the borrower ends, gives the lane back or lets it expire, it goes to the nearest lender that is alive, with a new
-- token again; when a lender stops waiting, everything that was lent from there on comes back to it. Who may borrow is
-- the executions' business: agent_lenders() says so from parent_id and inherits.
--
-- Locks are taken as everywhere: executions by id, then lanes by name. What a loan depends on is read without a lock on the
-- lender, and is right all the same, because both sides meet at the row of the lane: who changes an execution (park, resume,
-- claim, end) changes it first and then locks every lane that it holds or has lent; who lends or returns has locked the lane
-- before it looks at the execution. Either the look finds the change, or the change finds the loan. A parent between the
-- two that has nothing to do with the lane yet meets the borrower at the borrower's row, whose inherits it takes away.

alter table agent_executions add column inherits boolean not null default false;
comment on column agent_executions.inherits is 'May borrow the lanes of its parent, which waits for it.';

create table agent_lock_loans (
  lane        text not null references agent_locks on delete cascade,
  depth       int not null check (depth > 0),
  lender      uuid not null,
  borrower    uuid not null,
  ttl_seconds int not null,                         -- the lender's
  lent_at     timestamptz not null default clock_timestamp(),
  primary key (lane, depth)
);
create index agent_lock_loans_lender on agent_lock_loans (lender);

create function agent_lenders(p_borrower uuid, p_holder uuid, p_running boolean) returns uuid[]
language plpgsql volatile as $$
declare
  child record;
  above record;
  line uuid[] := '{}';
begin
  select x.id, x.parent_id, x.inherits into child from agent_executions x where x.id = p_borrower;
  while child.inherits and child.parent_id is not null loop
    select x.id, x.parent_id, x.inherits, x.status, x.waiting_for, x.waiting_key into above
      from agent_executions x where x.id = child.parent_id;
    if not (above.status = 'waiting' and above.waiting_for = 'agent' and above.waiting_key = child.id::text
            or above.status = 'running' and p_running) then
      return null;
    end if;
    line := above.id || line;
    if above.id = p_holder then
      return line;
    end if;
    child := above;
  end loop;
  return null;
end $$;
comment on function agent_lenders is
  'The line from a holder down to the parent of who wants to borrow, when every one on it waits for its child; else null. With '
  'p_running also when one has started its child and not begun to wait yet, as it does next.';

create function agent_lends(p_borrower uuid, p_holder uuid, p_lane text) returns boolean
language sql volatile as $$
  select agent_lenders(p_borrower, p_holder, p_lane like 'thread:%') is not null
$$;
comment on function agent_lends is
  'Whether an execution may borrow a lane from the one that holds it: every parent on the way waits for its child. A thread is '
  'lent a little sooner, when the parent has started its child and not begun to wait yet.';

create function lend_agent_lock(p_lane text, p_borrower uuid, p_claim bigint, p_ttl_seconds int) returns uuid
language plpgsql volatile as $$
declare
  held agent_locks;
  line uuid[];
  between_ uuid[];
  deep int;
  now_ timestamptz := clock_timestamp();
begin
  select l.* into held from agent_locks l where l.lane = p_lane;
  if held.expires_at <= now_ or held.execution_id is null or held.execution_id = p_borrower then
    return null;
  end if;
  line := agent_lenders(p_borrower, held.execution_id, p_lane like 'thread:%');
  between_ := line[2 : cardinality(line) - 1];
  if cardinality(between_) > 0 then
    -- Neither the lane nor the borrower's row stands for these. One that is being changed stops waiting now, or begins.
    if cardinality(between_) <> (select count(*) from (select from agent_executions x where x.id = any (between_)
                                                       order by x.id for share skip locked) t) then
      return null;
    end if;
    line := agent_lenders(p_borrower, held.execution_id, p_lane like 'thread:%');
  end if;
  if line is null then
    return null;
  end if;
  select coalesce(max(n.depth), 0) into deep from agent_lock_loans n where n.lane = p_lane;
  insert into agent_lock_loans (lane, depth, lender, borrower, ttl_seconds)
  select p_lane, deep + u.n, u.lender, coalesce(line[u.n + 1], p_borrower), held.ttl_seconds
    from unnest(line) with ordinality u (lender, n);
  update agent_locks l
     set locked_by = p_borrower || '#' || p_claim, execution_id = p_borrower, parked = false, locked_at = now_,
         fencing_token = agent_lock_token(l.fencing_token, now_), ttl_seconds = p_ttl_seconds,
         expires_at = now_ + make_interval(secs => p_ttl_seconds)
   where l.lane = p_lane;
  return held.execution_id;
end $$;
comment on function lend_agent_lock is
  'Lend a lane, whose row and whose borrower''s row the caller has locked, to an execution. Answers from whom, null when it may not.';

create function borrow_agent_lock(p_lane text, p_execution_id uuid, p_claim bigint, p_ttl_seconds int default 300)
returns table (acquired boolean, fencing_token bigint, expires_at timestamptz, lender uuid)
language plpgsql volatile as $$
#variable_conflict use_column
declare
  from_ uuid;
begin
  perform agent_lock_check(p_lane, p_execution_id || '#' || p_claim, p_ttl_seconds);
  perform 1 from agent_executions x where x.id = p_execution_id and x.inherits for no key update;   -- executions before lanes
  perform fence_agent_execution(p_execution_id, p_claim);
  perform 1 from agent_locks l where l.lane = p_lane for update;
  if found then
    from_ := lend_agent_lock(p_lane, p_execution_id, p_claim, p_ttl_seconds);
  end if;
  return query select from_ is not null, l.fencing_token, l.expires_at, from_
                 from (values (p_lane)) v (lane) left join agent_locks l on l.lane = v.lane;
end $$;
comment on function borrow_agent_lock is
  'Take a lane from a parent that waits for this execution, as a loan. No error when it may not, or nobody of its line holds '
  'the lane: acquired is false.';

create function hand_agent_lock(p_lane text, p_to uuid, p_claim bigint, p_parked boolean, p_ttl_seconds int) returns void
language sql volatile as $$
  update agent_locks l
     set locked_by = p_to || '#' || p_claim, execution_id = p_to, parked = p_parked, locked_at = clock_timestamp(),
         ttl_seconds = p_ttl_seconds, fencing_token = agent_lock_token(l.fencing_token, clock_timestamp()),
         expires_at = case when p_parked then timestamptz '9000-01-01 00:00+00'
                           else clock_timestamp() + make_interval(secs => p_ttl_seconds) end
   where l.lane = p_lane
$$;

create function return_agent_lock(p_lane text) returns uuid
language plpgsql volatile as $$
declare
  loan record;
  above record;
begin
  for loan in select n.depth, n.lender, n.ttl_seconds from agent_lock_loans n where n.lane = p_lane order by n.depth desc loop
    delete from agent_lock_loans n where n.lane = p_lane and n.depth = loan.depth;
    -- Without a lock: a lender that is being parked, claimed or ended now finds the lane when we have let go of its row.
    select x.id, x.claim, x.status into above from agent_executions x
     where x.id = loan.lender and x.status in ('running', 'waiting');
    if found then
      perform hand_agent_lock(p_lane, above.id, above.claim, above.status = 'waiting' and agent_lock_parks(p_lane), loan.ttl_seconds);
      perform agent_lane_freed(p_lane);
      return above.id;
    end if;
  end loop;
  return null;
end $$;
comment on function return_agent_lock is
  'End the last loan of a lane, whose row the caller has locked: to the nearest lender that is alive. Null when there is none.';

create function lock_agent_locks(p_execution_id uuid) returns text[]
language plpgsql volatile as $$
declare
  mine text[] := array(select l.lane from agent_locks l where l.execution_id = p_execution_id
                       union select n.lane from agent_lock_loans n where n.lender = p_execution_id order by 1);
begin
  if mine <> '{}' then
    perform 1 from agent_locks l where l.lane = any (mine) order by l.lane for update;
  end if;
  return mine;
end $$;
comment on function lock_agent_locks is
  'Lock the lanes that an execution holds or has lent, after its own row has been changed. Whose they are is to be read after this.';

create function lock_agent_children(p_id uuid) returns void
language plpgsql volatile as $$
declare
  level uuid[] := array[p_id];
begin
  while level <> '{}' loop
    level := array(select x.id from agent_executions x
                    where x.parent_id = any (level) and x.awaited and x.status in ('pending', 'running', 'waiting')
                    order by x.id for update);
  end loop;
end $$;
comment on function lock_agent_children is
  'Lock what is cancelled with an execution, to any depth, before the first of their lanes: a child that sends has its own row and '
  'waits for the lane.';

create function recall_agent_loans(p_lender uuid) returns int
language plpgsql volatile as $$
declare
  mine text[] := lock_agent_locks(p_lender);
  loan record;
  claim_ bigint;
  n int := 0;
begin
  if mine = '{}' then
    return 0;
  end if;
  select x.claim into claim_ from agent_executions x where x.id = p_lender;
  for loan in select distinct on (l.lane) l.lane, l.depth, l.ttl_seconds from agent_lock_loans l
               where l.lender = p_lender and l.lane = any (mine) order by l.lane, l.depth loop
    delete from agent_lock_loans l where l.lane = loan.lane and l.depth >= loan.depth;
    perform hand_agent_lock(loan.lane, p_lender, claim_, false, loan.ttl_seconds);
    perform agent_lane_freed(loan.lane);
    n := n + 1;
  end loop;
  return n;
end $$;
comment on function recall_agent_loans is 'Take back what an execution has lent, because it does not wait any more.';

create function take_agent_lock(p_lane text, p_locked_by text, p_ttl_seconds int default 300)
returns table (acquired boolean, fencing_token bigint, expires_at timestamptz, locked_by text, lender uuid, soon boolean)
language plpgsql volatile as $$
#variable_conflict use_column
declare
  me uuid := agent_lock_execution(p_locked_by);
  heir boolean;
  got record;
  of uuid;
begin
  -- Executions before lanes. Nothing is locked for one that may not borrow, or under a claim that is over.
  perform 1 from agent_executions x
    where x.id = me and x.inherits and x.status = 'running' and p_locked_by = me || '#' || x.claim for no key update;
  heir := found;
  soon := false;
  select a.* into got from acquire_agent_lock(p_lane, p_locked_by, p_ttl_seconds) a;
  acquired := got.acquired; fencing_token := got.fencing_token; expires_at := got.expires_at; locked_by := got.locked_by;
  if not acquired and heir then
    of := agent_lock_execution(locked_by);
    soon := agent_lenders(me, of, true) is not null or locked_by is null;
    if agent_lends(me, of, p_lane) then
      perform 1 from agent_locks l where l.lane = p_lane for update;
      lender := lend_agent_lock(p_lane, me, substr(p_locked_by, 38)::bigint, p_ttl_seconds);
      if lender is not null then
        select l.fencing_token, l.expires_at, l.locked_by into fencing_token, expires_at, locked_by
          from agent_locks l where l.lane = p_lane;
        acquired := true;
        soon := false;
      end if;
    end if;
  end if;
  return next;
end $$;
comment on function take_agent_lock is
  'acquire_agent_lock for an execution, which borrows the lane where a parent that waits for it holds it: then lender says from '
  'whom. soon: it may not yet, but such a parent is about to wait; try again in a moment.';

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
  -- Few lanes are lent, and every job comes this way: the call is spared.
  if exists (select from agent_lock_loans n where n.lane = p_lane) and return_agent_lock(p_lane) is not null then
    return true;                                                                      -- to the ancestor who lent it
  end if;
  update agent_locks l
     set locked_by = '', fencing_token = l.fencing_token + 1, expires_at = clock_timestamp(), parked = false,
         execution_id = null
   where l.lane = p_lane;
  if held.waited_until > clock_timestamp() then
    perform pg_notify('agent_lanes', p_lane);
  end if;
  if p_lane like 'thread:%' then
    perform agent_lane_freed(p_lane);
  end if;
  return true;
end $$;

create function free_agent_locks(p_execution_id uuid, p_threads boolean) returns int
language plpgsql volatile as $$
declare
  mine text[] := lock_agent_locks(p_execution_id);
  freed record;
  n int := 0;
begin
  if mine = '{}' then
    return 0;
  end if;
  for freed in
    select l.lane, l.waited_until, cut.depth from agent_locks l
      left join lateral (select min(k.depth) as depth from agent_lock_loans k
                          where k.lane = l.lane and k.lender = p_execution_id) cut on true
     where l.lane = any (mine) and (l.execution_id = p_execution_id or cut.depth is not null)
       and (p_threads or l.lane not like 'thread:%')
     order by l.lane
  loop
    n := n + 1;
    delete from agent_lock_loans k where k.lane = freed.lane and k.depth >= freed.depth;    -- what it had lent comes back first
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

create or replace function release_agent_locks(p_execution_id uuid) returns int
language sql volatile as $$
  select free_agent_locks(p_execution_id, true)
$$;

create or replace function park_agent_locks(p_execution_id uuid, p_parked boolean) returns void
language plpgsql volatile as $$
declare
  mine text[] := lock_agent_locks(p_execution_id);
begin
  -- Parking changes the key: the claim that parked may write nothing more under its token.
  update agent_locks l
     set parked = p_parked,
         locked_by = (select x.id || '#' || x.claim from agent_executions x where x.id = p_execution_id),
         fencing_token = agent_lock_token(l.fencing_token, clock_timestamp()),
         expires_at = case when p_parked then timestamptz '9000-01-01 00:00+00'
                           else clock_timestamp() + make_interval(secs => l.ttl_seconds) end
   where l.lane = any (mine) and l.execution_id = p_execution_id and agent_lock_parks(l.lane) and l.parked <> p_parked
     and l.expires_at > clock_timestamp();
end $$;

create or replace function reown_agent_locks(p_execution_id uuid, p_owner text) returns int
language plpgsql volatile as $$
declare
  mine text[] := lock_agent_locks(p_execution_id);
  now_ timestamptz := clock_timestamp();
  n int;
begin
  update agent_locks l
     set locked_by = p_owner, fencing_token = agent_lock_token(l.fencing_token, now_), parked = false,
         expires_at = now_ + make_interval(secs => l.ttl_seconds)
   where l.lane = any (mine) and l.execution_id = p_execution_id and l.expires_at > now_;
  get diagnostics n = row_count;
  return n;
end $$;

create or replace function give_up_agent_claim(p_id uuid, p_claim bigint) returns void
language plpgsql volatile as $$
begin
  update agent_executions x
     set claimed_by = null, claim = x.claim + 1, wake = x.wake + 1, hinted_at = 'epoch', updated_at = clock_timestamp(),
         attempt = case when exists (select 1 from agent_checkpoints c where c.execution_id = x.id and c.claim = p_claim)
                        then 0 else x.attempt end
   where x.id = p_id and x.claim = p_claim and x.status = 'running' and x.claimed_by is not null;
  if found then
    perform free_agent_locks(p_id, false);
    perform reown_agent_locks(p_id, p_id || '#' || (p_claim + 1));
  end if;
end $$;
comment on function give_up_agent_claim is
  'Hand a run back unfinished, at a shutdown: ready again, no attempt spent. Its lanes are free for others meanwhile, but threads stay '
  'with it, borrowed ones too, so that nobody else begins to talk in the middle of its conversation; they end with their lease.';

create or replace function sweep_agent_locks(p_idle interval default '1 day') returns int
language plpgsql volatile as $$
declare
  back text;
  n int;
begin
  if p_idle is null or p_idle < interval '0' then
    raise exception 'lanes free for % cannot be swept: give an interval of 0 or more', coalesce(p_idle::text, 'null')
      using errcode = '22023';
  end if;
  delete from agent_lock_waiters w where w.expires_at < clock_timestamp() - interval '1 minute';
  for back in                                               -- lent ones that the borrower has let expire go back
    select l.lane from agent_locks l
     where l.expires_at <= clock_timestamp() and exists (select from agent_lock_loans k where k.lane = l.lane)
     order by l.lane limit 1000 for update skip locked
  loop
    perform return_agent_lock(back);
  end loop;
  with old as (
    select l.lane from agent_locks l where l.expires_at < clock_timestamp() - p_idle
     order by l.lane limit 1000 for update skip locked)
  delete from agent_locks l using old where l.lane = old.lane;
  get diagnostics n = row_count;
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
