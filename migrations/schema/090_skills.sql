-- Skills: the calls of an agent, and their approvals.
--
-- Self-heal disables a skill that fails too often. A trial or an admin enables it again. An approval is bound to
-- execution, step, revision of the skill and arguments. It is used once, in the transaction that records the call.

create table agent_skills (
  id uuid default lanekeeper.agent_uuid7() primary key,
  name text not null unique check (name ~ '^[a-zA-Z0-9_-]{1,64}$'), description text not null default '',
  tool_definition jsonb not null, handler text not null check (handler ~ '^(builtin|http|mcp|sql|flow):'),
  config jsonb not null default '{}',
  scope text not null default 'internal' check (scope in ('internal', 'external', 'both')),
  trust text not null default 'auto' check (trust in ('auto', 'notify', 'approve')),
  idempotent boolean not null default false, timeout_ms int not null default 30000 check (timeout_ms > 0),
  enabled boolean not null default true, disabled_reason text not null default '',
  disabled_by text not null default '', disabled_at timestamptz,
  enabled_at timestamptz not null default '1970-01-01 00:00:00+00'::timestamptz, trial_at timestamptz,
  evidence jsonb not null default '{}', revision int not null default 1, source text not null default '',
  created_at timestamptz not null default clock_timestamp(),
  updated_at timestamptz not null default clock_timestamp(), state_revision int not null default 1,
  four_eyes boolean not null default false,
  constraint agent_skills_check check (enabled = (disabled_by = ''))
);
comment on table agent_skills is 'Skills that agents can call. Self-heal disables a skill that keeps failing.';
comment on column agent_skills.tool_definition is '{"name", "description", "parameters": JSON Schema}, for the model.';
comment on column agent_skills.handler is 'The code that runs the skill, such as builtin:NAME, http:URL or sql:.';
comment on column agent_skills.config is 'Settings of the handler: SQL text, method, headers, limits.';
comment on column agent_skills.scope is
  'internal: for heartbeat, operate and webhooks. external: for conversations with visitors.';
comment on column agent_skills.trust is
  'auto: it runs. notify: it runs and is announced. approve: it waits for an approval.';
comment on column agent_skills.idempotent is 'The runtime may call it again after a crash.';
comment on column agent_skills.timeout_ms is 'The time limit of a call, in milliseconds.';
comment on column agent_skills.disabled_reason is 'Why it was disabled.';
comment on column agent_skills.disabled_by is 'self_heal, or the admin. Empty: it is enabled.';
comment on column agent_skills.disabled_at is 'When it was disabled.';
comment on column agent_skills.enabled_at is 'When it was enabled again. Earlier failures do not count.';
comment on column agent_skills.trial_at is 'When the one trial after the cool-down was offered.';
comment on column agent_skills.evidence is 'The figures for which self-heal disabled the skill.';
comment on column agent_skills.source is 'workspace, builtin or mcp.';
comment on column agent_skills.state_revision is
  'Counts changes of the skill''s definition, and of enabled and its reason.';
comment on column agent_skills.four_eyes is
  'The principal that requested a call cannot approve it. The setting needs trust approve.';

create table agent_databases (
  name text primary key check (name ~ '^[a-zA-Z][a-zA-Z0-9_-]{0,63}$'), description text not null default '',
  url_env text not null check (url_env ~ '^[A-Za-z_][A-Za-z0-9_]{0,127}$'),
  access text not null default 'read' check (access in ('read', 'write')), role text not null default '',
  source text not null default 'workspace', created_at timestamptz not null default clock_timestamp(),
  updated_at timestamptz not null default clock_timestamp()
);
comment on table agent_databases is
  'Databases besides this one that sql: skills use. Their URLs are secrets and stay in the environment.';
comment on column agent_databases.url_env is 'The environment variable that has the URL.';
comment on column agent_databases.access is
  'read: every call is a read-only transaction. write: skills with config.writes may change it.';
comment on column agent_databases.role is 'The role of the queries (set local role). Empty: the role of the URL.';
comment on column agent_databases.source is 'The declaring side, such as workspace.';

create table agent_approvals (
  id uuid default lanekeeper.agent_uuid7() primary key, trace_id text not null, execution_id uuid,
  activity_id uuid, step text not null default '', parked boolean not null default false,
  skill_name text not null, skill_revision int not null, arguments jsonb not null,
  arguments_hash text not null,
  status text not null default 'pending' check (status in ('pending', 'approved', 'rejected', 'expired', 'consumed')),
  decided_by text not null default '', reason text not null default '', decided_at timestamptz,
  consumed_at timestamptz, consumed_for text not null default '', expires_at timestamptz not null,
  created_at timestamptz not null default clock_timestamp(), decided_token_id text not null default '',
  decided_via text not null default '', decided_message text not null default '',
  four_eyes boolean not null default false, requested_by text[] not null default '{}',
  constraint agent_approvals_bound check (not parked or execution_id is not null and step <> '')
);
create index agent_approvals_granted on agent_approvals (skill_name, id)
  where decided_at is not null and status <> 'rejected';
comment on index agent_approvals_granted is 'Lists the approvals of a skill that were granted.';
create unique index agent_approvals_open on agent_approvals (skill_name, arguments_hash)
  where status in ('pending', 'approved') and (NOT parked);
comment on index agent_approvals_open is 'Allows one open approval for each call that no execution waits for.';
create index agent_approvals_state on agent_approvals (status, expires_at, id);
comment on index agent_approvals_state is 'Finds open approvals that have expired.';
create index agent_approvals_status on agent_approvals (status, id);
comment on index agent_approvals_status is 'Lists approvals by status.';
create unique index agent_approvals_step on agent_approvals (execution_id, step) where parked;
comment on index agent_approvals_step is 'Allows one approval for each step.';
create index agent_approvals_trace on agent_approvals (trace_id, id);
comment on index agent_approvals_trace is 'Lists the approvals of a trace.';
create index agent_approvals_waiting on agent_approvals (execution_id)
  where parked and status in ('pending', 'approved');
comment on index agent_approvals_waiting is 'Finds the open approvals of an execution, to void them with its end.';
comment on table agent_approvals is
  'Grants of one call: one revision of a skill with one set of arguments. A parked approval belongs to the execution '
  'that waits for it, and is void when the execution ends.';
comment on column agent_approvals.activity_id is 'The row of the log that requested the approval.';
comment on column agent_approvals.step is 'The step that waits for it.';
comment on column agent_approvals.parked is
  'An execution waits for the decision. Otherwise the next caller that repeats the call uses the approval.';
comment on column agent_approvals.arguments is 'The arguments of the call.';
comment on column agent_approvals.arguments_hash is 'Their hash. Other arguments need another approval.';
comment on column agent_approvals.status is
  'pending, then approved or rejected. consumed: used. expired: void without a use.';
comment on column agent_approvals.decided_by is 'The person who decided.';
comment on column agent_approvals.decided_at is 'When it was decided.';
comment on column agent_approvals.consumed_at is 'When it was used.';
comment on column agent_approvals.consumed_for is 'The execution and step that used it.';
comment on column agent_approvals.expires_at is 'When a decision or a use is too late.';
comment on column agent_approvals.decided_token_id is
  'The API token of the decision. Empty: a session, AGENT_ADMIN_TOKEN, or no API.';
comment on column agent_approvals.decided_via is 'Channel of the decision: page, http, cli, slack, telegram, or sql.';
comment on column agent_approvals.decided_message is
  'The provider''s id of the message with the button. Empty: no button.';
comment on column agent_approvals.four_eyes is
  'Principals of requested_by other than root cannot decide. Without a known requester, root or SQL decides.';
comment on column agent_approvals.requested_by is 'The known principals that requested the execution.';

create table agent_mcp_servers (
  id uuid default lanekeeper.agent_uuid7() primary key,
  name text not null unique check (name ~ '^[a-z0-9][a-z0-9-]{0,23}$'),
  transport text not null check (transport in ('http', 'stdio')), url text not null default '',
  command text[] not null default '{}'::text[], headers jsonb not null default '{}', env jsonb not null default '{}',
  scope text not null default 'internal' check (scope in ('internal', 'external', 'both')),
  trust text not null default 'approve' check (trust in ('auto', 'notify', 'approve')),
  auto text[] not null default '{}'::text[], include text[] not null default '{}'::text[],
  exclude text[] not null default '{}'::text[], idempotent text[] not null default '{}'::text[],
  timeout_ms int not null default 30000 check (timeout_ms > 0), revision int not null default 1,
  source text not null default '', attempted_at timestamptz, synced_at timestamptz,
  sync_error text not null default '', about text not null default '',
  created_at timestamptz not null default clock_timestamp(),
  updated_at timestamptz not null default clock_timestamp(),
  constraint agent_mcp_servers_check check ((transport = 'http') = (url <> '')),
  constraint agent_mcp_servers_check1 check ((transport = 'stdio') = (cardinality(command) > 0))
);
comment on table agent_mcp_servers is
  'MCP servers, as the workspace declares them. Secrets in headers and environment are references.';
comment on column agent_mcp_servers.transport is 'The transport to the server: http or stdio.';
comment on column agent_mcp_servers.command is 'For stdio: the program and its arguments.';
comment on column agent_mcp_servers.headers is 'For http: headers of each request.';
comment on column agent_mcp_servers.env is 'For stdio: environment variables of the process.';
comment on column agent_mcp_servers.scope is 'The scope of its skills.';
comment on column agent_mcp_servers.trust is 'The trust of its skills.';
comment on column agent_mcp_servers.auto is 'Patterns of tools that need no approval.';
comment on column agent_mcp_servers.include is 'Patterns of tools to mount; empty: all.';
comment on column agent_mcp_servers.exclude is 'Patterns of tools that are not mounted.';
comment on column agent_mcp_servers.idempotent is 'Patterns of tools that the runtime may call again after a crash.';
comment on column agent_mcp_servers.timeout_ms is 'The time limit of a call, in milliseconds.';
comment on column agent_mcp_servers.source is 'The declaring side, such as workspace.';
comment on column agent_mcp_servers.attempted_at is 'When its tools were last requested.';
comment on column agent_mcp_servers.synced_at is 'When its tools were last listed.';
comment on column agent_mcp_servers.sync_error is 'Why the last attempt failed.';
comment on column agent_mcp_servers.about is 'Name, version and protocol, as the server states them.';

create table agent_mcp_tools (
  server text not null references agent_mcp_servers(name) on delete cascade, tool text not null check (tool <> ''),
  skill_name text not null unique,
  state text not null check (state in ('mounted', 'quarantined', 'gone', 'excluded', 'refused')),
  reason text not null default '', pin text not null default '', definition jsonb not null default '{}',
  seen_pin text not null default '', seen jsonb not null default '{}',
  created_at timestamptz not null default clock_timestamp(),
  updated_at timestamptz not null default clock_timestamp(),
  primary key (server, tool)
);
comment on table agent_mcp_tools is 'Tools of MCP servers. Each accepted tool is the skill skill_name.';
comment on column agent_mcp_tools.server is 'The server.';
comment on column agent_mcp_tools.tool is 'The name that the server gives it.';
comment on column agent_mcp_tools.state is
  'mounted: in service. quarantined: changed since it was accepted. gone: no longer listed. excluded, refused: not '
  'mounted.';
comment on column agent_mcp_tools.pin is
  'The hash of the accepted definition. The skill calls no other definition. Empty: no definition was accepted yet.';
comment on column agent_mcp_tools.definition is 'The accepted definition.';
comment on column agent_mcp_tools.seen_pin is 'The hash of the definition that the server shows now, if it differs.';
comment on column agent_mcp_tools.seen is 'The definition of seen_pin.';

create table agent_mcp_offers (
  skill_name text primary key references agent_skills(name) on delete cascade,
  offered_by text not null check (offered_by <> ''), created_at timestamptz not null default clock_timestamp()
);
comment on table agent_mcp_offers is
  'Skills that an admin offers to other programs over MCP. The offer is deleted with the skill.';
comment on column agent_mcp_offers.offered_by is 'The admin.';

create table agent_mcp_calls (
  id uuid default lanekeeper.agent_uuid7() primary key, skill_name text not null, skill_revision int not null,
  arguments_hash text not null, collected_at timestamptz, created_at timestamptz not null default clock_timestamp()
);
create index agent_mcp_calls_collected on agent_mcp_calls (collected_at) where collected_at is not null;
comment on index agent_mcp_calls_collected is 'Finds rows to delete.';
create unique index agent_mcp_calls_open on agent_mcp_calls (skill_name, skill_revision, arguments_hash)
  where collected_at is null;
comment on index agent_mcp_calls_open is 'Finds the first try of a call, and allows one.';
comment on table agent_mcp_calls is
  'Calls from other programs that need an approval. The second try of a call finds the execution of the first here.';
comment on column agent_mcp_calls.arguments_hash is 'The hash of the arguments.';
comment on column agent_mcp_calls.collected_at is
  'When the caller received the answer. Afterwards the same call is a new one.';

-- Code

create or replace function decide_agent_approval(p_id uuid, p_approve boolean, p_by text, p_reason text)
returns setof agent_approvals
language plpgsql volatile security definer set search_path from current as $$
declare
  a agent_approvals;
  actor jsonb := lanekeeper.agent_actor();
begin
  perform lanekeeper.check_agent_reason(p_by, p_reason);
  if p_approve is null then
    raise exception 'a decision needs true or false' using errcode = '22023';
  end if;
  -- Lock the waiting execution before the approval, because the end of an execution voids its approvals.
  perform pg_advisory_xact_lock(hashtextextended('wait approval ' || p_id, 0));
  perform 1 from agent_executions x
    where x.status = 'waiting' and x.waiting_for = 'approval'
      and x.waiting_key = p_id::text order by x.id for no key update;
  update agent_approvals x
     set status = case when p_approve then 'approved' else 'rejected' end, decided_by = p_by,
         reason = coalesce(p_reason, ''), decided_at = clock_timestamp(),
         expires_at = case when p_approve
                             then clock_timestamp()
                                  + make_interval(secs => extract(epoch from x.expires_at - x.created_at)::float8)
                           else x.expires_at end,
         decided_token_id = coalesce(actor ->> 'key_id', ''), decided_via = coalesce(actor ->> 'via', ''),
         decided_message = coalesce(actor ->> 'message', '')
   where x.id = p_id and x.status = 'pending' and x.expires_at > clock_timestamp()
     and (not p_approve or exists (
            select from agent_skills s where s.name = x.skill_name and s.revision = x.skill_revision))
  returning x.* into a;
  if not found then
    return;
  end if;
  if a.four_eyes and p_by not in ('root', 'admin') then
    if p_by = any (a.requested_by) then
      raise exception 'four eyes: % requested this call, so somebody else must decide', p_by
        using errcode = 'LK011', detail = format('approval %s of skill %s', a.id, a.skill_name);
    elsif a.requested_by = '{}' and actor ->> 'via' is distinct from 'sql' and not exists (
        select from agent_executions x where x.id = a.execution_id and x.surface = 'chat') then
      raise exception 'four eyes: the requester of this call is unknown, so only root can decide'
        using errcode = 'LK011', detail = format('approval %s of skill %s', a.id, a.skill_name);
    end if;
  end if;
  if actor ->> 'via' = 'sql' then                            -- the program records other decisions itself
    insert into agent_activity (trace_id, kind, agent, surface, skill_name, status, input, output, finished_at,
                                duration_ms)
    values (lanekeeper.agent_trace_id('op'), 'note', 'admin', 'operate', 'decide_approval', 'success',
            jsonb_build_object('approval_id', a.id, 'skill', a.skill_name,
                               'decision', case when p_approve then 'approve' else 'reject' end,
                               'by', p_by, 'reason', coalesce(p_reason, ''), 'via', 'sql')
              || case when a.four_eyes and p_by = any (a.requested_by)
                        then '{"four_eyes": "the requester decided"}'::jsonb
                      else '{}' end,
            jsonb_build_object('status', a.status, 'trace_id', a.trace_id), clock_timestamp(), 0);
  end if;
  if a.parked then
    perform lanekeeper.deliver_agent_event('APPROVAL_DECIDED', a.id::text,
      jsonb_build_object('status', a.status, 'by', a.decided_by, 'reason', a.reason), 'approval ' || a.id);
    perform pg_notify('agent_wake', a.execution_id::text);
  end if;
  return next a;
end $$;
comment on function decide_agent_approval is
  'Approve or reject, once, and resume the execution that waits. No row: the approval is unknown, decided, expired or '
  'void. LK011: four eyes, and p_by requested the call, or its requester is unknown.';

create or replace function lanekeeper.agent_approval_outcome(p_approval agent_approvals) returns text
language sql stable parallel safe as $$
  select case p_approval.status when 'consumed' then 'approved' else p_approval.status end
      || case when p_approval.decided_by = '' then ''
              else ' by ' || lanekeeper.agent_decider(p_approval.decided_by, p_approval.decided_via,
                                                      p_approval.decided_token_id, p_approval.decided_message) end
      || case p_approval.status when 'consumed' then ', used' else '' end
$$;
comment on function lanekeeper.agent_approval_outcome is
  'The state of an approval, for people: approved by ana via slack, used. The status consumed means approved and used.';

create or replace function lanekeeper.agent_rejected_executions(p_most int) returns setof uuid language sql stable
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set jit = off as $$
  with recursive rejected as (
    select x.id, x.parent_id, x.error_message
      from (select n.execution_id, n.step, n.skill_name from agent_approvals n
             where n.status = 'rejected' and n.parked order by n.id desc limit p_most) a
      join agent_executions x on x.id = a.execution_id and x.status = 'failed'
       and a.step = coalesce(nullif(x.failed_step, '') || '/', '') || 'ask ' || a.skill_name
     -- Another failure of the same step has another class, for example when a model read the rejection and then failed.
     where x.flow = 'mcp.call' or exists (
             select from agent_activity k
              where k.execution_id = x.id and k.id >= x.id and k.step = x.failed_step and k.error_class = 'denied')
    union
    select p.id, p.parent_id, p.error_message
      from rejected r join agent_executions p on p.id = r.parent_id and p.status = 'failed'
     where r.error_message <> '' and strpos(p.error_message, r.error_message) > 0)
  select r.id from rejected r
$$;
comment on function lanekeeper.agent_rejected_executions is
  'Executions that failed because a person rejected their call, and the parents that failed with the same error. It '
  'reads the newest p_most rejections.';

create or replace function lanekeeper.use_agent_approval(p_id uuid, p_execution_id uuid, p_step text) returns void
language plpgsql volatile as $$
begin
  update agent_approvals a
     set status = 'consumed', consumed_at = clock_timestamp(), consumed_for = p_execution_id || ' ' || p_step
   where a.id = p_id and (not a.parked or a.execution_id = p_execution_id)
     and ((a.status = 'approved' and a.expires_at > clock_timestamp()
           and exists (select from agent_skills s where s.name = a.skill_name and s.revision = a.skill_revision))
          or (a.status = 'consumed' and a.consumed_for = p_execution_id || ' ' || p_step));
  if not found then
    raise exception 'approval % is no live grant of this step: it may be undecided, used, rejected, expired or another '
      'execution''s, or its skill has changed', p_id
      using errcode = 'LK003';
  end if;
  insert into agent_links (cause, kind, effect)
  select 'approval ' || a.id, 'allowed', 'execution ' || p_execution_id from agent_approvals a
   where a.id = p_id and a.execution_id is distinct from p_execution_id
  on conflict do nothing;
end $$;
comment on function lanekeeper.use_agent_approval is
  'Use a grant for one step of one execution, in the transaction that writes the call''s intent. LK003: the approval '
  'is not a live grant. The same step may use it again after a crash.';

create or replace function lanekeeper.agent_approvals_check() returns trigger language plpgsql as $$
declare
  why_ text;
  a record;
begin
  if tg_table_name = 'agent_approvals' and tg_when = 'AFTER' then
    update agent_automation_runs r
       set error_message = left(case new.status
             when 'rejected' then format('rejected by %s: %s', new.decided_by, new.reason)
             else 'not called: ' || coalesce(nullif(new.reason, ''), 'the approval expired') end, 1900)
           || format(' (approval %s)', new.id)
     where r.status = 'skipped' and r.output ? 'approval_id' and r.output ->> 'approval_id' = new.id::text;
    return null;
  elsif tg_table_name = 'agent_approvals' then
    raise exception '%', case when old.status in ('pending', new.status)
        then 'the call of an approval cannot be changed; a call with other arguments needs its own approval'
        else format('an approval that is %s stays %1$s; the call needs its own approval', old.status) end
      using errcode = 'LK003', detail = format('approval %s', old.id);
  end if;
  why_ := case tg_op when 'DELETE' then format('the skill %s was removed', old.name)
    else format('the skill %s was changed: revision %s is now %s', new.name, old.revision, new.revision) end;
  for a in
    select x.id, x.trace_id, x.execution_id, x.parked from agent_approvals x
     where x.status in ('pending', 'approved') and x.skill_name = old.name
       and x.skill_revision is distinct from new.revision order by x.id
  loop
    -- As in decide_agent_approval, lock the waiting execution before the approval.
    perform pg_advisory_xact_lock(hashtextextended('wait approval ' || a.id, 0));
    perform 1 from agent_executions x
      where x.status = 'waiting' and x.waiting_for = 'approval'
        and x.waiting_key = a.id::text order by x.id for no key update;
    update agent_approvals x set status = 'expired', reason = why_
     where x.id = a.id and x.status in ('pending', 'approved');
    continue when not found;
    insert into agent_activity (trace_id, execution_id, kind, surface, skill_name, status, input, finished_at,
                                duration_ms)
    values (a.trace_id, a.execution_id, 'note', 'operate', 'close_approval', 'skipped',
            jsonb_build_object('approval_id', a.id, 'skill', old.name, 'reason', why_), clock_timestamp(), 0);
    if a.parked then
      perform lanekeeper.deliver_agent_event('APPROVAL_DECIDED', a.id::text,
                                  jsonb_build_object('status', 'expired', 'by', '', 'reason', why_),
                                  'approval ' || a.id);
      perform pg_notify('agent_wake', a.execution_id::text);
    end if;
  end loop;
  return null;
end $$;
comment on function lanekeeper.agent_approvals_check is
  'Refuse a change of the call or of the final status of an approval (LK003). Expire the open approvals of earlier '
  'revisions of a skill, and resume the executions that wait for them. Record in the run of an automation why its call '
  'is not made: its approval was rejected, or expired.';

create or replace trigger agent_approvals_closed after update of status on agent_approvals for each row
  when (old.status <> new.status and new.status in ('rejected', 'expired'))
  execute function lanekeeper.agent_approvals_check();

create or replace trigger agent_approvals_fixed
  before update of trace_id, execution_id, step, parked, skill_name, skill_revision, arguments, arguments_hash
  on agent_approvals
  for each row when ((old.trace_id, old.execution_id, old.step, old.parked, old.skill_name, old.skill_revision,
                      old.arguments, old.arguments_hash)
                     is distinct from
                     (new.trace_id, new.execution_id, new.step, new.parked, new.skill_name, new.skill_revision,
                      new.arguments, new.arguments_hash))
  execute function lanekeeper.agent_approvals_check();

create or replace trigger agent_approvals_eyes before update of four_eyes on agent_approvals for each row
  when (old.four_eyes is distinct from new.four_eyes) execute function lanekeeper.agent_approvals_check();

create or replace trigger agent_approvals_final before update of status on agent_approvals for each row
  when (old.status in ('rejected', 'expired', 'consumed') and old.status <> new.status)
  execute function lanekeeper.agent_approvals_check();

create or replace trigger agent_skills_revise before update on agent_skills for each row
  when ((old.revision, old.description, old.source, old.enabled, old.disabled_by, old.disabled_reason)
        is distinct from (new.revision, new.description, new.source, new.enabled, new.disabled_by, new.disabled_reason))
  execute function lanekeeper.agent_revise();

create or replace trigger agent_skills_changed after update of revision on agent_skills
  for each row when (old.revision <> new.revision) execute function lanekeeper.agent_approvals_check();

create or replace trigger agent_skills_removed after delete on agent_skills for each row
  execute function lanekeeper.agent_approvals_check();
