-- A prompt as it went out. What a server refuses is sent in another form, and the bound of an answer's tokens is granted after
-- the call's row was opened. So the end of a call amends what its beginning recorded.

create function amend_agent_prompt(
  p_activity_id uuid, p_messages bytea[], p_options jsonb, p_digests bytea[], p_bodies text[], p_truncated boolean[],
  out problem text)
language plpgsql volatile set lock_timeout = '200ms' set jit = off as $$
declare
  today constant date := (now() at time zone 'UTC')::date;
begin
  if p_messages is not null then
    update agent_prompt_parts p set used_on = today
      from (select h.digest from agent_prompt_parts h
             where h.digest = any (p_messages) and h.used_on < today order by h.digest for update) u
     where p.digest = u.digest;
    insert into agent_prompt_parts (digest, body, truncated, used_on)
    select n.digest, n.body, n.truncated, today from unnest(p_digests, p_bodies, p_truncated) n (digest, body, truncated)
     order by n.digest
    on conflict do nothing;
  end if;
  update agent_prompts p set options = p_options, messages = coalesce(p_messages, p.messages)
   where p.activity_id = p_activity_id;
exception when others then
  problem := sqlerrm;
end $$;
comment on function amend_agent_prompt is
  'Record how the prompt of a model call went out: its options, and its messages where they are not null. It belongs into the '
  'transaction that ends the call, and never fails it: problem says why nothing was amended.';
comment on column agent_prompts.options is
  'What the request said besides, where it said so: effort, temperature, max_tokens, schema (its name), response_format.';
