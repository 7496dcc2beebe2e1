-- Access: the permissions of other programs.
--
-- Functions and views beside the tables are the contract for programs in any language. The role agent_client may call
-- and read them, and nothing else: no table, no function of the schema lanekeeper. Functions for admins, and the views
-- whose descriptions say so, are in the contract, but not granted to the role. `agent migrate` creates the role if it
-- may, and applies this file after every change.

-- Code

do $$
declare
  client constant boolean := exists (select from pg_roles r where r.rolname = 'agent_client');
  here constant regnamespace := to_regnamespace(quote_ident(current_schema()));
  acts constant text[] := array[
    'try_acquire_agent_lock', 'acquire_agent_lock', 'await_agent_lock', 'leave_agent_lock_queue', 'renew_agent_lock',
    'release_agent_lock', 'is_agent_lock_held', 'fence_agent_lock',
    'deliver_agent_event', 'raise_agent_event', 'cancel_agent_execution', 'fence_agent_execution',
    'start_agent_execution', 'lock_agent_execution', 'read_agent_execution', 'beat_agent_locks',
    'checkpoint_agent_execution', 'unlock_agent_execution', 'agent_lock_claim', 'record_stale_agent_write', 'why'];
  acts_of_admins constant text[] := array[
    'break_agent_lock', 'pause_agent', 'resume_agent', 'decide_agent_approval',
    'set_agent_limits', 'set_agent_retention', 'void_agent_leases'];
  views constant text[] := array[
    'agent_locks_live', 'agent_thread_locks', 'agent_executions_by_status', 'agent_executions_waiting',
    'agent_executions_stuck', 'agent_spend', 'agent_spend_by_purpose', 'agent_budget_today',
    'agent_skill_health', 'agent_slowest_skills', 'agent_failing_skills', 'agent_objective_progress', 'agent_audit'];
  x record;
begin
  for x in select p.oid::regprocedure as called, p.pronamespace = here and p.proname = any (acts) as act from pg_proc p
            where p.pronamespace = 'lanekeeper'::regnamespace
               or p.pronamespace = here and p.proname = any (acts || acts_of_admins) loop
    execute format('revoke execute on function %s from public', x.called);
    if x.act and client then
      execute format('grant execute on function %s to agent_client', x.called);
    end if;
  end loop;
  if not client then
    return;
  end if;
  execute format('grant usage on schema %s to agent_client', here);
  for x in
    select c.oid::regclass as name
      from pg_class c
     where c.relnamespace = here and c.relkind = 'v' and c.relname = any (views) loop
    execute format('grant select on %s to agent_client', x.name);
  end loop;
  -- A view calls its functions with the rights of its reader. The role cannot call them by name: it may not use their
  -- schema.
  for x in
    with recursive reads as (
      select c.oid from pg_class c where c.relnamespace = here and c.relkind = 'v' and c.relname = any (views)
      union
      select c.oid from reads v join pg_rewrite r on r.ev_class = v.oid
        join pg_depend d
          on d.classid = 'pg_rewrite'::regclass and d.objid = r.oid and d.refclassid = 'pg_class'::regclass
        join pg_class c on c.oid = d.refobjid and c.relkind = 'v')
    select distinct d.refobjid::regprocedure as called from reads v join pg_rewrite r on r.ev_class = v.oid
      join pg_depend d on d.classid = 'pg_rewrite'::regclass and d.objid = r.oid and d.refclassid = 'pg_proc'::regclass
      join pg_proc p on p.oid = d.refobjid and p.pronamespace = 'lanekeeper'::regnamespace
  loop
    execute format('grant execute on function %s to agent_client', x.called);
  end loop;
end $$;
