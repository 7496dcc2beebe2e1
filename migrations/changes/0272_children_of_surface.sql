-- outside a transaction
create index concurrently if not exists agent_executions_children_of_surface on agent_executions (surface, id)
  with (deduplicate_items=off) where claimed_by is null and parent_id is not null;
comment on index agent_executions_children_of_surface is 'Lists the executions of a surface that an execution started.';
