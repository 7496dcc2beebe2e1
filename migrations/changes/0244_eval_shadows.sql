-- Evals: shadows, which play a share of the turns as they complete.
create table agent_eval_shadows (
  run_id uuid primary key references agent_eval_runs(id) on delete cascade,
  share float8 not null check (share > 0 and share <= 1), until timestamptz not null,
  seen_at timestamptz not null default clock_timestamp(), stopped_at timestamptz
);
comment on table agent_eval_shadows is 'Runs that get a case for a share of the turns that complete, until they end.';
comment on column agent_eval_shadows.run_id is 'The run of the candidate.';
comment on column agent_eval_shadows.share is 'The share of the turns, chosen by the hash of their traces.';
comment on column agent_eval_shadows.until is 'When it ends.';
comment on column agent_eval_shadows.seen_at is 'Turns that completed before were looked at.';
comment on column agent_eval_shadows.stopped_at is 'When a person stopped it. Null: nobody did.';
