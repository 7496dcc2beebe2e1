-- Evals: the guard of isolation reads a setting of the transaction, which is cheaper than the view pg_locks.
--
-- Tables without a trace refuse the writes of a trial.
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
      'when (current_setting(''lanekeeper.trial'', true) = ''on'') execute function lanekeeper.refuse_agent_eval()',
      t.name, t.events);
  end loop;
end $$;
drop function if exists lanekeeper.refuse_agent_trial_write();

-- A run keeps the calibration of its judges, and its time limit counts from its first trial.
alter table agent_eval_runs
  add column began_at timestamptz,
  add column calibrations jsonb,
  add column calibration_tokens bigint not null default 0,
  add column calibration_usd numeric not null default 0;
comment on column agent_eval_runs.began_at is
  'When a process first played it, or a person last continued it. Its time limit counts from then. Null: not yet.';
comment on column agent_eval_runs.calibrations is
  'How its judges compare with the labels of people, as read before the first trial. Null: not yet.';
comment on column agent_eval_runs.calibration_tokens is 'Tokens of the judges for labelled answers.';
comment on column agent_eval_runs.calibration_usd is 'Dollars of the judges for labelled answers.';

-- Labels keep the answers of trials, and go by a policy of their own.
insert into agent_retention (kind, keep, least, about) values
  ('eval_labels', null, '30 days', 'labels of the answers of trials, which calibrate judges')
  on conflict do nothing;
insert into agent_retention_passes (kind) values ('eval_labels') on conflict do nothing;
