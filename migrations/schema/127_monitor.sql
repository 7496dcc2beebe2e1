-- Monitor: whether the agent works.
--
-- Targets of outgoing events hear of a changed verdict and of a budget that is nearly spent, also as Slack's message.
-- An admin acknowledges why a verdict is degraded.
create table agent_verdict (
  single boolean default true primary key check (single), state text not null default '',
  since timestamptz not null default clock_timestamp(), checked_at timestamptz not null default 'epoch',
  reached jsonb not null default '{}'
);
insert into agent_verdict default values on conflict do nothing;
comment on table agent_verdict is
  'The verdict and the budgets that the events verdict.changed and budget.reached were last sent for. One row; the '
  'process that locks it checks.';
comment on column agent_verdict.single is 'Always true: there is one row.';
comment on column agent_verdict.state is 'working, degraded or stopped. Empty: not checked yet.';
comment on column agent_verdict.since is 'When the state was first found.';
comment on column agent_verdict.checked_at is 'When it was last checked.';
comment on column agent_verdict.reached is
  'For each limit of today, such as 2026-11-26 day usd, the share in per cent that was last announced: 80 or 100.';

create table agent_acknowledgements (
  cause text primary key check (cause <> ''), reason text not null, acknowledged_by text not null,
  acknowledged_at timestamptz not null default clock_timestamp()
);
comment on table agent_acknowledgements is
  'Causes of a degraded verdict that an admin knows. They do not count until they change, and go when they are over.';
comment on column agent_acknowledgements.cause is
  'The subject and its root error, such as flow import fails: no route.';
comment on column agent_acknowledgements.reason is 'Why it may stay as it is.';
comment on column agent_acknowledgements.acknowledged_by is 'The person.';
comment on column agent_acknowledgements.acknowledged_at is 'When.';
