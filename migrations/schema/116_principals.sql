-- Principals: users and programs, with their permissions.
--
-- A principal has a role. Tokens narrow it; sessions and login links have all of it.
create table agent_principals (
  id uuid default gen_random_uuid() primary key,
  name text not null unique check (name ~ '^[^[:cntrl:][:space:]]{1,100}$'),
  kind text not null check (kind in ('user', 'service')),
  role text not null check (role in ('none', 'viewer', 'operator', 'approver', 'admin')),
  created_at timestamptz not null default clock_timestamp(), disabled_at timestamptz
);
comment on table agent_principals is
  'People and programs that may use the API and the Engine Room. The bearer of AGENT_ADMIN_TOKEN is root.';
comment on column agent_principals.name is 'The name that the audit shows.';
comment on column agent_principals.kind is 'user: a person. service: a program.';
comment on column agent_principals.role is 'The upper limit of its permissions. A token may have fewer.';
comment on column agent_principals.created_at is 'When it was created.';
comment on column agent_principals.disabled_at is
  'When it was disabled: its tokens and sessions are refused. Null: it is enabled.';

create table agent_identities (
  issuer text not null check (issuer <> '' and length(issuer) <= 500),
  subject text not null check (subject <> '' and length(subject) <= 500),
  principal_id uuid not null references agent_principals(id) on delete cascade,
  role_from_claims boolean not null default false,
  created_at timestamptz not null default clock_timestamp(),
  primary key (issuer, subject)
);
create index agent_identities_principal on agent_identities (principal_id);
comment on index agent_identities_principal is 'Lists the identities of a principal.';
comment on table agent_identities is
  'External accounts of principals: at an OIDC issuer, in a Slack workspace or with a Telegram bot. An e-mail address '
  'is no identity, because it may change hands.';
comment on column agent_identities.issuer is 'The OIDC issuer, slack:TEAM or telegram:BOT.';
comment on column agent_identities.subject is 'The id of the account there.';
comment on column agent_identities.principal_id is 'The principal.';
comment on column agent_identities.role_from_claims is
  'A login created the identity, and each login sets the role of its principal. Otherwise an admin linked it, and the '
  'role stays.';
comment on column agent_identities.created_at is 'When it was linked.';

create table agent_tokens (
  id text primary key, secret_sha256 bytea not null,
  principal_id uuid not null references agent_principals(id) on delete cascade,
  name text not null default '', scopes text[] not null check (cardinality(scopes) > 0),
  created_at timestamptz not null default clock_timestamp(), created_by text not null default '',
  expires_at timestamptz, last_used_at timestamptz, revoked_at timestamptz
);
create index agent_tokens_principal on agent_tokens (principal_id);
comment on index agent_tokens_principal is 'Lists the tokens of a principal.';
comment on table agent_tokens is 'Tokens lk_ID_SECRET of the API. Only the digest of the secret is stored.';
comment on column agent_tokens.id is 'The part of the token that may be shown.';
comment on column agent_tokens.secret_sha256 is 'The SHA-256 of its secret.';
comment on column agent_tokens.principal_id is 'The principal that it acts for.';
comment on column agent_tokens.name is 'Its purpose, for people.';
comment on column agent_tokens.scopes is
  'The permissions of the role that the token has. *: all. work:GLOB: run executions of these flows.';
comment on column agent_tokens.created_at is 'When it was created.';
comment on column agent_tokens.created_by is 'The principal that created it.';
comment on column agent_tokens.expires_at is 'When it expires. Null: never.';
comment on column agent_tokens.last_used_at is 'When it was last used, to some minutes.';
comment on column agent_tokens.revoked_at is 'When it was revoked.';

create table agent_sessions (
  id uuid default gen_random_uuid() primary key, secret_sha256 bytea not null unique,
  principal_id uuid not null references agent_principals(id) on delete cascade,
  method text not null check (method in ('token', 'link', 'oidc')),
  created_at timestamptz not null default clock_timestamp(), expires_at timestamptz not null,
  last_seen_at timestamptz not null default clock_timestamp(), revoked_at timestamptz,
  address text not null default '', browser text not null default ''
);
create index agent_sessions_expiry on agent_sessions (expires_at);
comment on index agent_sessions_expiry is 'Finds sessions that have expired.';
create index agent_sessions_principal on agent_sessions (principal_id);
comment on index agent_sessions_principal is 'Lists the sessions of a principal.';
comment on table agent_sessions is 'Logins of browsers. A row is deleted a day after its session has expired.';
comment on column agent_sessions.id is 'The public id. It gives no access.';
comment on column agent_sessions.secret_sha256 is
  'The SHA-256 of the secret in the cookie. A login with AGENT_ADMIN_TOKEN has an HMAC keyed by the token, so the '
  'session ends when the token changes.';
comment on column agent_sessions.principal_id is 'The principal of the session.';
comment on column agent_sessions.method is
  'The method of the login: AGENT_ADMIN_TOKEN, a login link, or the OIDC issuer.';
comment on column agent_sessions.created_at is 'When the login happened.';
comment on column agent_sessions.expires_at is 'When the session expires.';
comment on column agent_sessions.last_seen_at is 'When it was last used, to some minutes.';
comment on column agent_sessions.revoked_at is 'When its user or an admin ended it.';
comment on column agent_sessions.address is 'The address of the browser at the login.';
comment on column agent_sessions.browser is 'The name that the browser sent.';

create table agent_login_links (
  secret_sha256 bytea primary key,
  principal_id uuid not null references agent_principals(id) on delete cascade,
  created_at timestamptz not null default clock_timestamp(), expires_at timestamptz not null, used_at timestamptz
);
create index agent_login_links_expiry on agent_login_links (expires_at);
comment on index agent_login_links_expiry is 'Finds links that have expired.';
create index agent_login_links_principal on agent_login_links (principal_id);
comment on index agent_login_links_principal is 'Finds the links of a principal that is removed.';
comment on table agent_login_links is 'Links for one login each. A row is deleted a day after its link has expired.';
comment on column agent_login_links.secret_sha256 is 'The SHA-256 of the secret in the link.';
comment on column agent_login_links.principal_id is 'The principal that the link logs in.';
comment on column agent_login_links.created_at is 'When it was made.';
comment on column agent_login_links.expires_at is 'When the link expires.';
comment on column agent_login_links.used_at is 'When it was used.';

insert into agent_principals (name, kind, role) values ('root', 'user', 'admin') on conflict do nothing;
