-- Lanes: the right to act on something, held by one owner at a time.
--
-- A lane is a lease with an owner, a fencing token and an end (agent_locks). It has one holder. A token is larger than
-- every token before it, also after the row was removed, and after a failover to a server whose clock is not behind. A
-- lease that has ended is lost, even when nobody else has taken the lane. A release serves waiters in the order of
-- their arrival. A child borrows lanes from a parent that waits for it (agent_lock_loans). agent_workers has a lease
-- for each process: its claims on executions live as long as that lease.

create type agent_lock_answer as (
  acquired      boolean,
  fencing_token bigint,
  expires_at    timestamptz,
  locked_by     text,
  was_holder    text,                               -- whose lease had ended without a release; '' when it was free
  was_until     timestamptz                         -- when that ended
);
comment on type agent_lock_answer is 'The answer to a request for a lane: the new lease, or the holder.';

create table agent_locks (
  lane text primary key, locked_by text not null default '', fencing_token bigint not null,
  locked_at timestamptz not null default clock_timestamp(), expires_at timestamptz not null,
  ttl_seconds int not null default 300, parked boolean not null default false, execution_id uuid,
  waited_until timestamptz not null default '1970-01-01 00:00:00+00'::timestamptz,
  constraint agent_locks_fence unique (lane, fencing_token)
) with (fillfactor = 50);
create index agent_locks_execution on agent_locks (execution_id) where execution_id is not null;
comment on index agent_locks_execution is 'Finds the lanes of an execution, to release or park them.';
create index agent_locks_held on agent_locks (lane) where locked_by <> '';
comment on index agent_locks_held is 'Lists the lanes that are held.';
create index agent_locks_threads on agent_locks (lane) where (lane ~~ 'thread:%') and locked_by <> '' and (NOT parked);
comment on index agent_locks_threads is 'Lists the threads whose lane may expire.';
comment on table agent_locks is
  'Every lane that has been held, with its holder. A lane without a row was never held, or long ago.';
comment on column agent_locks.lane is
  'The name of the lane, such as thread:ID. Any 1 to 255 printable characters name a lane.';
comment on column agent_locks.locked_by is 'The owner that holds the lane. Empty: the lane is free.';
comment on column agent_locks.fencing_token is
  'Grows whenever the holder changes. A protected write names the token, and an older one is refused.';
comment on column agent_locks.locked_at is 'When the holder acquired the lane.';
comment on column agent_locks.expires_at is
  'When the lease ends without a renewal. After that the lane is lost, even when nobody has taken it.';
comment on column agent_locks.ttl_seconds is 'The length of the lease after a renewal.';
comment on column agent_locks.parked is 'A waiting execution keeps the lane. It does not expire.';
comment on column agent_locks.execution_id is
  'The execution that holds the lane, taken from the name of the owner. Null: another owner.';
comment on column agent_locks.waited_until is 'Not used: agent_lock_waiters says whether somebody waits.';

create table agent_lock_waiters (
  lane text not null, owner text not null, ticket bigint generated always as identity,
  expires_at timestamptz not null, since timestamptz not null default clock_timestamp(),
  handover_ttl_seconds int not null default 0,
  primary key (lane, owner)
);
create index agent_lock_waiters_queue on agent_lock_waiters (lane, ticket);
comment on index agent_lock_waiters_queue is 'Finds the first waiter of a lane.';
comment on table agent_lock_waiters is
  'The queue of each lane. A waiter renews its row. A waiter that stops loses its place after its patience, at most a '
  'minute; until then no other waiter overtakes it.';
comment on column agent_lock_waiters.lane is 'The lane that the owner waits for.';
comment on column agent_lock_waiters.owner is 'The waiter, by the name under which it would hold the lane.';
comment on column agent_lock_waiters.ticket is 'The order of the queue: the lowest ticket is served first.';
comment on column agent_lock_waiters.expires_at is 'When the waiter loses its place, unless it renews its row.';
comment on column agent_lock_waiters.since is 'When the waiter joined the queue.';
comment on column agent_lock_waiters.handover_ttl_seconds is
  'The lease that a release may hand to this waiter, in seconds. 0: the waiter is notified instead.';

create table agent_lock_loans (
  lane text not null references agent_locks(lane) on delete cascade, depth int not null check (depth > 0),
  lender uuid not null, borrower uuid not null, ttl_seconds int not null,
  lent_at timestamptz not null default clock_timestamp(),
  primary key (lane, depth)
);
create index agent_lock_loans_lender on agent_lock_loans (lender);
comment on index agent_lock_loans_lender is 'Finds the lanes that an execution has lent.';
comment on table agent_lock_loans is
  'Lanes that a parent has lent to a child. A child may lend on, so the loans of a lane are a stack.';
comment on column agent_lock_loans.lane is 'The lane on loan.';
comment on column agent_lock_loans.depth is 'The place in the stack; the highest is the present loan.';
comment on column agent_lock_loans.lender is 'The execution that gets the lane back.';
comment on column agent_lock_loans.borrower is 'The execution that has the lane meanwhile.';
comment on column agent_lock_loans.ttl_seconds is 'The lease that the lender had, in seconds.';
comment on column agent_lock_loans.lent_at is 'When the loan began.';

create table agent_lane_holds (
  lane text not null, execution_id uuid not null, fencing_token bigint not null,
  held_from timestamptz not null, held_until timestamptz not null,
  ended text not null
    check (ended in ('released', 'ended', 'lent', 'given back', 'handed back', 'expired', 'broken')),
  successor text not null default '',
  primary key (lane, held_until, fencing_token)
);
create index agent_lane_holds_execution on agent_lane_holds (execution_id, held_from);
comment on index agent_lane_holds_execution is 'Lists the lanes that an execution has held.';
comment on table agent_lane_holds is 'Lanes that executions have held. A row is written when the holding ends.';
comment on column agent_lane_holds.lane is 'The lane that was held.';
comment on column agent_lane_holds.fencing_token is 'The token at the end of the holding.';
comment on column agent_lane_holds.held_from is 'When the holding began.';
comment on column agent_lane_holds.held_until is 'When the holding ended.';
comment on column agent_lane_holds.ended is
  'How the holding ended. ended: with the execution. lent, given back: to a child, by a child. handed back: by a '
  'process that shuts down. expired: the lease ran out. broken: by an admin.';
comment on column agent_lane_holds.successor is 'The next holder, if the end of the holding decided it.';

create table agent_workers (
  id uuid default lanekeeper.agent_uuid7() primary key, name text not null default '',
  kind text not null default 'process' check (kind in ('process', 'outside')),
  ttl_seconds int not null default 30 check (ttl_seconds > 0),
  started_at timestamptz not null default clock_timestamp(), expires_at timestamptz not null, lock_id text unique,
  owner text not null default '', execution_id uuid, claim bigint, go_flows text[] not null default '{}'
) with (fillfactor = 50);
create index agent_workers_expiry on agent_workers (expires_at);
comment on index agent_workers_expiry is 'Finds workers whose lease has ended.';
comment on table agent_workers is
  'Processes that run executions, and locks of workers outside. Each row is a lease on the claims that name it.';
comment on column agent_workers.kind is 'process: a process of this program. outside: a lock on one execution.';
comment on column agent_workers.ttl_seconds is 'The length of the lease after a renewal.';
comment on column agent_workers.started_at is 'When the worker registered.';
comment on column agent_workers.expires_at is
  'When the lease ends without a renewal. The next sweep then takes its claims away.';
comment on column agent_workers.lock_id is
  'The secret of an outside lock: its bearer may write as the run. No listing and no log shows it.';
comment on column agent_workers.owner is 'The name that an outside worker gave itself.';
comment on column agent_workers.execution_id is 'The execution that an outside lock covers.';
comment on column agent_workers.go_flows is 'The flows in Go that the process runs.';
comment on column agent_workers.claim is 'The claim of that lock.';

-- Code

-- The contract

create or replace function acquire_agent_lock(p_lane text, p_locked_by text, p_ttl_seconds int default 300)
returns table (acquired boolean, fencing_token bigint, expires_at timestamptz, locked_by text)
language plpgsql volatile security definer set search_path from current as $$
begin
  return query select a.acquired, a.fencing_token, a.expires_at, a.locked_by
                 from lanekeeper.acquire_agent_lock(p_lane, p_locked_by, p_ttl_seconds) a;
end $$;
comment on function acquire_agent_lock is
  'Like try_acquire_agent_lock, with details: the token and end of the lease, or those of the present holder. '
  'A refusal without a holder: another transaction is changing the lane.';

create or replace function try_acquire_agent_lock(p_lane text, p_locked_by text, p_ttl_seconds int default 300)
returns boolean language plpgsql volatile security definer set search_path from current as $$
begin
  return (lanekeeper.acquire_agent_lock(p_lane, p_locked_by, p_ttl_seconds)).acquired;
end $$;
comment on function try_acquire_agent_lock is
  'Acquire a lane that is free or whose lease has ended, or renew one that the same owner holds. It never waits. '
  'False: the lane is busy. A lease lasts 1 second to 30 days. Use a new owner for each run.';

create or replace function await_agent_lock(p_lane text, p_locked_by text, p_ttl_seconds int default 300,
                                            p_patience_seconds int default 5)
returns table (acquired boolean, fencing_token bigint, expires_at timestamptz, locked_by text)
language plpgsql volatile security definer set search_path from current as $$
begin
  return query select a.acquired, a.fencing_token, a.expires_at, a.locked_by
                 from lanekeeper.acquire_or_enqueue_agent_lock(p_lane, p_locked_by, p_ttl_seconds, p_patience_seconds,
                                                               false) a;
end $$;
comment on function await_agent_lock is
  'Like acquire_agent_lock, and keep a place in the queue for p_patience_seconds, at most 60. Call it again on a '
  'notification on channel agent_lanes, or after a second or two. The place counts only after a commit.';

create or replace function leave_agent_lock_queue(p_lane text, p_locked_by text) returns void
language sql volatile security definer set search_path from current as $$
  delete from agent_lock_waiters w where w.lane = p_lane and w.owner = p_locked_by
$$;
comment on function leave_agent_lock_queue is 'Leave the queue of a lane. A release then serves the next waiter.';

create or replace function renew_agent_lock(p_lane text, p_locked_by text, p_fencing_token bigint, p_ttl_seconds int)
returns boolean language plpgsql volatile security definer set search_path from current as $$
declare
  done boolean;
  busy boolean;
begin
  perform lanekeeper.agent_lock_check(p_lane, p_locked_by, p_ttl_seconds);
  for try in 1 .. 2 loop
    select r.renewed, r.busy into done, busy
      from lanekeeper.renew_agent_locks(array[p_lane], array[p_locked_by], array[p_fencing_token],
                                        array[p_ttl_seconds]) r;
    exit when not busy or try = 2;
    perform lanekeeper.lock_agent_lock_row(p_lane, true);
  end loop;
  return done;
end $$;
comment on function renew_agent_lock is
  'Renew a live lease. False: the lease is lost or has ended, even if nobody took the lane. If another transaction '
  'changes the lane, the call waits for about a second. Then it raises 55P03 and names the blocker.';

create or replace function release_agent_lock(p_lane text, p_locked_by text, p_fencing_token bigint default null)
returns boolean language plpgsql volatile security definer set search_path from current as $$
begin
  return lanekeeper.release_agent_lock(p_lane, p_locked_by, p_fencing_token, false) is not null;
end $$;
comment on function release_agent_lock is
  'Release a lane and void its token. Only the live owner can; any other caller gets false and changes nothing. A '
  'parked lane belongs to its waiting execution, so the claim that parked it cannot release it. If another transaction '
  'uses the lane, such as a fenced write, the call waits for about a second. Then it raises 55P03 and names the '
  'blocker.';

create or replace function is_agent_lock_held(p_lane text) returns boolean
language sql volatile security definer set search_path from current as $$
  select lanekeeper.agent_lock_check(p_lane, 'anybody', 1)
     and exists (select 1 from agent_locks l where l.lane = p_lane and l.expires_at > clock_timestamp())
$$;
comment on function is_agent_lock_held is 'Whether the lane is held now.';

create or replace function fence_agent_lock(p_lane text, p_fencing_token bigint)
returns void
language plpgsql volatile security definer set search_path from current set enable_seqscan = off set jit = off as $$
declare
  ends timestamptz;
begin
  select l.expires_at into ends from agent_locks l
   where l.lane = p_lane and l.fencing_token = p_fencing_token for key share;
  if not found or ends <= clock_timestamp() then
    raise exception 'token % of lane % is stale: the lane was lost', coalesce(p_fencing_token::text, 'null'),
      coalesce(quote_literal(left(p_lane, 255)), 'null')
      using errcode = 'LK001', hint = 'Stop the work: another run may hold the lane.';
  end if;
end $$;
comment on function fence_agent_lock is
  'Guard a write: call it first in the transaction of the write. It raises LK001 unless the token is the live one of '
  'the lane.';

create or replace function break_agent_lock(p_lane text, p_reason text) returns boolean
language plpgsql volatile security definer set search_path from current as $$
declare
  held agent_locks;
  e record;
begin
  perform lanekeeper.agent_lock_check(p_lane, 'admin', 1);
  perform lanekeeper.check_agent_reason('admin', p_reason);
  if p_reason is null or btrim(p_reason) = '' then
    raise exception 'breaking lane % needs a reason', quote_literal(p_lane) using errcode = '22023';
  end if;
  perform lanekeeper.lock_agent_lock_row(p_lane);
  select l.* into held from agent_locks l where l.lane = p_lane for update;
  if not found or held.expires_at <= clock_timestamp() then
    return false;
  end if;
  delete from agent_lock_loans n where n.lane = p_lane;
  perform lanekeeper.return_agent_lock(p_lane, null, 'broken');
  perform pg_notify('agent_lanes', p_lane);                 -- for the holder
  select x.trace_id, x.surface, x.agent, x.id into e from agent_executions x where x.id = held.execution_id;
  insert into agent_activity (trace_id, execution_id, kind, agent, surface, skill_name, status, input, lane,
                              finished_at, duration_ms)
  values (coalesce(e.trace_id, substring(held.locked_by from '^(?:hb|op|ch|wh|fl)_[0-9A-HJKMNP-TV-Z]{26}'),
                   lanekeeper.agent_trace_id('op')),
          e.id, 'note', coalesce(e.agent, 'agent'), coalesce(e.surface, 'operate'), 'break_lane', 'success',
          jsonb_build_object('lane', p_lane, 'reason', p_reason, 'holder', held.locked_by,
                             'fencing_token', held.fencing_token)
            || lanekeeper.agent_actor(),
          p_lane, clock_timestamp(), 0);
  return true;
end $$;
comment on function break_agent_lock is
  'Take a lane away from its holder and void its token. False: nobody holds it. The reason is recorded under the '
  'holder''s trace, if it has one, and the holder is notified on agent_lanes. While a fenced write is in progress, the '
  'call waits for about a second. Then it raises 55P03 and names the blocker.';

-- Checks, and the lock of a row

create or replace function lanekeeper.agent_lock_check(p_lane text, p_locked_by text, p_ttl_seconds int) returns boolean
language plpgsql immutable as $$
declare
  name_ text;
  rule  text;
begin
  if p_lane || p_locked_by ~ '^[!-~]+$' and p_ttl_seconds between 1 and 2592000
     and length(p_lane) between 1 and 255 and length(p_locked_by) between 1 and 255 then
    return true;
  end if;
  foreach name_ in array array[p_lane, p_locked_by] loop
    rule := case
      when name_ is null or length(name_) not between 1 and 255 or name_ ~ '[[:cntrl:]]'
        then '1 to 255 printable characters'
      when name_ ~ '^[ -~]+$' then case when name_ !~ '[^ ]' then '1 to 255 printable characters, not only blanks' end
      when name_ ~ ('[\u0080-\u00a0\u00ad\u034f\u061c\u115f\u1160\u1680\u17b4\u17b5\u180b-\u180f\u2000-\u200f'
                    '\u2028-\u202f\u205f-\u206f\u2800\u3000\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb'
                    '\U0001d173-\U0001d17a\U000e0000-\U000e0fff]') then
        'without characters that are invisible, change the direction of the text, or are blanks other than the space'
      when name_ is not nfc normalized then format('in Unicode''s normal form C: write %L', normalize(name_, nfc)) end;
    if rule is not null and name_ is not distinct from p_lane then
      raise exception 'lane % is not valid: a lane is %', coalesce(quote_literal(left(p_lane, 40)), 'null'), rule
        using errcode = '22023';
    elsif rule is not null then
      raise exception 'owner % of lane % is not valid: an owner is %',
        coalesce(quote_literal(left(p_locked_by, 40)), 'null'), quote_literal(p_lane), rule using errcode = '22023';
    end if;
  end loop;
  if (p_ttl_seconds between 1 and 2592000) is not true then
    raise exception 'ttl of % seconds for lane % is not valid: give 1 to 2592000 (30 days)',
      coalesce(p_ttl_seconds::text, 'null'), quote_literal(p_lane) using errcode = '22023';
  end if;
  return true;
end $$;
comment on function lanekeeper.agent_lock_check is
  'Returns true. A bad name of a lane or owner, or a bad length of the lease, raises 22023.';

create or replace function lanekeeper.agent_lock_execution(p_locked_by text) returns uuid
language sql immutable parallel safe as $$
  select case when substr(p_locked_by, 37, 1) = '#'
               and p_locked_by ~ '^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}#[0-9]+$'
              then left(p_locked_by, 36)::uuid end
$$;
comment on function lanekeeper.agent_lock_execution is
  'The execution in an owner''s name of the form EXECUTION#CLAIM; null for another owner.';

create or replace view lanekeeper.agent_lock_holders as
select l.lane, l.locked_by as holder from agent_locks l where l.expires_at > clock_timestamp()
union all
(select distinct on (w.lane) w.lane, w.owner from agent_lock_waiters w
  where w.expires_at > clock_timestamp()
    and not exists (select from agent_locks l where l.lane = w.lane and l.expires_at > clock_timestamp())
  order by w.lane, w.ticket);
comment on view lanekeeper.agent_lock_holders is
  'The holder of a lane or, when the lane is free, its first waiter. No row: anybody may acquire the lane. Restrict '
  'it by lane.';

create or replace function lanekeeper.lock_agent_lock_row(p_lane text, p_renewal boolean default false) returns void
language plpgsql volatile set enable_seqscan = off set jit = off set lock_timeout = '1s' as $$
declare
  holders  xid[];
  blockers text;
begin
  if p_renewal then
    perform 1 from agent_locks l where l.lane = p_lane for no key update;
  else
    perform 1 from agent_locks l where l.lane = p_lane for update;
  end if;
exception when lock_not_available then
  holders := array(select l.xmax from agent_locks l where l.lane = p_lane);
  if not exists (select from pg_locks k
                  where k.locktype = 'transactionid' and k.transactionid = any (holders) and k.granted) then
    begin
      -- Several transactions have locked the row.
      holders := array(select m.xid from pg_get_multixact_members(holders[1]) m);
    exception when others then
      holders := '{}';   -- One transaction had locked the row, and has ended.
    end;
  end if;
  select string_agg(t.who, '; ') into blockers from (
    select coalesce(
             (select format('prepared transaction %L since %s UTC', p.gid,
                            to_char(p.prepared at time zone 'UTC', 'YYYY-MM-DD HH24:MI:SS'))
                from pg_prepared_xacts p
               where k.pid is null and p.transaction in (
                 select o.transactionid from pg_locks o
                  where o.locktype = 'transactionid' and o.virtualtransaction = k.virtualtransaction)
               limit 1),
             (select format('pid %s (%s) in a transaction since %s', a.pid,
                            coalesce(nullif(left(a.application_name, 64), ''), 'no name'),
                            coalesce(to_char(a.xact_start at time zone 'UTC', 'YYYY-MM-DD HH24:MI:SS') || ' UTC',
                                     'some time'))
                from pg_stat_activity a where a.pid = k.pid),
             format('pid %s', k.pid)) as who
      from pg_locks k
     where k.locktype = 'transactionid' and k.transactionid = any (holders) and k.granted
       and k.pid is distinct from pg_backend_pid()
     order by k.pid limit 5) t;
  raise exception 'lane % is in use by %',
    quote_literal(p_lane), coalesce(blockers, 'a transaction that has ended just now')
    using errcode = '55P03',
      hint = 'Nothing has changed. Try again, or end that transaction: pg_terminate_backend(pid), rollback prepared.';
end $$;
comment on function lanekeeper.lock_agent_lock_row is
  'Lock the row of a lane that another transaction uses. After about a second it raises 55P03 and names the '
  'transactions: pid, application and time, or the prepared transaction.';

-- Acquire, renew, release

create or replace function lanekeeper.acquire_agent_lock(p_lane text, p_locked_by text, p_ttl_seconds int)
returns agent_lock_answer
language plpgsql volatile set enable_seqscan = off set jit = off as $$
declare
  at_ tid; holder text; token bigint; ends timestamptz;     -- of the row
  mine boolean;                                             -- the lane is free, and the caller is its first waiter
  stale boolean;
  now_ timestamptz;
  got agent_lock_answer;
begin
  -- Repeat after the first row of a lane, for its first waiter, and when a lease ends meanwhile.
  for try in 1 .. 3 loop
    -- Lock a free lane that has no other waiter. Skip a locked row.
    select l.ctid, l.locked_by, l.expires_at, l.locked_by <> '' or mine into at_, holder, ends, stale from agent_locks l
     where l.lane = p_lane and l.expires_at <= clock_timestamp()
       and (mine
            or not exists (select from agent_lock_waiters w where w.lane = p_lane and w.expires_at > clock_timestamp()))
       and (p_locked_by ~ '^[!-~]+$' and length(p_locked_by) < 256 and p_ttl_seconds between 1 and 2592000
            or lanekeeper.agent_lock_check(p_lane, p_locked_by, p_ttl_seconds)) for update of l skip locked;
    if at_ is not null then
      now_ := clock_timestamp();                                                      -- after the lock
      if stale then
        if lanekeeper.return_agent_lock(p_lane) is not null then                      -- the lease of a borrower ended
          select l.locked_by = p_locked_by, l.fencing_token, l.expires_at, l.locked_by, holder, ends into got
            from agent_locks l where l.lane = p_lane;
          return got;
        end if;
        insert into agent_lane_holds (lane, execution_id, fencing_token, held_from, held_until, ended, successor)
        select l.lane, l.execution_id, l.fencing_token, l.locked_at,
               greatest(least(l.expires_at, clock_timestamp()), l.locked_at), 'expired', p_locked_by
          from agent_locks l where l.lane = p_lane and l.execution_id is not null on conflict do nothing;
        delete from agent_lock_waiters w where w.lane = p_lane and w.owner = p_locked_by;
      end if;
      update agent_locks l
         set locked_by = p_locked_by,
             fencing_token = greatest(l.fencing_token + 1, (extract(epoch from now_) * 1000000)::bigint),
             locked_at = now_, expires_at = now_ + make_interval(secs => p_ttl_seconds), ttl_seconds = p_ttl_seconds,
             parked = false, execution_id = lanekeeper.agent_lock_execution(p_locked_by)
       where l.ctid = at_                                                             -- locked, so its ctid is stable
      returning true, l.fencing_token, l.expires_at, p_locked_by, holder, ends into got;
      return got;
    end if;
    perform lanekeeper.agent_lock_check(p_lane, p_locked_by, p_ttl_seconds);
    select l.fencing_token, l.expires_at, case when l.expires_at > clock_timestamp() then l.locked_by else q.owner end,
           l.expires_at <= clock_timestamp() and q.owner = p_locked_by
      into token, ends, holder, mine from agent_locks l left join lateral (select w.owner from agent_lock_waiters w
             where w.lane = p_lane
               and w.expires_at > clock_timestamp() order by w.ticket limit 1) q on true where l.lane = p_lane;
    -- No row to lock yet: an advisory lock serialises concurrent callers.
    if not found then
      insert into agent_locks (lane, fencing_token, expires_at) select p_lane, 0, clock_timestamp()
       where pg_try_advisory_xact_lock(hashtextextended('lane ' || p_lane, 0)) on conflict do nothing;
    elsif holder <> p_locked_by then
      return row(false, token, ends, holder, null, null)::agent_lock_answer;          -- a read, no write
    else
      -- A renewal changes no key, so writes under the token do not block it.
      select l.ctid into at_ from agent_locks l
       where l.lane = p_lane and l.locked_by = p_locked_by
         and l.expires_at > clock_timestamp() for no key update skip locked;
      now_ := clock_timestamp();                                                      -- after the lock
      update agent_locks l set ttl_seconds = p_ttl_seconds,
             expires_at = case when l.parked then l.expires_at else now_ + make_interval(secs => p_ttl_seconds) end
       where l.ctid = at_
         and l.expires_at > now_ returning true, l.fencing_token, l.expires_at, l.locked_by, '', now_ into got;
      exit when got.acquired;
    end if;
  end loop;
  got.acquired := coalesce(got.acquired, false);            -- false: another transaction changes the lane
  return got;
end $$;
comment on function lanekeeper.acquire_agent_lock is
  'Implements the contract''s function of this name. The answer also names the former owner of an ended lease. An '
  'answer without a holder: another transaction is changing the lane.';

create or replace function lanekeeper.acquire_agent_locks(p_lanes text[], p_owners text[], p_ttls int[])
returns table (n bigint, acquired boolean, fencing_token bigint, expires_at timestamptz, locked_by text,
               was_holder text, was_until timestamptz)
language plpgsql volatile
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
declare
  free_ text[];
  now_  timestamptz;
  a     agent_lock_answer;
begin
  if (cardinality(p_owners), cardinality(p_ttls)) is distinct from (cardinality(p_lanes), cardinality(p_lanes)) then
    raise exception 'acquiring % lanes needs as many owners and ttls', coalesce(cardinality(p_lanes), 0)
      using errcode = '22023';
  end if;
  perform lanekeeper.agent_lock_check(u.lane, u.owner, u.ttl)
    from unnest(p_lanes, p_owners, p_ttls) u (lane, owner, ttl);
  -- Lanes without a holder and without a waiter.
  select coalesce(array_agg(t.lane), '{}') into free_ from (
    select l.lane from agent_locks l
     where l.lane = any (p_lanes) and l.locked_by = '' and l.expires_at <= clock_timestamp()
       and not exists (select from agent_lock_waiters w where w.lane = l.lane and w.expires_at > clock_timestamp())
     order by l.lane for update of l skip locked) t;
  now_ := clock_timestamp();                                                          -- after the locks
  return query
  update agent_locks l
     set locked_by = w.owner,
         fencing_token = greatest(l.fencing_token + 1, (extract(epoch from now_) * 1000000)::bigint), locked_at = now_,
         expires_at = now_ + make_interval(secs => w.ttl), ttl_seconds = w.ttl, parked = false,
         execution_id = lanekeeper.agent_lock_execution(w.owner)
    from (select distinct on (u.lane) u.lane, u.owner, u.ttl, u.n
            from unnest(p_lanes, p_owners, p_ttls) with ordinality u (lane, owner, ttl, n) order by u.lane, u.n) w
   where l.lane = any (free_) and l.lane = w.lane
  returning w.n, true, l.fencing_token, l.expires_at, l.locked_by, '', now_;
  for i in 1 .. cardinality(p_lanes) loop
    continue when p_lanes[i] = any (free_) and array_position(p_lanes, p_lanes[i]) = i;
    a := lanekeeper.acquire_agent_lock(p_lanes[i], p_owners[i], p_ttls[i]);
    return query select i::bigint, a.acquired, a.fencing_token, a.expires_at, a.locked_by, a.was_holder, a.was_until;
  end loop;
end $$;
comment on function lanekeeper.acquire_agent_locks is
  'acquire_agent_lock for many lanes in one commit; n counts from 1. Each lane succeeds or fails alone. A bad name or '
  'ttl is an error for all.';

create or replace function lanekeeper.acquire_or_enqueue_agent_lock(p_lane text, p_locked_by text, p_ttl_seconds int,
  p_patience_seconds int, p_hand_over boolean) returns agent_lock_answer
language plpgsql volatile set enable_seqscan = off set jit = off as $$
declare
  got   agent_lock_answer;
  place timestamptz;
  ttl   int := case when p_hand_over then p_ttl_seconds else 0 end;
begin
  if (p_patience_seconds between 1 and 2592000) is not true then
    raise exception 'patience of % seconds for lane % is not valid: give 1 to 60; up to 2592000 counts as 60',
      coalesce(p_patience_seconds::text, 'null'), coalesce(quote_literal(left(p_lane, 40)), 'null')
      using errcode = '22023';
  end if;
  got := lanekeeper.acquire_agent_lock(p_lane, p_locked_by, p_ttl_seconds);
  if not got.acquired then
    -- Join the queue, and try once more: the second try sees a release that committed before. A dead waiter blocks a
    -- free lane for at most a minute.
    place := clock_timestamp() + make_interval(secs => least(p_patience_seconds, 60));
    update agent_lock_waiters w set expires_at = place, handover_ttl_seconds = ttl
     where w.ctid = (select x.ctid
                       from agent_lock_waiters x
                      where x.lane = p_lane and x.owner = p_locked_by
                      for update skip locked);
    if not found and not exists (select from agent_lock_waiters w where w.lane = p_lane and w.owner = p_locked_by) then
      insert into agent_lock_waiters as w (lane, owner, expires_at, handover_ttl_seconds)
      values (p_lane, p_locked_by, place, ttl)
      on conflict (lane, owner) do update
         set expires_at = excluded.expires_at, handover_ttl_seconds = excluded.handover_ttl_seconds;
    end if;                                                 -- a locked waiter gets the lane in an open transaction
    got := lanekeeper.acquire_agent_lock(p_lane, p_locked_by, p_ttl_seconds);
  end if;
  if got.acquired then
    delete from agent_lock_waiters w where w.lane = p_lane and w.owner = p_locked_by;
  elsif got.locked_by is null then
    -- Another transaction changes the lane, perhaps for this owner.
    delete from agent_lock_waiters w
     where w.ctid = (select x.ctid
                       from agent_lock_waiters x
                      where x.lane = p_lane and x.owner = p_locked_by
                      for update skip locked)
       and exists (select from agent_locks l
                    where l.lane = p_lane and l.locked_by = p_locked_by and l.expires_at > clock_timestamp());
  end if;
  return got;
end $$;
comment on function lanekeeper.acquire_or_enqueue_agent_lock is
  'await_agent_lock, with the former owner of an ended lease. p_hand_over: a release may hand the lane over. It then '
  'notifies agent_lanes with lane, owner, token and end in microseconds, separated by tabs. Renew the lane then.';

create or replace function lanekeeper.renew_agent_locks(p_lanes text[], p_owners text[], p_tokens bigint[],
                                                        p_ttls int[])
returns table (lane text, fencing_token bigint, renewed boolean, busy boolean, expires_at timestamptz)
language plpgsql volatile set enable_seqscan = off set jit = off as $$
#variable_conflict use_column
declare
  mine text[];
  now_ timestamptz;
begin
  if exists (select 1 from unnest(p_ttls) t (ttl) where t.ttl is null or t.ttl <= 0 or t.ttl > 2592000) then
    raise exception 'a ttl among % is not valid: give 1 to 2592000 seconds (30 days)', p_ttls using errcode = '22023';
  elsif (cardinality(p_owners), cardinality(p_tokens), cardinality(p_ttls))
        is distinct from (cardinality(p_lanes), cardinality(p_lanes), cardinality(p_lanes)) then
    raise exception 'renewing % lanes needs as many owners, tokens and ttls', coalesce(cardinality(p_lanes), 0)
      using errcode = '22023';
  end if;
  select coalesce(array_agg(t.lane), '{}') into mine from (
    select l.lane from agent_locks l
      join unnest(p_lanes, p_owners, p_tokens) w (lane, owner, token)
        on l.lane = w.lane and l.fencing_token = w.token and l.locked_by = w.owner
     order by l.lane for no key update of l skip locked) t;
  now_ := clock_timestamp();                                                          -- after the locks
  return query
  with want as (select w.* from unnest(p_lanes, p_owners, p_tokens, p_ttls) w (lane, owner, token, ttl)),
  done as (
    update agent_locks l
       set expires_at = case when l.parked then l.expires_at else now_ + make_interval(secs => w.ttl) end,
           ttl_seconds = w.ttl
      from want w
     where l.lane = w.lane and l.fencing_token = w.token and l.locked_by = w.owner
       and l.lane = any (mine) and l.expires_at > now_
    returning l.lane, l.fencing_token, l.expires_at)
  select w.lane, w.token, d.lane is not null,
         d.lane is null and not w.lane = any (mine) and exists (
           select 1 from agent_locks l
            where l.lane = w.lane and l.fencing_token = w.token and l.locked_by = w.owner and l.expires_at > now_),
         d.expires_at
    from want w left join done d on d.lane = w.lane and d.fencing_token = w.token;
end $$;
comment on function lanekeeper.renew_agent_locks is
  'Renew many leases. busy: another transaction has locked the row; try again soon. Neither renewed nor busy: the '
  'lane is lost.';

create or replace function lanekeeper.release_agent_lock(p_lane text, p_locked_by text, p_fencing_token bigint,
  p_hand_over boolean, p_wait boolean default true) returns text
language plpgsql volatile set enable_seqscan = off set jit = off as $$
declare
  at_     tid;
  ends    timestamptz;
  of      uuid;
  special boolean;                                          -- a thread, or held by an execution
  wanted  boolean;
  heir    record;
  now_    timestamptz;
  passed  text;
begin
  for try in 1 .. 2 loop
    select l.ctid, l.expires_at, l.execution_id, l.execution_id is not null or l.lane like 'thread:%',
           exists (select from agent_lock_waiters w where w.lane = p_lane and w.expires_at > clock_timestamp())
           or exists (select from agent_executions x where x.waiting_for = 'lane' and x.waiting_key = p_lane)
      into at_, ends, of, special, wanted from agent_locks l
     where l.lane = p_lane and l.locked_by = p_locked_by and l.expires_at > clock_timestamp() and not l.parked
       and (l.fencing_token = p_fencing_token or p_fencing_token is null) for update skip locked;
    exit when at_ is not null or try = 2 or not p_wait;
    if not exists (select from agent_locks l
                    where l.lane = p_lane and l.locked_by = p_locked_by and l.expires_at > clock_timestamp()
                      and not l.parked
                      and (l.fencing_token = p_fencing_token or p_fencing_token is null)) then
      perform lanekeeper.agent_lock_check(p_lane, p_locked_by, 1);
      return null;
    end if;
    -- Most likely a write under its token has locked the row.
    perform lanekeeper.lock_agent_lock_row(p_lane);
  end loop;
  now_ := clock_timestamp();                                                          -- after the lock
  if at_ is null or ends <= now_ then
    return null;
  elsif special or wanted then
    if p_hand_over and not special then
      -- Hand over to the first waiter. If another transaction has locked its row, the release neither waits for the
      -- waiter nor skips it.
      delete from agent_lock_waiters w where w.ctid = (
        select x.ctid from agent_lock_waiters x
         where x.lane = p_lane and x.handover_ttl_seconds > 0 and x.ticket = (
                 select min(q.ticket) from agent_lock_waiters q where q.lane = p_lane and q.expires_at > now_)
           for update skip locked)
      returning w.owner, w.handover_ttl_seconds into heir;
      if found then
        now_ := clock_timestamp();                                                    -- after both locks
        update agent_locks l
           set locked_by = heir.owner,
               fencing_token = greatest(l.fencing_token + 1, (extract(epoch from now_) * 1000000)::bigint),
               locked_at = now_, expires_at = now_ + make_interval(secs => least(heir.handover_ttl_seconds, 10)),
               ttl_seconds = heir.handover_ttl_seconds, execution_id = lanekeeper.agent_lock_execution(heir.owner)
         where l.ctid = at_
        returning concat_ws(E'\t', l.lane, l.locked_by, l.fencing_token,
                            (extract(epoch from l.expires_at) * 1000000)::bigint)
          into passed;
        perform pg_notify('agent_lanes', passed);
        return passed;
      end if;
    end if;
    perform lanekeeper.return_agent_lock(p_lane, null, 'released');
    return '';
  end if;
  update agent_locks l set locked_by = '', fencing_token = l.fencing_token + 1, expires_at = now_ where l.ctid = at_;
  return '';
end $$;
comment on function lanekeeper.release_agent_lock is
  'Release a lane. p_hand_over: the first waiter gets the lane. Null: the caller does not hold it. Empty: the lane is '
  'free. Otherwise: the notification of its new holder. Without p_wait a lane in use answers null. A release to '
  'nobody may be committed asynchronously: a crash within a second leaves the lane held until its lease ends.';

-- The lanes of executions

create or replace function lanekeeper.agent_lenders(p_borrower uuid, p_holder uuid, p_running boolean) returns uuid[]
language plpgsql volatile as $$
declare
  child record;
  parent record;
  lenders uuid[] := '{}';
begin
  select x.id, x.parent_id, x.inherits into child from agent_executions x where x.id = p_borrower;
  while child.inherits and child.parent_id is not null loop
    select x.id, x.parent_id, x.inherits, x.status, x.waiting_for, x.waiting_key into parent
      from agent_executions x where x.id = child.parent_id;
    if not (parent.status = 'waiting' and parent.waiting_for = 'agent' and parent.waiting_key = child.id::text
            or parent.status = 'running' and p_running) then
      return null;
    end if;
    lenders := parent.id || lenders;
    if parent.id = p_holder then
      return lenders;
    end if;
    child := parent;
  end loop;
  return null;
end $$;
comment on function lanekeeper.agent_lenders is
  'The executions from a holder down to the parent of a borrower, when each waits for its child; else null. With '
  'p_running a parent that has just started its child counts, too.';

create or replace function lanekeeper.lend_agent_lock(p_lane text, p_borrower uuid, p_claim bigint,
                                                      p_ttl_seconds int default 300)
returns table (acquired boolean, fencing_token bigint, expires_at timestamptz, lender uuid)
language plpgsql volatile as $$
#variable_conflict use_column
declare
  owner text := p_borrower || '#' || p_claim;
  held agent_locks;
  lenders uuid[];
  seen uuid[];
  now_ timestamptz;
begin
  perform lanekeeper.agent_lock_check(p_lane, owner, p_ttl_seconds);
  -- Executions before lanes.
  perform 1 from agent_executions x where x.id = p_borrower and x.inherits for no key update;
  perform fence_agent_execution(p_borrower, p_claim);
  for look in 1 .. 2 loop
    select l.* into held from agent_locks l where l.lane = p_lane;
    lenders := case when held.expires_at > clock_timestamp() and held.execution_id <> p_borrower
                    then lanekeeper.agent_lenders(p_borrower, held.execution_id, p_lane like 'thread:%') end;
    exit when lenders is null or look = 2;
    -- The executions between holder and borrower need their own locks. An execution whose row is locked begins or ends
    -- its wait.
    seen := array(select x.id
                    from agent_executions x
                   where x.id = any (lenders[2 : cardinality(lenders) - 1])
                   order by x.id
                   for share skip locked);
    exit when cardinality(seen) < cardinality(lenders) - 2;
    seen := lenders;
    perform 1 from agent_locks l where l.lane = p_lane for update;
  end loop;
  if lenders = seen then
    now_ := clock_timestamp();                                                        -- after the locks
    insert into agent_lock_loans (lane, depth, lender, borrower, ttl_seconds)
    select p_lane, u.n + (select coalesce(max(n.depth), 0) from agent_lock_loans n where n.lane = p_lane), u.lender,
           coalesce(lenders[u.n + 1], p_borrower), held.ttl_seconds
      from unnest(lenders) with ordinality u (lender, n);
    insert into agent_lane_holds (lane, execution_id, fencing_token, held_from, held_until, ended, successor)
    select l.lane, l.execution_id, l.fencing_token, l.locked_at,
           greatest(least(l.expires_at, clock_timestamp()), l.locked_at), 'lent', owner
      from agent_locks l where l.lane = p_lane and l.execution_id is not null on conflict do nothing;
    update agent_locks l
       set locked_by = owner, execution_id = p_borrower, parked = false, locked_at = now_, ttl_seconds = p_ttl_seconds,
           fencing_token = greatest(l.fencing_token + 1, (extract(epoch from now_) * 1000000)::bigint),
           expires_at = now_ + make_interval(secs => p_ttl_seconds)
     where l.lane = p_lane;
    lender := held.execution_id;
  end if;
  return query select lender is not null, l.fencing_token, l.expires_at, lender
                 from (values (p_lane)) v (lane) left join agent_locks l on l.lane = v.lane;
end $$;
comment on function lanekeeper.lend_agent_lock is
  'Lend a lane to an execution whose ancestor holds it and waits for it. Otherwise acquired is false.';

create or replace function lanekeeper.acquire_agent_execution_lock(p_lane text, p_locked_by text,
                                                                   p_ttl_seconds int default 300)
returns table (acquired boolean, fencing_token bigint, expires_at timestamptz, locked_by text, lender uuid,
               soon boolean)
language plpgsql volatile as $$
#variable_conflict use_column
declare
  me uuid := lanekeeper.agent_lock_execution(p_locked_by);
  heir boolean;
  got agent_lock_answer;
begin
  -- Lock executions before lanes. Lock nothing for an execution that may not borrow, or under a void claim.
  perform 1 from agent_executions x
    where x.id = me and x.inherits and x.status = 'running' and p_locked_by = me || '#' || x.claim for no key update;
  heir := found;
  got := lanekeeper.acquire_agent_lock(p_lane, p_locked_by, p_ttl_seconds);
  acquired := got.acquired;
  fencing_token := got.fencing_token;
  expires_at := got.expires_at;
  locked_by := got.locked_by;
  soon := not acquired and heir
          and (locked_by is null
               or lanekeeper.agent_lenders(me, lanekeeper.agent_lock_execution(locked_by), true) is not null);
  if soon and locked_by is not null then
    select n.acquired, n.fencing_token, n.expires_at, n.lender
      into got.acquired, got.fencing_token, got.expires_at, lender
      from lanekeeper.lend_agent_lock(p_lane, me, substr(p_locked_by, 38)::bigint, p_ttl_seconds) n;
    if got.acquired then
      acquired := true; fencing_token := got.fencing_token; expires_at := got.expires_at; locked_by := p_locked_by;
      soon := false;
    end if;
  end if;
  return next;
end $$;
comment on function lanekeeper.acquire_agent_execution_lock is
  'acquire_agent_lock for an execution, which may also borrow the lane from a parent that waits for it (lender). '
  'soon: a parent that holds the lane is about to wait; try again in a moment.';

create or replace function lanekeeper.return_agent_lock(p_lane text, p_lender uuid default null,
                                                        p_ended text default null) returns uuid
language plpgsql volatile set enable_seqscan = off set jit = off as $$
declare
  loan record;
begin
  -- Without a lock on the lender: its own transaction finds the lane once this one has released the lane's row.
  select n.depth, n.ttl_seconds, x.id, x.id || '#' || x.claim as owner,
         x.status = 'waiting' and n.lane ~ '^(thread|automation|objective):' as parked
    into loan from agent_lock_loans n join agent_executions x on x.id = n.lender
   where n.lane = p_lane and (n.lender = p_lender or p_lender is null and x.status in ('running', 'waiting'))
   order by case when p_lender is null then -n.depth else n.depth end limit 1;
  if not found and p_lender is not null then
    return null;
  end if;
  delete from agent_lock_loans n where n.lane = p_lane and n.depth >= coalesce(loan.depth, 0);
  if loan.id is null and p_ended is null then
    return null;
  end if;
  insert into agent_lane_holds (lane, execution_id, fencing_token, held_from, held_until, ended, successor)
  select l.lane, l.execution_id, l.fencing_token, l.locked_at,
         greatest(least(l.expires_at, clock_timestamp()), l.locked_at),
         case when loan.id is not null then 'given back' else p_ended end,
         coalesce(loan.owner, case p_ended when 'broken' then 'admin' else '' end)
    from agent_locks l where l.lane = p_lane and l.execution_id is not null on conflict do nothing;
  if loan.id is not null then
    update agent_locks l
       set locked_by = loan.owner, execution_id = loan.id, parked = loan.parked, locked_at = clock_timestamp(),
           ttl_seconds = loan.ttl_seconds,
           fencing_token = greatest(l.fencing_token + 1, (extract(epoch from clock_timestamp()) * 1000000)::bigint),
           expires_at = case when loan.parked then timestamptz '9000-01-01 00:00+00'
                             else clock_timestamp() + make_interval(secs => loan.ttl_seconds) end
     where l.lane = p_lane;
  else
    update agent_locks l
       set locked_by = '', fencing_token = l.fencing_token + 1, expires_at = least(l.expires_at, clock_timestamp()),
           parked = false, execution_id = null
     where l.lane = p_lane;
    perform pg_notify('agent_lanes', p_lane)
      where exists (select from agent_lock_waiters w where w.lane = p_lane and w.expires_at > clock_timestamp())
         or exists (select from agent_executions x where x.waiting_for = 'lane' and x.waiting_key = p_lane);
  end if;
  perform pg_notify('agent_threads', m.thread_id) from agent_messages m
    where p_lane like 'thread:%' and m.thread_id = substr(p_lane, 8) and m.status = 'queued' limit 1;
  return loan.id;
end $$;
comment on function lanekeeper.return_agent_lock is
  'End the last loan of a lane: the lane returns to the nearest live lender, or to p_lender. The caller has locked the '
  'row. Null: there is no such lender. Then p_ended, if given, frees the lane, voids its token and notifies waiters.';

create or replace function lanekeeper.claim_agent_locks(p_execution_id uuid, p_parked boolean default false)
returns void
language plpgsql volatile as $$
declare
  mine text[] := array(select l.lane from agent_locks l where l.execution_id = p_execution_id
                       union select n.lane from agent_lock_loans n where n.lender = p_execution_id);
  now_ timestamptz;
begin
  if mine = '{}' then
    return;
  end if;
  perform 1 from agent_locks l where l.lane = any (mine) order by l.lane for update;
  now_ := clock_timestamp();                                                          -- after the locks
  if p_parked then
    perform lanekeeper.return_agent_lock(t.lane, p_execution_id) from (
      select distinct n.lane from agent_lock_loans n join agent_executions x on x.id = n.lender
       where n.lender = p_execution_id
         and (x.waiting_for = 'agent' and x.waiting_key = n.borrower::text) is not true order by 1) t;
  end if;
  update agent_locks l
     set parked = p_parked, locked_by = x.id || '#' || x.claim,
         fencing_token = greatest(l.fencing_token + 1, (extract(epoch from now_) * 1000000)::bigint),
         expires_at = case when p_parked then timestamptz '9000-01-01 00:00+00'
                           else now_ + make_interval(secs => l.ttl_seconds) end
    from agent_executions x
   where x.id = p_execution_id and l.execution_id = x.id and l.lane = any (mine) and l.expires_at > now_
     and (not p_parked or not l.parked and l.lane ~ '^(thread|automation|objective):');
end $$;
comment on function lanekeeper.claim_agent_locks is
  'Give the lanes of an execution to its present claim under new tokens, so earlier claims are fenced. p_parked: the '
  'execution waits. Its loans return, except to the child it waits for. Threads, automations and objectives do not '
  'expire meanwhile.';

create or replace function lanekeeper.release_agent_execution_locks(p_execution_id uuid, p_ended boolean default true)
returns int
language plpgsql volatile as $$
declare
  mine text[] := array(select l.lane from agent_locks l where l.execution_id = p_execution_id
                       union select n.lane from agent_lock_loans n where n.lender = p_execution_id);
  freed record;
  n int := 0;
begin
  if mine = '{}' then
    return 0;
  end if;
  perform 1 from agent_locks l where l.lane = any (mine) order by l.lane for update;
  for freed in
    select l.lane, cut.depth from agent_locks l
      left join lateral (select min(k.depth) as depth from agent_lock_loans k
                          where k.lane = l.lane and k.lender = p_execution_id) cut on true
     where l.lane = any (mine) and (l.execution_id = p_execution_id or cut.depth is not null)
       and (p_ended or l.lane not like 'thread:%')
     order by l.lane
  loop
    n := n + 1;
    -- First return the lanes that the execution has lent.
    delete from agent_lock_loans k where k.lane = freed.lane and k.depth >= freed.depth;
    perform lanekeeper.return_agent_lock(freed.lane, null, case when p_ended then 'ended' else 'handed back' end);
  end loop;
  return n;
end $$;
comment on function lanekeeper.release_agent_execution_locks is
  'Release the lanes of an execution that has ended. Otherwise the execution is handed back, and its threads stay. '
  'Returns the number of lanes.';

-- The sweep visits rows of many owners in one transaction. It skips locked rows.

create or replace function lanekeeper.agent_with_free_lanes(p_ids uuid[]) returns uuid[]
language plpgsql volatile set enable_seqscan = off set jit = off as $$
declare
  wanted text[] := array(select l.lane from agent_locks l where l.execution_id = any (p_ids)
                         union select n.lane from agent_lock_loans n where n.lender = any (p_ids));
  got text[];
begin
  if wanted = '{}' then
    return p_ids;
  end if;
  got := array(select l.lane from agent_locks l where l.lane = any (wanted) order by l.lane for update skip locked);
  if cardinality(got) = cardinality(wanted) then
    return p_ids;
  end if;
  return array(
    select t.id from unnest(p_ids) t (id)
     where not exists (select from agent_locks l where l.execution_id = t.id and l.lane <> all (got))
       and not exists (select from agent_lock_loans n where n.lender = t.id and n.lane <> all (got)));
end $$;
comment on function lanekeeper.agent_with_free_lanes is
  'The executions of a list whose lanes nobody else has locked. It locks these lanes and waits for nothing.';
