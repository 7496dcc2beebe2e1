-- outside a transaction
-- Lists of one agent, of which there may be a few rows among millions. Rows of an installation without declared agents make no entries: theirs
-- are named agent, and visitor_chat.
create index concurrently if not exists agent_executions_of_agent on agent_executions (agent, id) with (deduplicate_items = off)
  where agent <> 'agent' and agent <> 'visitor_chat';
create index concurrently if not exists agent_threads_of_agent on agent_threads (agent, updated_at, id)
  where agent <> 'agent' and agent <> 'visitor_chat';
