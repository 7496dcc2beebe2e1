-- Views anyone can read.

create view agent_locks_live as
  select l.lane, l.locked_by, l.execution_id,
         coalesce(e.trace_id, substring(l.locked_by from '^(?:hb|op|ch|wh|fl)_[0-9A-HJKMNP-TV-Z]{26}')) as trace_id,
         l.fencing_token, clock_timestamp() - l.locked_at as held_for,
         case when not l.parked then l.expires_at - clock_timestamp() end as expires_in,
         l.parked
    from agent_locks l left join agent_executions e on e.id = l.execution_id
   where l.locked_by <> '' and l.expires_at > clock_timestamp()
  union all
  select 'execution:' || e.id, w.id::text, e.id, e.trace_id, e.claim,
         clock_timestamp() - e.updated_at, w.expires_at - clock_timestamp(), false
    from agent_executions e join agent_workers w on w.id = e.claimed_by
   where e.claimed_by is not null and w.expires_at > clock_timestamp();
comment on view agent_locks_live is
  'Every lane that is held now, and every execution that is run now, with its holder and the time left (null when parked).';

create view agent_executions_by_status as
  with live as (
    select e.status, count(*) as count, avg(extract(epoch from clock_timestamp() - e.created_at)) as age
      from agent_executions e where e.status in ('pending', 'running', 'waiting') group by e.status)
  select s.status, coalesce(l.count, 0) as count, coalesce(l.age, 0)::numeric(14, 1) as avg_age_seconds
    from unnest(array['pending', 'running', 'waiting']) s (status) left join live l on l.status = s.status;

create view agent_executions_waiting as
  select e.id, e.trace_id, e.surface, e.agent, e.flow, e.waiting_for, e.waiting_key, e.waiting_until, e.waiting_data,
         clock_timestamp() - e.updated_at as waiting_time
    from agent_executions e where e.status = 'waiting' order by e.waiting_until;

create view agent_executions_stuck as
  select e.id, e.trace_id, e.surface, e.agent, e.flow, e.waiting_for, e.waiting_key, e.waiting_until, e.updated_at
    from agent_executions e
   where e.status = 'waiting' and e.waiting_until < clock_timestamp()
     and e.updated_at < clock_timestamp() - interval '1 hour';

create view agent_spend as
  select coalesce(nullif(a.purpose, ''), a.skill_name) as skill, a.surface, a.model,
         (a.created_at at time zone 'UTC')::date as day, count(*) as calls,
         sum(coalesce((a.token_usage ->> 'prompt_tokens')::bigint, 0))::bigint as prompt_tokens,
         sum(coalesce((a.token_usage ->> 'completion_tokens')::bigint, 0))::bigint as completion_tokens,
         sum(coalesce((a.token_usage ->> 'total_tokens')::bigint, 0))::bigint as tokens,
         sum(a.cost_usd) as cost_usd
    from agent_activity a where a.kind = 'model'
   group by 1, 2, 3, 4;
comment on view agent_spend is 'Model calls, tokens and money by what they were made for, surface, model and day (UTC).';

-- What counts as a call of a skill: finished, and neither skipped nor refused for a model's bad arguments.
create view agent_skill_calls as
  select a.id, a.skill_name, a.status, a.error_class, a.error_message, a.duration_ms, a.trace_id, a.created_at
    from agent_activity a
   where a.kind = 'call' and a.status in ('success', 'error')
     and a.error_class not in ('invalid_params', 'unknown_tool', 'denied', 'stale', 'cancelled', 'interrupted', 'stall',
                               'disabled', 'on_trial', 'yielded', 'budget');

create view agent_skill_health as
  with calls as (
    select c.*, max(c.created_at) filter (where c.status = 'success') over (partition by c.skill_name) as last_ok
      from agent_skill_calls c
     where c.id >= (select agent_uuid7_floor(clock_timestamp() - interval '7 days'))
       and c.created_at >= clock_timestamp() - interval '7 days')
  select s.name as skill, count(c.id) as calls,
         case when count(c.id) > 0 then round(avg((c.status = 'success')::int), 3) end as success_rate,
         count(c.id) filter (where c.status = 'error' and c.created_at > greatest(c.last_ok, s.enabled_at)) as streak,
         percentile_cont(0.5) within group (order by c.duration_ms) as p50_ms,
         percentile_cont(0.95) within group (order by c.duration_ms) as p95_ms,
         case when s.enabled then 'enabled' when s.trial_at is not null then 'on trial' else 'disabled' end as state,
         s.disabled_by, s.disabled_reason, s.disabled_at
    from agent_skills s
    left join calls c on c.skill_name = s.name
   group by s.id;
comment on view agent_skill_health is 'The last 7 days of each skill: calls, success rate, failures in a row, p50 and p95, state.';
