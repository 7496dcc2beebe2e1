-- Adds ended actions to the counts: the rows from counted_upto to bound, and the next rows of agent_activity_uncounted.
with fresh as materialized (
  select m.* from agent_activity_measured m
   where m.id >= @counted_upto::uuid and m.id < @bound::uuid
     and not exists (select from agent_activity_uncounted u where u.activity_id = m.id)),
listed as materialized (
  select u.activity_id from agent_activity_uncounted u
   where u.activity_id < @counted_upto::uuid and u.activity_id > @listed_upto::uuid
     and not exists (select from agent_activity_open o where o.activity_id = u.activity_id)
   order by u.activity_id limit @most::int),
late as materialized (
  select m.* from listed l join agent_activity_measured m on m.id = l.activity_id),
settled as (                                                                 -- ended, or gone
  delete from agent_activity_uncounted u
   where u.activity_id in (select l.activity_id from listed l except select x.id from late x where x.status = 'running')),
postponed as (
  insert into agent_activity_uncounted select f.id from fresh f where f.status = 'running' on conflict do nothing),
ended as materialized (
  select f.* from fresh f where f.status <> 'running'
  union all
  select l.* from late l where l.status <> 'running'),
hours as materialized (
  select e.hour, e.kind, e.skill, e.surface, e.model, count(*) as calls, count(*) filter (where e.status = 'success') as successes,
         count(*) filter (where e.status = 'error') as errors, count(*) filter (where e.status = 'pending_approval') as pending_approval,
         count(*) filter (where e.status = 'skipped') as skipped, count(*) filter (where e.status = 'unknown') as unknown,
         count(*) filter (where e.telling) as worked, count(*) filter (where e.telling and e.status = 'error') as failed,
         sum(e.prompt_tokens) as prompt_tokens, sum(e.completion_tokens) as completion_tokens, sum(e.tokens) as tokens,
         sum(e.cost_usd) as cost_usd, coalesce(sum(e.duration_ms), 0) as duration_ms, coalesce(max(e.slowest collate "C"), '') as slowest,
         sum(e.unknown_tokens) as unknown_tokens, sum(e.unknown_usd) as unknown_usd, sum(e.cached_tokens) as cached_tokens
    from ended e group by 1, 2, 3, 4, 5
  union all
  -- Model calls, once more, by the agent that acted.
  select e.hour, 'agent', lanekeeper.agent_count_key(e.agent), e.surface, e.model, count(*), count(*) filter (where e.status = 'success'),
         count(*) filter (where e.status = 'error'), 0, 0, 0, 0, 0, sum(e.prompt_tokens), sum(e.completion_tokens), sum(e.tokens),
         sum(e.cost_usd), coalesce(sum(e.duration_ms), 0), '', sum(e.unknown_tokens), sum(e.unknown_usd), sum(e.cached_tokens)
    from ended e where e.kind = 'model' group by 1, 2, 3, 4, 5
  union all
  -- Model calls of chats, once more, by the chat key of the thread.
  select e.hour, 'key', lanekeeper.agent_count_key(t.owner), e.surface, e.model, count(*), count(*) filter (where e.status = 'success'),
         count(*) filter (where e.status = 'error'), 0, 0, 0, 0, 0, sum(e.prompt_tokens), sum(e.completion_tokens), sum(e.tokens),
         sum(e.cost_usd), coalesce(sum(e.duration_ms), 0), '', sum(e.unknown_tokens), sum(e.unknown_usd), sum(e.cached_tokens)
    from ended e join agent_threads t on t.id = e.thread_id and t.owner_kind in ('key', 'visitor')
   where e.kind = 'model' group by 1, 2, 3, 4, 5
  union all
  -- The cost of model calls, once more, by the skills that they led to.
  select e.hour, 'charge', lanekeeper.agent_count_key(c.skill), e.surface, e.model, sum(c.calls), 0, 0, 0, 0, 0, 0, 0, sum(c.prompt_tokens), sum(c.completion_tokens),
         sum(c.tokens), sum(c.cost_usd), 0, '', sum(c.unknown_tokens), sum(c.unknown_usd), 0
    from ended e
   cross join lateral lanekeeper.agent_charges(
     e.led_to, e.prompt_tokens, e.completion_tokens, e.tokens, e.cost_usd, e.unknown_tokens, e.unknown_usd) c
   where e.kind = 'model' group by 1, 2, 3, 4, 5),
counted as (
  insert into agent_activity_counts as c
         (span, start, kind, skill, surface, model, calls, successes, errors, pending_approval, skipped, unknown, worked, failed,
          prompt_tokens, completion_tokens, tokens, cost_usd, duration_ms, slowest, unknown_tokens, unknown_usd, cached_tokens)
  select 'hour', h.* from hours h
  union all
  select 'day', date_trunc('day', h.hour at time zone 'UTC') at time zone 'UTC', h.kind, h.skill, h.surface, h.model, sum(h.calls),
         sum(h.successes), sum(h.errors), sum(h.pending_approval), sum(h.skipped), sum(h.unknown), sum(h.worked), sum(h.failed),
         sum(h.prompt_tokens), sum(h.completion_tokens), sum(h.tokens), sum(h.cost_usd), sum(h.duration_ms),
         max(h.slowest collate "C"), sum(h.unknown_tokens), sum(h.unknown_usd), sum(h.cached_tokens)
    from hours h group by 2, 3, 4, 5, 6
  on conflict (span, start, kind, skill, surface, model) do update
     set calls = c.calls + excluded.calls, successes = c.successes + excluded.successes, errors = c.errors + excluded.errors,
         pending_approval = c.pending_approval + excluded.pending_approval, skipped = c.skipped + excluded.skipped,
         unknown = c.unknown + excluded.unknown, worked = c.worked + excluded.worked, failed = c.failed + excluded.failed,
         prompt_tokens = c.prompt_tokens + excluded.prompt_tokens,
         completion_tokens = c.completion_tokens + excluded.completion_tokens, tokens = c.tokens + excluded.tokens,
         cost_usd = c.cost_usd + excluded.cost_usd, duration_ms = c.duration_ms + excluded.duration_ms,
         slowest = greatest(c.slowest collate "C", excluded.slowest collate "C"),
         unknown_tokens = c.unknown_tokens + excluded.unknown_tokens, unknown_usd = c.unknown_usd + excluded.unknown_usd,
         cached_tokens = c.cached_tokens + excluded.cached_tokens),
lasted as (
  insert into agent_activity_durations as d (day, skill, bucket, calls)
  select x.day, x.skill, x.bucket, count(*)
    from (select (e.hour at time zone 'UTC')::date as day, e.skill, e.bucket from ended e where e.telling and e.skill <> ''
          union all
          select (e.hour at time zone 'UTC')::date, '', e.bucket from ended e where e.telling
          union all
          select (e.hour at time zone 'UTC')::date, 'model ' || e.model, e.bucket from ended e
           where e.kind = 'model' and e.status = 'success') x
   where x.bucket is not null group by 1, 2, 3
  on conflict (day, skill, bucket) do update set calls = d.calls + excluded.calls)
select (select count(*) from ended)::int as counted, (select count(*) from listed)::int as listed,
       coalesce((select max(l.activity_id::text collate "C") from listed l), '') as listed_upto
