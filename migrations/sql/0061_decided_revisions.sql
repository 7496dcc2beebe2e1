-- The revision of an objective and of an automation counts what somebody could lose by a change that is based on an older one: what it
-- says and what was decided about it. That it ran, or is due, is not among it: a page that was opened before a run is still right.
--
-- A skill's revision counts what a call would do, and approvals are bound to it. What else is decided about a skill, whether it is in service
-- and why, is counted in state_revision.

drop trigger agent_objectives_revise on agent_objectives;
create trigger agent_objectives_revise before update on agent_objectives for each row
  when ((to_jsonb(old) - '{due_at,idle_runs,last_trace_id,updated_at}'::text[]) is distinct from (to_jsonb(new) - '{due_at,idle_runs,last_trace_id,updated_at}'::text[]))
  execute function agent_revise();

drop trigger agent_automations_revise on agent_automations;
create trigger agent_automations_revise before update on agent_automations for each row
  when ((to_jsonb(old) - '{armed,next_run_at,last_run_at,last_trace_id,updated_at}'::text[])
        is distinct from (to_jsonb(new) - '{armed,next_run_at,last_run_at,last_trace_id,updated_at}'::text[]))
  execute function agent_revise();

alter table agent_skills add column state_revision int not null default 1;
comment on column agent_skills.state_revision is 'Counts the changes of what the skill says and of whether it is in service.';

create function agent_revise_state() returns trigger language plpgsql volatile as $$
begin
  new.state_revision := old.state_revision + 1;
  return new;
end $$;
create trigger agent_skills_revise before update on agent_skills for each row
  when ((old.revision, old.description, old.source, old.enabled, old.disabled_by, old.disabled_reason)
        is distinct from (new.revision, new.description, new.source, new.enabled, new.disabled_by, new.disabled_reason))
  execute function agent_revise_state();
