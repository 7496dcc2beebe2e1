-- Noun: evals. Judges: their verdicts about trials, and about answers that people labelled.
alter table agent_eval_trials
  add column judgements jsonb not null default '[]', add column judge_tokens bigint not null default 0,
  add column judge_usd numeric not null default 0;
comment on column agent_eval_trials.judgements is 'The verdicts of judges, with their votes. One decides only while it is calibrated.';
comment on column agent_eval_trials.judge_tokens is 'Tokens of the judges, besides those of the model calls.';
comment on column agent_eval_trials.judge_usd is 'The price of the judges in US dollars, besides the cost of the model calls.';

create table agent_eval_judgements (
  judge_digest text not null, answer_digest text not null, pass boolean not null,
  created_at timestamptz not null default clock_timestamp(), primary key (judge_digest, answer_digest)
);
comment on table agent_eval_judgements is 'Verdicts of judges about labelled answers. They calibrate the judge.';
comment on column agent_eval_judgements.judge_digest is 'SHA-256 of the judge: its rubric, model, rules and number of votes.';
comment on column agent_eval_judgements.answer_digest is 'SHA-256 of the answer.';
comment on column agent_eval_judgements.pass is 'The majority of its votes.';
