-- Brings a database of schema version 118 to the baseline. Other tables are the same. The code is applied after this.
alter table agent_threads validate constraint agent_threads_owner_kind;
create index agent_documents_own on agent_documents (owner_kind, owner, visitor, id);

-- Retention is in Go.
drop procedure if exists prune_agent_all(int);
drop function if exists prune_agent(text, int, boolean), old_agent_rows(text, interval, timestamptz, text, int),
  old_agent_activity(timestamptz, uuid, int), old_agent_executions(timestamptz, uuid, int), old_agent_events(timestamptz, interval, uuid, int),
  old_agent_approvals(timestamptz, uuid, int), old_agent_automation_runs(timestamptz, uuid, int), old_agent_deliveries(timestamptz, uuid, int),
  old_agent_outbox(timestamptz, uuid, int), old_agent_prompts(timestamptz, uuid, int),
  old_agent_threads(timestamptz, timestamptz, text, int), old_agent_budgets(timestamptz, timestamptz, text, int),
  agent_retention_before(text, interval), prune_agent_budgets(interval), prune_agent_causes(text, uuid[]), prune_agent_executions(uuid[]),
  prune_agent_executions_at_once(uuid[]), prune_agent_leftovers(int), prune_agent_thread(text, timestamptz, int),
  prune_agent_prompts(uuid[]), prune_agent_prompt_parts(int), agent_activity_needed(text, uuid, uuid), agent_activity_retirable(),
  retire_agent_activity_partition(text), drop_agent_activity_partition(text);
drop type if exists agent_old_rows;
