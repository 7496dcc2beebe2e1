-- What a change of an execution costs: fewer things that PostgreSQL works out anew for each statement, one look at an end instead of
-- a statement for each thing that it may leave to be done, and an index that is always taken to find who waits for what.

-- The row -------------------------------------------------------------------------------------------
--
-- PostgreSQL reads every check constraint, and every condition of a trigger, from the catalogue again in each statement that
-- writes a row: with twelve and ten of them that took longer than to write it. What does not change when an execution changes
-- its status is checked where it is set, under the same names; the status itself is the guard's, which knows every legal one.

create function agent_executions_valid() returns trigger language plpgsql as $$
declare
  bad text := case
    when new.trace_id = '' then 'trace_id'
    when new.surface not in ('heartbeat', 'operate', 'chat', 'webhook', 'flow') then 'surface'
    when new.flow = '' then 'flow'
    when new.queue not in ('background', 'interactive') then 'queue'
    when new.priority not between 1 and 4 then 'priority'
    when new.max_attempts <= 0 then 'max_attempts'
    when new.on_lost not in ('resume', 'fail', 'hand_on') then 'on_lost'
    when new.progress_seconds < 0 then 'progress_seconds'
    when new.waiting_for not in ('response', 'agent', 'document', 'signature', 'test', 'event', 'delay', 'approval', 'lane') then 'waiting_for'
    when new.result_type not in ('success', 'failure', 'timeout', 'cancelled') then 'result_type'
  end;
begin
  if bad is not null then
    raise exception 'new row for relation "agent_executions" violates check constraint "agent_executions_%_check"', bad
      using errcode = 'check_violation', table = 'agent_executions', constraint = 'agent_executions_' || bad || '_check',
            detail = format('%s is %s', bad, to_jsonb(new) -> bad);
  end if;
  return new;
end $$;
create trigger agent_executions_valid
  before insert or update of trace_id, surface, flow, queue, priority, max_attempts, on_lost, progress_seconds, waiting_for, result_type
  on agent_executions for each row execute function agent_executions_valid();
alter table agent_executions
  drop constraint agent_executions_trace_id_check,
  drop constraint agent_executions_surface_check,
  drop constraint agent_executions_flow_check,
  drop constraint agent_executions_queue_check,
  drop constraint agent_executions_priority_check,
  drop constraint agent_executions_status_check,
  drop constraint agent_executions_max_attempts_check,
  drop constraint agent_executions_on_lost_check,
  drop constraint agent_executions_progress_seconds_check,
  drop constraint agent_executions_waiting_for_check,
  drop constraint agent_executions_result_type_check;

-- What happens when a status changes ---------------------------------------------------------------
--
-- It was six triggers, with a statement for each thing that an end may leave to be done. Most ends leave nothing but their event, so
-- one trigger looks once, and does what there is, in the order of before. The look comes after the row was locked and changed, as
-- those statements did.

create function emit_agent_execution_end(e agent_executions) returns void language plpgsql as $$
declare
  kind text := case e.status when 'completed' then 'execution.completed' when 'cancelled' then 'execution.cancelled'
               else 'execution.failed' end;
begin
  if agent_webhook_wanted(kind) then
    perform emit_agent_webhook(kind, e.trace_id, jsonb_build_object(
      'id', e.id, 'trace_id', e.trace_id, 'flow', e.flow, 'surface', e.surface, 'parent_id', e.parent_id,
      'status', e.status, 'result_type', e.result_type, 'result_summary', left(e.result_summary, 2000),
      'error_message', left(e.error_message, 2000), 'failed_step', left(e.failed_step, 300)));
  end if;
end $$;

-- An execution that ends with a call under way: what the call used is not known, so it counts in full.
create function settle_agent_budgets(p_execution_id uuid) returns void language plpgsql as $$
declare
  r record;
begin
  for r in
    select x.step, x.scopes, x.tokens, x.cost_usd from agent_budget_reservations x
     where x.execution_id = p_execution_id order by x.step
  loop
    perform settle_agent_budget(p_execution_id, r.step, r.tokens, r.cost_usd);
    update agent_budgets x set unsettled = x.unsettled + 1 where x.scope = any (r.scopes);
  end loop;
end $$;

create function close_agent_webhook(e agent_executions) returns void language plpgsql as $$
begin
  update agent_webhook_deliveries d
     set status = 'dead', finished_at = clock_timestamp(), updated_at = clock_timestamp(), next_attempt_at = null,
         error_message = coalesce(e.error_message, e.cancel_reason, 'its execution ended ' || e.status)
   where d.id = case when e.input ->> 'delivery' ~ '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$'
                     then (e.input ->> 'delivery')::uuid end
     and d.execution_id = e.id and d.status in ('received', 'running', 'failed');
end $$;
comment on function close_agent_webhook is
  'A delivery whose execution was cancelled, or given up, is dead: it can be replayed, and is not lost from sight.';

create or replace function agent_executions_ended() returns trigger language plpgsql as $$
declare
  freed int := 0;
  has record;
  over constant boolean := new.status in ('completed', 'failed', 'timeout', 'cancelled') and old.status <> new.status;
begin
  if not over then
    if old.claimed_by is not null and new.claimed_by is null and exists (
         select from agent_limits l where (l.kind = 'flow' and l.name = new.flow) or (l.kind = 'surface' and l.name = new.surface)) then
      perform pg_notify('agent_ready', '');
    end if;
    if new.outside and old.status <> new.status then
      perform note_agent_status(new.id, new.status, new.waiting_for);
    end if;
    return null;
  end if;
  if new.status = 'cancelled' then
    perform lock_agent_children(new.id);                     -- executions before lanes
  end if;
  select exists (select from agent_locks l where l.execution_id = new.id)
           or exists (select from agent_lock_loans n where n.lender = new.id) as lanes,
         exists (select from agent_activity_open o where o.execution_id = new.id) as calls,
         exists (select from agent_approvals a where a.execution_id = new.id and a.parked and a.status in ('pending', 'approved')) as approvals,
         exists (select from agent_requests r where r.execution_id = new.id and r.status = 'pending') as requests,
         exists (select from agent_executions x
                  where x.waiting_for = 'agent' and x.waiting_key = new.id::text and (x.status = 'waiting') is true) as waiters,
         exists (select from agent_budget_reservations b where b.execution_id = new.id) as budgets,
         exists (select from agent_webhook_targets t where t.enabled) as hooks,
         old.claimed_by is not null and exists (
           select from agent_limits l where (l.kind = 'flow' and l.name = new.flow) or (l.kind = 'surface' and l.name = new.surface)) as place
    into has;
  -- Runs of the webhook surface tell nothing here: a target that is our own endpoint would go round for ever.
  if has.hooks and new.surface <> 'webhook' then
    perform emit_agent_execution_end(new);
  end if;
  if has.lanes then
    freed := release_agent_locks(new.id);
  end if;
  if has.calls then
    perform close_agent_activity(new.id, new.status);
  end if;
  if has.approvals then
    perform void_agent_approvals(new.id);
  end if;
  if has.requests then
    perform close_agent_requests(new.id);
  end if;
  if new.status = 'cancelled' then
    perform withdraw_agent_messages(new.id);
  end if;
  insert into agent_events (event, key, data, external_id, execution_id)
  values ('AGENT_COMPLETED', new.id::text,
          jsonb_build_object('execution_id', new.id, 'status', new.status, 'result_type', new.result_type,
                             'result_summary', new.result_summary, 'locks_released', freed),
          'completed ' || new.id, new.id)
  on conflict (external_id) do nothing;      -- an end must not fail because somebody used this id
  if has.waiters then
    insert into agent_untold_ends (execution_id) values (new.id) on conflict do nothing;
  end if;
  if new.status = 'cancelled' and exists (select from agent_executions x where x.parent_id = new.id and x.awaited) then
    perform cancel_agent_execution(c.id, new.cancelled_by, case when new.cancel_reason like 'its parent was cancelled: %'
        then new.cancel_reason else 'its parent was cancelled: ' || coalesce(new.cancel_reason, '') end)
       from (select x.id from agent_executions x
              where x.parent_id = new.id and x.awaited and x.status in ('pending', 'running', 'waiting')
              order by x.id) c;
  end if;
  if has.budgets then
    perform settle_agent_budgets(new.id);
  end if;
  if new.flow = 'webhook' and new.status <> 'completed' then
    perform close_agent_webhook(new);
  end if;
  if has.place then
    perform pg_notify('agent_ready', '');
  end if;
  if new.outside then
    perform note_agent_status(new.id, new.status, new.waiting_for);
  end if;
  return null;
end $$;

create function note_agent_status(p_id uuid, p_status text, p_waiting_for text) returns void language plpgsql as $$
begin
  insert into agent_status_changes (execution_id, n, status, waiting_for)
  values (p_id, (select coalesce(max(c.n), 0) + 1 from agent_status_changes c where c.execution_id = p_id), p_status, p_waiting_for);
end $$;

drop trigger agent_executions_emit on agent_executions;
drop trigger agent_executions_ended_budgets on agent_executions;
drop trigger agent_executions_webhook on agent_executions;
drop trigger agent_place_freed on agent_executions;
drop trigger agent_status_changed on agent_executions;
drop trigger agent_executions_ended on agent_executions;
drop function emit_agent_execution();
drop function agent_budgets_ended();
drop function close_agent_webhook_delivery();
drop function agent_place_freed();
create trigger agent_executions_ended after update of status, claimed_by on agent_executions
  for each row execute function agent_executions_ended();

create or replace function agent_executions_guard() returns trigger language plpgsql as $$
begin
  if tg_op = 'INSERT' then
    if new.status not in ('pending', 'running') then
      raise exception 'an execution begins pending or running, not %', new.status using errcode = 'LK002';
    end if;
    return new;
  elsif old.status = new.status then
    return new;
  end if;
  if not (old.status, new.status) in (
       ('pending', 'running'), ('pending', 'cancelled'),
       ('running', 'waiting'), ('running', 'completed'), ('running', 'failed'), ('running', 'timeout'),
       ('running', 'cancelled'),
       ('waiting', 'running'), ('waiting', 'timeout'), ('waiting', 'failed'), ('waiting', 'cancelled')) then
    raise exception 'execution % cannot go from % to %', old.id, old.status, new.status using errcode = 'LK002';
  end if;
  new.updated_at := clock_timestamp();
  if new.status = 'running' then
    new.started_at := coalesce(new.started_at, clock_timestamp());
  end if;
  if new.status = 'waiting' then
    new.claimed_by := null;
    new.waiting_until := coalesce(new.waiting_until, clock_timestamp() + interval '7 days');  -- no wait is for ever
  else
    new.waiting_for := null; new.waiting_key := null; new.waiting_until := null;
    new.waiting_data := null; new.waiting_step := null;
  end if;
  if new.status in ('completed', 'failed', 'timeout', 'cancelled') then
    new.claimed_by := null;
    new.completed_at := coalesce(new.completed_at, clock_timestamp());
    new.result_type := case new.status when 'completed' then 'success' when 'failed' then 'failure' else new.status end;
  end if;
  return new;
end $$;
drop trigger agent_executions_guard on agent_executions;
create trigger agent_executions_guard before update of status on agent_executions
  for each row execute function agent_executions_guard();

create or replace function agent_checkpoints_fence() returns trigger language plpgsql as $$
declare
  e record;
begin
  -- As fence_agent_execution, which is asked where this does not know: the row is locked first, then the clock decides.
  select x.status, x.claimed_by into e from agent_executions x where x.id = new.execution_id and x.claim = new.claim for key share;
  if found and (e.status = 'waiting' or (e.status = 'running' and exists (
       select 1 from agent_workers w where w.id = e.claimed_by and w.expires_at > clock_timestamp()))) then
    return new;
  end if;
  perform fence_agent_execution(new.execution_id, new.claim);
  return new;
end $$;

-- Who waits for what -------------------------------------------------------------------------------
--
-- Nearly every look for who waits was made through the index of states where statistics were of a time when few waited, which read all
-- that wait for each event. This index needs no condition on the status, and a status in a form that no index takes leaves no choice.

create index agent_executions_waits on agent_executions (waiting_for, waiting_key) where waiting_for is not null;
drop index agent_executions_waiting_key;
