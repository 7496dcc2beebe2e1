-- Views: the read interface for people and other programs.
--
-- Views are a stable interface, like tables. The program's own pages and commands read them too.

-- Code

create or replace view agent_objective_progress as
  select o.id, o.name, o.status, o.round,
         count(*) filter (where s.status in ('pending', 'done', 'failed')) as total,
         count(*) filter (where s.status = 'done') as done,
         count(*) filter (where s.status = 'failed') as failed,
         count(*) filter (where s.status = 'pending') as pending,
         coalesce(round((count(*) filter (where s.status = 'done'))::numeric
                        / nullif(count(*) filter (where s.status in ('pending', 'done', 'failed')), 0), 3),
                  0) as progress
    from agent_objectives o left join agent_objective_steps s on s.objective_id = o.id
   group by o.id;
comment on view agent_objective_progress is
  'Objectives with the progress of their round: the share of steps that are done.';

create or replace view agent_locks_live as
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
  'Every lane that is held now, and every execution that runs now, with holder and time left (null: parked).';

create or replace view agent_executions_by_status as
  with live as (
    select e.status, count(*) as count, avg(extract(epoch from clock_timestamp() - e.created_at)) as age
      from agent_executions e where e.status in ('pending', 'running', 'waiting') group by e.status)
  select s.status, coalesce(l.count, 0) as count, coalesce(l.age, 0)::numeric(14, 1) as avg_age_seconds
    from unnest(array['pending', 'running', 'waiting']) s (status) left join live l on l.status = s.status;
comment on view agent_executions_by_status is
  'How many executions are pending, running and waiting, and their mean age.';

create or replace view agent_executions_waiting as
  select e.id, e.trace_id, e.surface, e.agent, e.flow, e.waiting_for, e.waiting_key, e.waiting_until, e.waiting_data,
         clock_timestamp() - e.updated_at as waiting_time
    from agent_executions e where e.status = 'waiting' order by e.waiting_until;
comment on view agent_executions_waiting is 'Waiting executions, by deadline, with the time waited so far.';

create or replace view agent_executions_stuck as
  select e.id, e.trace_id, e.surface, e.agent, e.flow, e.waiting_for, e.waiting_key, e.waiting_until, e.updated_at
    from agent_executions e
   where e.status = 'waiting' and e.waiting_until < statement_timestamp()   -- stable, so the planner can use an index
     and e.updated_at < clock_timestamp() - interval '1 hour';
comment on view agent_executions_stuck is
  'Executions past the deadline of their wait that have not changed for an hour. There should be none.';

-- Spend ---------------------------------------------------------------------------------------------

create or replace view agent_spend as
  select s.skill, s.surface, s.model, (s.start at time zone 'UTC')::date as day, sum(s.calls)::bigint as calls,
         sum(s.prompt_tokens)::bigint as prompt_tokens, sum(s.completion_tokens)::bigint as completion_tokens,
         sum(s.tokens)::bigint as tokens, trim_scale(sum(s.cost_usd)) as cost_usd,
         sum(s.unknown_tokens)::bigint as unknown_tokens, trim_scale(sum(s.unknown_usd)) as unknown_usd
    from (select c.skill, c.surface, c.model, c.start, c.calls, c.prompt_tokens, c.completion_tokens, c.tokens,
                 c.cost_usd, c.unknown_tokens, c.unknown_usd
            from agent_activity_counts c where c.span = 'day' and c.kind = 'charge'
          union all
          select lanekeeper.agent_count_key(h.skill), u.surface, u.model, u.hour, h.calls, h.prompt_tokens,
                 h.completion_tokens, h.tokens, h.cost_usd, h.unknown_tokens, h.unknown_usd
            from lanekeeper.read_agent_activity_tail(2000000000) u
           cross join lateral lanekeeper.agent_charges(
             u.led_to, u.prompt_tokens, u.completion_tokens, u.tokens, u.cost_usd, u.unknown_tokens, u.unknown_usd) h
           where u.kind = 'model') s
   group by 1, 2, 3, 4;
comment on view agent_spend is
  'Model calls, tokens and cost by the skill that the call led to (empty: none), surface, model and day (UTC). It '
  'includes rows that retention has removed and rows that are not counted yet. unknown_* is the part that no '
  'provider reported.';

create or replace view agent_skill_calls as
  select a.id, a.skill_name, a.status, a.error_class, a.error_message, a.duration_ms, a.trace_id, a.created_at,
         a.thread_id
    from agent_activity a
   where a.kind = 'call' and a.surface <> 'eval' and a.status in ('success', 'error')
     and lanekeeper.agent_class_counts(a.error_class);
comment on view agent_skill_calls is
  'Calls that count for the health of their skill. Refused, interrupted and misconfigured calls do not count, nor '
  'calls of an eval.';

create or replace view agent_skill_health as
  select s.name as skill, coalesce(f.calls, 0) as calls,
         case when f.calls > 0 then round((f.calls - f.failed)::numeric / f.calls, 3) end as success_rate,
         coalesce(f.streak, 0) as streak, f.p50_ms, f.p95_ms,
         case when s.enabled then 'enabled' when s.trial_at is not null then 'on trial' else 'disabled' end as state,
         s.disabled_by, s.disabled_reason, s.disabled_at
    from agent_skills s
    left join lanekeeper.read_agent_skill_figures(clock_timestamp() - interval '7 days') f on f.skill = s.name;
comment on view agent_skill_health is
  'The last 7 days of each skill: calls, success rate, failures in a row, p50, p95 and state. With very many calls, '
  'p50 and p95 are within 2.5%, over whole days (UTC).';

create or replace view agent_thread_locks as
  select substr(l.lane, 8) as thread_id, l.execution_id as active_execution_id, s.at as execution_locked_at,
         floor(extract(epoch from clock_timestamp() - s.at) / 60)::int as lock_minutes,
         coalesce(t.participant, '') as participant_name, l.parked, l.expires_at <= clock_timestamp() as stale,
         l.locked_by as holder,
         (select count(*) from agent_messages m where m.thread_id = substr(l.lane, 8) and m.status = 'queued') as queued
    from agent_locks l
    cross join lateral (select case when l.parked then l.locked_at
                                    else l.expires_at - make_interval(secs => l.ttl_seconds) end as at) s
    left join agent_threads t on t.id = substr(l.lane, 8)
   where l.lane like 'thread:%' and l.locked_by <> '';
comment on view agent_thread_locks is
  'The holder of each thread, since its last renewal. stale: its lease has ended, so the next caller gets the thread. '
  'parked: a waiting execution holds it, without an end.';

create or replace view agent_budget_today as
  select x.scope, x.tokens, trim_scale(x.cost_usd) as cost_usd, x.reserved_tokens,
         trim_scale(x.reserved_usd) as reserved_usd, x.unsettled, x.unknown_tokens,
         trim_scale(x.unknown_usd) as unknown_usd
    from agent_budgets x, to_char(clock_timestamp() at time zone 'UTC', 'YYYY-MM-DD') as today
   where x.scope = 'day:' || today or starts_with(x.scope, 'day:' || today || ':')
   order by x.scope;
comment on view agent_budget_today is
  'The spend of today (UTC), in total and by surface, with its unknown part and the reservations of model calls in '
  'flight.';

create or replace view agent_activity_measured as
  select a.id, a.skill_name, a.created_at, a.status,
         date_trunc('hour', a.created_at at time zone 'UTC') at time zone 'UTC' as hour, a.kind,
         lanekeeper.agent_count_key(case a.kind
           when 'model' then coalesce(nullif(a.purpose, ''), a.skill_name) else a.skill_name end) as skill,
         lanekeeper.agent_count_key(a.surface) as surface, lanekeeper.agent_count_key(a.model) as model, x.telling,
         lanekeeper.agent_tokens(x.usage, 'prompt_tokens') as prompt_tokens,
         lanekeeper.agent_tokens(x.usage, 'completion_tokens') as completion_tokens,
         lanekeeper.agent_tokens(x.usage, 'total_tokens') as tokens,
         case when a.kind = 'model' and a.cost_usd <> 'NaN' then a.cost_usd else 0 end as cost_usd, x.duration_ms,
         a.trace_id, case when a.surface <> 'eval' then a.led_to else '{}' end as led_to,
         lanekeeper.agent_tokens(x.usage, 'unknown_tokens') as unknown_tokens,
         case when jsonb_typeof(x.usage -> 'unknown_usd') = 'number' then (x.usage ->> 'unknown_usd')::numeric
              else 0 end as unknown_usd,
         case when x.telling then lpad(x.duration_ms::text, 13, '0') || left(a.trace_id, 300) end as slowest,
         case when x.duration_ms < 1 then -1
              else floor(ln(x.duration_ms::float8) / ln(1.05::float8))::int end as bucket,
         a.agent, lanekeeper.agent_tokens(x.usage, 'cached_tokens') as cached_tokens, a.thread_id
    from agent_activity a
   cross join lateral (
     select case a.kind when 'model' then a.token_usage else '{}' end as usage,
            case when a.duration_ms is not null
                   then greatest(0, least(a.duration_ms, 1000000000000)) end as duration_ms,
            a.kind = 'call' and a.status in ('success', 'error')
              and lanekeeper.agent_class_counts(a.error_class) as telling) x
   where a.kind <> 'model' and a.surface <> 'eval'
      or a.kind = 'model' and (not starts_with(a.error_class, 'budget_')
                               or lanekeeper.agent_tokens(x.usage, 'total_tokens') > 0);
comment on view agent_activity_measured is
  'The measures by which each row of the log is counted. Of evals only model calls count, and for no skill. A model '
  'call that a budget refused before its request does not count. telling: the row counts for the health of its skill. '
  'slowest: duration and trace id in one text; the slowest call has its maximum in collation "C". bucket: as in '
  'agent_activity_durations.';

-- Whole months of activity -------------------------------------------------------------------------

create or replace view agent_activity_partitions as
  select format('%I.%I', n.nspname, c.relname) as partition,
         substring(b.bounds from '^FOR VALUES FROM \(''([0-9a-f-]{36})''\)')::uuid as lower_id,
         substring(b.bounds from ' TO \(''([0-9a-f-]{36})''\)$')::uuid as upper_id,
         i.inhdetachpending as leaving
    from pg_inherits i join pg_class c on c.oid = i.inhrelid join pg_namespace n on n.oid = c.relnamespace
   cross join lateral (select pg_get_expr(c.relpartbound, c.oid) as bounds) b
   where i.inhparent = 'agent_activity'::regclass;
comment on view agent_activity_partitions is
  'The partitions of the activity log with their ranges of ids. leaving: the partition is being detached and no longer '
  'read.';

create or replace view agent_spend_by_purpose as
  select s.skill as purpose, s.surface, s.model, (s.start at time zone 'UTC')::date as day,
         sum(s.calls)::bigint as calls, sum(s.prompt_tokens)::bigint as prompt_tokens,
         sum(s.completion_tokens)::bigint as completion_tokens, sum(s.tokens)::bigint as tokens,
         trim_scale(sum(s.cost_usd)) as cost_usd, sum(s.unknown_tokens)::bigint as unknown_tokens,
         trim_scale(sum(s.unknown_usd)) as unknown_usd
    from (select c.skill, c.surface, c.model, c.start, c.calls, c.prompt_tokens, c.completion_tokens, c.tokens,
                 c.cost_usd, c.unknown_tokens, c.unknown_usd
            from agent_activity_counts c where c.span = 'day' and c.kind = 'model'
          union all
          select u.skill, u.surface, u.model, u.hour, 1, u.prompt_tokens, u.completion_tokens, u.tokens, u.cost_usd,
                 u.unknown_tokens, u.unknown_usd
            from lanekeeper.read_agent_activity_tail(2000000000) u where u.kind = 'model') s
   group by 1, 2, 3, 4;
comment on view agent_spend_by_purpose is
  'The sums of agent_spend by the purpose of the model call: a phase, a turn, an automation.';

create or replace view agent_slowest_skills as
  select f.skill, f.calls, f.p50_ms, f.p95_ms, f.max_ms, f.slowest_trace_id
    from lanekeeper.read_agent_skill_figures(clock_timestamp() - interval '7 days') f
   where f.p95_ms is not null
   order by f.p95_ms desc, f.skill;
comment on view agent_slowest_skills is
  'Durations of the calls of each skill in the last 7 days, the slowest first. With very many calls, p50 and p95 are '
  'within 2.5%, over whole days (UTC).';

create or replace view agent_failing_skills as
  select f.skill, f.calls, f.failed as errors, f.failed::float8 / f.calls as rate, f.streak,
         coalesce(f.p50_ms, 0) as p50_ms, coalesce(f.p95_ms, 0) as p95_ms, coalesce(l.error_message, '') as last_error,
         l.error_class as last_error_class, l.created_at as last_failed_at, l.trace_id as last_trace_id,
         case when s.enabled then 'enabled' when s.trial_at is not null then 'on trial' else 'disabled' end as state
    from lanekeeper.read_agent_skill_figures(clock_timestamp() - interval '7 days') f
    join agent_skills s on s.name = f.skill
    -- between keeps skill_name in the order, as in the index on (skill_name, id). With =, PostgreSQL would order by id
    -- alone and could search a rarely called skill among all others.
    left join lateral (
         select k.error_message, k.error_class, k.created_at, k.trace_id from agent_skill_calls k
          where k.skill_name between f.skill and f.skill and k.status = 'error'
            and k.id >= lanekeeper.agent_uuid7_floor(clock_timestamp() - interval '7 days')
          order by k.skill_name desc, k.id desc limit 1) l on true
   where f.failed > 0
   order by f.failed desc, f.skill;
comment on view agent_failing_skills is
  'The skills that failed in the last 7 days, most failures first: the number of failures, the last error and the '
  'present state.';

-- offset 0 makes PostgreSQL look up each part row by row. A page reads only what it shows, in a log of any size.
create or replace view agent_audit as
  select a.id, a.created_at as at, a.finished_at,
         case
           when a.agent = 'admin'
                or a.kind = 'note'
                   and (a.skill_name in ('break_lane', 'decide_approval')
                        or a.execution_id is null and a.surface = 'operate' and a.skill_name <> 'mcp_sync')
             then coalesce(nullif(a.input ->> 'by', ''), 'admin')
           when a.skill_name in ('webhook_refused', 'webhook_conflict') then 'sender'
           else a.agent end as actor,
         a.kind, a.skill_name as act,
         case when a.kind = 'model' then '' else coalesce((
           select string_agg(left(v.word || ' ' || v.name, 200), ', ' order by v.place)
             from (values
               (1, 'decision:', a.input ->> 'decision'), (2, 'approval', a.input ->> 'approval_id'),
               (3, 'skill', a.input ->> 'skill'), (4, 'automation', a.input ->> 'automation'),
               (5, 'objective', a.input ->> 'objective'), (6, 'step', a.input ->> 'step'),
               (7, 'conflict', a.input ->> 'conflict'), (8, 'event', a.input ->> 'event'),
               (9, case when a.input ? 'category' then 'memory' else 'key' end,
                concat_ws(' / ', a.input ->> 'category', a.input ->> 'key')),
               (10, 'lane', a.input ->> 'lane'), (11, 'execution', a.input ->> 'execution'),
               (12, 'flow', a.input ->> 'flow'), (13, 'endpoint', a.input ->> 'endpoint'),
               (14, 'target', a.input ->> 'target'),
               (14, 'channel',
                case when a.skill_name in ('enable_channel', 'disable_channel', 'pair_sender', 'unpair_sender')
                                    then a.input ->> 'channel' end),
               (15, 'delivery', a.input ->> 'delivery_id'),
               (16, 'message', a.input ->> 'webhook_id'), (17, 'thread', a.input ->> 'thread_id'),
               (18, 'access', a.input ->> 'access_id'), (19, 'run', a.input ->> 'run'),
               (20, 'MCP server', a.input ->> 'server'), (21, 'tool', a.input ->> 'tool'),
               (22, 'session', a.input ->> 'session'), (23, 'command', a.input ->> 'command'),
               (24, 'rows:', coalesce(a.input ->> 'kinds', a.input ->> 'keep')),
               (25, 'changed:', case when jsonb_typeof(a.input -> 'changed') = 'array'
                                     then (select string_agg(c, ', ')
                                             from jsonb_array_elements_text(a.input -> 'changed') c) end),
               (26, 'document', a.input ->> 'document'), (27, 'principal', a.input ->> 'principal'),
               (28, 'token', coalesce(a.input ->> 'made_key', a.input ->> 'revoked_key')),
               (29, 'session', a.input ->> 'login'), (30, 'identity', a.input ->> 'subject'),
               (31, 'eval', a.input ->> 'eval'), (32, 'case', a.input ->> 'case')) v (place, word, name)
            where v.name <> ''), '') end as object,
         coalesce(nullif(a.input ->> 'reason', ''), case when a.agent = 'admin' then nullif(a.purpose, '') end,
                  case when a.cause_id is not null
                         then 'the model asked for it'
                              || case when a.purpose <> '' then ', for ' || a.purpose else '' end end,
                  'for ' || nullif(a.purpose, ''), 'part of ' || p.skill_name, o.what, '') as reason,
         coalesce(o.what, '') as origin,
         case
           when a.surface = 'operate' and a.skill_name not in ('mcp_sync', 'close_approval') or a.agent = 'admin'
             then 'admin'
           when b.name <> '' then b.name
           when t.participant <> '' then format('%s in thread %s', t.participant, t.id)
           when t.id is not null then format('visitor in thread %s', t.id)
           when a.surface = 'chat' then 'visitor'
           when a.surface = 'webhook' then format('sender to %s', coalesce(nullif(a.input ->> 'endpoint', ''),
                                                                           nullif(o.endpoint, ''), 'a webhook'))
           else a.agent end as on_behalf_of,
         a.status, a.error_class, coalesce(a.error_message, '') as error_message, a.model,
         lanekeeper.agent_tokens(a.token_usage, 'total_tokens') as tokens, a.cost_usd, a.duration_ms, a.surface,
         a.trace_id, a.execution_id, a.parent_id, a.cause_id, coalesce(a.thread_id, x.thread_id, '') as thread_id,
         a.lane,
         case when a.kind = 'note' then coalesce(a.input ->> 'key_id', '') else '' end as token_id,
         case when a.kind = 'note' then coalesce(a.input ->> 'via', '') else '' end as via,
         case when a.kind = 'note' and a.input ? 'via' then coalesce(a.input ->> 'message', '') else '' end as message
    from agent_activity a
    left join lateral (select e.id, e.thread_id from agent_executions e where e.id = a.execution_id offset 0) x on true
    left join lateral (select h.id, h.participant
                         from agent_threads h
                        where h.id = coalesce(a.thread_id, x.thread_id)
                       offset 0) t on true
    left join lateral (select u.skill_name from agent_activity u where u.id = a.parent_id offset 0) p on true
    left join lateral (select (c.cause).what, (c.cause).detail ->> 'endpoint' as endpoint
                         from (select u.cause
                                 from lanekeeper.agent_causes u
                                where u.subject = 'execution' and u.id = a.execution_id
                               offset 0) c
                       offset 0) o on true
    left join lateral (  -- the principal that started the execution, or the first of its parents
      with recursive ancestors (id, parent_id, n) as (
        select e.id, e.parent_id, 1 from agent_executions e where e.id = a.execution_id
        union all
        select e.id, e.parent_id, p.n + 1 from ancestors p join agent_executions e on e.id = p.parent_id where p.n < 32)
      select substr(k.cause, 11) as name
        from ancestors p join agent_links k on k.effect = 'execution ' || p.id and k.kind = 'asked'
       where k.cause like 'principal %' order by p.n desc limit 1) b on true;
comment on view agent_audit is
  'Every action in the log: actor, object, time, reason, on_behalf_of, result. Restrict it by a range of ids, a trace '
  'or a skill (act), which have indexes. reason: an admin''s reason, the purpose of a model call, or the containing '
  'action. cause_id: the model call that requested the action. origin: the cause of the run. token_id, via and '
  'message: the API token, channel and button message of the action.';
