-- The prompt of each model call. A prompt is a list of parts: the definitions of the tools, and each message. A part is stored
-- once, under the SHA-256 of its redacted text, and a model call keeps the digests. So a conversation of 50 turns has each
-- of its messages once.

create table agent_prompt_parts (
  digest    bytea primary key check (length(digest) = 32),
  body      text not null,
  truncated boolean not null default false,
  used_on   date not null default (now() at time zone 'UTC')::date
);
create index agent_prompt_parts_use on agent_prompt_parts (used_on);
comment on table agent_prompt_parts is 'What prompts are made of: the tools of a model call, or one message. Redacted.';
comment on column agent_prompt_parts.digest is 'SHA-256 of body.';
comment on column agent_prompt_parts.body is
  'JSON as chat completions has it: the list of tools, or a message. Text, because jsonb would order its members anew.';
comment on column agent_prompt_parts.truncated is 'Whether body was cut, because the part was larger than a part may be.';
comment on column agent_prompt_parts.used_on is 'The last day (UTC) on which a prompt was recorded that has the part.';

create table agent_prompts (
  activity_id uuid primary key,
  tools       bytea,
  messages    bytea[] not null,
  options     jsonb not null default '{}',
  created_at  timestamptz not null default now()
);
comment on table agent_prompts is 'The prompt of each model call, as digests of agent_prompt_parts.';
comment on column agent_prompts.activity_id is 'The row of the model call in agent_activity.';
comment on column agent_prompts.tools is 'The part with the definitions of the tools; null when none was offered.';
comment on column agent_prompts.messages is 'The parts with the messages, in their order: the system message, the history, the turn.';
comment on column agent_prompts.options is 'What the request said besides, where it said so: effort, temperature, schema.';

create function record_agent_prompt(
  p_execution_id uuid, p_claim bigint, p_step text, p_tools bytea, p_messages bytea[], p_options jsonb,
  p_digests bytea[], p_bodies text[], p_truncated boolean[], out missing int, out problem text)
language plpgsql volatile set lock_timeout = '200ms' set jit = off as $$
declare
  today constant date := (now() at time zone 'UTC')::date;
  parts constant bytea[] := array(select distinct p.digest from unnest(p_messages || p_tools) p (digest) where p.digest is not null);
  call uuid := (select o.activity_id from agent_activity_open o
                 where o.execution_id = p_execution_id and o.claim = p_claim and o.step = p_step);
begin
  missing := 0;
  if call is null then
    problem := 'the model call has no open row';
    return;
  end if;
  -- Parts that are in use are marked before any is inserted, in one order, so that two calls cannot deadlock; pruning skips
  -- what is locked, and whatever was pruned before is inserted again.
  update agent_prompt_parts p set used_on = today
    from (select h.digest from agent_prompt_parts h where h.digest = any (parts) and h.used_on < today order by h.digest for update) u
   where p.digest = u.digest;
  insert into agent_prompt_parts (digest, body, truncated, used_on)
  select n.digest, n.body, n.truncated, today from unnest(p_digests, p_bodies, p_truncated) n (digest, body, truncated)
   order by n.digest
  on conflict do nothing;
  insert into agent_prompts (activity_id, tools, messages, options) values (call, p_tools, p_messages, p_options)
  on conflict do nothing;
  missing := cardinality(parts) - (select count(*) from agent_prompt_parts p where p.digest = any (parts));
exception when others then
  missing := 0;
  problem := sqlerrm;
end $$;
comment on function record_agent_prompt is
  'Record the prompt of the model call that is open for a step, with the parts that may be new. It belongs into the transaction '
  'that opened the call, and never fails it: problem says why nothing was recorded, missing how many parts are not there.';

-- Retention ----------------------------------------------------------------------------------------

alter table agent_retention drop constraint agent_retention_kind_check;
alter table agent_retention add constraint agent_retention_kind_check
  check (kind in ('activity', 'executions', 'events', 'messages', 'approvals', 'automation_runs', 'deliveries', 'outbox', 'budgets',
                  'hour_counts', 'prompts'));
insert into agent_retention (kind, keep, least, about) values
  ('prompts', '30 days', '1 day', 'the prompts of model calls; their rows in the activity log stay');
insert into agent_retention_passes (kind) values ('prompts');

create function old_agent_prompts(p_before timestamptz, p_after uuid, p_most int) returns agent_old_rows
language plpgsql stable set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off set jit = off as $$
declare
  bound uuid := agent_uuid7_floor(p_before);
  o agent_old_rows;
begin
  with looked as materialized (
    select p.activity_id from agent_prompts p where p.activity_id > p_after and p.activity_id < bound order by p.activity_id limit p_most)
  select array_agg(l.activity_id::text order by l.activity_id)
           filter (where not exists (select from agent_activity_open w where w.activity_id = l.activity_id)),
         null::timestamptz, max(l.activity_id::text collate "C"), count(*)
    into o from looked l;
  return o;
end $$;
comment on function old_agent_prompts is 'Which of the next p_most prompts go by a policy: those whose model call is not under way.';

create or replace function old_agent_rows(p_kind text, p_keep interval, p_after_at timestamptz, p_after text, p_most int) returns agent_old_rows
language plpgsql stable as $$
declare
  before_ timestamptz := agent_retention_before(p_kind, p_keep);
  after_ uuid := case when p_kind not in ('messages', 'budgets', 'hour_counts') then coalesce(agent_uuid(p_after), '00000000-0000-0000-0000-000000000000') end;
begin
  return case p_kind
    when 'activity' then old_agent_activity(before_, after_, p_most)
    when 'executions' then old_agent_executions(before_, after_, p_most)
    when 'events' then old_agent_events(before_, p_keep, after_, p_most)
    when 'messages' then old_agent_threads(before_, p_after_at, p_after, p_most)
    when 'approvals' then old_agent_approvals(before_, after_, p_most)
    when 'automation_runs' then old_agent_automation_runs(before_, after_, p_most)
    when 'deliveries' then old_agent_deliveries(before_, after_, p_most)
    when 'outbox' then old_agent_outbox(before_, after_, p_most)
    when 'prompts' then old_agent_prompts(greatest(before_, (        -- no longer than the rows that they belong to
      select agent_retention_before(r.kind, r.keep) from agent_retention r where r.kind = 'activity' and r.keep is not null)), after_, p_most)
    when 'budgets' then old_agent_budgets(before_, p_after_at, p_after, p_most)
  end;
end $$;

create function prune_agent_prompts(p_ids uuid[]) returns bigint
language plpgsql volatile set enable_seqscan = off set jit = off as $$
declare
  removed bigint;
begin
  with held as (select p.activity_id from agent_prompts p where p.activity_id = any (p_ids) for update skip locked)
  delete from agent_prompts p using held h where p.activity_id = h.activity_id;
  get diagnostics removed = row_count;
  return removed;
end $$;
comment on function prune_agent_prompts is 'Delete prompts, but for those that another transaction has locked.';

create function prune_agent_prompt_parts(p_most int) returns bigint
language plpgsql volatile set enable_seqscan = off set jit = off as $$
declare
  -- A prompt marks its parts in its own transaction: a part that was last used before the oldest prompt is in none. A
  -- day less, for transactions that go past midnight.
  oldest constant timestamptz := (select p.created_at from agent_prompts p order by p.activity_id limit 1);
  bound constant date := (least(oldest, now()) at time zone 'UTC')::date - 1;
  removed bigint;
begin
  with held as (
    select p.digest from agent_prompt_parts p where p.used_on < bound order by p.used_on limit p_most for update skip locked)
  delete from agent_prompt_parts p using held h where p.digest = h.digest;
  get diagnostics removed = row_count;
  return removed;
end $$;
comment on function prune_agent_prompt_parts is 'Delete at most p_most parts that no prompt has any more.';

-- As before, and prompts with their parts.
create or replace function prune_agent(p_kind text, p_most int default 500, p_anew boolean default false, out removed int, out more boolean)
language plpgsql volatile set enable_seqscan = off set jit = off set lock_timeout = '100ms' as $$
declare
  policy agent_retention;
  pass agent_retention_passes;
  o agent_old_rows;
  ids uuid[];
  id_ text;
  n bigint;
  t record;
begin
  removed := 0;
  more := false;
  if coalesce(p_most, 0) not between 1 and 100000 then
    raise exception 'pieces of % rows are not valid: give 1 to 100000', coalesce(p_most::text, 'null') using errcode = '22023';
  end if;
  select r.* into policy from agent_retention r where r.kind = p_kind;
  if not found then
    raise exception '% is not a kind of what is kept', coalesce(quote_literal(left(p_kind, 40)), 'null') using errcode = '22023',
      hint = 'Kinds: ' || (select string_agg(r.kind, ', ' order by r.kind) from agent_retention r) || '.';
  end if;
  if not pg_try_advisory_xact_lock(hashtextextended('retention ' || p_kind, 0)) then
    return;                                               -- somebody is at it
  end if;
  select s.* into pass from agent_retention_passes s where s.kind = p_kind;
  if p_kind = 'executions' then
    more := prune_agent_leftovers(p_most);
    if more or policy.keep is null then
      return;
    end if;
  elsif policy.keep is null then
    return;
  end if;
  if p_anew or pass.ended_at is not null and pass.began_at < clock_timestamp() - interval '1 day' then
    pass.place_at := '-infinity';
    pass.place_key := '';
    pass.began_at := clock_timestamp();
  end if;
  if p_kind = 'hour_counts' then
    with held as (
      select c.ctid as at from agent_activity_counts c
       where c.span = 'hour' and c.start < date_trunc('hour', now() - policy.keep) order by c.span, c.start limit p_most for update skip locked)
    delete from agent_activity_counts c using held h where c.ctid = h.at;
    get diagnostics removed = row_count;
    o := row(null, '-infinity', '', removed);
  else
    o := old_agent_rows(p_kind, policy.keep, pass.place_at, pass.place_key, case when p_kind = 'messages' then least(p_most, 50) else p_most end);
  end if;
  if p_kind not in ('messages', 'budgets') then
    ids := coalesce(o.going, '{}')::uuid[];
  end if;
  more := o.seen = case when p_kind = 'messages' then least(p_most, 50) else p_most end;
  if p_kind = 'activity' and ids <> '{}' then
    with held as (
      select a.id from agent_activity a where a.id = any (ids) and a.id >= ids[1] and a.id <= ids[cardinality(ids)] for update skip locked)
    delete from agent_activity a using held h where a.id = h.id and a.id >= ids[1] and a.id <= ids[cardinality(ids)];
    get diagnostics removed = row_count;
  elsif p_kind = 'executions' then
    removed := prune_agent_executions(ids);
    more := more or exists (select from agent_retention_leftovers);
  elsif p_kind = 'events' then
    with held as (select v.id from agent_events v where v.id = any (ids) for update skip locked),
    away as (
      delete from agent_events v using held h where v.id = h.id returning v.id)
    select array_agg(a.id), count(*) into ids, removed from away a;
    perform prune_agent_causes('event', ids);
  elsif p_kind = 'approvals' then
    with held as (select a.id from agent_approvals a where a.id = any (ids) for update skip locked)
    delete from agent_approvals a using held h where a.id = h.id;
    get diagnostics removed = row_count;
  elsif p_kind = 'automation_runs' then
    with held as (select r.id from agent_automation_runs r where r.id = any (ids) and r.status in ('success', 'skipped') for update skip locked),
    away as (
      delete from agent_automation_runs r using held h where r.id = h.id returning r.id)
    select array_agg(a.id), count(*) into ids, removed from away a;
    perform prune_agent_causes('run', ids);
  elsif p_kind = 'deliveries' then
    with held as (select d.id from agent_webhook_deliveries d where d.id = any (ids) and d.status in ('done', 'ignored') for update skip locked)
    delete from agent_webhook_deliveries d using held h where d.id = h.id;
    get diagnostics removed = row_count;
  elsif p_kind = 'outbox' then
    with held as (select w.id from agent_webhook_outbox w where w.id = any (ids) and w.status in ('sent', 'dead') for update skip locked),
    away as (
      delete from agent_webhook_outbox w using held h where w.id = h.id returning w.id)
    select array_agg(a.id), count(*) into ids, removed from away a;
    perform prune_agent_causes('outgoing', ids);
  elsif p_kind = 'prompts' then
    removed := prune_agent_prompts(ids);
    n := prune_agent_prompt_parts(p_most);
    removed := removed + n;
    more := more or n = p_most;
  elsif p_kind = 'budgets' then
    with held as (
      select b.scope from agent_budgets b where b.scope = any (o.going) and b.reserved_tokens = 0 and b.reserved_usd = 0 for update skip locked)
    delete from agent_budgets b using held h where b.scope = h.scope;
    get diagnostics removed = row_count;
  elsif p_kind = 'messages' then
    foreach id_ in array coalesce(o.going, '{}') loop
      select g.removed, g.gone into t from prune_agent_thread(id_, agent_retention_before(p_kind, policy.keep), p_most - removed) g;
      removed := removed + t.removed;
      if removed >= p_most then                           -- the next piece goes on with this thread
        o.place_at := (select x.updated_at - interval '1 microsecond' from agent_threads x where x.id = id_);
        o.place_key := '';
        more := true;
        exit;
      end if;
    end loop;
  end if;
  if removed > 0 or o.seen > 0 or p_anew or pass.ended_at is null or pass.began_at > pass.ended_at then
    update agent_retention_passes s
       set place_at = coalesce(o.place_at, pass.place_at), place_key = coalesce(o.place_key, pass.place_key), began_at = pass.began_at,
           ended_at = case when not more then clock_timestamp() end, removed = s.removed + prune_agent.removed
     where s.kind = p_kind;
  end if;
end $$;
