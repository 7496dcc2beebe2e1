-- outside a transaction
-- One index does what agent_executions_trace and agent_executions_fence do, which the next file takes away. Two versions of a row have the same
-- key here, so putting equal keys together saves nothing.
create unique index concurrently if not exists agent_executions_run on agent_executions (trace_id, id, claim) with (deduplicate_items = off);
