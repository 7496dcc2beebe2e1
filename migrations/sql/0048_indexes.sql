-- outside a transaction
-- What rows make entries in from the next file on, which takes seven larger ones away: an execution that begins with a worker comes into a listing
-- when it has none any more (those that have one are few, and in agent_executions_held), one that completes into none of states, one without a
-- key into none of keys, and its event into no inbox, as who waits for it finds it by its execution.
create unique index concurrently if not exists agent_executions_key on agent_executions (dedupe_key) where dedupe_key is not null;
create index concurrently if not exists agent_executions_open on agent_executions (status, id) with (deduplicate_items = off)
  where status in ('pending', 'running', 'waiting');
create index concurrently if not exists agent_executions_broken on agent_executions (status, id) where status in ('failed', 'timeout', 'cancelled');
create index concurrently if not exists agent_executions_held on agent_executions (claimed_by, flow, surface) where claimed_by is not null;
create index concurrently if not exists agent_executions_of_flow on agent_executions (flow, id) with (deduplicate_items = off) where claimed_by is null;
create index concurrently if not exists agent_executions_of_surface on agent_executions (surface, id) with (deduplicate_items = off)
  where claimed_by is null and parent_id is null;
create index concurrently if not exists agent_events_untaken on agent_events (event, key, id) with (deduplicate_items = off)
  where consumed_by is null and execution_id is null;
