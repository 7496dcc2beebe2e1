-- Agents: their definitions, memory and objectives.
--
-- agent_agents keeps every version of an agent's definition. Memory has an owner and a revision: a write names the
-- revision that it is based on. An objective has steps, and a step needs evidence that it is done. agent_secrets has
-- the secret values of the database.

create table agent_agents (
  name text not null check (name ~ '^[a-zA-Z][a-zA-Z0-9_-]{0,63}$'), version int not null check (version > 0),
  digest text not null, definition jsonb not null, is_default boolean not null default false,
  source text not null default 'workspace', current boolean not null default true,
  created_at timestamptz not null default clock_timestamp(),
  constraint agent_agents_default exclude using btree (is_default with =)
    where (current and is_default) deferrable initially deferred,
  primary key (name, version)
);
create unique index agent_agents_current on agent_agents (name) where current;
comment on index agent_agents_current is 'Allows one current version of an agent.';
comment on table agent_agents is 'Versions of declared agents. A turn records the version that it began with.';
comment on column agent_agents.digest is 'SHA-256 of the definition.';
comment on column agent_agents.definition is 'The agent, as the workspace declares it.';
comment on column agent_agents.is_default is
  'The agent acts if a request names no agent. At most one current agent is the default.';
comment on column agent_agents.source is 'The declaring side, such as workspace.';
comment on column agent_agents.current is 'New turns begin with this version. None: the agent was removed.';

create table agent_memory (
  id uuid default lanekeeper.agent_uuid7() primary key,
  category text not null default 'general' check (category <> '' and octet_length(category) <= 255),
  key text not null check (key <> '' and octet_length(key) <= 255),
  value jsonb not null check (octet_length((value)::text) <= 131072), revision int not null default 1,
  trace_id text not null default '', expires_at timestamptz,
  created_at timestamptz not null default clock_timestamp(),
  updated_at timestamptz not null default clock_timestamp(),
  search tsvector generated always as (
    (setweight(to_tsvector('simple'::regconfig, key), 'A'::"char") || to_tsvector('simple'::regconfig, value))) stored,
  owner text not null default '',
  constraint agent_memory_owner_key unique (owner, category, key)
);
create index agent_memory_category on agent_memory (category, key);
comment on index agent_memory_category is 'Lists the memories of a category, of all owners.';
create index agent_memory_expiry on agent_memory (expires_at) where expires_at is not null;
comment on index agent_memory_expiry is 'Finds expired memories.';
create index agent_memory_key on agent_memory (key text_pattern_ops);
comment on index agent_memory_key is 'Finds keys by their beginning.';
create index agent_memory_recent on agent_memory (updated_at);
comment on index agent_memory_recent is 'Lists memories by their last change.';
create index agent_memory_search on agent_memory using gin (search);
comment on index agent_memory_search is 'Finds memories by words.';
comment on table agent_memory is 'The memory of agents: a value for each owner, category and key.';
comment on column agent_memory.category is 'A group of keys.';
comment on column agent_memory.key is 'The name of the memory.';
comment on column agent_memory.value is 'The memory.';
comment on column agent_memory.expires_at is 'When the memory expires. Null: it does not.';
comment on column agent_memory.search is 'The words of key and value, for full-text search.';
comment on column agent_memory.owner is 'The agent that owns the memory. Empty: all agents share it.';

create table agent_memory_conflicts (
  id uuid default lanekeeper.agent_uuid7() primary key, category text not null, key text not null,
  value jsonb not null, ttl_seconds float8 not null default 0, if_revision int not null,
  found_revision int not null, found_value jsonb, found_trace_id text not null default '',
  trace_id text not null default '', execution_id uuid,
  status text not null default 'open' check (status in ('open', 'kept', 'taken')),
  decided_by text not null default '', decided_reason text not null default '', decided_at timestamptz,
  created_at timestamptz not null default clock_timestamp(), owner text not null default '',
  constraint agent_memory_conflicts_check check ((status = 'open') = (decided_at is null)),
  constraint agent_memory_conflicts_check1 check ((found_revision = 0) = (found_value is null))
);
create index agent_memory_conflicts_decided on agent_memory_conflicts (decided_at) where status <> 'open';
comment on index agent_memory_conflicts_decided is 'Finds decided rows to delete.';
create index agent_memory_conflicts_key on agent_memory_conflicts (category, key, id);
comment on index agent_memory_conflicts_key is 'Lists the conflicts of a key.';
create index agent_memory_conflicts_status on agent_memory_conflicts (status, id);
comment on index agent_memory_conflicts_status is 'Lists conflicts by status.';
comment on table agent_memory_conflicts is
  'Late notes that were not written, because another writer had changed the key. An admin decides. Decided rows are '
  'deleted after 90 days.';
comment on column agent_memory_conflicts.category is 'As in agent_memory.';
comment on column agent_memory_conflicts.key is 'As in agent_memory.';
comment on column agent_memory_conflicts.value is 'The value that was not written.';
comment on column agent_memory_conflicts.ttl_seconds is 'Its lifetime. 0: for ever.';
comment on column agent_memory_conflicts.if_revision is 'The revision that the writer had read. 0: none.';
comment on column agent_memory_conflicts.found_revision is 'The revision that was there instead. 0: none.';
comment on column agent_memory_conflicts.found_value is 'The value that was there.';
comment on column agent_memory_conflicts.found_trace_id is 'The trace that had written it.';
comment on column agent_memory_conflicts.trace_id is 'The trace of the writer.';
comment on column agent_memory_conflicts.status is
  'open, or the decision. kept: the present value stayed. taken: this value replaced it.';
comment on column agent_memory_conflicts.decided_by is 'The person who decided.';
comment on column agent_memory_conflicts.decided_reason is 'The reason for the decision.';
comment on column agent_memory_conflicts.decided_at is 'When it was decided.';
comment on column agent_memory_conflicts.owner is 'As in agent_memory.';

create table agent_memory_forgotten (
  category text not null, key text not null, revision int not null,
  forgotten_at timestamptz not null default clock_timestamp(), owner text not null default '',
  constraint agent_memory_forgotten_owner_key primary key (owner, category, key)
);
create index agent_memory_forgotten_at on agent_memory_forgotten (forgotten_at);
comment on index agent_memory_forgotten_at is 'Finds rows to delete.';
comment on table agent_memory_forgotten is
  'The last revision of deleted keys, for 90 days. A new memory of the key continues its revisions. No value is kept.';
comment on column agent_memory_forgotten.category is 'As in agent_memory.';
comment on column agent_memory_forgotten.key is 'As in agent_memory.';
comment on column agent_memory_forgotten.forgotten_at is 'When the key was deleted.';
comment on column agent_memory_forgotten.owner is 'As in agent_memory.';

create table agent_memory_embeddings (
  memory_id uuid not null references agent_memory(id) on delete cascade, model text not null check (model <> ''),
  revision int not null, vector real[] check (cardinality(vector) between 1 and 16000),
  dimensions int, attempts int not null default 0, due_at timestamptz,
  updated_at timestamptz not null default clock_timestamp(),
  primary key (memory_id, model),
  constraint agent_memory_embeddings_check check ((vector is null) = (dimensions is null)),
  constraint agent_memory_embeddings_check1 check ((vector is null) = (due_at is not null))
);
alter table agent_memory_embeddings alter column vector set storage external;
create index agent_memory_embeddings_due on agent_memory_embeddings (due_at) where due_at is not null;
comment on index agent_memory_embeddings_due is 'Finds missing vectors.';
create index agent_memory_embeddings_model on agent_memory_embeddings (model, updated_at);
comment on index agent_memory_embeddings_model is 'Reads the vectors of a model, by their last change.';
comment on table agent_memory_embeddings is
  'The vectors of memories, by embedding model. They are computed after the memory was written.';
comment on column agent_memory_embeddings.memory_id is 'The memory. The row is deleted with it.';
comment on column agent_memory_embeddings.model is 'The embedding model. Vectors of two models are not compared.';
comment on column agent_memory_embeddings.revision is
  'The revision of the memory that was embedded, or is being embedded.';
comment on column agent_memory_embeddings.vector is 'The embedding. Null: not computed yet.';
comment on column agent_memory_embeddings.dimensions is 'The length of the vector.';
comment on column agent_memory_embeddings.attempts is 'How often the server has refused this text.';
comment on column agent_memory_embeddings.due_at is 'When the next attempt to compute a missing vector is due.';
comment on column agent_memory_embeddings.updated_at is 'When the row was claimed or its vector was stored.';

create table agent_objectives (
  id uuid default lanekeeper.agent_uuid7() primary key, name text not null unique check (name <> ''),
  goal text not null, success_criteria text not null default '',
  status           text not null default 'active'
                   check (status in ('proposed', 'active', 'paused', 'completed', 'failed', 'rejected')),
  priority int not null default 2, review_every interval check (review_every > '00:00:00'::interval),
  due_at timestamptz not null default clock_timestamp(), round int not null default 1, note text not null default '',
  proposed_by text not null default '', proposed_trace text not null default '', decided_by text not null default '',
  decided_reason text not null default '', decided_at timestamptz, revision int not null default 1,
  last_trace_id text not null default '', source text not null default '',
  created_at timestamptz not null default clock_timestamp(),
  updated_at timestamptz not null default clock_timestamp(), idle_runs int not null default 0,
  agent text not null default '',
  constraint agent_objectives_check check (status not in ('proposed', 'rejected') or proposed_by <> ''),
  constraint agent_objectives_decided check (proposed_by = '' or status = 'proposed' or decided_by <> '')
);
create index agent_objectives_due on agent_objectives (due_at) where status = 'active';
comment on index agent_objectives_due is 'Finds objectives that are due for the heartbeat.';
create index agent_objectives_proposed on agent_objectives (id) where status = 'proposed';
comment on index agent_objectives_proposed is 'Lists proposals that wait for a decision.';
create index agent_objectives_status on agent_objectives (status, id);
comment on index agent_objectives_status is 'Lists objectives by status.';
comment on table agent_objectives is 'Goals of an agent. People declare objectives, or an agent proposes one.';
comment on column agent_objectives.goal is 'The objective, for the model.';
comment on column agent_objectives.success_criteria is 'The signs that the objective is reached.';
comment on column agent_objectives.status is
  'proposed: waits for a decision. active: the heartbeat works on it. The others are decided or ended.';
comment on column agent_objectives.priority is 'A lower number comes first.';
comment on column agent_objectives.review_every is
  'The pause between rounds of a recurring objective. Null: the objective is done when its steps are.';
comment on column agent_objectives.due_at is 'When the objective is due for the heartbeat.';
comment on column agent_objectives.round is 'The round of a recurring objective.';
comment on column agent_objectives.note is 'The agent''s last remark on the progress.';
comment on column agent_objectives.proposed_by is 'The agent that proposed it. Empty: people declared it.';
comment on column agent_objectives.proposed_trace is 'The trace of the proposal.';
comment on column agent_objectives.decided_by is
  'The admin who accepted or rejected the proposal, or the source of the declaration that accepted it.';
comment on column agent_objectives.decided_reason is 'The reason for the decision.';
comment on column agent_objectives.decided_at is 'When it was decided.';
comment on column agent_objectives.last_trace_id is 'The trace that last worked on it.';
comment on column agent_objectives.source is
  'workspace: a file declared it. admin: an admin''s command. agent: the agent proposed it. pruned: a file declared '
  'it, and apply --prune paused it.';
comment on column agent_objectives.idle_runs is
  'Runs in a row that changed none of its steps. Each run delays due_at further. A change of the objective or of a '
  'step resets the count.';
comment on column agent_objectives.agent is 'The agent whose heartbeat works on it. Empty: the default agent.';

create table agent_objective_steps (
  id uuid default lanekeeper.agent_uuid7() primary key,
  objective_id uuid not null references agent_objectives(id) on delete cascade, position int not null,
  title text not null check (title <> ''),
  status text not null default 'pending' check (status in ('pending', 'done', 'failed', 'skipped')),
  result text not null default '', attempts int not null default 0, trace_id text not null default '',
  started_at timestamptz not null default clock_timestamp(),
  created_at timestamptz not null default clock_timestamp(),
  updated_at timestamptz not null default clock_timestamp(),
  constraint agent_objective_steps_objective_id_position_key unique (objective_id, "position")
);
comment on table agent_objective_steps is 'The steps of an objective.';
comment on column agent_objective_steps.objective_id is 'The objective.';
comment on column agent_objective_steps.position is 'The order of the steps.';
comment on column agent_objective_steps.status is 'In the present round.';
comment on column agent_objective_steps.result is 'The outcome of the last round that did the step.';
comment on column agent_objective_steps.attempts is 'How often it was tried in this round.';
comment on column agent_objective_steps.started_at is
  'When the step was added or last became pending again. Older actions are no evidence.';

create table agent_objective_evidence (
  id uuid default lanekeeper.agent_uuid7() primary key,
  step_id uuid not null references agent_objective_steps(id) on delete cascade, activity_id uuid unique,
  skill_name text not null default '', trace_id text not null default '', given_by text not null default '',
  reason text not null default '', created_at timestamptz not null default clock_timestamp(),
  constraint agent_objective_evidence_check check ((activity_id is null) = (given_by <> '')),
  constraint agent_objective_evidence_check1 check ((given_by = '') = (reason = ''))
);
create index agent_objective_evidence_step on agent_objective_evidence (step_id, created_at);
comment on index agent_objective_evidence_step is 'Lists the evidence of a step.';
comment on table agent_objective_evidence is
  'Evidence that a step is done: a successful action, which proves one step only, or the confirmation of an admin.';
comment on column agent_objective_evidence.step_id is 'The step.';
comment on column agent_objective_evidence.activity_id is 'The action. Null: an admin confirmed the step.';
comment on column agent_objective_evidence.given_by is 'The admin. Empty: an action proves it.';

create table agent_secrets (
  name text primary key, value bytea not null
);
comment on table agent_secrets is 'Random values of this database that no client may know.';
comment on column agent_secrets.value is 'Random bytes.';

insert into agent_secrets (name, value)
values ('thread ids', uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid())) on conflict do nothing;

-- Code

create or replace view lanekeeper.agent_evidence as
select a.id, a.trace_id, a.execution_id, a.step, a.skill_name, a.created_at from agent_activity a
 where a.kind = 'call' and a.status = 'success' and a.surface <> 'chat'
   and a.skill_name not in ('objective_propose', 'objective_update', 'objective_advance', 'objectives_list',
         'automation_propose', 'skill_list', 'skill_search', 'complete_step', 'fail_step', 'add_steps',
         'recent_activity');
comment on view lanekeeper.agent_evidence is
  'Actions that count as evidence: successful calls, except of bookkeeping skills and of the surface chat.';

create or replace function lanekeeper.agent_objectives_check() returns trigger language plpgsql volatile as $$
begin
  if tg_table_name = 'agent_objective_steps' then
    new.started_at := case when tg_op = 'INSERT' then clock_timestamp()
                           when new.status = 'pending' and old.status <> 'pending' then clock_timestamp()
                           else old.started_at end;
    if new.status = 'done' and (tg_op = 'INSERT' or old.status <> 'done') and not exists (
         select from agent_objective_evidence e
          where e.step_id = new.id
            and e.created_at >= new.started_at
            and (e.given_by <> '' or e.trace_id = new.trace_id)) then
      raise exception 'step % is not done: it has no evidence', quote_literal(new.title) using errcode = 'LK010';
    end if;
    update agent_objectives o set idle_runs = 0, due_at = least(o.due_at, clock_timestamp())
     where o.id = new.objective_id and o.idle_runs > 0
       and (tg_op = 'INSERT' or new.attempts > old.attempts or new.status <> old.status and new.status <> 'pending');
    return new;
  elsif tg_op = 'UPDATE' then
    raise exception 'evidence cannot be changed' using errcode = 'LK010', detail = format('evidence %s', old.id);
  elsif tg_op = 'DELETE' then
    if exists (select from agent_objective_steps s where s.id = old.step_id and s.status = 'done') then
      raise exception 'the evidence of a done step cannot be deleted' using errcode = 'LK010';
    end if;
    return old;
  elsif new.activity_id is not null then
    select a.skill_name, a.trace_id into new.skill_name, new.trace_id
      from lanekeeper.agent_evidence a, agent_objective_steps s
     where a.id = new.activity_id and s.id = new.step_id and a.created_at >= s.started_at;
    if not found then
      raise exception 'activity % is no evidence: it must be a successful call made after the step began',
        new.activity_id
        using errcode = 'LK010';
    end if;
  end if;
  return new;
end $$;
comment on function lanekeeper.agent_objectives_check is
  'A step is done only with evidence of this round: a successful call of the trace that reports it, or the '
  'confirmation of an admin (LK010). Progress of a step ends the delay of its objective after idle runs.';

create or replace function lanekeeper.agent_revise() returns trigger language plpgsql volatile as $$
begin
  if tg_op = 'DELETE' then
    insert into agent_memory_forgotten as g (owner, category, key, revision)
    values (old.owner, old.category, old.key, old.revision)
    on conflict (owner, category, key) do update
      set revision = greatest(g.revision, excluded.revision), forgotten_at = excluded.forgotten_at;
  elsif tg_op = 'INSERT' then
    update agent_memory m set revision = g.revision + 1
      from agent_memory_forgotten g
     where m.id = new.id and g.owner = new.owner and g.category = new.category and g.key = new.key
       and g.revision >= m.revision;
  elsif tg_table_name = 'agent_skills' then
    new.state_revision := old.state_revision + 1;
  else
    new.revision := old.revision + 1;
    if tg_table_name = 'agent_objectives' then
      if old.idle_runs > 0
         and (old.goal, old.success_criteria, old.agent, old.status, old.priority, old.review_every)
             is distinct from
             (new.goal, new.success_criteria, new.agent, new.status, new.priority, new.review_every) then
        new.idle_runs := 0;
        new.due_at := least(new.due_at, clock_timestamp());
      end if;
    end if;
  end if;
  return new;
end $$;
comment on function lanekeeper.agent_revise is
  'Increase the revision. The trigger''s condition decides which changes count. A forgotten memory continues its '
  'revisions, after the insert, which may have waited for a delete. An edit of an objective ends its delay after idle '
  'runs.';

create or replace trigger agent_objective_evidence_check before insert or update or delete on agent_objective_evidence
  for each row execute function lanekeeper.agent_objectives_check();

create or replace trigger agent_objective_steps_check before insert or update on agent_objective_steps
  for each row execute function lanekeeper.agent_objectives_check();

create or replace trigger agent_objectives_revise before update on agent_objectives for each row
  when ((to_jsonb(old) - '{due_at,idle_runs,last_trace_id,updated_at}'::text[])
        is distinct from (to_jsonb(new) - '{due_at,idle_runs,last_trace_id,updated_at}'::text[]))
  execute function lanekeeper.agent_revise();

create or replace trigger agent_memory_keep_revision after insert or delete on agent_memory
  for each row execute function lanekeeper.agent_revise();

create or replace trigger agent_memory_revise before update on agent_memory for each row
  when (new.revision < old.revision or new.revision = old.revision and new.value is distinct from old.value)
  execute function lanekeeper.agent_revise();
