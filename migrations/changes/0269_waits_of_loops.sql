-- Steps: the snapshot of a loop keeps the waits of the iterations that it replaces.
alter table agent_checkpoints add column waits jsonb;
comment on column agent_checkpoints.waits is
  'Of a loop: the first 1,000 ended waits of the iterations that this snapshot has replaced. See agent_past_waits.';
