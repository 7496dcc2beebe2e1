-- Executions: they are counted when they have ended, so charts over months read none of them. Model calls are counted
-- by agent as well, with the tokens that a provider had cached.
create table agent_execution_counts (
  span text not null check (span in ('hour', 'day')), start timestamptz not null, agent text not null, flow text not null,
  completed bigint not null default 0, failed bigint not null default 0, timeout bigint not null default 0,
  cancelled bigint not null default 0,
  primary key (span, start, agent, flow)
) with (fillfactor = 80);
comment on table agent_execution_counts is
  'Executions that have ended, counted by hour and once more by day. The last two minutes are not counted yet.';
comment on column agent_execution_counts.span is 'The length of the count.';
comment on column agent_execution_counts.start is 'The beginning of the hour or day (UTC) in which they ended.';
comment on column agent_execution_counts.agent is 'The agent that acted.';
comment on column agent_execution_counts.flow is 'The flow.';
comment on column agent_execution_counts.completed is 'Executions that completed.';
comment on column agent_execution_counts.failed is 'Those that failed.';
comment on column agent_execution_counts.timeout is 'Those that timed out.';
comment on column agent_execution_counts.cancelled is 'Those that were cancelled.';

create table agent_execution_durations (
  span text not null check (span in ('hour', 'day')), start timestamptz not null,
  measure text not null check (measure in ('run', 'queue', 'lane')), agent text not null, flow text not null,
  bucket int not null, executions bigint not null,
  primary key (span, start, measure, agent, flow, bucket)
) with (fillfactor = 80);
comment on table agent_execution_durations is
  'How long executions took and waited, by hour and once more by day. A bucket is 5 per cent wide.';
comment on column agent_execution_durations.span is 'The length of the count.';
comment on column agent_execution_durations.start is 'The beginning of the hour or day (UTC) in which they ended.';
comment on column agent_execution_durations.measure is
  'run: from the first claim to the end, waits included. queue: until the first claim. lane: one wait for a lane.';
comment on column agent_execution_durations.agent is 'The agent that acted. Empty, with flow: all together.';
comment on column agent_execution_durations.flow is 'The flow.';
comment on column agent_execution_durations.bucket is
  'Durations from 1.05 ^ bucket ms up to the next; -1 is less than 1 ms.';
comment on column agent_execution_durations.executions is 'Executions, or waits for a lane, with such a duration.';

create table agent_executions_counted (
  single boolean default true primary key check (single),
  counted_upto uuid not null default '00000000-0000-0000-0000-000000000000'::uuid,
  looked uuid not null default '00000000-0000-0000-0000-000000000000'::uuid
);
insert into agent_executions_counted default values;
comment on table agent_executions_counted is 'How far the counts of executions have come. One row.';
comment on column agent_executions_counted.single is 'Always true: there is one row.';
comment on column agent_executions_counted.counted_upto is
  'Executions with ids below it are counted or listed in agent_executions_uncounted.';
comment on column agent_executions_counted.looked is 'How far the last pass over agent_executions_uncounted came.';

create table agent_executions_uncounted (
  execution_id uuid primary key
);
comment on table agent_executions_uncounted is
  'Executions that had not ended when their time was counted. They are counted when they have ended.';
comment on column agent_executions_uncounted.execution_id is 'The execution.';

alter table agent_activity_counts add column cached_tokens bigint not null default 0;
comment on column agent_activity_counts.cached_tokens is
  'The part of prompt_tokens that the provider had cached. Not counted before schema 216.';
