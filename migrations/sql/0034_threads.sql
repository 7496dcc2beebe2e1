-- Who has fenced a write by the token of a thread's lane, and then speaks in the thread, met who takes the thread in a deadlock: one had
-- the row of the lane and wanted the advisory lock, the other had that and waited for the row. Now nobody waits for the row under the
-- advisory lock, unless the row came in that moment.

create or replace function lock_agent_thread(p_thread text, p_wait boolean default true) returns boolean
language plpgsql volatile as $$
declare
  lane_ text := agent_thread_lane(p_thread);
  key_ bigint := hashtextextended('lane ' || agent_thread_lane(p_thread), 0);
begin
  -- The advisory lock is for a lane that has no row yet; acquire_agent_lock takes the same for its first hold.
  if p_wait then
    perform 1 from agent_locks l where l.lane = lane_ for update;
    if not found then
      perform pg_advisory_xact_lock(key_);
      perform 1 from agent_locks l where l.lane = lane_ for update;    -- it may have come meanwhile
    end if;
    perform 1 from agent_threads t where t.id = p_thread for no key update;
    if not found then
      raise exception 'there is no thread %', quote_literal(p_thread) using errcode = 'P0002';
    end if;
    return true;
  end if;
  perform 1 from agent_locks l where l.lane = lane_ for update skip locked;
  if not found then
    perform 1 from agent_locks l where l.lane = lane_;
    if found or not pg_try_advisory_xact_lock(key_) then
      return false;
    end if;
    perform 1 from agent_locks l where l.lane = lane_ for update skip locked;
    if not found and exists (select from agent_locks l where l.lane = lane_) then
      return false;
    end if;
  end if;
  perform 1 from agent_threads t where t.id = p_thread for no key update skip locked;
  return found;
end $$;
