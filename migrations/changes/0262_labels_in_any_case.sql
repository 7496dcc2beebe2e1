-- outside a transaction
-- Executions: Find matches a label in any letter case.
create index concurrently if not exists agent_execution_labels_lower
  on agent_execution_labels (lower(value) text_pattern_ops, execution_id);
comment on index agent_execution_labels_lower is 'Finds executions by a value or its beginning, in any letter case.';
create index concurrently if not exists agent_eval_labels_created on agent_eval_labels (created_at);
comment on index agent_eval_labels_created is 'Finds old labels of evals.';
