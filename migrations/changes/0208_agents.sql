-- The code of agents, skills, automations, webhooks and budgets that nothing calls any more, or that has another name.
-- The code that follows makes the triggers again that go with it.
drop function if exists
  lanekeeper.reserve_agent_budget(uuid, bigint, text, text[], bigint[], numeric[], bigint, numeric, numeric, bigint, bigint, bigint),
  lanekeeper.settle_agent_budget(uuid, text, bigint, numeric, bigint, numeric), lanekeeper.settle_agent_budgets(uuid),
  lanekeeper.write_off_agent_budget(uuid, text), lanekeeper.agent_webhook_wanted(text), lanekeeper.close_agent_webhook(agent_executions),
  lanekeeper.emit_agent_approval(), lanekeeper.emit_agent_skill(), lanekeeper.emit_agent_objective(), lanekeeper.emit_agent_webhook_dead(),
  lanekeeper.void_agent_approvals(uuid), lanekeeper.agent_approvals_fixed(), lanekeeper.agent_skills_changed(),
  lanekeeper.close_agent_approvals(text, int, text), lanekeeper.agent_skill_streak(text, timestamptz, timestamptz, int),
  lanekeeper.agent_revise_state(), lanekeeper.agent_memory_begin(), lanekeeper.agent_memory_began(), lanekeeper.agent_memory_revise(),
  lanekeeper.agent_memory_end(), lanekeeper.agent_memory_owned_revision(text, text, text, int), lanekeeper.put_off_agent_objective(uuid),
  lanekeeper.agent_objectives_edited(), lanekeeper.agent_objective_progressed(), lanekeeper.agent_vector_version(),
  lanekeeper.agent_from_automation(uuid), lanekeeper.pause_agent_automation()
  cascade;
