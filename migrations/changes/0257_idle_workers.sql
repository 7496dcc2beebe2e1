-- Executions: workers outside that wait for work are known, not only those with a lock.
create table agent_idle_workers (
  owner text primary key, flows text[] not null, since timestamptz not null default clock_timestamp(),
  seen_at timestamptz not null default clock_timestamp(), expires_at timestamptz not null
);
comment on table agent_idle_workers is
  'Workers outside that wait for an execution. A row is one by its name, and is old when the wait is over.';
comment on column agent_idle_workers.owner is 'The name that the worker gave itself.';
comment on column agent_idle_workers.flows is 'The flows that it waits for.';
comment on column agent_idle_workers.since is 'When it first waited, without a pause of a minute.';
comment on column agent_idle_workers.seen_at is 'When its last wait began.';
comment on column agent_idle_workers.expires_at is 'When that is over. A worker that still runs waits again.';
