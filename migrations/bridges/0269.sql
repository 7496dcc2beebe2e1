-- Brings a database of schema version 269 to the baseline, and keeps its rows.

-- Processes of version 269 know the columns by other names. Void their claims, as when a process is lost, so the
-- database refuses their writes and their executions run again. Lock the tables first, so no transaction waits for a
-- row meanwhile.
lock table agent_workers, agent_executions, agent_locks in access exclusive mode;
update agent_workers set expires_at = 'epoch' where kind = 'process';
update agent_locks l
   set fencing_token = greatest(l.fencing_token + 1, (extract(epoch from clock_timestamp()) * 1000000)::bigint),
       expires_at = least(l.expires_at, clock_timestamp())
 where not l.parked and l.locked_by <> ''
   and l.execution_id in (select x.id from agent_executions x where x.status = 'running' and not x.outside);
update agent_executions x set claim = x.claim + 1000000 where x.status = 'running' and not x.outside;

-- Rename columns and tables.
alter table agent_executions rename column outside to is_external;
alter index agent_executions_outside rename to agent_executions_external;
alter table agent_lock_waiters rename column handed_seconds to handover_ttl_seconds;
alter table agent_automations rename column armed to signal_armed;
alter table agent_activity_counted rename column looked to checked_upto;
alter table agent_retention rename column least to min_keep;
alter table agent_retention rename constraint agent_retention_least_check to agent_retention_min_keep_check;
alter table agent_untold_ends rename to agent_unpublished_completions;
alter index agent_untold_ends_pkey rename to agent_unpublished_completions_pkey;
alter table agent_executions_counted rename column looked to checked_upto;
alter table agent_workers rename column flows to go_flows;   -- so no process of version 269 can register a lease again

alter domain agent_surface validate constraint agent_surface_check;
alter table agent_links validate constraint agent_links_kind_check;

-- Drop unused tables and functions.
drop table agent_logouts;
do $$
declare
  was constant text[] := '{agent_approval_decider, agent_memory_nearest, agent_memory_revision,
    agent_thread_busy, agent_usd, agent_wait_event, agent_wait_lock, cancel_agent_execution,
    clean_agent_threads, clear_agent_lock, deliver_agent_completion, ensure_agent_activity_partitions,
    fence_agent_execution, flush_agent_threads, is_agent_evidence, join_agent_thread, let_into_agent_thread,
    lock_agent_events, mark_agent_trial, note_agent_hold, return_agent_threads}';
  f regprocedure;
begin
  for f in select p.oid from pg_proc p where p.pronamespace = 'lanekeeper'::regnamespace and p.proname = any (was) loop
    execute format('drop function %s', f);
  end loop;
end $$;
