-- Why did this happen? One function answers, why(trace): who began it, across other traces; what it did and waited for; who had which
-- lane; what went wrong; what came of it, also in other traces; and what it cost. docs/why.md shows an answer.
--
-- Nearly all of it is derived from what is stored anyway: parents, forks, the keys that begin an execution once, checkpoints, approvals.
-- What the schema forgot so far is noted here, by the functions that know it, in the statement that does it:
--
--   agent_checkpoints.waited_*  what a recorded outcome was waited for, and since when
--   agent_links                 who raised an event; whom it resumed, when it was not one alone; the runs of automations that
--                               were started, and in which executions; what was told to targets; whom an approval allowed a call that another
--                               had asked for
--   agent_lane_holds            who had a lane, from when to when, and why it ended; of executions, because nothing else has a trace
--   agent_claims_lost           whose worker was lost, or gave its run back
--
-- Nothing is noted where the busiest ways go: a start, a step, an end, and a lane of a job write what they wrote before; an event that
-- one execution waits for writes three more columns of the row that it writes.

alter table agent_checkpoints add column waited_for text;
alter table agent_checkpoints add column waited_key text;
alter table agent_checkpoints add column waited_since timestamptz;
comment on column agent_checkpoints.waited_for is 'The kind of wait whose outcome this is; null for all other steps, and for waits that ended before version 25.';

create table agent_links (
  cause  text not null,             -- as why() has them: execution ID, trace ID, event ID, approval ID
  kind   text not null check (kind in ('raised', 'woke', 'started', 'ran', 'told', 'allowed')),
  effect text not null,             -- event ID, execution ID, run ID, outgoing ID
  at     timestamptz not null default clock_timestamp(),
  primary key (cause, kind, effect)
);
create index agent_links_effect on agent_links (effect, kind);
comment on table agent_links is 'What caused what, where no other table says it.';

create table agent_lane_holds (
  lane          text not null,
  execution_id  uuid not null,
  fencing_token bigint not null,    -- the last one
  held_from     timestamptz not null,
  held_until    timestamptz not null,
  ended         text not null check (ended in ('released', 'ended', 'lent', 'given back', 'handed back', 'expired', 'broken')),
  successor     text not null default '',     -- whose the lane was next, where that is known at the same time
  primary key (lane, held_until, fencing_token)
);
create index agent_lane_holds_execution on agent_lane_holds (execution_id, held_from);
comment on table agent_lane_holds is
  'Lanes that executions had, written when that ends. ended: the execution with it; lent to a child, given back by one; handed back with the '
  'run by a process that shuts down; expired, broken by an admin, or released.';

create table agent_claims_lost (
  execution_id uuid not null,
  claim        bigint not null,
  worker       uuid,
  worker_name  text not null default '',
  how          text not null check (how in ('lost', 'no progress', 'handed back')),
  at           timestamptz not null default clock_timestamp(),
  primary key (execution_id, claim)
);
comment on table agent_claims_lost is 'Claims that ended without a wait or an end: the worker''s lease expired, it got nowhere, or it gave its run back.';

create function link_agent_wakes(p_event uuid, p_executions uuid[]) returns void language sql volatile as $$
  insert into agent_links (cause, kind, effect)
  select 'event ' || p_event, 'woke', 'execution ' || x from unnest(p_executions) x where p_event is not null
  on conflict do nothing
$$;
comment on function link_agent_wakes is 'Note the executions that an event resumed, where it was more than consumed_by can say.';

-- The end of an execution answers whoever waits for it, however often.
create function agent_events_consumed() returns trigger language plpgsql as $$
begin
  perform link_agent_wakes(new.id, array[old.consumed_by, new.consumed_by]);
  return null;
end $$;
create trigger agent_events_consumed after update of consumed_by on agent_events
  for each row when (old.consumed_by <> new.consumed_by) execute function agent_events_consumed();

create function note_agent_hold(p_lane text, p_ended text, p_successor text default '') returns void
language plpgsql volatile set enable_seqscan = off as $$
begin
  insert into agent_lane_holds (lane, execution_id, fencing_token, held_from, held_until, ended, successor)
  select l.lane, l.execution_id, l.fencing_token, l.locked_at, greatest(least(l.expires_at, clock_timestamp()), l.locked_at), p_ended, p_successor
    from agent_locks l where l.lane = p_lane and l.execution_id is not null
  on conflict do nothing;
end $$;
comment on function note_agent_hold is 'Note who had a lane, whose row the caller has locked, before somebody else gets it or nobody.';

create function note_agent_claim(e agent_executions, p_how text) returns void
language plpgsql volatile set enable_seqscan = off as $$
begin
  insert into agent_claims_lost (execution_id, claim, worker, worker_name, how)
  values (e.id, e.claim, e.claimed_by, coalesce((select coalesce(nullif(w.owner, ''), w.name) from agent_workers w where w.id = e.claimed_by), ''), p_how)
  on conflict do nothing;
end $$;
comment on function note_agent_claim is 'Note that a claim ended without a wait or an end.';

-- Waits -----------------------------------------------------------------------------------------------
--
-- As before, and what was waited for is noted with the outcome.

create or replace function resume_agent_execution_for(p_id uuid, p_wait_number int, p_outcome jsonb, p_worker uuid) returns boolean
language plpgsql volatile as $$
declare
  e record;
begin
  if p_worker is null then
    select x.claim, x.waiting_step, x.waiting_for, x.waiting_key, x.outside, x.updated_at into e from agent_executions x
     where x.id = p_id and x.status = 'waiting' and x.wait_number = p_wait_number for no key update;
  else                                                       -- a claim is part of the key
    select x.claim, x.waiting_step, x.waiting_for, x.waiting_key, x.outside, x.updated_at into e from agent_executions x
     where x.id = p_id and x.status = 'waiting' and x.wait_number = p_wait_number for update;
  end if;
  if not found then
    return false;
  end if;
  insert into agent_checkpoints (execution_id, step, claim, output, waited_for, waited_key, waited_since)
  values (p_id, coalesce(e.waiting_step, 'wait ' || p_wait_number), e.claim, p_outcome, e.waiting_for, e.waiting_key, e.updated_at)
  on conflict (execution_id, step) do nothing;
  update agent_executions x
     set status = 'running', wake = x.wake + 1, attempt = 0, claimed_by = p_worker, claim = x.claim + (p_worker is not null)::int
   where x.id = p_id;
  if e.waiting_for = 'agent' then                           -- a child that still runs acts under lanes of its own from here on
    update agent_executions x set inherits = false, awaited = false
     where x.id = agent_uuid(e.waiting_key) and x.parent_id = p_id and (x.inherits or x.awaited) and x.completed_at is null;
    perform recall_agent_loans(p_id);
  end if;
  if exists (select from agent_locks l where l.execution_id = p_id) then
    perform park_agent_locks(p_id, false);
  end if;
  return true;
end $$;

create or replace function resume_agent_executions(p_ids uuid[], p_outcomes jsonb[], p_worker uuid, p_claimed uuid[])
returns void language plpgsql volatile set enable_seqscan = off set plan_cache_mode = force_generic_plan as $$
declare
  lanes text[];
  id_ uuid;
begin
  -- No joins with what is given: a plan that was made while the table was small would go through it from the other side.
  insert into agent_checkpoints (execution_id, step, claim, output, waited_for, waited_key, waited_since)
  select x.id, coalesce(x.waiting_step, 'wait ' || x.wait_number), x.claim, p_outcomes[array_position(p_ids, x.id)],
         x.waiting_for, x.waiting_key, x.updated_at
    from agent_executions x where x.id = any (p_ids)
  on conflict (execution_id, step) do nothing;
  update agent_executions x
     set status = 'running', wake = x.wake + 1, attempt = 0,
         claimed_by = case when x.id = any (p_claimed) then p_worker end, claim = x.claim + (x.id = any (p_claimed))::int
   where x.id = any (p_ids);
  lanes := array(select l.lane from agent_locks l where l.execution_id = any (p_ids)
                 union select n.lane from agent_lock_loans n where n.lender = any (p_ids) order by 1);
  if lanes <> '{}' then
    perform 1 from agent_locks l where l.lane = any (lanes) order by l.lane for update;    -- in one order, whosever they are
    foreach id_ in array p_ids loop
      perform park_agent_locks(id_, false);
    end loop;
  end if;
end $$;

create or replace function park_agent_execution(p_id uuid, p_claim bigint, p_step text, p_kind text, p_key text,
                                     p_timeout interval, p_data jsonb) returns jsonb
language plpgsql volatile as $$
declare
  came agent_events;
  outcome jsonb;
  unsent uuid;
  sent record;
  target uuid;
begin
  if agent_wait_event(p_kind) is null then
    raise exception 'wait for % is not known', coalesce(quote_literal(p_kind), 'null') using errcode = '22023';
  elsif p_step is null or p_key is null or (p_key = '' and p_kind <> 'delay') then
    raise exception 'wait for % needs a step and a key', p_kind using errcode = '22023';
  elsif p_kind = 'delay' and p_timeout is null then
    raise exception 'a delay needs its time' using errcode = '22023';
  end if;
  if p_kind in ('agent', 'document', 'signature', 'test') then
    target := agent_uuid(p_key);
    p_key := coalesce(target::text, p_key);                 -- as the events have it
  end if;
  if p_kind = 'agent' and p_timeout is null then
    p_data := coalesce(p_data, '{}') || '{"patient": true}';
  end if;
  p_timeout := coalesce(p_timeout, agent_wait_standard(p_kind));
  if p_timeout < interval '0' or p_timeout > agent_wait_longest(p_kind) then
    raise exception 'timeout % of the wait for % is not valid: give up to %', p_timeout, p_kind, agent_wait_longest(p_kind)
      using errcode = '22023';
  end if;
  perform agent_wait_lock(p_kind, p_key);
  -- The end of what is waited for either comes before this, and its event is seen below, or finds who waits.
  if p_kind = 'agent' and target < p_id then
    perform 1 from agent_executions x where x.id = target for share;
  end if;
  -- For update, because the claim is part of the key: two parks that shared the row would deadlock here.
  perform 1 from agent_executions x where x.id = p_id and x.claim = p_claim for update;
  if p_kind = 'agent' and target > p_id then
    perform 1 from agent_executions x where x.id = target for share;
  end if;
  perform fence_agent_execution(p_id, p_claim);
  -- A try before this one had an outcome at once, and its answer was lost on the way.
  select c.output into outcome from agent_checkpoints c where c.execution_id = p_id and c.step = p_step;
  if found then
    return outcome;
  end if;
  if p_kind in ('document', 'signature', 'test') and exists (select from agent_requests r where r.id = target and r.kind = p_kind) then
    outcome := agent_request_outcome(p_kind, p_key);
  elsif p_kind = 'response' then
    unsent := agent_queued_message(p_id, p_key);
    select agent_last_sent(p_id, p_key) as at, max(m.seq) as seq into sent from agent_messages m
     where m.execution_id = p_id and m.thread_id = p_key and m.role = 'assistant' and m.seq is not null;
    -- The order of the thread decides what an answer can be; the clock only where the event is of no message of it.
    select v.* into came from agent_events v
     where v.event = 'MESSAGE_RECEIVED' and v.key = p_key and v.consumed_by is null and unsent is null
       and v.id >= agent_uuid7_floor(sent.at - interval '1 minute')
       and coalesce((select m.seq > sent.seq from agent_messages m
                      where m.id = agent_uuid(v.data ->> 'message_id') and m.thread_id = p_key), v.created_at > sent.at)
     order by v.id limit 1 for update;
  elsif p_kind = 'agent' and exists (select from agent_events v where v.external_id = 'completed ' || p_key) then
    -- An end is a fact, not a message: it answers everyone who waits for it, however often.
    select v.* into came from agent_events v where v.external_id = 'completed ' || p_key;
  elsif p_kind not in ('delay', 'lane') then
    select v.* into came from agent_events v
     where v.event = agent_wait_event(p_kind) and v.key = p_key and v.consumed_by is null
     order by v.id limit 1 for update;
  elsif p_kind = 'lane' then
    update agent_locks l set waited_until = greatest(l.waited_until, clock_timestamp() + p_timeout) where l.lane = p_key;
    if agent_lane_open(p_key)
       or exists (select from agent_locks l where l.lane = p_key and l.execution_id = p_id) then    -- it is its own
      outcome := jsonb_build_object('event', 'LANE_FREED', 'data', '{}'::jsonb, 'timed_out', false);
    end if;
  end if;
  if came.id is not null then
    update agent_events v set consumed_by = p_id where v.id = came.id;
    outcome := jsonb_build_object('event', came.event, 'event_id', came.id, 'data', came.data, 'timed_out', false);
  end if;
  if outcome is not null then
    insert into agent_checkpoints (execution_id, step, claim, output, waited_for, waited_key, waited_since)
    values (p_id, p_step, p_claim, outcome, p_kind, p_key, clock_timestamp());
    return outcome;
  end if;
  update agent_executions x
     set status = 'waiting', claim = x.claim + 1, wait_number = x.wait_number + 1, attempt = 0,
         waiting_for = p_kind, waiting_key = p_key, waiting_step = p_step,
         -- A question that still stands in the queue cannot be answered: the time runs from when it leaves.
         waiting_until = clock_timestamp() + case when unsent is null then p_timeout else interval '30 days' end,
         waiting_data = case when unsent is null then p_data
                             else coalesce(nullif(p_data, 'null'), '{}') || jsonb_build_object('queued_message', unsent,
                                    'timeout_seconds', extract(epoch from p_timeout)) end
   where x.id = p_id and x.claim = p_claim;
  if p_kind = 'agent' then                                  -- also when it waits again, after a time that was too short
    update agent_executions x set awaited = true
     where x.id = target and x.parent_id = p_id and not x.awaited and x.completed_at is null;
  end if;
  perform park_agent_locks(p_id, true);
  return null;
end $$;

create or replace function deliver_agent_event(p_event text, p_key text, p_data jsonb default '{}', p_id text default null)
returns table (event_id uuid, execution_id uuid)
language plpgsql volatile as $$
#variable_conflict use_column
declare
  kind constant text := check_agent_delivery(p_event, p_key, p_data, p_id);
  event_row uuid;
  waiter record;
  last_one uuid;
  woken uuid[] := '{}';
  asked_by uuid;
  outcome jsonb;
begin
  if kind in ('agent', 'document', 'signature', 'test') then
    p_key := coalesce(agent_uuid(p_key)::text, p_key);
  end if;
  perform agent_wait_lock(kind, p_key);
  insert into agent_events as v (event, key, data, external_id) values (p_event, p_key, coalesce(p_data, '{}'), p_id)
  on conflict (external_id) do nothing returning v.id into event_row;
  if event_row is null then
    return query select v.id, null::uuid from agent_events v where v.external_id = p_id;
    return;
  end if;
  outcome := jsonb_build_object('event', p_event, 'event_id', event_row, 'data', coalesce(p_data, '{}'), 'timed_out', false);
  if kind in ('document', 'signature', 'test') then
    -- Executions before requests, because the end of one closes what it asked for.
    perform 1 from agent_executions x
      where x.waiting_for = kind and x.waiting_key = p_key and (x.status = 'waiting') is true order by x.id for no key update;
    asked_by := answer_agent_request(kind, p_key, event_row, coalesce(p_data, '{}'));
    if asked_by is not null then                            -- the request keeps it from here on
      update agent_events v set consumed_by = asked_by where v.id = event_row;
      outcome := agent_request_outcome(kind, p_key);
    end if;
  end if;
  for waiter in
    select x.id, x.wait_number from agent_executions x
     where x.waiting_for = kind and x.waiting_key = p_key and (x.status = 'waiting') is true and outcome is not null
       and (kind <> 'response' or not coalesce(x.waiting_data ? 'queued_message', false))
     order by x.id for no key update
  loop
    perform resume_agent_execution(waiter.id, waiter.wait_number, outcome);
    last_one := waiter.id;
    woken := woken || waiter.id;
    return query select event_row, waiter.id;
  end loop;
  if last_one is null then
    return query select event_row, null::uuid;
  else
    update agent_events v set consumed_by = last_one where v.id = event_row;          -- once, however many woke
    if cardinality(woken) > 1 then
      perform link_agent_wakes(event_row, woken);
    end if;
  end if;
end $$;

create or replace function hand_agent_event(p_event text, p_key text, p_data jsonb, p_id text, p_worker uuid, p_background int, p_interactive int,
                                 p_skip text[] default '{}')
returns table (n int, event_id uuid, execution_id uuid, queue text, execution agent_executions, held boolean, steps text[], claims bigint[],
               prints text[], failed boolean[], outputs jsonb[], times timestamptz[])
language plpgsql volatile set enable_seqscan = off set plan_cache_mode = force_generic_plan as $$
#variable_conflict use_column
declare
  kind constant text := check_agent_delivery(p_event, p_key, p_data, p_id);
  waiter record;
  ids uuid[] := '{}';
  mine boolean;
  lanes boolean;
  steady boolean;                   -- nobody pauses the agent meanwhile
begin
  n := 1;
  held := false;
  if kind in ('agent', 'document', 'signature', 'test') then -- these keep more than the event
    for event_id, execution_id in select d.event_id, d.execution_id from deliver_agent_event(p_event, p_key, p_data, p_id) d loop
      queue := (select x.queue from agent_executions x where x.id = execution_id);
      return next;
    end loop;
    return;
  end if;
  p_data := coalesce(p_data, '{}');
  -- The pause is looked at by another statement, which sees every one that had the lock before.
  steady := pg_try_advisory_xact_lock_shared(hashtextextended('agent pause', 0));
  perform pg_advisory_xact_lock(hashtextextended('wait ' || kind || ' ' || p_key, 0));
  -- Executions before the event, which is written once, with who takes it. Of several the one that comes first in the queue is next.
  for waiter in
    select x.id, x.wait_number, x.queue, x.flow, x.surface, x.outside, x.claim, coalesce(x.waiting_step, 'wait ' || x.wait_number) as step,
           x.updated_at
      from agent_executions x
     where x.waiting_for = kind and x.waiting_key = p_key and (x.status = 'waiting') is true
       and (kind <> 'response' or not coalesce(x.waiting_data ? 'queued_message', false))
     order by x.id for update
  loop
    ids := ids || waiter.id;
  end loop;
  insert into agent_events as v (event, key, data, external_id, consumed_by) values (p_event, p_key, p_data, p_id, ids[cardinality(ids)])
  on conflict (external_id) do nothing returning v.id into event_id;
  if event_id is null then                                   -- it came before
    event_id := (select v.id from agent_events v where v.external_id = p_id);
    ids := '{}';
  end if;
  if ids = '{}' then
    return next;
    return;
  end if;
  p_data := jsonb_build_object('event', p_event, 'event_id', event_id, 'data', p_data, 'timed_out', false);
  if cardinality(ids) > 1 then                               -- which of them is first is for those who claim from the queue
    return query select 1, event_id, x.id, x.queue, null::agent_executions, false, null::text[], null::bigint[], null::text[],
                        null::boolean[], null::jsonb[], null::timestamptz[]
                   from agent_executions x where x.id = any (ids) order by x.id;
    perform resume_agent_execution_for(x.id, x.wait_number, p_data, null) from agent_executions x where x.id = any (ids) order by x.id;
    perform link_agent_wakes(event_id, ids);
    return;
  end if;
  select p_worker is not null and not waiter.outside and case waiter.queue when 'background' then p_background else p_interactive end > 0
         and (waiter.surface in ('operate', 'chat') or steady and not exists (select from agent_pauses p where p.resumed_at is null))
         and exists (select from agent_workers k where k.id = p_worker and k.expires_at > clock_timestamp())
         -- Nearly always nothing is ready, and nothing is limited: then nobody is before it in the queue.
         and (waiter.flow <> all (p_skip) and not exists (select from agent_limits)
              and not exists (select from agent_executions x where x.claimed_by is null and x.status in ('pending', 'running')
                                                               and not x.outside and x.queue = waiter.queue)
              or agent_next_in_line(waiter.queue, waiter.flow, waiter.surface, p_skip)),
         exists (select from agent_locks l where l.execution_id = waiter.id) or exists (select from agent_lock_loans k where k.lender = waiter.id)
    into mine, lanes;
  perform set_config('lanekeeper.fenced', 'yes', true), set_config('lanekeeper.unpaused', case when mine then 'yes' else '' end, true);
  insert into agent_checkpoints (execution_id, step, claim, output, waited_for, waited_key, waited_since)
  values (waiter.id, waiter.step, waiter.claim, p_data, kind, p_key, waiter.updated_at)
  on conflict (execution_id, step) do nothing;
  return query
  with x as (
    update agent_executions x
       set status = 'running', wake = x.wake + 1, attempt = 0, claimed_by = case when mine then p_worker end, claim = x.claim + mine::int
     where x.id = waiter.id
    returning x.*)
  select 1, event_id, x.id, x.queue, case when x.claimed_by = p_worker then x::agent_executions end,
         coalesce(x.claimed_by = p_worker and (
           lanes or x.claim > 2 * x.wait_number + 1 or exists (select from agent_activity_open o where o.execution_id = x.id)), false),
         c.steps, c.claims, c.prints, c.failed, c.outputs, c.times
    from x
    left join lateral (
      select array_agg(k.step) as steps, array_agg(k.claim) as claims, array_agg(k.fingerprint) as prints, array_agg(k.failed) as failed,
             array_agg(k.output) as outputs, array_agg(k.created_at) as times
        from agent_checkpoints k where k.execution_id = x.id and x.claimed_by = p_worker) c on true;
  perform set_config('lanekeeper.fenced', '', true), set_config('lanekeeper.unpaused', '', true);
  if lanes then
    perform park_agent_locks(waiter.id, false);
  end if;
end $$;

create or replace function hand_agent_events(p_events text[], p_keys text[], p_data jsonb[], p_ids text[], p_worker uuid, p_background int,
                                  p_interactive int, p_skip text[] default '{}')
returns table (n int, event_id uuid, execution_id uuid, queue text, execution agent_executions, held boolean, steps text[], claims bigint[],
               prints text[], failed boolean[], outputs jsonb[], times timestamptz[])
language plpgsql volatile set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set plan_cache_mode = force_generic_plan as $$
#variable_conflict use_column
declare
  kinds text[] := '{}';
  here boolean[] := '{}';           -- by event: delivered by this statement
  rows_ uuid[] := '{}';             -- by event: its row; null when it had come before
  takers uuid[] := array_fill(null::uuid, array[cardinality(p_events)]);   -- by event: the last execution that it wakes
  woken uuid[] := '{}';             -- the executions that go on, side by side: by which event, and what they waited at
  by_ int[] := '{}';
  at_ text[] := '{}';
  under_ bigint[] := '{}';
  since_ timestamptz[] := '{}';
  several boolean := false;         -- an event wakes more than one
  lines text[] := '{}';             -- queue, surface and flow of those that may be claimed here; null for the others
  ranks int[] := '{}';
  came uuid[];
  taken uuid[] := '{}';             -- those of them that are claimed
  places jsonb := jsonb_build_object('background', p_background, 'interactive', p_interactive);
  next jsonb := '{}';               -- by queue, flow and surface
  steady boolean;                   -- the agent is not paused, and nobody pauses it meanwhile
  w record;
begin
  kinds := array(select check_agent_delivery(t.event, t.key, t.data, t.id)
                   from unnest(p_events, p_keys, p_data, p_ids) with ordinality t (event, key, data, id, n) order by t.n);
  -- One that has to wait for somebody, or for another of this batch, comes again by itself: the others do not wait with it.
  here := array(
    select case when t.kind not in ('agent', 'document', 'signature', 'test') and t.nth_of_key = 1 and (t.id is null or t.nth_of_id = 1)
                then pg_try_advisory_xact_lock(hashtextextended('wait ' || t.kind || ' ' || t.key, 0)) else false end
      from (select u.*, row_number() over (partition by u.kind, u.key order by u.n) as nth_of_key,
                   row_number() over (partition by u.id order by u.n) as nth_of_id
              from unnest(kinds, p_keys, p_ids) with ordinality u (kind, key, id, n)) t
     order by t.n);
  for w in
    select l.*, t.n from unnest(kinds, p_keys, here) with ordinality t (kind, key, here, n)
     cross join lateral (
       select x.id, coalesce(x.waiting_step, 'wait ' || x.wait_number) as step, x.claim, x.priority, x.updated_at,
              case when not x.outside then x.queue || ' ' || x.surface || ' ' || x.flow end as line from agent_executions x
        where x.waiting_for = t.kind and x.waiting_key = t.key and (x.status = 'waiting') is true
          and (t.kind <> 'response' or not coalesce(x.waiting_data ? 'queued_message', false))
          for update skip locked) l
     where t.here
  loop
    woken := woken || w.id;
    by_ := by_ || w.n::int;
    at_ := at_ || w.step;
    under_ := under_ || w.claim;
    since_ := since_ || w.updated_at;
    several := several or takers[w.n] is not null;
    lines := lines || w.line;
    ranks := ranks || w.priority::int;
    takers[w.n] := w.id;
  end loop;
  -- Waiters that somebody has locked, or that have lanes, which have an order of their own.
  for w in
    select t.n from unnest(kinds, p_keys, here) with ordinality t (kind, key, here, n)
     cross join lateral (
       select from agent_executions x
        where x.waiting_for = t.kind and x.waiting_key = t.key and (x.status = 'waiting') is true
          and (t.kind <> 'response' or not coalesce(x.waiting_data ? 'queued_message', false)) and x.id <> all (woken) limit 1) l
     where t.here
    union all
    select by_[array_position(woken, l.execution_id)] from agent_locks l where l.execution_id = any (woken)
    union all
    select by_[array_position(woken, k.lender)] from agent_lock_loans k where k.lender = any (woken)
  loop
    here[w.n] := false;
    for i in 1 .. cardinality(woken) loop
      if by_[i] = w.n then
        woken[i] := null;
      end if;
    end loop;
  end loop;
  rows_ := array(select case when t.here then agent_uuid7() end from unnest(here) with ordinality t (here, n) order by t.n);
  with v as (
    insert into agent_events as v (id, event, key, data, external_id, consumed_by)
    select t.row_, t.event, t.key, coalesce(t.data, '{}'), t.id, t.taker
      from unnest(rows_, p_events, p_keys, p_data, p_ids, takers) t (row_, event, key, data, id, taker)
     where t.row_ is not null order by t.id, t.key
    on conflict (external_id) do nothing
    returning v.id)
  select array_agg(v.id) into came from v;
  if coalesce(cardinality(came), 0) < (select count(t.id) from unnest(rows_) t (id)) then    -- some came before
    rows_ := array(select case when t.id = any (came) then t.id end from unnest(rows_) with ordinality t (id, n) order by t.n);
    woken := array(select case when rows_[t.n] is not null then t.id end from unnest(woken, by_) with ordinality t (id, n, i) order by t.i);
  end if;
  steady := pg_try_advisory_xact_lock_shared(hashtextextended('agent pause', 0));
  if p_worker is not null and exists (select from agent_workers k where k.id = p_worker and k.expires_at > clock_timestamp()) then
    steady := steady and not exists (select from agent_pauses p where p.resumed_at is null);
    for w in
      select t.id, t.line, split_part(t.line, ' ', 1) as queue from unnest(woken, lines, ranks) t (id, line, rank)
       where t.id is not null and t.line is not null order by t.rank, t.id
    loop
      continue when (places ->> w.queue)::int <= 0 or not steady and split_part(w.line, ' ', 2) not in ('operate', 'chat');
      if not next ? w.line then
        next := next || jsonb_build_object(w.line, agent_next_in_line(w.queue, split_part(w.line, ' ', 3), split_part(w.line, ' ', 2), p_skip));
      end if;
      if (next ->> w.line)::boolean then
        taken := taken || w.id;
        places := places || jsonb_build_object(w.queue, (places ->> w.queue)::int - 1);
      end if;
    end loop;
  end if;
  perform set_config('lanekeeper.fenced', 'yes', true),      -- their rows are locked, and they wait
          set_config('lanekeeper.unpaused', 'yes', true);
  insert into agent_checkpoints (execution_id, step, claim, output, waited_for, waited_key, waited_since)
  select t.id, t.at_, t.under_, jsonb_build_object('event', p_events[t.n], 'event_id', rows_[t.n], 'data', coalesce(p_data[t.n], '{}'),
                                                   'timed_out', false), kinds[t.n], p_keys[t.n], t.since_
    from unnest(woken, by_, at_, under_, since_) t (id, n, at_, under_, since_) where t.id is not null
  on conflict (execution_id, step) do nothing;
  if several then
    perform link_agent_wakes(rows_[u.n], u.ids)
       from (select t.n, array_agg(t.id) as ids from unnest(woken, by_) t (id, n) where t.id is not null group by t.n having count(*) > 1) u;
  end if;
  return query
  with x as (
    update agent_executions x
       set status = 'running', wake = x.wake + 1, attempt = 0,
           claimed_by = case when x.id = any (taken) then p_worker end, claim = x.claim + (x.id = any (taken))::int
     where x.id = any (woken)
    returning x.*)
  select by_[array_position(woken, x.id)], rows_[by_[array_position(woken, x.id)]], x.id, x.queue,
         case when x.claimed_by = p_worker then x::agent_executions end,
         coalesce(x.claimed_by = p_worker and (
           x.claim > 2 * x.wait_number + 1 or exists (select from agent_activity_open o where o.execution_id = x.id)), false),
         c.steps, c.claims, c.prints, c.failed, c.outputs, c.times
    from x
    left join lateral (
      select array_agg(k.step) as steps, array_agg(k.claim) as claims, array_agg(k.fingerprint) as prints, array_agg(k.failed) as failed,
             array_agg(k.output) as outputs, array_agg(k.created_at) as times
        from agent_checkpoints k where k.execution_id = x.id and x.claimed_by = p_worker) c on true
  union all
  select t.n::int, coalesce(t.event_id, v.id), null, null, null, false, null, null, null, null, null, null
    from unnest(p_ids, rows_, here) with ordinality t (id, event_id, here, n)
    left join lateral (select r.id from agent_events r where t.here and t.event_id is null and r.external_id = t.id limit 1) v on true
   where not exists (select from unnest(woken, by_) o (id, n) where o.n = t.n and o.id is not null);
  perform set_config('lanekeeper.fenced', '', true), set_config('lanekeeper.unpaused', '', true);
end $$;

create or replace function agent_fork_steps(p_id uuid, p_step text) returns setof agent_checkpoints
language plpgsql stable as $$
declare
  cut timestamptz := agent_fork_cut(p_id, p_step);
  before_ text := regexp_replace(coalesce(p_step, ''), '([^/]*)$', 'before \1/');
begin
  return query
  with kept as (
    select c.*, regexp_replace(c.step, '[^/]*$', '') as scope from agent_checkpoints c
     where c.execution_id = p_id and c.created_at < cut
       -- What a step, a phase, a scope or a loop consists of, and what was waited for before it, is done anew with it.
       and (coalesce(p_step, '') = '' or not (c.step = p_step or starts_with(c.step, p_step || '/')
            or starts_with(c.step, p_step || '@') or starts_with(c.step, before_)))),
  -- Leave is given to one execution, for one call: who has not made the call asks anew.
  asked as (
    select a.id, a.step from agent_approvals a
     where a.execution_id = p_id and a.parked
       and not exists (select from kept k where a.consumed_at is not null
              and (k.step = substr(a.consumed_for, 38) or right(k.step, length(a.consumed_for) - 36) = '/' || substr(a.consumed_for, 38)))
       and not (a.status in ('rejected', 'expired') and exists (
              select from kept k where k.step <> a.step and (strpos(k.step, a.id::text) > 0 or exists (
                select from agent_events v where v.id = agent_uuid(k.output ->> 'event_id') and v.event = 'APPROVAL_DECIDED'
                   and v.key = a.id::text))))),
  -- And so is what was asked of people, as long as nothing that follows is kept.
  open as (
    select distinct on (r.id) k.step from agent_requests r
      join kept k on strpos(k.output::text, r.id::text) > 0
     where r.execution_id = p_id
       and not exists (select from kept later where later.scope = k.scope and later.created_at > k.created_at)
     order by r.id, k.created_at)
  select k.execution_id, k.step, k.claim, k.fingerprint, k.failed, k.output, k.created_at,
         null::text, null::text, null::timestamptz from kept k
   where not exists (select from asked a where a.step = k.step)
     and not exists (select from open o where o.step = k.step)
     and not exists (select from asked a join agent_events v on v.event = 'APPROVAL_DECIDED' and v.key = a.id::text
                      where v.id = agent_uuid(k.output ->> 'event_id'));
end $$;

-- Lanes -----------------------------------------------------------------------------------------------
--
-- As before, and who had a lane is noted when somebody else gets it, or nobody.

create or replace function ask_agent_lock(p_lane text, p_locked_by text, p_ttl_seconds int) returns agent_lock_answer
language plpgsql volatile set enable_seqscan = off as $$
declare
  now_   timestamptz;
  at_    tid;
  token  bigint;
  holder text;
  ends   timestamptz;
  waited timestamptz;
  head   text;
  until_ timestamptz;
  got    agent_lock_answer;
begin
  if not agent_lock_fits(p_lane, p_locked_by) or (p_ttl_seconds between 1 and 2592000) is not true then
    perform agent_lock_check(p_lane, p_locked_by, p_ttl_seconds);                     -- says what is wrong
  end if;
  -- Free or expired, and promised to nobody else: the full lock, for which nobody is waited for.
  select l.ctid, l.fencing_token, l.locked_by, l.expires_at, l.waited_until into at_, token, holder, ends, waited
    from agent_locks l
   where l.lane = p_lane and l.expires_at <= clock_timestamp()
     and (l.waited_until <= clock_timestamp() or coalesce(agent_lock_head(l.lane, clock_timestamp()), p_locked_by) = p_locked_by)
     for update skip locked;

  if at_ is null then
    select l.fencing_token, l.locked_by, l.expires_at, l.waited_until into token, holder, ends, waited
      from agent_locks l where l.lane = p_lane;
    if not found then
      -- The very first hold of this lane: no row to lock yet, so racers are told apart by an advisory lock.
      if not pg_try_advisory_xact_lock(hashtextextended('lane ' || p_lane, 0)) then
        return row(false, null, null, null, null, null)::agent_lock_answer;
      end if;
      now_ := clock_timestamp();
      insert into agent_locks as l (lane, locked_by, fencing_token, locked_at, expires_at, ttl_seconds, execution_id)
      values (p_lane, p_locked_by, agent_lock_token(0, now_), now_, now_ + make_interval(secs => p_ttl_seconds),
              p_ttl_seconds, agent_lock_execution(p_locked_by))
      on conflict (lane) do nothing
      returning true, l.fencing_token, l.expires_at, l.locked_by, '', now_ into got;
      return case when got.acquired then got else row(false, null, null, null, null, null)::agent_lock_answer end;
    end if;
    now_ := clock_timestamp();
    if ends <= now_ then
      head := case when waited > now_ then agent_lock_head(p_lane, now_) end;
      if head <> p_locked_by then
        return row(false, token, ends, head, null, null)::agent_lock_answer;          -- promised to who waits
      end if;
      return row(false, null, null, null, null, null)::agent_lock_answer;             -- being changed right now
    elsif holder <> p_locked_by then
      return row(false, token, ends, holder, null, null)::agent_lock_answer;          -- busy: a read, no write
    end if;
    -- Ours already. A refresh leaves the key alone, so writes under this token do not hold it up.
    select l.fencing_token, l.locked_by, l.expires_at into token, holder, ends
      from agent_locks l where l.lane = p_lane for no key update skip locked;
    if not found then
      return row(false, null, null, null, null, null)::agent_lock_answer;
    end if;
    now_ := clock_timestamp();                                                        -- after the lock
    if ends > now_ and holder <> p_locked_by then
      return row(false, token, ends, holder, null, null)::agent_lock_answer;
    elsif ends > now_ then
      update agent_locks l
         set expires_at = case when l.parked then l.expires_at else now_ + make_interval(secs => p_ttl_seconds) end,
             ttl_seconds = p_ttl_seconds
       where l.lane = p_lane
      returning true, l.fencing_token, l.expires_at, l.locked_by, '', now_ into got;
      return got;
    end if;
    -- It ended between the read and the lock, which is too weak to change the key.
    select l.ctid, l.fencing_token, l.locked_by, l.expires_at, l.waited_until into at_, token, holder, ends, waited
      from agent_locks l where l.lane = p_lane for update skip locked;
    if not found then
      return row(false, null, null, null, null, null)::agent_lock_answer;
    end if;
  end if;

  now_ := clock_timestamp();                                                          -- after the lock
  if ends > now_ then
    return row(false, token, ends, holder, null, null)::agent_lock_answer;            -- the clock was set back
  elsif waited > now_ then
    head := agent_lock_head(p_lane, now_);
    if head <> p_locked_by then
      return row(false, token, ends, head, null, null)::agent_lock_answer;            -- somebody came just now
    end if;
  end if;
  if holder <> '' and return_agent_lock(p_lane) is not null then
    -- The borrower let it expire, and who lent it is alive: it has gone back.
    select l.locked_by = p_locked_by, l.fencing_token, l.expires_at, l.locked_by, holder, ends into got
      from agent_locks l where l.lane = p_lane;
    return got;
  end if;
  if holder <> '' and agent_lock_execution(holder) is not null then
    perform note_agent_hold(p_lane, 'expired', p_locked_by);
  end if;
  until_ := now_ + make_interval(secs => p_ttl_seconds);
  update agent_locks l
     set locked_by = p_locked_by, fencing_token = agent_lock_token(l.fencing_token, now_), locked_at = now_,
         expires_at = until_, ttl_seconds = p_ttl_seconds, parked = false, execution_id = agent_lock_execution(p_locked_by)
   where l.ctid = at_                                                                 -- ours, so it stays where it is
  returning l.fencing_token into token;
  return row(true, token, until_, p_locked_by, holder, ends)::agent_lock_answer;
end $$;

create or replace function release_agent_lock(p_lane text, p_locked_by text, p_fencing_token bigint default null)
returns boolean language plpgsql volatile set enable_seqscan = off as $$
declare
  at_    tid;
  ends   timestamptz;
  waited timestamptz;
  kept   boolean;
  of     uuid;
begin
  if not agent_lock_fits(p_lane, p_locked_by) then
    perform agent_lock_check(p_lane, p_locked_by, 1);
  end if;
  select l.ctid, l.expires_at, l.waited_until, l.parked, l.execution_id into at_, ends, waited, kept, of
    from agent_locks l
   where l.lane = p_lane and l.locked_by = p_locked_by and l.expires_at > clock_timestamp()
     and (p_fencing_token is null or l.fencing_token = p_fencing_token) for update;
  if at_ is null or kept or ends <= clock_timestamp() then                            -- after the lock
    return false;
  end if;
  -- Only an execution borrows, and few lanes are lent. Not one condition: with a query in it, it would be one for every lane.
  if of is not null then
    if exists (select from agent_lock_loans n where n.lane = p_lane) and return_agent_lock(p_lane) is not null then
      return true;                                                                    -- to the ancestor who lent it
    end if;
    perform note_agent_hold(p_lane, 'released');
  end if;
  update agent_locks l
     set locked_by = '', fencing_token = l.fencing_token + 1, expires_at = clock_timestamp(), parked = false,
         execution_id = null
   where l.ctid = at_;
  if waited > clock_timestamp() then
    perform pg_notify('agent_lanes', p_lane);
  end if;
  if p_lane like 'thread:%' then
    perform agent_lane_freed(p_lane);
  end if;
  return true;
end $$;

create or replace function lend_agent_lock(p_lane text, p_borrower uuid, p_claim bigint, p_ttl_seconds int) returns uuid
language plpgsql volatile as $$
declare
  held agent_locks;
  line uuid[];
  between_ uuid[];
  deep int;
  now_ timestamptz := clock_timestamp();
begin
  select l.* into held from agent_locks l where l.lane = p_lane;
  if held.expires_at <= now_ or held.execution_id is null or held.execution_id = p_borrower then
    return null;
  end if;
  line := agent_lenders(p_borrower, held.execution_id, p_lane like 'thread:%');
  between_ := line[2 : cardinality(line) - 1];
  if cardinality(between_) > 0 then
    -- Neither the lane nor the borrower's row stands for these. One that is being changed stops waiting now, or begins.
    if cardinality(between_) <> (select count(*) from (select from agent_executions x where x.id = any (between_)
                                                       order by x.id for share skip locked) t) then
      return null;
    end if;
    line := agent_lenders(p_borrower, held.execution_id, p_lane like 'thread:%');
  end if;
  if line is null then
    return null;
  end if;
  select coalesce(max(n.depth), 0) into deep from agent_lock_loans n where n.lane = p_lane;
  insert into agent_lock_loans (lane, depth, lender, borrower, ttl_seconds)
  select p_lane, deep + u.n, u.lender, coalesce(line[u.n + 1], p_borrower), held.ttl_seconds
    from unnest(line) with ordinality u (lender, n);
  perform note_agent_hold(p_lane, 'lent', p_borrower || '#' || p_claim);
  update agent_locks l
     set locked_by = p_borrower || '#' || p_claim, execution_id = p_borrower, parked = false, locked_at = now_,
         fencing_token = agent_lock_token(l.fencing_token, now_), ttl_seconds = p_ttl_seconds,
         expires_at = now_ + make_interval(secs => p_ttl_seconds)
   where l.lane = p_lane;
  return held.execution_id;
end $$;

create or replace function hand_agent_lock(p_lane text, p_to uuid, p_claim bigint, p_parked boolean, p_ttl_seconds int) returns void
language plpgsql volatile as $$
begin
  perform note_agent_hold(p_lane, 'given back', p_to || '#' || p_claim);
  update agent_locks l
     set locked_by = p_to || '#' || p_claim, execution_id = p_to, parked = p_parked, locked_at = clock_timestamp(),
         ttl_seconds = p_ttl_seconds, fencing_token = agent_lock_token(l.fencing_token, clock_timestamp()),
         expires_at = case when p_parked then timestamptz '9000-01-01 00:00+00'
                           else clock_timestamp() + make_interval(secs => p_ttl_seconds) end
   where l.lane = p_lane;
end $$;

create or replace function free_agent_locks(p_execution_id uuid, p_threads boolean) returns int
language plpgsql volatile as $$
declare
  mine text[] := lock_agent_locks(p_execution_id);
  freed record;
  n int := 0;
begin
  if mine = '{}' then
    return 0;
  end if;
  for freed in
    select l.lane, l.waited_until, cut.depth from agent_locks l
      left join lateral (select min(k.depth) as depth from agent_lock_loans k
                          where k.lane = l.lane and k.lender = p_execution_id) cut on true
     where l.lane = any (mine) and (l.execution_id = p_execution_id or cut.depth is not null)
       and (p_threads or l.lane not like 'thread:%')
     order by l.lane
  loop
    n := n + 1;
    delete from agent_lock_loans k where k.lane = freed.lane and k.depth >= freed.depth;    -- what it had lent comes back first
    continue when return_agent_lock(freed.lane) is not null;
    perform note_agent_hold(freed.lane, case when p_threads then 'ended' else 'handed back' end);
    update agent_locks l
       set locked_by = '', fencing_token = l.fencing_token + 1, parked = false, execution_id = null,
           expires_at = least(l.expires_at, clock_timestamp())
     where l.lane = freed.lane;
    if freed.waited_until > clock_timestamp() then
      perform pg_notify('agent_lanes', freed.lane);
    end if;
    perform agent_lane_freed(freed.lane);
  end loop;
  return n;
end $$;

create or replace function clean_agent_threads(p_overdue interval default '0', p_unwanted interval default '0')
returns table (thread_id text, locked_by text, execution_id uuid, idle_seconds bigint)
language plpgsql volatile as $$
#variable_conflict use_column
declare
  l agent_locks;
  lane_ text;
begin
  for lane_ in
    select k.lane from agent_locks k
     where k.lane like 'thread:%' and k.locked_by <> '' and not k.parked
       and (k.expires_at <= clock_timestamp() - p_overdue
            and (k.expires_at <= clock_timestamp() - p_unwanted or exists (
              select from agent_messages m where m.thread_id = substr(k.lane, 8) and m.status = 'queued'))
            or k.execution_id is not null and not exists (
              select from agent_executions x where x.id = k.execution_id and x.completed_at is null))
     order by k.lane
  loop
    -- Look again under the lock: it may have been taken over since.
    select k.* into l from agent_locks k where k.lane = lane_ for update skip locked;
    continue when not found or l.locked_by = '' or l.parked
      or l.expires_at > clock_timestamp() - p_overdue and (l.execution_id is null or exists (
           select from agent_executions x where x.id = l.execution_id and x.completed_at is null));
    thread_id := substr(l.lane, 8);
    locked_by := l.locked_by;
    execution_id := l.execution_id;
    idle_seconds := extract(epoch from clock_timestamp() - l.expires_at + make_interval(secs => l.ttl_seconds));
    if return_agent_lock(l.lane) is null then
      perform note_agent_hold(l.lane, 'expired');
      update agent_locks k set locked_by = '', fencing_token = k.fencing_token + 1, parked = false, execution_id = null,
             expires_at = least(k.expires_at, clock_timestamp()) where k.lane = l.lane;
      if l.waited_until > clock_timestamp() then
        perform pg_notify('agent_lanes', l.lane);
      end if;
      perform agent_lane_freed(l.lane);
    end if;
    return next;
  end loop;
end $$;

create or replace function break_agent_lock(p_lane text, p_reason text) returns boolean
language plpgsql volatile as $$
declare
  held agent_locks;
  e record;
  trace text;
begin
  perform agent_lock_check(p_lane, 'admin', 1);
  if p_reason is null or btrim(p_reason) = '' then
    raise exception 'breaking lane % needs a reason', quote_literal(p_lane) using errcode = '22023';
  end if;
  select l.* into held from agent_locks l where l.lane = p_lane for update;
  if not found or held.expires_at <= clock_timestamp() then
    return false;
  end if;
  perform note_agent_hold(p_lane, 'broken', 'admin');
  update agent_locks l
     set locked_by = '', fencing_token = l.fencing_token + 1, expires_at = clock_timestamp(), parked = false,
         execution_id = null
   where l.lane = p_lane;
  select x.trace_id, x.surface, x.agent, x.id into e from agent_executions x where x.id = held.execution_id;
  trace := coalesce(e.trace_id, substring(held.locked_by from '^(?:hb|op|ch|wh|fl)_[0-9A-HJKMNP-TV-Z]{26}'),
                    agent_trace_id('op'));
  insert into agent_activity (trace_id, execution_id, kind, agent, surface, skill_name, status, input, lane, finished_at, duration_ms)
  values (trace, e.id, 'note', coalesce(e.agent, 'flowpilot'), coalesce(e.surface, 'operate'), 'break_lane', 'success',
          jsonb_build_object('lane', p_lane, 'reason', p_reason, 'holder', held.locked_by,
                             'fencing_token', held.fencing_token), p_lane, clock_timestamp(), 0);
  delete from agent_lock_loans n where n.lane = p_lane;
  perform pg_notify('agent_lanes', p_lane);
  perform agent_lane_freed(p_lane);
  return true;
end $$;

create or replace function sweep_agent_locks(p_idle interval default '1 day') returns int
language plpgsql volatile as $$
declare
  back text;
  n int;
begin
  if p_idle is null or p_idle < interval '0' then
    raise exception 'lanes free for % cannot be swept: give an interval of 0 or more', coalesce(p_idle::text, 'null')
      using errcode = '22023';
  end if;
  delete from agent_lock_waiters w where w.expires_at < clock_timestamp() - interval '1 minute';
  for back in                                               -- lent ones that the borrower has let expire go back
    select l.lane from agent_locks l
     where l.expires_at <= clock_timestamp() and exists (select from agent_lock_loans k where k.lane = l.lane)
     order by l.lane limit 1000 for update skip locked
  loop
    perform return_agent_lock(back);
  end loop;
  with old as (
    select l.lane, l.execution_id, l.fencing_token, l.locked_at, l.expires_at from agent_locks l where l.expires_at < clock_timestamp() - p_idle
     order by l.lane limit 1000 for update skip locked),
  noted as (
    insert into agent_lane_holds (lane, execution_id, fencing_token, held_from, held_until, ended)
    select o.lane, o.execution_id, o.fencing_token, o.locked_at, o.expires_at, 'expired' from old o where o.execution_id is not null
    on conflict do nothing)
  delete from agent_locks l using old where l.lane = old.lane;
  get diagnostics n = row_count;
  return n;
end $$;

-- Claims, approvals, targets, automations -------------------------------------------------------------
--
-- As before, with what is noted for why().

create or replace function lose_agent_claim(p_id uuid, p_why text) returns void
language plpgsql volatile as $$
declare
  e agent_executions;
  spent int;
begin
  select x.* into e from agent_executions x where x.id = p_id;
  spent := case when exists (select 1 from agent_checkpoints c where c.execution_id = e.id and c.claim = e.claim)
                then 1 else e.attempt + 1 end;
  perform note_agent_claim(e, case when p_why = '' then 'no progress' else 'lost' end);
  if e.on_lost = 'fail' then
    update agent_executions x set status = 'failed', claim = x.claim + 1, attempt = spent, error_message = p_why where x.id = e.id;
  elsif spent >= e.max_attempts then
    update agent_executions x set status = 'failed', claim = x.claim + 1, attempt = spent,
           error_message = format('given up after %s workers were lost without a checkpoint between', spent)
     where x.id = e.id;
  else
    update agent_executions x set claimed_by = null, claim = x.claim + 1, attempt = spent, wake = x.wake + 1,
           hinted_at = case when e.outside then timestamptz 'infinity' else 'epoch' end, updated_at = clock_timestamp() where x.id = e.id;
  end if;
end $$;

create or replace function give_up_agent_claim(p_id uuid, p_claim bigint) returns void
language plpgsql volatile as $$
declare
  e agent_executions;
begin
  select x.* into e from agent_executions x where x.id = p_id for no key update;
  update agent_executions x
     set claimed_by = null, claim = x.claim + 1, wake = x.wake + 1, hinted_at = 'epoch', updated_at = clock_timestamp(),
         attempt = case when exists (select 1 from agent_checkpoints c where c.execution_id = x.id and c.claim = p_claim)
                        then 0 else x.attempt end
   where x.id = p_id and x.claim = p_claim and x.status = 'running' and x.claimed_by is not null;
  if found then
    perform note_agent_claim(e, 'handed back');
    perform free_agent_locks(p_id, false);
    perform reown_agent_locks(p_id, p_id || '#' || (p_claim + 1));
  end if;
end $$;

create or replace function use_agent_approval(p_id uuid, p_execution_id uuid, p_step text) returns void
language plpgsql volatile as $$
begin
  update agent_approvals a
     set status = 'consumed', consumed_at = clock_timestamp(), consumed_for = p_execution_id || ' ' || p_step
   where a.id = p_id and (not a.parked or a.execution_id = p_execution_id)
     and ((a.status = 'approved' and a.expires_at > clock_timestamp()
           and exists (select from agent_skills s where s.name = a.skill_name and s.revision = a.skill_revision))
          or (a.status = 'consumed' and a.consumed_for = p_execution_id || ' ' || p_step));
  if not found then
    raise exception 'approval % is not a live grant: used, rejected, expired, or its skill has changed', p_id
      using errcode = 'LK003';
  end if;
  insert into agent_links (cause, kind, effect)
  select 'approval ' || a.id, 'allowed', 'execution ' || p_execution_id from agent_approvals a
   where a.id = p_id and a.execution_id is distinct from p_execution_id
  on conflict do nothing;
end $$;

create or replace function emit_agent_webhook(p_event text, p_trace_id text, p_data jsonb) returns int
language plpgsql volatile as $$
declare
  message jsonb := jsonb_build_object('type', p_event, 'data', p_data, 'timestamp',
    to_char(clock_timestamp() at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'));
  teller constant uuid := case when p_event like 'execution.%' then agent_uuid(p_data ->> 'id') else agent_uuid(p_data ->> 'execution_id') end;
  n int;
begin
  if octet_length(message::text) > 20000 then
    message := message || jsonb_build_object('data', jsonb_build_object(
      'trace_id', p_trace_id, 'omitted', 'the data has more than 20 kB; ask for it by its id', 'id', p_data -> 'id'));
  end if;
  with told as (
    insert into agent_webhook_outbox (target_id, event, payload, trace_id)
    select t.id, p_event, message, coalesce(nullif(p_trace_id, ''), agent_trace_id('wh'))
      from agent_webhook_targets t
     where t.enabled and t.events && array[p_event, split_part(p_event, '.', 1) || '.*', '*']
    returning id, trace_id)
  insert into agent_links (cause, kind, effect)
  select coalesce('execution ' || teller, 'trace ' || o.trace_id), 'told', 'outgoing ' || o.id from told o;
  get diagnostics n = row_count;
  if n > 0 then
    perform pg_notify('agent_webhooks', '');
  end if;
  return n;
end $$;

create or replace function agent_events_start_automations() returns trigger language plpgsql as $$
declare
  new agent_events;
  names text[];
  raiser constant text := coalesce(nullif(current_setting('lanekeeper.raised_by', true), ''),
                                   'trace ' || nullif(current_setting('lanekeeper.trace_id', true), ''));
  emitter record;
  made int;
  n int := 0;
begin
  if raiser is not null then                                 -- the end of an execution has it in its row
    insert into agent_links (cause, kind, effect)
    select raiser, 'raised', 'event ' || c.id from came c where c.execution_id is null on conflict do nothing;
  end if;
  if not exists (select from agent_automations a where a.enabled and a.trigger = 'event') then
    return null;
  end if;
  for new in select c.* from came c order by c.id loop
    -- EVENT_COMPLETED says by its key what happened, so that is a name too.
    names := case when new.event = 'EVENT_COMPLETED' then array[new.event, new.key] else array[new.event] end;
    continue when not exists (select from agent_automations a where a.enabled and a.trigger = 'event' and a.event = any (names));
    select x.flow, x.trace_id into emitter from agent_executions x where x.id = new.execution_id;
    continue when emitter.flow = 'automation';               -- else the end of a run would cause the next one, without end
    with made_ as (
    insert into agent_automation_runs (automation_id, cause, scheduled_for, event_id, payload, status, trace_id)
    select a.id, 'event', new.created_at, new.id,
           jsonb_build_object('event', new.event, 'key', new.key, 'data', new.data), 'due',
           coalesce(nullif(current_setting('lanekeeper.trace_id', true), ''), emitter.trace_id, '')
      from agent_automations a
     where a.enabled and a.trigger = 'event' and a.event = any (names)
       -- And the end of a flow that an automation started would start the next flow.
       and (a.flow = '' or new.execution_id is null or not agent_from_automation(new.execution_id))
     order by a.id
    on conflict (automation_id, event_id) do nothing
    returning id)
    insert into agent_links (cause, kind, effect) select 'event ' || new.id, 'started', 'run ' || m.id from made_ m;
    get diagnostics made = row_count;
    n := n + made;
  end loop;
  if n > 0 then
    perform pg_notify('agent_automations', '');
  end if;
  return null;
end $$;

-- The answer ---------------------------------------------------------------------------------------------
--
-- Every read goes by an index, whatever the statistics say (a limit of 1 keeps the planner from reading all of a table that is small
-- today), and every list has a bound, which is told where it is reached. The settings
-- of why() hold for the functions that it calls; none of them is meant to be called otherwise.

create function agent_trace_forms(p_trace text) returns text[]
language plpgsql immutable as $$
declare
  alphabet constant text := '0123456789ABCDEFGHJKMNPQRSTVWXYZ';
  surfaces constant text[] := array['hb', 'op', 'ch', 'wh', 'fl'];
  said constant text := btrim(coalesce(p_trace, ''));
  bits bytea;
  word text := '';
  value int;
begin
  if said ~* '^[0-9a-f]{32}$' then
    bits := decode(said, 'hex');
    for i in 0..25 loop
      value := 0;
      for j in 0..4 loop
        value := value * 2 + case when i * 5 + j < 2 then 0
          else (get_byte(bits, (i * 5 + j - 2) / 8) >> (7 - (i * 5 + j - 2) % 8)) & 1 end;
      end loop;
      word := word || substr(alphabet, value + 1, 1);
    end loop;
  elsif said ~* '^[0-9a-z]{26}$' then
    word := upper(said);
  elsif said ~* '^(hb|op|ch|wh|fl)_[0-9a-z]{26}$' then
    return array[lower(left(said, 3)) || upper(substr(said, 4))];
  else
    return array[said];
  end if;
  return array(select s || '_' || word from unnest(surfaces) s);
end $$;
comment on function agent_trace_forms is
  'The ids that a trace may be stored under: one for a whole id, one for each surface for a ULID alone or the 32 hex digits of tracing tools.';

create function agent_words(p_from timestamptz, p_to timestamptz) returns text language sql immutable as $$
  select case when s is null then 'an unknown time' when s < 0.0005 then '0 ms' when s < 1 then round(s * 1000) || ' ms'
              when s < 60 then round(s, 1) || ' s' when s < 3600 then floor(s / 60) || ' min ' || floor(s % 60) || ' s'
              when s < 86400 then floor(s / 3600) || ' h ' || floor(s % 3600 / 60) || ' min'
              else floor(s / 86400) || ' d ' || floor(s % 86400 / 3600) || ' h' end
    from (select case when isfinite(p_from) and isfinite(p_to) then extract(epoch from p_to - p_from) end as s) t
   where p_from is not null and p_to is not null
$$;
comment on function agent_words is 'The time between two moments as people write it: 250 ms, 3.2 s, 4 min 10 s, 2 h 5 min, 3 d 4 h.';

create type agent_reason as (
  at timestamptz, kind text, what text, from_ref text, to_ref text, trace_id text, execution_id uuid, detail jsonb
);

create function agent_cause_of_execution(p_id uuid) returns agent_reason
language plpgsql stable as $$
declare
  x agent_executions;
  p record;
  me constant text := 'execution ' || p_id;
begin
  select e.* into x from agent_executions e where e.id = p_id;
  if x.id is null then
    return null;
  elsif x.forked_from is not null then
    select e.trace_id, e.flow, e.status into p from agent_executions e where e.id = x.forked_from;
    return (x.created_at, 'fork', format('%s was forked from one that is %s%s', x.flow, coalesce(p.status, 'no longer kept'),
              ', at step ' || x.forked_step), 'execution ' || x.forked_from, me, p.trace_id, x.forked_from,
            jsonb_strip_nulls(jsonb_build_object('step', x.forked_step, 'status', p.status, 'flow', x.flow)))::agent_reason;
  elsif x.parent_id is not null then
    select e.trace_id, e.flow into p from agent_executions e where e.id = x.parent_id;
    return (x.created_at, 'child', format('%s started %s', coalesce(p.flow, 'an execution that is no longer kept'), x.flow),
            'execution ' || x.parent_id, me, p.trace_id, x.parent_id, jsonb_build_object('flow', x.flow, 'awaited', x.awaited))::agent_reason;
  elsif x.flow = 'automation' and agent_uuid(x.input ->> 'run_id') is not null then
    select a.name, a.max_attempts, l.attempt into p
      from agent_automation_runs r join agent_automations a on a.id = r.automation_id
      left join lateral (
        select count(*) as attempt from agent_links o, agent_links m
         where m.effect = me and m.kind = 'ran' and o.cause = m.cause and o.kind = 'ran' and o.at <= m.at) l on true
     where r.id = agent_uuid(x.input ->> 'run_id');
    return (x.created_at, 'automation', format('automation %s ran%s', coalesce(p.name, '(no longer kept)'),
              case when p.attempt > 1 then format(', attempt %s of %s', p.attempt, p.max_attempts) else '' end), 'run ' || (x.input ->> 'run_id'), me, null, null,
            jsonb_strip_nulls(jsonb_build_object('automation', p.name, 'attempt', nullif(p.attempt, 0), 'of', p.max_attempts)))::agent_reason;
  elsif x.flow = 'webhook' and agent_uuid(split_part(x.dedupe_key, ' ', 2)) is not null and split_part(x.dedupe_key, ' ', 1) = 'webhook' then
    select d.endpoint, d.delivery_id, d.received_at, d.attempts, d.repeats into p
      from agent_webhook_deliveries d where d.id = agent_uuid(split_part(x.dedupe_key, ' ', 2));
    return (coalesce(p.received_at, x.created_at), 'webhook', format('delivery %s came to endpoint %s%s', coalesce(p.delivery_id, '(no longer kept)'), p.endpoint,
              case when split_part(x.dedupe_key, ' ', 3) <> '0' then ', and an admin had it handled again' else '' end),
            'delivery ' || split_part(x.dedupe_key, ' ', 2), me, null, null,
            jsonb_build_object('endpoint', p.endpoint, 'delivery_id', p.delivery_id, 'attempts', p.attempts, 'repeats', p.repeats,
                               'replay', split_part(x.dedupe_key, ' ', 3)))::agent_reason;
  end if;
  select s.name, substr(x.dedupe_key, length(s.name) + 2) as due into p from agent_schedules s
   where s.name = regexp_replace(x.dedupe_key, ' [0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.]+Z$', '') and s.flow = x.flow and s.name <> x.dedupe_key;
  if found then
    return (x.created_at, 'schedule', format('schedule %s was due at %s', p.name, p.due), 'schedule ' || p.name, me, null, null,
            jsonb_build_object('due', p.due))::agent_reason;
  end if;
  return case when x.surface = 'chat'
    then (x.created_at, 'message', format('somebody wrote in thread %s', x.thread_id), 'thread ' || coalesce(x.thread_id, ''), me, null, null, '{}')::agent_reason
    when x.surface = 'operate' then (x.created_at, 'admin', 'an admin asked for it', 'admin', me, null, null, '{}')::agent_reason
    else (x.created_at, 'outside', format('%s was started from outside: the API, the command line or code', x.flow), 'outside', me, null, null,
          jsonb_strip_nulls(jsonb_build_object('key', x.dedupe_key)))::agent_reason end;
end $$;

create function agent_cause_of_run(p_id uuid) returns agent_reason
language plpgsql stable as $$
declare
  r record;
  v record;
  asker record;
  me constant text := 'run ' || p_id;
begin
  select n.cause, n.event_id, n.created_at, n.scheduled_for, n.trace_id, a.name into r
    from agent_automation_runs n join agent_automations a on a.id = n.automation_id where n.id = p_id;
  if not found then
    return null;
  elsif r.cause = 'event' then
    select e.event, e.key into v from agent_events e where e.id = r.event_id;
    return (r.created_at, 'event', format('event %s %s started automation %s', v.event, v.key, r.name), 'event ' || r.event_id, me, null, null,
            jsonb_build_object('event', v.event, 'key', v.key, 'automation', r.name))::agent_reason;
  elsif r.cause = 'cron' then
    return (r.created_at, 'schedule', format('automation %s was due at %s', r.name, to_char(r.scheduled_for at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"')),
            'schedule of ' || r.name, me, null, null, jsonb_build_object('automation', r.name, 'due', r.scheduled_for))::agent_reason;
  elsif r.cause = 'signal' then
    return (r.created_at, 'signal', format('the signal of automation %s became true', r.name), 'signal of ' || r.name, me, null, null,
            jsonb_build_object('automation', r.name))::agent_reason;
  end if;
  select x.id, x.trace_id, x.flow into asker from agent_links l join agent_executions x on x.id = agent_uuid(substr(l.cause, 11))
   where l.effect = me and l.kind = 'started' limit 1;
  if found then
    return (r.created_at, 'asked', format('%s had automation %s run', asker.flow, r.name), 'execution ' || asker.id, me, asker.trace_id, asker.id,
            jsonb_build_object('automation', r.name))::agent_reason;
  end if;
  return (r.created_at, 'admin', format('an admin had automation %s run', r.name), 'admin', me, null, null,
          jsonb_build_object('automation', r.name))::agent_reason;
end $$;

create function agent_cause_of_event(p_id uuid) returns agent_reason
language plpgsql stable as $$
declare
  v record;
  x record;
  raiser text;
  me constant text := 'event ' || p_id;
begin
  select e.event, e.key, e.external_id, e.execution_id, e.created_at, agent_uuid(e.data ->> 'message_id') as message into v
    from agent_events e where e.id = p_id;
  if not found then
    return null;
  elsif v.execution_id is not null then
    select e.trace_id, e.flow, e.status into x from agent_executions e where e.id = v.execution_id;
    return (v.created_at, 'end', format('%s ended %s', coalesce(x.flow, 'an execution that is no longer kept'), x.status), 'execution ' || v.execution_id, me,
            x.trace_id, v.execution_id, jsonb_build_object('event', v.event, 'status', x.status))::agent_reason;
  end if;
  select l.cause into raiser from agent_links l where l.effect = me and l.kind = 'raised' limit 1;
  if raiser like 'execution %' then
    select e.id, e.trace_id, e.flow into x from agent_executions e where e.id = agent_uuid(substr(raiser, 11));
    return (v.created_at, 'raised', format('%s raised event %s %s', coalesce(x.flow, 'an execution that is no longer kept'), v.event, v.key), raiser, me,
            x.trace_id, x.id, jsonb_build_object('event', v.event, 'key', v.key))::agent_reason;
  elsif raiser is not null then
    return (v.created_at, 'raised', format('%s raised event %s %s', raiser, v.event, v.key), raiser, me, substr(raiser, 7), null,
            jsonb_build_object('event', v.event, 'key', v.key))::agent_reason;
  elsif v.external_id like 'approval %' then
    return (v.created_at, 'approval', format('an approval was decided'), v.external_id, me, null, null, '{}')::agent_reason;
  elsif v.message is not null then
    return (v.created_at, 'message', format('somebody wrote in thread %s', v.key), 'thread ' || v.key, me, null, null, '{}')::agent_reason;
  end if;
  return (v.created_at, 'outside', format('event %s %s came from outside', v.event, v.key), 'outside', me, null, null,
          jsonb_build_object('event', v.event, 'key', v.key))::agent_reason;
end $$;

create function agent_cause(p_ref text) returns agent_reason
language plpgsql stable as $$
declare
  id constant uuid := agent_uuid(split_part(p_ref, ' ', 2));
begin
  return case split_part(p_ref, ' ', 1)
    when 'execution' then agent_cause_of_execution(id) when 'run' then agent_cause_of_run(id) when 'event' then agent_cause_of_event(id) end;
end $$;
comment on function agent_cause is 'What caused an execution, a run of an automation or an event, given as why() names it; null when nothing is behind it.';

create function agent_why_because(p_trace text, p_runs uuid[], p_most int) returns setof agent_reason
language plpgsql stable as $$
declare
  root uuid;
  ref text;
  c agent_reason;
  chain agent_reason[];
  told text[] := '{}';
  inside boolean;
  hops constant int := 32;
begin
  for root in
    select x.id from agent_executions x left join agent_executions p on p.id = x.parent_id
     where x.id = any (p_runs) and (x.parent_id is null or p.trace_id is distinct from p_trace) order by x.id limit p_most
  loop
    chain := '{}';
    inside := false;
    ref := 'execution ' || root;
    for i in 1 .. hops + 1 loop
      c := agent_cause(ref);
      exit when c.from_ref is null;
      if i > hops or exists (select from unnest(chain) e where e.to_ref = c.from_ref) then
        chain := (c.at, 'more', '… and what was before that', '', ref, null, null, jsonb_build_object('cycle', i <= hops))::agent_reason || chain;
        exit;
      end if;
      -- What the trace caused itself is told among what came of it.
      inside := c.trace_id = p_trace;
      exit when inside or c.to_ref = any (told);
      chain := c || chain;
      ref := c.from_ref;
    end loop;
    continue when inside;
    return query select e.* from unnest(chain) e;
    told := told || array(select e.to_ref from unnest(chain) e);
  end loop;
  -- Leave for a call that another execution had asked for.
  return query
  select l.at, 'allowed', format('an approval allowed %s a call, asked for by %s', x.flow, coalesce(o.flow, 'somebody else')), l.cause, l.effect,
         coalesce(o.trace_id, a.trace_id), a.execution_id, jsonb_build_object('skill', a.skill_name, 'decided_by', a.decided_by)
    from agent_links l
    join agent_executions x on x.id = agent_uuid(substr(l.effect, 11))
    left join lateral (select n.* from agent_approvals n where n.id = agent_uuid(substr(l.cause, 10)) limit 1) a on true
    left join agent_executions o on o.id = a.execution_id
   where l.effect = any (select 'execution ' || r from unnest(p_runs) r) and l.kind = 'allowed'
   order by l.at, l.cause limit p_most;
end $$;

create function agent_why_runs(p_trace text, p_runs uuid[], p_most int) returns setof agent_reason
language plpgsql stable as $$
declare
  l record;
  c agent_reason;
begin
  return query
  select x.created_at, case when p.id is null then 'run' else 'child' end,
         x.flow || case x.status
           when 'pending' then ' waits to be started'
           when 'running' then case when x.claimed_by is null then ' is ready to go on' else ' runs' end
           when 'waiting' then format(' waits for %s %s, since %s', x.waiting_for, case when x.waiting_for = 'delay' then '' else x.waiting_key end,
                                      agent_words(x.updated_at, clock_timestamp()))
           else format(' %s after %s', x.status, agent_words(x.created_at, x.completed_at)) end
         || case x.status
           when 'completed' then coalesce(': ' || nullif(left(x.result_summary, 200), ''), '')
           when 'cancelled' then format(', by %s: %s', coalesce(nullif(x.cancelled_by, ''), 'somebody'), left(x.cancel_reason, 300))
           when 'failed' then coalesce(' in step ' || x.failed_step, '') || coalesce(': ' || left(x.error_message, 300), '')
           when 'timeout' then coalesce(' in step ' || x.failed_step, '') || coalesce(': ' || left(x.error_message, 300), '')
           else '' end,
         case when p.id is null then '' else 'execution ' || p.id end, 'execution ' || x.id, x.trace_id, x.id,
         jsonb_strip_nulls(jsonb_build_object('flow', x.flow, 'status', x.status, 'agent', x.agent, 'surface', x.surface, 'claim', x.claim, 'waits', x.wait_number,
           'thread', x.thread_id, 'completed_at', x.completed_at))
    from agent_executions x left join agent_executions p on p.id = x.parent_id and p.trace_id = p_trace
   where x.id = any (p_runs) order by x.id limit p_most;
  -- Automations that an execution carried out beside what it is for, as the heartbeat does.
  for l in
    select k.at, k.cause, k.effect, x.id, x.flow, x.trace_id from agent_links k join agent_executions x on x.id = agent_uuid(substr(k.effect, 11))
     where k.effect = any (select 'execution ' || r from unnest(p_runs) r) and k.kind = 'ran' and x.flow <> 'automation' order by k.at, k.cause limit p_most
  loop
    c := agent_cause(l.cause);
    return next (l.at, 'ran', format('%s carried out a run: %s', l.flow, coalesce(c.what, 'its automation is no longer kept')), l.cause, l.effect,
                 coalesce((agent_cause(c.from_ref)).trace_id, l.trace_id), l.id, jsonb_strip_nulls(jsonb_build_object('because', c.from_ref)))::agent_reason;
  end loop;
end $$;

create function agent_why_waits(p_runs uuid[], p_most int) returns setof agent_reason
language plpgsql stable as $$
declare
  w record;
  c agent_reason;
  h record;
  mine text;
begin
  for w in
    select t.*, x.flow, x.trace_id from (
      (select k.execution_id, k.waited_for as kind, k.waited_key as key, k.waited_since as since, k.created_at as until, k.step,
              agent_uuid(k.output ->> 'event_id') as event, coalesce(k.output ->> 'timed_out' = 'true', false) as late
         from (select a.execution_id, a.waited_for, a.waited_key, a.waited_since, a.created_at, a.step, a.output from agent_checkpoints a
                where a.execution_id = any (p_runs) limit 5000) k
        where k.waited_for is not null order by k.waited_since, k.step limit p_most)
      union all
      (select e.id, e.waiting_for, e.waiting_key, e.updated_at, null, e.waiting_step, null, false
         from agent_executions e where e.id = any (p_runs) and (e.status = 'waiting') is true order by e.id limit p_most)) t
      join agent_executions x on x.id = t.execution_id
     order by t.since, t.step limit p_most
  loop
    mine := 'execution ' || w.execution_id;
    c := null;
    if w.event is not null and w.kind not in ('agent', 'approval') then
      c := agent_cause_of_event(w.event);
    elsif w.kind = 'agent' then
      select e.trace_id, e.id, e.flow as what into c.trace_id, c.execution_id, c.what from agent_executions e where e.id = agent_uuid(w.key);
    elsif w.kind = 'approval' and w.until is not null then
      select format('%s it', case when a.decided_by = '' then 'nobody decided' else a.decided_by || ' ' || a.status end) into c.what
        from agent_approvals a where a.id = agent_uuid(w.key);
    end if;
    return next (w.since, case when w.until is null then 'waits' when w.late then 'timed out' else 'waited' end,
      w.flow || case when w.until is null then format(' has waited %s for ', agent_words(w.since, clock_timestamp()))
                     else format(' waited %s for ', agent_words(w.since, w.until)) end
             || case w.kind when 'delay' then 'its time' when 'agent' then 'the end of ' || coalesce(c.what, w.key) when 'approval' then 'leave'
                  when 'response' then 'an answer in thread ' || w.key when 'lane' then 'lane ' || w.key when 'event' then 'event ' || w.key
                  else 'a ' || w.kind end
             || case when w.late then ', in vain' when w.until is not null and w.kind <> 'agent' then coalesce(': ' || c.what, '') else '' end,
      case when w.until is null then '' when w.late or w.kind = 'delay' then 'timer' when w.kind = 'agent' then 'execution ' || w.key
           when w.kind in ('approval', 'lane') then w.kind || ' ' || w.key else 'event ' || w.event end,
      mine, coalesce(c.trace_id, w.trace_id), w.execution_id,
      jsonb_strip_nulls(jsonb_build_object('for', w.kind, 'key', w.key, 'step', w.step, 'until', w.until, 'raised_by', c.from_ref)))::agent_reason;
    if w.kind = 'lane' then
      -- Who had the lane meanwhile: holds of a lane follow one another, so those that end after the wait began are looked at until one began after it.
      for h in
        select o.*, x.flow, x.trace_id from (
          (select k.execution_id, k.held_from, k.held_until from agent_lane_holds k
            where k.lane = w.key and k.held_until > w.since order by k.held_until limit 50)
          union all
          select l.execution_id, l.locked_at, case when l.expires_at <= clock_timestamp() then l.expires_at end from agent_locks l
           where l.lane = w.key and l.execution_id is not null) o
          left join agent_executions x on x.id = o.execution_id
         where o.execution_id <> w.execution_id and o.held_from < coalesce(w.until, 'infinity') and coalesce(o.held_until, 'infinity') > w.since
         order by o.held_from limit 20
      loop
        return next (h.held_from, 'blocked', format('%s had lane %s meanwhile%s', coalesce(h.flow, 'an execution that is no longer kept'), w.key,
            case when h.held_until is null then ', and has it' else ', for ' || agent_words(h.held_from, h.held_until) end),
          'execution ' || h.execution_id, mine, h.trace_id, h.execution_id,
          jsonb_strip_nulls(jsonb_build_object('lane', w.key, 'from', h.held_from, 'until', h.held_until)))::agent_reason;
      end loop;
    end if;
  end loop;
end $$;

create function agent_why_lanes(p_runs uuid[], p_most int) returns setof agent_reason
language plpgsql stable as $$
begin
  return query
  select h.held_from, case when h.held_until is null then 'holds' else 'held' end,
         format('%s %s lane %s %s', x.flow, case when h.held_until is null then 'holds' else 'held' end, h.lane,
                case h.ended when 'released' then 'for ' || h.long when 'ended' then 'for ' || h.long || ', until it ended' when 'lent' then 'for ' || h.long || ', then lent it'
                     when 'given back' then 'for ' || h.long || ', then gave it back' when 'handed back' then 'for ' || h.long || ', until its process shut down'
                     when 'expired' then 'for ' || h.long || ', then its lease expired' when 'broken' then 'for ' || h.long || ', then an admin broke it'
                     else 'since ' || h.long end),
         'execution ' || h.execution_id, 'lane ' || h.lane, x.trace_id, h.execution_id,
         jsonb_strip_nulls(jsonb_build_object('until', h.held_until, 'ended', h.ended, 'next', nullif(h.successor, ''), 'fencing_token', h.fencing_token))
    from (
      (select k.lane, k.execution_id, k.fencing_token, k.held_from, k.held_until, k.ended, k.successor, agent_words(k.held_from, k.held_until) as long
         from agent_lane_holds k where k.execution_id = any (p_runs) order by k.held_from, k.lane limit p_most)
      union all
      (select l.lane, l.execution_id, l.fencing_token, l.locked_at, o.until, case when o.until is not null then 'expired' end, '',
              agent_words(l.locked_at, coalesce(o.until, clock_timestamp()))
         from agent_locks l cross join lateral (select case when l.expires_at <= clock_timestamp() then l.expires_at end as until) o
        where l.execution_id = any (p_runs) order by l.locked_at limit p_most)) h
    join agent_executions x on x.id = h.execution_id
   order by h.held_from, h.lane limit p_most;
end $$;

create function agent_why_lost(p_runs uuid[], p_most int) returns setof agent_reason
language plpgsql stable as $$
begin
  return query
  select c.at, 'lost', format('%s lost its worker %s under claim %s%s%s', x.flow, coalesce(nullif(c.worker_name, ''), c.worker::text), c.claim,
           case c.how when 'handed back' then ', which shut down and handed it back' when 'no progress' then ', which got nowhere' else ', whose lease expired' end,
           case when x.claim > c.claim + 1 then '; it went on elsewhere' when x.status in ('pending', 'running') then '; it is ready to go on' else '' end),
         'worker ' || c.worker, 'execution ' || c.execution_id, x.trace_id, c.execution_id,
         jsonb_build_object('claim', c.claim, 'how', c.how, 'worker', c.worker_name)
    from agent_claims_lost c join agent_executions x on x.id = c.execution_id
   where c.execution_id = any (p_runs) order by c.at, c.claim limit p_most;
end $$;

-- What the log says of the trace: writes that were refused, calls of which nobody knows the end, and what the models cost.
create function agent_why_log(p_trace text, p_most int, p_rows int) returns table (part text, reason agent_reason)
language plpgsql stable as $$
begin
  return query
  with log as materialized (
    select a.id, a.created_at, a.execution_id, a.kind, a.skill_name, a.status, a.error_class, a.error_message, a.step, a.model, a.token_usage, a.cost_usd,
           case when a.error_class = 'stale' then a.input end as input
      from agent_activity a where a.trace_id = p_trace order by a.created_at limit p_rows),
  wrong as (
    select 'trouble' as part, 1 as rank, l.created_at as at,
           (l.created_at,
            case when l.error_class = 'stale' then 'stale' else 'unknown' end,
            case when l.error_class = 'stale'
                 then format('a write under claim %s was refused: %s in step %s', l.input ->> 'claim', l.input ->> 'rejected_write', l.input ->> 'step')
                 else format('nobody knows whether %s took effect: %s', l.skill_name, left(l.error_message, 300)) end,
            case when l.execution_id is null then 'trace ' || p_trace else 'execution ' || l.execution_id end,
            'step ' || case when l.error_class = 'stale' then coalesce(l.input ->> 'step', '') else l.step end,
            p_trace, l.execution_id, jsonb_strip_nulls(jsonb_build_object('activity', l.id, 'skill', coalesce(l.input ->> 'rejected_write', l.skill_name),
              'claim', l.input -> 'claim')))::agent_reason as reason
      from log l where l.error_class = 'stale' and l.skill_name = 'stale_write' or l.status = 'unknown'
     order by l.created_at, l.id limit p_most),
  models as (
    select m.model, count(*) as calls, min(m.created_at) as at, sum(agent_tokens(m.token_usage, 'prompt_tokens')) as prompt,
           sum(agent_tokens(m.token_usage, 'completion_tokens')) as completion, sum(agent_tokens(m.token_usage, 'total_tokens')) as tokens, sum(nullif(m.cost_usd, 'NaN')) as usd
      from log m where m.kind = 'model' group by m.model),
  spent as (
    select 'spend', 2, m.at,
           (m.at, 'spend', format('%s: %s, %s tokens, $%s', coalesce(nullif(m.model, ''), 'a model without a name'),
              case when m.calls = 1 then '1 call' else m.calls || ' calls' end, to_char(m.tokens, 'FM999,999,999,999,990'), m.usd),
            'trace ' || p_trace, 'model ' || m.model, p_trace, null, jsonb_build_object('calls', m.calls, 'prompt_tokens', m.prompt,
              'completion_tokens', m.completion, 'tokens', m.tokens, 'cost_usd', m.usd))::agent_reason
      from models m order by m.usd desc, m.tokens desc, m.model limit p_most),
  beyond as (
    select 'spend', 3, null::timestamptz,
           (null, 'more', format('… and more than %s actions, which were not looked through', to_char(p_rows, 'FM999,999,990')), '', '', p_trace, null,
            '{}')::agent_reason
      from log having count(*) >= p_rows)
  select u.part, u.reason from (select * from wrong union all select * from spent union all select * from beyond) u order by u.rank, u.at, (u.reason).to_ref;
end $$;

create function agent_why_effects(p_trace text, p_runs uuid[], p_most int) returns setof agent_reason
language plpgsql stable as $$
declare
  mine constant text[] := array['trace ' || p_trace] || array(select 'execution ' || r from unnest(p_runs) r);
  events uuid[];                    -- that the trace raised
  ends uuid[];                      -- of its executions
  made uuid[];                      -- runs of automations that it started
begin
  events := array(select agent_uuid(substr(l.effect, 7)) from agent_links l where l.cause = any (mine) and l.kind = 'raised' order by l.at, l.effect limit p_most);
  ends := array(select v.id from agent_events v where v.external_id = any (select 'completed ' || r from unnest(p_runs) r) limit 1000);
  return query
  select v.created_at, 'raised', format('%s raised event %s %s', coalesce(x.flow, 'it'), v.event, v.key), l.cause, l.effect, p_trace, x.id,
         jsonb_strip_nulls(jsonb_build_object('event', v.event, 'key', v.key, 'taken', v.consumed_by is not null))
    from agent_events v join agent_links l on l.effect = 'event ' || v.id and l.kind = 'raised' and l.cause = any (mine)
    left join agent_executions x on x.id = agent_uuid(substr(l.cause, 11))
   where v.id = any (events);
  -- Executions of other traces that an event of this one, or the end of one of its executions, resumed.
  return query
  select k.created_at, 'resumed', format('%s went on in another trace', x.flow),
         case when v.execution_id is null then 'event ' || v.id else 'execution ' || v.execution_id end, 'execution ' || x.id, x.trace_id, x.id,
         jsonb_build_object('flow', x.flow, 'step', k.step)
    from agent_events v
   cross join lateral (select v.consumed_by as id where v.consumed_by is not null
                       union select agent_uuid(substr(l.effect, 11)) from agent_links l where l.cause = 'event ' || v.id and l.kind = 'woke') t
    join agent_executions x on x.id = t.id and x.trace_id <> p_trace
    join lateral (select c.step, c.created_at
                    from (select a.step, a.created_at, a.output, a.waited_for from agent_checkpoints a where a.execution_id = x.id limit 5000) c
                   where c.waited_for is not null and c.output ->> 'event_id' = v.id::text limit p_most) k on true
   where v.id = any (events || ends) limit p_most + 1;
  -- Runs of automations: by its events, by its ends, and those that it asked for.
  made := array(select agent_uuid(substr(l.effect, 5)) from agent_links l
                 where l.cause = any (select 'event ' || e from unnest(events || ends) e union all select m from unnest(mine) m) and l.kind = 'started'
                 order by l.at, l.effect limit p_most + 1);
  return query
  select r.created_at, 'started', format('automation %s has a run, which is %s', a.name, r.status),
         case when v.id is null then l.cause when v.execution_id is null then 'event ' || v.id else 'execution ' || v.execution_id end, 'run ' || r.id,
         nullif(r.trace_id, ''), v.execution_id,
         jsonb_strip_nulls(jsonb_build_object('automation', a.name, 'status', r.status, 'error', left(r.error_message, 300)))
    from unnest(made) m (id)
   cross join lateral (select n.* from agent_automation_runs n where n.id = m.id limit 1) r
   cross join lateral (select n.name from agent_automations n where n.id = r.automation_id limit 1) a
   cross join lateral (select n.cause from agent_links n where n.effect = 'run ' || r.id and n.kind = 'started' limit 1) l
    left join lateral (select n.id, n.execution_id from agent_events n where n.id = r.event_id limit 1) v on true;
  return query
  select l.at, 'ran', format('the run was carried out by %s, which is %s', x.flow, x.status), l.cause, l.effect, x.trace_id, x.id,
         jsonb_build_object('status', x.status)
    from agent_links l join agent_executions x on x.id = agent_uuid(substr(l.effect, 11))
   where l.cause = any (select 'run ' || m from unnest(made) m) and l.kind = 'ran' order by l.at limit p_most + 1;
  -- Executions of other traces that begin with it.
  return query
  (select x.created_at, 'forked', format('%s was forked, and is %s', x.flow, x.status), 'execution ' || x.forked_from, 'execution ' || x.id, x.trace_id, x.id,
          jsonb_strip_nulls(jsonb_build_object('step', x.forked_step, 'status', x.status))
     from agent_executions x where x.forked_from = any (p_runs) limit p_most + 1)
  union all
  (select x.created_at, 'child', format('%s was started, and is %s', x.flow, x.status), 'execution ' || x.parent_id, 'execution ' || x.id, x.trace_id, x.id,
          jsonb_build_object('status', x.status)
     from agent_executions x where x.parent_id = any (p_runs) and x.trace_id <> p_trace limit p_most + 1);
  -- What it said, told and asked for.
  return query
  (select min(m.created_at), 'said', format('%s said %s in thread %s', x.flow, case when count(*) = 1 then 'a message' else count(*) || ' messages' end, m.thread_id),
          'execution ' || x.id, 'thread ' || m.thread_id, p_trace, x.id, jsonb_build_object('messages', count(*), 'failed', count(*) filter (where m.status = 'failed'))
     from (select e.execution_id, e.thread_id, e.created_at, e.status from agent_messages e where e.execution_id = any (p_runs) and e.role = 'assistant' limit 5000) m
     join agent_executions x on x.id = m.execution_id group by x.id, m.thread_id)
  union all
  (select o.created_at, 'told', format('target %s was told %s: %s%s', t.name, o.event, o.status, case when o.attempts > 1 then format(' after %s attempts', o.attempts) else '' end),
          l.cause, l.effect, p_trace, agent_uuid(substr(l.cause, 11)), jsonb_build_object('target', t.name, 'event', o.event, 'status', o.status, 'attempts', o.attempts)
     from (select k.cause, k.effect from agent_links k where k.cause = any (mine) and k.kind = 'told' order by k.at, k.effect limit p_most + 1) l
    cross join lateral (select n.* from agent_webhook_outbox n where n.id = agent_uuid(substr(l.effect, 10)) limit 1) o
    cross join lateral (select n.name from agent_webhook_targets n where n.id = o.target_id limit 1) t);
  return query
  (select a.created_at, 'asked', format('leave for %s: %s%s', a.skill_name, a.status, case when a.decided_by <> '' then ' by ' || a.decided_by else '' end),
          coalesce('execution ' || a.execution_id, 'trace ' || p_trace), 'approval ' || a.id, p_trace, a.execution_id,
          jsonb_strip_nulls(jsonb_build_object('skill', a.skill_name, 'status', a.status, 'decided_by', nullif(a.decided_by, ''), 'decided_at', a.decided_at))
     from agent_approvals a where a.trace_id = p_trace order by a.id limit p_most + 1)
  union all
  (select l.at, 'allowed', format('the approval allowed %s a call in another trace', x.flow), l.cause, l.effect, x.trace_id, x.id, '{}'
     from (select a.id from agent_approvals a where a.trace_id = p_trace order by a.id limit p_most) a
     join agent_links l on l.cause = 'approval ' || a.id and l.kind = 'allowed'
     join agent_executions x on x.id = agent_uuid(substr(l.effect, 11)) and x.trace_id <> p_trace)
  union all
  (select r.created_at, 'asked', format('people were asked for %s: %s', r.kind, r.status), 'execution ' || r.execution_id, 'request ' || r.id, p_trace, r.execution_id,
          jsonb_build_object('kind', r.kind, 'status', r.status)
     from agent_requests r where r.execution_id = any (p_runs) order by r.created_at limit p_most + 1);
end $$;

create function why(trace text, most int default 100)
returns table (seq int, part text, at timestamptz, kind text, what text, from_ref text, to_ref text, trace_id text, execution_id uuid, detail jsonb)
language plpgsql stable
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set plan_cache_mode = force_generic_plan set jit = off as $$
#variable_conflict use_column
declare
  forms constant text[] := agent_trace_forms(trace);
  most_ constant int := greatest(least(coalesce(most, 100), 1000), 1);
  scan constant int := 1000;
  mine text;
  runs uuid[];
  n bigint;
  x record;
begin
  mine := coalesce((select e.trace_id from agent_executions e where e.trace_id = any (forms) limit 1),
                   (select a.trace_id from agent_activity a where a.trace_id = any (forms) limit 1),
                   (select substr(l.cause, 7) from agent_links l where l.cause = any (select 'trace ' || f from unnest(forms) f) limit 1));
  if mine is null then
    return;
  end if;
  runs := array(select e.id from agent_executions e where e.trace_id = mine order by e.id limit scan);
  n := cardinality(runs);
  if n = scan then
    select count(*) into n from (select from agent_executions e where e.trace_id = mine limit 100000) t;
  end if;
  select e.flow, e.status, e.surface, e.created_at, e.completed_at into x from agent_executions e where e.id = runs[1];
  seq := 0;
  for part, at, kind, what, from_ref, to_ref, trace_id, execution_id, detail in
    with log as materialized (select l.part, l.reason from agent_why_log(mine, most_ + 1, 10000) l),
    told as (
      select 0 as rank, 'trace' as part, r.*, 1 as place, 1 as all_ from (
        select coalesce(x.created_at, (select min(b.created_at) from (select a.created_at from agent_activity a where a.trace_id = mine order by a.created_at limit 1) b)) as at,
               'trace' as kind,
               case when x.flow is null then 'what was done without an execution'
                    else format('%s %s%s%s', x.flow, case when x.completed_at is null then 'is ' else '' end || x.status,
                                coalesce(' after ' || agent_words(x.created_at, x.completed_at), ''),
                                case when n > 1 then format('; %s executions', case when n = 100000 then '100,000 or more' else to_char(n, 'FM999,990') end) else '' end) end as what,
               ''::text as from_ref, 'trace ' || mine as to_ref, mine as trace_id, runs[1] as execution_id,
               jsonb_strip_nulls(jsonb_build_object('surface', x.surface, 'flow', x.flow, 'status', x.status, 'executions', n, 'completed_at', x.completed_at)) as detail) r
      union all
      select 1, 'because', r.*, b.n, count(*) over () from agent_why_because(mine, runs, most_) with ordinality b (at, kind, what, from_ref, to_ref, trace_id, execution_id, detail, n)
       cross join lateral (select b.at, b.kind, b.what, b.from_ref, b.to_ref, b.trace_id, b.execution_id, b.detail) r
      union all
      select 2, 'did', r.*, row_number() over (order by r.at, r.to_ref, r.kind), count(*) over () + greatest(n - most_ - 1, 0) from agent_why_runs(mine, runs, most_ + 1) r
      union all
      select 3, 'waits', r.*, b.n, count(*) over () from agent_why_waits(runs, most_ + 1) with ordinality b (at, kind, what, from_ref, to_ref, trace_id, execution_id, detail, n)
       cross join lateral (select b.at, b.kind, b.what, b.from_ref, b.to_ref, b.trace_id, b.execution_id, b.detail) r
      union all
      select 4, 'lanes', r.*, row_number() over (order by r.at, r.to_ref), count(*) over () from agent_why_lanes(runs, most_ + 1) r
      union all
      select 5, 'trouble', r.*, row_number() over (order by r.at, r.to_ref), count(*) over () from (
        select * from agent_why_lost(runs, most_ + 1)
        union all select (l.reason).* from log l where l.part = 'trouble') r
      union all
      select 6, 'led to', r.*, row_number() over (order by r.at, r.kind, r.to_ref), count(*) over () from agent_why_effects(mine, runs, most_) r
      union all
      select 7, 'spend', r.*, row_number() over (order by r.at nulls last, r.to_ref), count(*) over ()
        from (select (l.reason).* from log l where l.part = 'spend') r)
    select t.part, case when isfinite(t.at) then t.at end, case when t.place <= most_ then t.kind else 'more' end,
           case when t.place <= most_ then coalesce(left(t.what, 1000), '') when t.part = 'did' then '… and ' || to_char(t.all_ - most_, 'FM999,999,990') || ' more executions'
                else '… and more than ' || to_char(most_, 'FM999,990') end,
           case when t.place <= most_ then coalesce(left(t.from_ref, 300), '') else '' end,
           case when t.place <= most_ then coalesce(left(t.to_ref, 300), '') else '' end, coalesce(t.trace_id, mine), t.execution_id,
           case when t.place <= most_ then coalesce(t.detail, '{}') else '{}' end
      from told t where t.place <= most_ + 1 order by t.rank, t.place
  loop
    seq := seq + 1;
    return next;
  end loop;
end $$;
comment on function why is
  'Why a trace is what it is, to be read from top to bottom: because (what caused it, from the first cause down), did (its executions), waits and '
  'what ended them, lanes, trouble (lost workers, refused writes, calls of which nobody knows the end), led to (what it caused elsewhere), spend. '
  'trace is the id in any form. from_ref caused to_ref; trace_id and execution_id are those of the other end, where there is one. Of each part at '
  'most so many rows; a row of kind more says what was left out. No rows: there is no such trace.';
