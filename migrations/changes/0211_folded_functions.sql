-- Functions that were folded into their callers, or have other arguments now. The code that follows makes the triggers and
-- views again that go with them. Functions that moved to Go stay until the next release, because the one before calls them.
drop trigger if exists agent_activity_fence on agent_activity;
drop trigger if exists agent_activity_late on agent_activity;
drop trigger if exists agent_events_consumed on agent_events;
drop trigger if exists agent_objective_evidence_fixed on agent_objective_evidence;
drop trigger if exists agent_objective_steps_added on agent_objective_steps;
drop trigger if exists agent_objective_steps_changed on agent_objective_steps;
drop trigger if exists agent_objectives_edited on agent_objectives;
drop trigger if exists agent_workers_lanes on agent_workers;
drop function if exists
  lanekeeper.acquire_agent_thread(text, agent_executions, boolean, uuid), lanekeeper.agent_activity_fence(), lanekeeper.agent_activity_late(),
  lanekeeper.agent_cause(text), lanekeeper.agent_claimable(uuid[], uuid, int, int, text[]), lanekeeper.agent_event_id_class(),
  lanekeeper.agent_event_id_slot(text), lanekeeper.agent_events_consumed(), lanekeeper.agent_lock_holder(text),
  lanekeeper.agent_lock_token(bigint, timestamptz), lanekeeper.agent_name_fault(text), lanekeeper.agent_objective_evidence_check(),
  lanekeeper.agent_objective_steps_check(), lanekeeper.agent_patience(uuid), lanekeeper.agent_status_changed(),
  lanekeeper.agent_thread_had_flows(text), lanekeeper.agent_thread_own(text, uuid), lanekeeper.agent_trace_id(text), lanekeeper.agent_ulid(bytea),
  lanekeeper.agent_why_effects(text, uuid[], int), lanekeeper.close_agent_activity(uuid, text), lanekeeper.expire_agent_approvals(),
  lanekeeper.free_agent_worker_lanes(), lanekeeper.keep_agent_memory_revision(), lanekeeper.link_agent_wakes(uuid, uuid[]),
  lanekeeper.lock_agent_locks(uuid), lanekeeper.note_agent_claim(agent_executions, text), lanekeeper.place_agent_message(uuid),
  lanekeeper.recall_agent_thread(uuid, uuid), lanekeeper.refuse_agent_change(), lanekeeper.reset_agent_objective_backoff(), lanekeeper.resume_agent_execution(uuid, int, jsonb),
  lanekeeper.resume_agent_executions(uuid[], jsonb[], uuid[], uuid), lanekeeper.return_agent_lock(text, uuid),
  lanekeeper.withdraw_agent_messages(uuid)
  cascade;
