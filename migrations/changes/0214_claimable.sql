-- outside a transaction
-- Claims of workers outside find the most urgent and oldest execution of a flow.
create index concurrently if not exists agent_executions_claimable on agent_executions (flow, priority, id)
 where outside and status in ('pending', 'running') and claimed_by is null;
comment on index agent_executions_claimable is 'Finds the next execution for a worker outside, by flow.';
