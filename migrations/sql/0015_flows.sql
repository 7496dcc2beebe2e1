-- Flows: conversations and processes that are written down as data. Every version that was applied is kept, because an
-- execution finishes on the one it began with.

create table agent_flows (
  name       text not null check (name ~ '^[a-zA-Z][a-zA-Z0-9_-]{0,63}$'),
  version    int not null check (version > 0),
  digest     text not null,                                -- of the definition
  definition jsonb not null,
  source     text not null default 'workspace',
  current    boolean not null default true,                -- what a new execution begins with; none: the flow was removed
  created_at timestamptz not null default clock_timestamp(),
  primary key (name, version)
);
create unique index agent_flows_current on agent_flows (name) where current;
alter table agent_executions add column flow_version int;
comment on column agent_executions.flow_version is 'The version of a flow of agent_flows that the execution runs; set when it begins.';

alter table agent_automations add column flow text not null default '';
comment on column agent_automations.flow is 'The flow that a run starts, with what caused it and the arguments as input.';
do $$
declare
  one_action text := (select c.conname from pg_constraint c where c.conrelid = 'agent_automations'::regclass
                         and pg_get_constraintdef(c.oid) like '%skill_name%' and c.contype = 'c');
begin
  execute format('alter table agent_automations drop constraint %I', one_action);
end $$;
alter table agent_automations add constraint agent_automations_action
  check ((skill_name <> '')::int + (prompt <> '')::int + (flow <> '')::int = 1);

create function agent_from_automation(p_id uuid) returns boolean language sql stable as $$
  with recursive line as (
    select x.id, x.parent_id, x.dedupe_key from agent_executions x where x.id = p_id
    union
    select x.id, x.parent_id, x.dedupe_key from line l join agent_executions x on x.id = l.parent_id)
  select exists (select from line l where l.dedupe_key like 'automation run %')
$$;
comment on function agent_from_automation is 'Whether an execution, or one above it, was started by an automation.';

create or replace function agent_events_start_automations() returns trigger
language plpgsql volatile as $$
declare
  -- EVENT_COMPLETED says by its key what happened, so that is a name too.
  names text[] := case when new.event = 'EVENT_COMPLETED' then array[new.event, new.key] else array[new.event] end;
  emitter record;
  n int;
begin
  if not exists (select from agent_automations a where a.enabled and a.trigger = 'event' and a.event = any(names)) then
    return null;
  end if;
  select x.flow, x.trace_id into emitter from agent_executions x where x.id = new.execution_id;
  if emitter.flow = 'automation' then
    return null;                             -- else the end of a run would cause the next one, without end
  end if;
  insert into agent_automation_runs (automation_id, cause, scheduled_for, event_id, payload, status, trace_id)
  select a.id, 'event', new.created_at, new.id,
         jsonb_build_object('event', new.event, 'key', new.key, 'data', new.data), 'due',
         coalesce(nullif(current_setting('lanekeeper.trace_id', true), ''), emitter.trace_id, '')
    from agent_automations a
   where a.enabled and a.trigger = 'event' and a.event = any(names)
     -- And the end of a flow that an automation started would start the next flow.
     and (a.flow = '' or new.execution_id is null or not agent_from_automation(new.execution_id))
   order by a.id
  on conflict (automation_id, event_id) do nothing;
  get diagnostics n = row_count;
  if n > 0 then
    perform pg_notify('agent_automations', '');
  end if;
  return null;
end $$;
