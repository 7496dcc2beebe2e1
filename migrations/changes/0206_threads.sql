-- The code of threads that nothing calls any more, or that is there under another name.
drop function if exists
  lanekeeper.agent_speaks_for(uuid, uuid),
  lanekeeper.agent_thread_idle(text),
  lanekeeper.agent_thread_is_of(text, text, text, text),
  lanekeeper.agent_thread_lane(text),
  lanekeeper.agent_thread_listener(text, text[]),
  lanekeeper.open_agent_thread(text, text, text, text, text, text, text, text, int),
  lanekeeper.open_agent_thread_for_flow(text, text, uuid, text),
  lanekeeper.settle_agent_message(uuid, int, text, text, interval),
  lanekeeper.take_agent_thread(text, agent_executions, boolean, uuid);
