-- Looked up by whoever watches the agent: what failed to be said, what is remembered under a key or under the beginning of one,
-- and objectives by how they stand.

create index agent_messages_failed on agent_messages (id) where status = 'failed';
create index agent_memory_key on agent_memory (key text_pattern_ops);
create index agent_objectives_status on agent_objectives (status, id);

create function agent_tokens(p_usage jsonb, p_kind text) returns bigint language sql immutable parallel safe as $$
  select case when jsonb_typeof(p_usage -> p_kind) = 'number' then least(greatest((p_usage ->> p_kind)::numeric, 0), 1e15)::bigint else 0 end
$$;
comment on function agent_tokens is 'A count of agent_activity.token_usage; 0 where it is none, so that no row can break a listing.';
