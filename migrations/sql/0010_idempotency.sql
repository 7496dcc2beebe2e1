-- Requests that count once. A caller names a request with an Idempotency-Key; whoever inserts the row
-- handles it, and its answer is here for whoever sends the same again within a day.

create table agent_idempotency (
  scope       text not null check (scope <> ''),         -- method and route, and who calls
  key         text not null check (length(key) between 1 and 255),
  fingerprint bytea not null,                            -- SHA-256 of path, query and body: the same request or not
  attempt     uuid not null default agent_uuid7(),       -- of who handles it; void once another took over
  state       text not null default 'running' check (state in ('running', 'answered', 'unkept')),
  lease_until timestamptz not null,                      -- of the attempt; over when its process died
  status      int not null default 0,
  header      jsonb not null default '{}',
  body        bytea not null default '',
  created_at  timestamptz not null default clock_timestamp(),
  expires_at  timestamptz not null,
  primary key (scope, key),
  check ((state = 'running') = (status = 0))
);

create index agent_idempotency_expired on agent_idempotency (expires_at);
