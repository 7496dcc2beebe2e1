-- outside a transaction
create index concurrently if not exists agent_automation_runs_ready
  on agent_automation_runs (automation_id, coalesce(retry_at, created_at), id) where status in ('due', 'error');
comment on index agent_automation_runs_ready is 'Finds the longest waiting run of an automation.';
