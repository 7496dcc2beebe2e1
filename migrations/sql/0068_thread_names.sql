-- outside a transaction
create index concurrently if not exists agent_threads_name on agent_threads (name, id) where name <> '';
