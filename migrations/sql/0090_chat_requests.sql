-- Requests of chat clients: a client that sends a request again, because its connection broke, gets the answer of the
-- turn that the first one began.

create table agent_chat_requests (
  id           uuid primary key default agent_uuid7(),
  fingerprint  bytea not null,
  execution_id uuid not null,
  connection   text not null check (connection <> ''),
  worker       uuid not null,
  attempt      int not null default 0 check (attempt >= 0),
  state        text not null default 'open' check (state in ('open', 'left', 'delivered')),
  created_at   timestamptz not null default clock_timestamp(),
  changed_at   timestamptz not null default clock_timestamp(),
  expires_at   timestamptz not null default clock_timestamp() + interval '15 minutes'
);
create index agent_chat_requests_fingerprint on agent_chat_requests (fingerprint, created_at);
create index agent_chat_requests_expiry on agent_chat_requests (expires_at);
comment on table agent_chat_requests is
  'Requests of the last minutes that began a turn. A client''s retry finds its turn here.';
comment on column agent_chat_requests.fingerprint is
  'SHA-256 of the caller, the thread as the caller names it, and the body.';
comment on column agent_chat_requests.execution_id is 'The turn that the request began.';
comment on column agent_chat_requests.connection is 'Trace of the request that is shown the answer, the latest retry.';
comment on column agent_chat_requests.worker is 'The process that has the connection. It dies with it.';
comment on column agent_chat_requests.attempt is 'As the client counts: 0 is the first.';
comment on column agent_chat_requests.state is
  'open: the connection stands. left: it ended before the answer was sent. delivered: the answer was sent.';
