-- Approvals are closed when their skill changes, and objectives without progress are tried less often.

-- Approvals -----------------------------------------------------------------------------------------

create function close_agent_approvals(p_skill text, p_revision int, p_reason text) returns int
language plpgsql volatile as $$
declare
  a record;
  n int := 0;
begin
  for a in
    select x.id, x.trace_id, x.execution_id, x.parked from agent_approvals x
     where x.status in ('pending', 'approved') and not x.parked and x.skill_name = p_skill and x.skill_revision is distinct from p_revision
    union all
    select x.id, x.trace_id, x.execution_id, x.parked from agent_approvals x
     where x.parked and x.status in ('pending', 'approved') and x.skill_name = p_skill and x.skill_revision is distinct from p_revision
     order by id
  loop
    -- As a decision does: who waits before the approval.
    perform agent_wait_lock('approval', a.id::text);
    perform 1 from agent_executions x
      where x.status = 'waiting' and x.waiting_for = 'approval' and x.waiting_key = a.id::text order by x.id for no key update;
    update agent_approvals x set status = 'expired', reason = p_reason where x.id = a.id and x.status in ('pending', 'approved');
    continue when not found;
    n := n + 1;
    insert into agent_activity (trace_id, execution_id, kind, surface, skill_name, status, input, finished_at, duration_ms)
    values (a.trace_id, a.execution_id, 'note', 'operate', 'close_approval', 'skipped',
            jsonb_build_object('approval_id', a.id, 'skill', p_skill, 'reason', p_reason), clock_timestamp(), 0);
    if a.parked then
      perform deliver_agent_event('APPROVAL_DECIDED', a.id::text, jsonb_build_object('status', 'expired', 'by', '', 'reason', p_reason),
                                  'approval ' || a.id);
      perform pg_notify('agent_wake', a.execution_id::text);
    end if;
  end loop;
  return n;
end $$;
comment on function close_agent_approvals is
  'Close the open approvals of a skill that are for another revision than p_revision (null: the skill is gone), and let who waits for '
  'them go on. Answers how many.';

create function agent_skills_changed() returns trigger language plpgsql as $$
begin
  if tg_op = 'DELETE' then
    perform close_agent_approvals(old.name, null, format('the skill %s was removed', old.name));
  else
    perform close_agent_approvals(new.name, new.revision,
      format('the skill %s was changed: revision %s is now %s', new.name, old.revision, new.revision));
  end if;
  return null;
end $$;
create trigger agent_skills_changed after update of revision on agent_skills
  for each row when (old.revision <> new.revision) execute function agent_skills_changed();
create trigger agent_skills_removed after delete on agent_skills for each row execute function agent_skills_changed();

-- Objectives ----------------------------------------------------------------------------------------

alter table agent_objectives add column idle_runs int not null default 0;
comment on column agent_objectives.idle_runs is
  'Runs in a row that changed none of its steps. due_at is put off longer after each; a change of the objective or of a step ends that.';

create function put_off_agent_objective(p_id uuid) returns timestamptz language sql volatile as $$
  update agent_objectives o
     set idle_runs = o.idle_runs + 1, updated_at = clock_timestamp(),
         due_at = clock_timestamp() + least(interval '15 minutes' * 2 ^ least(o.idle_runs, 10), interval '1 day')
   where o.id = p_id and o.status = 'active' and o.due_at <= clock_timestamp()
  returning o.due_at
$$;
comment on function put_off_agent_objective is
  'A run made no progress: the objective is due again in 15 minutes, twice as long after each further one, a day at most. Null when it '
  'is not active or not due.';

create function agent_objectives_edited() returns trigger language plpgsql as $$
begin
  new.idle_runs := 0;
  new.due_at := least(new.due_at, clock_timestamp());
  return new;
end $$;
create trigger agent_objectives_edited
  before update of goal, success_criteria, status, priority, review_every on agent_objectives
  for each row when (old.idle_runs > 0 and (old.goal, old.success_criteria, old.status, old.priority, old.review_every)
                     is distinct from (new.goal, new.success_criteria, new.status, new.priority, new.review_every))
  execute function agent_objectives_edited();

create function agent_objective_progressed() returns trigger language plpgsql as $$
begin
  update agent_objectives o set idle_runs = 0, due_at = least(o.due_at, clock_timestamp())
   where o.id = new.objective_id and o.idle_runs > 0;
  return null;
end $$;
create trigger agent_objective_steps_added after insert on agent_objective_steps
  for each row execute function agent_objective_progressed();
create trigger agent_objective_steps_changed after update of status, attempts on agent_objective_steps
  for each row when (new.attempts > old.attempts or (new.status <> old.status and new.status <> 'pending'))
  execute function agent_objective_progressed();
