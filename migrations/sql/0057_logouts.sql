-- Logins of browsers that were ended before their time. A login is a signed cookie, so only its end has to be written down.

create table agent_logouts (
  session_id text        primary key, -- random; it opens nothing without its signature
  expires_at timestamptz not null     -- when the login would have ended by itself: the row means nothing after that
);
comment on table agent_logouts is 'Logins that were ended; a row is deleted once its login would be over anyway.';

create index agent_logouts_expired on agent_logouts (expires_at);
