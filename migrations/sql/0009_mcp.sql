-- Tools of other programs (MCP): which servers there are, what each of their tools was when it was accepted, and
-- which of our own skills are offered over MCP.

-- A server, as a workspace declares it. Headers and environment hold references to secrets, never secrets.
create table agent_mcp_servers (
  id           uuid primary key default agent_uuid7(),
  name         text not null unique check (name ~ '^[a-z0-9][a-z0-9-]{0,23}$'),
  transport    text not null check (transport in ('http', 'stdio')),
  url          text not null default '' check ((transport = 'http') = (url <> '')),
  command      text[] not null default '{}' check ((transport = 'stdio') = (cardinality(command) > 0)),
  headers      jsonb not null default '{}',
  env          jsonb not null default '{}',
  scope        text not null default 'internal' check (scope in ('internal', 'external', 'both')),
  trust        text not null default 'approve' check (trust in ('auto', 'notify', 'approve')),
  auto         text[] not null default '{}',       -- patterns of tools that act without leave
  include      text[] not null default '{}',       -- patterns of tools to mount; empty: all
  exclude      text[] not null default '{}',
  idempotent   text[] not null default '{}',       -- patterns of tools that may be called again after a crash
  timeout_ms   int not null default 30000 check (timeout_ms > 0),
  revision     int not null default 1,
  source       text not null default '',
  attempted_at timestamptz,                        -- the last time its tools were asked for
  synced_at    timestamptz,                        -- the last time they were told
  sync_error   text not null default '',           -- why the last attempt failed
  about        text not null default '',           -- what the server says it is: name, version, protocol
  created_at   timestamptz not null default clock_timestamp(),
  updated_at   timestamptz not null default clock_timestamp()
);

-- A tool. pin is the hash of what was accepted; the skill of that name calls nothing else.
create table agent_mcp_tools (
  server      text not null references agent_mcp_servers (name) on delete cascade,
  tool        text not null check (tool <> ''),
  skill_name  text not null unique,
  state       text not null check (state in ('mounted', 'quarantined', 'gone', 'excluded', 'refused')),
  reason      text not null default '',
  pin         text not null default '',            -- empty while nothing was ever accepted
  definition  jsonb not null default '{}',         -- what was accepted
  seen_pin    text not null default '',            -- what the server shows now, where that is something else
  seen        jsonb not null default '{}',
  created_at  timestamptz not null default clock_timestamp(),
  updated_at  timestamptz not null default clock_timestamp(),
  primary key (server, tool)
);

-- Skills that are offered to others over MCP: an admin's choice, gone with the skill.
create table agent_mcp_offers (
  skill_name text primary key references agent_skills (name) on delete cascade,
  offered_by text not null check (offered_by <> ''),
  created_at timestamptz not null default clock_timestamp()
);

-- Calls from outside that need an approval: the one open row of a call leads its second try to the execution of the
-- first. collected_at is when somebody got the answer; after that the same call is a new one.
create table agent_mcp_calls (
  id             uuid primary key default agent_uuid7(),
  skill_name     text not null,
  skill_revision int not null,
  arguments_hash text not null,
  collected_at   timestamptz,
  created_at     timestamptz not null default clock_timestamp()
);
create unique index agent_mcp_calls_open on agent_mcp_calls (skill_name, skill_revision, arguments_hash) where collected_at is null;
create index agent_mcp_calls_collected on agent_mcp_calls (collected_at) where collected_at is not null;
