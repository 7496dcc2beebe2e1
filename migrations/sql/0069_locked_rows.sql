-- What a client has locked in an open transaction delays what concerns it, and nothing else.
--
-- The sweep, the pruning and the flush of queued messages walk through rows of many owners in one transaction. They
-- waited for a lane, or for another row that follows from an end, for as long as a client had it locked: no timer fired
-- meanwhile, in any process. Now they pass over what is locked and come back to it. Lanes are tried without waiting.
-- Whatever else is locked is waited for during 50 ms, and then rolled back by itself.

create function agent_with_free_lanes(p_ids uuid[]) returns uuid[]
language plpgsql volatile set enable_seqscan = off set jit = off as $$
declare
  wanted text[] := array(select l.lane from agent_locks l where l.execution_id = any (p_ids)
                         union select n.lane from agent_lock_loans n where n.lender = any (p_ids));
  got text[];
begin
  if wanted = '{}' then
    return p_ids;
  end if;
  got := array(select l.lane from agent_locks l where l.lane = any (wanted) order by l.lane for update skip locked);
  if cardinality(got) = cardinality(wanted) then
    return p_ids;
  end if;
  return array(
    select t.id from unnest(p_ids) t (id)
     where not exists (select from agent_locks l where l.execution_id = t.id and l.lane <> all (got))
       and not exists (select from agent_lock_loans n where n.lender = t.id and n.lane <> all (got)));
end $$;
comment on function agent_with_free_lanes is
  'Those of some executions none of whose lanes another transaction has locked. Their lanes are locked from then on. Nothing is waited for.';

-- As before, and an end that meets a lock is left to the next sweep.
create or replace function lose_agent_claims(p_worker uuid) returns int
language plpgsql volatile set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set jit = off set lock_timeout = '50ms' as $$
declare
  lost uuid[];
  ending uuid[];
  left_ uuid[] := '{}';             -- whose end meets a lock
  free uuid[];
  held int := 0;                    -- how often a lock was waited for
  e uuid;
begin
  -- One that is written to at this moment comes next time: a sweep that waited for it would hold up all others.
  lost := array(select x.id from agent_executions x where x.claimed_by = p_worker order by x.id for update skip locked);
  if lost = '{}' then
    return 0;
  end if;
  ending := array(
    select x.id from agent_executions x
     where x.id = any (lost)
       and (x.on_lost = 'fail' or x.max_attempts <= case when exists (
              select from agent_checkpoints c where c.execution_id = x.id and c.claim = x.claim) then 1 else x.attempt + 1 end)
     order by x.id);
  free := agent_with_free_lanes(ending);
  foreach e in array ending loop
    if e <> all (free) or held >= 10 then
      left_ := left_ || e;
      continue;
    end if;
    begin
      perform lose_agent_claim(e, 'the worker''s lease expired');
    exception when lock_not_available then
      held := held + 1;
      left_ := left_ || e;
    end;
  end loop;
  lost := array(select t.id from unnest(lost) t (id) where t.id <> all (left_));    -- the others come next time
  insert into agent_claims_lost (execution_id, claim, worker, worker_name, how)
  select x.id, x.claim, p_worker, coalesce((select coalesce(nullif(w.owner, ''), w.name) from agent_workers w where w.id = p_worker), ''), 'lost'
    from agent_executions x where x.id = any (lost) and x.claimed_by = p_worker
      on conflict do nothing;
  update agent_executions x
     set claimed_by = null, claim = x.claim + 1, wake = x.wake + 1, updated_at = clock_timestamp(),
         hinted_at = case when x.outside then timestamptz 'infinity' else 'epoch' end,
         attempt = case when exists (select from agent_checkpoints c where c.execution_id = x.id and c.claim = x.claim) then 1 else x.attempt + 1 end
   where x.id = any (lost) and x.claimed_by = p_worker;
  return cardinality(lost);
end $$;

-- As before, and what meets a lock is left to the next sweep.
create or replace function sweep_agent_executions(p_limit int default 500)
returns table (id uuid, wake int, queue text, priority smallint, trace_id text, reason text)
language plpgsql volatile set lock_timeout = '50ms' as $$
#variable_conflict use_column
declare
  w record;
  e record;
  now_ timestamptz := clock_timestamp();                    -- a bound that an index can be searched with
  due uuid[];
  outcomes jsonb[];
  held int := 0;                    -- how often a lock was waited for
  most constant int := 10;
begin
  if not pg_try_advisory_xact_lock(hashtextextended('sweep executions', 0)) then
    return;
  end if;
  -- Workers before executions, in every path. The lock makes sure that the worker is not renewed now.
  for w in
    select x.id from agent_workers x where x.expires_at < clock_timestamp() order by x.expires_at
     for update skip locked
  loop
    perform lose_agent_claims(w.id);
    delete from agent_workers x where x.id = w.id and not exists (select from agent_executions y where y.claimed_by = w.id);
  end loop;
  -- A claim by a worker that is not registered at all is lost as well.
  for w in
    select distinct x.claimed_by as id from agent_executions x
     where x.claimed_by is not null and not exists (select 1 from agent_workers k where k.id = x.claimed_by)
  loop
    perform lose_agent_claims(w.id);
  end loop;
  -- A worker that beats but gets nowhere.
  for e in
    select x.id, x.on_lost, x.progress_seconds from agent_executions x
     where x.claimed_by is not null and x.status = 'running' and x.progress_seconds > 0
       and x.updated_at < clock_timestamp() - make_interval(secs => x.progress_seconds)
       and not exists (select 1 from agent_checkpoints c where c.execution_id = x.id
                        and c.created_at > clock_timestamp() - make_interval(secs => x.progress_seconds))
     order by x.id for update skip locked
  loop
    continue when exists (select 1 from agent_checkpoints c where c.execution_id = e.id       -- before it was locked
                           and c.created_at > clock_timestamp() - make_interval(secs => e.progress_seconds));
    exit when held >= most;
    continue when agent_with_free_lanes(array[e.id]) = '{}';
    begin
      if e.on_lost = 'hand_on' then
        perform lose_agent_claim(e.id, '');
      else
        update agent_executions x set status = 'failed', claim = x.claim + 1,
               error_message = format('no progress within progress_seconds (%s)', e.progress_seconds) where x.id = e.id;
      end if;
    exception when lock_not_available then
      held := held + 1;
    end;
  end loop;
  -- Ends that nobody has told the parent of: before timers, so that a child that has ended does not count as timed out.
  for e in
    select t.child, array(select x.id from agent_executions x
                           where x.waiting_for = 'agent' and x.waiting_key = t.child::text and (x.status = 'waiting') is true) as parents
      from (select u.execution_id as child from agent_untold_ends u order by u.execution_id limit p_limit) t order by random()
  loop
    exit when held >= most;
    continue when cardinality(agent_with_free_lanes(e.parents)) < cardinality(e.parents);
    begin
      perform tell_agent_parents(e.child, false);
    exception when lock_not_available then
      held := held + 1;
    end;
  end loop;
  -- Timers. Who waits for a child without having said how long waits as long as the child has reason to wait itself.
  for e in
    select x.id, x.wait_number, x.waiting_key, x.waiting_data from agent_executions x
     where x.status = 'waiting' and x.waiting_until <= now_ and x.waiting_for = 'agent'
     order by x.waiting_until limit p_limit for no key update skip locked
  loop
    if e.waiting_data ->> 'patient' = 'true' then
      update agent_executions x set waiting_until = agent_patience(agent_uuid(e.waiting_key))
       where x.id = e.id and agent_patience(agent_uuid(e.waiting_key)) > now_;
      continue when found;
    end if;
    -- It is told that its parent has gone on: what somebody works on comes next time.
    perform 1 from agent_executions x where x.id = agent_uuid(e.waiting_key) for no key update skip locked;
    continue when not found and exists (select from agent_executions x where x.id = agent_uuid(e.waiting_key));
    exit when held >= most;
    continue when cardinality(agent_with_free_lanes(array[e.id, agent_uuid(e.waiting_key)])) < 2;
    begin
      perform resume_agent_execution(e.id, e.wait_number, jsonb_build_object(
        'event', 'AGENT_COMPLETED', 'data', '{}'::jsonb, 'timed_out', true));
    exception when lock_not_available then
      held := held + 1;
    end;
  end loop;
  due := agent_with_free_lanes(array(
    select x.id from agent_executions x
     where x.status = 'waiting' and x.waiting_until <= now_ and x.waiting_for <> 'agent'
     order by x.waiting_until limit p_limit for no key update skip locked));
  if due <> '{}' then
    outcomes := array(
      select (select jsonb_build_object('event', agent_wait_event(x.waiting_for), 'data', '{}'::jsonb, 'timed_out', x.waiting_for <> 'delay')
                from agent_executions x where x.id = t.id)
        from unnest(due) with ordinality t (id, n) order by t.n);
    begin
      perform resume_agent_executions(due, outcomes, null, '{}');
    exception when lock_not_available then                  -- one of them: each by itself
      for i in 1 .. cardinality(due) loop
        exit when held >= most;
        begin
          perform resume_agent_executions(due[i:i], outcomes[i:i], null, '{}');
        exception when lock_not_available then
          held := held + 1;
        end;
      end loop;
    end;
  end if;
  -- Lanes that have become free.
  for e in
    with recursive wanted as (                              -- one step of the index for each lane, however many wait for it
      (select x.waiting_key as lane from agent_executions x
        where x.status = 'waiting' and x.waiting_for = 'lane' order by x.waiting_key limit 1)
      union all
      select (select x.waiting_key from agent_executions x
               where x.status = 'waiting' and x.waiting_for = 'lane' and x.waiting_key > w.lane order by x.waiting_key limit 1)
        from wanted w where w.lane is not null),
    open as materialized (select w.lane from wanted w where w.lane is not null and agent_lane_open(w.lane))
    select x.id, x.wait_number from agent_executions x join open o on x.waiting_key = o.lane
     where x.status = 'waiting' and x.waiting_for = 'lane' limit p_limit for no key update of x skip locked
  loop
    exit when held >= most;
    continue when agent_with_free_lanes(array[e.id]) = '{}';
    begin
      perform resume_agent_execution(e.id, e.wait_number,
        jsonb_build_object('event', 'LANE_FREED', 'data', '{}'::jsonb, 'timed_out', false));
    exception when lock_not_available then
      held := held + 1;
    end;
  end loop;
  -- Threads whose holder has gone, and what is queued in those that are free.
  begin
    perform clean_agent_threads(interval '10 seconds', interval '5 minutes');  -- the courier is sooner, and logs it
  exception when lock_not_available then
    held := held + 1;
  end;
  begin
    perform flush_agent_threads(p_limit);
  exception when lock_not_available then
    held := held + 1;
  end;
  -- Whoever swept looks at the queue afterwards, so that a hint that was lost is made good.
  return query select * from ready_agent_executions(p_limit);
end $$;

-- Pruning --------------------------------------------------------------------------------------------

create function prune_agent_executions_at_once(p_ids uuid[]) returns int
language plpgsql volatile set enable_seqscan = off set jit = off as $$
declare
  gone uuid[];
  gone_events uuid[];
begin
  with held as (
    select x.id from agent_executions x where x.id = any (p_ids) and x.completed_at is not null order by x.id for update skip locked),
  away as (
    delete from agent_executions x using held h where x.id = h.id returning x.id)
  select coalesce(array_agg(a.id), '{}') into gone from away a;
  insert into agent_retention_leftovers
    select g from unnest(gone) g where exists (select from agent_checkpoints c where c.execution_id = g) on conflict do nothing;
  delete from agent_status_changes c where c.execution_id = any (gone);
  delete from agent_requests r where r.execution_id = any (gone);
  delete from agent_message_drafts d where d.execution_id = any (gone);
  delete from agent_lane_holds h where h.execution_id = any (gone);
  delete from agent_claims_lost c where c.execution_id = any (gone);
  perform prune_agent_causes('execution', gone);
  with away as (
    delete from agent_events v where v.external_id in (
      select 'completed ' || g from unnest(gone) g
      union all
      select 'approval ' || a.id from agent_approvals a where a.execution_id = any (gone) and a.parked)
    returning v.id)
  select array_agg(a.id) into gone_events from away a;
  perform prune_agent_causes('event', gone_events);
  return cardinality(gone);
end $$;

create or replace function prune_agent_executions(p_ids uuid[]) returns int
language plpgsql volatile set enable_seqscan = off set jit = off as $$
declare
  half constant int := cardinality(p_ids) / 2;
begin
  if p_ids = '{}' then
    return 0;
  end if;
  begin
    return prune_agent_executions_at_once(p_ids);
  exception when lock_not_available then
    if half = 0 then
      return 0;                                             -- the next pass comes to it again
    end if;
  end;
  return prune_agent_executions(p_ids[1:half]) + prune_agent_executions(p_ids[half + 1:cardinality(p_ids)]);
end $$;
comment on function prune_agent_executions is 'Take executions away with what belongs to them, but for those of which another transaction has something locked.';

-- As before, but for a thread of which another transaction has something locked.
create or replace function prune_agent_thread(p_id text, p_before timestamptz, p_most int, out removed int, out gone boolean)
language plpgsql volatile set enable_seqscan = off set jit = off as $$
declare
  oldest uuid[];
begin
  removed := 0;
  gone := false;
  perform 1 from agent_threads t where t.id = p_id and t.updated_at < p_before for update skip locked;
  if not found then
    return;
  end if;
  -- The oldest first, so that a thread that wakes up has its latest.
  oldest := array(select m.id from agent_messages m where m.thread_id = p_id order by m.turn, m.seq limit p_most);
  if exists (select from agent_messages m join agent_executions x on x.id = m.execution_id
              where m.id = any (oldest) and x.completed_at is null) then
    return;                                               -- it has spoken here, and may wait for an answer
  end if;
  delete from agent_messages m where m.id = any (oldest) and m.status not in ('queued', 'sending');
  get diagnostics removed = row_count;
  if removed = cardinality(oldest) and removed < p_most then
    delete from agent_threads t where t.id = p_id;
    gone := true;
  end if;
exception when lock_not_available then                      -- the next pass comes to it again
  removed := 0;
  gone := false;
end $$;

-- As before, and activity that another transaction has locked is left to the next pass.
create or replace function prune_agent(p_kind text, p_most int default 500, p_anew boolean default false, out removed int, out more boolean)
language plpgsql volatile set enable_seqscan = off set jit = off set lock_timeout = '100ms' as $$
declare
  policy agent_retention;
  pass agent_retention_passes;
  o agent_old_rows;
  ids uuid[];
  id_ text;
  t record;
begin
  removed := 0;
  more := false;
  if coalesce(p_most, 0) not between 1 and 100000 then
    raise exception 'pieces of % rows are not valid: give 1 to 100000', coalesce(p_most::text, 'null') using errcode = '22023';
  end if;
  select r.* into policy from agent_retention r where r.kind = p_kind;
  if not found then
    raise exception '% is not a kind of what is kept', coalesce(quote_literal(left(p_kind, 40)), 'null') using errcode = '22023',
      hint = 'Kinds: ' || (select string_agg(r.kind, ', ' order by r.kind) from agent_retention r) || '.';
  end if;
  if not pg_try_advisory_xact_lock(hashtextextended('retention ' || p_kind, 0)) then
    return;                                               -- somebody is at it
  end if;
  select s.* into pass from agent_retention_passes s where s.kind = p_kind;
  if p_kind = 'executions' then
    more := prune_agent_leftovers(p_most);
    if more or policy.keep is null then
      return;
    end if;
  elsif policy.keep is null then
    return;
  end if;
  if p_anew or pass.ended_at is not null and pass.began_at < clock_timestamp() - interval '1 day' then
    pass.place_at := '-infinity';
    pass.place_key := '';
    pass.began_at := clock_timestamp();
  end if;
  if p_kind = 'hour_counts' then
    with held as (
      select c.ctid as at from agent_activity_counts c
       where c.span = 'hour' and c.start < date_trunc('hour', now() - policy.keep) order by c.span, c.start limit p_most for update skip locked)
    delete from agent_activity_counts c using held h where c.ctid = h.at;
    get diagnostics removed = row_count;
    o := row(null, '-infinity', '', removed);
  else
    o := old_agent_rows(p_kind, policy.keep, pass.place_at, pass.place_key, case when p_kind = 'messages' then least(p_most, 50) else p_most end);
  end if;
  if p_kind not in ('messages', 'budgets') then
    ids := coalesce(o.going, '{}')::uuid[];
  end if;
  more := o.seen = case when p_kind = 'messages' then least(p_most, 50) else p_most end;
  if p_kind = 'activity' and ids <> '{}' then
    with held as (
      select a.id from agent_activity a where a.id = any (ids) and a.id >= ids[1] and a.id <= ids[cardinality(ids)] for update skip locked)
    delete from agent_activity a using held h where a.id = h.id and a.id >= ids[1] and a.id <= ids[cardinality(ids)];
    get diagnostics removed = row_count;
  elsif p_kind = 'executions' then
    removed := prune_agent_executions(ids);
    more := more or exists (select from agent_retention_leftovers);
  elsif p_kind = 'events' then
    with held as (select v.id from agent_events v where v.id = any (ids) for update skip locked),
    away as (
      delete from agent_events v using held h where v.id = h.id returning v.id)
    select array_agg(a.id), count(*) into ids, removed from away a;
    perform prune_agent_causes('event', ids);
  elsif p_kind = 'approvals' then
    with held as (select a.id from agent_approvals a where a.id = any (ids) for update skip locked)
    delete from agent_approvals a using held h where a.id = h.id;
    get diagnostics removed = row_count;
  elsif p_kind = 'automation_runs' then
    with held as (select r.id from agent_automation_runs r where r.id = any (ids) and r.status in ('success', 'skipped') for update skip locked),
    away as (
      delete from agent_automation_runs r using held h where r.id = h.id returning r.id)
    select array_agg(a.id), count(*) into ids, removed from away a;
    perform prune_agent_causes('run', ids);
  elsif p_kind = 'deliveries' then
    with held as (select d.id from agent_webhook_deliveries d where d.id = any (ids) and d.status in ('done', 'ignored') for update skip locked)
    delete from agent_webhook_deliveries d using held h where d.id = h.id;
    get diagnostics removed = row_count;
  elsif p_kind = 'outbox' then
    with held as (select w.id from agent_webhook_outbox w where w.id = any (ids) and w.status in ('sent', 'dead') for update skip locked),
    away as (
      delete from agent_webhook_outbox w using held h where w.id = h.id returning w.id)
    select array_agg(a.id), count(*) into ids, removed from away a;
    perform prune_agent_causes('outgoing', ids);
  elsif p_kind = 'budgets' then
    with held as (
      select b.scope from agent_budgets b where b.scope = any (o.going) and b.reserved_tokens = 0 and b.reserved_usd = 0 for update skip locked)
    delete from agent_budgets b using held h where b.scope = h.scope;
    get diagnostics removed = row_count;
  elsif p_kind = 'messages' then
    foreach id_ in array coalesce(o.going, '{}') loop
      select g.removed, g.gone into t from prune_agent_thread(id_, agent_retention_before(p_kind, policy.keep), p_most - removed) g;
      removed := removed + t.removed;
      if removed >= p_most then                           -- the next piece goes on with this thread
        o.place_at := (select x.updated_at - interval '1 microsecond' from agent_threads x where x.id = id_);
        o.place_key := '';
        more := true;
        exit;
      end if;
    end loop;
  end if;
  if removed > 0 or o.seen > 0 or p_anew or pass.ended_at is null or pass.began_at > pass.ended_at then
    update agent_retention_passes s
       set place_at = coalesce(o.place_at, pass.place_at), place_key = coalesce(o.place_key, pass.place_key), began_at = pass.began_at,
           ended_at = case when not more then clock_timestamp() end, removed = s.removed + prune_agent.removed
     where s.kind = p_kind;
  end if;
end $$;
