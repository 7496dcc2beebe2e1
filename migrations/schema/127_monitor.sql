-- Monitor: whether the agent works.
--
-- A changed verdict and a nearly spent budget are events for outgoing targets, Slack included. An admin acknowledges
-- the causes of a degraded verdict.

create table agent_verdict (
  single boolean default true primary key check (single), state text not null default '',
  since timestamptz not null default clock_timestamp(), checked_at timestamptz not null default 'epoch',
  reached jsonb not null default '{}'
);
insert into agent_verdict default values on conflict do nothing;
comment on table agent_verdict is
  'The last published verdict and budget levels. One row: the process that locks it checks the agent.';
comment on column agent_verdict.single is 'Always true: there is one row.';
comment on column agent_verdict.state is 'working, degraded or stopped. Empty: not checked yet.';
comment on column agent_verdict.since is 'When the state began.';
comment on column agent_verdict.checked_at is 'When the agent was last checked.';
comment on column agent_verdict.reached is
  'The last published level of each limit of today, in per cent: 80 or 100. Keys look like "2026-11-26 day usd".';

create table agent_acknowledgements (
  cause text primary key check (cause <> ''), reason text not null, acknowledged_by text not null,
  acknowledged_at timestamptz not null default clock_timestamp()
);
comment on table agent_acknowledgements is
  'Causes of a degraded verdict that an admin acknowledged. An acknowledged cause does not count until it changes. '
  'The row is deleted when the cause is resolved.';
comment on column agent_acknowledgements.cause is
  'The subject and its root error, such as flow import fails: no route.';
comment on column agent_acknowledgements.reason is 'The reason for the acknowledgement.';
comment on column agent_acknowledgements.acknowledged_by is 'The person who acknowledged the cause.';
comment on column agent_acknowledgements.acknowledged_at is 'When the person acknowledged the cause.';
