-- Who was handed a lane and looked at it before the notification came stood in its queue again when another waiter had the row in that
-- moment: the place outlived the work, and the lane was handed to nobody for ten seconds. Who has the lane needs no place.

create or replace function queue_for_agent_lock(p_lane text, p_locked_by text, p_ttl_seconds int, p_patience_seconds int, p_handed boolean)
returns agent_lock_answer language plpgsql volatile set enable_seqscan = off set jit = off as $$
declare
  got  agent_lock_answer;
  mark timestamptz;
begin
  if p_patience_seconds is null or p_patience_seconds <= 0 or p_patience_seconds > 2592000 then
    raise exception 'a place kept for % seconds in the queue of lane % is not valid: give 1 to 2592000 (30 days)',
      coalesce(p_patience_seconds::text, 'null'), coalesce(quote_literal(left(p_lane, 40)), 'null') using errcode = '22023';
  end if;
  got := ask_agent_lock(p_lane, p_locked_by, p_ttl_seconds);
  if not got.acquired then
    -- Stand in the queue, leave the mark that makes a release notify, and look once more: a release
    -- that committed before the mark is seen by this second try, one after it sees the mark.
    mark := clock_timestamp() + make_interval(secs => p_patience_seconds);
    insert into agent_lock_waiters as w (lane, owner, expires_at, handed_seconds)
    values (p_lane, p_locked_by, mark, case when p_handed then p_ttl_seconds else 0 end)
    on conflict (lane, owner) do update set expires_at = excluded.expires_at, handed_seconds = excluded.handed_seconds;
    perform 1 from agent_locks l where l.lane = p_lane for no key update skip locked;
    if found then
      update agent_locks l set waited_until = mark where l.lane = p_lane and l.waited_until < mark;
    end if;
    got := ask_agent_lock(p_lane, p_locked_by, p_ttl_seconds);
  end if;
  if got.acquired then
    delete from agent_lock_waiters w where w.lane = p_lane and w.owner = p_locked_by;
  elsif got.locked_by is null then                                                    -- being changed right now; it may be ours
    delete from agent_lock_waiters w
     where w.lane = p_lane and w.owner = p_locked_by and exists (
       select from agent_locks l where l.lane = p_lane and l.locked_by = p_locked_by and l.expires_at > clock_timestamp());
  end if;
  return got;
end $$;

-- A row of a lane that somebody changes in the moment of the sweep was passed over, and the worker was gone: who waits for the lane of a dead
-- process looks at it each second, and so could keep it from being freed until its lease ended. Now it is waited for, not for long.

create or replace function free_agent_worker_lanes() returns trigger
language plpgsql volatile set enable_seqscan = off set jit = off set lock_timeout = '500ms' as $$
declare
  h record;
begin
  for h in
    select l.lane, l.locked_by, l.fencing_token from agent_locks l
     where l.locked_by <> '' and right(l.locked_by, 37) = '@' || old.id and l.execution_id is null
     order by l.lane
  loop
    begin
      perform release_agent_lock(h.lane, h.locked_by, h.fencing_token);
    exception when lock_not_available then
      null;                                                 -- by a write under its token, or an open transaction of somebody else
    end;
  end loop;
  return null;
end $$;
