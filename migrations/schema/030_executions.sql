-- Executions: durable runs, each with a state machine.
--
-- An execution is inserted `pending` and ready (claimed_by is null). A worker claims it: one update writes the worker's
-- id and a larger claim. The claim is the execution's fencing token. The database refuses a checkpoint, an end, an
-- activity or a wait under an older claim with SQLSTATE LK001. An end (completed, failed, timeout, cancelled) releases
-- the lanes, closes the activity rows left open and emits AGENT_COMPLETED, in one transaction. A trial of an eval emits
-- no event. The trigger agent_executions_moves refuses other transitions with SQLSTATE LK002. The next sweep takes the
-- claims of a worker whose lease has ended.

create table agent_executions (
  id uuid default lanekeeper.agent_uuid7() primary key, trace_id text not null, surface agent_surface not null,
  agent text not null default 'agent', flow text not null, parent_id uuid,
  awaited boolean not null default false, thread_id text, queue agent_queue not null default 'background',
  priority agent_priority not null default 2, status agent_execution_status not null default 'pending',
  claimed_by uuid, claim bigint not null default 0, input jsonb not null default '{}',
  variables jsonb not null default '{}', waiting_for agent_wait_kind, waiting_key text,
  waiting_until timestamptz, waiting_data jsonb, waiting_step text,
  wait_number int not null default 0, wake int not null default 0,
  hinted_at timestamptz not null default clock_timestamp(), attempt int not null default 0,
  max_attempts agent_positive not null default 5, on_lost agent_on_lost not null default 'resume',
  progress_seconds agent_seconds not null default 0, result_type agent_result_type,
  result_summary text not null default '', result jsonb, error_message text,
  failed_step text, cancelled_by text, cancel_reason text,
  dedupe_key text, created_at timestamptz not null default clock_timestamp(), started_at timestamptz,
  updated_at timestamptz not null default clock_timestamp(), completed_at timestamptz,
  inherits boolean not null default false, forked_from uuid, forked_step text,
  is_external boolean default false, flow_version int
) with (fillfactor = 70);
create index agent_executions_broken on agent_executions (status, id)
  where status in ('failed', 'timeout', 'cancelled');
comment on index agent_executions_broken is 'Lists executions that failed, timed out or were cancelled.';
create index agent_executions_claimable on agent_executions (flow, priority, id)
 where is_external and status in ('pending', 'running') and claimed_by is null;
comment on index agent_executions_claimable is 'Finds the next execution for a worker outside, by flow.';
create index agent_executions_forks on agent_executions (forked_from) where forked_from is not null;
comment on index agent_executions_forks is 'Lists the forks of an execution.';
create index agent_executions_held on agent_executions (claimed_by, flow, surface) where claimed_by is not null;
comment on index agent_executions_held is
  'Finds the claims of a worker, and counts them against the limits of flow and surface.';
create unique index agent_executions_key on agent_executions (dedupe_key) where dedupe_key is not null;
comment on index agent_executions_key is 'Finds the execution of a dedupe_key.';
create index agent_executions_of_agent on agent_executions (agent, id) with (deduplicate_items=off)
  where agent <> 'agent' and agent <> 'visitor_chat';
comment on index agent_executions_of_agent is
  'Lists the executions of an agent. The two agents of most executions have no entry.';
create index agent_executions_of_flow on agent_executions (flow, id) with (deduplicate_items=off)
  where claimed_by is null;
comment on index agent_executions_of_flow is 'Lists the executions of a flow.';
create index agent_executions_of_surface on agent_executions (surface, id) with (deduplicate_items=off)
  where claimed_by is null and parent_id is null;
comment on index agent_executions_of_surface is 'Lists the executions of a surface that no execution started.';
create index agent_executions_open on agent_executions (status, id) with (deduplicate_items=off)
  where status in ('pending', 'running', 'waiting');
comment on index agent_executions_open is 'Lists and counts the executions that have not ended.';
create index agent_executions_external on agent_executions (id)
  where is_external and status in ('pending', 'running') and claimed_by is null;
comment on index agent_executions_external is 'Runs that workers outside may lock now.';
create index agent_executions_parent on agent_executions (parent_id) where parent_id is not null;
comment on index agent_executions_parent is 'Finds the children of an execution.';
create index agent_executions_progress on agent_executions (id) where claimed_by is not null and progress_seconds > 0;
comment on index agent_executions_progress is 'Finds claimed executions with a bound on progress.';
create index agent_executions_ready on agent_executions (queue, flow, surface, priority, id)
  where claimed_by is null and status in ('pending', 'running') and not is_external;
comment on index agent_executions_ready is 'Finds the next execution to claim, by flow and surface.';
create unique index agent_executions_run on agent_executions (trace_id, id, claim) with (deduplicate_items=off);
comment on index agent_executions_run is
  'The executions of a trace. It makes the claim part of a key, so a takeover of the claim waits for holders of FOR '
  'KEY SHARE. This fences writes under a claim.';
create index agent_executions_thread on agent_executions (thread_id)
  where thread_id is not null and completed_at is null;
comment on index agent_executions_thread is 'Finds the open executions of a thread.';
create index agent_executions_waiting_until on agent_executions (waiting_until) where status = 'waiting';
comment on index agent_executions_waiting_until is 'Finds waits that have timed out.';
create index agent_executions_waits on agent_executions (waiting_for, waiting_key) where waiting_for is not null;
comment on index agent_executions_waits is 'Finds the executions that an event resumes.';
alter index agent_executions_pkey set (deduplicate_items=off);
comment on table agent_executions is
  'One row for each run. It holds the state machine, and all data that a process needs to continue the run.';
comment on column agent_executions.surface is 'The origin of the run: heartbeat, operate, chat, webhook, flow or eval.';
comment on column agent_executions.agent is 'The agent that acts in it.';
comment on column agent_executions.flow is 'The code that runs it: the name of a flow.';
comment on column agent_executions.parent_id is 'The execution that started it.';
comment on column agent_executions.awaited is 'The parent waits for it. A cancel of the parent cancels it too.';
comment on column agent_executions.queue is 'interactive or background. Each has workers of its own.';
comment on column agent_executions.priority is '1 to 4. A lower number is claimed first.';
comment on column agent_executions.status is
  'pending, running, waiting, or an end: completed, failed, timeout, cancelled.';
comment on column agent_executions.claimed_by is
  'The worker that runs it. Null: no worker has it, and a pending or running one is ready.';
comment on column agent_executions.claim is
  'The fencing token of the run. Every durable write carries it, and a write with an older one is refused.';
comment on column agent_executions.input is 'The input of the flow.';
comment on column agent_executions.variables is 'Variables of the flow, kept over waits and restarts.';
comment on column agent_executions.waiting_for is
  'The kind of wait, such as event, response, agent, delay, approval or lane. Null: it does not wait.';
comment on column agent_executions.waiting_key is 'The key, thread, execution or request of the wait.';
comment on column agent_executions.waiting_until is 'When the wait times out.';
comment on column agent_executions.waiting_data is 'Details of the wait.';
comment on column agent_executions.waiting_step is 'The step that records the outcome of the wait.';
comment on column agent_executions.wait_number is
  'Counts the waits. An outcome names the number, so it ends one wait at most.';
comment on column agent_executions.wake is 'Counts how often the run became ready again.';
comment on column agent_executions.hinted_at is
  'When other processes were last notified that the run is ready. No decision depends on it.';
comment on column agent_executions.attempt is 'Claims lost since the last checkpoint.';
comment on column agent_executions.max_attempts is 'The number of lost claims without a checkpoint that fails the run.';
comment on column agent_executions.on_lost is
  'The effect of a lost claim. resume: run it again. fail: end it. hand_on: another outside worker may lock it.';
comment on column agent_executions.progress_seconds is
  'The time without a recorded step after which the run fails or, with on_lost hand_on, loses its claim. 0: no bound.';
comment on column agent_executions.result_type is 'success, failure, timeout or cancelled, set with the end.';
comment on column agent_executions.result_summary is 'The outcome in a sentence.';
comment on column agent_executions.result is 'The outcome as data.';
comment on column agent_executions.failed_step is 'The step that failed.';
comment on column agent_executions.cancelled_by is 'The person or program that cancelled the execution.';
comment on column agent_executions.cancel_reason is 'The reason for the cancel.';
comment on column agent_executions.dedupe_key is 'A second start with the same key begins nothing.';
comment on column agent_executions.started_at is 'When it was first claimed.';
comment on column agent_executions.completed_at is 'When it ended.';
comment on column agent_executions.inherits is 'It may borrow the lanes of its parent, which waits for it.';
comment on column agent_executions.forked_from is
  'The execution whose recorded steps before forked_step this execution copied.';
comment on column agent_executions.forked_step is 'The first step that the fork runs again.';
comment on column agent_executions.is_external is
  'A worker outside runs it, under a lock. No process of this program claims it.';
comment on column agent_executions.flow_version is
  'The version of the flow (agent_flows) at the start. Null: the flow is code.';

create table agent_claims_lost (
  execution_id uuid not null, claim bigint not null, worker uuid,
  worker_name text not null default '', how text not null check (how in ('lost', 'no progress', 'handed back')),
  at timestamptz not null default clock_timestamp(),
  primary key (execution_id, claim)
);
comment on table agent_claims_lost is 'Claims that a run lost or handed back. The loss may have failed the run.';
comment on column agent_claims_lost.claim is 'The claim that ended.';
comment on column agent_claims_lost.worker is 'The worker that held the claim.';
comment on column agent_claims_lost.worker_name is 'The name of the worker.';
comment on column agent_claims_lost.how is
  'lost: the worker''s lease ended. no progress: it recorded no step in time. handed back: it shut down, was paused or '
  'lacks the flow.';
comment on column agent_claims_lost.at is 'When the claim ended.';

create table agent_cancel_requests (
  execution_id uuid primary key, cancelled_by text not null, cancel_reason text not null default '',
  requested_at timestamptz not null default clock_timestamp(), actor jsonb not null default '{}'
);
comment on table agent_cancel_requests is 'Executions to cancel as soon as no transaction has them locked.';
comment on column agent_cancel_requests.cancelled_by is 'The person or program that requested the cancel.';
comment on column agent_cancel_requests.cancel_reason is 'The reason for the cancel.';
comment on column agent_cancel_requests.requested_at is 'When the cancel was requested.';
comment on column agent_cancel_requests.actor is 'The principal, token and way of the request, for the audit.';

create table agent_status_changes (
  execution_id uuid not null, n int not null, status text not null,
  waiting_for text, at timestamptz not null default clock_timestamp(),
  primary key (execution_id, n)
);
comment on table agent_status_changes is
  'Every status of executions for outside workers, in order. A follower misses no change.';
comment on column agent_status_changes.n is 'The number of the change, from 1.';
comment on column agent_status_changes.status is 'The new status.';
comment on column agent_status_changes.waiting_for is 'The kind of wait, if the execution waits.';
comment on column agent_status_changes.at is 'When the status changed.';

create table agent_unpublished_completions (
  execution_id uuid primary key
);
comment on table agent_unpublished_completions is
  'Ends whose waiting parents have not resumed yet. The end only writes this row, so it waits for no lock of a '
  'parent. The process that resumes the parent deletes the row.';

create table agent_limits (
  kind text not null check (kind in ('flow', 'surface')), name text not null check (name <> ''),
  running int not null check (running >= 0),
  primary key (kind, name)
);
comment on table agent_limits is
  'The number of executions of a flow or of a surface that workers may claim at once. Others stay in the queue.';
comment on column agent_limits.kind is 'The limit is on a flow or on a surface.';
comment on column agent_limits.running is 'The limit. 0 stops the flow or surface.';

create table agent_pauses (
  id bigint generated always as identity primary key, paused_at timestamptz not null default clock_timestamp(),
  paused_by text not null, reason text not null, trace_id text not null,
  resumed_at timestamptz, resumed_by text not null default '', resume_reason text not null default ''
);
create unique index agent_pauses_open on agent_pauses ((true)) where resumed_at is null;
comment on index agent_pauses_open is 'Allows one pause at a time.';
comment on table agent_pauses is
  'Pauses of autonomous work, with author and reason. A row without resumed_at is the present pause.';
comment on column agent_pauses.paused_at is 'When the pause began.';
comment on column agent_pauses.paused_by is 'The person or program that paused.';
comment on column agent_pauses.resumed_at is 'When the pause ended. Null: the agent is paused.';
comment on column agent_pauses.resumed_by is 'The person or program that resumed.';
comment on column agent_pauses.resume_reason is 'The reason for the resume.';

create table agent_flows (
  name text not null check (name ~ '^[a-zA-Z][a-zA-Z0-9_-]{0,63}$'), version int not null check (version > 0),
  digest text not null, definition jsonb not null, source text not null default 'workspace',
  current boolean not null default true, created_at timestamptz not null default clock_timestamp(),
  primary key (name, version)
);
create unique index agent_flows_current on agent_flows (name) where current;
comment on index agent_flows_current is 'Allows one current version of a flow.';
comment on table agent_flows is 'Versions of flows that are data. A change of a flow adds a version.';
comment on column agent_flows.digest is 'SHA-256 of the definition.';
comment on column agent_flows.definition is 'The flow, as the interpreter reads it.';
comment on column agent_flows.source is 'The declaring side, such as workspace.';
comment on column agent_flows.current is
  'New executions begin with this version. No current version: the flow was removed.';

create table agent_idempotency (
  scope text not null check (scope <> ''), key text not null check (length(key) between 1 and 255),
  fingerprint bytea not null, attempt uuid not null default lanekeeper.agent_uuid7(),
  state text not null default 'running' check (state in ('running', 'answered', 'unkept')),
  lease_until timestamptz not null, status int not null default 0, header jsonb not null default '{}',
  body bytea not null default '\x'::bytea, created_at timestamptz not null default clock_timestamp(),
  expires_at timestamptz not null,
  primary key (scope, key),
  constraint agent_idempotency_check check ((state = 'running') = (status = 0))
);
create index agent_idempotency_expired on agent_idempotency (expires_at);
comment on index agent_idempotency_expired is 'Finds rows to delete.';
comment on table agent_idempotency is
  'Requests that carry an Idempotency-Key, with their answers. A second request with the key gets the first answer. '
  'An error is not kept.';
comment on column agent_idempotency.scope is 'The method and route, and the caller.';
comment on column agent_idempotency.key is 'The Idempotency-Key.';
comment on column agent_idempotency.fingerprint is
  'SHA-256 of path, query and body. The server refuses another request under the same key.';
comment on column agent_idempotency.attempt is
  'The attempt that handles the request. It is void once another attempt has taken over.';
comment on column agent_idempotency.state is
  'running: in progress. answered: the answer is kept. unkept: answered, but the answer is not kept.';
comment on column agent_idempotency.lease_until is
  'When the lease of the attempt ends. Its process may have died before.';
comment on column agent_idempotency.status is 'The HTTP status of the answer.';
comment on column agent_idempotency.header is 'The headers of the answer.';
comment on column agent_idempotency.body is 'The body of the answer.';
comment on column agent_idempotency.expires_at is 'When the row may be deleted.';

create table agent_execution_counts (
  span text not null check (span in ('hour', 'day')), start timestamptz not null, agent text not null,
  flow text not null, completed bigint not null default 0, failed bigint not null default 0,
  timeout bigint not null default 0, cancelled bigint not null default 0,
  primary key (span, start, agent, flow)
) with (fillfactor = 80);
comment on table agent_execution_counts is
  'Executions that have ended, counted by hour and once more by day. The last two minutes are not counted yet.';
comment on column agent_execution_counts.span is 'The length of the count.';
comment on column agent_execution_counts.start is 'The beginning of the hour or day (UTC) in which they ended.';
comment on column agent_execution_counts.agent is 'The agent that acted.';
comment on column agent_execution_counts.flow is 'The flow.';
comment on column agent_execution_counts.completed is 'Executions that completed.';
comment on column agent_execution_counts.failed is 'Executions that failed.';
comment on column agent_execution_counts.timeout is 'Executions that timed out.';
comment on column agent_execution_counts.cancelled is 'Executions that were cancelled.';

create table agent_execution_durations (
  span text not null check (span in ('hour', 'day')), start timestamptz not null,
  measure text not null check (measure in ('run', 'queue', 'lane')), agent text not null, flow text not null,
  bucket int not null, executions bigint not null,
  primary key (span, start, measure, agent, flow, bucket)
) with (fillfactor = 80);
comment on table agent_execution_durations is
  'Durations and waiting times of executions, by hour and once more by day. A bucket is 5% wide.';
comment on column agent_execution_durations.span is 'The length of the count.';
comment on column agent_execution_durations.start is 'The beginning of the hour or day (UTC) in which they ended.';
comment on column agent_execution_durations.measure is
  'run: from the first claim to the end, waits included. queue: until the first claim. lane: one wait for a lane.';
comment on column agent_execution_durations.agent is 'The agent that acted. Empty, with flow: all together.';
comment on column agent_execution_durations.flow is 'The flow.';
comment on column agent_execution_durations.bucket is
  'Durations from 1.05 ^ bucket ms up to the next; -1 is less than 1 ms.';
comment on column agent_execution_durations.executions is 'Executions, or waits for a lane, with such a duration.';

create table agent_executions_counted (
  single boolean default true primary key check (single),
  counted_upto uuid not null default '00000000-0000-0000-0000-000000000000'::uuid,
  checked_upto uuid not null default '00000000-0000-0000-0000-000000000000'::uuid
);
insert into agent_executions_counted default values on conflict do nothing;
comment on table agent_executions_counted is 'The progress of the counts of executions. One row.';
comment on column agent_executions_counted.single is 'Always true: there is one row.';
comment on column agent_executions_counted.counted_upto is
  'Executions with ids below it are counted or listed in agent_executions_uncounted.';
comment on column agent_executions_counted.checked_upto is
  'The last pass over agent_executions_uncounted checked the ids up to this one.';

create table agent_executions_uncounted (
  execution_id uuid primary key
);
comment on table agent_executions_uncounted is
  'Executions that had not ended when their time was counted. They are counted after their end.';
comment on column agent_executions_uncounted.execution_id is 'The execution.';

create table agent_execution_labels (
  execution_id uuid not null references agent_executions on delete cascade,
  name text not null check (name ~ '^[a-z][a-z0-9_]{0,31}$'),
  value text not null check (value ~ '^[^[:cntrl:]]{1,200}$'),
  primary key (execution_id, name)
);
create index agent_execution_labels_value on agent_execution_labels (value text_pattern_ops, execution_id);
comment on index agent_execution_labels_value is 'Finds executions by a value or its beginning.';
create index agent_execution_labels_lower on agent_execution_labels (lower(value) text_pattern_ops, execution_id);
comment on index agent_execution_labels_lower is 'Finds executions by a value or its beginning, in any letter case.';
comment on table agent_execution_labels is
  'The subjects of an execution, such as an order. A label is deleted with its execution.';
comment on column agent_execution_labels.name is 'The kind of subject, such as order.';
comment on column agent_execution_labels.value is 'The value, such as A-1001.';

create table agent_idle_workers (
  owner text primary key, flows text[] not null, since timestamptz not null default clock_timestamp(),
  seen_at timestamptz not null default clock_timestamp(), expires_at timestamptz not null
);
comment on table agent_idle_workers is
  'Workers outside that wait for an execution, by name. A row is stale when the wait has ended.';
comment on column agent_idle_workers.owner is 'The name that the worker gave itself.';
comment on column agent_idle_workers.flows is 'The flows that it waits for.';
comment on column agent_idle_workers.since is
  'When the worker began to wait. After a pause of a minute it begins anew.';
comment on column agent_idle_workers.seen_at is 'When its last wait began.';
comment on column agent_idle_workers.expires_at is 'When the last wait ends. A worker that still runs waits again.';

-- Code

-- The rules of an execution's row.

create or replace function lanekeeper.agent_pause_lock_holder() returns int language sql stable as $$
  select k.pid from pg_locks k
   where k.locktype = 'advisory' and k.objsubid = 1 and k.mode = 'ExclusiveLock' and k.granted
     and k.database = (select d.oid from pg_database d where d.datname = current_database())
     and (k.classid::bigint << 32 | k.objid::bigint) = hashtextextended('agent pause', 0)
   limit 1
$$;
comment on function lanekeeper.agent_pause_lock_holder is
  'The pid of the session that holds the lock of a pause: of a pause that is not committed yet, or of any session that '
  'took the advisory lock. No autonomous work begins then.';

create or replace function lanekeeper.agent_is_held_back(p_refuse boolean default false) returns boolean
language plpgsql volatile as $$
declare
  pause text;
  holder int;
begin
  if pg_try_advisory_xact_lock_shared(hashtextextended('agent pause', 0)) then
    -- A separate statement: its snapshot has every pause that held the lock before.
    perform 1 from agent_pauses p where p.resumed_at is null;
    if not found then
      return false;
    end if;
  end if;
  if p_refuse then
    select ' since ' || to_char(p.paused_at at time zone 'UTC', 'YYYY-MM-DD HH24:MI:SS') || ' UTC by '
           || p.paused_by || ': ' || p.reason
      into pause from agent_pauses p where p.resumed_at is null;
    if not found then
      holder := lanekeeper.agent_pause_lock_holder();
    end if;
    raise exception 'autonomous work is paused%',
      coalesce(pause, ' by the session with pid ' || holder || ', which holds the lock of a pause', '')
      using errcode = 'LK003',
            hint = coalesce('End its transaction, or the session: select pg_terminate_backend(' || holder || ').',
                            'Resume the agent first: agent resume, or select resume_agent().');
  end if;
  return true;
end $$;
comment on function lanekeeper.agent_is_held_back is
  'Whether the agent is paused or about to be paused. Then only attended work may begin. With p_refuse it raises LK003 '
  'instead of returning true.';

create or replace function lanekeeper.agent_executions_begins() returns trigger language plpgsql as $$
begin
  -- Record the status of an execution for workers outside.
  if tg_when = 'AFTER' then
    insert into agent_status_changes (execution_id, n, status, waiting_for)
    select new.id, coalesce(max(c.n), 0) + 1, new.status, new.waiting_for from agent_status_changes c
     where c.execution_id = new.id;
    return null;
  end if;
  if new.status not in ('pending', 'running') or new.claimed_by is not null and new.status <> 'running' then
    raise exception 'an execution begins pending or running, not %', new.status using errcode = 'LK002';
  end if;
  if new.trace_id = '' or new.flow = '' then
    raise exception 'an execution needs a trace and a flow' using errcode = 'check_violation';
  end if;
  -- A trial of an eval is one execution of its own, in no thread.
  if new.surface = 'eval' or new.trace_id like 'ev\_%' then
    if new.surface <> 'eval'
       or new.trace_id not like 'ev\_%'
       or new.flow !~ '^eval(:[0-9a-f]+)?$'
       or new.thread_id is not null then
      raise exception 'a trial of an eval cannot write to agent_executions' using errcode = 'LK009',
        hint = 'Give the skill a stub in the case of the eval.';
    end if;
  end if;
  new.is_external := new.flow = 'external' or new.flow like 'external:%';
  if new.is_external then
    if new.status <> 'pending' then
      raise exception 'an execution for workers outside begins pending, not % with a worker', new.status
        using errcode = 'LK002';
    end if;
    if new.on_lost = 'resume' then
      new.on_lost := 'fail';                                 -- no process of this program could resume it
    end if;
  elsif new.claimed_by is not null and new.surface not in ('operate', 'chat') then
    perform lanekeeper.agent_is_held_back(true);
  end if;
  return new;
end $$;
comment on function lanekeeper.agent_executions_begins is
  'The states in which an execution may begin: pending, or running under a worker. The trigger refuses claims of '
  'autonomous work while the agent is paused. It records each status of an execution for outside workers.';

-- The trigger writes the columns that follow from a status. No writer can omit them.
create or replace function lanekeeper.agent_executions_moves() returns trigger language plpgsql as $$
begin
  if new.status <> old.status then
    if (case old.status
         when 'running' then new.status not in ('completed', 'failed', 'timeout', 'waiting', 'cancelled')
         when 'waiting' then new.status not in ('running', 'timeout', 'failed', 'cancelled')
         when 'pending' then new.status not in ('running', 'cancelled')
         else true end) then
      raise exception 'execution % cannot go from % to %', old.id, old.status, new.status using errcode = 'LK002';
    end if;
    new.updated_at := clock_timestamp();
    if new.status in ('completed', 'failed', 'timeout', 'cancelled') then
      new.claimed_by := null;
      new.completed_at := coalesce(new.completed_at, new.updated_at);
      new.result_type :=
        case new.status when 'completed' then 'success' when 'failed' then 'failure' else new.status end;
    elsif new.status = 'waiting' then
      new.claimed_by := null;
      new.waiting_until := coalesce(new.waiting_until, new.updated_at + interval '7 days');  -- every wait ends
    else
      new.started_at := coalesce(new.started_at, new.updated_at);
    end if;
    if new.status <> 'waiting' and old.status = 'waiting' then
      new.waiting_for := null; new.waiting_key := null; new.waiting_until := null;
      new.waiting_data := null; new.waiting_step := null;
    end if;
  elsif new.claimed_by is not null and new.status <> 'running'
        or new.waiting_for is not null and new.status <> 'waiting'
        or (new.completed_at is null) = (new.status in ('completed', 'failed', 'timeout', 'cancelled')) then
    raise exception 'execution % is %: its worker, wait or end does not fit this status', old.id, old.status
      using errcode = 'LK002';
  end if;
  if new.claim < old.claim then
    raise exception 'the claim of execution % cannot go back from % to %', old.id, old.claim, new.claim
      using errcode = 'LK002';
  end if;
  if new.claimed_by is not null and old.claimed_by is null and new.surface not in ('operate', 'chat')
     and lanekeeper.agent_is_held_back(old.is_external) then
    if old.status <> 'waiting' then
      return null;                                           -- the execution stays in the queue
    end if;
    new.claimed_by := null;                                  -- the wait ends nevertheless
  end if;
  if new.trace_id = '' or new.flow = '' then
    raise exception 'execution % needs a trace and a flow', old.id using errcode = 'check_violation';
  end if;
  if new.flow <> old.flow or new.is_external <> old.is_external then
    new.is_external := new.flow = 'external' or new.flow like 'external:%';
  end if;
  return new;
end $$;
comment on function lanekeeper.agent_executions_moves is
  'The allowed transitions of status, and the columns that a status implies: times, result type, no worker, no wait. '
  'No autonomous work is claimed while the agent is paused.';

create or replace function lanekeeper.release_agent_execution(e agent_executions) returns int language plpgsql as $$
declare
  kind text := case e.status when 'completed' then 'execution.completed' when 'cancelled' then 'execution.cancelled'
               else 'execution.failed' end;
  freed int;
  thread_ text;
begin
  -- Lock the children that end with it before the first lane.
  if e.status = 'cancelled' then
    perform 1 from agent_executions x where x.id in (
      with recursive subtree (id) as (
        select e.id union select c.id from subtree s join agent_executions c on c.parent_id = s.id
         where c.awaited
           and c.status in ('pending', 'running', 'waiting')) select s.id from subtree s) order by x.id for update;
  end if;
  -- A run of the webhook surface emits no event: a target at this server's own endpoint would loop for ever.
  if e.surface not in ('webhook', 'eval') and exists (select from agent_webhook_targets t where t.enabled) then
    perform lanekeeper.emit_agent_webhook(kind, e.trace_id, jsonb_build_object(
      'id', e.id, 'trace_id', e.trace_id, 'flow', e.flow, 'surface', e.surface, 'parent_id', e.parent_id,
      'status', e.status, 'result_type', e.result_type, 'result_summary', left(e.result_summary, 2000),
      'error_message', left(e.error_message, 2000), 'failed_step', left(e.failed_step, 300)));
  end if;
  freed := lanekeeper.release_agent_execution_locks(e.id);
  -- Open actions are rare. This probe is cheaper than a search of the log.
  if exists (select from agent_activity_open o where o.execution_id = e.id) then
    with gone as (
      delete from agent_activity_open o where o.execution_id = e.id returning o.activity_id, o.kind)
    update agent_activity a
       set status = case when gone.kind = 'phase' then 'error' else 'unknown' end, finished_at = clock_timestamp(),
           error_class = e.status,
           error_message = 'the execution ended ' || e.status || case when gone.kind = 'phase' then ' in this phase'
                             else ' during the call; nobody knows whether it took effect' end,
           duration_ms = (extract(epoch from clock_timestamp() - a.created_at) * 1000)::bigint
      from gone where a.id = gone.activity_id and a.status = 'running';
  end if;
  update agent_approvals a set status = 'expired', reason = 'its execution has ended'
   where a.execution_id = e.id and a.parked and a.status in ('pending', 'approved');
  update agent_requests r set status = 'closed', completed_at = clock_timestamp()
   where r.execution_id = e.id and r.status = 'pending';
  if e.status = 'cancelled' then
    for thread_ in
      update agent_messages m
         set status = 'withdrawn'
       where m.execution_id = e.id and m.status = 'queued'
      returning m.thread_id loop
      perform pg_notify('agent_threads', thread_);           -- the next message may be sent
    end loop;
    perform lanekeeper.cancel_agent_tree(c.id, e.cancelled_by, case when e.cancel_reason like 'its parent was cancelled: %'
        then e.cancel_reason else 'its parent was cancelled: ' || coalesce(e.cancel_reason, '') end)
       from (select x.id from agent_executions x
              where x.parent_id = e.id and x.awaited and x.status in ('pending', 'running', 'waiting') order by x.id) c;
  end if;
  perform lanekeeper.settle_agent_budget(e.id, r.step)
     from (select x.step from agent_budget_reservations x where x.execution_id = e.id order by x.step) r;
  if e.flow = 'webhook' and e.status <> 'completed' then
    update agent_webhook_deliveries d
       set status = 'dead', finished_at = clock_timestamp(), updated_at = clock_timestamp(), next_attempt_at = null,
           error_message = coalesce(e.error_message, e.cancel_reason, 'its execution ended ' || e.status)
     where d.id = lanekeeper.agent_uuid(e.input ->> 'delivery') and d.execution_id = e.id
       and d.status in ('received', 'running', 'failed');
  end if;
  return freed;
end $$;
comment on function lanekeeper.release_agent_execution is
  'Release the resources of an execution that has ended: lanes, open calls, approvals, requests, budgets. A '
  'cancel also ends the awaited children. Returns the number of lanes.';

-- One query finds the work, after the rows were locked and changed. Most ends only emit their event. Executions that
-- end together began together. So one probe of each table, from the first id to the last, proves that no row is there.
create or replace function lanekeeper.agent_executions_changed() returns trigger
language plpgsql security definer set search_path from current set enable_seqscan = off
set plan_cache_mode = force_generic_plan set jit = off as $$
declare
  over uuid[];                      -- executions that end
  odd uuid[];                       -- ending executions that release something or emit to targets
  has record;
  e agent_executions;
  freed jsonb := '{}';              -- by execution: the number of released lanes
begin
  select array_agg(c.id order by c.id) as over, exists (select from agent_limits) as limits,
         array_agg(c.id) filter (where c.status = 'cancelled'
                                    or c.is_external
                                    or c.flow = 'webhook' and c.status <> 'completed') as odd
    into has
    from changed c
   where c.completed_at is not null and c.id in (select o.id from was o where o.completed_at is null);
  if has.limits and exists (
       select from was o join changed n on n.id = o.id
         join agent_limits l on l.kind = 'flow' and l.name = n.flow or l.kind = 'surface' and l.name = n.surface
        where o.claimed_by is not null and n.claimed_by is null) then
    perform pg_notify('agent_ready', '');                    -- a slot is free
  end if;
  over := has.over;
  odd := has.odd;
  if over is null then
    return null;
  end if;
  select exists (select from agent_locks l where l.execution_id between over[1] and over[cardinality(over)])
         or exists (select from agent_lock_loans k where k.lender between over[1] and over[cardinality(over)])
         or exists (select from agent_activity_open o where o.execution_id between over[1] and over[cardinality(over)])
         or exists (select from agent_approvals a
                     where a.parked and a.execution_id between over[1] and over[cardinality(over)])
         or exists (select from agent_requests r where r.execution_id between over[1] and over[cardinality(over)])
         or exists (select from agent_budget_reservations b
                     where b.execution_id between over[1] and over[cardinality(over)]) as something,
         exists (select from agent_webhook_targets t where t.enabled) as hooks,
         exists (select from agent_executions x where x.waiting_for = 'agent') as parents
    into has;
  if has.hooks then
    odd := over;
  elsif has.something then
    odd := odd || array(
      select l.execution_id from agent_locks l where l.execution_id = any (over)
      union select k.lender from agent_lock_loans k where k.lender = any (over)
      union select o.execution_id from agent_activity_open o where o.execution_id = any (over)
      union select a.execution_id from agent_approvals a
             where a.execution_id = any (over) and a.parked and a.status in ('pending', 'approved')
      union select r.execution_id from agent_requests r
             where r.execution_id = any (over) and (r.status = 'pending') is true
      union select b.execution_id from agent_budget_reservations b where b.execution_id = any (over));
  end if;
  if odd is not null then
    for e in select n.* from changed n where n.id = any (odd) order by n.id loop
      freed := freed || jsonb_build_object(e.id, lanekeeper.release_agent_execution(e));
    end loop;
  end if;
  insert into agent_events (event, key, data, external_id, execution_id)
  select 'AGENT_COMPLETED', n.id::text,
         jsonb_build_object('execution_id', n.id, 'status', n.status, 'result_type', n.result_type,
           'result_summary', n.result_summary, 'locks_released', coalesce((freed ->> n.id::text)::int, 0)),
         'completed ' || n.id, n.id
    from changed n where n.id = any (over) and n.surface <> 'eval' order by n.id
  on conflict (external_id) do nothing;      -- the end must not fail if another event has this id
  if has.parents then
    insert into agent_unpublished_completions (execution_id)
    select t.id
      from unnest(over) t (id)
     where exists (select from agent_executions x
                    where x.waiting_for = 'agent' and x.waiting_key = t.id::text
                      and (x.status = 'waiting') is true
                   offset 0)
     order by 1
    on conflict do nothing;
  end if;
  return null;
end $$;
comment on function lanekeeper.agent_executions_changed is
  'Handle an end in its transaction: release the resources of the execution, and emit AGENT_COMPLETED once. List the '
  'ends that a parent waits for, and announce a free slot.';

create or replace trigger agent_executions_begins before insert on agent_executions
  for each row execute function lanekeeper.agent_executions_begins();

create or replace trigger agent_executions_moves
  before update of status, claimed_by, claim, completed_at, waiting_for, trace_id, flow, is_external
  on agent_executions for each row execute function lanekeeper.agent_executions_moves();

create or replace trigger agent_executions_changed after update on agent_executions
  referencing old table as was new table as changed for each statement
  execute function lanekeeper.agent_executions_changed();

create or replace trigger agent_status_begins after insert on agent_executions
  for each row when (new.is_external) execute function lanekeeper.agent_executions_begins();

create or replace trigger agent_status_changed after update of status on agent_executions
  for each row when (new.is_external and new.status <> old.status)
  execute function lanekeeper.agent_executions_begins();

-- Claims: fence, start, claim, lose, release.

create or replace function fence_agent_execution(p_id uuid, p_claim bigint) returns boolean
language plpgsql volatile security definer set search_path from current as $$
declare
  e record;
begin
  select x.status, x.claimed_by, x.forked_from, x.surface into e from agent_executions x
   where x.id = p_id and x.claim = p_claim for key share;
  if e.surface = 'eval' then
    insert into lanekeeper.agent_trial_transactions values (pg_current_xact_id()) on conflict do nothing;
    if found then
      -- Other visible rows belong to ended transactions.
      delete from lanekeeper.agent_trial_transactions t using (
        select o.id from lanekeeper.agent_trial_transactions o
         where o.id <> pg_current_xact_id() limit 100 for update skip locked) over_
       where t.id = over_.id;
    end if;
  end if;
  -- A fork receives its checkpoints while it is pending. No other pending execution may write.
  if e.status = 'waiting'
     or e.status = 'pending' and e.forked_from is not null
     or (e.status = 'running' and exists (
           select 1 from agent_workers w where w.id = e.claimed_by and w.expires_at > clock_timestamp())) then
    return true;
  end if;
  raise exception '% of execution % is stale: the run was handed on, ended, or its worker''s lease expired',
    case when p_claim >= 0 then 'claim ' || p_claim else 'the lock' end, coalesce(p_id::text, 'null')
    using errcode = 'LK001', hint = 'Stop the work: another worker has the run, or it has ended.';
end $$;
comment on function fence_agent_execution is
  'Guard a write of a run: true while the claim is the live one of the execution, else LK001. A takeover waits for '
  'the calling transaction.';

create or replace view lanekeeper.agent_free_places as
select l.kind, l.name, l.running - (select count(*) from agent_executions x where x.claimed_by is not null
         and case l.kind when 'flow' then x.flow else x.surface::text end = l.name)::int as places
  from agent_limits l;
comment on view lanekeeper.agent_free_places is
  'The number of further executions of a flow or surface that workers may claim. Claimers count under an advisory '
  'lock for each.';

create or replace view lanekeeper.agent_ready_executions as
select x.id, x.queue, x.flow, x.surface, x.priority from agent_executions x
 where x.claimed_by is null and x.status in ('pending', 'running') and not x.is_external
   and not exists (select from agent_cancel_requests q where q.execution_id = x.id);
comment on view lanekeeper.agent_ready_executions is
  'Executions that workers may claim. An execution with a requested cancel is not one of them.';

create or replace view lanekeeper.agent_ready_kinds as
-- One index probe for each kind, regardless of the number of ready executions.
with recursive kinds as (
  select q.queue, f.flow, f.surface from (values ('background'), ('interactive')) q (queue) cross join lateral (
    select x.flow, x.surface::text as surface from lanekeeper.agent_ready_executions x where x.queue = q.queue
     order by x.flow, x.surface limit 1) f
  union all
  select k.queue, n.flow, n.surface from kinds k cross join lateral (
    select x.flow, x.surface::text as surface from lanekeeper.agent_ready_executions x
     where x.queue = k.queue and (x.flow, x.surface) > (k.flow, k.surface)
     order by x.flow, x.surface limit 1) n)
select k.queue, k.flow, k.surface,
       (select min(f.places) from lanekeeper.agent_free_places f
         where f.name = case f.kind when 'flow' then k.flow else k.surface end) as places
  from kinds k
 where k.surface in ('operate', 'chat') or not exists (select from agent_pauses p where p.resumed_at is null);
comment on view lanekeeper.agent_ready_kinds is
  'The flows and surfaces with executions to claim, and the free slots of their limits (null: no limit). While the '
  'agent is paused: only attended surfaces.';

create or replace function lanekeeper.start_agent_executions(p_traces text[], p_surfaces text[], p_flows text[],
                                                  p_inputs jsonb[], p_options jsonb, p_worker uuid, p_places int[],
                                                  p_skip text[])
returns table (n int, id uuid, claimed boolean, at timestamptz, parent_id uuid, on_lost text, input jsonb)
language plpgsql volatile set enable_seqscan = off set plan_cache_mode = force_generic_plan set jit = off
set lock_timeout = '50ms' as $$
#variable_conflict use_column
declare
  several constant int := cardinality(p_flows);
  ids uuid[];
  mine boolean[];                   -- by place: the worker claims it; null: all without the key queued
  held_back boolean;                -- the agent is paused, or is about to be
  at_ timestamptz;
  time_ bigint;
  high text;                        -- the first half of the ids: the time
  low bigint;                       -- the second half
begin
  if p_worker is not null then
    held_back := not pg_try_advisory_xact_lock_shared(hashtextextended('agent pause', 0));
    -- A separate statement: its snapshot has every pause that held the lock before.
    select held_back or exists (select from agent_pauses p where p.resumed_at is null) into held_back
      from agent_workers k where k.id = p_worker and k.expires_at > clock_timestamp();
    if not found then
      p_worker := null;
    elsif p_places <> '{0,0}' then
      mine := array(
        with s as materialized (
          select i, coalesce((p_options -> (i - 1) ->> 'queued')::boolean, false) as queued,
                 coalesce(p_options -> (i - 1) ->> 'queue', 'background') as queue,
                 p_flows[i] as flow, p_surfaces[i] as surface from generate_series(1, several) i),
        lines as materialized (
          select d.*,
                 not (d.flow = 'external'
                      or d.flow like 'external:%'
                      or held_back and d.surface not in ('operate', 'chat'))
                      and lanekeeper.agent_next_in_line(d.queue, d.flow, d.surface, p_skip) as next
            from (select distinct s.queue, s.flow, s.surface from s where s.queued) d)
        select not s.queued or l.next and row_number() over (partition by s.queued, s.queue, l.next order by s.i)
                 <= p_places[case s.queue when 'background' then 1 else 2 end]
          from s
          left join lines l on s.queued and l.queue = s.queue and l.flow = s.flow and l.surface = s.surface
         order by s.i);
    end if;
  end if;
  at_ := clock_timestamp();
  -- Ids as of agent_uuid7, but in sequence: the random part is drawn once and then counted up.
  time_ := floor(extract(epoch from at_) * 4096000)::bigint;
  high := '0' || to_hex((time_ >> 12 << 16) | 28672 | (time_ & 4095));
  low := (hashtextextended(gen_random_uuid()::text, 0) & 4611686018427322368) | -9223372036854775808;
  for i in 1 .. several loop
    ids[i] := (high || to_hex(low + i))::uuid;
  end loop;
  return query
  insert into agent_executions as x (id, trace_id, surface, agent, flow, parent_id, awaited, inherits, thread_id, queue,
         priority, status, claimed_by, claim, created_at, started_at, updated_at, input, on_lost, max_attempts,
         progress_seconds)
  select ids[i], p_traces[i], p_surfaces[i], coalesce(o ->> 'agent', 'agent'), p_flows[i], (o ->> 'parent_id')::uuid,
         coalesce((o ->> 'awaited')::boolean, false), coalesce((o ->> 'inherits')::boolean, false), o ->> 'thread_id',
         coalesce(o ->> 'queue', 'background'), coalesce((o ->> 'priority')::int, 2),
         case when run then 'running' else 'pending' end, case when run then p_worker end,
         case when run then 1 else 0 end, at_, case when run then at_ end, at_,
         coalesce(p_inputs[i], '{}'), coalesce(o ->> 'on_lost', 'resume'), coalesce((o ->> 'max_attempts')::int, 5),
         coalesce((o ->> 'progress_seconds')::int, 0)
    from (select i, o, p_worker is not null and coalesce(mine[i], o ->> 'queued' is null) as run
            from (select i, p_options -> (i - 1) as o from generate_series(1, several) i offset 0) s offset 0) s
  returning array_position(ids, x.id), x.id, x.claimed_by is not null, x.created_at, x.parent_id, x.on_lost::text,
            x.input;
end $$;
comment on function lanekeeper.start_agent_executions is
  'Start executions. p_options has an object for each; null: defaults. Without the key queued an execution begins '
  'claimed by the worker. So does a queued one that the worker would claim next, while p_places has free slots '
  '(background, interactive). The others are pending.';

create or replace function lanekeeper.claim_agent_execution(p_id uuid, p_worker uuid) returns setof agent_executions
language plpgsql volatile as $$
declare
  e agent_executions;
  places int;
begin
  select x.* into e from agent_executions x
   where x.id = p_id and x.claimed_by is null and x.status in ('pending', 'running') and not x.is_external;
  if not found then
    return;
  end if;
  perform pg_advisory_xact_lock(hashtextextended('admit ' || l.kind || ' ' || l.name, 0)) from (
    select l.kind, l.name from agent_limits l
     where l.kind = 'flow' and l.name = e.flow or l.kind = 'surface' and l.name = e.surface order by l.kind, l.name) l;
  if found then
    select min(f.places) into places from lanekeeper.agent_free_places f
     where f.kind = 'flow' and f.name = e.flow or f.kind = 'surface' and f.name = e.surface;
    if places <= 0 then
      return;                                                -- it stays in the queue
    end if;
  end if;
  update agent_executions x
     set status = 'running', claimed_by = p_worker, claim = x.claim + 1, updated_at = clock_timestamp()
   where x.id = p_id and x.claimed_by is null and x.status in ('pending', 'running') and not x.is_external
     and exists (select 1 from agent_workers w where w.id = p_worker and w.expires_at > clock_timestamp())
  returning x.* into e;
  if not found then
    return;
  end if;
  if e.claim > 1 then
    perform lanekeeper.claim_agent_locks(e.id);
    perform lanekeeper.recover_agent_activity(e.id, e.claim);
  end if;
  return next e;
end $$;
comment on function lanekeeper.claim_agent_execution is
  'Claim a ready execution for a live worker: its lanes get the new claim as their owner, and calls left in flight are '
  'closed as unknown. No row when it is not ready.';

create or replace function lanekeeper.claim_agent_executions(p_queue text, p_worker uuid, p_limit int,
                                                             p_skip text[] default '{}')
returns table (execution agent_executions, held boolean, missed boolean,
               steps text[], claims bigint[], prints text[], failed boolean[], outputs jsonb[], times timestamptz[])
language plpgsql volatile set enable_seqscan = off set jit = off set plan_cache_mode = force_generic_plan as $$
#variable_conflict use_column
declare
  flows text[];                     -- the ready kinds, with surfaces in the same order
  surfaces text[];
  limited boolean;
  ids uuid[];
begin
  select array_agg(k.flow), array_agg(k.surface), bool_or(k.places is not null) into flows, surfaces, limited
    from lanekeeper.agent_ready_kinds k
   where k.queue = p_queue and k.flow <> all (p_skip) and (k.places > 0) is not false;
  if flows is null
     or p_limit <= 0
     or not exists (select from agent_workers w where w.id = p_worker and w.expires_at > clock_timestamp()) then
    return;
  end if;
  perform pg_advisory_xact_lock(hashtextextended('admit ' || l.kind || ' ' || l.name, 0))
    from (select l.kind, l.name from agent_limits l
    where limited and l.name = any (case l.kind when 'flow' then flows else surfaces end) order by l.kind, l.name) l;
  ids := array(
    select r.id from unnest(flows, surfaces) k (flow, surface) cross join lateral (
       select x.id, x.priority from lanekeeper.agent_ready_executions x
        where x.queue = p_queue and x.flow = k.flow and x.surface = k.surface
        order by x.priority, x.id limit p_limit for update skip locked) r
     order by r.priority, r.id limit case when not limited then p_limit end);
  if limited then                                            -- at most the free slots of each flow and surface
    ids := array(
      select c.id from (
        select x.id, x.priority, x.flow, x.surface,
               row_number() over (partition by x.flow order by x.priority, x.id) as of_flow,
               row_number() over (partition by x.surface order by x.priority, x.id) as of_surface
          from agent_executions x where x.id = any (ids)) c
       where not exists (select from lanekeeper.agent_free_places f
                          where f.name = case f.kind when 'flow' then c.flow else c.surface::text end
                            and f.places < case f.kind when 'flow' then c.of_flow else c.of_surface end)
       order by c.priority, c.id limit p_limit);
  end if;
  update agent_executions x
     set status = 'running', claimed_by = p_worker, claim = x.claim + 1, updated_at = clock_timestamp()
   where x.id = any (ids);
  -- A separate statement: its snapshot has every checkpoint from before the claim.
  return query
    select x, x.claim > 1 and (
             exists (select from agent_locks n where n.execution_id = x.id)
             or exists (select from agent_activity_open o where o.execution_id = x.id)
             or x.claim > 2 * x.wait_number + 1 and exists (
                  select from agent_activity a
                   where a.execution_id = x.id and a.status = 'unknown' and a.error_class = 'interrupted')),
           false, k.steps, k.claims, k.prints, k.failed, k.outputs, k.times
      from agent_executions x cross join lateral (
        select array_agg(c.step) as steps, array_agg(c.claim) as claims, array_agg(c.fingerprint) as prints,
               array_agg(c.failed) as failed, array_agg(c.output) as outputs, array_agg(c.created_at) as times
          from agent_checkpoints c where c.execution_id = x.id and x.claim > 1) k
     where x.id = any (ids) and x.claimed_by = p_worker;
  -- The claim skips a row that another transaction has locked, such as a parent that parks.
  if cardinality(ids) < p_limit and exists (
       select from unnest(flows, surfaces) k (flow, surface)
        where not exists (select from lanekeeper.agent_free_places f
                           where limited and f.places <= 0
                             and f.name = case f.kind when 'flow' then k.flow else k.surface end)
          and exists (select from lanekeeper.agent_ready_executions x
                       where x.queue = p_queue and x.flow = k.flow and x.surface = k.surface)) then
    held := false;
    missed := true;
    return next;
  end if;
end $$;
comment on function lanekeeper.claim_agent_executions is
  'Claim up to p_limit ready executions of a queue for a live worker, by priority and age. It respects the limits and '
  'skips the flows of p_skip. Each row has its checkpoints. held: recover the claim first. missed, in a row of its '
  'own: other executions were locked; ask again soon.';

create or replace view lanekeeper.agent_stalled_executions as
select x.id, x.claimed_by from agent_executions x
 where x.claimed_by is not null and x.status = 'running' and x.progress_seconds > 0
   and x.updated_at < clock_timestamp() - make_interval(secs => x.progress_seconds)
   and not exists (select from agent_checkpoints c where c.execution_id = x.id
                    and c.created_at > clock_timestamp() - make_interval(secs => x.progress_seconds));
comment on view lanekeeper.agent_stalled_executions is
  'Claimed executions that have recorded nothing for progress_seconds, whether or not their workers live.';

create or replace function lanekeeper.lose_agent_claims(p_worker uuid, p_id uuid default null) returns int
language plpgsql volatile set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set jit = off
set lock_timeout = '50ms' as $$
declare
  lost uuid[];
  left_ uuid[] := '{}';             -- for the next call, because a row is locked
  free uuid[];
  held int := 0;                    -- lock timeouts so far
  process boolean;
  e record;
begin
  -- Leave locked executions to the next sweep: waiting for one would delay all others.
  lost := array(select x.id
                  from agent_executions x
                 where x.claimed_by = p_worker and (p_id is null or x.id = p_id)
                 order by x.id
                 for update skip locked);
  if p_id is not null then                                   -- a step may have been recorded before the row was locked
    lost := array(select s.id from lanekeeper.agent_stalled_executions s where s.id = any (lost));
  end if;
  for e in
    select f.* from (
      select x.id, x.claim, s.spent, case
               when p_id is not null and x.on_lost <> 'hand_on'
                 then format('no progress within progress_seconds (%s)', x.progress_seconds)
               when x.on_lost = 'fail' then 'the worker''s lease expired'
               when s.spent >= x.max_attempts and p_id is not null
                 then format('given up after %s tries without a checkpoint between; the last made no progress within '
                             'progress_seconds (%s)', s.spent, x.progress_seconds)
               when s.spent >= x.max_attempts
                 then format('given up after %s workers were lost without a checkpoint between', s.spent) end as fault
        from agent_executions x cross join lateral (
          select case when exists (select from agent_checkpoints c
                                    where c.execution_id = x.id and c.claim = x.claim) then 1
                      else x.attempt + 1 end as spent) s
       where x.id = any (lost)) f where f.fault is not null order by f.id
  loop
    free := coalesce(free, lanekeeper.agent_with_free_lanes(lost));
    begin
      if held >= 10 or e.id <> all (free) then
        left_ := left_ || e.id;
      else
        update agent_executions x set status = 'failed', claim = x.claim + 1, attempt = e.spent, error_message = e.fault
         where x.id = e.id;
      end if;
    exception when lock_not_available then
      held := held + 1;
      left_ := left_ || e.id;
    end;
  end loop;
  lost := array(select t.id from unnest(lost) t (id) where t.id <> all (left_));    -- the next call handles the others
  insert into agent_claims_lost (execution_id, claim, worker, worker_name, how)
  select x.id, case when x.completed_at is null then x.claim else x.claim - 1 end, p_worker,
         coalesce((select coalesce(nullif(w.owner, ''), w.name) from agent_workers w where w.id = p_worker), ''),
         case when p_id is null then 'lost' else 'no progress' end
    from agent_executions x where x.id = any (lost) on conflict do nothing;
  update agent_executions x
     set claimed_by = null, claim = x.claim + 1, wake = x.wake + 1, updated_at = clock_timestamp(),
         attempt = case when exists (select from agent_checkpoints c
                                      where c.execution_id = x.id and c.claim = x.claim) then 1
                        else x.attempt + 1 end
   where x.id = any (lost) and x.claimed_by = p_worker;
  if p_id is null then
    delete from agent_workers w
     where w.id = p_worker and not exists (select from agent_executions x where x.claimed_by = p_worker)
    returning w.kind = 'process' into process;
    -- Release the lanes of its jobs.
    for e in select l.lane, l.locked_by, l.fencing_token from agent_locks l where process and l.locked_by <> ''
                and right(l.locked_by, 37) = '@' || p_worker and l.execution_id is null order by l.lane loop
      begin
        perform pg_notify('agent_lanes', e.lane)
         where lanekeeper.release_agent_lock(e.lane, e.locked_by, e.fencing_token, false) = '';
      -- A write under the token, or another open transaction, has locked the row.
      exception when lock_not_available then null;
      end;
    end loop;
  end if;
  return cardinality(lost);
end $$;
comment on function lanekeeper.lose_agent_claims is
  'Take the claims of an expired worker, or the claim of an execution without progress. on_lost and the attempts '
  'decide whether the run continues or fails; without progress only hand_on continues. The next call handles locked '
  'executions. A worker without claims is deleted, and the lanes of its jobs are released. Returns the number of '
  'claims.';

-- A takeover waits for the writes under the claim. It takes its strongest lock first: two transactions that upgrade
-- weaker locks could deadlock.
create or replace function lanekeeper.release_agent_claim(p_id uuid, p_claim bigint) returns void
language plpgsql volatile as $$
declare
  e agent_executions;
begin
  select x.* into e from agent_executions x where x.id = p_id for update;                -- a claim is part of the key
  update agent_executions x
     set claimed_by = null, claim = x.claim + 1, wake = x.wake + 1, updated_at = clock_timestamp(),
         attempt = case when exists (select 1
                                       from agent_checkpoints c
                                      where c.execution_id = x.id and c.claim = p_claim)
                        then 0 else x.attempt end
   where x.id = p_id and x.claim = p_claim and x.status = 'running' and x.claimed_by is not null;
  if found then
    insert into agent_claims_lost (execution_id, claim, worker, worker_name, how)
    values (p_id, p_claim, e.claimed_by,
            coalesce((select coalesce(nullif(w.owner, ''), w.name) from agent_workers w where w.id = e.claimed_by), ''),
            'handed back') on conflict do nothing;
    perform lanekeeper.release_agent_execution_locks(p_id, false);
    perform lanekeeper.claim_agent_locks(p_id);
  end if;
end $$;
comment on function lanekeeper.release_agent_claim is
  'Release the claim of an unfinished execution at a shutdown. The execution is ready again and spends no attempt. '
  'Its lanes are free, except threads, which it keeps until their leases end.';

-- Complete and cancel.

create or replace function lanekeeper.complete_agent_execution(p_id uuid, p_claim bigint, p_status text, p_summary text,
                                       p_result jsonb, p_error text, p_failed_step text) returns int
language plpgsql volatile as $$
begin
  if p_status is null or p_status not in ('completed', 'failed', 'timeout') then
    raise exception 'execution % cannot finish as %: give completed, failed or timeout',
      p_id, coalesce(p_status, 'null')
      using errcode = '22023';
  end if;
  -- For update: the end waits for writes under this claim, and no such write can follow it.
  perform 1 from agent_executions x where x.id = p_id and x.claim = p_claim for update;
  perform fence_agent_execution(p_id, p_claim);
  update agent_executions x
     set status = p_status, result_summary = coalesce(p_summary, ''), result = p_result,
         error_message = p_error, failed_step = p_failed_step
   where x.id = p_id and x.claim = p_claim;
  return (select (v.data ->> 'locks_released')::int from agent_events v where v.external_id = 'completed ' || p_id);
end $$;
comment on function lanekeeper.complete_agent_execution is
  'End a run: completed, failed or timeout. Its lanes are released and AGENT_COMPLETED is emitted in this '
  'transaction. Returns the number of lanes.';

create or replace function lanekeeper.complete_agent_executions(p_ids uuid[], p_claims bigint[], p_ends jsonb)
returns table (n int, updated_at timestamptz, completed_at timestamptz, result jsonb, variables jsonb, inherits boolean,
               flow_version int)
language plpgsql volatile set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off
set enable_mergejoin = off
set plan_cache_mode = force_generic_plan set jit = off set lock_timeout = '50ms' as $$
#variable_conflict use_column
declare
  ending uuid[];                    -- the locked executions by id; the next three arrays have the same order
  claims bigint[];
  workers uuid[];
  places tid[];
  alive uuid[];
  bound uuid[];                     -- executions with lanes or budgets
  ended int;
begin
  if exists (select from jsonb_array_elements(p_ends) e (v)
              where (e.v ->> 'status' in ('completed', 'failed', 'timeout')) is not true) then
    raise exception 'executions can finish as completed, failed or timeout' using errcode = '22023';
  end if;
  -- For update: no write under these claims can follow. An execution with an open write is skipped and ends alone.
  -- PostgreSQL compares a row again if it was changed before it was locked. The clock is read after the locks.
  select array_agg(x.id), array_agg(x.claim), array_agg(x.claimed_by), array_agg(x.ctid)
    into ending, claims, workers, places
    from (select y.* from (
            select x.id, x.claim, x.claimed_by, x.ctid from agent_executions x
             where x.id = any (p_ids) for update skip locked) y order by y.id) x;
  if ending is null then
    return;
  end if;
  -- Lanes and budgets have their own lock order, so an execution with lanes or budgets ends alone.
  select array(select k.id from agent_workers k where k.id = any (workers) and k.expires_at > clock_timestamp()),
         array(select l.execution_id from agent_locks l where l.execution_id = any (ending)
               union all select k.lender from agent_lock_loans k where k.lender = any (ending)
               union all select b.execution_id from agent_budget_reservations b where b.execution_id = any (ending))
    into alive, bound;
  -- A null worker is not in alive.
  if bound <> '{}' or (ending = p_ids and claims = p_claims and workers <@ alive) is not true then
    places := array(
      select case when claims[t.x] = p_claims[t.i] and workers[t.x] = any (alive) and p_ids[t.i] <> all (bound)
                       and not exists (select from generate_series(1, t.i - 1) e
                                        where p_ids[e] = p_ids[t.i] and p_claims[e] = p_claims[t.i])
                  then places[t.x] end
        from (select i, array_position(ending, p_ids[i]) as x from generate_series(1, cardinality(p_ids)) i offset 0) t
       order by t.i);
  end if;
  insert into agent_checkpoints (execution_id, step, claim, fingerprint, failed, output)
  select p_ids[e.i], e.v ->> 'step', p_claims[e.i], coalesce(e.v ->> 'print', ''),
         coalesce((e.v ->> 'step_failed')::boolean, false), e.v -> 'output'
    from jsonb_array_elements(p_ends) with ordinality e (v, i) where places[e.i] is not null and e.v ? 'step';
  return query
  update agent_executions x
     set status = e.v ->> 'status', result_summary = coalesce(e.v ->> 'summary', ''),
         result = e.v -> 'result', error_message = e.v ->> 'error', failed_step = e.v ->> 'failed_step',
         variables = coalesce(e.v -> 'variables', x.variables)
    from jsonb_array_elements(p_ends) with ordinality e (v, i)
   where x.ctid = places[e.i]
  returning e.i::int, x.updated_at, x.completed_at, case when (e.v ->> 'wanted')::boolean then x.result end,
            case when (e.v ->> 'wanted')::boolean then x.variables end, x.inherits, x.flow_version;
  get diagnostics ended = row_count;
  if ended <> num_nonnulls(variadic places) then
    raise exception '% of % locked executions were written', ended, num_nonnulls(variadic places)
      using errcode = '40001';
  end if;
end $$;
comment on function lanekeeper.complete_agent_executions is
  'End executions under their claims, each with the result of its last step, if its object has one. An execution that '
  'the answer lacks was not written: it has lanes or budgets, is locked, or its claim is stale. End it alone. 23505: a '
  'last step was recorded before, and nothing is written. The call is cheapest in the order of p_ids.';

create or replace function lanekeeper.request_agent_cancel(p_id uuid, p_cancelled_by text, p_reason text,
                                                           p_always boolean default false) returns boolean
language plpgsql volatile set enable_seqscan = off set jit = off set lock_timeout = '50ms' as $$
declare
  subtree uuid[];
  reasons text[];
  lanes text[];
begin
  perform lanekeeper.check_agent_reason('anybody', regexp_replace(p_reason, '^its parent was cancelled: ', ''));
  with recursive subtree (id, reason) as (
    select x.id, coalesce(p_reason, '') from agent_executions x where x.id = p_id and x.completed_at is null
    union all
    select x.id,
           case when s.reason like 'its parent was cancelled: %' then s.reason
                else 'its parent was cancelled: ' || s.reason end
      from subtree s join agent_executions x on x.parent_id = s.id
     where x.awaited and x.status in ('pending', 'running', 'waiting'))
  select array_agg(s.id), array_agg(s.reason) into subtree, reasons from subtree s;
  if subtree is null then
    return false;
  end if;
  if not p_always and cardinality(subtree) = cardinality(array(
       select x.id from agent_executions x where x.id = any (subtree) order by x.id for update skip locked)) then
    lanes := array(select l.lane from agent_locks l where l.execution_id = any (subtree)
                   union select n.lane from agent_lock_loans n where n.lender = any (subtree));
    if cardinality(lanes) = cardinality(array(select l.lane
                                                from agent_locks l
                                               where l.lane = any (lanes)
                                               order by l.lane
                                               for update skip locked)) then
      return false;
    end if;
  end if;
  if p_cancelled_by is not null then
    insert into agent_cancel_requests (execution_id, cancelled_by, cancel_reason, actor)
    select t.id, p_cancelled_by, t.reason, lanekeeper.agent_actor()
      from unnest(subtree, reasons) t (id, reason) order by t.id on conflict do nothing;
    perform pg_notify('agent_cancel', t.id::text) from unnest(subtree) t (id);
  end if;
  return true;
end $$;
comment on function lanekeeper.request_agent_cancel is
  'Lock an execution, its awaited children and their lanes for a cancel, without waiting. False: all are locked, or '
  'the execution has ended. True: another transaction has a lock, or p_always. Then the cancel is recorded for each, '
  'and their processes are notified, unless p_cancelled_by is null. Commit a request before the cancel.';

create or replace function lanekeeper.cancel_agent_tree(p_id uuid, p_cancelled_by text, p_reason text) returns text
language plpgsql volatile set lock_timeout = '50ms' as $$
declare
  e record;
  actor_ jsonb;
begin
  p_cancelled_by := left(p_cancelled_by, 255);
  for try in 1 .. 10 loop                                    -- other writers lock it only for a moment
    exit when not lanekeeper.request_agent_cancel(p_id, null, p_reason);
    if try = 10 then
      perform lanekeeper.request_agent_cancel(p_id, coalesce(p_cancelled_by, ''), p_reason, true);
      raise notice 'execution % cannot be cancelled yet: another transaction has it locked, or a child or a lane of it',
        p_id
        using hint = 'The cancel is requested, and completed within seconds of that transaction''s end.';
      return (select x.status from agent_executions x where x.id = p_id);
    end if;
    perform pg_sleep(0.005);
  end loop;
  select x.status, x.claimed_by, x.flow, x.trace_id, x.awaited, x.parent_id into e
    from agent_executions x where x.id = p_id for update;
  delete from agent_cancel_requests r
   where r.execution_id = p_id and r.cancelled_by = p_cancelled_by returning r.actor into actor_;
  delete from agent_cancel_requests r where r.execution_id = p_id;
  if e.status is null or e.status in ('completed', 'failed', 'timeout', 'cancelled') then
    return e.status;
  end if;
  update agent_executions x
     set status = 'cancelled', claim = x.claim + 1, cancelled_by = p_cancelled_by, cancel_reason = p_reason
   where x.id = p_id;
  if e.claimed_by is not null then
    perform pg_notify('agent_cancel', p_id::text);
  end if;
  if (p_cancelled_by = 'admin' or exists (select from agent_principals p where p.name = p_cancelled_by))
     and not (e.awaited and coalesce(p_reason, '') like 'its parent was cancelled: %' and exists (
            select from agent_executions p where p.id = e.parent_id
               and (p.status = 'cancelled'
                    or exists (select from agent_cancel_requests r where r.execution_id = p.id)))) then
    insert into agent_activity (trace_id, kind, agent, surface, skill_name, purpose, status, input, output, finished_at,
                                duration_ms)
    values (lanekeeper.agent_trace_id('op'), 'note', 'admin', 'operate', 'cancel_execution', coalesce(p_reason, ''),
            'success',
            coalesce(actor_, lanekeeper.agent_actor())
              || jsonb_build_object('execution', p_id, 'flow', e.flow, 'by', p_cancelled_by, 'reason', p_reason),
            jsonb_build_object('was', e.status, 'trace_id', e.trace_id), clock_timestamp(), 0);
  end if;
  return 'cancelled';
end $$;
comment on function lanekeeper.cancel_agent_tree is
  'Cancel an execution, and with it its awaited children, under the name p_cancelled_by.';

create or replace function cancel_agent_execution(p_id uuid, p_cancelled_by text, p_reason text) returns text
language sql volatile security definer set search_path from current as $$
  select lanekeeper.cancel_agent_tree(p_id, case when pg_has_role(session_user, current_user, 'member') then p_cancelled_by
         else 'role ' || session_user || coalesce(': ' || p_cancelled_by, '') end, p_reason)
$$;
comment on function cancel_agent_execution is
  'Cancel an execution and return its status then (null: unknown id). Its claim is void, so a step in flight cannot be '
  'recorded. But if another transaction has locked the row, such as a StepTx, the cancel completes when that '
  'transaction ends. The call waits for a moment at most: another locked row raises 55P03. p_cancelled_by names the '
  'caller. The cancel of a login that is no member of the owner is recorded as role LOGIN: p_cancelled_by.';

-- The sweep: timeouts and free lanes. No running code notices them.

create or replace function lanekeeper.sweep_agent_waits(p_limit int default 500) returns void
language plpgsql volatile set enable_seqscan = off set jit = off set lock_timeout = '50ms' as $$
declare
  now_ timestamptz := clock_timestamp();                     -- one value for all queries, so an index serves
  due uuid[]; outcomes jsonb[];
  held int := 0;                    -- lock timeouts so far
  e record;
begin
  for e in
    select x.id, lanekeeper.agent_uuid(x.waiting_key) as child, x.waiting_data ->> 'patient' = 'true' as patient
      from agent_executions x
     where x.status = 'waiting' and x.waiting_until <= now_ and x.waiting_for = 'agent'
     order by x.waiting_until limit p_limit for no key update skip locked
  loop
    exit when held >= 10;                                    -- the next sweep handles the others
    -- The wait lasts an hour longer than the wait of the child, unless the child waits for this execution.
    if e.patient then
      with recursive chain as (
        select c.*, 1 as depth from agent_executions c where c.id = e.child and c.status = 'waiting'
        union all
        select c.*, l.depth + 1
          from chain l join agent_executions c on c.id = lanekeeper.agent_uuid(l.waiting_key) and c.status = 'waiting'
         where l.waiting_for = 'agent' and l.waiting_data ->> 'patient' = 'true' and l.depth < 100)
      update agent_executions x set waiting_until = t.until
        from (select max(l.waiting_until) + interval '1 hour' as until from chain l having bool_and(l.id <> e.id)) t
       where x.id = e.id and t.until > now_;
      continue when found;
    end if;
    perform 1 from agent_executions x where x.id = e.child for no key update skip locked;
    continue when not found and exists (select from agent_executions x where x.id = e.child)
               or cardinality(lanekeeper.agent_with_free_lanes(array[e.id, e.child])) < 2;
    begin
      perform lanekeeper.resume_agent_executions(
                array[e.id], array['{"event": "AGENT_COMPLETED", "data": {}, "timed_out": true}'::jsonb], '{}', null,
                e.child);
    exception when lock_not_available then
      held := held + 1;
    end;
  end loop;
  due := array(
    select t.id from (
      select x.id from agent_executions x
       where x.status = 'waiting' and x.waiting_until <= now_ and x.waiting_for <> 'agent'
       order by x.waiting_until limit p_limit for no key update skip locked) t
    union select l.id from (
      -- One index probe for each lane, regardless of the number of its waiters.
      with recursive wanted (lane) as (
        select min(x.waiting_key) from agent_executions x where x.waiting_for = 'lane'
        union all
        select (select min(x.waiting_key)
                  from agent_executions x
                 where x.waiting_for = 'lane' and x.waiting_key > w.lane)
          from wanted w where w.lane is not null),
      open as materialized (select w.lane
                              from wanted w
                             where w.lane is not null
                               and not exists (select from lanekeeper.agent_lock_holders h where h.lane = w.lane))
      select x.id from open o join agent_executions x on x.waiting_key = o.lane
       where x.waiting_for = 'lane' and x.status = 'waiting' limit p_limit for no key update of x skip locked) l);
  select array_agg(x.id), array_agg(jsonb_build_object('event', k.event, 'data', '{}'::jsonb,
                                                       'timed_out', x.waiting_for <> 'delay'
                                                                    and x.waiting_until <= now_))
    into due, outcomes
    from unnest(lanekeeper.agent_with_free_lanes(due)) t (id) join agent_executions x on x.id = t.id
    join lanekeeper.agent_wait_events k on k.kind = x.waiting_for;
  for i in 0 .. coalesce(cardinality(due), -1) loop          -- all at once; after a lock timeout one by one
    exit when held > 10;
    begin
      perform lanekeeper.resume_agent_executions(case when i = 0 then due else due[i:i] end,
                                                 case when i = 0 then outcomes else outcomes[i:i] end);
      exit when i = 0;
    exception when lock_not_available then
      held := held + 1;
    end;
  end loop;
end $$;
comment on function lanekeeper.sweep_agent_waits is
  'Resume executions whose wait has timed out, or whose lane is free. The next sweep visits locked executions.';

-- The pause.

create or replace function lanekeeper.check_agent_reason(p_by text, p_reason text) returns void
language plpgsql immutable as $$
begin
  if p_by is null or p_by !~ '^[^[:cntrl:]]{1,255}$' or p_by !~ '[^[:space:]]' then
    raise exception 'by % is not valid: give a name of 1 to 255 printable characters',
      coalesce(quote_literal(left(p_by, 40)), 'null')
      using errcode = '22023';
  elsif length(p_reason) > 1000 or p_reason ~ '[\x01-\x08\x0b-\x1f\x7f]' then
    raise exception 'the reason is not valid: give at most 1000 printable characters' using errcode = '22023';
  end if;
end $$;
comment on function lanekeeper.check_agent_reason is
  'Refuse with 22023 a name or reason that is unprintable or too long.';

create or replace function pause_agent(p_reason text, p_by text default 'admin')
returns table (changed boolean, paused_at timestamptz, paused_by text, reason text, trace_id text, activity_id uuid)
language plpgsql volatile security definer set search_path from current set lock_timeout = '2s' as $$
#variable_conflict use_column
declare
  p agent_pauses;
  note_ uuid;
begin
  perform lanekeeper.check_agent_reason(p_by, p_reason);
  if p_reason is null or p_reason !~ '[^[:space:]]' then
    raise exception 'a pause needs a reason, which everybody sees' using errcode = '22023';
  end if;
  begin
    perform pg_advisory_xact_lock(hashtextextended('agent pause', 0));
  exception when lock_not_available then
    null;         -- an open transaction has claimed executions; they stop before their first step
  end;
  insert into agent_pauses as n (paused_by, reason, trace_id) values (p_by, p_reason, lanekeeper.agent_trace_id('op'))
  on conflict ((true)) where resumed_at is null do nothing returning n.* into p;
  if not found then
    return query
      select false, n.paused_at, n.paused_by, n.reason, n.trace_id, null::uuid
        from agent_pauses n
       where n.resumed_at is null;
    if not found then
      raise exception 'the pause that was on has just ended: pause again' using errcode = '40001';
    end if;
    return;
  end if;
  insert into agent_activity as a (trace_id, kind, agent, surface, skill_name, purpose, status, input, finished_at,
                                   duration_ms)
  values (p.trace_id, 'note', p_by, 'operate', 'pause_agent', p_reason, 'success',
          lanekeeper.agent_actor() || jsonb_build_object('reason', p_reason, 'by', p_by),
          clock_timestamp(), 0)
  returning a.id into note_;
  perform pg_notify('agent_pause', 'paused');
  return query select true, p.paused_at, p.paused_by, p.reason, p.trace_id, note_;
end $$;
comment on function pause_agent is
  'Pause autonomous work, everywhere, until resume_agent. If a pause is on, return it with changed false.';

create or replace function resume_agent(p_by text default 'admin', p_reason text default '')
returns table (changed boolean, paused_at timestamptz, paused_by text, reason text, resumed_at timestamptz,
               trace_id text, activity_id uuid)
language plpgsql volatile security definer set search_path from current as $$
#variable_conflict use_column
declare
  p agent_pauses;
  trace_ text := lanekeeper.agent_trace_id('op');
  note_ uuid;
begin
  perform lanekeeper.check_agent_reason(p_by, p_reason);
  update agent_pauses n set resumed_at = clock_timestamp(), resumed_by = p_by, resume_reason = coalesce(p_reason, '')
   where n.resumed_at is null returning n.* into p;
  if not found then
    return query select false, null::timestamptz, '', '', null::timestamptz, '', null::uuid;
    return;
  end if;
  insert into agent_activity as a (trace_id, kind, agent, surface, skill_name, purpose, status, input, output,
                                   finished_at, duration_ms)
  values (trace_, 'note', p_by, 'operate', 'resume_agent', p.resume_reason, 'success',
          lanekeeper.agent_actor() || jsonb_build_object('reason', p.resume_reason, 'by', p_by),
          jsonb_build_object('paused_at', p.paused_at, 'paused_by', p.paused_by, 'paused_for', p.reason,
                             'paused_trace', p.trace_id),
          clock_timestamp(), 0)
  returning a.id into note_;
  perform pg_notify('agent_pause', 'resumed');
  perform pg_notify('agent_ready', '');                     -- for processes of releases without pauses
  perform pg_notify('agent_automations', '');
  return query select true, p.paused_at, p.paused_by, p.reason, p.resumed_at, trace_, note_;
end $$;
comment on function resume_agent is
  'End the pause and announce ready work. changed is false if the agent is not paused.';

-- Workers outside: an execution under a lock.

create or replace function lanekeeper.check_agent_size(p_name text, p_value text) returns void
language plpgsql immutable as $$
begin
  if octet_length(p_value) > 16777216 then
    raise exception '% has % bytes, more than 16 MiB', p_name, octet_length(p_value) using errcode = '22023';
  end if;
end $$;
comment on function lanekeeper.check_agent_size is 'Refuse with 22023 a value of more than 16 MiB.';

create or replace function start_agent_execution(p_flow text, p_input jsonb default '{}', p_key text default null,
                                      p_trace_id text default null, p_on_lost text default 'fail')
returns uuid language plpgsql volatile security definer set search_path from current as $$
declare
  made uuid;
begin
  if (p_flow = 'external' or p_flow like 'external:_%') is not true then
    raise exception 'flow % is not for workers outside', coalesce(quote_literal(left(p_flow, 60)), 'null')
      using errcode = '22023', hint = 'Name it external, or external:NAME.';
  end if;
  if greatest(octet_length(p_flow), octet_length(p_key)) > 2500 then
    raise exception 'a flow and a key have at most 2500 bytes' using errcode = '22023';
  elsif p_trace_id <> '' and p_trace_id !~ '^(hb|op|ch|wh|fl)_[0-9A-HJKMNP-TV-Z]{26}$' then
    raise exception '% is not a trace id', quote_literal(left(p_trace_id, 60)) using errcode = '22023';
  elsif (p_on_lost in ('fail', 'hand_on')) is not true then
    raise exception 'on_lost % is not valid: give fail or hand_on', coalesce(quote_literal(left(p_on_lost, 40)), 'null')
      using errcode = '22023';
  end if;
  perform lanekeeper.check_agent_size('the input', p_input::text);
  p_key := nullif(p_key, '');
  insert into agent_executions (trace_id, surface, flow, input, dedupe_key, on_lost)
  values (coalesce(nullif(p_trace_id, ''), lanekeeper.agent_trace_id('fl')), 'flow', p_flow, coalesce(p_input, '{}'),
          p_key, p_on_lost)
  on conflict do nothing returning id into made;
  if made is not null then
    return made;
  elsif exists (select from agent_executions x where x.dedupe_key = p_key and not x.is_external) then
    raise exception 'key % started an execution that is not for workers outside', quote_literal(left(p_key, 60))
      using errcode = '22023', hint = 'All starts share their keys. Begin yours with the name of your program.';
  end if;
  return (select x.id from agent_executions x where x.dedupe_key = p_key);
end $$;
comment on function start_agent_execution is
  'Start an execution for workers outside: its flow is external, or external:NAME. With a used key, return the '
  'execution that the key started; an empty key is none. 22023: the key started an execution that is not for workers '
  'outside. Without p_trace_id it begins a trace. p_on_lost: when the lock expires, the execution fails (fail), or '
  'another worker may lock it (hand_on).';

create or replace function lock_agent_execution(p_id uuid, p_owner text, p_ttl_seconds int default 30)
returns table (lock_id text, expires_at timestamptz, claim bigint, status text, holder text, refused text)
language plpgsql volatile security definer set search_path from current as $$
#variable_conflict use_column
declare
  e agent_executions;
  w agent_workers;
begin
  if p_owner is null or p_owner !~ '^[^[:cntrl:]]{1,255}$' or p_owner !~ '[^[:space:]]' then
    raise exception 'owner % is not valid: an owner is 1 to 255 printable characters',
      coalesce(quote_literal(left(p_owner, 40)), 'null')
      using errcode = '22023';
  elsif p_ttl_seconds is null or p_ttl_seconds <= 0 or p_ttl_seconds > 86400 then
    raise exception 'ttl of % seconds is not valid: give 1 to 86400 (a day)', coalesce(p_ttl_seconds::text, 'null')
      using errcode = '22023';
  end if;
  -- Lock one at a time. From here on the run can lose its worker, but not get another worker.
  perform pg_advisory_xact_lock(hashtextextended('run lock ' || p_id, 0));
  select x.* into e from agent_executions x where x.id = p_id;
  if not found then
    return;
  elsif not e.is_external then
    return query select null::text, null::timestamptz, e.claim, e.status::text, null::text, 'inside'::text;
    return;
  end if;
  select k.* into w from agent_workers k where k.id = e.claimed_by for update;
  if w.expires_at > clock_timestamp() then
    select x.* into e from agent_executions x where x.id = p_id for no key update;    -- passes checkpoints in flight
  end if;
  if e.claimed_by is not null and w.expires_at > clock_timestamp() then
    if w.owner = p_owner then
      update agent_workers k
         set expires_at = clock_timestamp() + make_interval(secs => p_ttl_seconds), ttl_seconds = p_ttl_seconds
       where k.id = w.id returning k.* into w;
    end if;
    return query select case when w.owner = p_owner then w.lock_id end, w.expires_at, e.claim, e.status::text, w.owner,
                        case when w.owner <> p_owner then 'held' end;
    return;
  end if;
  -- Wait for writes under the old lock.
  select x.* into e from agent_executions x where x.id = p_id for update;
  if e.claimed_by is not null then
    perform lanekeeper.lose_agent_claims(e.claimed_by);       -- apply the loss before the answer
    select x.* into e from agent_executions x where x.id = p_id;
  end if;
  if e.status not in ('pending', 'running') then
    return query select null::text, null::timestamptz, e.claim, e.status::text, null::text,
                        case when e.status = 'waiting' then 'waiting' else 'ended' end;
    return;
  end if;
  insert into agent_workers as k (name, kind, ttl_seconds, expires_at, lock_id, owner, execution_id, claim)
  values (p_owner, 'outside', p_ttl_seconds, clock_timestamp() + make_interval(secs => p_ttl_seconds),
          translate(encode(uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid()), 'base64'), '+/=', '-_'),
          p_owner, p_id, e.claim + 1)
  returning k.* into w;
  update agent_executions x
     set status = 'running', claimed_by = w.id, claim = x.claim + 1, updated_at = clock_timestamp()
   where x.id = p_id;
  if e.claim > 0 then
    perform lanekeeper.claim_agent_locks(p_id);
    perform lanekeeper.recover_agent_activity(p_id, e.claim + 1);
  end if;
  return query select w.lock_id, w.expires_at, e.claim + 1, 'running'::text, p_owner, null::text;
end $$;
comment on function lock_agent_execution is
  'Lock an execution for a worker outside. No row: unknown id. refused gives the reason for a missing lock_id: held '
  '(by holder, until expires_at), waiting, ended, or inside (not a run for workers outside). The same live owner gets '
  'the same lock again, renewed. LK003: the agent is paused.';

create or replace function beat_agent_locks(p_lock_ids text[], p_id uuid default null)
returns table (lock_id text, execution_id uuid, trace_id text, live boolean, expires_at timestamptz, status text,
               cancel_requested boolean)
language plpgsql volatile security definer set search_path from current as $$
#variable_conflict use_column
declare
  locked uuid[];
begin
  locked := array(
    select k.id from agent_workers k
     where k.lock_id = any (p_lock_ids) and (p_id is null or k.execution_id = p_id) and k.expires_at > clock_timestamp()
     order by k.id for no key update skip locked);
  return query
  with beaten as (
    update agent_workers k set expires_at = clock_timestamp() + make_interval(secs => k.ttl_seconds)
      from agent_executions x
     where k.id = any (locked) and k.expires_at > clock_timestamp()
       and x.id = k.execution_id and x.claimed_by = k.id
    returning k.id, k.expires_at),
  told as (                                                  -- once: this ends the lock
    delete from agent_workers k using agent_executions x
     where k.id = any (locked) and k.expires_at > clock_timestamp()
       and x.id = k.execution_id and x.status = 'cancelled' and x.claim = k.claim + 1
    returning k.id),
  used as (
    select k.id from agent_workers k join agent_executions x on x.id = k.execution_id
       and (x.claimed_by = k.id or x.status = 'cancelled' and x.claim = k.claim + 1)
     where k.lock_id = any (p_lock_ids) and (p_id is null or k.execution_id = p_id) and k.expires_at > clock_timestamp()
       and k.id <> all (locked))
  select a.id, k.execution_id, x.trace_id, coalesce(b.id, t.id, u.id) is not null,
         coalesce(b.expires_at, case when coalesce(t.id, u.id) is not null then k.expires_at end),
         x.status::text,
         t.id is not null
         or coalesce(b.id, u.id) is not null
            and exists (select from agent_cancel_requests c where c.execution_id = k.execution_id)
    from unnest(p_lock_ids) with ordinality a (id, n)
    left join agent_workers k on k.lock_id = a.id and (p_id is null or k.execution_id = p_id)
    left join agent_executions x on x.id = k.execution_id
    left join beaten b on b.id = k.id
    left join told t on t.id = k.id
    left join used u on u.id = k.id
   order by a.n;
end $$;
comment on function beat_agent_locks is
  'Renew locks; with p_id only those of one execution. live is false for a void lock. A lock that another transaction '
  'changes is live and keeps its expires_at. cancel_requested: stop the work. '
  'It is true once after a cancel, which ends the lock, and as long as a cancel waits for a transaction that has '
  'locked the run.';

create or replace function agent_lock_claim(p_id uuid, p_lock_id text) returns bigint
language sql stable security definer set search_path from current as $$
  select k.claim from agent_workers k
   where k.lock_id = p_lock_id and k.execution_id = p_id and k.expires_at > clock_timestamp()
$$;
comment on function agent_lock_claim is
  'The claim of a live lock. Null: the lock is void or another execution''s. Pass the claim to fence_agent_execution.';

create or replace function read_agent_execution(p_id uuid, p_lock_id text)
returns table (trace_id text, input jsonb, variables jsonb, checkpoints jsonb)
language plpgsql volatile security definer set search_path from current as $$
begin
  perform fence_agent_execution(p_id, coalesce(agent_lock_claim(p_id, p_lock_id), -1));
  return query
  select x.trace_id, x.input, x.variables,
         (select coalesce(jsonb_object_agg(c.step, c.output), '{}')
            from agent_checkpoints c
           where c.execution_id = x.id)
    from agent_executions x where x.id = p_id;
end $$;
comment on function read_agent_execution is
  'The data that a worker outside needs to begin or continue, under its lock: the input, and the output of each '
  'recorded step. LK001: the lock is void.';

-- Its nine parameters are those of the HTTP route, and part of the contract.
create or replace function unlock_agent_execution(p_id uuid, p_lock_id text, p_status text, p_summary text default '',
                                       p_error text default null, p_kind text default null, p_key text default null,
                                       p_timeout interval default null, p_result jsonb default null)
returns text language plpgsql volatile security definer set search_path from current set lock_timeout = '1s' as $$
declare
  claim_ bigint;
  outcome jsonb;
  step_ text;
begin
  if p_status is null or p_status not in ('completed', 'failed', 'waiting') then
    raise exception 'a lock is released with status completed, failed or waiting, not %',
      coalesce(quote_literal(left(p_status, 40)), 'null')
      using errcode = '22023';
  elsif p_status = 'waiting' and (p_kind is null or p_kind not in
       ('response', 'agent', 'document', 'signature', 'test', 'event', 'delay', 'approval')) then
    raise exception 'a run can wait for response, agent, document, signature, test, event, delay or approval, not %',
      coalesce(quote_literal(left(p_kind, 40)), 'null') using errcode = '22023';
  elsif p_status <> 'waiting' and (p_kind <> '' or p_key <> '' or p_timeout is not null) then
    raise exception 'p_kind, p_key and p_timeout belong to status waiting, not %', p_status using errcode = '22023';
  elsif p_status = 'completed' and p_error <> '' then
    raise exception 'p_error belongs to status failed, not completed' using errcode = '22023';
  end if;
  perform lanekeeper.check_agent_size('the summary', p_summary), lanekeeper.check_agent_size('the error', p_error),
          lanekeeper.check_agent_size('the result', p_result::text);
  perform 1 from agent_workers k where k.lock_id = p_lock_id and k.execution_id = p_id for update;
  if p_status = 'waiting' then
    p_key := coalesce(case p_kind when 'delay' then p_id::text when 'agent' then lower(p_key) else p_key end,
                      case when p_kind = 'response'
                             then (select x.thread_id from agent_executions x where x.id = p_id) end,
                      '');
    perform pg_advisory_xact_lock(hashtextextended('wait ' || p_kind || ' ' || p_key, 0));
  end if;
  perform 1 from agent_executions x where x.id = p_id for update;
  claim_ := agent_lock_claim(p_id, p_lock_id);               -- after the row lock: the lease may have ended meanwhile
  perform fence_agent_execution(p_id, coalesce(claim_, -1));
  if p_status = 'waiting' then
    if p_kind = 'agent'
       and p_key <> ''
       and not exists (select from agent_executions y where y.id = lanekeeper.agent_uuid(p_key)) then
      raise exception 'there is no execution %', quote_literal(left(p_key, 60)) using errcode = 'P0002';
    elsif p_kind = 'response'
          and exists (select from agent_threads t where t.id = p_key)
          and not lanekeeper.agent_flow_may_join(p_key, null, p_id) then
      raise exception 'there is no thread %', quote_literal(p_key) using errcode = 'P0002';
    end if;
    select 'wait ' || p_kind || ' ' || (x.wait_number + 1) into step_ from agent_executions x where x.id = p_id;
    outcome := lanekeeper.wait_agent_execution(p_id, claim_, step_, p_kind, p_key, p_timeout, null);
    if outcome is not null and p_kind = 'agent' then
      update agent_checkpoints c
         set output = outcome || jsonb_build_object('data',
               lanekeeper.agent_end_for_worker(outcome -> 'data', p_id, lanekeeper.agent_uuid(p_key)))
       where c.execution_id = p_id and c.step = step_;
    end if;
    if outcome is not null then                              -- the event had come: the run is ready again
      update agent_executions x
         set claimed_by = null, claim = x.claim + 1, wait_number = x.wait_number + 1, attempt = 0,
             updated_at = clock_timestamp()
       where x.id = p_id;
    end if;
  else
    if p_status = 'failed' and coalesce(p_error, '') = '' then
      p_error := 'the worker gave no reason';
    end if;
    perform lanekeeper.complete_agent_execution(p_id, claim_, p_status, p_summary, p_result, p_error, null);
  end if;
  delete from agent_workers k where k.lock_id = p_lock_id;
  return (select x.status from agent_executions x where x.id = p_id);
end $$;
comment on function unlock_agent_execution is
  'Release the lock of a run: end the run (p_status completed or failed), or let it wait (waiting). A wait has p_kind '
  '(response, agent, document, signature, test, event, delay or approval), p_key (the awaited thread, execution, '
  'request, event key or approval) and p_timeout. Without p_timeout a wait lasts 7 days, for a response 24 hours, for '
  'an agent 1 hour; a delay requires it. A wait ignores p_summary, p_error and p_result. After the wait any worker may '
  'lock the run. It finds the outcome as step ''wait KIND N'', where N counts the waits of the run. The function '
  'returns the status: running if the awaited event had already come. 22023: a value does not belong to p_status. '
  'LK001: the lock is void. P0002: the execution to wait for does not exist, or the run has no access to the thread. '
  '55P03: another transaction has the run locked; try again.';

-- Limits.

create or replace function set_agent_limits(p_limits jsonb) returns void
language plpgsql volatile security definer set search_path from current as $$
declare
  fault constant text := case
    when jsonb_typeof(p_limits) is distinct from 'array'
      then 'limits are an array, not ' || coalesce(left(p_limits::text, 60), 'null')
    else coalesce(
      (select format('limit %s has no %s', left(l::text, 60), f)
         from jsonb_array_elements(p_limits) l cross join unnest(array['kind', 'name', 'running']) f
        where coalesce(l ->> f, '') = '' limit 1),
      (select format('limit %s is not valid: kind is flow or surface, running a whole number from 0', left(l::text, 60))
         from jsonb_array_elements(p_limits) l
        where l ->> 'kind' not in ('flow', 'surface') or l ->> 'running' !~ '^[0-9]{1,9}$' limit 1),
      (select format('the limit of %s %s is given twice', l ->> 'kind', left(l ->> 'name', 60))
         from jsonb_array_elements(p_limits) l group by l ->> 'kind', l ->> 'name' having count(*) > 1 limit 1)) end;
begin
  if fault is not null then
    raise exception '%', fault
      using errcode = '22023', hint = 'Such as [{"kind": "flow", "name": "pay", "running": 2}].';
  end if;
  lock table agent_limits in share row exclusive mode;
  delete from agent_limits l where not exists (
    select from jsonb_to_recordset(p_limits) as n (kind text, name text) where n.kind = l.kind and n.name = l.name);
  insert into agent_limits as l (kind, name, running)
  select n.kind, n.name, n.running
    from jsonb_to_recordset(p_limits) as n (kind text, name text, running int) order by 1, 2
  on conflict (kind, name) do update set running = excluded.running where l.running <> excluded.running;
  perform pg_notify('agent_ready', '');
end $$;
comment on function set_agent_limits is 'Replace all limits by the given ones, [{"kind", "name", "running"}].';

create or replace function lanekeeper.agent_flow_may_join(p_thread text, p_flow text, p_execution_id uuid default null)
returns boolean
language plpgsql stable as $$
declare
  t record;
begin
  select x.owner_kind, x.owner into t from agent_threads x where x.id = p_thread;
  if not found then
    return false;
  elsif t.owner_kind in ('channel', 'admin') or exists (
      select from agent_executions x where x.id = p_execution_id and x.thread_id = p_thread) then
    return true;
  elsif exists (select from lanekeeper.agent_flow_threads f where f.id = p_thread) then
    return true;
  end if;
  return (
    with recursive ancestors as (
      select x.parent_id, x.flow, x.thread_id from agent_executions x where x.id = p_execution_id
      union all
      select x.parent_id, x.flow, x.thread_id from ancestors p join agent_executions x on x.id = p.parent_id),
    flows as (select p_flow as flow where p_flow is not null union select p.flow from ancestors p)
    select exists (select from ancestors p where p.thread_id = p_thread)
        or t.owner_kind = 'flow' and t.owner in (select f.flow from flows f)
        or exists (select from agent_thread_access a
                    where a.kind = 'flow' and a.visitor = '' and a.name = p_thread
                      and a.owner in (select f.flow from flows f)));
end $$;
comment on function lanekeeper.agent_flow_may_join is
  'Whether a flow, or an execution of it, may speak in a thread. One reason suffices. An admin, a channel or the flow '
  'began the thread. The execution or its ancestor was started in the thread. The thread was opened to the flow.';
