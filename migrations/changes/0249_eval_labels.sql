-- Evals: what people say about answers, and runs that servers play.
--
-- A label keeps the answer, so that it outlives its run. It is what a judge is calibrated against.
create table agent_eval_labels (
  run_id uuid not null, case_name text not null, trial int not null check (trial > 0),
  principal text not null check (principal <> ''), suite text not null, answer text not null, answer_digest text not null,
  good boolean not null, note text not null default '' check (length(note) <= 2000),
  created_at timestamptz not null default clock_timestamp(),
  primary key (run_id, case_name, trial, principal)
);
create index agent_eval_labels_suite on agent_eval_labels (suite, created_at);
comment on index agent_eval_labels_suite is 'Lists the labels of a suite.';
comment on table agent_eval_labels is 'What people say about the answers of trials. A person has one label for a trial.';
comment on column agent_eval_labels.run_id is 'The run. It may have been pruned.';
comment on column agent_eval_labels.case_name is 'The case of the suite.';
comment on column agent_eval_labels.trial is 'The number of the trial, from 1 on.';
comment on column agent_eval_labels.principal is 'Who says it.';
comment on column agent_eval_labels.suite is 'The suite.';
comment on column agent_eval_labels.answer is 'The labelled answer, as the trial has it: redacted and cut.';
comment on column agent_eval_labels.answer_digest is 'SHA-256 of the answer.';
comment on column agent_eval_labels.good is 'The label.';
comment on column agent_eval_labels.note is 'Why.';

alter table agent_eval_runs add column if not exists served_until timestamptz;
comment on column agent_eval_runs.served_until is
  'Servers play its trials, and one does until then. Null: the process that began it plays them.';
create index agent_eval_runs_served on agent_eval_runs (served_until) where status = 'running' and served_until is not null;
comment on index agent_eval_runs_served is 'Finds the runs that no server plays.';
