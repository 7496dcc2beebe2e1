-- Evals: how long runs are kept.
alter table agent_retention drop constraint agent_retention_kind_check;   -- the kinds are those of package retention
insert into agent_retention (kind, keep, least, about) values
  ('evals', '90 days', '1 day', 'runs of evals that ended, with their trials and the samples of recorded turns')
  on conflict do nothing;
insert into agent_retention_passes (kind) values ('evals') on conflict do nothing;
