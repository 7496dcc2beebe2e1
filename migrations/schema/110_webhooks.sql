-- Webhooks: deliveries that come in, and messages that go out.
--
-- A delivery is stored before its acknowledgement. A repeat of it starts no run. An outgoing message is a row of the
-- outbox, written in the transaction of its cause.

create table agent_webhook_endpoints (
  id uuid default lanekeeper.agent_uuid7() primary key,
  name text not null unique check (name ~ '^[a-z0-9][a-z0-9_-]{0,63}$'), description text not null default '',
  scheme text not null check (scheme in ('standard', 'github', 'stripe', 'hmac', 'bearer')),
  secrets text[] not null check (cardinality(secrets) > 0), settings jsonb not null default '{}',
  actions jsonb not null check (jsonb_typeof(actions) = 'array'), enabled boolean not null default true,
  disabled_reason text not null default '', disabled_by text not null default '', disabled_at timestamptz,
  source text not null default '', created_at timestamptz not null default clock_timestamp(),
  updated_at timestamptz not null default clock_timestamp(),
  constraint agent_webhook_endpoints_check check (enabled = (disabled_by = ''))
);
comment on table agent_webhook_endpoints is 'Endpoints that receive deliveries.';
comment on column agent_webhook_endpoints.scheme is 'How a delivery proves its sender.';
comment on column agent_webhook_endpoints.secrets is
  'References to the secrets of the scheme; several while one is rotated.';
comment on column agent_webhook_endpoints.settings is 'Details of the scheme and the format.';
comment on column agent_webhook_endpoints.actions is 'The actions that a delivery starts, with their conditions.';
comment on column agent_webhook_endpoints.disabled_reason is 'Why it was disabled.';
comment on column agent_webhook_endpoints.disabled_by is
  'The person or program that disabled it. Empty: it is enabled.';
comment on column agent_webhook_endpoints.disabled_at is 'When it was disabled.';
comment on column agent_webhook_endpoints.source is 'The declaring side, such as workspace.';

create table agent_webhook_deliveries (
  id uuid default lanekeeper.agent_uuid7() primary key, endpoint text not null,
  delivery_id text not null check (delivery_id <> '' and octet_length(delivery_id) <= 512),
  trace_id text not null check (trace_id <> ''), last_trace_id text not null, execution_id uuid,
  status          text not null default 'received'
                  check (status in ('received', 'running', 'failed', 'done', 'ignored', 'dead')),
  attempts int not null default 0, replays int not null default 0, repeats int not null default 0,
  headers jsonb not null default '{}', body bytea not null, body_sha256 text not null,
  traceparent text not null default '', outcome jsonb, error_message text,
  next_attempt_at timestamptz, received_at timestamptz not null default clock_timestamp(),
  updated_at timestamptz not null default clock_timestamp(), finished_at timestamptz,
  conflicts int not null default 0,
  constraint agent_webhook_deliveries_once unique (endpoint, delivery_id)
) with (fillfactor = 80);
create index agent_webhook_deliveries_endpoint on agent_webhook_deliveries (endpoint, id);
comment on index agent_webhook_deliveries_endpoint is 'Lists the deliveries of an endpoint.';
create index agent_webhook_deliveries_open on agent_webhook_deliveries (status, id)
  where status <> ALL (ARRAY['done', 'ignored']);
comment on index agent_webhook_deliveries_open is 'Finds deliveries that are not done, by status.';
create index agent_webhook_deliveries_sender on agent_webhook_deliveries (delivery_id);
comment on index agent_webhook_deliveries_sender is 'Finds a delivery by the sender''s id.';
create index agent_webhook_deliveries_settled on agent_webhook_deliveries (status, id)
  where status in ('done', 'ignored');
comment on index agent_webhook_deliveries_settled is 'Lists deliveries that are done or ignored.';
create index agent_webhook_deliveries_state on agent_webhook_deliveries (endpoint, status, id);
comment on index agent_webhook_deliveries_state is 'Lists the deliveries of an endpoint by status.';
comment on table agent_webhook_deliveries is
  'Deliveries, one row for each endpoint and delivery id, with headers and body as received. A replay is a new run of '
  'the same delivery.';
comment on column agent_webhook_deliveries.endpoint is 'The name of the endpoint.';
comment on column agent_webhook_deliveries.delivery_id is 'The sender''s id, or a digest of the body.';
comment on column agent_webhook_deliveries.trace_id is 'The trace of the first run.';
comment on column agent_webhook_deliveries.last_trace_id is 'The trace of the newest run.';
comment on column agent_webhook_deliveries.execution_id is 'The newest run.';
comment on column agent_webhook_deliveries.status is
  'received: stored. failed: will be retried. ignored: no action of the endpoint applies. dead: no further attempt.';
comment on column agent_webhook_deliveries.attempts is 'Attempts of the newest run.';
comment on column agent_webhook_deliveries.replays is 'How often an admin replayed it.';
comment on column agent_webhook_deliveries.repeats is
  'How often it was received again. A repeat is acknowledged, not run.';
comment on column agent_webhook_deliveries.headers is 'Headers of the request.';
comment on column agent_webhook_deliveries.body is 'Body of the request.';
comment on column agent_webhook_deliveries.body_sha256 is 'Its digest.';
comment on column agent_webhook_deliveries.traceparent is 'The sender''s trace (W3C), as a link.';
comment on column agent_webhook_deliveries.outcome is 'The outcome of each action.';
comment on column agent_webhook_deliveries.next_attempt_at is 'When the next attempt of a failed delivery is due.';
comment on column agent_webhook_deliveries.received_at is 'When it was first received.';
comment on column agent_webhook_deliveries.finished_at is 'When it was done, ignored or dead.';
comment on column agent_webhook_deliveries.conflicts is
  'How often it was received again with another body. agent_webhook_conflicts has the first of these bodies.';

create table agent_webhook_conflicts (
  id uuid default lanekeeper.agent_uuid7() primary key,
  delivery uuid not null references agent_webhook_deliveries(id) on delete cascade,
  headers jsonb not null default '{}', body bytea not null, body_sha256 text not null,
  received_at timestamptz not null default clock_timestamp(),
  constraint agent_webhook_conflicts_once unique (delivery, body_sha256)
);
comment on table agent_webhook_conflicts is
  'Other bodies under the id of a delivery, from verified senders. A few are kept for each delivery; none is run.';
comment on column agent_webhook_conflicts.delivery is 'The delivery with the id.';
comment on column agent_webhook_conflicts.headers is 'Headers of the request.';
comment on column agent_webhook_conflicts.body is 'Body of the request.';
comment on column agent_webhook_conflicts.body_sha256 is 'Its digest.';
comment on column agent_webhook_conflicts.received_at is 'When it was received.';

create table agent_webhook_targets (
  id uuid default lanekeeper.agent_uuid7() primary key,
  name text not null unique check (name ~ '^[a-z0-9][a-z0-9_-]{0,63}$'), description text not null default '',
  url text not null check (url <> ''), secrets text[] not null,
  events text[] not null check (cardinality(events) > 0),
  max_failures int not null default 20 check (max_failures > 0), enabled boolean not null default true,
  disabled_reason text not null default '', disabled_by text not null default '', disabled_at timestamptz,
  failures int not null default 0, failing_since timestamptz,
  blocked_until timestamptz not null default '1970-01-01 00:00:00+00'::timestamptz, source text not null default '',
  created_at timestamptz not null default clock_timestamp(),
  updated_at timestamptz not null default clock_timestamp(),
  format text not null default '' check (format in ('', 'slack')),
  constraint agent_webhook_targets_secrets_check check (cardinality(secrets) > 0 or format = 'slack'),
  constraint agent_webhook_targets_check check (enabled = (disabled_by = ''))
);
comment on table agent_webhook_targets is 'URLs that receive events.';
comment on column agent_webhook_targets.secrets is 'References to the secrets that sign; several while one is rotated.';
comment on column agent_webhook_targets.events is 'Types such as execution.failed, families such as execution.*, or *.';
comment on column agent_webhook_targets.max_failures is
  'So many failures in a row, over at least a day, disable the target. An answer 410 disables it at once.';
comment on column agent_webhook_targets.disabled_reason is 'Why it was disabled.';
comment on column agent_webhook_targets.disabled_by is 'The person or program that disabled it. Empty: it is enabled.';
comment on column agent_webhook_targets.disabled_at is 'When it was disabled.';
comment on column agent_webhook_targets.failures is 'Attempts that failed in a row, since failing_since.';
comment on column agent_webhook_targets.failing_since is
  'When the first of these failures happened. Null: the last attempt succeeded.';
comment on column agent_webhook_targets.blocked_until is
  'No message is sent before this time: the target requested a pause (Retry-After).';
comment on column agent_webhook_targets.source is 'The declaring side, such as workspace.';
comment on column agent_webhook_targets.format is
  'slack: the body is {"text": …} for an incoming webhook of Slack. Empty: the event as JSON.';

create table agent_webhook_outbox (
  id uuid default lanekeeper.agent_uuid7() primary key,
  target_id uuid not null references agent_webhook_targets(id) on delete cascade, event text not null,
  payload jsonb not null, trace_id text not null check (trace_id <> ''),
  status text not null default 'pending' check (status in ('pending', 'sent', 'dead')),
  attempts int not null default 0, leased boolean not null default false,
  next_attempt_at timestamptz not null default clock_timestamp(), activity_id uuid,
  http_status int not null default 0, last_error text not null default '',
  created_at timestamptz not null default clock_timestamp(), finished_at timestamptz
) with (fillfactor = 80);
create index agent_webhook_outbox_dead on agent_webhook_outbox (target_id, id) where status = 'dead';
comment on index agent_webhook_outbox_dead is 'Lists the dead messages of a target.';
create index agent_webhook_outbox_due on agent_webhook_outbox (target_id, next_attempt_at) where status = 'pending';
comment on index agent_webhook_outbox_due is 'Finds the next message to a target.';
comment on table agent_webhook_outbox is
  'Messages to targets, written in the transaction of their cause. A message is sent until the target accepts it or '
  'the message is dead.';
comment on column agent_webhook_outbox.id is 'The webhook-id, the same for every attempt.';
comment on column agent_webhook_outbox.target_id is 'The target.';
comment on column agent_webhook_outbox.event is 'The type, such as execution.failed.';
comment on column agent_webhook_outbox.payload is 'The body.';
comment on column agent_webhook_outbox.status is 'pending, sent, or dead: no further attempt.';
comment on column agent_webhook_outbox.attempts is 'How often it was sent.';
comment on column agent_webhook_outbox.leased is 'An attempt is in flight until next_attempt_at.';
comment on column agent_webhook_outbox.next_attempt_at is
  'When the next attempt is due. While leased: when the attempt counts as lost.';
comment on column agent_webhook_outbox.activity_id is 'The activity row of the attempt in flight.';
comment on column agent_webhook_outbox.http_status is 'The status of the last answer. 0: none.';
comment on column agent_webhook_outbox.last_error is 'The error of the last attempt.';
comment on column agent_webhook_outbox.finished_at is 'When it was sent or became dead.';

-- Code

create or replace function lanekeeper.emit_agent_webhook(p_event text, p_trace_id text, p_data jsonb) returns int
language plpgsql volatile as $$
declare
  message jsonb := jsonb_build_object('type', p_event, 'data', p_data, 'timestamp',
    to_char(clock_timestamp() at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'));
  teller constant uuid := case when p_event like 'execution.%' then lanekeeper.agent_uuid(p_data ->> 'id')
                               else lanekeeper.agent_uuid(p_data ->> 'execution_id') end;
  n int;
begin
  if octet_length(message::text) > 20000 then
    message := message || jsonb_build_object('data', jsonb_build_object(
      'trace_id', p_trace_id, 'omitted', 'the data has more than 20 kB; ask for it by its id', 'id', p_data -> 'id'));
  end if;
  with told as (
    insert into agent_webhook_outbox (target_id, event, payload, trace_id)
    select t.id, p_event, message, coalesce(nullif(p_trace_id, ''), lanekeeper.agent_trace_id('wh'))
      from agent_webhook_targets t
     where t.enabled and t.events && array[p_event, split_part(p_event, '.', 1) || '.*', '*']
    returning id, trace_id)
  insert into agent_links (cause, kind, effect)
  select coalesce('execution ' || teller, 'trace ' || o.trace_id), 'told', 'outgoing ' || o.id from told o;
  get diagnostics n = row_count;
  if n > 0 then
    perform pg_notify('agent_webhooks', '');
  end if;
  return n;
end $$;
comment on function lanekeeper.emit_agent_webhook is
  'Write a message for each enabled target of this type of event, in this transaction. Returns their number.';

create or replace function lanekeeper.emit_agent_row() returns trigger language plpgsql as $$
declare
  x constant jsonb := to_jsonb(new);
begin
  perform lanekeeper.emit_agent_webhook(tg_argv[0], x ->> tg_argv[1],
    case when tg_argv[1] = '' then '{}' else jsonb_build_object('trace_id', x -> tg_argv[1]) end
    || (select jsonb_object_agg(c,
                                case jsonb_typeof(x -> c)
                                  when 'string' then to_jsonb(left(x ->> c, 2000))
                                  else x -> c end)
          from unnest(tg_argv[2:]) c));
  return null;
end $$;
comment on function lanekeeper.emit_agent_row is
  'Emit a row to targets. Arguments: the type of event, the column of the trace (empty: none), the columns to send.';

create or replace trigger agent_approvals_emit after insert on agent_approvals
  for each row when (new.status = 'pending')
  execute function lanekeeper.emit_agent_row('approval.requested', 'trace_id', 'id', 'execution_id',
                                             'skill_name', 'expires_at');

create or replace trigger agent_skills_emit after update of enabled on agent_skills
  for each row when (old.enabled and not new.enabled)
  execute function lanekeeper.emit_agent_row('skill.disabled', '', 'id', 'name', 'disabled_by', 'disabled_reason');

create or replace trigger agent_objectives_emit after update of status on agent_objectives
  for each row when (old.status is distinct from new.status and new.status = 'completed')
  execute function lanekeeper.emit_agent_row('objective.completed', 'last_trace_id', 'id', 'name', 'goal');

create or replace trigger agent_webhook_deliveries_emit after update of status on agent_webhook_deliveries
  for each row when (old.status is distinct from new.status and new.status = 'dead')
  execute function lanekeeper.emit_agent_row('webhook.dead', 'last_trace_id', 'id', 'endpoint', 'delivery_id',
                                             'attempts', 'error_message');
