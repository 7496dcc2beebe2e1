-- Activity: the log of the agent's actions.
--
-- One row for each action. The table is partitioned by its time-ordered id: a range of time is a range of ids, and
-- retention drops a partition. An action in flight is also listed in agent_activity_open, so that its end is a HOT
-- update. The log is counted by hour and day, so figures stay cheap however large it is. agent_prompts has the exact
-- prompts of model calls, in parts that are stored once.

create table agent_activity (
  id uuid default lanekeeper.agent_uuid7() primary key, trace_id text not null check (trace_id <> ''),
  conversation_id text generated always as (trace_id) stored, execution_id uuid, parent_id uuid,
  claim bigint, step text not null default '',
  kind text not null default 'call' check (kind in ('call', 'model', 'phase', 'note')),
  agent text not null default 'agent', surface text not null default '', skill_name text not null,
  skill_id uuid, purpose text not null default '',
  status          text not null default 'success'
                  check (status in ('running', 'success', 'error', 'pending_approval', 'skipped', 'unknown')),
  input jsonb not null default '{}', output jsonb, error_message text,
  error_class text not null default '', model text not null default '', token_usage jsonb not null default '{}',
  cost_usd numeric(14,6) not null default 0, duration_ms bigint, idempotency_key text not null default '',
  thread_id text, lane text not null default '', created_at timestamptz not null default clock_timestamp(),
  finished_at timestamptz, led_to jsonb not null default '{}', cause_id uuid
) partition by range (id);
create index agent_activity_conversation on agent_activity (conversation_id, created_at);
comment on index agent_activity_conversation is 'Reads a trace by its older name.';
create index agent_activity_execution on agent_activity (execution_id, id);
comment on index agent_activity_execution is 'Reads the actions of an execution.';
create index agent_activity_skill on agent_activity (skill_name, id);
comment on index agent_activity_skill is 'Reads the actions of a skill, by time.';
create index agent_activity_spend on agent_activity ((((created_at AT TIME ZONE 'UTC'))::date)) where kind = 'model';
comment on index agent_activity_spend is 'Reads the model calls of a day.';
create index agent_activity_trace on agent_activity (trace_id, created_at);
comment on index agent_activity_trace is 'Reads a trace, by time.';
comment on table agent_activity is
  'One row for each action: a call of a skill, a call of a model, a phase of a turn, or a note.';
comment on column agent_activity.conversation_id is 'The trace id under its older name.';
comment on column agent_activity.parent_id is 'The action that contains this one.';
comment on column agent_activity.claim is 'The claim of the execution that wrote the row.';
comment on column agent_activity.step is 'The step of the execution.';
comment on column agent_activity.kind is
  'call: of a skill. model: of a model. phase: a part of a turn. note: something that happened.';
comment on column agent_activity.agent is 'The agent that acted, or admin.';
comment on column agent_activity.surface is
  'The origin of the work: heartbeat, operate, chat, webhook, flow or eval. Empty: none.';
comment on column agent_activity.skill_name is 'The skill, or the name of the phase or note.';
comment on column agent_activity.skill_id is 'The skill, if a skill has the name.';
comment on column agent_activity.purpose is
  'The phase, skill or turn that called a model. The call''s spend counts there.';
comment on column agent_activity.status is
  'running: in flight. unknown: it may or may not have taken effect.';
comment on column agent_activity.input is 'The arguments, redacted.';
comment on column agent_activity.output is 'The result, redacted. That of record_stale_agent_write is as given.';
comment on column agent_activity.error_class is 'The kind of error, such as timeout or invalid_params. Empty: none.';
comment on column agent_activity.model is 'The model of a model call.';
comment on column agent_activity.token_usage is
  '{prompt_tokens, completion_tokens, total_tokens}; on model calls only, so that sums count once. unknown_tokens of '
  'total_tokens, and unknown_usd of cost_usd, are the worst case of calls whose usage no provider reported.';
comment on column agent_activity.cost_usd is 'The price of a model call in US dollars.';
comment on column agent_activity.duration_ms is 'The duration in milliseconds.';
comment on column agent_activity.idempotency_key is 'The key that the call sent, so that a retry takes effect once.';
comment on column agent_activity.lane is 'The lane that the action was about.';
comment on column agent_activity.finished_at is 'When the action ended.';
comment on column agent_activity.led_to is
  'On a model call: how often its answer calls each skill, {"fetch": 25}. Calls of unknown names are left out.';
comment on column agent_activity.cause_id is 'The model call whose answer asked for this action.';

create table agent_activity_open (
  activity_id uuid primary key, execution_id uuid, claim bigint,
  step text not null default '', kind text not null, started_at timestamptz not null default clock_timestamp()
);
create index agent_activity_open_execution on agent_activity_open (execution_id);
comment on index agent_activity_open_execution is 'Finds the open actions of an execution, to close them.';
create unique index agent_activity_open_step on agent_activity_open (execution_id, claim, step) where step <> '';
comment on index agent_activity_open_step is 'Allows one action in flight for each step of a claim.';
comment on table agent_activity_open is
  'Actions in flight. They are listed here, so the end of an action changes no index of the log.';
comment on column agent_activity_open.activity_id is 'The row of the log.';
comment on column agent_activity_open.claim is 'The claim that began the action.';
comment on column agent_activity_open.step is 'The step of the action.';
comment on column agent_activity_open.kind is 'As in the log.';
comment on column agent_activity_open.started_at is 'When the action began.';

create table agent_activity_retired (
  partition text primary key, lower_id uuid not null, upper_id uuid not null,
  decided_at timestamptz not null default clock_timestamp()
);
comment on table agent_activity_retired is
  'Partitions of the log that retention is removing. A table that somebody else detached is never dropped.';
comment on column agent_activity_retired.partition is 'The table, with its schema.';
comment on column agent_activity_retired.lower_id is 'The first id of its range.';
comment on column agent_activity_retired.upper_id is 'The end of its range.';
comment on column agent_activity_retired.decided_at is 'When its removal began.';

create table agent_activity_counts (
  span text not null check (span in ('hour', 'day')), start timestamptz not null, kind text not null,
  skill text not null, surface text not null, model text not null,
  calls bigint not null default 0, successes bigint not null default 0, errors bigint not null default 0,
  pending_approval bigint not null default 0, skipped bigint not null default 0, unknown bigint not null default 0,
  worked bigint not null default 0, failed bigint not null default 0, prompt_tokens bigint not null default 0,
  completion_tokens bigint not null default 0, tokens bigint not null default 0, cost_usd numeric not null default 0,
  duration_ms bigint not null default 0, unknown_tokens bigint not null default 0,
  unknown_usd numeric not null default 0, slowest text not null default '', cached_tokens bigint not null default 0,
  primary key (span, start, kind, skill, surface, model)
) with (fillfactor = 80);
create index agent_activity_counts_skill on agent_activity_counts (skill, span, start);
comment on index agent_activity_counts_skill is 'Reads the counts of a skill.';
comment on table agent_activity_counts is
  'The log, counted by hour and once more by day. Rows since counted_upto of agent_activity_counted, and those of '
  'agent_activity_uncounted, are still missing.';
comment on column agent_activity_counts.span is 'The length of the count.';
comment on column agent_activity_counts.start is 'The beginning of the hour or day, UTC.';
comment on column agent_activity_counts.kind is
  'As in the log. charge: cost, by the skill that a model call led to. agent: model calls, by agent. key: model calls '
  'of chats, by chat key.';
comment on column agent_activity_counts.skill is
  'The skill. For a model call: its purpose. For kind agent: the agent. For kind key: the chat key.';
comment on column agent_activity_counts.surface is 'As in the log.';
comment on column agent_activity_counts.model is 'As in the log.';
comment on column agent_activity_counts.calls is 'Actions that have ended, in any way.';
comment on column agent_activity_counts.successes is 'Actions that succeeded.';
comment on column agent_activity_counts.errors is 'Actions that failed.';
comment on column agent_activity_counts.pending_approval is 'Actions that waited for an approval.';
comment on column agent_activity_counts.skipped is 'Actions that were skipped.';
comment on column agent_activity_counts.unknown is 'Actions whose effect is unknown.';
comment on column agent_activity_counts.worked is
  'Successes and errors that count for the health of the skill (agent_skill_calls).';
comment on column agent_activity_counts.failed is 'The errors that count for the health of the skill.';
comment on column agent_activity_counts.prompt_tokens is 'Sum over model calls.';
comment on column agent_activity_counts.completion_tokens is 'Sum over model calls.';
comment on column agent_activity_counts.tokens is 'Sum over model calls.';
comment on column agent_activity_counts.cost_usd is 'Sum over model calls.';
comment on column agent_activity_counts.duration_ms is 'Sum of the durations.';
comment on column agent_activity_counts.unknown_tokens is 'The part of tokens that no provider reported.';
comment on column agent_activity_counts.unknown_usd is 'The part of cost_usd that no provider reported.';
comment on column agent_activity_counts.slowest is
  'The slowest call that counts for the health of the skill: 13 digits of milliseconds, then its trace. Empty: none.';
comment on column agent_activity_counts.cached_tokens is
  'The part of prompt_tokens that the provider had cached.';

create table agent_activity_counted (
  single boolean default true primary key check (single),
  counted_upto uuid not null default '00000000-0000-0000-0000-000000000000'::uuid, candidate uuid, candidate_xid xid8,
  checked_upto uuid not null default '00000000-0000-0000-0000-000000000000'::uuid
);
comment on table agent_activity_counted is 'The progress of the counts. One row.';
comment on column agent_activity_counted.single is 'Always true: there is one row.';
comment on column agent_activity_counted.counted_upto is
  'Rows with ids below it are counted or listed in agent_activity_uncounted.';
comment on column agent_activity_counted.candidate is 'Ids below it are counted next, once candidate_xid allows it.';
comment on column agent_activity_counted.candidate_xid is
  'The count continues when no transaction below this one is in progress.';
comment on column agent_activity_counted.checked_upto is
  'The last pass over agent_activity_uncounted checked the ids up to this one.';

create table agent_activity_uncounted (
  activity_id uuid primary key
);
comment on table agent_activity_uncounted is
  'Rows of the log that are counted one by one. Each was written with an old id, or had not ended when its time was '
  'counted.';
comment on column agent_activity_uncounted.activity_id is 'The row of the log.';

create table agent_activity_durations (
  day date not null, skill text not null, bucket int not null,
  calls bigint not null,
  primary key (day, skill, bucket)
) with (fillfactor = 80);
comment on table agent_activity_durations is
  'Durations of calls, by day. A bucket is 5% wide, so a percentile is within 2.5%.';
comment on column agent_activity_durations.day is 'The day, UTC.';
comment on column agent_activity_durations.skill is
  'The skill. Empty: all skills together. model NAME: successful calls of a model.';
comment on column agent_activity_durations.bucket is
  'Durations from 1.05 ^ bucket ms up to the next; -1 is less than 1 ms.';
comment on column agent_activity_durations.calls is 'Calls with such a duration.';

create table agent_prompts (
  activity_id uuid primary key, tools bytea, messages bytea[] not null,
  options jsonb not null default '{}', created_at timestamptz not null default now()
);
comment on table agent_prompts is 'The prompt of each model call, as digests of agent_prompt_parts.';
comment on column agent_prompts.activity_id is 'The row of the model call in agent_activity.';
comment on column agent_prompts.tools is 'The part with the tool definitions. Null: no tool was offered.';
comment on column agent_prompts.messages is
  'The parts with the messages, in order: the system message, the history, the turn.';
comment on column agent_prompts.options is
  'Other options of the request: effort, temperature, max_tokens, schema (its name), response_format.';

create table agent_prompt_parts (
  digest bytea primary key check (length(digest) = 32), body text not null, truncated boolean not null default false,
  used_on date not null default ((now() AT TIME ZONE 'UTC'))::date
);
create index agent_prompt_parts_use on agent_prompt_parts (used_on);
comment on index agent_prompt_parts_use is 'Finds parts that perhaps no prompt needs.';
comment on table agent_prompt_parts is
  'The parts of prompts, redacted. A part is one message, or the tools of a call. It is stored once.';
comment on column agent_prompt_parts.digest is 'SHA-256 of body.';
comment on column agent_prompt_parts.body is
  'JSON as chat completions has it. It is text, because jsonb would reorder its members.';
comment on column agent_prompt_parts.truncated is 'The body was cut, because it was larger than a part may be.';
comment on column agent_prompt_parts.used_on is 'The last day (UTC) on which a recorded prompt had the part.';

create table agent_trace_links (
  trace_id text not null, traceparent text not null, created_at timestamptz not null default clock_timestamp(),
  primary key (trace_id, traceparent)
);
create index agent_trace_links_age on agent_trace_links (created_at);
comment on index agent_trace_links_age is 'Finds rows to delete.';
comment on table agent_trace_links is
  'Spans of other systems that requested a trace here. They are links only, and not trusted.';
comment on column agent_trace_links.traceparent is 'The W3C header, as received.';

create table agent_span_export (
  single boolean default true primary key check (single),
  sent_upto uuid not null default lanekeeper.agent_uuid7_floor(clock_timestamp()),
  pending uuid[] not null default '{}'::uuid[], sender text not null default '',
  sender_until timestamptz not null default '-infinity'::timestamptz,
  updated_at timestamptz not null default clock_timestamp()
) with (fillfactor = 50);
comment on table agent_span_export is
  'The progress of the export of spans. One row. One process at a time sends, and moves sent_upto after the '
  'receiver''s answer.';
comment on column agent_span_export.single is 'Always true: there is one row.';
comment on column agent_span_export.sent_upto is
  'Activities and ends of executions with ids up to it are sent, except pending.';
comment on column agent_span_export.pending is 'Activities up to sent_upto that had not ended.';
comment on column agent_span_export.sender is 'The process that sends now.';
comment on column agent_span_export.sender_until is 'When its right to send ends.';

insert into agent_activity_counted default values on conflict do nothing;

insert into agent_span_export default values on conflict do nothing;

-- Code

create or replace function lanekeeper.recover_agent_activity(p_execution_id uuid, p_claim bigint) returns void
language plpgsql volatile as $$
begin
  perform lanekeeper.settle_agent_budget(p_execution_id, r.step)
     from (select x.step from agent_budget_reservations x
            where x.execution_id = p_execution_id and (x.claim < p_claim) is not false order by x.step) r;
  with gone as (
    delete from agent_activity_open o
     where o.execution_id = p_execution_id and o.kind in ('call', 'model') and o.claim < p_claim
    returning o.activity_id)
  update agent_activity a
     set status = 'unknown', finished_at = clock_timestamp(), error_class = 'interrupted',
         error_message = 'the process was lost during the call; nobody knows whether it took effect',
         duration_ms = (extract(epoch from clock_timestamp() - a.created_at) * 1000)::bigint
    from gone where a.id = gone.activity_id and a.status = 'running';
  update agent_activity_open o set claim = p_claim where o.execution_id = p_execution_id and o.claim < p_claim;
end $$;
comment on function lanekeeper.recover_agent_activity is
  'Close calls that an earlier claim left in flight as unknown, and settle their reservations. Phases stay open: the '
  'next claim continues them.';

create or replace function lanekeeper.agent_count_key(p_text text) returns text
language sql immutable parallel safe as $$
  select case when octet_length(p_text) <= 300 then p_text else left(p_text, 60) || '… ' || md5(p_text) end
$$;
comment on function lanekeeper.agent_count_key is
  'The text, shortened to fit into an index. A model may call tools by names of any length.';

create or replace function lanekeeper.agent_class_counts(p_class text) returns boolean
language sql immutable parallel safe as $$
  select p_class not in ('invalid_params', 'unknown_tool', 'denied', 'stale', 'cancelled', 'interrupted',
                         'stall', 'disabled', 'on_trial', 'yielded', 'budget', 'configuration', 'flow_cancelled')
$$;
comment on function lanekeeper.agent_class_counts is
  'Whether a call with this class of error counts for the health of its skill. A refused, interrupted or misconfigured '
  'call does not count.';

create or replace function lanekeeper.agent_charges(
  p_led_to jsonb, p_prompt bigint, p_completion bigint, p_tokens bigint, p_cost numeric, p_unknown bigint,
  p_unknown_usd numeric)
returns table (skill text, calls bigint, prompt_tokens bigint, completion_tokens bigint, tokens bigint,
               cost_usd numeric, unknown_tokens bigint, unknown_usd numeric)
language sql immutable parallel safe as $$
  select '', 1::bigint, p_prompt, p_completion, p_tokens, p_cost, p_unknown, p_unknown_usd
   where jsonb_typeof(p_led_to) <> 'object' or not p_led_to @? '$.keyvalue().value ? (@ > 0)'
  union all
  select c.skill, (c.place = 1)::int::bigint,
         (div(p_prompt * c.upto, c.total) - div(p_prompt * (c.upto - c.n), c.total))::bigint,
         (div(p_completion * c.upto, c.total) - div(p_completion * (c.upto - c.n), c.total))::bigint,
         (div(p_tokens * c.upto, c.total) - div(p_tokens * (c.upto - c.n), c.total))::bigint,
         round(p_cost * c.upto / c.total, 6) - round(p_cost * (c.upto - c.n) / c.total, 6),
         (div(p_unknown * c.upto, c.total) - div(p_unknown * (c.upto - c.n), c.total))::bigint,
         case when c.upto < c.total then round(p_unknown_usd * c.upto / c.total, 6) else p_unknown_usd end
           - case when c.upto > c.n then round(p_unknown_usd * (c.upto - c.n) / c.total, 6) else 0 end
    from (select l.skill, l.n, sum(l.n) over (order by l.skill collate "C") as upto, sum(l.n) over () as total,
                 row_number() over (order by l.n desc, l.skill collate "C") as place
            from (select k.key as skill, least((k.value #>> '{}')::numeric, 1e6) as n
                    from jsonb_each(case when jsonb_typeof(p_led_to) = 'object' then p_led_to else '{}' end) k
                   where jsonb_typeof(k.value) = 'number') l
           where l.n > 0) c
$$;
comment on function lanekeeper.agent_charges is
  'The skills that pay for a model call: the skills that it led to, each with its share. Without such skills one row '
  'has an empty skill. The shares add up to the whole.';

create or replace function lanekeeper.read_agent_activity_tail(p_most int)
returns table (id uuid, status text, hour timestamptz, kind text, skill text, surface text, model text, telling boolean,
               prompt_tokens bigint, completion_tokens bigint, tokens bigint, cost_usd numeric, duration_ms bigint,
               led_to jsonb, unknown_tokens bigint, unknown_usd numeric, slowest text, bucket int, beyond boolean)
language plpgsql stable security definer set search_path from current set enable_seqscan = off set jit = off
set plan_cache_mode = force_generic_plan as $$
#variable_conflict use_column
begin
  -- In plpgsql, because PostgreSQL keeps its plan: planning took ten times as long as running.
  return query
  -- fresh: all rows from counted_upto on. late: older rows of agent_activity_uncounted.
  with counted as materialized (
    select c.counted_upto from agent_activity_counted c),
  fresh as materialized (
    select m.* from agent_activity_measured m
     where m.id >= (select c.counted_upto from counted c) order by m.id limit p_most + 1),
  late as materialized (
    select m.*
      from (select u.activity_id from agent_activity_uncounted u
             where u.activity_id < (select c.counted_upto from counted c) order by u.activity_id limit p_most + 1) u
     cross join lateral (select k.* from agent_activity_measured k where k.id = u.activity_id offset 0) m),
  left_out as materialized (
    select min(x.id::text collate "C")::uuid as id
      from ((select f.id from fresh f order by f.id offset p_most)
            union all
            (select l.id from late l order by l.id offset p_most)) x)
  select r.id, r.status, r.hour, r.kind, r.skill, r.surface, r.model, r.telling, r.prompt_tokens, r.completion_tokens,
         r.tokens, r.cost_usd, r.duration_ms, r.led_to, r.unknown_tokens, r.unknown_usd, r.slowest, r.bucket,
         coalesce(r.id >= o.id, false)
    from (select f.* from fresh f union all select l.* from late l) r cross join left_out o;
end $$;
comment on function lanekeeper.read_agent_activity_tail is
  'The rows of the log that are not counted yet, in the snapshot of the caller: at most p_most of the newest, and as '
  'many of agent_activity_uncounted. beyond marks rows from the first omitted one on. Sums are complete before it.';

create or replace function lanekeeper.agent_skill_durations(p_since timestamptz, p_skills text[])
returns table (skill text, p50_ms float8, p95_ms float8)
language plpgsql stable set enable_seqscan = off set jit = off set plan_cache_mode = force_generic_plan as $$
#variable_conflict use_column
begin
  return query
  with lasted as materialized (
    select y.skill, y.bucket, sum(y.calls)::float8 as calls
      from (select d.skill, d.bucket, d.calls
              from agent_activity_durations d
             where d.day >= (p_since at time zone 'UTC')::date
            union all
            select u.skill, u.bucket, 1 from lanekeeper.read_agent_activity_tail(2000000000) u
             where cardinality(p_skills) > 0 and u.telling and u.bucket is not null
               and (u.hour at time zone 'UTC')::date >= (p_since at time zone 'UTC')::date) y
     where cardinality(p_skills) > 0 group by y.skill, y.bucket),
  ladder as (
    -- The only whole number of a bucket, or its middle.
    select b.skill,
           case when b.bucket < 0 then 0
                when ceil(power(1.05::float8, b.bucket)) + 1 >= power(1.05::float8, b.bucket + 1)
                  then ceil(power(1.05::float8, b.bucket))
                else power(1.05::float8, b.bucket + 0.5::float8) end as ms,
           sum(b.calls) over (partition by b.skill order by b.bucket) as upto,
           sum(b.calls) over (partition by b.skill) - 1 as last
      from lasted b where b.skill = any (p_skills)),
  -- As percentile_cont: between two neighbours.
  ranks as (
    select l.skill, p.share, p.share * l.last - floor(p.share * l.last) as part,
           min(l.ms) filter (where l.upto > floor(p.share * l.last)) as low,
           min(l.ms) filter (where l.upto > ceil(p.share * l.last)) as high
      from ladder l cross join (values (0.5::float8), (0.95)) p (share) group by l.skill, l.last, p.share)
  select r.skill, max(r.low + (r.high - r.low) * r.part) filter (where r.share = 0.5),
         max(r.low + (r.high - r.low) * r.part) filter (where r.share = 0.95)
    from ranks r group by r.skill;
end $$;
comment on function lanekeeper.agent_skill_durations is
  'The 50th and 95th percentile of the durations of skills'' calls since the day (UTC) of a moment. They are within '
  '2.5%.';

create or replace function lanekeeper.read_agent_skill_figures(p_since timestamptz, p_read int default 10000)
returns table (skill text, calls bigint, failed bigint, streak bigint, p50_ms float8, p95_ms float8, max_ms bigint,
               slowest_trace_id text)
language plpgsql stable security definer set search_path from current set enable_seqscan = off set jit = off
set plan_cache_mode = force_generic_plan as $$
#variable_conflict use_column
begin
  return query
  with began as materialized (
    -- Sum the hours from hour on, and the days from day on. The first hour may begin before p_since.
    select n.since, n.hour, lanekeeper.agent_uuid7_floor(n.since) as since_id,
           lanekeeper.agent_uuid7_floor(n.hour) as hour_id,
           (date_trunc('day', (n.hour - interval '1 microsecond') at time zone 'UTC') + interval '1 day')
             at time zone 'UTC' as day
      from (select x.since, date_trunc('hour', x.since at time zone 'UTC') at time zone 'UTC' as hour
              from (select greatest(p_since, 'epoch') as since) x) n),
  sums as materialized (
    select x.skill, sum(x.calls) as calls, sum(x.worked)::bigint as worked, sum(x.failed)::bigint as failed,
           max(x.slowest collate "C") as slowest
      from (select c.skill, c.calls, c.worked, c.failed, c.slowest from agent_activity_counts c
             where c.span = 'hour' and c.start >= (select b.hour from began b) and c.start < (select b.day from began b)
               and c.kind not in ('model', 'charge', 'agent', 'key')
            union all
            select c.skill, c.calls, c.worked, c.failed, c.slowest from agent_activity_counts c
             where c.span = 'day' and c.start >= (select b.day from began b)
               and c.kind not in ('model', 'charge', 'agent', 'key')
            union all
            select u.skill, 1, u.telling::int, (u.telling and u.status = 'error')::int, u.slowest
              from lanekeeper.read_agent_activity_tail(2000000000) u
             where u.kind <> 'model' and u.hour >= (select b.hour from began b)) x
     group by x.skill),
  ranked as materialized (
    select s.name, s.enabled_at, u.worked, u.failed, u.slowest,
           sum(u.calls) over (order by u.calls, s.name) <= p_read as few
      from sums u join agent_skills s on s.name = u.skill),
  -- Read skills with few calls from the rows.
  little as (
    select r.name, x.calls, x.failed, x.streak, x.p50_ms, x.p95_ms, x.slowest
      from ranked r
     cross join began b
     cross join lateral (
           select count(*) as calls, count(*) filter (where c.status = 'error') as failed,
                  count(*) filter (where c.status = 'error'
                                     and c.created_at > greatest(c.last_ok, r.enabled_at)) as streak,
                  percentile_cont(0.5) within group (order by c.duration_ms) as p50_ms,
                  percentile_cont(0.95) within group (order by c.duration_ms) as p95_ms,
                  max(c.slowest collate "C") as slowest
             from (select m.status, m.created_at, m.duration_ms, m.slowest,
                          max(m.created_at) filter (where m.status = 'success') over () as last_ok
                     from agent_activity_measured m
                    where m.skill_name = r.name and m.telling and m.id >= b.since_id and m.created_at >= b.since) c) x
     where r.few),
  -- Read skills with many calls from the counts, less the first hour's part before p_since. Read a streak back to the
  -- last success.
  early as materialized (
    select c.skill_name, count(*) as worked, count(*) filter (where c.status = 'error') as failed
      from began b cross join agent_skill_calls c where c.id >= b.hour_id and c.id < b.since_id group by c.skill_name),
  many as materialized (
    select r.name, r.worked - e.worked as worked, r.failed - e.failed as failed, k.streak, r.slowest
      from (select r.*, b.*, greatest(b.since_id, lanekeeper.agent_uuid7_floor(r.enabled_at)) as live_id
              from ranked r
             cross join began b
             where not r.few) r
     cross join lateral (
           select coalesce(sum(y.worked), 0)::bigint as worked, coalesce(sum(y.failed), 0)::bigint as failed
             from early y where y.skill_name = r.name) e
      left join lateral (
           select c.id from agent_skill_calls c
            where c.skill_name between r.name and r.name and c.status = 'success' and c.id >= r.live_id
              and r.failed > e.failed
            order by c.skill_name desc, c.id desc limit 1) ok on true
     cross join lateral (
           -- Two columns, because id alone would take its own index.
           select count(*) as streak from agent_skill_calls c
            where c.skill_name <= r.name and (c.skill_name, c.id) >= (r.name, coalesce(ok.id, r.live_id))
              and c.status = 'error' and r.failed > e.failed
              and c.created_at >= r.since and c.created_at > r.enabled_at) k)
  select x.name, x.calls, x.failed, x.streak, x.p50_ms, x.p95_ms, nullif(left(x.slowest, 13), '')::bigint,
         substr(x.slowest, 14)
    from (select l.* from little l
          union all
          select m.name, m.worked, m.failed, m.streak, d.p50_ms, d.p95_ms, m.slowest
            from many m
            left join lanekeeper.agent_skill_durations(p_since, array(select n.name from many n)) d
              on d.skill = m.name) x;
end $$;
comment on function lanekeeper.read_agent_skill_figures is
  'Figures of each skill since a moment: counted calls, failures, the present streak, durations, the slowest call. '
  'Skills with few calls are read call by call, p_read rows in all. The figures of other skills are sums of the '
  'counts: p50 and p95 are within 2.5%, over whole days (UTC). A moment more than 35 days ago begins at the '
  'next midnight.';

create or replace function record_stale_agent_write(p_id uuid, p_lock_id text, p_write text, p_step text default '',
                                                    p_output jsonb default null) returns boolean
language plpgsql volatile security definer set search_path from current set enable_seqscan = off set jit = off as $$
declare
  most constant int := 5;           -- rows for a lock; an execution has at most ten times as many
  lock_ text;
  n int;
  of_lock int;
  last_ uuid;
begin
  if p_write is null or p_write not in ('checkpoint', 'beat', 'release', 'message') then
    raise exception 'a refused write is a checkpoint, a beat, a release or a message, not %',
      coalesce(quote_literal(left(p_write, 40)), 'null')
      using errcode = '22023';
  end if;
  perform pg_advisory_xact_lock(hashtextextended('stale write ' || p_id, 0));
  -- The lock itself is a secret.
  lock_ := left(encode(sha256(convert_to(coalesce(p_lock_id, ''), 'UTF8')), 'hex'), 12);
  select count(*), count(*) filter (where a.input ->> 'lock' = lock_) into n, of_lock
    from agent_activity a where a.execution_id = p_id and a.skill_name = 'stale_write' and a.input ? 'lock';
  if of_lock < most and n < 10 * most then
    insert into agent_activity (trace_id, execution_id, kind, agent, surface, skill_name, status, step, thread_id,
                                finished_at, input, output, error_class, error_message)
    select x.trace_id, x.id, 'note', x.agent, x.surface, 'stale_write', 'error', coalesce(left(p_step, 500), ''),
           x.thread_id, clock_timestamp(),
           jsonb_build_object('rejected_write', p_write, 'step', coalesce(left(p_step, 500), ''), 'lock', lock_,
             'claim', (select k.claim from agent_workers k where k.lock_id = p_lock_id and k.execution_id = x.id)),
           jsonb_build_object('status', '', 'error', '',
                              'output', case when length(p_output::text) <= 16384 then p_output end),
           'stale', 'the lock is void: the write was refused'
      from agent_executions x where x.id = p_id and x.is_external;
    return found;
  end if;
  select a.id into last_ from agent_activity a
   where a.execution_id = p_id
     and a.skill_name = 'stale_write'
     and a.input ? 'lock'
     and (of_lock = 0 or a.input ->> 'lock' = lock_)
   order by a.id desc limit 1;
  update agent_activity a
     set input = a.input
                 || jsonb_build_object('more', coalesce((a.input ->> 'more')::int, 0) + 1, 'last_write', p_write,
                                       'last_at', clock_timestamp())
   where a.id = last_;
  return true;
end $$;
comment on function record_stale_agent_write is
  'Record the refused write of a worker outside with a void lock, as a stale_write in the activity log. Each of the '
  'first five refusals of a lock has a row; the fifth row counts the rest. An execution has at most 50 such rows; then '
  'the last one counts the rest. False: no execution for workers outside. LK001 rolls back its transaction, so call '
  'this in the next one. p_output is stored unchanged: leave secrets out.';

create or replace function lanekeeper.record_agent_prompt(
  p_activity_id uuid, p_tools bytea, p_messages bytea[], p_options jsonb, p_digests bytea[], p_bodies text[],
  p_truncated boolean[], p_amend boolean default false, out missing int, out problem text)
language plpgsql volatile set lock_timeout = '200ms' set plan_cache_mode = force_generic_plan set enable_seqscan = off
set jit = off as $$
declare
  today constant date := (now() at time zone 'UTC')::date;
  parts constant bytea[] :=
    array(select distinct p.digest from unnest(p_messages || p_tools) p (digest) where p.digest is not null);
begin
  missing := 0;
  if p_activity_id is null then
    problem := 'the model call has no open row';
    return;
  end if;
  -- Mark known parts before inserting new ones, in one order, so two calls cannot deadlock. Pruning skips locked parts.
  -- A pruned part is inserted again.
  update agent_prompt_parts p set used_on = today
    from (select h.digest
            from agent_prompt_parts h
           where h.digest = any (parts) and h.used_on < today
           order by h.digest
           for update) u
   where p.digest = u.digest;
  insert into agent_prompt_parts (digest, body, truncated, used_on)
  select n.digest, n.body, n.truncated, today from unnest(p_digests, p_bodies, p_truncated) n (digest, body, truncated)
   order by n.digest
  on conflict do nothing;
  if p_amend then
    update agent_prompts p set options = p_options, messages = coalesce(p_messages, p.messages)
     where p.activity_id = p_activity_id;
  else
    insert into agent_prompts (activity_id, tools, messages, options)
    values (p_activity_id, p_tools, p_messages, p_options)
    on conflict do nothing;
  end if;
  missing := cardinality(parts) - (select count(*) from agent_prompt_parts p where p.digest = any (parts));
exception when others then
  missing := 0;
  problem := sqlerrm;
end $$;
comment on function lanekeeper.record_agent_prompt is
  'Record the prompt of a model call, with the parts that may be new, in the transaction that opens the call. p_amend: '
  'in the transaction that ends the call, record the sent options and messages; null messages stay. An error other '
  'than a cancel does not fail the transaction: problem says why nothing was recorded, missing counts absent parts.';

create or replace function lanekeeper.agent_activity_written() returns trigger
language plpgsql security definer set search_path from current as $$
begin
  if new.claim is not null then
    perform fence_agent_execution(new.execution_id, new.claim);
  end if;
  -- The surface eval keeps a trial's log out of the figures. Refuse other surfaces.
  if new.trace_id like 'ev\_%' and new.surface <> 'eval' then
    raise exception 'a trial of an eval cannot write to agent_activity of the surface %', quote_literal(new.surface)
      using errcode = 'LK009';
  end if;
  if new.id < lanekeeper.agent_uuid7_floor(clock_timestamp() - interval '5 seconds') then
    insert into agent_activity_uncounted values (new.id) on conflict do nothing;
  end if;
  return null;
end $$;
comment on function lanekeeper.agent_activity_written is
  'Refuse a row of the log whose claim is not the live one of its execution (SQLSTATE LK001). Refuse a row of a trial '
  'under another surface (LK009). List a row with an old id in agent_activity_uncounted, because the count may have '
  'passed it.';

-- The trigger runs after the insert, because its transaction then has an xid. PostgreSQL would parse a condition of the
-- trigger for each statement, at the price of several calls.
create or replace trigger agent_activity_written after insert on agent_activity for each row
  execute function lanekeeper.agent_activity_written();
