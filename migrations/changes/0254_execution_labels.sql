-- Executions: their labels, which say what they are about.
--
-- A label has a name and a value, such as order and A-1001. It finds the executions of an order at any age.
create table agent_execution_labels (
  execution_id uuid not null references agent_executions on delete cascade,
  name text not null check (name ~ '^[a-z][a-z0-9_]{0,31}$'),
  value text not null check (value ~ '^[^[:cntrl:]]{1,200}$'),
  primary key (execution_id, name)
);
create index agent_execution_labels_value on agent_execution_labels (value text_pattern_ops, execution_id);
comment on index agent_execution_labels_value is 'Finds executions by a value or its beginning.';
comment on table agent_execution_labels is 'What an execution is about. It goes with its execution.';
comment on column agent_execution_labels.name is 'What the value identifies, such as order.';
comment on column agent_execution_labels.value is 'The value, such as A-1001.';
