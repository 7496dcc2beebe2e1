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
comment on column agent_objective_progress.id is 'The objective.';
comment on column agent_objective_progress.name is 'Its unique name.';
comment on column agent_objective_progress.status is 'proposed, active, paused, completed, failed or rejected.';
comment on column agent_objective_progress.round is 'The round of a recurring objective, from 1.';
comment on column agent_objective_progress.total is 'Steps that are pending, done or failed, not skipped ones.';
comment on column agent_objective_progress.done is 'Steps that are done.';
comment on column agent_objective_progress.failed is 'Steps that failed.';
comment on column agent_objective_progress.pending is 'Steps that are still to do.';
comment on column agent_objective_progress.progress is 'done / total, from 0 to 1. 0 without steps.';

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
  'Every lane that is held now, and every execution that runs now, with holder and time left.';
comment on column agent_locks_live.lane is 'The lane. For a running execution: execution:ID.';
comment on column agent_locks_live.locked_by is 'The holder. For a running execution: the id of its worker.';
comment on column agent_locks_live.execution_id is 'The execution that holds it. Null: another owner.';
comment on column agent_locks_live.trace_id is 'The trace of the holder. Null: its name contains none.';
comment on column agent_locks_live.fencing_token is 'The live token. For a running execution: its claim.';
comment on column agent_locks_live.held_for is 'Time since it was acquired. Running execution: since its last update.';
comment on column agent_locks_live.expires_in is 'Time until the lease ends without a renewal. Null: parked.';
comment on column agent_locks_live.parked is 'A waiting execution keeps the lane.';

create or replace view agent_executions_by_status as
  with live as (
    select e.status, count(*) as count, avg(extract(epoch from clock_timestamp() - e.created_at)) as age
      from agent_executions e where e.status in ('pending', 'running', 'waiting') group by e.status)
  select s.status, coalesce(l.count, 0) as count, coalesce(l.age, 0)::numeric(14, 1) as avg_age_seconds
    from unnest(array['pending', 'running', 'waiting']) s (status) left join live l on l.status = s.status;
comment on view agent_executions_by_status is
  'How many executions are pending, running and waiting, and their mean age.';
comment on column agent_executions_by_status.status is 'pending, running or waiting.';
comment on column agent_executions_by_status.count is 'Executions with this status.';
comment on column agent_executions_by_status.avg_age_seconds is 'Their mean time since creation, in seconds. 0: none.';

create or replace view agent_executions_waiting as
  select e.id, e.trace_id, e.surface, e.agent, e.flow, e.waiting_for, e.waiting_key, e.waiting_until, e.waiting_data,
         clock_timestamp() - e.updated_at as waiting_time
    from agent_executions e where e.status = 'waiting' order by e.waiting_until;
comment on view agent_executions_waiting is 'Waiting executions, by deadline, with the time waited so far.';
comment on column agent_executions_waiting.id is 'The execution.';
comment on column agent_executions_waiting.trace_id is 'Its trace.';
comment on column agent_executions_waiting.surface is 'Its origin: heartbeat, operate, chat, webhook, flow or eval.';
comment on column agent_executions_waiting.agent is 'The agent that acts in it.';
comment on column agent_executions_waiting.flow is 'The flow that it runs.';
comment on column agent_executions_waiting.waiting_for is
  'response, agent, document, signature, test, event, delay, approval or lane.';
comment on column agent_executions_waiting.waiting_key is
  'The key, thread, execution, request, approval or lane of the wait. A delay needs none.';
comment on column agent_executions_waiting.waiting_until is 'When the wait times out or, for a delay, ends.';
comment on column agent_executions_waiting.waiting_data is 'Details of the wait. Null: none.';
comment on column agent_executions_waiting.waiting_time is 'Time since the wait began.';

create or replace view agent_executions_stuck as
  select e.id, e.trace_id, e.surface, e.agent, e.flow, e.waiting_for, e.waiting_key, e.waiting_until, e.updated_at
    from agent_executions e
   where e.status = 'waiting' and e.waiting_until < statement_timestamp()   -- stable, so the planner can use an index
     and e.updated_at < clock_timestamp() - interval '1 hour';
comment on view agent_executions_stuck is
  'Executions past the deadline of their wait that have not changed for an hour. There should be none.';
comment on column agent_executions_stuck.id is 'The execution.';
comment on column agent_executions_stuck.trace_id is 'Its trace.';
comment on column agent_executions_stuck.surface is 'Its origin, as in agent_executions_waiting.';
comment on column agent_executions_stuck.agent is 'The agent that acts in it.';
comment on column agent_executions_stuck.flow is 'The flow that it runs.';
comment on column agent_executions_stuck.waiting_for is 'The kind of wait, as in agent_executions_waiting.';
comment on column agent_executions_stuck.waiting_key is 'As in agent_executions_waiting.';
comment on column agent_executions_stuck.waiting_until is 'When the wait should have ended.';
comment on column agent_executions_stuck.updated_at is 'When the wait began.';

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
  'Model calls, tokens and cost by the skill that the call led to, surface, model and day (UTC). It includes rows that '
  'retention has removed and rows that are not counted yet.';
comment on column agent_spend.skill is 'The skill that the call led to. Empty: none.';
comment on column agent_spend.surface is 'heartbeat, operate, chat, webhook, flow or eval.';
comment on column agent_spend.model is 'The model.';
comment on column agent_spend.day is 'The day, UTC.';
comment on column agent_spend.calls is 'Model calls. One that led to several skills counts for the most frequent.';
comment on column agent_spend.prompt_tokens is 'Tokens of the prompts: the share of this skill.';
comment on column agent_spend.completion_tokens is 'Tokens of the answers: the share of this skill.';
comment on column agent_spend.tokens is 'All tokens: the share of this skill.';
comment on column agent_spend.cost_usd is 'US dollars: the share of this skill.';
comment on column agent_spend.unknown_tokens is 'The part of tokens that no provider reported, at worst.';
comment on column agent_spend.unknown_usd is 'The part of cost_usd that no provider reported, at worst.';

create or replace view agent_skill_calls as
  select a.id, a.skill_name, a.status, a.error_class, a.error_message, a.duration_ms, a.trace_id, a.created_at,
         a.thread_id
    from agent_activity a
   where a.kind = 'call' and a.surface <> 'eval' and a.status in ('success', 'error')
     and lanekeeper.agent_class_counts(a.error_class);
comment on view agent_skill_calls is
  'Calls that count for the health of their skill. Refused, interrupted and misconfigured calls do not count, nor '
  'calls of an eval. Not granted to agent_client.';
comment on column agent_skill_calls.id is 'The row of agent_activity.';
comment on column agent_skill_calls.skill_name is 'The skill.';
comment on column agent_skill_calls.status is 'success or error.';
comment on column agent_skill_calls.error_class is 'The kind of error, such as timeout. Empty: none.';
comment on column agent_skill_calls.error_message is 'The error. Null: none.';
comment on column agent_skill_calls.duration_ms is 'The duration in milliseconds. Null: not measured.';
comment on column agent_skill_calls.trace_id is 'The trace of the call.';
comment on column agent_skill_calls.created_at is 'When the call began.';
comment on column agent_skill_calls.thread_id is 'The thread of the call. Null: none.';

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
comment on column agent_skill_health.skill is 'The skill.';
comment on column agent_skill_health.calls is 'Calls in the 7 days that count (agent_skill_calls).';
comment on column agent_skill_health.success_rate is 'The share of calls that succeeded, from 0 to 1. Null: no calls.';
comment on column agent_skill_health.streak is 'Failures in the 7 days since the last success or enabling.';
comment on column agent_skill_health.p50_ms is 'Median duration in milliseconds. Null: no calls.';
comment on column agent_skill_health.p95_ms is '95th percentile of the durations in milliseconds. Null: no calls.';
comment on column agent_skill_health.state is 'enabled, disabled, or on trial: disabled, but one trial is offered.';
comment on column agent_skill_health.disabled_by is 'self_heal, or the admin. Empty: enabled.';
comment on column agent_skill_health.disabled_reason is 'Why it was disabled. Empty: enabled.';
comment on column agent_skill_health.disabled_at is 'When it was disabled. Null: enabled.';

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
comment on view agent_thread_locks is 'The holder of each thread, since its last renewal.';
comment on column agent_thread_locks.thread_id is 'The thread. Its lane is thread:ID.';
comment on column agent_thread_locks.active_execution_id is 'The execution that holds it. Null: another owner.';
comment on column agent_thread_locks.execution_locked_at is 'Last renewal of the lease. Parked: when it was acquired.';
comment on column agent_thread_locks.lock_minutes is 'Whole minutes since execution_locked_at.';
comment on column agent_thread_locks.participant_name is 'The participant of the thread. Empty: none.';
comment on column agent_thread_locks.parked is 'A waiting execution holds it, without an end.';
comment on column agent_thread_locks.stale is 'The lease has ended, so the next caller gets the thread.';
comment on column agent_thread_locks.holder is 'The owner that holds it.';
comment on column agent_thread_locks.queued is 'Messages that wait to join the thread.';

create or replace view agent_budget_today as
  select x.scope, x.tokens, trim_scale(x.cost_usd) as cost_usd, x.reserved_tokens,
         trim_scale(x.reserved_usd) as reserved_usd, x.unsettled, x.unknown_tokens,
         trim_scale(x.unknown_usd) as unknown_usd
    from agent_budgets x, to_char(clock_timestamp() at time zone 'UTC', 'YYYY-MM-DD') as today
   where x.created_at >= date_trunc('day', statement_timestamp() at time zone 'UTC') at time zone 'UTC' -- by an index
     and (x.scope = 'day:' || today or starts_with(x.scope, 'day:' || today || ':'))
   order by x.scope;
comment on view agent_budget_today is
  'The spend of today (UTC), in total and by surface, with its unknown part and the reservations of model calls in '
  'flight.';
comment on column agent_budget_today.scope is
  'day:DATE for all; day:DATE:SURFACE for a surface, day:DATE:agent:NAME for an agent.';
comment on column agent_budget_today.tokens is 'Tokens spent.';
comment on column agent_budget_today.cost_usd is 'US dollars spent.';
comment on column agent_budget_today.reserved_tokens is 'Tokens of calls in flight, at their worst case.';
comment on column agent_budget_today.reserved_usd is 'US dollars of calls in flight, at their worst case.';
comment on column agent_budget_today.unsettled is 'Calls whose usage no provider reported.';
comment on column agent_budget_today.unknown_tokens is 'The part of tokens that no provider reported, at worst.';
comment on column agent_budget_today.unknown_usd is 'The part of cost_usd that no provider reported, at worst.';

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
  'call that a budget refused before its request does not count. Not granted to agent_client.';
comment on column agent_activity_measured.id is 'The row of agent_activity.';
comment on column agent_activity_measured.skill_name is 'As in agent_activity.';
comment on column agent_activity_measured.created_at is 'When the action began.';
comment on column agent_activity_measured.status is 'running, success, error, pending_approval, skipped or unknown.';
comment on column agent_activity_measured.hour is 'The beginning of the hour (UTC) of created_at.';
comment on column agent_activity_measured.kind is 'call, model, phase or note.';
comment on column agent_activity_measured.skill is 'skill_name, or a model call''s purpose. A long text is shortened.';
comment on column agent_activity_measured.surface is 'As in agent_activity. A long text is shortened.';
comment on column agent_activity_measured.model is 'The model of a model call. Empty: none. A long text is shortened.';
comment on column agent_activity_measured.telling is 'The row counts for the health of its skill.';
comment on column agent_activity_measured.prompt_tokens is 'Tokens of the prompt. 0: none, or not reported.';
comment on column agent_activity_measured.completion_tokens is 'Tokens of the answer. 0: none, or not reported.';
comment on column agent_activity_measured.tokens is 'All tokens. 0: none, or not reported.';
comment on column agent_activity_measured.cost_usd is 'US dollars of a model call; else 0.';
comment on column agent_activity_measured.duration_ms is 'Milliseconds, 0 to 10^12. Null: in flight, or not measured.';
comment on column agent_activity_measured.trace_id is 'The trace.';
comment on column agent_activity_measured.led_to is
  'How often the answer of a model calls each skill, {"fetch": 25}. {}: none, or an eval.';
comment on column agent_activity_measured.unknown_tokens is 'The part of tokens that no provider reported.';
comment on column agent_activity_measured.unknown_usd is 'The part of cost_usd that no provider reported.';
comment on column agent_activity_measured.slowest is
  '13 digits of duration_ms, then trace_id, for max() in collation "C". Null: not telling, or none.';
comment on column agent_activity_measured.bucket is 'As in agent_activity_durations. Null: no duration.';
comment on column agent_activity_measured.agent is 'The agent that acted, or admin.';
comment on column agent_activity_measured.cached_tokens is 'The part of prompt_tokens that the provider had cached.';
comment on column agent_activity_measured.thread_id is 'The thread. Null: none.';

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
  'The partitions of the activity log with their ranges of ids. Not granted to agent_client.';
comment on column agent_activity_partitions.partition is 'The table, with its schema.';
comment on column agent_activity_partitions.lower_id is 'The first id of its range. Null: no bound.';
comment on column agent_activity_partitions.upper_id is 'The end of its range, exclusive. Null: no bound.';
comment on column agent_activity_partitions.leaving is 'It is being detached and no longer read.';

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
comment on column agent_spend_by_purpose.purpose is 'The phase, turn, skill or automation that called the model.';
comment on column agent_spend_by_purpose.surface is 'heartbeat, operate, chat, webhook, flow or eval.';
comment on column agent_spend_by_purpose.model is 'The model.';
comment on column agent_spend_by_purpose.day is 'The day, UTC.';
comment on column agent_spend_by_purpose.calls is 'Model calls.';
comment on column agent_spend_by_purpose.prompt_tokens is 'Tokens of the prompts.';
comment on column agent_spend_by_purpose.completion_tokens is 'Tokens of the answers.';
comment on column agent_spend_by_purpose.tokens is 'All tokens.';
comment on column agent_spend_by_purpose.cost_usd is 'US dollars.';
comment on column agent_spend_by_purpose.unknown_tokens is 'The part of tokens that no provider reported, at worst.';
comment on column agent_spend_by_purpose.unknown_usd is 'The part of cost_usd that no provider reported, at worst.';

create or replace view agent_slowest_skills as
  select f.skill, f.calls, f.p50_ms, f.p95_ms, f.max_ms, f.slowest_trace_id
    from lanekeeper.read_agent_skill_figures(clock_timestamp() - interval '7 days') f
   where f.p95_ms is not null
   order by f.p95_ms desc, f.skill;
comment on view agent_slowest_skills is
  'Durations of the calls of each skill in the last 7 days, the slowest first. With very many calls, p50 and p95 are '
  'within 2.5%, over whole days (UTC).';
comment on column agent_slowest_skills.skill is 'The skill.';
comment on column agent_slowest_skills.calls is 'Calls in the 7 days that count (agent_skill_calls).';
comment on column agent_slowest_skills.p50_ms is 'Median duration in milliseconds.';
comment on column agent_slowest_skills.p95_ms is '95th percentile of the durations in milliseconds.';
comment on column agent_slowest_skills.max_ms is 'The longest duration in milliseconds.';
comment on column agent_slowest_skills.slowest_trace_id is 'The trace of that call.';

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
comment on column agent_failing_skills.skill is 'The skill.';
comment on column agent_failing_skills.calls is 'Calls in the 7 days that count (agent_skill_calls).';
comment on column agent_failing_skills.errors is 'The calls that failed.';
comment on column agent_failing_skills.rate is 'errors / calls: above 0, at most 1.';
comment on column agent_failing_skills.streak is 'Failures in the 7 days since the last success or enabling.';
comment on column agent_failing_skills.p50_ms is 'Median duration in milliseconds. 0: unknown.';
comment on column agent_failing_skills.p95_ms is '95th percentile of the durations in milliseconds. 0: unknown.';
comment on column agent_failing_skills.last_error is 'The last error. Empty: none, or its row was removed.';
comment on column agent_failing_skills.last_error_class is 'Its kind, such as timeout. Null: its row was removed.';
comment on column agent_failing_skills.last_failed_at is 'When that call began. Null: its row was removed.';
comment on column agent_failing_skills.last_trace_id is 'The trace of that call. Null: its row was removed.';
comment on column agent_failing_skills.state is 'enabled, disabled or on trial, as in agent_skill_health.';

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
  'or a skill (act), which have indexes.';
comment on column agent_audit.id is 'The row of agent_activity, in the order of time.';
comment on column agent_audit.at is 'When the action began.';
comment on column agent_audit.finished_at is 'When it ended. Null: in flight.';
comment on column agent_audit.actor is 'The person or principal, admin, or the agent. sender: of a webhook.';
comment on column agent_audit.kind is
  'call: of a skill. model: of a model. phase: a part of a turn. note: something that happened.';
comment on column agent_audit.act is 'The skill, or the name of the phase or note.';
comment on column agent_audit.object is 'What it acted on, such as lane NAME. Empty: none, or a model call.';
comment on column agent_audit.reason is
  'An admin''s reason, a model call''s purpose, or the containing action. Empty: unknown.';
comment on column agent_audit.origin is 'The cause of the run, for people. Empty: unknown.';
comment on column agent_audit.on_behalf_of is 'admin, a principal, a participant or visitor, a sender, or the agent.';
comment on column agent_audit.status is
  'running, success, error, pending_approval, skipped, or unknown: it may have taken effect.';
comment on column agent_audit.error_class is 'The kind of error, such as timeout. Empty: none.';
comment on column agent_audit.error_message is 'The error. Empty: none.';
comment on column agent_audit.model is 'The model of a model call. Empty: none.';
comment on column agent_audit.tokens is 'Tokens of a model call; else 0.';
comment on column agent_audit.cost_usd is 'US dollars of a model call; else 0.';
comment on column agent_audit.duration_ms is 'The duration in milliseconds. Null: in flight, or not measured.';
comment on column agent_audit.surface is 'heartbeat, operate, chat, webhook, flow or eval. Empty: none.';
comment on column agent_audit.trace_id is 'The trace.';
comment on column agent_audit.execution_id is 'The execution. Null: none.';
comment on column agent_audit.parent_id is 'The action that contains this one. Null: none.';
comment on column agent_audit.cause_id is 'The model call that requested the action. Null: none.';
comment on column agent_audit.thread_id is 'The thread of the action or its execution. Empty: none.';
comment on column agent_audit.lane is 'The lane that the action was about. Empty: none.';
comment on column agent_audit.token_id is 'The id of the API token of an admin''s act. Empty: none.';
comment on column agent_audit.via is 'The way of an admin''s act: http, page, cli, sql, slack and so on. Empty: none.';
comment on column agent_audit.message is 'The provider''s id of the message with the button of the act. Empty: none.';
