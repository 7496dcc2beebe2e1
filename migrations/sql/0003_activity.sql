-- The activity log: one row per action. It is partitioned by its time-ordered id, so a range of time is
-- a range of ids, and retention drops a partition. Calls that are under way are also listed in
-- agent_activity_open: an index on status = 'running' would make every finishing update a cold one.

create table agent_activity (
  id              uuid not null default agent_uuid7(),
  trace_id        text not null check (trace_id <> ''),
  conversation_id text generated always as (trace_id) stored,
  execution_id    uuid,
  parent_id       uuid,
  claim           bigint,
  step            text not null default '',
  kind            text not null default 'call' check (kind in ('call', 'model', 'phase', 'note')),
  agent           text not null default 'flowpilot',
  surface         text not null default '',
  skill_name      text not null,
  skill_id        uuid,
  purpose         text not null default '',
  status          text not null default 'success'
                  check (status in ('running', 'success', 'error', 'pending_approval', 'skipped', 'unknown')),
  input           jsonb not null default '{}',
  output          jsonb,
  error_message   text,
  error_class     text not null default '',
  model           text not null default '',
  token_usage     jsonb not null default '{}',
  cost_usd        numeric(14, 6) not null default 0,
  duration_ms     bigint,
  idempotency_key text not null default '',
  thread_id       text,
  lane            text not null default '',
  created_at      timestamptz not null default clock_timestamp(),
  finished_at     timestamptz,
  primary key (id)
) partition by range (id);
create index agent_activity_trace on agent_activity (trace_id, created_at);
create index agent_activity_conversation on agent_activity (conversation_id, created_at);
create index agent_activity_execution on agent_activity (execution_id, id);
create index agent_activity_skill on agent_activity (skill_name, id);
create index agent_activity_spend on agent_activity (((created_at at time zone 'UTC')::date)) where kind = 'model';
comment on column agent_activity.conversation_id is 'The trace id under its older name.';
comment on column agent_activity.purpose is 'On behalf of what a model was called: a phase, a skill, a turn. Spend is counted there.';
comment on column agent_activity.token_usage is '{prompt_tokens, completion_tokens, total_tokens}; on model calls only, so that sums count once.';

create table agent_activity_open (
  activity_id  uuid primary key,
  execution_id uuid,
  claim        bigint,
  step         text not null default '',
  kind         text not null,
  started_at   timestamptz not null default clock_timestamp()
);
create unique index agent_activity_open_step on agent_activity_open (execution_id, claim, step) where step <> '';
create index agent_activity_open_execution on agent_activity_open (execution_id);

create function ensure_agent_activity_partitions(p_months int default 3) returns int
language plpgsql volatile as $$
declare
  month timestamptz := date_trunc('month', clock_timestamp() at time zone 'UTC') at time zone 'UTC' - interval '1 month';
  name text;
  n int := 0;
begin
  perform pg_advisory_xact_lock(hashtextextended('activity partitions', 0));
  for i in 0 .. p_months + 1 loop
    name := 'agent_activity_' || to_char(month at time zone 'UTC', 'YYYY_MM');
    if to_regclass(name) is null then
      -- Made beside the table and then attached: `partition of` would wait for every reader of the log,
      -- and hold up every writer meanwhile.
      execute format('create table %I (like agent_activity including all) with (fillfactor = 80)', name);
      execute format('alter table agent_activity attach partition %I for values from (%L) to (%L)', name,
        agent_uuid7_floor(month), agent_uuid7_floor((month at time zone 'UTC' + interval '1 month') at time zone 'UTC'));
      n := n + 1;
    end if;
    month := (month at time zone 'UTC' + interval '1 month') at time zone 'UTC';
  end loop;
  return n;
end $$;
comment on function ensure_agent_activity_partitions is
  'Make the monthly partitions from last month to p_months ahead. Safe to call at any time, by many.';
select ensure_agent_activity_partitions();

create trigger agent_activity_fence before insert on agent_activity
  for each row when (new.claim is not null)
  execute function agent_checkpoints_fence();

create function recover_agent_activity(p_execution_id uuid, p_claim bigint) returns void
language plpgsql volatile as $$
begin
  with gone as (
    delete from agent_activity_open o
     where o.execution_id = p_execution_id and o.kind in ('call', 'model') and o.claim < p_claim
    returning o.activity_id)
  update agent_activity a
     set status = 'unknown', finished_at = clock_timestamp(), error_class = 'interrupted',
         error_message = 'the process was lost during the call; nobody knows whether it took effect',
         duration_ms = (extract(epoch from clock_timestamp() - a.created_at) * 1000)::bigint
    from gone where a.id = gone.activity_id and a.status = 'running';
  update agent_activity_open o set claim = p_claim where o.execution_id = p_execution_id and o.claim < p_claim;
end $$;
comment on function recover_agent_activity is
  'Close the calls that an earlier claim left in flight as unknown. Phases stay open: the next claim goes on with them.';

create function close_agent_activity(p_execution_id uuid, p_ended text) returns void
language plpgsql volatile as $$
begin
  with gone as (
    delete from agent_activity_open o where o.execution_id = p_execution_id returning o.activity_id, o.kind)
  update agent_activity a
     set status = case when gone.kind = 'phase' then 'error' else 'unknown' end,
         finished_at = clock_timestamp(), error_class = p_ended,
         error_message = case when gone.kind = 'phase' then 'the execution ended ' || p_ended || ' in this phase'
                              else 'the execution ended ' || p_ended || ' during the call; nobody knows whether it took effect' end,
         duration_ms = (extract(epoch from clock_timestamp() - a.created_at) * 1000)::bigint
    from gone where a.id = gone.activity_id and a.status = 'running';
end $$;

create function break_agent_lock(p_lane text, p_reason text) returns boolean
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
  perform pg_notify('agent_lanes', p_lane);
  return true;
end $$;
comment on function break_agent_lock is
  'An admin''s force-release: the holder''s token is void, the break is an activity under the holder''s trace. False when '
  'nobody holds the lane.';
