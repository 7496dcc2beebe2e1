-- The counts and the rows that are not counted yet, in one snapshot: as charged to skills (kind charge), by purpose
-- (kind model), by agent (kind agent) or by chat key (kind key).
with tail as materialized (
  select u.* from lanekeeper.read_agent_activity_tail(@most) u),
left_out as (
  select min(t.id::text collate "C")::uuid as id from tail t where t.beyond),
counts as (
  select c.* from agent_activity_counts c
   where c.span = 'hour' and c.start >= @since::timestamptz and c.start < least(@hours_until::timestamptz, @until::timestamptz) and c.kind = @kind
  union all
  -- Day by day, so an index serves also when these are most of the days.
  select c.*
    from generate_series(greatest(@hours_until::timestamptz, (select min(o.start) from agent_activity_counts o where o.span = 'day')),
                         least(clock_timestamp() + interval '24 hours', @until::timestamptz - interval '24 hours'), interval '24 hours') g (day)
   cross join lateral (select c.* from agent_activity_counts c where c.span = 'day' and c.start = g.day and c.kind = @kind offset 0) c),
spent as (
  select c.start, c.skill, c.surface, c.model, c.calls, c.prompt_tokens, c.completion_tokens, c.tokens, c.cost_usd, c.unknown_tokens,
         c.unknown_usd, c.cached_tokens, c.errors
    from counts c
  union all
  select l.hour, lanekeeper.agent_count_key(h.skill), l.surface, l.model, h.calls, h.prompt_tokens, h.completion_tokens, h.tokens, h.cost_usd, h.unknown_tokens,
         h.unknown_usd, h.cached_tokens, case when @kind <> 'charge' and l.status = 'error' then 1 else 0 end
    from tail l
   cross join lateral (
     select l.skill, 1 as calls, l.prompt_tokens, l.completion_tokens, l.tokens, l.cost_usd, l.unknown_tokens, l.unknown_usd,
            (select lanekeeper.agent_tokens(a.token_usage, 'cached_tokens') from agent_activity a where a.id = l.id) as cached_tokens
      where @kind = 'model'
     union all
     select lanekeeper.agent_count_key(a.agent), 1, l.prompt_tokens, l.completion_tokens, l.tokens, l.cost_usd, l.unknown_tokens, l.unknown_usd,
            lanekeeper.agent_tokens(a.token_usage, 'cached_tokens')
       from agent_activity a where @kind = 'agent' and a.id = l.id
     union all
     select lanekeeper.agent_count_key(t.owner), 1, l.prompt_tokens, l.completion_tokens, l.tokens, l.cost_usd, l.unknown_tokens, l.unknown_usd,
            lanekeeper.agent_tokens(a.token_usage, 'cached_tokens')
       from agent_activity a join agent_threads t on t.id = a.thread_id and t.owner_kind in ('key', 'visitor')
      where @kind = 'key' and a.id = l.id
     union all
     select c.*, 0 from lanekeeper.agent_charges(
       l.led_to, l.prompt_tokens, l.completion_tokens, l.tokens, l.cost_usd, l.unknown_tokens, l.unknown_usd) c
      where @kind = 'charge') h
   where not l.beyond and l.kind = 'model' and l.hour >= @since::timestamptz and l.hour < @until::timestamptz),
lines as (
  select case @by::text when 'skill' then s.skill when 'purpose' then s.skill when 'agent' then s.skill when 'key' then s.skill when 'surface' then s.surface when 'model' then s.model else '' end as key,
         case @period::text when 'hour' then s.start when 'day' then date_trunc('day', s.start at time zone 'UTC') at time zone 'UTC' end as period,
         sum(s.calls)::bigint as calls, sum(s.prompt_tokens)::bigint as prompt_tokens,
         sum(s.completion_tokens)::bigint as completion_tokens, sum(s.tokens)::bigint as tokens, sum(s.cost_usd)::float8 as cost_usd,
         sum(s.unknown_tokens)::bigint as unknown_tokens, sum(s.unknown_usd)::float8 as unknown_usd,
         sum(s.cached_tokens)::bigint as cached_tokens, sum(s.errors)::bigint as errors
    from spent s
   where (@skill::text = '' or s.skill = lanekeeper.agent_count_key(@skill)) and (@surface::text = '' or s.surface = lanekeeper.agent_count_key(@surface))
     and (@model::text = '' or s.model = lanekeeper.agent_count_key(@model))
     and (@purpose::text = '' or s.skill = lanekeeper.agent_count_key(@purpose))
     and (@agent::text = '' or s.skill = lanekeeper.agent_count_key(@agent))
   group by 1, 2)
select coalesce(l.key, '') as key, l.period, coalesce(l.calls, 0) as calls, coalesce(l.prompt_tokens, 0) as prompt_tokens,
       coalesce(l.completion_tokens, 0) as completion_tokens, coalesce(l.tokens, 0) as tokens,
       coalesce(l.cost_usd, 0) as cost_usd, coalesce(l.unknown_tokens, 0) as unknown_tokens, coalesce(l.unknown_usd, 0) as unknown_usd,
       coalesce(l.cached_tokens, 0) as cached_tokens, coalesce(l.errors, 0) as errors,
       l.calls is null as nothing,
       to_timestamp(('x' || substr(replace(o.id::text, '-', ''), 1, 12))::bit(48)::bigint / 1000.0) as left_out
  from left_out o left join lines l on true
 order by l.period desc nulls last, l.cost_usd desc, l.tokens desc, l.key
