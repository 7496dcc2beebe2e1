select n.kind, n.name, n.target, n.note, n.at, n.total from (
-- The items that need a person: the newest of each kind (at most @limit), and their number, counted up to @count_limit.
-- Each branch reads an index that has only such rows. There are few skills.
(select 'approval' as kind, left(x.skill_name, 200) as name, x.id::text as target, '' as note, x.created_at as at,
       count(*) over () as total
   from (select a.id, a.skill_name, a.created_at from agent_approvals a
          where a.status = 'pending' and a.expires_at > clock_timestamp()
          order by a.status, a.expires_at desc limit @count_limit) x
  order by x.id desc limit @limit)
union all
(select 'request', coalesce(nullif(left(x.title, 200), ''), x.kind), x.execution_id::text, x.kind, x.created_at,
       count(*) over ()
   from (select r.id, case when @hide_texts and r.thread_id is not null then '' else r.title end as title, r.kind,
                r.execution_id, r.created_at
           from agent_requests r
          where r.status = 'pending' order by r.id desc limit @count_limit) x
  order by x.id desc limit @limit)
union all
(select 'objective', left(x.name, 200), x.name, left(x.goal, 200), x.created_at, count(*) over ()
   from (select o.id, o.name, o.goal, o.created_at from agent_objectives o
          where o.status = 'proposed' order by o.id desc limit @count_limit) x
  order by x.id desc limit @limit)
union all
(select 'automation', left(x.name, 200), x.name, left(x.description, 200), x.created_at, count(*) over ()
   from (select m.id, m.name, m.description, m.created_at from agent_automations m
          where m.disabled_by = 'proposal' order by m.id desc limit @count_limit) x
  order by x.id desc limit @limit)
union all
(select 'conflict', left(x.key, 200), x.id::text,
       'kept for ' || left(x.category, 100) || ' by ' || left(x.trace_id, 100), x.created_at, count(*) over ()
   from (select c.id, c.key, c.category, c.trace_id, c.created_at from agent_memory_conflicts c
          where c.status = 'open' order by c.id desc limit @count_limit) x
  order by x.id desc limit @limit)
union all
(select 'skill', x.name, x.name,
        'by ' || left(x.disabled_by, 100) || ': ' || left(x.disabled_reason, 200),
        coalesce(x.disabled_at, x.updated_at), count(*) over ()
   from (select s.* from agent_skills s where not s.enabled and s.trial_at is null
          order by s.disabled_at desc nulls last limit @count_limit) x
  order by x.disabled_at desc nulls last limit @limit)
union all
(select 'stuck', left(x.flow, 100), x.id::text, 'waits for ' || coalesce(x.waiting_for, 'nothing'), x.waiting_until,
       count(*) over ()
   from (select e.id, e.flow, e.waiting_for, e.waiting_until from agent_executions e
          where e.status = 'waiting' and e.waiting_until < statement_timestamp() - interval '1 minute'
            and e.updated_at < clock_timestamp() - interval '1 hour' order by e.waiting_until limit @count_limit) x
  order by x.waiting_until limit @limit)
union all
(select 'stall', left(x.trace_id, 100), x.trace_id, coalesce(left(x.error_message, 200), ''), x.created_at,
       count(*) over ()
   from (select y.id, y.trace_id, y.error_message, y.created_at from agent_activity y
          where y.skill_name = 'reasoning' and y.error_class = 'stall' and y.surface <> 'eval'
            and y.id >= lanekeeper.agent_uuid7_floor(statement_timestamp() - interval '1 day')
          order by y.id desc limit @count_limit) x
  order by x.id desc limit @limit)
union all
(select 'run', left(m.name, 200), m.name,
        case when x.n > 1 then x.n || ' times, the last: ' else '' end || coalesce(left(x.message, 200), ''), x.at, x.total
   from (select y.automation_id, count(*) as n, (array_agg(y.error_message order by y.id desc))[1] as message,
                max(coalesce(y.finished_at, y.created_at)) as at, (sum(count(*)) over ())::bigint as total
           from (select r.id, r.automation_id, r.error_message, r.finished_at, r.created_at from agent_automation_runs r
                  where r.status = 'dead' order by r.id desc limit @count_limit) y
          group by y.automation_id order by max(y.id::text collate "C") desc limit @limit) x
   join agent_automations m on m.id = x.automation_id)
union all
(select 'delivery', left(x.endpoint, 200), x.id::text, coalesce(left(x.error_message, 200), ''),
       coalesce(x.finished_at, x.received_at), count(*) over ()
   from (select d.id, d.endpoint, d.error_message, d.finished_at, d.received_at from agent_webhook_deliveries d
          where d.status = 'dead' order by d.id desc limit @count_limit) x
  order by x.id desc limit @limit)
union all
(select 'outgoing', t.name || ': ' || left(x.event, 100), x.id::text, left(x.last_error, 200),
       coalesce(x.finished_at, x.created_at), x.total
   from (select y.*, count(*) over () as total
           from (select b.id, b.target_id, b.event, b.last_error, b.finished_at, b.created_at
                   from agent_webhook_outbox b
                  where b.status = 'dead' limit @count_limit) y
          order by y.id desc limit @limit) x
   join agent_webhook_targets t on t.id = x.target_id)
union all
(select 'message', left(x.thread_id, 200), x.thread_id, coalesce(left(x.error_message, 200), ''), x.created_at,
       count(*) over ()
   from (select g.id, g.thread_id, g.error_message, g.created_at from agent_messages g
          where g.status = 'failed' order by g.id desc limit @count_limit) x
  order by x.id desc limit @limit)
) n
