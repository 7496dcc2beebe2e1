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
