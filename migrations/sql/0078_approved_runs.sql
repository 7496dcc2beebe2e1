-- outside a transaction
create index concurrently if not exists agent_automation_runs_approval on agent_automation_runs ((output ->> 'approval_id'))
  where status = 'skipped' and output ? 'approval_id';
