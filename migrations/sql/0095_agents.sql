-- Agents: who acts. Every version that was applied is kept, because a turn finishes on the one it began with.

create table agent_agents (
  name       text not null check (name ~ '^[a-zA-Z][a-zA-Z0-9_-]{0,63}$'),
  version    int not null check (version > 0),
  digest     text not null,
  definition jsonb not null,
  is_default boolean not null default false,
  source     text not null default 'workspace',
  current    boolean not null default true,
  created_at timestamptz not null default clock_timestamp(),
  primary key (name, version),
  constraint agent_agents_default exclude using btree (is_default with =) where (current and is_default)
    deferrable initially deferred
);
create unique index agent_agents_current on agent_agents (name) where current;
comment on table agent_agents is 'Versions of declared agents. A turn records the version that it began with.';
comment on column agent_agents.digest is 'Of the definition.';
comment on column agent_agents.is_default is 'It acts where nobody names an agent. At most one current agent has it.';
comment on column agent_agents.current is 'New turns begin with this version. None: the agent was removed.';
