-- Drops functions of lanes that the code no longer has, or has with another signature. No release had them.
drop function if exists
  lanekeeper.acquire_many_agent_locks(text[], text[], int[]), lanekeeper.agent_lane_freed(text), lanekeeper.agent_lane_open(text),
  lanekeeper.agent_lends(uuid, uuid, text), lanekeeper.agent_lock_blockers(xid), lanekeeper.agent_lock_fits(text, text),
  lanekeeper.agent_lock_head(text, timestamptz), lanekeeper.agent_lock_parks(text), lanekeeper.agent_lock_wanted(text),
  lanekeeper.ask_agent_lock(text, text, int), lanekeeper.borrow_agent_lock(text, uuid, bigint, int),
  lanekeeper.expire_agent_locks(text, int, interval), lanekeeper.fence_agent_lock(text, bigint),
  lanekeeper.free_agent_lock(text, text, bigint), lanekeeper.free_agent_locks(uuid, boolean),
  lanekeeper.free_many_agent_locks(text[], text[], bigint[]), lanekeeper.hand_agent_lock(text, uuid, bigint, boolean, int),
  lanekeeper.park_agent_locks(uuid, boolean), lanekeeper.pass_agent_lock(text),
  lanekeeper.queue_for_agent_lock(text, text, int, int, boolean), lanekeeper.quit_agent_lock_queue(text, text),
  lanekeeper.recall_agent_loans(uuid), lanekeeper.release_agent_lock(text, text, bigint), lanekeeper.release_agent_locks(uuid),
  lanekeeper.reown_agent_locks(uuid, text), lanekeeper.return_agent_lock(text), lanekeeper.sweep_agent_locks(interval),
  lanekeeper.take_agent_lock(text, text, int);
do $$
declare
  x record;
begin
  for x in
    select p.oid::regprocedure as called from pg_proc p
     where p.oid = to_regprocedure('lanekeeper.acquire_agent_lock(text, text, int)') and p.proretset
        or p.oid = to_regprocedure('lanekeeper.agent_lock_check(text, text, int)') and p.prorettype = 'void'::regtype
        or p.oid = to_regprocedure('lanekeeper.lend_agent_lock(text, uuid, bigint, int)') and not p.proretset
  loop
    execute format('drop function %s', x.called);
  end loop;
end $$;
