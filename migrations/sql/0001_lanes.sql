-- Lanekeeper's schema: the essay.
--
-- Four nouns carry everything. A LANE (agent_locks) is the right to act on something, held by one
-- execution at a time: a lease with an owner, a fencing token and an end. A TRACE is one id, such as
-- hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE, that follows a piece of work through every row it writes. An ACTIVITY
-- (agent_activity) is one action: what, why, with what, result, time, tokens, cost. An EXECUTION
-- (agent_executions) is one durable run with a state machine; what its steps returned lies in
-- agent_checkpoints, who runs it in agent_workers, what it waits for in its own row and in agent_events.
--
-- The life of an execution. It is inserted `pending` and ready (claimed_by is null), in one transaction
-- with a River job that is only a hint to look. A worker claims it: one update writes the worker's id
-- and a larger claim number, and re-owns the lanes the execution still has, with new tokens. The claim
-- number is the execution's fence: a checkpoint, a finish, an activity or a park that carries an older
-- one is refused with SQLSTATE LK001, whoever sends it. Each finished step is a checkpoint; a run that
-- is claimed again gets those results back and does not repeat them. A step that has to wait parks the
-- row as `waiting`, with a wait number, and no process; event, timer and cancel compete for that row
-- under its lock, so that exactly one wins. An end (`completed`, `failed`, `timeout`, `cancelled`) frees
-- the lanes, closes the activity rows left open and emits AGENT_COMPLETED, all in that transaction.
--
-- What may be lost when a process dies? Nothing that was acknowledged. A checkpoint is durable before
-- the step's caller sees its result. A call that was in flight leaves its activity row `running`: the
-- next claim turns it into `unknown` and either repeats the call under the same idempotency key (the
-- skill says it may) or tells the model and the admin that nobody knows. A lane whose holder died ends
-- with its lease; a worker whose lease ended loses its claims at the next sweep.
--
-- Rules every function below keeps, each broken once by a plausible implementation:
--   1. A token is drawn under the row lock, as greatest(old + 1, microseconds of the clock).
--   2. Lock the row, then read clock_timestamp(), in the next statement.
--   3. A protected write takes FOR KEY SHARE on the row that has its token: takeovers change the key
--      and wait; renewals do not and pass.
--   4. A try never waits and, when it fails, never writes.
--   5. Lock order: executions by id, then lanes by name, then budgets.
-- They need READ COMMITTED, PostgreSQL's default. Under a stricter level they stay safe, but fail with
-- 40001 where they would have answered.

create function agent_uuid7(p_at timestamptz default clock_timestamp()) returns uuid
language sql volatile parallel safe as $$
  -- 48 bits of milliseconds, version 7, 12 bits of the millisecond's fraction, then randomness.
  select encode(set_bit(set_bit(overlay(
           uuid_send(gen_random_uuid())
           placing substring(int8send(us / 1000) from 3 for 6)
                || substring(int4send((28672 + (us % 1000) * 4096 / 1000)::int) from 3 for 2)
           from 1 for 8), 64, 0), 71, 1), 'hex')::uuid
  from (select (extract(epoch from p_at) * 1000000)::bigint as us) t
$$;
comment on function agent_uuid7 is 'A time-ordered uuid (version 7) with sub-millisecond order.';

create function agent_uuid7_floor(p_at timestamptz) returns uuid
language sql immutable parallel safe as $$
  select (encode(substring(int8send(floor(extract(epoch from p_at) * 1000)::bigint) from 3 for 6), 'hex')
          || '70008000000000000000')::uuid
$$;
comment on function agent_uuid7_floor is
  'The smallest uuid that agent_uuid7 makes at or after a millisecond: turns a time into a bound on ids.';

create function agent_trace_id(p_prefix text) returns text
language plpgsql volatile parallel safe as $$
declare
  alphabet constant text := '0123456789ABCDEFGHJKMNPQRSTVWXYZ';
  bits bytea := substring(int8send((extract(epoch from clock_timestamp()) * 1000)::bigint) from 3 for 6)
             || substring(uuid_send(gen_random_uuid()) from 1 for 5)
             || substring(uuid_send(gen_random_uuid()) from 1 for 5);
  word text := '';
  value int;
begin
  for i in 0..25 loop
    value := 0;
    for j in 0..4 loop
      value := value * 2 + case when i * 5 + j < 2 then 0
        else (get_byte(bits, (i * 5 + j - 2) / 8) >> (7 - (i * 5 + j - 2) % 8)) & 1 end;
    end loop;
    word := word || substr(alphabet, value + 1, 1);
  end loop;
  return p_prefix || '_' || word;
end $$;
comment on function agent_trace_id is 'A new trace id, prefix and ULID, for work that begins in SQL.';

-- Lanes -------------------------------------------------------------------------------------------

create table agent_locks (
  lane          text primary key,
  locked_by     text not null default '',          -- '' when free
  fencing_token bigint not null,
  locked_at     timestamptz not null default clock_timestamp(),
  expires_at    timestamptz not null,
  ttl_seconds   int not null default 300,
  parked        boolean not null default false,     -- kept by a waiting execution: does not expire
  execution_id  uuid,                               -- from the owner, where an execution holds it
  waited_until  timestamptz not null default 'epoch',
  constraint agent_locks_fence unique (lane, fencing_token)
) with (fillfactor = 50);
create index agent_locks_execution on agent_locks (execution_id) where execution_id is not null;
create index agent_locks_held on agent_locks (lane) where locked_by <> '';   -- the few among all that were ever used
comment on column agent_locks.waited_until is 'Somebody waits for this lane until then: a release notifies.';

-- Who waits for a lane, in the order in which they came. A waiter that stops refreshing its row is
-- forgotten after a few seconds; until then nobody may overtake it.
create table agent_lock_waiters (
  lane       text not null,
  owner      text not null,
  ticket     bigint generated always as identity,
  expires_at timestamptz not null,
  primary key (lane, owner)
);
create index agent_lock_waiters_queue on agent_lock_waiters (lane, ticket);

create function agent_lock_check(p_lane text, p_locked_by text, p_ttl_seconds int) returns void
language plpgsql immutable as $$
begin
  if p_lane is null or p_lane !~ '^[^[:cntrl:]]{1,255}$' or p_lane !~ '[^[:space:]]' then
    raise exception 'lane % is not valid: a lane is 1 to 255 printable characters',
      coalesce(quote_literal(left(p_lane, 40)), 'null') using errcode = '22023';
  elsif p_locked_by is null or p_locked_by !~ '^[^[:cntrl:]]{1,255}$' or p_locked_by !~ '[^[:space:]]' then
    raise exception 'owner % of lane % is not valid: an owner is 1 to 255 printable characters',
      coalesce(quote_literal(left(p_locked_by, 40)), 'null'), quote_literal(p_lane) using errcode = '22023';
  elsif p_ttl_seconds is null or p_ttl_seconds <= 0 or p_ttl_seconds > 2592000 then
    raise exception 'ttl of % seconds for lane % is not valid: give 1 to 2592000 (30 days)',
      coalesce(p_ttl_seconds::text, 'null'), quote_literal(p_lane) using errcode = '22023';
  end if;
end $$;

create function agent_lock_token(p_old bigint, p_now timestamptz) returns bigint
language sql immutable parallel safe as $$
  select greatest(p_old + 1, (extract(epoch from p_now) * 1000000)::bigint)
$$;

create function agent_lock_execution(p_locked_by text) returns uuid
language sql immutable parallel safe as $$
  select case when p_locked_by ~ '^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}#[0-9]+$'
              then left(p_locked_by, 36)::uuid end
$$;

create function agent_lock_parks(p_lane text) returns boolean
language sql immutable parallel safe as $$
  select p_lane ~ '^(thread|automation|objective):'
$$;
comment on function agent_lock_parks is 'Whether a lane stays with its holder while that waits durably.';

create function agent_lock_head(p_lane text, p_now timestamptz) returns text
language sql volatile as $$
  select w.owner from agent_lock_waiters w where w.lane = p_lane and w.expires_at > p_now order by w.ticket limit 1
$$;
comment on function agent_lock_head is 'Who waits first for a lane; null when nobody does.';

create function acquire_agent_lock(p_lane text, p_locked_by text, p_ttl_seconds int default 300)
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
  now_ := clock_timestamp();
  return query
  update agent_locks l
     set locked_by = p_locked_by, fencing_token = agent_lock_token(l.fencing_token, now_), locked_at = now_,
         expires_at = now_ + make_interval(secs => p_ttl_seconds), ttl_seconds = p_ttl_seconds, parked = false,
         execution_id = agent_lock_execution(p_locked_by)
   where l.lane = p_lane
  returning true, l.fencing_token, l.expires_at, l.locked_by;
end $$;
comment on function acquire_agent_lock is
  'try_acquire_agent_lock with its details: token and end of the lease, or who holds the lane.';

create function try_acquire_agent_lock(p_lane text, p_locked_by text, p_ttl_seconds int default 300)
returns boolean language plpgsql volatile as $$
begin
  return (select a.acquired from acquire_agent_lock(p_lane, p_locked_by, p_ttl_seconds) a);
end $$;
comment on function try_acquire_agent_lock is
  'Take a lane that is free or expired, or refresh one that the same owner holds. Never waits; false when busy.';

create function await_agent_lock(p_lane text, p_locked_by text, p_ttl_seconds int default 300, p_patience_seconds int default 5)
returns table (acquired boolean, fencing_token bigint, expires_at timestamptz, locked_by text)
language plpgsql volatile as $$
#variable_conflict use_column
declare
  got  record;
  mark timestamptz;
begin
  if p_patience_seconds is null or p_patience_seconds <= 0 or p_patience_seconds > 2592000 then
    raise exception 'a place kept for % seconds in the queue of lane % is not valid: give 1 to 2592000 (30 days)',
      coalesce(p_patience_seconds::text, 'null'), coalesce(quote_literal(left(p_lane, 40)), 'null') using errcode = '22023';
  end if;
  select a.* into got from acquire_agent_lock(p_lane, p_locked_by, p_ttl_seconds) a;
  if not got.acquired then
    -- Stand in the queue, leave the mark that makes a release notify, and look once more: a release
    -- that committed before the mark is seen by this second try, one after it sees the mark.
    mark := clock_timestamp() + make_interval(secs => p_patience_seconds);
    insert into agent_lock_waiters as w (lane, owner, expires_at) values (p_lane, p_locked_by, mark)
    on conflict (lane, owner) do update set expires_at = excluded.expires_at;
    perform 1 from agent_locks l where l.lane = p_lane for no key update skip locked;
    if found then
      update agent_locks l set waited_until = mark where l.lane = p_lane and l.waited_until < mark;
    end if;
    select a.* into got from acquire_agent_lock(p_lane, p_locked_by, p_ttl_seconds) a;
  end if;
  if got.acquired then
    delete from agent_lock_waiters w where w.lane = p_lane and w.owner = p_locked_by;
  end if;
  return query select got.acquired, got.fencing_token, got.expires_at, got.locked_by;
end $$;
comment on function await_agent_lock is
  'One look at a lane by somebody who waits for it: like acquire_agent_lock, but keeps a place in the queue for '
  'p_patience_seconds. Call again on a notification on channel agent_lanes, or after a second or two.';

create function leave_agent_lock_queue(p_lane text, p_locked_by text) returns void
language sql volatile as $$
  delete from agent_lock_waiters w where w.lane = p_lane and w.owner = p_locked_by
$$;

create function renew_agent_locks(p_lanes text[], p_owners text[], p_tokens bigint[], p_ttls int[])
returns table (lane text, fencing_token bigint, renewed boolean, busy boolean, expires_at timestamptz)
language plpgsql volatile as $$
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
  now_ := clock_timestamp();
  return query
  with want as (select w.* from unnest(p_lanes, p_owners, p_tokens, p_ttls) w (lane, owner, token, ttl)),
  done as (
    update agent_locks l
       set expires_at = case when l.parked then l.expires_at else now_ + make_interval(secs => w.ttl) end
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
comment on function renew_agent_locks is
  'Renew many leases in one statement. renewed: the lease goes on. busy: the row is locked by somebody, ask again '
  'soon. Neither: the lane is lost.';

create function renew_agent_lock(p_lane text, p_locked_by text, p_fencing_token bigint, p_ttl_seconds int)
returns boolean language plpgsql volatile as $$
declare
  held agent_locks;
begin
  perform agent_lock_check(p_lane, p_locked_by, p_ttl_seconds);
  select l.* into held from agent_locks l
   where l.lane = p_lane and l.locked_by = p_locked_by and l.fencing_token = p_fencing_token for no key update;
  if not found or held.expires_at <= clock_timestamp() then
    return false;
  end if;
  update agent_locks l
     set expires_at = case when l.parked then l.expires_at
                           else clock_timestamp() + make_interval(secs => p_ttl_seconds) end
   where l.lane = p_lane;
  return true;
end $$;
comment on function renew_agent_lock is 'Prolong a live lease. False once it is lost or expired, even if nobody took it.';

create function release_agent_lock(p_lane text, p_locked_by text, p_fencing_token bigint default null)
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
  update agent_locks l
     set locked_by = '', fencing_token = l.fencing_token + 1, expires_at = clock_timestamp(), parked = false,
         execution_id = null
   where l.lane = p_lane;
  if held.waited_until > clock_timestamp() then
    perform pg_notify('agent_lanes', p_lane);
  end if;
  return true;
end $$;
comment on function release_agent_lock is
  'Give a lane back. Only its live owner can; anybody else gets false and changes nothing. Voids the token. A parked lane '
  'belongs to its waiting execution: the claim that parked it is over, and cannot give it away.';

create function is_agent_lock_held(p_lane text) returns boolean
language sql volatile as $$
  select exists (select 1 from agent_locks l where l.lane = p_lane and l.expires_at > clock_timestamp())
$$;

create function fence_agent_lock(p_lane text, p_fencing_token bigint) returns void
language plpgsql volatile as $$
declare
  ends timestamptz;
begin
  select l.expires_at into ends from agent_locks l
   where l.lane = p_lane and l.fencing_token = p_fencing_token for key share;
  if not found or ends <= clock_timestamp() then
    raise exception 'token % of lane % is stale: the lane was lost', p_fencing_token, quote_literal(p_lane)
      using errcode = 'LK001', hint = 'Stop the work: another run may hold the lane.';
  end if;
end $$;
comment on function fence_agent_lock is
  'Guard a write: in one transaction with it, call this first. Raises LK001 when the token is not the lane''s live one.';

-- The lanes of an execution: their life follows the execution's (see 0002_executions.sql).

create function reown_agent_locks(p_execution_id uuid, p_owner text) returns int
language plpgsql volatile as $$
declare
  mine text[];
  now_ timestamptz;
  n int;
begin
  select coalesce(array_agg(t.lane), '{}') into mine from (
    select l.lane from agent_locks l where l.execution_id = p_execution_id order by l.lane for update) t;
  now_ := clock_timestamp();
  update agent_locks l
     set locked_by = p_owner, fencing_token = agent_lock_token(l.fencing_token, now_), parked = false,
         expires_at = now_ + make_interval(secs => l.ttl_seconds)
   where l.lane = any (mine) and l.expires_at > now_;
  get diagnostics n = row_count;
  return n;
end $$;

create function park_agent_locks(p_execution_id uuid, p_parked boolean) returns void
language plpgsql volatile as $$
begin
  -- Parking changes the key: the claim that parked may write nothing more under its token.
  perform 1 from agent_locks l where l.execution_id = p_execution_id order by l.lane for update;
  update agent_locks l
     set parked = p_parked,
         locked_by = (select x.id || '#' || x.claim from agent_executions x where x.id = p_execution_id),
         fencing_token = agent_lock_token(l.fencing_token, clock_timestamp()),
         expires_at = case when p_parked then timestamptz '9000-01-01 00:00+00'
                           else clock_timestamp() + make_interval(secs => l.ttl_seconds) end
   where l.execution_id = p_execution_id and agent_lock_parks(l.lane) and l.parked <> p_parked
     and l.expires_at > clock_timestamp();
end $$;

create function release_agent_locks(p_execution_id uuid) returns int
language plpgsql volatile as $$
declare
  freed record;
  n int := 0;
begin
  perform 1 from agent_locks l where l.execution_id = p_execution_id order by l.lane for update;
  for freed in
    update agent_locks l
       set locked_by = '', fencing_token = l.fencing_token + 1, parked = false, execution_id = null,
           expires_at = least(l.expires_at, clock_timestamp())
     where l.execution_id = p_execution_id
    returning l.lane, l.waited_until
  loop
    n := n + 1;
    if freed.waited_until > clock_timestamp() then
      perform pg_notify('agent_lanes', freed.lane);
    end if;
  end loop;
  return n;
end $$;

create function sweep_agent_locks(p_idle interval default '1 day') returns int
language plpgsql volatile as $$
declare
  n int;
begin
  if p_idle is null or p_idle < interval '0' then
    raise exception 'lanes free for % cannot be swept: give an interval of 0 or more', coalesce(p_idle::text, 'null')
      using errcode = '22023';
  end if;
  delete from agent_lock_waiters w where w.expires_at < clock_timestamp() - interval '1 minute';
  with old as (
    select l.lane from agent_locks l where l.expires_at < clock_timestamp() - p_idle
     order by l.lane limit 1000 for update skip locked)
  delete from agent_locks l using old where l.lane = old.lane;
  get diagnostics n = row_count;
  return n;
end $$;
comment on function sweep_agent_locks is
  'Forget lanes that have been free for a day; their tokens keep growing, because the clock does.';
