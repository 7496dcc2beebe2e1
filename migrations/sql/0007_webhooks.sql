-- Webhooks, both ways. A delivery that came is a row before it is acknowledged, and its unique key is what makes it
-- handled once. What the agent tells others is an outbox: a row that is written in the transaction of what
-- it tells of, so nothing is told that did not happen, and nothing that happened is forgotten.
--
-- Secrets are not here. A row has references (${NAME} of the environment, file:/path), resolved when they are used.

create table agent_webhook_endpoints (
  id              uuid primary key default agent_uuid7(),
  name            text not null unique check (name ~ '^[a-z0-9][a-z0-9_-]{0,63}$'),
  description     text not null default '',
  scheme          text not null check (scheme in ('standard', 'github', 'stripe', 'hmac', 'bearer')),
  secrets         text[] not null check (cardinality(secrets) > 0),
  settings        jsonb not null default '{}',
  actions         jsonb not null check (jsonb_typeof(actions) = 'array'),
  enabled         boolean not null default true,
  disabled_reason text not null default '',
  disabled_by     text not null default '' check (enabled = (disabled_by = '')),
  disabled_at     timestamptz,
  source          text not null default '',
  created_at      timestamptz not null default clock_timestamp(),
  updated_at      timestamptz not null default clock_timestamp()
);

create table agent_webhook_deliveries (
  id              uuid primary key default agent_uuid7(),
  endpoint        text not null,
  delivery_id     text not null check (delivery_id <> '' and octet_length(delivery_id) <= 512),
  trace_id        text not null check (trace_id <> ''),
  last_trace_id   text not null,
  execution_id    uuid,
  status          text not null default 'received'
                  check (status in ('received', 'running', 'failed', 'done', 'ignored', 'dead')),
  attempts        int not null default 0,
  replays         int not null default 0,
  repeats         int not null default 0,
  headers         jsonb not null default '{}',
  body            bytea not null,
  body_sha256     text not null,
  traceparent     text not null default '',
  outcome         jsonb,
  error_message   text,
  next_attempt_at timestamptz,
  received_at     timestamptz not null default clock_timestamp(),
  updated_at      timestamptz not null default clock_timestamp(),
  finished_at     timestamptz,
  constraint agent_webhook_deliveries_once unique (endpoint, delivery_id)
) with (fillfactor = 80);
create index agent_webhook_deliveries_endpoint on agent_webhook_deliveries (endpoint, id);
create index agent_webhook_deliveries_open on agent_webhook_deliveries (status, id) where status not in ('done', 'ignored');
create index agent_webhook_deliveries_sender on agent_webhook_deliveries (delivery_id);
comment on table agent_webhook_deliveries is
  'What came, as it came, once per endpoint and delivery id. trace_id is that of the first handling, last_trace_id and '
  'execution_id those of the newest: a replay is a new run of the same delivery.';
comment on column agent_webhook_deliveries.repeats is 'How often it came again, and was acknowledged and not run.';
comment on column agent_webhook_deliveries.traceparent is 'The sender''s trace (W3C), as a link.';

create table agent_webhook_targets (
  id              uuid primary key default agent_uuid7(),
  name            text not null unique check (name ~ '^[a-z0-9][a-z0-9_-]{0,63}$'),
  description     text not null default '',
  url             text not null check (url <> ''),
  secrets         text[] not null check (cardinality(secrets) > 0),
  events          text[] not null check (cardinality(events) > 0),
  max_failures    int not null default 20 check (max_failures > 0),
  enabled         boolean not null default true,
  disabled_reason text not null default '',
  disabled_by     text not null default '' check (enabled = (disabled_by = '')),
  disabled_at     timestamptz,
  failures        int not null default 0,
  failing_since   timestamptz,
  blocked_until   timestamptz not null default 'epoch',
  source          text not null default '',
  created_at      timestamptz not null default clock_timestamp(),
  updated_at      timestamptz not null default clock_timestamp()
);
comment on column agent_webhook_targets.events is 'Types such as execution.failed, families such as execution.*, or *.';
comment on column agent_webhook_targets.failures is 'Attempts that failed in a row, since failing_since.';
comment on column agent_webhook_targets.blocked_until is 'It asked for a pause (Retry-After): nothing is sent before.';

create table agent_webhook_outbox (
  id              uuid primary key default agent_uuid7(),   -- the webhook-id, the same for every attempt
  target_id       uuid not null references agent_webhook_targets (id) on delete cascade,
  event           text not null,
  payload         jsonb not null,
  trace_id        text not null check (trace_id <> ''),
  status          text not null default 'pending' check (status in ('pending', 'sent', 'dead')),
  attempts        int not null default 0,
  leased          boolean not null default false,           -- an attempt is under way until next_attempt_at
  next_attempt_at timestamptz not null default clock_timestamp(),
  activity_id     uuid,                                     -- of the attempt under way
  http_status     int not null default 0,
  last_error      text not null default '',
  created_at      timestamptz not null default clock_timestamp(),
  finished_at     timestamptz
) with (fillfactor = 80);
create index agent_webhook_outbox_due on agent_webhook_outbox (target_id, next_attempt_at) where status = 'pending';
create index agent_webhook_outbox_dead on agent_webhook_outbox (target_id, id) where status = 'dead';

-- Incoming ----------------------------------------------------------------------------------------

create function close_agent_webhook_delivery() returns trigger language plpgsql as $$
begin
  update agent_webhook_deliveries d
     set status = 'dead', finished_at = clock_timestamp(), updated_at = clock_timestamp(), next_attempt_at = null,
         error_message = coalesce(new.error_message, new.cancel_reason, 'its execution ended ' || new.status)
   where d.id = case when new.input ->> 'delivery' ~ '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$'
                     then (new.input ->> 'delivery')::uuid end
     and d.execution_id = new.id and d.status in ('received', 'running', 'failed');
  return null;
end $$;
create trigger agent_executions_webhook after update of status on agent_executions
  for each row when (old.status is distinct from new.status and new.flow = 'webhook'
                     and new.status in ('failed', 'timeout', 'cancelled'))
  execute function close_agent_webhook_delivery();
comment on function close_agent_webhook_delivery is
  'A delivery whose execution was cancelled, or given up, is dead: it can be replayed, and is not lost from sight.';

-- Outgoing ----------------------------------------------------------------------------------------

create function agent_webhook_wanted(p_event text) returns boolean language sql stable as $$
  select exists (select from agent_webhook_targets t
                  where t.enabled and t.events && array[p_event, split_part(p_event, '.', 1) || '.*', '*'])
$$;

create function emit_agent_webhook(p_event text, p_trace_id text, p_data jsonb) returns int
language plpgsql volatile as $$
declare
  message jsonb := jsonb_build_object('type', p_event, 'data', p_data, 'timestamp',
    to_char(clock_timestamp() at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'));
  n int;
begin
  if octet_length(message::text) > 20000 then
    message := message || jsonb_build_object('data', jsonb_build_object(
      'trace_id', p_trace_id, 'omitted', 'the data has more than 20 kB; ask for it by its id', 'id', p_data -> 'id'));
  end if;
  insert into agent_webhook_outbox (target_id, event, payload, trace_id)
  select t.id, p_event, message, coalesce(nullif(p_trace_id, ''), agent_trace_id('wh'))
    from agent_webhook_targets t
   where t.enabled and t.events && array[p_event, split_part(p_event, '.', 1) || '.*', '*'];
  get diagnostics n = row_count;
  if n > 0 then
    perform pg_notify('agent_webhooks', '');
  end if;
  return n;
end $$;
comment on function emit_agent_webhook is
  'Tell every target that wants this type of event, with this transaction. Answers how many there are.';

-- The columns of other packages' tables are read through jsonb, so that these triggers never keep a column
-- from being renamed, and nothing is read at all while no target wants the event.

create function emit_agent_execution() returns trigger language plpgsql as $$
declare
  kind text := case new.status when 'completed' then 'execution.completed' when 'cancelled' then 'execution.cancelled'
               else 'execution.failed' end;
begin
  if agent_webhook_wanted(kind) then
    perform emit_agent_webhook(kind, new.trace_id, jsonb_build_object(
      'id', new.id, 'trace_id', new.trace_id, 'flow', new.flow, 'surface', new.surface, 'parent_id', new.parent_id,
      'status', new.status, 'result_type', new.result_type, 'result_summary', left(new.result_summary, 2000),
      'error_message', left(new.error_message, 2000), 'failed_step', left(new.failed_step, 300)));
  end if;
  return null;
end $$;
-- Runs of the webhook surface tell nothing here: a target that is our own endpoint would go round for ever.
create trigger agent_executions_emit after update of status on agent_executions
  for each row when (old.status is distinct from new.status and new.surface <> 'webhook'
                     and new.status in ('completed', 'failed', 'timeout', 'cancelled'))
  execute function emit_agent_execution();

create function emit_agent_approval() returns trigger language plpgsql as $$
declare
  a jsonb;
begin
  if agent_webhook_wanted('approval.requested') then
    a := to_jsonb(new);
    perform emit_agent_webhook('approval.requested', a ->> 'trace_id', jsonb_build_object(
      'id', a -> 'id', 'trace_id', a -> 'trace_id', 'execution_id', a -> 'execution_id', 'skill_name', a -> 'skill_name',
      'expires_at', a -> 'expires_at'));
  end if;
  return null;
end $$;
create trigger agent_approvals_emit after insert on agent_approvals
  for each row when (new.status = 'pending') execute function emit_agent_approval();

create function emit_agent_skill() returns trigger language plpgsql as $$
begin
  if agent_webhook_wanted('skill.disabled') then
    perform emit_agent_webhook('skill.disabled', '', jsonb_build_object(
      'id', new.id, 'name', new.name, 'disabled_by', new.disabled_by, 'disabled_reason', left(new.disabled_reason, 2000)));
  end if;
  return null;
end $$;
create trigger agent_skills_emit after update of enabled on agent_skills
  for each row when (old.enabled and not new.enabled) execute function emit_agent_skill();

create function emit_agent_objective() returns trigger language plpgsql as $$
declare
  o jsonb;
begin
  if agent_webhook_wanted('objective.completed') then
    o := to_jsonb(new);
    perform emit_agent_webhook('objective.completed', o ->> 'last_trace_id', jsonb_build_object(
      'id', o -> 'id', 'name', o -> 'name', 'goal', left(o ->> 'goal', 2000), 'trace_id', o -> 'last_trace_id'));
  end if;
  return null;
end $$;
create trigger agent_objectives_emit after update of status on agent_objectives
  for each row when (old.status is distinct from new.status and new.status = 'completed')
  execute function emit_agent_objective();

create function emit_agent_webhook_dead() returns trigger language plpgsql as $$
begin
  if agent_webhook_wanted('webhook.dead') then
    perform emit_agent_webhook('webhook.dead', new.last_trace_id, jsonb_build_object(
      'id', new.id, 'endpoint', new.endpoint, 'delivery_id', new.delivery_id, 'trace_id', new.last_trace_id,
      'attempts', new.attempts, 'error_message', left(new.error_message, 2000)));
  end if;
  return null;
end $$;
create trigger agent_webhook_deliveries_emit after update of status on agent_webhook_deliveries
  for each row when (old.status is distinct from new.status and new.status = 'dead')
  execute function emit_agent_webhook_dead();
