-- What the agent can do (skills), does on its own (automations, objectives), remembers, and asks leave for.

create table agent_skills (
  id              uuid primary key default agent_uuid7(),
  name            text not null unique check (name ~ '^[a-zA-Z0-9_-]{1,64}$'),
  description     text not null default '',
  tool_definition jsonb not null,              -- {"name", "description", "parameters": JSON Schema}
  handler         text not null check (handler ~ '^(builtin|http|mcp|sql|flow):'),
  config          jsonb not null default '{}', -- of the handler: sql text, method, headers, limits
  scope           text not null default 'internal' check (scope in ('internal', 'external', 'both')),
  trust           text not null default 'auto' check (trust in ('auto', 'notify', 'approve')),
  idempotent      boolean not null default false,
  timeout_ms      int not null default 30000 check (timeout_ms > 0),
  enabled         boolean not null default true,
  disabled_reason text not null default '',
  disabled_by     text not null default '' check (enabled = (disabled_by = '')),
  disabled_at     timestamptz,
  enabled_at      timestamptz not null default 'epoch',   -- put back into service; failures before it do not count
  trial_at        timestamptz,                 -- the one half-open try after the cool-down
  evidence        jsonb not null default '{}',
  revision        int not null default 1,
  source          text not null default '',    -- 'workspace', 'builtin'
  created_at      timestamptz not null default clock_timestamp(),
  updated_at      timestamptz not null default clock_timestamp()
);

create table agent_automations (
  id              uuid primary key default agent_uuid7(),
  name            text not null unique check (name <> ''),
  description     text not null default '',
  trigger         text not null default 'cron' check (trigger in ('cron', 'event', 'signal')),
  cron            text not null default '',
  timezone        text not null default 'UTC',
  event           text not null default '',
  condition       text not null default '',     -- over an event's payload and the counters; empty: always
  signal          text not null default '',     -- over the counters; fires when it becomes true
  armed           boolean not null default true, -- the signal was false since it last fired
  skill_name      text not null default '',     -- a skill with arguments, or
  arguments       jsonb not null default '{}',
  prompt          text not null default '',     -- a goal for the reasoning loop
  max_attempts    int not null default 3 check (max_attempts > 0),
  enabled         boolean not null default true,
  disabled_reason text not null default '',
  disabled_by     text not null default '' check (enabled = (disabled_by = '')),
  disabled_at     timestamptz,
  paused_for      text not null default '',     -- the skill for which self-heal paused it
  proposed_by     text not null default '',     -- the agent; empty for what people declared
  decided_by      text not null default '',     -- who accepted or refused the proposal
  revision        int not null default 1,
  next_run_at     timestamptz,
  last_run_at     timestamptz,
  last_trace_id   text not null default '',
  source          text not null default '',
  created_at      timestamptz not null default clock_timestamp(),
  updated_at      timestamptz not null default clock_timestamp(),
  check ((skill_name <> '') <> (prompt <> '')),
  check (trigger <> 'event' or event <> ''),
  check ((trigger = 'signal') = (signal <> '')),
  -- What the agent proposed is a proposal until somebody has decided, whoever writes.
  constraint agent_automations_decided check (proposed_by = '' or disabled_by = 'proposal' or decided_by <> '')
);
create index agent_automations_due on agent_automations (next_run_at) where enabled;
create index agent_automations_event on agent_automations (event) where enabled and trigger = 'event';
create index agent_automations_skill on agent_automations (skill_name);

-- One row per run. For a schedule its unique key is the claim that lets a time happen once; for an event the
-- row is there as soon as the event is, and to claim it is to set its status.
create table agent_automation_runs (
  id            uuid primary key default agent_uuid7(),
  automation_id uuid not null references agent_automations (id) on delete cascade,
  cause         text not null default 'cron' check (cause in ('cron', 'event', 'signal', 'manual')),
  scheduled_for timestamptz not null,
  event_id      uuid,
  payload       jsonb not null default '{}',   -- what caused it: {"event", "key", "data"}, or a signal's counters
  status        text not null default 'claimed'
                check (status in ('due', 'claimed', 'success', 'error', 'dead', 'skipped')),
  attempt       int not null default 1,
  retry_at      timestamptz,
  execution_id  uuid,
  trace_id      text not null default '',
  error_message text,
  output        jsonb,
  created_at    timestamptz not null default clock_timestamp(),
  claimed_at    timestamptz not null default clock_timestamp(),   -- of the last attempt
  finished_at   timestamptz,
  check ((cause = 'event') = (event_id is not null)),
  unique (automation_id, event_id)
);
create unique index agent_automation_runs_times on agent_automation_runs (automation_id, scheduled_for) where cause = 'cron';
create index agent_automation_runs_due on agent_automation_runs (id) where status = 'due';
create index agent_automation_runs_claimed on agent_automation_runs (execution_id) where status = 'claimed';
create index agent_automation_runs_retry on agent_automation_runs (retry_at) where status = 'error';
create index agent_automation_runs_dead on agent_automation_runs (id) where status = 'dead';

create function agent_events_start_automations() returns trigger
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
   order by a.id
  on conflict (automation_id, event_id) do nothing;
  get diagnostics n = row_count;
  if n > 0 then
    perform pg_notify('agent_automations', '');
  end if;
  return null;
end $$;
comment on function agent_events_start_automations is
  'An event makes a run due for each enabled automation that waits for it, in the event''s own transaction, whoever '
  'raised it.';
create trigger agent_events_start_automations after insert on agent_events
  for each row execute function agent_events_start_automations();

create function raise_agent_event(p_event text, p_key text, p_data jsonb, p_id text, p_trace_id text)
returns table (event_id uuid, execution_id uuid)
language plpgsql volatile as $$
#variable_conflict use_column
begin
  if p_trace_id <> '' and p_trace_id !~ '^(hb|op|ch|wh|fl)_[0-9A-HJKMNP-TV-Z]{26}$' then
    raise exception '% is not a trace id', quote_literal(p_trace_id) using errcode = '22023';
  end if;
  perform set_config('lanekeeper.trace_id', coalesce(p_trace_id, ''), true);   -- for this transaction; the trigger reads it
  if exists (select from unnest(array['response', 'agent', 'document', 'signature', 'test', 'event', 'approval']) k
              where agent_wait_event(k) = p_event) then
    return query select d.event_id, d.execution_id from deliver_agent_event(p_event, p_key, p_data, p_id) d;
  else
    return query
      insert into agent_events as v (event, key, data, external_id) values (p_event, p_key, coalesce(p_data, '{}'), p_id)
      on conflict (external_id) do nothing returning v.id, null::uuid;
  end if;
  perform set_config('lanekeeper.trace_id', '', true);
end $$;
comment on function raise_agent_event is
  'Record an event of any name on behalf of a trace (empty: of none). Automations that it starts belong to that trace; an '
  'event that executions wait for resumes them, as with deliver_agent_event. The same p_id twice counts once.';

create table agent_objectives (
  id               uuid primary key default agent_uuid7(),
  name             text not null unique check (name <> ''),
  goal             text not null,
  success_criteria text not null default '',
  status           text not null default 'active'
                   check (status in ('proposed', 'active', 'paused', 'completed', 'failed', 'rejected')),
  priority         int not null default 2,
  review_every     interval check (review_every > interval '0'),   -- null: done when its steps are
  due_at           timestamptz not null default clock_timestamp(),
  round            int not null default 1,                          -- of a recurring objective
  note             text not null default '',                        -- the agent's last word on its progress
  proposed_by      text not null default '',                        -- the agent; empty for what people declared
  proposed_trace   text not null default '',
  decided_by       text not null default '',                        -- who accepted or rejected the proposal
  decided_reason   text not null default '',
  decided_at       timestamptz,
  revision         int not null default 1,
  last_trace_id    text not null default '',
  source           text not null default '',
  created_at       timestamptz not null default clock_timestamp(),
  updated_at       timestamptz not null default clock_timestamp(),
  -- What the agent proposed is a proposal until somebody has decided, whoever writes.
  constraint agent_objectives_decided check (proposed_by = '' or status = 'proposed' or decided_by <> ''),
  check (status not in ('proposed', 'rejected') or proposed_by <> '')
);
create index agent_objectives_due on agent_objectives (due_at) where status = 'active';
create index agent_objectives_proposed on agent_objectives (id) where status = 'proposed';

create table agent_objective_steps (
  id           uuid primary key default agent_uuid7(),
  objective_id uuid not null references agent_objectives (id) on delete cascade,
  position     int not null,
  title        text not null check (title <> ''),
  status       text not null default 'pending' check (status in ('pending', 'done', 'failed', 'skipped')),
  result       text not null default '',
  attempts     int not null default 0,
  trace_id     text not null default '',
  started_at   timestamptz not null default clock_timestamp(),      -- of this round; nothing older is evidence
  created_at   timestamptz not null default clock_timestamp(),
  updated_at   timestamptz not null default clock_timestamp(),
  unique (objective_id, position)
);

-- Why a step counts as done: a successful action of the agent, which proves one step only, or an admin's word.
create table agent_objective_evidence (
  id          uuid primary key default agent_uuid7(),
  step_id     uuid not null references agent_objective_steps (id) on delete cascade,
  activity_id uuid unique,
  skill_name  text not null default '',
  trace_id    text not null default '',
  given_by    text not null default '',
  reason      text not null default '',
  created_at  timestamptz not null default clock_timestamp(),
  check ((activity_id is null) = (given_by <> '')),
  check ((given_by = '') = (reason = ''))
);
create index agent_objective_evidence_step on agent_objective_evidence (step_id, created_at);

create function is_agent_evidence(p_kind text, p_status text, p_surface text, p_skill text) returns boolean
language sql immutable as $$
  select p_kind = 'call' and p_status = 'success' and p_surface <> 'chat'
         and p_skill !~ '^(objective_|automation_|skill_|complete_step$|fail_step$|add_steps$|objectives_list$|recent_activity$)'
$$;
comment on function is_agent_evidence is
  'Whether an activity shows that the agent acted: a successful call. What awaits approval, was skipped, failed or has an '
  'unknown end does not count, nor does the agent''s own bookkeeping, nor what a visitor had it do.';

create function agent_objective_evidence_check() returns trigger
language plpgsql volatile as $$
declare
  a record;
begin
  if tg_op = 'DELETE' then
    if exists (select from agent_objective_steps s where s.id = old.step_id and s.status = 'done') then
      raise exception 'the evidence of a step that is done stays' using errcode = 'LK010';
    end if;
    return old;
  elsif tg_op = 'UPDATE' then
    raise exception 'evidence is never changed' using errcode = 'LK010';
  elsif new.activity_id is null then
    return new;
  end if;
  select x.skill_name, x.trace_id, is_agent_evidence(x.kind, x.status, x.surface, x.skill_name) as counts,
         x.created_at >= s.started_at as fresh
    into a
    from agent_activity x, agent_objective_steps s where x.id = new.activity_id and s.id = new.step_id;
  if not found or not a.counts or not a.fresh then
    raise exception 'activity % is no evidence: it must be a successful call made after the step began', new.activity_id
      using errcode = 'LK010';
  end if;
  new.skill_name := a.skill_name;
  new.trace_id := a.trace_id;
  return new;
end $$;
create trigger agent_objective_evidence_check before insert or update or delete on agent_objective_evidence
  for each row execute function agent_objective_evidence_check();

create function agent_objective_steps_check() returns trigger
language plpgsql volatile as $$
begin
  if tg_op = 'INSERT' then
    new.started_at := clock_timestamp();
  elsif new.status = 'pending' and old.status <> 'pending' then
    new.started_at := clock_timestamp();
  else
    new.started_at := old.started_at;
  end if;
  if new.status = 'done' and (tg_op = 'INSERT' or old.status <> 'done') and not exists (
       select from agent_objective_evidence e
        where e.step_id = new.id and e.created_at >= new.started_at and (e.given_by <> '' or e.trace_id = new.trace_id)) then
    raise exception 'step % is not done: nothing shows it', quote_literal(new.title) using errcode = 'LK010';
  end if;
  return new;
end $$;
comment on function agent_objective_steps_check is
  'A step is done only with evidence of this round: an activity of the trace that reports it, or an admin''s word (LK010).';
create trigger agent_objective_steps_check before insert or update on agent_objective_steps
  for each row execute function agent_objective_steps_check();

create function agent_revise() returns trigger
language plpgsql volatile as $$
begin
  new.revision := old.revision + 1;
  return new;
end $$;
create trigger agent_objectives_revise before update on agent_objectives
  for each row execute function agent_revise();
create trigger agent_automations_revise before update on agent_automations
  for each row execute function agent_revise();

create view agent_objective_progress as
  select o.id, o.name, o.status, o.round,
         count(*) filter (where s.status in ('pending', 'done', 'failed')) as total,
         count(*) filter (where s.status = 'done') as done,
         count(*) filter (where s.status = 'failed') as failed,
         count(*) filter (where s.status = 'pending') as pending,
         coalesce(round((count(*) filter (where s.status = 'done'))::numeric
                        / nullif(count(*) filter (where s.status in ('pending', 'done', 'failed')), 0), 3), 0) as progress
    from agent_objectives o left join agent_objective_steps s on s.objective_id = o.id
   group by o.id;

create table agent_memory (
  id         uuid primary key default agent_uuid7(),
  category   text not null default 'general' check (category <> '' and octet_length(category) <= 255),
  key        text not null check (key <> '' and octet_length(key) <= 255),
  value      jsonb not null check (octet_length(value::text) <= 131072),
  revision   int not null default 1,
  trace_id   text not null default '',
  expires_at timestamptz,
  created_at timestamptz not null default clock_timestamp(),
  updated_at timestamptz not null default clock_timestamp(),
  search     tsvector generated always as
             (setweight(to_tsvector('simple', key), 'A') || to_tsvector('simple', value)) stored,
  unique (category, key)
);
create index agent_memory_search on agent_memory using gin (search);
create index agent_memory_expiry on agent_memory (expires_at) where expires_at is not null;
create index agent_memory_recent on agent_memory (updated_at);

-- A single-use grant, bound to one skill revision and the hash of one set of arguments. A parked one is also
-- bound to the execution that waits for it, and void when that ends; any other may be used by whoever
-- follows it through.
create table agent_approvals (
  id             uuid primary key default agent_uuid7(),
  trace_id       text not null,
  execution_id   uuid,
  activity_id    uuid,
  step           text not null default '',
  parked         boolean not null default false,
  skill_name     text not null,
  skill_revision int not null,
  arguments      jsonb not null,
  arguments_hash text not null,
  status         text not null default 'pending' check (status in ('pending', 'approved', 'rejected', 'expired', 'consumed')),
  decided_by     text not null default '',
  reason         text not null default '',
  decided_at     timestamptz,
  consumed_at    timestamptz,
  consumed_for   text not null default '',     -- execution and step
  expires_at     timestamptz not null,
  created_at     timestamptz not null default clock_timestamp(),
  constraint agent_approvals_bound check (not parked or (execution_id is not null and step <> ''))
);
create index agent_approvals_status on agent_approvals (status, id);
create index agent_approvals_trace on agent_approvals (trace_id, id);
create index agent_approvals_waiting on agent_approvals (execution_id) where parked and status in ('pending', 'approved');
create unique index agent_approvals_open on agent_approvals (skill_name, arguments_hash)
  where status in ('pending', 'approved') and not parked;
create unique index agent_approvals_step on agent_approvals (execution_id, step) where parked;

create function agent_approvals_fixed() returns trigger language plpgsql as $$
begin
  raise exception 'what approval % is about cannot be changed', old.id using errcode = 'LK003',
    hint = 'Other arguments are another call, which asks anew.';
end $$;
create trigger agent_approvals_fixed
  before update of trace_id, execution_id, step, parked, skill_name, skill_revision, arguments, arguments_hash on agent_approvals
  for each row when ((old.trace_id, old.execution_id, old.step, old.parked, old.skill_name, old.skill_revision, old.arguments, old.arguments_hash)
                     is distinct from
                     (new.trace_id, new.execution_id, new.step, new.parked, new.skill_name, new.skill_revision, new.arguments, new.arguments_hash))
  execute function agent_approvals_fixed();

create function decide_agent_approval(p_id uuid, p_approve boolean, p_by text, p_reason text) returns setof agent_approvals
language plpgsql volatile as $$
declare
  a agent_approvals;
begin
  update agent_approvals x
     set status = case when p_approve then 'approved' else 'rejected' end, decided_by = p_by,
         reason = coalesce(p_reason, ''), decided_at = clock_timestamp()
   where x.id = p_id and x.status = 'pending' and x.expires_at > clock_timestamp()
     and (not p_approve or exists (
            select from agent_skills s where s.name = x.skill_name and s.revision = x.skill_revision))
  returning x.* into a;
  if not found then
    return;
  end if;
  if a.parked then
    perform deliver_agent_event('APPROVAL_DECIDED', a.id::text,
      jsonb_build_object('status', a.status, 'by', a.decided_by, 'reason', a.reason), 'approval ' || a.id);
    perform pg_notify('agent_wake', a.execution_id::text);
  end if;
  return next a;
end $$;
comment on function decide_agent_approval is
  'Approve or reject, once: the row when this call decided, no row when it was decided, expired or void before. Who '
  'waits for it goes on.';

create function void_agent_approvals(p_execution_id uuid) returns void language sql volatile as $$
  update agent_approvals a set status = 'expired', reason = 'its execution has ended'
   where a.execution_id = p_execution_id and a.parked and a.status in ('pending', 'approved')
$$;

create function use_agent_approval(p_id uuid, p_execution_id uuid, p_step text) returns void
language plpgsql volatile as $$
begin
  update agent_approvals a
     set status = 'consumed', consumed_at = clock_timestamp(), consumed_for = p_execution_id || ' ' || p_step
   where a.id = p_id and (not a.parked or a.execution_id = p_execution_id)
     and ((a.status = 'approved' and a.expires_at > clock_timestamp()
           and exists (select from agent_skills s where s.name = a.skill_name and s.revision = a.skill_revision))
          or (a.status = 'consumed' and a.consumed_for = p_execution_id || ' ' || p_step));
  if not found then
    raise exception 'approval % is not a live grant: used, rejected, expired, or its skill has changed', p_id
      using errcode = 'LK003';
  end if;
end $$;
comment on function use_agent_approval is
  'Use a grant for one step of one execution, in the transaction that writes the call''s intent; LK003 when it is no '
  'live grant. The same step may ask again after a crash.';
