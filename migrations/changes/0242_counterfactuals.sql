-- Evals: runs of recorded turns, each compared with a control run.
alter table agent_eval_runs
  add column kind text not null default 'suite' check (kind in ('suite', 'counterfactual', 'shadow')),
  add column control_id uuid;
comment on column agent_eval_runs.kind is
  'suite: a declared suite. counterfactual: a sample of recorded turns. shadow: turns as they complete.';
comment on column agent_eval_runs.control_id is 'The run of the same cases that this one is compared with. Null: none.';
