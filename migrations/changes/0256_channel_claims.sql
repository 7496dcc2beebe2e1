-- Channels: the claims of a worker that is gone are free when the next one has the lane.
alter table agent_channel_messages add column if not exists claim bigint;
comment on column agent_channel_messages.claim is
  'The fencing token of the worker whose attempt is under way. Null: none is, and next_attempt_at is a pause.';
alter table agent_channel_sends add column if not exists claim bigint;
comment on column agent_channel_sends.claim is
  'The fencing token of the worker whose attempt is under way. Null: none is, and next_attempt_at is a pause.';

insert into agent_retention (kind, keep, least, about)
values ('channel_messages', '30 days', '1 day', 'messages from channels that were handled; their text stays in its thread')
on conflict do nothing;
insert into agent_retention_passes (kind) values ('channel_messages') on conflict do nothing;
