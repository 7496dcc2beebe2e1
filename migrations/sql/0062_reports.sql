-- Spend, slowest, failing, audit: a view each, which the command line, the HTTP API and the pages read, too.
--
-- A model call is charged to the skill calls that it led to. What it led to is known when its answer is there, and is written with it
-- (agent_activity.led_to), so that a charge never changes. Its tokens and its money are split by the number of calls of each skill: skills in
-- the order of their names, each up to the whole part of what is due to it and those before it, so that the shares add up to exactly what the
-- call used. The call itself is counted once, at the skill that it called most often, or the first of these. One that led to no skill is
-- charged to its surface alone: the skill is empty then.

alter table agent_activity add column led_to jsonb not null default '{}';
comment on column agent_activity.led_to is 'Of a model call: how often its answer calls each skill, {"fetch": 25}. Calls of what is no skill are not in it.';
alter table agent_activity add column cause_id uuid;
comment on column agent_activity.cause_id is 'The model call whose answer asked for this, where it was one.';

-- A partition on its way out may be attached again, and then needs the same columns.
do $$
declare
  p text;
begin
  for p in select r.partition::text from agent_activity_retired r where to_regclass(r.partition::text) is not null loop
    if not exists (select from pg_inherits i where i.inhrelid = to_regclass(p)) then
      execute format('alter table %s add column if not exists led_to jsonb not null default ''{}'', add column if not exists cause_id uuid', p);
    end if;
  end loop;
end $$;

alter table agent_activity_counts add column unknown_tokens bigint not null default 0;
alter table agent_activity_counts add column unknown_usd numeric not null default 0;
comment on column agent_activity_counts.unknown_usd is 'The part of cost_usd that no provider reported.';
alter table agent_activity_counts add column slowest text not null default '';
comment on column agent_activity_counts.slowest is 'The slowest call that agent_skill_calls has: 13 digits of milliseconds, then its trace. Empty when there is none.';

create function agent_slowest_key(p_ms bigint, p_trace_id text) returns text language sql immutable parallel safe as $$
  select lpad(greatest(0, least(p_ms, 1000000000000))::text, 13, '0') || left(p_trace_id, 300)
$$;
comment on function agent_slowest_key is 'A duration and a trace as text whose greatest, in the collation "C", is the slowest.';

create function agent_charges(p_led_to jsonb, p_prompt bigint, p_completion bigint, p_tokens bigint, p_cost numeric, p_unknown bigint, p_unknown_usd numeric)
returns table (skill text, calls bigint, prompt_tokens bigint, completion_tokens bigint, tokens bigint, cost_usd numeric, unknown_tokens bigint, unknown_usd numeric)
language sql immutable parallel safe as $$
  select '', 1::bigint, p_prompt, p_completion, p_tokens, p_cost, p_unknown, p_unknown_usd where p_led_to = '{}' or not p_led_to @? '$.keyvalue().value ? (@ > 0)'
  union all
  select agent_count_key(c.skill), (c.place = 1)::int::bigint, (div(p_prompt * c.upto, c.total) - div(p_prompt * (c.upto - c.n), c.total))::bigint,
         (div(p_completion * c.upto, c.total) - div(p_completion * (c.upto - c.n), c.total))::bigint,
         (div(p_tokens * c.upto, c.total) - div(p_tokens * (c.upto - c.n), c.total))::bigint,
         round(p_cost * c.upto / c.total, 6) - round(p_cost * (c.upto - c.n) / c.total, 6),
         (div(p_unknown * c.upto, c.total) - div(p_unknown * (c.upto - c.n), c.total))::bigint,
         case when c.upto < c.total then round(p_unknown_usd * c.upto / c.total, 6) else p_unknown_usd end
           - case when c.upto > c.n then round(p_unknown_usd * (c.upto - c.n) / c.total, 6) else 0 end
    from (select l.skill, l.n, sum(l.n) over (order by l.skill collate "C") as upto, sum(l.n) over () as total,
                 row_number() over (order by l.n desc, l.skill collate "C") as place
            from (select k.key as skill, least((k.value #>> '{}')::numeric, 1e6) as n
                    from jsonb_each(case when p_led_to <> '{}' then p_led_to else '{}' end) k where jsonb_typeof(k.value) = 'number') l
           where l.n > 0) c
$$;
comment on function agent_charges is 'What a model call is charged to: the skills that it led to, each with its share, or none. The shares add up to the whole.';

create or replace view agent_activity_measured as
  select a.id, a.skill_name, a.created_at, a.status, date_trunc('hour', a.created_at at time zone 'UTC') at time zone 'UTC' as hour, a.kind,
         agent_count_key(case a.kind when 'model' then coalesce(nullif(a.purpose, ''), a.skill_name) else a.skill_name end) as skill,
         agent_count_key(a.surface) as surface, agent_count_key(a.model) as model,
         a.kind = 'call' and a.status in ('success', 'error')
           and a.error_class not in ('invalid_params', 'unknown_tool', 'denied', 'stale', 'cancelled', 'interrupted', 'stall',
                                     'disabled', 'on_trial', 'yielded', 'budget') as telling,
         case a.kind when 'model' then agent_count_tokens(a.token_usage ->> 'prompt_tokens') else 0 end as prompt_tokens,
         case a.kind when 'model' then agent_count_tokens(a.token_usage ->> 'completion_tokens') else 0 end as completion_tokens,
         case a.kind when 'model' then agent_count_tokens(a.token_usage ->> 'total_tokens') else 0 end as tokens,
         case when a.kind = 'model' and a.cost_usd <> 'NaN' then a.cost_usd else 0 end as cost_usd,
         case when a.duration_ms is not null then greatest(0, least(a.duration_ms, 1000000000000)) end as duration_ms,
         a.trace_id, a.led_to,
         case a.kind when 'model' then least(agent_tokens(a.token_usage, 'unknown_tokens'), 1000000000000) else 0 end as unknown_tokens,
         case a.kind when 'model' then agent_usd(a.token_usage, 'unknown_usd') else 0 end as unknown_usd
    from agent_activity a;
comment on view agent_activity_measured is
  'What each row of the log counts for. telling: it says something about its skill, as in agent_skill_calls.';

create or replace function count_agent_activity(
  p_most int default 20000, p_lag interval default '20 seconds', out counted int, out more boolean)
language plpgsql volatile set enable_seqscan = off set jit = off set plan_cache_mode = force_custom_plan as $$
declare
  s agent_activity_counted;
  -- From when the transaction began: that is before it has an xid, whatever was done in it.
  horizon uuid := agent_uuid7_floor(now() - p_lag);
  bound uuid;
  seen int;
  furthest uuid;
begin
  if not coalesce(p_most > 0 and p_lag > interval '0', false) then
    raise exception 'a pass counts at least one row, and lags behind the clock' using errcode = '22023';
  end if;
  counted := 0;
  more := false;
  -- Idle is the common case, and costs no write.
  select x.* into s from agent_activity_counted x;
  if s.candidate is null and not exists (select from agent_activity a where a.id >= s.counted_upto and a.id < horizon)
     and not exists (select from agent_activity_uncounted u
                      where u.activity_id < s.counted_upto
                        and not exists (select from agent_activity_open o where o.activity_id = u.activity_id)) then
    return;
  end if;
  select x.* into s from agent_activity_counted x for update skip locked;
  if not found then
    return;
  end if;
  bound := s.counted_upto;
  if s.candidate_xid >= pg_snapshot_xmax(pg_current_snapshot()) then
    s.candidate := null;                    -- of another server: the database was restored from a dump
  elsif s.candidate_xid <= pg_snapshot_xmin(pg_current_snapshot()) then
    select a.id into bound from agent_activity a
     where a.id >= s.counted_upto and a.id < s.candidate order by a.id offset p_most limit 1;
    bound := coalesce(bound, s.candidate);
  end if;
  with fresh as materialized (
    select m.* from agent_activity_measured m
     where m.id >= s.counted_upto and m.id < bound
       and not exists (select from agent_activity_uncounted u where u.activity_id = m.id)),
  looked as materialized (
    select u.activity_id from agent_activity_uncounted u
     where u.activity_id < s.counted_upto and u.activity_id > s.looked
       and not exists (select from agent_activity_open o where o.activity_id = u.activity_id)
     order by u.activity_id limit p_most),
  found as materialized (
    select l.activity_id, m.* from looked l left join agent_activity_measured m on m.id = l.activity_id),
  settled as (
    delete from agent_activity_uncounted u using found f
     where u.activity_id = f.activity_id and f.status is distinct from 'running'),   -- ended, or gone
  postponed as (
    insert into agent_activity_uncounted select f.id from fresh f where f.status = 'running' on conflict do nothing),
  ended as materialized (
    select f.* from fresh f where f.status <> 'running'
    union all
    select f.id, f.skill_name, f.created_at, f.status, f.hour, f.kind, f.skill, f.surface, f.model, f.telling, f.prompt_tokens, f.completion_tokens,
           f.tokens, f.cost_usd, f.duration_ms, f.trace_id, f.led_to, f.unknown_tokens, f.unknown_usd
      from found f where f.status <> 'running'),
  hours as materialized (
    select e.hour, e.kind, e.skill, e.surface, e.model, count(*) as calls, count(*) filter (where e.status = 'success') as successes,
           count(*) filter (where e.status = 'error') as errors, count(*) filter (where e.status = 'pending_approval') as pending_approval,
           count(*) filter (where e.status = 'skipped') as skipped, count(*) filter (where e.status = 'unknown') as unknown,
           count(*) filter (where e.telling) as worked, count(*) filter (where e.telling and e.status = 'error') as failed,
           sum(e.prompt_tokens) as prompt_tokens, sum(e.completion_tokens) as completion_tokens, sum(e.tokens) as tokens,
           sum(e.cost_usd) as cost_usd, coalesce(sum(e.duration_ms), 0) as duration_ms,
           coalesce(max(agent_slowest_key(e.duration_ms, e.trace_id) collate "C") filter (where e.telling), '') as slowest,
           sum(e.unknown_tokens) as unknown_tokens, sum(e.unknown_usd) as unknown_usd
      from ended e group by 1, 2, 3, 4, 5
    union all
    -- What model calls cost, once more, by the skills that they led to.
    select e.hour, 'charge', c.skill, e.surface, e.model, sum(c.calls), 0, 0, 0, 0, 0, 0, 0, sum(c.prompt_tokens), sum(c.completion_tokens),
           sum(c.tokens), sum(c.cost_usd), 0, '', sum(c.unknown_tokens), sum(c.unknown_usd)
      from ended e
     cross join lateral agent_charges(e.led_to, e.prompt_tokens, e.completion_tokens, e.tokens, e.cost_usd, e.unknown_tokens, e.unknown_usd) c
     where e.kind = 'model' group by 1, 2, 3, 4, 5),
  added as (
    insert into agent_activity_counts as c
           (span, start, kind, skill, surface, model, calls, successes, errors, pending_approval, skipped, unknown, worked, failed,
            prompt_tokens, completion_tokens, tokens, cost_usd, duration_ms, slowest, unknown_tokens, unknown_usd)
    select 'hour', h.* from hours h
    union all
    select 'day', date_trunc('day', h.hour at time zone 'UTC') at time zone 'UTC', h.kind, h.skill, h.surface, h.model, sum(h.calls),
           sum(h.successes), sum(h.errors), sum(h.pending_approval), sum(h.skipped), sum(h.unknown), sum(h.worked), sum(h.failed),
           sum(h.prompt_tokens), sum(h.completion_tokens), sum(h.tokens), sum(h.cost_usd), sum(h.duration_ms),
           max(h.slowest collate "C"), sum(h.unknown_tokens), sum(h.unknown_usd)
      from hours h group by 2, 3, 4, 5, 6
    on conflict (span, start, kind, skill, surface, model) do update
       set calls = c.calls + excluded.calls, successes = c.successes + excluded.successes, errors = c.errors + excluded.errors,
           pending_approval = c.pending_approval + excluded.pending_approval, skipped = c.skipped + excluded.skipped,
           unknown = c.unknown + excluded.unknown, worked = c.worked + excluded.worked, failed = c.failed + excluded.failed,
           prompt_tokens = c.prompt_tokens + excluded.prompt_tokens,
           completion_tokens = c.completion_tokens + excluded.completion_tokens, tokens = c.tokens + excluded.tokens,
           cost_usd = c.cost_usd + excluded.cost_usd, duration_ms = c.duration_ms + excluded.duration_ms,
           slowest = greatest(c.slowest collate "C", excluded.slowest collate "C"),
           unknown_tokens = c.unknown_tokens + excluded.unknown_tokens, unknown_usd = c.unknown_usd + excluded.unknown_usd),
  lasted as (
    insert into agent_activity_durations as d (day, skill, bucket, calls)
    select (e.hour at time zone 'UTC')::date, e.skill, agent_duration_bucket(e.duration_ms), count(*)
      from ended e where e.telling and e.duration_ms is not null group by 1, 2, 3
    on conflict (day, skill, bucket) do update set calls = d.calls + excluded.calls)
  select (select count(*) from ended), (select count(*) from looked), (select max(l.activity_id::text collate "C")::uuid from looked l)
    into counted, seen, furthest;
  more := bound < s.candidate and bound > s.counted_upto or seen = p_most;
  if bound = s.candidate then
    s.candidate := null;
  end if;
  if s.candidate is null and exists (select from agent_activity a where a.id >= bound and a.id < horizon) then
    s.candidate := horizon;
    s.candidate_xid := pg_current_xact_id();
  end if;
  update agent_activity_counted
     set counted_upto = bound, candidate = s.candidate,
         candidate_xid = case when s.candidate is not null then s.candidate_xid end,
         looked = case when seen = p_most then furthest else '00000000-0000-0000-0000-000000000000' end;
end $$;

-- What was counted so far is charged to its surface: what it led to was not written down.
select from agent_activity_counted for update;
insert into agent_activity_counts (span, start, kind, skill, surface, model, calls, prompt_tokens, completion_tokens, tokens, cost_usd)
select c.span, c.start, 'charge', '', c.surface, c.model, sum(c.calls), sum(c.prompt_tokens), sum(c.completion_tokens), sum(c.tokens), sum(c.cost_usd)
  from agent_activity_counts c where c.kind = 'model' group by 1, 2, 5, 6;

create function uncounted_agent_charges(p_most int)
returns table (id uuid, hour timestamptz, skill text, surface text, model text, calls bigint, prompt_tokens bigint, completion_tokens bigint,
               tokens bigint, cost_usd numeric, unknown_tokens bigint, unknown_usd numeric, beyond boolean)
language sql stable set enable_seqscan = off set jit = off as $$
  select u.id, u.hour, c.skill, u.surface, u.model, c.calls, c.prompt_tokens, c.completion_tokens, c.tokens, c.cost_usd, c.unknown_tokens,
         c.unknown_usd, u.beyond
    from uncounted_agent_activity(p_most) u
    join agent_activity_measured m on m.id = u.id
   cross join lateral agent_charges(m.led_to, u.prompt_tokens, u.completion_tokens, u.tokens, u.cost_usd, m.unknown_tokens, m.unknown_usd) c
   where u.kind = 'model'
$$;
comment on function uncounted_agent_charges is 'What the counts lack of what model calls are charged to; arguments and beyond as in uncounted_agent_activity.';

-- Spend ---------------------------------------------------------------------------------------------

create or replace view agent_spend as
  select s.skill, s.surface, s.model, (s.start at time zone 'UTC')::date as day, sum(s.calls)::bigint as calls,
         sum(s.prompt_tokens)::bigint as prompt_tokens, sum(s.completion_tokens)::bigint as completion_tokens,
         sum(s.tokens)::bigint as tokens, sum(s.cost_usd) as cost_usd, sum(s.unknown_tokens)::bigint as unknown_tokens, sum(s.unknown_usd) as unknown_usd
    from (select c.skill, c.surface, c.model, c.start, c.calls, c.prompt_tokens, c.completion_tokens, c.tokens, c.cost_usd, c.unknown_tokens, c.unknown_usd
            from agent_activity_counts c where c.span = 'day' and c.kind = 'charge'
          union all
          select u.skill, u.surface, u.model, u.hour, u.calls, u.prompt_tokens, u.completion_tokens, u.tokens, u.cost_usd, u.unknown_tokens, u.unknown_usd
            from uncounted_agent_charges(2000000000) u) s
   group by 1, 2, 3, 4;
comment on view agent_spend is
  'Model calls, tokens and money by the skill that they led to (empty: none, it is the surface''s), surface, model and day (UTC): of the counts, so that '
  'what retention took away is in it, and of the rows that are not counted yet. A usage or a cost that is no number counts for nothing. unknown_* is the part that no provider reported.';

create view agent_spend_by_purpose as
  select s.skill as purpose, s.surface, s.model, (s.start at time zone 'UTC')::date as day, sum(s.calls)::bigint as calls,
         sum(s.prompt_tokens)::bigint as prompt_tokens, sum(s.completion_tokens)::bigint as completion_tokens,
         sum(s.tokens)::bigint as tokens, sum(s.cost_usd) as cost_usd, sum(s.unknown_tokens)::bigint as unknown_tokens, sum(s.unknown_usd) as unknown_usd
    from (select c.skill, c.surface, c.model, c.start, c.calls, c.prompt_tokens, c.completion_tokens, c.tokens, c.cost_usd, c.unknown_tokens, c.unknown_usd
            from agent_activity_counts c where c.span = 'day' and c.kind = 'model'
          union all
          select u.skill, u.surface, u.model, u.hour, 1, u.prompt_tokens, u.completion_tokens, u.tokens, u.cost_usd, m.unknown_tokens, m.unknown_usd
            from uncounted_agent_activity(2000000000) u
           cross join lateral (select n.unknown_tokens, n.unknown_usd from agent_activity_measured n where n.id = u.id offset 0) m
           where u.kind = 'model') s
   group by 1, 2, 3, 4;
comment on view agent_spend_by_purpose is 'The same sums as agent_spend, by what the model was called for: a phase, a turn, an automation.';

-- Slowest and failing -------------------------------------------------------------------------------

create function agent_skill_figures_since(p_since timestamptz, p_read int default 10000)
returns table (skill text, calls bigint, failed bigint, streak bigint, p50_ms float8, p95_ms float8, max_ms bigint, slowest_trace_id text)
language sql stable set enable_seqscan = off set jit = off as $$
  with began as materialized (
    -- hour and day: from when on whole ones are added up. The first hour began before the time did that is asked for.
    select n.since, n.hour, (date_trunc('day', (n.hour - interval '1 microsecond') at time zone 'UTC') + interval '1 day') at time zone 'UTC' as day
      from (select x.since, date_trunc('hour', x.since at time zone 'UTC') at time zone 'UTC' as hour
              from (select greatest(p_since, 'epoch') as since) x) n),
  tail as materialized (
    select u.id, u.skill, u.hour, u.telling, u.status, u.duration_ms from uncounted_agent_activity(2000000000) u
     where u.kind <> 'model' and (u.hour at time zone 'UTC')::date >= (select (b.since at time zone 'UTC')::date from began b)),
  sums as materialized (
    select x.skill, sum(x.calls) as calls, sum(x.worked)::bigint as worked, sum(x.failed)::bigint as failed
      from (select c.skill, c.calls, c.worked, c.failed from agent_activity_counts c
             where c.span = 'hour' and c.start >= (select b.hour from began b) and c.start < (select b.day from began b) and c.kind not in ('model', 'charge')
            union all
            select c.skill, c.calls, c.worked, c.failed from agent_activity_counts c
             where c.span = 'day' and c.start >= (select b.day from began b) and c.kind not in ('model', 'charge')
            union all
            select t.skill, 1, t.telling::int, (t.telling and t.status = 'error')::int from tail t
             where t.hour >= (select b.hour from began b)) x
     group by x.skill),
  ranked as materialized (
    select s.name, s.enabled_at, u.calls, u.worked, u.failed, sum(u.calls) over (order by u.calls, s.name) <= p_read as few
      from sums u join agent_skills s on s.name = u.skill),
  -- Of few calls: the rows.
  little as (
    select r.name, x.calls, x.failed, x.streak, x.p50_ms, x.p95_ms, x.slowest
      from ranked r
     cross join lateral (
           select count(*) as calls, count(*) filter (where c.status = 'error') as failed,
                  count(*) filter (where c.status = 'error' and c.created_at > greatest(c.last_ok, r.enabled_at)) as streak,
                  percentile_cont(0.5) within group (order by c.duration_ms) as p50_ms,
                  percentile_cont(0.95) within group (order by c.duration_ms) as p95_ms,
                  max(agent_slowest_key(c.duration_ms, c.trace_id) collate "C") as slowest
             from (select k.status, k.created_at, k.duration_ms, k.trace_id, max(k.created_at) filter (where k.status = 'success') over () as last_ok
                     from agent_skill_calls k
                    where k.skill_name = r.name and k.id >= (select agent_uuid7_floor(b.since) from began b)
                      and k.created_at >= (select b.since from began b)) c) x
     where r.few),
  -- Of many: what is counted, without what came in the first hour before the time that is asked for.
  many as materialized (
    select r.name, r.enabled_at, r.worked - e.worked as worked, r.failed - e.failed as failed
      from ranked r
     cross join lateral (
           select count(*) as worked, count(*) filter (where k.status = 'error') as failed from agent_skill_calls k
            where k.skill_name = r.name and k.id >= (select agent_uuid7_floor(b.hour) from began b)
              and k.id < (select agent_uuid7_floor(b.since) from began b)) e
     where not r.few),
  -- A streak begins in the last hour that has a success, in that of the beginning, or in that in which the skill was enabled.
  streaks as materialized (
    select m.name, m.enabled_at, greatest(ok.hour, live.hour, date_trunc('hour', greatest(b.since, m.enabled_at) at time zone 'UTC') at time zone 'UTC') as hour
      from many m
     cross join began b
      left join lateral (
           select c.start as hour from agent_activity_counts c
            where c.skill = m.name and c.span = 'hour' and c.start >= b.hour and c.kind = 'call' and c.worked > c.failed
            order by c.start desc limit 1) ok on true
      left join lateral (
           select max(t.hour) as hour from tail t where t.skill = m.name and t.hour >= b.hour and t.telling and t.status = 'success') live on true
     where m.failed > 0),
  failures as (
    select s.name, later.failed + live.failed + within.failed as failed
      from streaks s
     cross join lateral (
           select coalesce(sum(c.failed), 0)::bigint as failed from agent_activity_counts c
            where c.skill = s.name and c.span = 'hour' and c.start > s.hour and c.kind = 'call') later
     cross join lateral (
           select count(*) as failed from tail t where t.skill = s.name and t.hour > s.hour and t.telling and t.status = 'error') live
      left join lateral (
           select k.id from agent_skill_calls k
            where k.skill_name between s.name and s.name and k.status = 'success'
              and k.id >= agent_uuid7_floor(s.hour) and k.id < agent_uuid7_floor(s.hour + interval '1 hour')
            order by k.skill_name desc, k.id desc limit 1) ok on true
     cross join lateral (
           select count(*) as failed from agent_skill_calls k
            where k.skill_name = s.name and k.status = 'error' and k.id >= coalesce(ok.id, agent_uuid7_floor(s.hour))
              and k.id < agent_uuid7_floor(s.hour + interval '1 hour')
              and k.created_at > s.enabled_at and k.created_at >= (select b.since from began b)) within),
  slowest as (
    select x.skill, max(x.slowest collate "C") as slowest
      from (select c.skill, c.slowest from agent_activity_counts c
             where c.span = 'hour' and c.start >= (select b.hour from began b) and c.start < (select b.day from began b) and c.kind = 'call'
            union all
            select c.skill, c.slowest from agent_activity_counts c
             where c.span = 'day' and c.start >= (select b.day from began b) and c.kind = 'call'
            union all
            select t.skill, agent_slowest_key(t.duration_ms, a.trace_id)
              from (select t.*, row_number() over (partition by t.skill order by t.duration_ms desc) as place
                      from tail t where t.telling and t.duration_ms is not null) t
              join agent_activity a on a.id = t.id
             where t.place = 1) x
     where x.skill in (select m.name from many m) group by x.skill),
  lasted as (
    select y.skill, y.bucket, sum(y.calls) as calls
      from (select d.skill, d.bucket, d.calls from agent_activity_durations d
             where d.day >= (select (b.since at time zone 'UTC')::date from began b) and d.skill in (select m.name from many m)
            union all
            select t.skill, agent_duration_bucket(t.duration_ms), 1 from tail t
             where t.telling and t.duration_ms is not null and t.skill in (select m.name from many m)) y
     group by y.skill, y.bucket),
  ladder as (
    select l.skill, l.bucket, sum(l.calls) over (partition by l.skill order by l.bucket)::float8 as upto,
           sum(l.calls) over (partition by l.skill)::float8 - 1 as last
      from lasted l),
  steps as (
    select l.skill, 0.5 * l.last as half, 0.95 * l.last as most,
           agent_bucket_duration(min(l.bucket) filter (where l.upto > floor(0.5 * l.last))) as half_low,
           agent_bucket_duration(min(l.bucket) filter (where l.upto > ceil(0.5 * l.last))) as half_high,
           agent_bucket_duration(min(l.bucket) filter (where l.upto > floor(0.95 * l.last))) as most_low,
           agent_bucket_duration(min(l.bucket) filter (where l.upto > ceil(0.95 * l.last))) as most_high
      from ladder l group by l.skill, l.last)
  select x.name, x.calls, x.failed, x.streak, x.p50_ms, x.p95_ms, nullif(left(x.slowest, 13), '')::bigint, substr(x.slowest, 14)
    from (select l.* from little l
          union all
          select m.name, m.worked, m.failed, coalesce(f.failed, 0),
                 s.half_low + (s.half_high - s.half_low) * (s.half - floor(s.half)), s.most_low + (s.most_high - s.most_low) * (s.most - floor(s.most)),
                 w.slowest
            from many m left join failures f on f.name = m.name left join steps s on s.skill = m.name left join slowest w on w.skill = m.name) x
$$;
comment on function agent_skill_figures_since is
  'What agent_skill_figures says, since a moment: calls, failures, failures in a row up to now, durations. Before the hour counts that are kept (35 '
  'days), it begins at the next midnight (UTC).';

create or replace function agent_skill_figures(p_read int default 10000)
returns table (skill text, calls bigint, failed bigint, streak bigint, p50_ms float8, p95_ms float8)
language sql stable as $$
  select f.skill, f.calls, f.failed, f.streak, f.p50_ms, f.p95_ms from agent_skill_figures_since(clock_timestamp() - interval '7 days', p_read) f
$$;

create function agent_slowest_skills_since(p_since timestamptz)
returns table (skill text, calls bigint, p50_ms float8, p95_ms float8, max_ms bigint, slowest_trace_id text)
language sql stable as $$
  select f.skill, f.calls, f.p50_ms, f.p95_ms, f.max_ms, f.slowest_trace_id
    from agent_skill_figures_since(p_since) f where f.p95_ms is not null order by f.p95_ms desc, f.skill
$$;
comment on function agent_slowest_skills_since is
  'How long the calls of each skill take, since a moment, the slowest first: of the skills there are, the calls that agent_skill_calls has. Where there '
  'are very many, p50 and p95 are right to 2.5 per cent, over whole days (UTC).';

create view agent_slowest_skills as
  select s.* from agent_slowest_skills_since(clock_timestamp() - interval '7 days') s;
comment on view agent_slowest_skills is 'agent_slowest_skills_since, the last 7 days.';

create function agent_failing_skills_since(p_since timestamptz)
returns table (skill text, calls bigint, errors bigint, rate float8, streak bigint, p50_ms float8, p95_ms float8, last_error text, last_error_class text,
               last_failed_at timestamptz, last_trace_id text, state text)
language sql stable as $$
  with failed as materialized (
    select f.* from agent_skill_figures_since(p_since) f where f.failed > 0),
  health as materialized (
    select h.skill, h.streak, h.state from agent_skill_health h where h.skill in (select f.skill from failed f)),
  -- The hour of the last failure: of the counts, or of what is not counted yet.
  tail as materialized (
    select u.skill, max(u.hour) as hour from uncounted_agent_activity(2000000000) u where u.telling and u.status = 'error' group by u.skill)
  select f.skill, f.calls, f.failed, f.failed::float8 / f.calls, coalesce(h.streak, 0), coalesce(f.p50_ms, 0), coalesce(f.p95_ms, 0),
         coalesce(l.error_message, ''), l.error_class, l.created_at, l.trace_id, h.state
    from failed f
    left join health h on h.skill = f.skill
    left join tail t on t.skill = f.skill
    left join lateral (
         select c.start as hour from agent_activity_counts c
          where c.skill = f.skill and c.span = 'hour' and c.kind = 'call' and c.failed > 0 order by c.start desc limit 1) c on true
    left join lateral (
         select k.error_message, k.error_class, k.created_at, k.trace_id from agent_skill_calls k
          where k.skill_name between f.skill and f.skill and k.status = 'error' and k.id >= agent_uuid7_floor(greatest(t.hour, c.hour))
          order by k.skill_name desc, k.id desc limit 1) l on true
   order by f.failed desc, f.skill
$$;
comment on function agent_failing_skills_since is
  'The skills that failed since a moment, those that failed most first: how often, why the last time, and what agent_skill_health says of them now '
  '(streak, state).';

create view agent_failing_skills as
  select f.* from agent_failing_skills_since(clock_timestamp() - interval '7 days') f;
comment on view agent_failing_skills is 'agent_failing_skills_since, the last 7 days.';

-- Audit ---------------------------------------------------------------------------------------------

create function agent_audit_object(p_input jsonb) returns text language sql immutable parallel safe as $$
  select coalesce(string_agg(left(v.word || ' ' || v.name, 200), ', ' order by v.place), '')
    from (values
      (1, 'decision:', p_input ->> 'decision'), (2, 'approval', p_input ->> 'approval_id'), (3, 'skill', p_input ->> 'skill'),
      (4, 'automation', p_input ->> 'automation'), (5, 'objective', p_input ->> 'objective'), (6, 'step', p_input ->> 'step'),
      (7, 'conflict', p_input ->> 'conflict'), (8, 'event', p_input ->> 'event'),
      (9, case when p_input ? 'category' then 'memory' else 'key' end, concat_ws(' / ', p_input ->> 'category', p_input ->> 'key')),
      (10, 'lane', p_input ->> 'lane'), (11, 'execution', p_input ->> 'execution'), (12, 'flow', p_input ->> 'flow'),
      (13, 'endpoint', p_input ->> 'endpoint'), (14, 'target', p_input ->> 'target'), (15, 'delivery', p_input ->> 'delivery_id'),
      (16, 'message', p_input ->> 'webhook_id'), (17, 'thread', p_input ->> 'thread_id'), (18, 'access', p_input ->> 'access_id'),
      (19, 'run', p_input ->> 'run'), (20, 'MCP server', p_input ->> 'server'), (21, 'tool', p_input ->> 'tool'),
      (22, 'session', p_input ->> 'session'), (23, 'command', p_input ->> 'command'),
      (24, 'rows:', coalesce(p_input ->> 'kinds', p_input ->> 'keep')),
      (25, 'changed:', case when jsonb_typeof(p_input -> 'changed') = 'array'
                            then (select string_agg(c, ', ') from jsonb_array_elements_text(p_input -> 'changed') c) end)) v (place, word, name)
   where v.name <> ''
$$;
comment on function agent_audit_object is 'What an act was done to, from the input of its row: each thing with its kind.';

-- Each part is looked up row by row (offset 0), so a page reads as much as it shows, however large the log is.
create view agent_audit as
  select a.id, a.created_at as at, a.finished_at,
         case
           when a.agent = 'admin' or a.kind = 'note' and (a.skill_name in ('break_lane', 'decide_approval') or a.execution_id is null and a.surface = 'operate' and a.skill_name <> 'mcp_sync')
             then coalesce(nullif(a.input ->> 'by', ''), 'admin')
           when a.skill_name in ('webhook_refused', 'webhook_conflict') then 'sender'
           else a.agent end as actor,
         a.kind, a.skill_name as act,
         case when a.kind = 'model' then '' else agent_audit_object(a.input) end as object,
         coalesce(nullif(a.input ->> 'reason', ''), case when a.agent = 'admin' then nullif(a.purpose, '') end,
                  case when a.cause_id is not null then 'the model asked for it' || case when a.purpose <> '' then ', for ' || a.purpose else '' end end,
                  'for ' || nullif(a.purpose, ''), 'part of ' || p.skill_name, o.what, '') as reason,
         coalesce(o.what, '') as origin,
         case
           when a.surface = 'operate' and a.skill_name not in ('mcp_sync', 'close_approval') or a.agent = 'admin' then 'admin'
           when t.participant <> '' then format('%s in thread %s', t.participant, t.id)
           when t.id is not null then format('visitor in thread %s', t.id)
           when a.surface = 'chat' then 'visitor'
           when a.surface = 'webhook' then format('sender to %s', coalesce(nullif(a.input ->> 'endpoint', ''), nullif(o.endpoint, ''), 'a webhook'))
           else a.agent end as on_behalf_of,
         a.status, a.error_class, coalesce(a.error_message, '') as error_message, a.model,
         agent_tokens(a.token_usage, 'total_tokens') as tokens, a.cost_usd, a.duration_ms, a.surface, a.trace_id, a.execution_id,
         a.parent_id, a.cause_id, coalesce(a.thread_id, x.thread_id, '') as thread_id, a.lane
    from agent_activity a
    left join lateral (select e.id, e.thread_id from agent_executions e where e.id = a.execution_id offset 0) x on true
    left join lateral (select h.id, h.participant from agent_threads h where h.id = coalesce(a.thread_id, x.thread_id) offset 0) t on true
    left join lateral (select u.skill_name from agent_activity u where u.id = a.parent_id offset 0) p on true
    left join lateral (select c.what, c.detail ->> 'endpoint' as endpoint from agent_cause_of_execution(a.execution_id) c
                        where a.execution_id is not null and c.what is not null offset 0) o on true;
comment on view agent_audit is
  'Who did what, to which object, when, why, on whose behalf, with what result: every row of the log. Give it a range of ids, a trace or a skill (act), by which there '
  'are indexes. reason is what an admin gave, what a model was called for, or what the act is part of; cause_id the model call that asked for '
  'it; origin what began the run.';
