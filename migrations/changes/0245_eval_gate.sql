-- Noun: evals. A run keeps what it tries, and digests by which an apply finds it.
alter table agent_eval_runs
  add column subject jsonb, add column agent_digest text not null default '',
  add column suite_digest text not null default '', add column runtime text not null default '',
  add column candidate boolean not null default false;
comment on column agent_eval_runs.subject is
  'What is tried: the suite, the agent, its model and skills. Null: the versions of the run, by an earlier release.';
comment on column agent_eval_runs.agent_digest is 'Identifies what a trial sees of the agent, its model and skills.';
comment on column agent_eval_runs.suite_digest is 'Identifies the cases of the suite.';
comment on column agent_eval_runs.runtime is 'The version of the program.';
comment on column agent_eval_runs.candidate is 'The workspace was not applied. Its versions are those that it would get.';
