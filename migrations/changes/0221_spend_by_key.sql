-- Model calls are counted by chat key, and how long they took by model.
comment on column agent_activity_counts.kind is
  'As in the log; charge: money, by the skill that a model call led to; agent: model calls, by agent; key: model calls '
  'of chats, by chat key, since schema 221.';
comment on column agent_activity_counts.skill is
  'The skill. For a model call: its purpose. For kind agent: the agent. For kind key: the chat key.';
comment on column agent_activity_durations.skill is
  'The skill; empty: all together; model NAME: successful calls of a model, since schema 221.';
