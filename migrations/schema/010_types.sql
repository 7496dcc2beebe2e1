-- Types and ids: the parts of every table, and the rules of every function.
--
-- Ids are time-ordered uuids (version 7), so an index on an id is an index on time. A trace id is a prefix that names
-- the surface and a ULID, such as hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE.
--
-- The files of this folder are the schema, in reading order; migrations.go says how they are applied. Every function
-- keeps these rules. Each was broken once by a plausible implementation.
--
-- 1. A token is drawn under the row lock, as greatest(old + 1, microseconds of the clock).
-- 2. Lock the row, then read clock_timestamp(), in the next statement.
-- 3. A protected write takes FOR KEY SHARE on the row that has its token. Takeovers change the key, so they wait for
--    the write. Renewals do not change it, so they pass.
-- 4. A try does not wait for a holder. A try that fails changes no lane, except that it returns an expired loan.
-- 5. Lock order: executions by id, then lanes by name, then budgets.
--
-- The rules need READ COMMITTED, PostgreSQL's default. Under a stricter level the functions stay safe, but may fail
-- with 40001, and LK001 may be false: a guard sees the lease as of the transaction's first statement.

create schema lanekeeper;
comment on schema lanekeeper is
  'Internals behind the contract. They may change in any release, and only the owner uses them.';

-- Closed sets of words. PostgreSQL checks a domain at every write, by any client.
create domain agent_surface as text check (value in ('heartbeat', 'operate', 'chat', 'webhook', 'flow', 'eval'));
create domain agent_execution_status as text
  check (value in ('pending', 'running', 'waiting', 'completed', 'failed', 'timeout', 'cancelled'));
create domain agent_result_type as text check (value in ('success', 'failure', 'timeout', 'cancelled'));
create domain agent_wait_kind as text
  check (value in ('response', 'agent', 'document', 'signature', 'test', 'event', 'delay', 'approval', 'lane'));
create domain agent_queue as text check (value in ('background', 'interactive'));
create domain agent_priority as smallint check (value between 1 and 4);
create domain agent_on_lost as text check (value in ('resume', 'fail', 'hand_on'));
create domain agent_positive as int check (value > 0);
create domain agent_seconds as int check (value >= 0);
comment on domain agent_surface is
  'The origin of a run: a schedule, an admin, a visitor, another system, or another run.';
comment on domain agent_execution_status is
  'Pending, running and waiting are open; completed, failed, timeout and cancelled are final.';
comment on domain agent_result_type is 'How an execution ended, in one word; null before.';
comment on domain agent_wait_kind is 'The kinds of wait of an execution.';
comment on domain agent_queue is 'Interactive is for work that a person waits for.';
comment on domain agent_priority is '1 is first, 4 is last.';
comment on domain agent_on_lost is
  'The effect of a lost worker on a run: it is resumed, it fails, or another worker may lock it.';
comment on domain agent_positive is 'A number from 1 on.';
comment on domain agent_seconds is 'A duration in whole seconds, from 0 on.';

-- Code

-- In SQL, so that the planner expands it in place. Of the 60 bits of time the last 12 are a fraction of a millisecond.
create or replace function lanekeeper.agent_uuid7(p_at timestamptz default clock_timestamp()) returns uuid
language sql volatile parallel safe as $$
  select (overlay(lpad(to_hex(floor(extract(epoch from p_at) * 4096000)::bigint), 15, '0') placing '7' from 13 for 0)
          || right(replace(gen_random_uuid()::text, '-', ''), 16))::uuid
$$;
comment on function lanekeeper.agent_uuid7 is 'A time-ordered uuid (version 7) with sub-millisecond order.';

-- The epoch of a timestamptz is stable, that of an interval immutable. A stable body would not be inlined.
create or replace function lanekeeper.agent_uuid7_floor(p_at timestamptz) returns uuid
language sql immutable parallel safe as $$
  select (encode(substring(
            int8send(floor(extract(epoch from p_at - timestamptz '1970-01-01 00:00:00+00') * 1000)::bigint)
            from 3 for 6), 'hex')
          || '70008000000000000000')::uuid
$$;
comment on function lanekeeper.agent_uuid7_floor is
  'The smallest uuid that agent_uuid7 makes at or after a millisecond: turns a time into a bound on ids.';

create or replace function lanekeeper.agent_actor() returns jsonb language sql stable parallel safe as $$
  select coalesce(case when pg_has_role(session_user, current_user, 'member')
                         then nullif(current_setting('lanekeeper.actor', true), '') end, '{"via": "sql"}')::jsonb
$$;
comment on function lanekeeper.agent_actor is
  'The actor of this transaction, as activity.SetActor set it: by, key_id, via and message. Default: {"via": "sql"}, '
  'also for a session of agent_client, which could set any.';

create or replace function lanekeeper.agent_decider(p_by text, p_via text, p_token_id text, p_message text) returns text
language sql immutable parallel safe as $$
  select left(p_by, 100) || case when coalesce(p_via, '') <> '' then ' via ' || left(p_via, 40) else '' end
         || case when coalesce(p_token_id, '') <> '' then ' with token ' || left(p_token_id, 60) else '' end
         || case when coalesce(p_message, '') <> '' then ', message ' || left(p_message, 120) else '' end
$$;
comment on function lanekeeper.agent_decider is 'The author of a decision, for people: ana via slack, message 17.4.';

create or replace function lanekeeper.agent_trace_id(p_prefix text, p_bits bytea default
  substring(int8send((extract(epoch from clock_timestamp()) * 1000)::bigint) from 3 for 6)
  || substring(uuid_send(gen_random_uuid()) from 1 for 5) || substring(uuid_send(gen_random_uuid()) from 1 for 5))
returns text language sql volatile parallel safe as $$
  select p_prefix || '_' || string_agg(
           substr('0123456789ABCDEFGHJKMNPQRSTVWXYZ', substring(b'00' || b.bits from n for 5)::bit(5)::int + 1, 1), ''
     order by n)
    from (select ('x' || encode(p_bits, 'hex'))::bit(128) as bits) b, generate_series(1, 126, 5) n
$$;
comment on function lanekeeper.agent_trace_id is 'A trace id, prefix and ULID: a new one, or that of 16 bytes.';

create or replace function lanekeeper.agent_uuid(p_text text) returns uuid language sql immutable as $$
  select case when p_text ~ '^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}$'
                then p_text::uuid end
$$;
comment on function lanekeeper.agent_uuid is 'The text as a UUID. Null where it is none: no text breaks a statement.';

create or replace function lanekeeper.agent_tokens(p_usage jsonb, p_kind text) returns bigint
language sql immutable parallel safe as $$
  select case when jsonb_typeof(p_usage -> p_kind) = 'number'
                then least(greatest((p_usage ->> p_kind)::numeric, 0), 1e12)::bigint
              else 0 end
$$;
comment on function lanekeeper.agent_tokens is
  'A count of agent_activity.token_usage. 0 if it is not a number, so no row breaks a listing.';

-- In plpgsql, because PostgreSQL keeps its plan. In SQL it would be planned for each statement that calls it.
create or replace function lanekeeper.agent_words(p_from timestamptz, p_to timestamptz) returns text
language plpgsql immutable strict as $$
declare
  s constant numeric := case when isfinite(p_from) and isfinite(p_to) then extract(epoch from p_to - p_from) end;
begin
  return case when s is null then 'an unknown time' when s < 0.0005 then '0 ms' when s < 1 then round(s * 1000) || ' ms'
              when s < 60 then round(s, 1) || ' s' when s < 3600 then floor(s / 60) || ' min ' || floor(s % 60) || ' s'
              when s < 86400 then floor(s / 3600) || ' h ' || floor(s % 3600 / 60) || ' min'
              else floor(s / 86400) || ' d ' || floor(s % 86400 / 3600) || ' h' end;
end $$;
comment on function lanekeeper.agent_words is
  'The time between two moments as people write it: 250 ms, 3.2 s, 4 min 10 s, 2 h 5 min, 3 d 4 h.';

