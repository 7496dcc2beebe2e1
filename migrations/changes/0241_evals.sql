-- Evals: suites of cases for agents.
--
-- A trial is an execution of the surface eval. Triggers refuse rows by which it would leave, wake or be remembered.
alter domain agent_surface drop constraint agent_surface_check;
alter domain agent_surface add constraint agent_surface_check
  check (value in ('heartbeat', 'operate', 'chat', 'webhook', 'flow', 'eval')) not valid;

create table agent_evals (
  name text not null check (name ~ '^[a-zA-Z][a-zA-Z0-9_-]{0,63}$'), version int not null check (version > 0),
  digest text not null, definition jsonb not null, source text not null default 'workspace',
  current boolean not null default true, created_at timestamptz not null default clock_timestamp(),
  primary key (name, version)
);
create unique index agent_evals_current on agent_evals (name) where current;
comment on index agent_evals_current is 'Allows one current version of a suite.';
comment on table agent_evals is 'Versions of declared suites. A run keeps the version that it began with.';
comment on column agent_evals.digest is 'SHA-256 of the definition.';
comment on column agent_evals.definition is 'The suite, as the workspace declares it.';
comment on column agent_evals.source is 'The declaring side, such as workspace.';
comment on column agent_evals.current is 'New runs begin with this version. None: the suite was removed.';

create table agent_eval_runs (
  id uuid default lanekeeper.agent_uuid7() primary key, suite text not null, version int not null,
  agent text not null, agent_version int not null, model text not null, trials int not null check (trials > 0),
  status text not null default 'running' check (status in ('running', 'passed', 'failed', 'undecided')),
  created_at timestamptz not null default clock_timestamp(), finished_at timestamptz
);
create index agent_eval_runs_suite on agent_eval_runs (suite, id);
comment on index agent_eval_runs_suite is 'Lists the runs of a suite.';
comment on table agent_eval_runs is 'Runs of suites: one version of an agent and one model, with some trials of each case.';
comment on column agent_eval_runs.suite is 'The name of the suite.';
comment on column agent_eval_runs.version is 'The version of the suite.';
comment on column agent_eval_runs.agent is 'The agent that is tried.';
comment on column agent_eval_runs.agent_version is 'Its version. 0: the agent of the settings.';
comment on column agent_eval_runs.model is 'The model that is tried.';
comment on column agent_eval_runs.trials is 'Trials of each case.';
comment on column agent_eval_runs.status is 'How it ended. Undecided: the budget was used up.';
comment on column agent_eval_runs.finished_at is 'When its last trial was decided.';

create table agent_eval_trials (
  run_id uuid not null references agent_eval_runs(id) on delete cascade, case_name text not null,
  trial int not null check (trial > 0), position int not null,
  trace_id text not null default '', verdict text check (verdict in ('pass', 'fail', 'diverged', 'error', 'undecided')),
  reasons text[] not null default '{}', answer text not null default '', calls jsonb not null default '[]',
  iterations int not null default 0, tokens bigint not null default 0, cost_usd numeric not null default 0,
  duration_ms bigint not null default 0, finished_at timestamptz,
  primary key (run_id, case_name, trial)
);
create index agent_eval_trials_trace on agent_eval_trials (trace_id) where trace_id <> '';
comment on index agent_eval_trials_trace is 'Finds the trial of a trace.';
comment on table agent_eval_trials is 'Trials of cases. Each is one execution with a trace of its own.';
comment on column agent_eval_trials.run_id is 'The run.';
comment on column agent_eval_trials.case_name is 'The case of the suite.';
comment on column agent_eval_trials.trial is 'The number of the trial, from 1 on.';
comment on column agent_eval_trials.position is 'The place of the case in the suite.';
comment on column agent_eval_trials.verdict is
  'pass or fail: the expectations decided. diverged: a call had no stub. error: no answer came. undecided: the budget was '
  'used up. Null: not decided yet.';
comment on column agent_eval_trials.reasons is 'Why it did not pass.';
comment on column agent_eval_trials.answer is 'The beginning of the answer, redacted.';
comment on column agent_eval_trials.calls is 'The calls in their order, with redacted arguments.';
comment on column agent_eval_trials.iterations is 'Model calls.';
comment on column agent_eval_trials.tokens is 'Tokens of the model calls.';
comment on column agent_eval_trials.cost_usd is 'Their price in US dollars.';
comment on column agent_eval_trials.duration_ms is 'How long it took.';
comment on column agent_eval_trials.finished_at is 'When it was decided.';
