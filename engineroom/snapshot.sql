-- Texts that change with the work of the agent, and the time of the newest failure; see the type changes. Each part reads a bounded number
-- of rows by an index, because the query runs five times a second while a page is open.
select coalesce((select a.id::text from agent_activity a order by a.id desc limit 1), ''),
       (select concat_ws(' ', count(*), max(o.started_at)) from agent_activity_open o),
       concat_ws(' ', (select e.id from agent_executions e order by e.id desc limit 1),
         (select concat_ws(' ', count(*), max(h.updated_at))
            from (select e.updated_at from agent_executions e where e.claimed_by is not null limit 1000) h)),
       concat_ws(' ',
         (select concat_ws(' ', count(*), max(w.id::text collate "C"))
            from (select p.id from agent_approvals p
                   where p.status = 'pending' and p.expires_at > clock_timestamp()
                   order by p.status, p.expires_at desc limit 100) w),
         (select concat_ws(' ', count(*), max(w.id::text collate "C"))
            from (select r.id from agent_requests r where r.status = 'pending' order by r.id desc limit 100) w),
         (select p.paused_at from agent_pauses p where p.resumed_at is null)),
       greatest('epoch',
         (select max(coalesce(f.finished_at, f.created_at))
            from (select a.status, a.finished_at, a.created_at from agent_activity a order by a.id desc limit 50) f
           where f.status = 'error'),
         (select max(f.at)
            from ((select e.updated_at as at from agent_executions e
                    where e.status = 'failed' order by e.id desc limit 20)
                  union all
                  (select e.updated_at from agent_executions e
                    where e.status = 'timeout' order by e.id desc limit 20)) f))
