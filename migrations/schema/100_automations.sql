-- Automations: work that a clock, an event or a signal starts.
--
-- Each run is a row before it begins. The run of a scheduled time or of an event is unique, so it starts once; failed
-- attempts are retried.

create table agent_automations (
  id uuid default lanekeeper.agent_uuid7() primary key, name text not null unique check (name <> ''),
  description text not null default '',
  trigger text not null default 'cron' check (trigger in ('cron', 'event', 'signal')), cron text not null default '',
  timezone text not null default 'UTC', event text not null default '', condition text not null default '',
  signal text not null default '', signal_armed boolean not null default true, skill_name text not null default '',
  arguments jsonb not null default '{}', prompt text not null default '',
  max_attempts int not null default 3 check (max_attempts > 0), enabled boolean not null default true,
  disabled_reason text not null default '', disabled_by text not null default '', disabled_at timestamptz,
  paused_for text not null default '', proposed_by text not null default '', decided_by text not null default '',
  revision int not null default 1, next_run_at timestamptz, last_run_at timestamptz,
  last_trace_id text not null default '', source text not null default '',
  created_at timestamptz not null default clock_timestamp(),
  updated_at timestamptz not null default clock_timestamp(), flow text not null default '',
  agent text not null default '',
  constraint agent_automations_action check ((skill_name <> '')::int + (prompt <> '')::int + (flow <> '')::int = 1),
  constraint agent_automations_check check (enabled = (disabled_by = '')),
  constraint agent_automations_check2 check (trigger <> 'event' or event <> ''),
  constraint agent_automations_check3 check ((trigger = 'signal') = (signal <> '')),
  constraint agent_automations_decided check (proposed_by = '' or disabled_by = 'proposal' or decided_by <> '')
);
create index agent_automations_due on agent_automations (next_run_at) where enabled;
comment on index agent_automations_due is 'Finds due automations.';
create index agent_automations_event on agent_automations (event) where enabled and trigger = 'event';
comment on index agent_automations_event is 'Finds the automations that an event starts.';
create index agent_automations_skill on agent_automations (skill_name);
comment on index agent_automations_skill is 'Finds the automations of a skill, to pause them with it.';
comment on table agent_automations is 'Automations. A clock, an event or a signal starts a skill, a prompt or a flow.';
comment on column agent_automations.trigger is
  'cron: a clock. event: an event. signal: an expression over the counters that becomes true.';
comment on column agent_automations.cron is 'The schedule, for trigger cron.';
comment on column agent_automations.timezone is 'The time zone of the schedule.';
comment on column agent_automations.event is 'The kind of event, for trigger event.';
comment on column agent_automations.condition is 'An expression over the event and the counters. Empty: always.';
comment on column agent_automations.signal is 'An expression over the counters. It fires when it becomes true.';
comment on column agent_automations.signal_armed is 'The signal has been false since it last fired.';
comment on column agent_automations.skill_name is 'The skill that a run calls, with arguments.';
comment on column agent_automations.arguments is 'The arguments of the skill or flow.';
comment on column agent_automations.prompt is 'The goal that a run gives to a model.';
comment on column agent_automations.max_attempts is
  'The number of failures after which a run is dead. It is dead earlier if a call may have acted.';
comment on column agent_automations.disabled_reason is 'Why it was disabled.';
comment on column agent_automations.disabled_by is 'The person or program that disabled it. Empty: it is enabled.';
comment on column agent_automations.disabled_at is 'When it was disabled.';
comment on column agent_automations.paused_for is 'The disabled skill that pauses it. Empty: it is not paused.';
comment on column agent_automations.proposed_by is 'The agent that proposed it. Empty: people declared it.';
comment on column agent_automations.decided_by is
  'The admin who accepted or rejected the proposal, or the source of the declaration that accepted it.';
comment on column agent_automations.next_run_at is 'When its schedule is due next.';
comment on column agent_automations.last_run_at is 'When it last ran.';
comment on column agent_automations.last_trace_id is 'The trace of the last run.';
comment on column agent_automations.source is 'Origin: workspace or agent.';
comment on column agent_automations.flow is 'The flow that a run starts. Its input is the cause and the arguments.';
comment on column agent_automations.agent is 'The agent that acts in its runs. Empty: the default agent.';

create table agent_automation_runs (
  id uuid default lanekeeper.agent_uuid7() primary key,
  automation_id uuid not null references agent_automations(id) on delete cascade,
  cause text not null default 'cron' check (cause in ('cron', 'event', 'signal', 'manual')),
  scheduled_for timestamptz not null, event_id uuid, payload jsonb not null default '{}',
  status text not null default 'claimed' check (status in ('due', 'claimed', 'success', 'error', 'dead', 'skipped')),
  attempt int not null default 1, retry_at timestamptz, execution_id uuid,
  trace_id text not null default '', error_message text, output jsonb,
  created_at timestamptz not null default clock_timestamp(),
  claimed_at timestamptz not null default clock_timestamp(), finished_at timestamptz,
  constraint agent_automation_runs_automation_id_event_id_key unique (automation_id, event_id),
  constraint agent_automation_runs_check check ((cause = 'event') = (event_id is not null))
);
create index agent_automation_runs_approval on agent_automation_runs ((output ->> 'approval_id'))
  where status = 'skipped' and output ? 'approval_id';
comment on index agent_automation_runs_approval is 'Finds the run of an approval.';
create index agent_automation_runs_claimed on agent_automation_runs (execution_id) where status = 'claimed';
comment on index agent_automation_runs_claimed is 'Finds the run of an execution.';
create index agent_automation_runs_dead on agent_automation_runs (id) where status = 'dead';
comment on index agent_automation_runs_dead is 'Lists dead runs.';
create index agent_automation_runs_due on agent_automation_runs (id) where status = 'due';
comment on index agent_automation_runs_due is 'Finds due runs.';
create index agent_automation_runs_given_up on agent_automation_runs (automation_id, id) where status = 'dead';
comment on index agent_automation_runs_given_up is 'Lists the dead runs of an automation.';
create index agent_automation_runs_history on agent_automation_runs (automation_id, id);
comment on index agent_automation_runs_history is 'Lists the runs of an automation.';
create index agent_automation_runs_retry on agent_automation_runs (retry_at) where status = 'error';
comment on index agent_automation_runs_retry is 'Finds failed runs that are due for a retry.';
create unique index agent_automation_runs_times on agent_automation_runs (automation_id, scheduled_for)
  where cause = 'cron';
comment on index agent_automation_runs_times is 'Allows one run for each time of a schedule.';
comment on table agent_automation_runs is
  'One row for each run. The unique row of a scheduled time is the claim of its run. The transaction of an event '
  'inserts a due run; a process claims it by setting status to claimed.';
comment on column agent_automation_runs.automation_id is 'The automation.';
comment on column agent_automation_runs.cause is 'The cause of the run. manual: a person.';
comment on column agent_automation_runs.scheduled_for is 'When the run was due.';
comment on column agent_automation_runs.event_id is 'The event, for cause event.';
comment on column agent_automation_runs.payload is 'The event {"event", "key", "data"}, or the counters of a signal.';
comment on column agent_automation_runs.status is
  'due: waits. claimed: runs. success: completed. error: will be retried. dead: no further attempt. skipped: did no '
  'work; output says why.';
comment on column agent_automation_runs.attempt is 'The number of the attempt.';
comment on column agent_automation_runs.retry_at is 'When it is retried.';
comment on column agent_automation_runs.output is 'The outcome.';
comment on column agent_automation_runs.claimed_at is 'When the last attempt began.';
comment on column agent_automation_runs.finished_at is 'When it ended.';

create table agent_schedules (
  name text primary key, flow text not null, surface text not null,
  cron text not null, timezone text not null, input jsonb not null default '{}',
  next_run_at timestamptz not null, last_run_at timestamptz,
  updated_at timestamptz not null default clock_timestamp(), agent text not null default ''
);
create index agent_schedules_due on agent_schedules (next_run_at);
comment on index agent_schedules_due is 'Finds due schedules.';
comment on table agent_schedules is 'Schedules that the program declares. Each starts a flow at its times.';
comment on column agent_schedules.flow is 'The flow that it starts.';
comment on column agent_schedules.surface is 'The surface of its executions.';
comment on column agent_schedules.cron is 'The schedule.';
comment on column agent_schedules.timezone is 'The time zone of the schedule.';
comment on column agent_schedules.input is 'The input of its executions.';
comment on column agent_schedules.next_run_at is 'When it is due next.';
comment on column agent_schedules.last_run_at is 'When it was last due.';
comment on column agent_schedules.agent is 'The agent of its executions. Empty: the default agent.';

-- Code

create or replace function lanekeeper.agent_events_start_automations() returns trigger language plpgsql as $$
declare
  e agent_events;
  names text[];
  source constant text := coalesce(nullif(current_setting('lanekeeper.raised_by', true), ''),
                                   'trace ' || nullif(current_setting('lanekeeper.trace_id', true), ''));
  emitter record;
  added int;
  n int := 0;
begin
  -- A completion event names its source in execution_id.
  if source is not null then
    insert into agent_links (cause, kind, effect)
    select source, 'raised', 'event ' || c.id from new_events c where c.execution_id is null on conflict do nothing;
  end if;
  if not exists (select from agent_automations a where a.enabled and a.trigger = 'event') then
    return null;
  end if;
  for e in select c.* from new_events c order by c.id loop
    -- The key of EVENT_COMPLETED names the event, so automations may use the key as a name.
    names := case when e.event = 'EVENT_COMPLETED' then array[e.event, e.key] else array[e.event] end;
    continue when not exists (select from agent_automations a
                               where a.enabled and a.trigger = 'event' and a.event = any (names));
    select x.flow, x.trace_id into emitter from agent_executions x where x.id = e.execution_id;
    -- Prevents a loop: the end of each run would start the next run.
    continue when emitter.flow = 'automation';
    with inserted as (
    insert into agent_automation_runs (automation_id, cause, scheduled_for, event_id, payload, status, trace_id)
    select a.id, 'event', e.created_at, e.id,
           jsonb_build_object('event', e.event, 'key', e.key, 'data', e.data), 'due',
           coalesce(nullif(current_setting('lanekeeper.trace_id', true), ''), emitter.trace_id, '')
      from agent_automations a
     where a.enabled and a.trigger = 'event' and a.event = any (names)
       -- Prevents a loop: the end of a flow that an automation started starts no flow.
       and (a.flow = '' or not exists (
              with recursive ancestors as (
                select x.id, x.parent_id, x.dedupe_key from agent_executions x where x.id = e.execution_id
                union
                select x.id, x.parent_id, x.dedupe_key from ancestors c join agent_executions x on x.id = c.parent_id)
              select from ancestors c where c.dedupe_key like 'automation run %'))
     order by a.id
    on conflict (automation_id, event_id) do nothing
    returning id)
    insert into agent_links (cause, kind, effect) select 'event ' || e.id, 'started', 'run ' || r.id from inserted r;
    get diagnostics added = row_count;
    n := n + added;
  end loop;
  if n > 0 then
    perform pg_notify('agent_automations', '');
  end if;
  return null;
end $$;
comment on function lanekeeper.agent_events_start_automations is
  'Insert a due run for each enabled automation of an event, in the transaction of the event. The end of a run, or of '
  'a flow that a run started, starts no run that could repeat it.';

-- Lock order: a skill's row before its automations' rows. An insert, or a change of skill_name, locks the skill: so it
-- sees the skill disabled, or the disabling sees the automation. A change of the skill first locks the rows of its
-- automations.

create or replace function lanekeeper.pause_agent_automations() returns trigger language plpgsql as $$
declare
  s agent_skills;
begin
  if tg_table_name = 'agent_skills' then
    perform from agent_automations a where a.skill_name = new.name order by a.id for update;
    -- The update fires the trigger of agent_automations, which recomputes enabled.
    update agent_automations a set skill_name = a.skill_name, updated_at = clock_timestamp()
     where a.skill_name = new.name and (a.paused_for = new.name or a.enabled and not new.enabled);
    if found and new.enabled then
      perform pg_notify('agent_automations', '');   -- due runs of these automations may start
    end if;
    return null;
  elsif not new.enabled and new.paused_for = '' then
    return new;
  end if;
  if new.skill_name <> '' and (tg_op = 'INSERT' or new.skill_name <> old.skill_name) then
    perform from agent_skills k where k.name = new.skill_name for share;
  end if;
  select k.* into s from agent_skills k where k.name = new.skill_name;
  if not s.enabled then
    new.enabled := false;
    new.disabled_by := s.disabled_by;
    new.disabled_reason := left(format('its skill %s is disabled: %s', new.skill_name, s.disabled_reason), 2000);
    new.disabled_at := clock_timestamp();
    new.paused_for := new.skill_name;
  elsif not new.enabled and (s.enabled or new.paused_for <> new.skill_name) then
    new.enabled := true;
    new.disabled_by := '';
    new.disabled_reason := '';
    new.disabled_at := null;
    new.paused_for := '';
  end if;
  return new;
end $$;
comment on function lanekeeper.pause_agent_automations is
  'Pause the automations of a disabled skill. Resume exactly those when the skill is enabled, or when they no longer '
  'call it. An automation that an admin disabled stays disabled.';

create or replace trigger agent_events_start_automations after insert on agent_events
  referencing new table as new_events for each statement execute function lanekeeper.agent_events_start_automations();

create or replace trigger agent_automations_revise before update on agent_automations for each row
  when ((to_jsonb(old) - '{signal_armed,next_run_at,last_run_at,last_trace_id,updated_at}'::text[])
        is distinct from (to_jsonb(new) - '{signal_armed,next_run_at,last_run_at,last_trace_id,updated_at}'::text[]))
  execute function lanekeeper.agent_revise();

create or replace trigger agent_skills_pause after insert or update of enabled, disabled_by on agent_skills
  for each row execute function lanekeeper.pause_agent_automations();

create or replace trigger agent_automations_pause before insert or update of enabled, skill_name on agent_automations
  for each row execute function lanekeeper.pause_agent_automations();
