-- Why: causes and effects.
--
-- agent_links has a row for each cause that no other table records. The function why answers in words and references.

create type agent_reason as (
  at timestamptz, kind text, what text, from_ref text, to_ref text, trace_id text, execution_id uuid, detail jsonb
);
comment on type agent_reason is
  'One cause: at that time, from_ref caused to_ref. what is the sentence, detail its data.';

create table agent_links (
  cause text not null,
  kind text not null check (kind in ('raised', 'woke', 'started', 'ran', 'told', 'allowed', 'asked')),
  effect text not null, at timestamptz not null default clock_timestamp(),
  primary key (cause, kind, effect)
);
create index agent_links_effect on agent_links (effect, kind);
comment on index agent_links_effect is 'Finds the cause of an effect.';
comment on table agent_links is 'Causes and effects that no other table records.';
comment on column agent_links.cause is
  'A reference as why returns it: execution ID, trace ID, event ID, run ID, approval ID; or principal NAME.';
comment on column agent_links.kind is
  'The relation: the cause raised, woke, started, ran, told, allowed or asked for the effect.';
comment on column agent_links.effect is 'A reference: event ID, execution ID, run ID, outgoing ID.';
comment on column agent_links.at is 'When it happened.';

-- Code
-- Every read uses an index, whatever the statistics say: a limit of 1 keeps the planner from scanning a table that is
-- small today. Every part of the answer has a bound. The settings of why() apply to the views and functions that it
-- reads.

create or replace view lanekeeper.agent_causes as
  select 'execution' as subject, x.id, case
    when x.forked_from is not null then
      (x.created_at, 'fork',
       format('%s was forked from an execution that is %s%s', x.flow, coalesce(o.status, 'no longer kept'),
              ', at step ' || x.forked_step),
       'execution ' || x.forked_from, 'execution ' || x.id, o.trace_id, x.forked_from,
       jsonb_strip_nulls(jsonb_build_object('step', x.forked_step, 'status', o.status, 'flow', x.flow)))::agent_reason
    when x.parent_id is not null then
      (x.created_at, 'child', format('%s started %s', coalesce(o.flow, 'an execution that is no longer kept'), x.flow),
       'execution ' || x.parent_id, 'execution ' || x.id, o.trace_id, x.parent_id,
       jsonb_build_object('flow', x.flow, 'awaited', x.awaited))::agent_reason
    when lanekeeper.agent_uuid(k.run) is not null then
      (x.created_at, 'automation', format('automation %s ran%s', coalesce(r.name, '(no longer kept)'),
         case when r.attempt > 1 then format(', attempt %s of %s', r.attempt, r.max_attempts) else '' end),
       'run ' || k.run, 'execution ' || x.id, null, null,
       jsonb_strip_nulls(jsonb_build_object('automation', r.name, 'attempt', nullif(r.attempt, 0),
                                            'of', r.max_attempts)))::agent_reason
    when k.delivery is not null then
      (coalesce(d.received_at, x.created_at), 'webhook',
       format('delivery %s came to endpoint %s%s', coalesce(d.delivery_id, '(no longer kept)'), d.endpoint,
         case when split_part(x.dedupe_key, ' ', 3) <> '0' then ', and an admin replayed it' else '' end),
       'delivery ' || k.delivery, 'execution ' || x.id, null, null,
       jsonb_build_object('endpoint', d.endpoint, 'delivery_id', d.delivery_id, 'attempts', d.attempts,
                          'repeats', d.repeats, 'replay', split_part(x.dedupe_key, ' ', 3)))::agent_reason
    when s.name is not null then
      (x.created_at, 'schedule', format('schedule %s was due at %s', s.name, s.due), 'schedule ' || s.name,
       'execution ' || x.id, null, null, jsonb_build_object('due', s.due))::agent_reason
    when x.surface = 'chat' then
      (x.created_at, 'message', format('somebody wrote in thread %s', x.thread_id),
       'thread ' || coalesce(x.thread_id, ''), 'execution ' || x.id,
       null, null, '{}')::agent_reason
    when x.surface = 'operate' then (x.created_at, 'admin', coalesce(q.name, 'an admin') || ' asked for it', 'admin',
                                     'execution ' || x.id, null, null, '{}')::agent_reason
    else (x.created_at, 'outside',
          coalesce(q.name || ' started ' || x.flow,
                   format('%s was started from outside: the API, the command line or code', x.flow)),
          'outside', 'execution ' || x.id, null, null,
          jsonb_strip_nulls(jsonb_build_object('key', x.dedupe_key)))::agent_reason end as cause
    from agent_executions x
   cross join lateral (
     select case when x.flow = 'automation' then x.input ->> 'run_id' end as run,
            case when x.flow = 'webhook'
                      and x.dedupe_key like 'webhook %'
                      and lanekeeper.agent_uuid(split_part(x.dedupe_key, ' ', 2)) is not null
                 then split_part(x.dedupe_key, ' ', 2) end as delivery offset 0) k
    left join agent_executions o on o.id = coalesce(x.forked_from, x.parent_id)
    left join lateral (
      select a.name, a.max_attempts, (
             select count(*) from agent_links f, agent_links m
              where m.effect = 'execution ' || x.id and m.kind = 'ran' and f.cause = m.cause and f.kind = 'ran'
                and f.at <= m.at) as attempt
        from agent_automation_runs n
        join agent_automations a on a.id = n.automation_id
       where n.id = lanekeeper.agent_uuid(k.run)
      offset 0) r on true
    left join agent_webhook_deliveries d on d.id = lanekeeper.agent_uuid(k.delivery)
    left join lateral (
      select c.name, substr(x.dedupe_key, length(c.name) + 2) as due from agent_schedules c
       where c.name = regexp_replace(x.dedupe_key, ' [0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.]+Z$', '') and c.flow = x.flow
         and c.name <> x.dedupe_key
      offset 0) s on true
    left join lateral (
      select substr(l.cause, 11) as name from agent_links l
       where l.effect = 'execution ' || x.id and l.kind = 'asked' limit 1) q on true
  union all
  select 'run', n.id, case n.cause
    when 'event' then (n.created_at, 'event', format('event %s %s started automation %s', v.event, v.key, a.name),
                       'event ' || n.event_id, 'run ' || n.id, null, null,
                       jsonb_build_object('event', v.event, 'key', v.key, 'automation', a.name))::agent_reason
    when 'cron' then (n.created_at, 'schedule', format('automation %s was due at %s', a.name,
                        to_char(n.scheduled_for at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"')),
                      'schedule of ' || a.name, 'run ' || n.id, null, null,
                      jsonb_build_object('automation', a.name, 'due', n.scheduled_for))::agent_reason
    when 'signal' then (n.created_at, 'signal', format('the signal of automation %s became true', a.name),
                        'signal of ' || a.name, 'run ' || n.id, null, null,
                        jsonb_build_object('automation', a.name))::agent_reason
    else (n.created_at, case when x.id is null then 'admin' else 'asked' end,
          format('%s ran automation %s', coalesce(x.flow, 'an admin'), a.name),
          coalesce('execution ' || x.id, 'admin'), 'run ' || n.id, x.trace_id, x.id,
          jsonb_build_object('automation', a.name))::agent_reason end
    from agent_automation_runs n
    join agent_automations a on a.id = n.automation_id
    left join agent_events v on v.id = n.event_id
    left join lateral (
      select e.id, e.trace_id, e.flow
        from agent_links l join agent_executions e on e.id = lanekeeper.agent_uuid(substr(l.cause, 11))
       where l.effect = 'run ' || n.id and l.kind = 'started'
         and n.cause not in ('event', 'cron', 'signal') limit 1) x on true
  union all
  select 'event', v.id, case
    when v.execution_id is not null then
      (v.created_at, 'end', format('%s ended %s', coalesce(x.flow, 'an execution that is no longer kept'), x.status),
       'execution ' || v.execution_id, 'event ' || v.id, x.trace_id, v.execution_id,
       jsonb_build_object('event', v.event, 'status', x.status))::agent_reason
    when l.cause is not null then
      (v.created_at, 'raised', format('%s raised event %s %s', case when l.cause not like 'execution %' then l.cause
         else coalesce(x.flow, 'an execution that is no longer kept') end, v.event, v.key), l.cause, 'event ' || v.id,
       case when l.cause like 'execution %' then x.trace_id else substr(l.cause, 7) end, x.id,
       jsonb_build_object('event', v.event, 'key', v.key))::agent_reason
    when v.external_id like 'approval %' then
      (v.created_at, 'approval', 'an approval was decided', v.external_id, 'event ' || v.id, null, null,
       '{}')::agent_reason
    when lanekeeper.agent_uuid(v.data ->> 'message_id') is not null then
      (v.created_at, 'message', format('somebody wrote in thread %s', v.key), 'thread ' || v.key, 'event ' || v.id,
       null, null, '{}')::agent_reason
    else (v.created_at, 'outside', format('event %s %s came from outside', v.event, v.key), 'outside', 'event ' || v.id,
          null, null, jsonb_build_object('event', v.event, 'key', v.key))::agent_reason end
    from agent_events v
    left join lateral (select r.cause
                         from agent_links r
                        where r.effect = 'event ' || v.id and r.kind = 'raised' and v.execution_id is null
                        limit 1) l on true
    left join agent_executions x
      on x.id = coalesce(v.execution_id,
                         case when l.cause like 'execution %' then lanekeeper.agent_uuid(substr(l.cause, 11)) end);
comment on view lanekeeper.agent_causes is
  'The cause of each execution, run of an automation and event. Restrict it by subject and id.';

create or replace function lanekeeper.agent_past_waits(p_id uuid)
returns table (step text, kind text, key text, since timestamptz, until timestamptz, event_id uuid, event text,
               timed_out boolean)
language sql stable as $$
  select w.step, w.kind, w.key, w.since, w.until, lanekeeper.agent_uuid(w.output ->> 'event_id'), w.output ->> 'event',
         coalesce(w.output ->> 'timed_out' = 'true', false)
    from (select k.* from agent_checkpoints k where k.execution_id = p_id limit 5000) c
   cross join lateral (
     select c.step, c.waited_for as kind, c.waited_key as key, c.waited_since as since, c.created_at as until, c.output
      where c.waited_for is not null
     union all
     select l ->> 'step', l ->> 'kind', l ->> 'key', (l ->> 'since')::timestamptz, (l ->> 'until')::timestamptz, l
       from jsonb_array_elements(case jsonb_typeof(c.waits) when 'array' then c.waits else '[]' end) l) w
$$;
comment on function lanekeeper.agent_past_waits is
  'The ended waits of an execution, from its checkpoints and from snapshots of loops. It reads 5,000 checkpoints.';

create or replace view lanekeeper.agent_why_of_runs as
  -- Its flow and status.
  select x.id as run, 2 as rank, 'did' as part, x.created_at as place_at, '' as place, 0 as n,
         x.created_at as at, case when p.id is null then 'run' else 'child' end as kind,
         x.flow || case x.status
           when 'pending' then ' waits to be started'
           when 'running' then case when x.claimed_by is null then ' is ready to continue' else ' runs' end
           when 'waiting' then format(' waits for %s %s, since %s', x.waiting_for,
                                      case when x.waiting_for = 'delay' then '' else x.waiting_key end,
                                      lanekeeper.agent_words(x.updated_at, clock_timestamp()))
           else format(' %s after %s', x.status, lanekeeper.agent_words(x.created_at, x.completed_at)) end
         || case when x.status = 'completed'
                   -- Only sessions of the owner read results of conversations (activity.IsConversation).
                   then case when pg_has_role(session_user, current_user, 'member')
                               or not (x.thread_id is not null or x.surface in ('chat', 'eval')
                                       or x.surface = 'operate' and x.flow <> 'skill_call' or x.flow = 'delegate')
                               then coalesce(': ' || nullif(left(x.result_summary, 200), ''), '') else '' end
                 when x.status = 'cancelled' then format(', by %s: %s', coalesce((
                        select lanekeeper.agent_decider(x.cancelled_by, a.input ->> 'via', a.input ->> 'key_id', '')
                          from agent_activity a
                         where a.skill_name = 'cancel_execution' and a.input ->> 'execution' = x.id::text
                           and a.id >= lanekeeper.agent_uuid7_floor(x.completed_at - interval '1 s')
                           and a.id < lanekeeper.agent_uuid7_floor(x.completed_at + interval '10 s') limit 1),
                      nullif(x.cancelled_by, ''), 'somebody'), left(x.cancel_reason, 300))
                 when x.status in ('failed', 'timeout')
                   then coalesce(' in step ' || x.failed_step, '') || coalesce(': ' || left(x.error_message, 300), '')
                 else '' end as what,
         coalesce('execution ' || p.id, '') as from_ref, 'execution ' || x.id as to_ref, x.trace_id,
         x.id as execution_id,
         jsonb_strip_nulls(jsonb_build_object(
           'flow', x.flow, 'status', x.status, 'agent', x.agent, 'surface', x.surface, 'claim', x.claim,
           'waits', x.wait_number, 'thread', x.thread_id, 'completed_at', x.completed_at)) as detail
    from agent_executions x left join agent_executions p on p.id = x.parent_id and p.trace_id = x.trace_id
  union all
  -- Runs of automations that it executed, as the heartbeat does.
  select x.id, 2, 'did', l.at, '', 0, l.at, 'ran',
         format('%s executed a run: %s', x.flow, coalesce(c.what, 'its automation is no longer kept')),
         l.cause, l.effect,
         coalesce((select (u.cause).trace_id
                     from lanekeeper.agent_causes u
                    where u.subject = split_part(c.from_ref, ' ', 1)
                      and u.id = lanekeeper.agent_uuid(split_part(c.from_ref, ' ', 2))), x.trace_id),
         x.id, jsonb_strip_nulls(jsonb_build_object('because', c.from_ref))
    from agent_executions x
    join agent_links l on l.effect = 'execution ' || x.id and l.kind = 'ran'
    left join lateral (
      select (u.cause).what, (u.cause).from_ref from (
        select r.cause from lanekeeper.agent_causes r
         where r.subject = 'run' and r.id = lanekeeper.agent_uuid(substr(l.cause, 5)) offset 0) u) c on true
   where x.flow <> 'automation'
  union all
  -- Its waits, and the first 20 holders of each lane that it waited for.
  select x.id, 3, 'waits', w.since, w.step, r.n, r.at, r.kind, r.what, r.from_ref, 'execution ' || x.id, r.trace_id,
         r.execution_id, jsonb_strip_nulls(r.detail)
    from agent_executions x
   cross join lateral (
      select k.kind, k.key, k.since, k.until, k.step, k.event_id as event, k.timed_out as late
        from lanekeeper.agent_past_waits(x.id) k
      union all
      select x.waiting_for, x.waiting_key, x.updated_at, null, x.waiting_step, null, false
       where (x.status = 'waiting') is true) w
    left join lateral (
      select (u.cause).what, (u.cause).trace_id, (u.cause).from_ref from (
        select r.cause from lanekeeper.agent_causes r
         where r.subject = 'event' and r.id = w.event and w.kind not in ('agent', 'approval') offset 0) u
      union all
      select e.flow, e.trace_id, null from agent_executions e
       where w.kind = 'agent' and e.id = lanekeeper.agent_uuid(w.key)
      union all
      select case when a.decided_by = '' then 'nobody decided it' else lanekeeper.agent_approval_outcome(a) end,
             null, null
        from agent_approvals a
       where w.kind = 'approval' and w.until is not null and a.id = lanekeeper.agent_uuid(w.key)) c on true
   cross join lateral (
      select 0 as n, w.since as at,
             case when w.until is null then 'waits' when w.late then 'timed out' else 'waited' end as kind,
             x.flow
               || case when w.until is null
                         then format(' has waited %s for ', lanekeeper.agent_words(w.since, clock_timestamp()))
                       else format(' waited %s for ', lanekeeper.agent_words(w.since, w.until)) end
               || case w.kind
                    when 'delay' then 'its time'
                    when 'agent' then 'the end of ' || coalesce(c.what, w.key)
                    when 'approval' then 'approval'
                    when 'response' then 'an answer in thread ' || w.key
                    when 'lane' then 'lane ' || w.key
                    when 'event' then 'event ' || w.key
                    else 'a ' || w.kind end
               || case when w.late then ', until the timeout'
                       when w.until is not null and w.kind <> 'agent' then coalesce(': ' || c.what, '')
                       else '' end as what,
             case when w.until is null then ''
                  when w.late or w.kind = 'delay' then 'timer'
                  when w.kind = 'agent' then 'execution ' || w.key
                  when w.kind in ('approval', 'lane') then w.kind || ' ' || w.key
                  else 'event ' || w.event end as from_ref,
             coalesce(c.trace_id, x.trace_id) as trace_id, x.id as execution_id,
             jsonb_build_object('for', w.kind, 'key', w.key, 'step', w.step, 'until', w.until,
                                'raised_by', c.from_ref) as detail
      union all
      (select 1 + row_number() over (order by h.held_from), h.held_from, 'blocked',
              format('%s had lane %s meanwhile%s', coalesce(e.flow, 'an execution that is no longer kept'), w.key,
                case when h.held_until is null then ', and has it'
                     else ', for ' || lanekeeper.agent_words(h.held_from, h.held_until) end),
              'execution ' || h.execution_id, e.trace_id, h.execution_id,
              jsonb_build_object('lane', w.key, 'from', h.held_from, 'until', h.held_until)
         -- Only holds that ended after the wait began can have blocked it.
         from ((select k.execution_id, k.held_from, k.held_until from agent_lane_holds k
                 where w.kind = 'lane' and k.lane = w.key and k.held_until > w.since order by k.held_until limit 50)
               union all
               select l.execution_id, l.locked_at, case when l.expires_at <= clock_timestamp() then l.expires_at end
                 from agent_locks l
                where w.kind = 'lane' and l.lane = w.key and l.execution_id is not null) h
         left join agent_executions e on e.id = h.execution_id
        where h.execution_id <> x.id and h.held_from < coalesce(w.until, 'infinity')
          and coalesce(h.held_until, 'infinity') > w.since
        order by h.held_from limit 20)) r
  union all
  -- The lanes that it held.
  select x.id, 4, 'lanes', h.held_from, '', 0, h.held_from, k.word,
         format('%s %s lane %s %s', x.flow, k.word, h.lane, case when h.ended is null then 'since ' else 'for ' end
           || lanekeeper.agent_words(h.held_from, coalesce(h.held_until, clock_timestamp()))
           || case h.ended
                when 'ended' then ', until it ended'
                when 'lent' then ', then lent it'
                when 'given back' then ', then gave it back'
                when 'handed back' then ', until its process handed the execution back'
                when 'expired' then ', then its lease expired'
                when 'broken' then ', then an admin broke it'
                else '' end),
         'execution ' || x.id, 'lane ' || h.lane, x.trace_id, x.id,
         jsonb_strip_nulls(jsonb_build_object('until', h.held_until, 'ended', h.ended, 'next', nullif(h.successor, ''),
                                              'fencing_token', h.fencing_token))
    from agent_executions x
   cross join lateral (
      select l.lane, l.fencing_token, l.held_from, l.held_until, l.ended, l.successor from agent_lane_holds l
       where l.execution_id = x.id
      union all
      select l.lane, l.fencing_token, l.locked_at, o.until, case when o.until is not null then 'expired' end, ''
        from agent_locks l
       cross join lateral (select case when l.expires_at <= clock_timestamp() then l.expires_at end as until) o
       where l.execution_id = x.id) h
   cross join lateral (select case when h.held_until is null then 'holds' else 'held' end as word) k
  union all
  -- The workers that it lost.
  select x.id, 5, 'trouble', c.at, '', 0, c.at, 'lost',
         format('%s lost its worker %s under claim %s%s%s', x.flow, coalesce(nullif(c.worker_name, ''), c.worker::text),
           c.claim,
           case c.how
             when 'handed back' then ', which handed it back: it shut down, was paused or lacks the flow'
             when 'no progress' then ', which recorded no step in time'
             else ', whose lease expired' end,
           case when x.claim > c.claim + 1 then '; another worker continued it'
                when x.status in ('pending', 'running') then '; it is ready to continue'
                else '' end),
         'worker ' || c.worker, 'execution ' || x.id, x.trace_id, x.id,
         jsonb_build_object('claim', c.claim, 'how', c.how, 'worker', c.worker_name)
    from agent_executions x join agent_claims_lost c on c.execution_id = x.id
  union all
  -- Executions that it began in other traces, its messages, and its requests to people.
  select x.id, 6, 'led to', e.at, e.kind, 0, e.at, e.kind, e.what, 'execution ' || x.id, e.to_ref, e.trace_id,
         e.execution_id, jsonb_strip_nulls(e.detail)
    from agent_executions x cross join lateral (
      (select f.created_at as at, 'forked' as kind, format('%s was forked, and is %s', f.flow, f.status) as what,
              'execution ' || f.id as to_ref, f.trace_id, f.id as execution_id,
              jsonb_build_object('step', f.forked_step, 'status', f.status) as detail
         from agent_executions f where f.forked_from = x.id limit 1001)
      union all
      (select c.created_at, 'child', format('%s was started, and is %s', c.flow, c.status), 'execution ' || c.id,
              c.trace_id, c.id, jsonb_build_object('status', c.status)
         from agent_executions c where c.parent_id = x.id and c.trace_id <> x.trace_id limit 1001)
      union all
      (select min(m.created_at), 'said',
              format('%s said %s in thread %s', x.flow,
                     case when count(*) = 1 then 'a message' else count(*) || ' messages' end, m.thread_id),
              'thread ' || m.thread_id, x.trace_id, x.id,
              jsonb_build_object('messages', count(*), 'failed', count(*) filter (where m.status = 'failed'))
         from (select e.thread_id, e.created_at, e.status
                 from agent_messages e
                where e.execution_id = x.id and e.role = 'assistant'
                limit 5000) m
        group by m.thread_id)
      union all
      (select r.created_at, 'asked', format('%s asked people for a %s: %s', x.flow, r.kind, r.status),
              'request ' || r.id, x.trace_id, x.id, jsonb_build_object('kind', r.kind, 'status', r.status)
         from agent_requests r where r.execution_id = x.id limit 1001)) e;
comment on view lanekeeper.agent_why_of_runs is
  'The rows of why() about each execution: its status, waits, lanes, lost workers and effects. Restrict it by run.';

create or replace function lanekeeper.agent_why_because(p_trace text, p_runs uuid[], p_most int)
returns setof agent_reason
language plpgsql stable as $$
declare
  root uuid;
  ref text;
  c agent_reason;
  chain agent_reason[];
  shown text[] := '{}';
  inside boolean;
  hops constant int := 32;
begin
  for root in
    select x.id from agent_executions x left join agent_executions p on p.id = x.parent_id
     where x.id = any (p_runs) and (x.parent_id is null or p.trace_id is distinct from p_trace)
     order by x.id
     limit p_most
  loop
    chain := '{}';
    inside := false;
    ref := 'execution ' || root;
    for i in 1 .. hops + 1 loop
      select (u.cause).* into c from (
        select r.cause from lanekeeper.agent_causes r
         where r.subject = split_part(ref, ' ', 1)
           and r.id = lanekeeper.agent_uuid(split_part(ref, ' ', 2)) offset 0) u;
      exit when c.from_ref is null;
      if i > hops or exists (select from unnest(chain) e where e.to_ref = c.from_ref) then
        chain := (c.at, 'more', '… and earlier causes', '', ref, null, null,
                  jsonb_build_object('cycle', i <= hops))::agent_reason
                 || chain;
        exit;
      end if;
      -- A cause in the trace itself is one of its effects.
      inside := c.trace_id = p_trace;
      exit when inside or c.to_ref = any (shown);
      chain := c || chain;
      ref := c.from_ref;
    end loop;
    continue when inside;
    return query select e.* from unnest(chain) e;
    shown := shown || array(select e.to_ref from unnest(chain) e);
  end loop;
  -- Approvals that another execution had requested.
  return query
  select l.at, 'allowed',
         format('%s used an approval that %s had requested', x.flow, coalesce(o.flow, 'somebody else')), l.cause,
         l.effect, coalesce(o.trace_id, a.trace_id), a.execution_id,
         jsonb_strip_nulls(jsonb_build_object('skill', a.skill_name, 'decided_by', a.decided_by,
           'token_id', nullif(a.decided_token_id, ''), 'via', nullif(a.decided_via, ''),
           'message', nullif(a.decided_message, '')))
    from agent_links l
    join agent_executions x on x.id = lanekeeper.agent_uuid(substr(l.effect, 11))
    left join lateral (select n.*
                         from agent_approvals n
                        where n.id = lanekeeper.agent_uuid(substr(l.cause, 10))
                        limit 1) a on true
    left join agent_executions o on o.id = a.execution_id
   where l.effect = any (select 'execution ' || r from unnest(p_runs) r) and l.kind = 'allowed'
   order by l.at, l.cause limit p_most;
end $$;
comment on function lanekeeper.agent_why_because is 'The causes of a trace, the first one first.';

create or replace function lanekeeper.agent_why_log(p_trace text, p_most int, p_rows int)
returns table (part text, reason agent_reason)
language plpgsql stable as $$
begin
  return query
  with log as materialized (
    select a.id, a.created_at, a.execution_id, a.kind, a.skill_name, a.status, a.error_class, a.error_message, a.step,
           a.model, a.token_usage, a.cost_usd,
           case when a.error_class = 'stale' then a.input end as input
      from agent_activity a where a.trace_id = p_trace order by a.created_at limit p_rows),
  wrong as (
    select 'trouble' as part, 1 as rank, l.created_at as at,
           (l.created_at,
            case when l.error_class = 'stale' then 'stale' else 'unknown' end,
            case when l.error_class = 'stale'
                 then format('a write under %s was refused: %s%s%s',
                        coalesce('claim ' || (l.input ->> 'claim'), 'a void lock'), l.input ->> 'rejected_write',
                        coalesce(' in step ' || nullif(l.input ->> 'step', ''), ''),
                        coalesce(', and ' || (l.input ->> 'more') || ' more', ''))
                 else format('nobody knows whether %s took effect: %s', l.skill_name,
                        left(split_part(l.error_message, '; nobody knows', 1), 300)) end,
            case when l.execution_id is null then 'trace ' || p_trace else 'execution ' || l.execution_id end,
            'step ' || case when l.error_class = 'stale' then coalesce(l.input ->> 'step', '') else l.step end,
            p_trace, l.execution_id,
            jsonb_strip_nulls(jsonb_build_object(
              'activity', l.id, 'skill', coalesce(l.input ->> 'rejected_write', l.skill_name),
              'claim', l.input -> 'claim')))::agent_reason as reason
      from log l where l.error_class = 'stale' and l.skill_name = 'stale_write' or l.status = 'unknown'
     order by l.created_at, l.id limit p_most),
  models as (
    select m.model, count(*) as calls, min(m.created_at) as at,
           sum(lanekeeper.agent_tokens(m.token_usage, 'prompt_tokens')) as prompt,
           sum(lanekeeper.agent_tokens(m.token_usage, 'completion_tokens')) as completion,
           sum(lanekeeper.agent_tokens(m.token_usage, 'total_tokens')) as tokens, sum(nullif(m.cost_usd, 'NaN')) as usd
      from log m where m.kind = 'model' group by m.model),
  spent as (
    select 'spend', 2, m.at,
           (m.at, 'spend', format('%s: %s, %s tokens%s', coalesce(nullif(m.model, ''), 'a model without a name'),
              case when m.calls = 1 then '1 call' else m.calls || ' calls' end,
              to_char(m.tokens, 'FM999,999,999,999,990'),
              case when m.usd <> 0 then ', $' || m.usd when m.tokens > 0 then ', no price' else '' end),
            'trace ' || p_trace, 'model ' || m.model, p_trace, null,
            jsonb_build_object('calls', m.calls, 'prompt_tokens', m.prompt,
              'completion_tokens', m.completion, 'tokens', m.tokens, 'cost_usd', m.usd))::agent_reason
      from models m order by m.usd desc, m.tokens desc, m.model limit p_most),
  asked as (
    (select 'led to', 4, a.created_at,
            (a.created_at, 'asked', format('approval of %s: %s', a.skill_name, lanekeeper.agent_approval_outcome(a)),
             coalesce('execution ' || a.execution_id, 'trace ' || p_trace), 'approval ' || a.id, p_trace,
             a.execution_id,
             jsonb_strip_nulls(
               jsonb_build_object('skill', a.skill_name, 'status', a.status, 'decided_by', nullif(a.decided_by, ''),
                 'decided_at', a.decided_at, 'token_id', nullif(a.decided_token_id, ''),
                 'via', nullif(a.decided_via, ''), 'message', nullif(a.decided_message, ''))))::agent_reason
       from agent_approvals a where a.trace_id = p_trace order by a.id limit p_most)
    union all
    (select 'led to', 5, l.at,
            (l.at, 'allowed', format('%s used the approval in another trace', x.flow), l.cause, l.effect, x.trace_id,
             x.id, '{}')::agent_reason
       from (select a.id from agent_approvals a where a.trace_id = p_trace order by a.id limit p_most) a
       join agent_links l on l.cause = 'approval ' || a.id and l.kind = 'allowed'
       join agent_executions x on x.id = lanekeeper.agent_uuid(substr(l.effect, 11)) and x.trace_id <> p_trace)),
  beyond as (
    select 'spend', 3, null::timestamptz,
           (null, 'more', format('… and more than %s actions, which were not read', to_char(p_rows, 'FM999,999,990')),
            '', '', p_trace, null, '{}')::agent_reason
      from log having count(*) >= p_rows)
  select u.part, u.reason
    from (table wrong union all table spent union all table asked union all table beyond) u
   order by u.rank, u.at, (u.reason).to_ref;
end $$;
comment on function lanekeeper.agent_why_log is
  'The rows of why() from the log and the approvals of a trace: stale writes, unknown effects, spend, requested calls. '
  'It reads p_rows actions.';

create or replace function lanekeeper.agent_why_events(p_trace text, p_runs uuid[], p_most int)
returns setof agent_reason
language plpgsql stable as $$
declare
  mine constant text[] := array['trace ' || p_trace] || array(select 'execution ' || r from unnest(p_runs) r);
  events uuid[];                    -- events that the trace raised
  ends uuid[];                      -- completion events of its executions
  made uuid[];                      -- runs of automations that it started
begin
  events := array(select lanekeeper.agent_uuid(substr(l.effect, 7))
                    from agent_links l
                   where l.cause = any (mine) and l.kind = 'raised'
                   order by l.at, l.effect
                   limit p_most);
  ends := array(select v.id
                  from agent_events v
                 where v.external_id = any (select 'completed ' || r from unnest(p_runs) r)
                 limit 1000);
  return query
  select v.created_at, 'raised', format('%s raised event %s %s', coalesce(x.flow, 'it'), v.event, v.key), l.cause,
         l.effect, p_trace, x.id,
         jsonb_strip_nulls(jsonb_build_object('event', v.event, 'key', v.key, 'taken', v.consumed_by is not null))
    from agent_events v join agent_links l on l.effect = 'event ' || v.id and l.kind = 'raised' and l.cause = any (mine)
    left join agent_executions x on x.id = lanekeeper.agent_uuid(substr(l.cause, 11))
   where v.id = any (events);
  -- Executions of other traces that an event of this one, or the end of one of its executions, resumed.
  return query
  select k.created_at, 'resumed', format('%s resumed in another trace', x.flow),
         case when v.execution_id is null then 'event ' || v.id else 'execution ' || v.execution_id end,
         'execution ' || x.id, x.trace_id, x.id, jsonb_build_object('flow', x.flow, 'step', k.step)
    from agent_events v
   cross join lateral (select v.consumed_by as id where v.consumed_by is not null
                       union
                       select lanekeeper.agent_uuid(substr(l.effect, 11))
                         from agent_links l
                        where l.cause = 'event ' || v.id and l.kind = 'woke') t
    join agent_executions x on x.id = t.id and x.trace_id <> p_trace
    join lateral (select c.step, c.until as created_at
                    from lanekeeper.agent_past_waits(x.id) c
                   where c.event_id = v.id
                   limit p_most) k on true
   where v.id = any (events || ends) limit p_most;
  -- Runs of automations: by its events, by its ends, and those that it asked for.
  made := array(select lanekeeper.agent_uuid(substr(l.effect, 5)) from agent_links l
                 where l.cause = any (select 'event ' || e from unnest(events || ends) e
                                      union all
                                      select m from unnest(mine) m)
                   and l.kind = 'started'
                 order by l.at, l.effect limit p_most);
  return query
  select r.created_at, 'started', format('a run of automation %s is %s', a.name, r.status),
         case when v.id is null then l.cause
              when v.execution_id is null then 'event ' || v.id
              else 'execution ' || v.execution_id end,
         'run ' || r.id, nullif(r.trace_id, ''), v.execution_id,
         jsonb_strip_nulls(jsonb_build_object('automation', a.name, 'status', r.status,
                                              'error', left(r.error_message, 300)))
    from unnest(made) m (id)
   cross join lateral (select n.* from agent_automation_runs n where n.id = m.id limit 1) r
   cross join lateral (select n.name from agent_automations n where n.id = r.automation_id limit 1) a
   cross join lateral (select n.cause
                         from agent_links n
                        where n.effect = 'run ' || r.id and n.kind = 'started'
                        limit 1) l
    left join lateral (select n.id, n.execution_id from agent_events n where n.id = r.event_id limit 1) v on true;
  return query
  select l.at, 'ran', format('%s executed the run, and is %s', x.flow, x.status), l.cause, l.effect, x.trace_id, x.id,
         jsonb_build_object('status', x.status)
    from agent_links l join agent_executions x on x.id = lanekeeper.agent_uuid(substr(l.effect, 11))
   where l.cause = any (select 'run ' || m from unnest(made) m) and l.kind = 'ran' order by l.at limit p_most;
  return query
  select o.created_at, 'told',
         format('%s to target %s: %s%s', o.event, t.name, o.status,
                case when o.attempts > 1 then format(' after %s attempts', o.attempts) else '' end),
         l.cause, l.effect, p_trace, lanekeeper.agent_uuid(substr(l.cause, 11)),
         jsonb_build_object('target', t.name, 'event', o.event, 'status', o.status, 'attempts', o.attempts)
    from (select k.cause, k.effect
            from agent_links k
           where k.cause = any (mine) and k.kind = 'told'
           order by k.at, k.effect
           limit p_most) l
   cross join lateral (select n.*
                         from agent_webhook_outbox n
                        where n.id = lanekeeper.agent_uuid(substr(l.effect, 10))
                        limit 1) o
   cross join lateral (select n.name from agent_webhook_targets n where n.id = o.target_id limit 1) t;
end $$;
comment on function lanekeeper.agent_why_events is
  'The effects of a trace''s events and of its executions'' ends, and the notified targets.';

create or replace function why(trace text, most int default 100)
returns table (seq int, part text, at timestamptz, kind text, what text, from_ref text, to_ref text, trace_id text,
               execution_id uuid, detail jsonb)
language plpgsql stable security definer set search_path from current
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set plan_cache_mode = force_generic_plan
set jit = off as $$
#variable_conflict use_column
declare
  given constant text := btrim(coalesce(trace, ''));
  -- The ids under which the trace may be stored. A ULID alone may belong to any surface.
  forms constant text[] := case
    when given ~* '^(hb|op|ch|wh|fl|ev)_[0-9a-z]{26}$' then array[lower(left(given, 3)) || upper(substr(given, 4))]
    when given ~* '^[0-9a-z]{26}$'
      then array(select s || '_' || upper(given) from unnest('{hb,op,ch,wh,fl,ev}'::text[]) s)
    when given ~* '^[0-9a-f]{32}$'
      then array(select lanekeeper.agent_trace_id(s, decode(given, 'hex')) from unnest('{hb,op,ch,wh,fl,ev}'::text[]) s)
    else array[given] end;
  most_ constant int := greatest(least(coalesce(most, 100), 1000), 1);
  scan constant int := 1001;
  mine text; runs uuid[]; executions bigint; x record;
begin
  mine := coalesce((select e.trace_id from agent_executions e where e.trace_id = any (forms) limit 1),
                   (select a.trace_id from agent_activity a where a.trace_id = any (forms) limit 1),
                   (select substr(l.cause, 7)
                      from agent_links l
                     where l.cause = any (select 'trace ' || f from unnest(forms) f)
                     limit 1));
  if mine is null then return; end if;
  runs := array(select e.id from agent_executions e where e.trace_id = mine order by e.id limit scan);
  executions := case when cardinality(runs) < scan then cardinality(runs)
                     else (select count(*)
                             from (select from agent_executions e where e.trace_id = mine limit 100000) t) end;
  select e.flow, e.status, e.surface, e.completed_at, coalesce(e.created_at, (
         select a.created_at from agent_activity a where a.trace_id = mine order by a.created_at limit 1)) as created_at
    into x from (select) one left join agent_executions e on e.id = runs[1];
  return query
    with found as (
      select 0 as rank, 'trace' as part, null::timestamptz as place_at, '' as place, 0::bigint as n, x.created_at as at,
             'trace' as kind,
             case when x.flow is null then 'actions without an execution'
                  else format('%s %s%s%s', x.flow, case when x.completed_at is null then 'is ' else '' end || x.status,
                              coalesce(' after ' || lanekeeper.agent_words(x.created_at, x.completed_at), ''),
                              case when executions = 100000 then '; 100,000 or more executions'
                                   when executions > 1
                                     then format('; %s executions', to_char(executions, 'FM999,990')) end) end as what,
             '' as from_ref, 'trace ' || mine as to_ref, mine as trace_id, runs[1] as execution_id,
             jsonb_strip_nulls(jsonb_build_object('surface', x.surface, 'flow', x.flow, 'status', x.status,
                                                  'executions', executions, 'completed_at', x.completed_at)) as detail
      union all
      select 1, 'because', null, '', b.n, b.at, b.kind, b.what, b.from_ref, b.to_ref, b.trace_id, b.execution_id,
             b.detail
        from lanekeeper.agent_why_because(mine, runs, most_ + 1)
               with ordinality b (at, kind, what, from_ref, to_ref, trace_id, execution_id, detail, n)
      union all
      select v.rank, v.part, v.place_at, v.place, v.n, v.at, v.kind, v.what, v.from_ref, v.to_ref, v.trace_id,
             v.execution_id, v.detail
        from lanekeeper.agent_why_of_runs v where v.run = any (runs)
      union all
      select case l.part when 'spend' then 7 when 'led to' then 6 else 5 end, l.part, (l.reason).at,
             case l.part when 'led to' then (l.reason).kind else '' end, 0, (l.reason).*
        from lanekeeper.agent_why_log(mine, most_ + 1, 10000) l
      union all
      select 6, 'led to', e.at, e.kind, 0, e.* from lanekeeper.agent_why_events(mine, runs, most_ + 1) e),
    placed as (
      select t.*, row_number() over (partition by t.rank order by t.place_at, t.place, t.n, t.to_ref, t.kind) as nth,
             count(*) filter (where t.kind = 'ran') over (partition by t.rank) as ran
        from found t)
    select row_number() over (order by p.rank, p.nth)::int, p.part, case when isfinite(p.at) then p.at end,
           case when p.nth <= most_ then p.kind else 'more' end,
           case when p.nth <= most_ then coalesce(left(p.what, 1000), '')
                when p.part = 'did'
                  then format('… and %s more executions',
                              to_char(executions + least(p.ran, most_ + 1) - most_, 'FM999,999,990'))
                else '… and more than ' || to_char(most_, 'FM999,990') end,
           case when p.nth <= most_ then coalesce(left(p.from_ref, 300), '') else '' end,
           case when p.nth <= most_ then coalesce(left(p.to_ref, 300), '') else '' end, coalesce(p.trace_id, mine),
           p.execution_id,
           case when p.nth <= most_ then coalesce(p.detail, '{}') else '{}' end
      from placed p where p.nth <= most_ + 1 order by p.rank, p.nth;
end $$;
comment on function why is
  'The causes and effects of a trace, from top to bottom. The parts: because (its causes, the first one first), did '
  '(its executions), waits (with the causes of their ends), lanes, trouble (lost workers, refused writes, calls with '
  'unknown effect), led to (effects elsewhere), spend. trace is an id in any form. from_ref caused to_ref; trace_id '
  'and execution_id name the other end. most (1 to 1,000) bounds the rows of each part; a row of kind more stands for '
  'the rest. No rows: unknown trace.';
