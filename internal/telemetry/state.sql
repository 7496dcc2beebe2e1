-- The state of the database, read by indexes. Large counts stop at a bound.
select (select count(*) from (select from agent_executions x where x.status = 'pending' limit @most) n) as pending,
       (select count(*) from (select from agent_executions x where x.status = 'running' limit @most) n) as running,
       (select count(*) from (select from agent_executions x where x.status = 'waiting' limit @most) n) as waiting,
       coalesce((select extract(epoch from clock_timestamp() - x.created_at) from agent_executions x
                  where x.status = 'pending' order by x.id limit 1), 0)::float8 as oldest,
       (select count(*) from (select from agent_automations a
                              cross join lateral (select from agent_automation_runs r
                                                   where r.automation_id = a.id and r.status in ('due', 'error')
                                                   and coalesce(r.retry_at, r.created_at) <= statement_timestamp()
                                                   order by coalesce(r.retry_at, r.created_at), r.id limit @most_due) r
                               where a.enabled limit @most_due) n) as runs_due,
       coalesce((select max(extract(epoch from clock_timestamp() - r.at)) from agent_automations a
                  cross join lateral (select coalesce(r.retry_at, r.created_at) as at from agent_automation_runs r
                                       where r.automation_id = a.id and r.status in ('due', 'error')
                                         and coalesce(r.retry_at, r.created_at) <= statement_timestamp()
                                       order by coalesce(r.retry_at, r.created_at), r.id limit 1) r
                  where a.enabled), 0)::float8 as oldest_due,
       (select count(*) from (select from agent_approvals a
                               where a.status = 'pending' and a.expires_at > clock_timestamp() limit @most) n) as approvals,
       coalesce((select extract(epoch from x.completed_at) from agent_executions x
                  where x.surface = 'heartbeat' and x.parent_id is null and x.claimed_by is null and x.status = 'completed'
                    and not exists (select from agent_activity a
                                     where a.execution_id = x.id and a.skill_name = 'heartbeat' and a.status = 'skipped')
                  order by x.id desc limit 1), 0)::float8 as beat,
       exists (select from agent_pauses p where p.resumed_at is null) as paused,
       array(select split_part(l.lane, ':', 1) from agent_locks l
              where l.locked_by <> '' and l.expires_at > clock_timestamp() limit @most) as lanes
