-- One event for one execution that waits takes fewer statements. hand_over_agent_event does what hand_agent_event does, under the same
-- locks in the same order, and leaves to it whatever is not plain: the kinds that keep more than the event, and several who wait for one.
-- A statement costs more to begin than what it does here. Hence there are three: lock who waits; write the event, and look whether the
-- execution may be claimed; write the outcome and the claim. The record is read only where there is one from before the wait.

create function hand_over_agent_event(p_event text, p_key text, p_data jsonb, p_id text, p_raiser text, p_worker uuid, p_background int,
                                      p_interactive int, p_skip text[])
returns table (n int, event_id uuid, execution_id uuid, queue text, execution agent_executions, held boolean, steps text[], claims bigint[],
               prints text[], failed boolean[], outputs jsonb[], times timestamptz[])
language plpgsql volatile set enable_seqscan = off set plan_cache_mode = force_generic_plan set jit = off as $$
#variable_conflict use_column
declare
  -- Nearly every event is one; who checks them all says what is wrong with another.
  kind constant text := case when p_event = 'EVENT_COMPLETED' and p_key <> '' and (p_id like 'completed %') is not true then 'event'
                             else check_agent_delivery(p_event, p_key, p_data, p_id) end;
  steady boolean;                   -- nobody pauses the agent meanwhile
  id_ uuid;                         -- who waits, and how
  queue_ text;
  flow_ text;
  surface_ text;
  outside_ boolean;
  claim_ bigint;
  step_ text;
  since timestamptz;
  several boolean;
  mine boolean;
  lanes boolean;
  recorded boolean;                 -- before the wait
  ended timestamptz;
  void text;                        -- of functions that begin no statement when they are called like this
begin
  if p_raiser <> '' then
    void := set_config('lanekeeper.raised_by', p_raiser, true);
  end if;
  if kind not in ('agent', 'document', 'signature', 'test') then
    -- The pause is looked at by another statement, which sees every one that had the lock before.
    steady := pg_try_advisory_xact_lock_shared(hashtextextended('agent pause', 0));
    void := pg_advisory_xact_lock(hashtextextended('wait ' || kind || ' ' || p_key, 0));
    -- Executions before the event, which is written once, with who takes it.
    select x.id, x.queue, x.flow, x.surface, x.outside, x.claim, coalesce(x.waiting_step, 'wait ' || x.wait_number), x.updated_at,
           exists (select from agent_executions o where o.waiting_for = kind and o.waiting_key = p_key and o.id <> x.id)
      into id_, queue_, flow_, surface_, outside_, claim_, step_, since, several
      from agent_executions x
     where x.waiting_for = kind and x.waiting_key = p_key and (x.status = 'waiting') is true
       and (kind <> 'response' or not coalesce(x.waiting_data ? 'queued_message', false))
     order by x.id for update;
  end if;
  if several or kind in ('agent', 'document', 'signature', 'test') then
    return query select * from hand_agent_event(p_event, p_key, p_data, p_id, p_worker, p_background, p_interactive, p_skip);
    if p_raiser <> '' then
      void := set_config('lanekeeper.raised_by', '', true);
    end if;
    return;
  end if;
  p_data := coalesce(p_data, '{}');
  -- Another statement than the one that locked, so that it sees what was written under the lock before.
  with v as (
    insert into agent_events as v (event, key, data, external_id, consumed_by) values (p_event, p_key, p_data, p_id, id_)
    on conflict (external_id) do nothing returning v.id)
  select v.id,
         p_worker is not null and not outside_ and case queue_ when 'background' then p_background else p_interactive end > 0
         and (surface_ in ('operate', 'chat') or steady and not exists (select from agent_pauses p where p.resumed_at is null))
         and exists (select from agent_workers k where k.id = p_worker and k.expires_at > clock_timestamp())
         -- Nearly always nothing is ready, and nothing is limited: then nobody is before it in the queue.
         and (flow_ <> all (p_skip) and not exists (select from agent_limits)
              and not exists (select from agent_executions x where x.claimed_by is null and x.status in ('pending', 'running')
                                                               and not x.outside and x.queue = queue_)
              or agent_next_in_line(queue_, flow_, surface_, p_skip)),
         exists (select from agent_locks l where l.execution_id = id_) or exists (select from agent_lock_loans k where k.lender = id_),
         exists (select from agent_checkpoints k where k.execution_id = id_)
    into event_id, mine, lanes, recorded from v;
  if p_raiser <> '' then
    void := set_config('lanekeeper.raised_by', '', true);
  end if;
  if event_id is null or id_ is null then
    if event_id is null then                                 -- it came before
      event_id := (select v.id from agent_events v where v.external_id = p_id);
    end if;
    n := 1;
    held := false;
    return next;
    return;
  end if;
  p_data := jsonb_build_object('event', p_event, 'event_id', event_id, 'data', p_data, 'timed_out', false);
  ended := clock_timestamp();
  if recorded then
    select array_agg(k.step), array_agg(k.claim), array_agg(k.fingerprint), array_agg(k.failed), array_agg(k.output), array_agg(k.created_at)
      into steps, claims, prints, failed, outputs, times
      from (select c.step, c.claim, c.fingerprint, c.failed, c.output, c.created_at from agent_checkpoints c
             where c.execution_id = id_
            union all select step_, claim_, '', false, p_data, ended
             where not exists (select from agent_checkpoints c where c.execution_id = id_ and c.step = step_)) k;
  end if;
  void := set_config('lanekeeper.fenced', 'yes', true);      -- its row is locked, and it waits
  void := set_config('lanekeeper.unpaused', case when mine then 'yes' else '' end, true);
  return query
  with c as (
    insert into agent_checkpoints (execution_id, step, claim, output, created_at, waited_for, waited_key, waited_since)
    values (id_, step_, claim_, p_data, ended, kind, p_key, since)
    on conflict (execution_id, step) do nothing)
  update agent_executions x
     set status = 'running', wake = x.wake + 1, attempt = 0, claimed_by = case when mine then p_worker end, claim = x.claim + mine::int
   where x.id = id_
  returning 1, event_id, x.id, x.queue, case when x.claimed_by = p_worker then x end,
            coalesce(x.claimed_by = p_worker and (
              lanes or x.claim > 2 * x.wait_number + 1 or exists (select from agent_activity_open o where o.execution_id = x.id)), false),
            coalesce(steps, array[step_]), coalesce(claims, array[claim_]), coalesce(prints, array['']), coalesce(failed, array[false]),
            coalesce(outputs, array[p_data]), coalesce(times, array[ended]);
  void := set_config('lanekeeper.fenced', '', true);
  void := set_config('lanekeeper.unpaused', '', true);
  if lanes then
    perform park_agent_locks(id_, false);
  end if;
end $$;
comment on function hand_over_agent_event is
  'hand_agent_event, with who raised the event (as why() has it, or empty), in fewer statements for one execution that waits.';
