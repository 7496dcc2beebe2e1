-- Evals: runs of recorded turns, each compared with a control run.
alter table agent_eval_runs
  add column kind text not null default 'suite',
  add column control_id uuid;
comment on column agent_eval_runs.kind is
  'suite: a declared suite. counterfactual: a sample of recorded turns. shadow: turns as they complete.';
comment on column agent_eval_runs.control_id is 'The run of the same cases that this one is compared with. Null: none.';

-- The tables of later nouns refuse the writes of a trial, too. On a database that gets this file before the code of
-- 080_agents, the functions get their bodies from there.
do $$
declare
  name_ text;
begin
  foreach name_ in array array['refuse_agent_eval', 'refuse_agent_trial_write'] loop
    if to_regprocedure('lanekeeper.' || name_ || '()') is null then
      execute format('create function lanekeeper.%I() returns trigger language plpgsql as %L', name_, 'begin return null; end');
    end if;
  end loop;
end $$;
create trigger agent_channel_messages_no_eval before insert or update on agent_channel_messages for each row
  when (new.trace_id like 'ev\_%') execute function lanekeeper.refuse_agent_eval();
create trigger agent_channels_no_trial before insert or update of enabled, settings, report_to or delete on agent_channels
  for each statement execute function lanekeeper.refuse_agent_trial_write();
create trigger agent_channel_identities_no_trial before insert or delete on agent_channel_identities
  for each statement execute function lanekeeper.refuse_agent_trial_write();
create trigger agent_channel_buttons_no_trial before insert or delete on agent_channel_buttons
  for each statement execute function lanekeeper.refuse_agent_trial_write();
create trigger agent_channel_sends_no_trial before insert or delete on agent_channel_sends
  for each statement execute function lanekeeper.refuse_agent_trial_write();
create trigger agent_principals_no_trial before insert or delete on agent_principals
  for each statement execute function lanekeeper.refuse_agent_trial_write();
create trigger agent_identities_no_trial before insert or delete on agent_identities
  for each statement execute function lanekeeper.refuse_agent_trial_write();
create trigger agent_tokens_no_trial before insert or delete on agent_tokens
  for each statement execute function lanekeeper.refuse_agent_trial_write();
create trigger agent_sessions_no_trial before insert or delete on agent_sessions
  for each statement execute function lanekeeper.refuse_agent_trial_write();
create trigger agent_login_links_no_trial before insert or delete on agent_login_links
  for each statement execute function lanekeeper.refuse_agent_trial_write();
create trigger agent_evals_no_trial before insert or update or delete on agent_evals
  for each statement execute function lanekeeper.refuse_agent_trial_write();
