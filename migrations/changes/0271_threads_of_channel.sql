-- outside a transaction
create index concurrently if not exists agent_threads_of_channel on agent_threads (channel, updated_at, id)
  where channel <> 'chat';
comment on index agent_threads_of_channel is
  'Lists the threads of a channel. Threads of chat, the most frequent channel, have no entry.';
