-- Evals: suites of cases for agents.
--
-- A trial is an execution of the surface eval. Triggers refuse its writes to tables with an effect outside the trial.

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
  created_at timestamptz not null default clock_timestamp(), finished_at timestamptz,
  kind text not null default 'suite', control_id uuid, subject jsonb, agent_digest text not null default '',
  suite_digest text not null default '', runtime text not null default '', candidate boolean not null default false,
  served_until timestamptz, began_at timestamptz, calibrations jsonb, calibration_tokens bigint not null default 0,
  calibration_usd numeric not null default 0
);
create index agent_eval_runs_suite on agent_eval_runs (suite, id);
comment on index agent_eval_runs_suite is 'Lists the runs of a suite.';
create index agent_eval_runs_served on agent_eval_runs (served_until)
  where status = 'running' and served_until is not null;
comment on index agent_eval_runs_served is 'Finds the runs that no server plays.';
comment on table agent_eval_runs is
  'Runs of suites: one version of an agent and one model, with some trials of each case.';
comment on column agent_eval_runs.suite is 'The name of the suite.';
comment on column agent_eval_runs.version is 'The version of the suite.';
comment on column agent_eval_runs.agent is 'The agent under test.';
comment on column agent_eval_runs.agent_version is 'Its version. 0: the agent of the settings.';
comment on column agent_eval_runs.model is 'The model under test.';
comment on column agent_eval_runs.trials is 'Trials of each case.';
comment on column agent_eval_runs.status is
  'The result. undecided: no trial failed, but one is undecided, or the run was given up.';
comment on column agent_eval_runs.finished_at is 'When its last trial was decided.';
comment on column agent_eval_runs.kind is
  'suite: a declared suite. counterfactual: a sample of recorded turns. shadow: turns as they complete.';
comment on column agent_eval_runs.control_id is 'The control run of the same cases. Null: none.';
comment on column agent_eval_runs.subject is
  'The subject: the suite, the agent, its model and skills. Null: an earlier release stored only their versions.';
comment on column agent_eval_runs.agent_digest is 'Identifies the agent, its model and skills, as a trial sees them.';
comment on column agent_eval_runs.suite_digest is 'Identifies the cases of the suite.';
comment on column agent_eval_runs.runtime is 'The version of the program.';
comment on column agent_eval_runs.candidate is
  'The workspace was not applied. The versions are those that it would get.';
comment on column agent_eval_runs.served_until is
  'When the claim of the server that plays its trials ends. Null: the process that began the run plays them.';
comment on column agent_eval_runs.began_at is
  'When a process first played the run, or a person last continued it. Its time limit begins then. Null: not yet.';
comment on column agent_eval_runs.calibrations is
  'The agreement of its judges with the labels of people, read before the first trial. Null: not read yet.';
comment on column agent_eval_runs.calibration_tokens is 'Tokens of the judges for labelled answers.';
comment on column agent_eval_runs.calibration_usd is 'Dollars of the judges for labelled answers.';

create table agent_eval_trials (
  run_id uuid not null references agent_eval_runs(id) on delete cascade, case_name text not null,
  trial int not null check (trial > 0), position int not null,
  trace_id text not null default '', verdict text check (verdict in ('pass', 'fail', 'diverged', 'error', 'undecided')),
  reasons text[] not null default '{}', answer text not null default '', calls jsonb not null default '[]',
  iterations int not null default 0, tokens bigint not null default 0, cost_usd numeric not null default 0,
  duration_ms bigint not null default 0, finished_at timestamptz, judgements jsonb not null default '[]',
  judge_tokens bigint not null default 0, judge_usd numeric not null default 0,
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
  'pass or fail: the expectations decided. diverged: a call had no stub. error: there was no answer. undecided: '
  'nothing decided it, such as after the budget was used up. Null: not decided yet.';
comment on column agent_eval_trials.reasons is 'Why it did not pass.';
comment on column agent_eval_trials.answer is 'The beginning of the answer, redacted.';
comment on column agent_eval_trials.calls is 'The calls in their order, with redacted arguments.';
comment on column agent_eval_trials.iterations is 'Model calls.';
comment on column agent_eval_trials.tokens is 'Tokens of the model calls.';
comment on column agent_eval_trials.cost_usd is 'Their price in US dollars.';
comment on column agent_eval_trials.duration_ms is 'How long it took.';
comment on column agent_eval_trials.finished_at is 'When it was decided.';
comment on column agent_eval_trials.judgements is
  'The verdicts of judges, with their votes. A judge decides only while it is calibrated.';
comment on column agent_eval_trials.judge_tokens is 'Tokens of the judges, besides those of the model calls.';
comment on column agent_eval_trials.judge_usd is
  'The price of the judges in US dollars, besides the cost of the model calls.';

create table agent_eval_shadows (
  run_id uuid primary key references agent_eval_runs(id) on delete cascade,
  share float8 not null check (share > 0 and share <= 1), until timestamptz not null,
  seen_at timestamptz not null default clock_timestamp(), stopped_at timestamptz
);
comment on table agent_eval_shadows is 'Runs that get a case for a share of the completed turns, until the run ends.';
comment on column agent_eval_shadows.run_id is 'The run of the candidate.';
comment on column agent_eval_shadows.share is 'The share of the turns, chosen by the hash of their traces.';
comment on column agent_eval_shadows.until is 'When the run ends.';
comment on column agent_eval_shadows.seen_at is 'Turns that completed before this time were examined.';
comment on column agent_eval_shadows.stopped_at is 'When a person stopped the run. Null: not stopped.';

create table agent_eval_judgements (
  judge_digest text not null, answer_digest text not null, pass boolean not null,
  created_at timestamptz not null default clock_timestamp(), primary key (judge_digest, answer_digest)
);
comment on table agent_eval_judgements is 'Verdicts of judges about labelled answers. They calibrate the judge.';
comment on column agent_eval_judgements.judge_digest is
  'SHA-256 of the judge: its rubric, model, rules and number of votes.';
comment on column agent_eval_judgements.answer_digest is 'SHA-256 of the answer.';
comment on column agent_eval_judgements.pass is 'The majority of its votes.';

-- A label stores the answer, so the label outlives its run. Labels calibrate judges.
create table agent_eval_labels (
  run_id uuid not null, case_name text not null, trial int not null check (trial > 0),
  principal text not null check (principal <> ''), suite text not null, answer text not null,
  answer_digest text not null, good boolean not null, note text not null default '' check (length(note) <= 2000),
  created_at timestamptz not null default clock_timestamp(),
  primary key (run_id, case_name, trial, principal)
);
create index agent_eval_labels_suite on agent_eval_labels (suite, created_at);
comment on index agent_eval_labels_suite is 'Lists the labels of a suite.';
create index agent_eval_labels_created on agent_eval_labels (created_at);
comment on index agent_eval_labels_created is 'Finds old labels of evals.';
comment on table agent_eval_labels is 'Labels of people for the answers of trials. A person has one label for a trial.';
comment on column agent_eval_labels.run_id is 'The run. It may have been pruned.';
comment on column agent_eval_labels.case_name is 'The case of the suite.';
comment on column agent_eval_labels.trial is 'The number of the trial, from 1 on.';
comment on column agent_eval_labels.principal is 'The principal that gave the label.';
comment on column agent_eval_labels.suite is 'The suite.';
comment on column agent_eval_labels.answer is 'The labelled answer, as the trial has it: redacted and cut.';
comment on column agent_eval_labels.answer_digest is 'SHA-256 of the answer.';
comment on column agent_eval_labels.good is 'The label.';
comment on column agent_eval_labels.note is 'The reason for the label.';

create unlogged table lanekeeper.agent_trial_transactions (id xid8 primary key);
comment on table lanekeeper.agent_trial_transactions is
  'Transactions that have fenced the claim of a trial of an eval. A transaction sees only its own row and rows of '
  'ended transactions.';
comment on column lanekeeper.agent_trial_transactions.id is 'The transaction.';

-- Code

-- A trial of an eval runs under a trace of the prefix ev. The triggers have the condition, so other rows run no
-- function. For executions and the log, the functions of their own triggers have the condition. The program holds the
-- rest of the isolation: a trial calls no handler and holds no lane.
create or replace function lanekeeper.refuse_agent_eval() returns trigger language plpgsql as $$
begin
  raise exception 'a trial of an eval cannot write to %', tg_table_name
    using errcode = 'LK009', hint = 'Give the skill a stub in the case of the eval.';
end $$;
comment on function lanekeeper.refuse_agent_eval is
  'Refuse a row of a trial of an eval (SQLSTATE LK009). A trial writes only its execution and its log.';

create or replace trigger agent_executions_no_eval_wait before update of waiting_for on agent_executions for each row
  when (new.surface = 'eval' and new.waiting_for is not null) execute function lanekeeper.refuse_agent_eval();

-- Tables without a trace refuse every write of a transaction that has fenced the claim of a trial. A transaction cannot
-- delete its own row. Only a rollback to a savepoint before the fence, or the schema's owner, removes the row. Names
-- are qualified, because a transaction may set its search path.
create or replace function lanekeeper.refuse_agent_trial(p_table text) returns void
language plpgsql security definer as $$
begin
  if exists (select from lanekeeper.agent_trial_transactions t
              where t.id operator(pg_catalog.=) pg_catalog.pg_current_xact_id_if_assigned()) then
    raise exception 'a trial of an eval cannot write to %', p_table
      using errcode = 'LK009', hint = 'Give the skill a stub in the case of the eval.';
  end if;
end $$;
comment on function lanekeeper.refuse_agent_trial is 'Refuse a write under the claim of a trial (SQLSTATE LK009).';

create or replace function lanekeeper.check_agent_trial() returns trigger language plpgsql security definer as $$
begin
  if tg_table_name operator(pg_catalog.=) 'agent_trial_transactions' then
    raise exception 'a transaction cannot leave its trial' using errcode = 'LK009';
  end if;
  perform lanekeeper.refuse_agent_trial(tg_table_name);
  return null;
end $$;
comment on function lanekeeper.check_agent_trial is
  'Refuse a statement under the claim of a trial, and the removal of the transaction''s own row (SQLSTATE LK009).';

create or replace trigger agent_trial_transactions_stay before update or delete on lanekeeper.agent_trial_transactions
  for each row when (old.id = pg_current_xact_id_if_assigned()) execute function lanekeeper.check_agent_trial();
create or replace trigger agent_trial_transactions_whole before truncate on lanekeeper.agent_trial_transactions
  for each statement execute function lanekeeper.check_agent_trial();
do $$
declare
  t record;
begin
  for t in select x.events, unnest(x.tables) as name from (values
    ('insert or delete', array['agent_threads', 'agent_thread_access', 'agent_schedules', 'agent_channel_identities',
      'agent_channel_buttons', 'agent_channel_sends', 'agent_principals', 'agent_identities', 'agent_tokens',
      'agent_sessions', 'agent_login_links']),
    ('delete', array['agent_memory', 'agent_documents', 'agent_objectives']),
    ('insert or update of enabled, trigger, cron, event, skill_name, prompt, flow or delete', array[
      'agent_automations']),
    ('insert or update or delete', array['agent_skills', 'agent_agents', 'agent_flows', 'agent_databases',
      'agent_secrets', 'agent_pauses', 'agent_limits', 'agent_retention', 'agent_webhook_targets',
      'agent_webhook_endpoints', 'agent_mcp_servers', 'agent_mcp_tools', 'agent_evals']),
    ('insert or update of enabled, settings, report_to or delete', array['agent_channels'])) x (events, tables) loop
    execute format('create or replace trigger %s_no_trial before %s on %1$s for each statement '
      'execute function lanekeeper.check_agent_trial()', t.name, t.events);
  end loop;
  for t in select unnest(array[
    'agent_approvals', 'agent_channel_messages', 'agent_automation_runs', 'agent_documents', 'agent_memory',
    'agent_memory_conflicts', 'agent_messages', 'agent_objective_evidence', 'agent_objective_steps',
    'agent_requests', 'agent_webhook_outbox']) as name loop
    execute format('create or replace trigger %s_no_eval before insert or update on %1$s for each row '
      'when (new.trace_id like %L) execute function lanekeeper.refuse_agent_eval()', t.name, 'ev\_%');
  end loop;
end $$;

create or replace function lanekeeper.check_agent_trial_budget() returns trigger language plpgsql as $$
declare
  foreign_ text;
begin
  if not exists (select from agent_executions x where x.id = new.execution_id and x.surface = 'eval') then
    return new;
  end if;
  select s.scope into foreign_ from agent_executions x cross join unnest(new.scopes) s (scope)
   where x.id = new.execution_id and x.surface = 'eval' and s.scope <> 'run:' || x.trace_id
     and s.scope is distinct from (select 'eval:' || coalesce(r.control_id, r.id) from agent_eval_runs r
                                    where r.id = lanekeeper.agent_uuid(x.input ->> 'run')) limit 1;
  if foreign_ is not null then
    raise exception 'a trial of an eval cannot spend of the budget %', foreign_ using errcode = 'LK009';
  end if;
  return new;
end $$;
comment on function lanekeeper.check_agent_trial_budget is
  'Refuse a reservation of a trial outside the budgets of the trial and of its run (SQLSTATE LK009).';
create or replace trigger agent_budget_reservations_no_eval before insert or update of scopes
  on agent_budget_reservations
  for each row execute function lanekeeper.check_agent_trial_budget();

create or replace trigger agent_automations_no_eval before insert or update on agent_automations for each row
  when (new.last_trace_id like 'ev\_%') execute function lanekeeper.refuse_agent_eval();

create or replace trigger agent_objectives_no_eval before insert or update on agent_objectives for each row
  when (new.last_trace_id like 'ev\_%' or new.proposed_trace like 'ev\_%')
  execute function lanekeeper.refuse_agent_eval();

create or replace trigger agent_webhook_deliveries_no_eval before insert or update on agent_webhook_deliveries
  for each row
  when (new.trace_id like 'ev\_%' or new.last_trace_id like 'ev\_%') execute function lanekeeper.refuse_agent_eval();
