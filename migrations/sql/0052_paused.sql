-- An automation rests while its skill does, whoever takes the skill out of service and by whatever means: self-heal, an admin,
-- the quarantine of an MCP tool, a statement by hand. Two triggers keep that true, so that no writer has to remember it.
--
-- Locks: a skill's row before its automations' rows. Inserting an automation, or giving it another skill, locks the
-- skill, so either that sees that the skill is disabled, or the disabling sees the automation. Any other update reads
-- the skill after it has locked the automation's row. A change of the skill locks the rows of all its automations
-- before it looks which are enabled: an update that is under way is waited for, and seen.

create function pause_agent_automations() returns trigger language plpgsql as $$
begin
  perform from agent_automations a where a.skill_name = new.name order by a.id for update;
  if new.enabled then
    update agent_automations a
       set enabled = true, disabled_by = '', disabled_reason = '', disabled_at = null, paused_for = '', updated_at = clock_timestamp()
     where a.skill_name = new.name and a.paused_for = new.name and not a.enabled;
    if found then
      perform pg_notify('agent_automations', '');   -- runs of theirs may be ready
    end if;
  else
    update agent_automations a
       set enabled = false, disabled_by = new.disabled_by, paused_for = new.name, disabled_at = clock_timestamp(), updated_at = clock_timestamp(),
           disabled_reason = left(format('its skill %s is disabled: %s', new.name, new.disabled_reason), 2000)
     where a.skill_name = new.name and (a.enabled or a.paused_for = new.name);
  end if;
  return null;
end $$;
comment on function pause_agent_automations is
  'Pause the automations of a skill that was disabled, and resume exactly those when it is enabled. What an admin disabled stays disabled.';
create trigger agent_skills_pause after insert or update of enabled, disabled_by on agent_skills
  for each row execute function pause_agent_automations();

create function pause_agent_automation() returns trigger language plpgsql as $$
declare
  s record;
begin
  -- It was paused for a skill that it does not call any more.
  if new.paused_for <> '' and new.paused_for <> new.skill_name and not new.enabled then
    new.enabled := true;
    new.disabled_by := '';
    new.disabled_reason := '';
    new.disabled_at := null;
    new.paused_for := '';
  end if;
  if not new.enabled or new.skill_name = '' then
    return new;
  end if;
  if tg_op = 'INSERT' or new.skill_name <> old.skill_name then
    perform from agent_skills k where k.name = new.skill_name for share;
  end if;
  select k.disabled_by, k.disabled_reason into s from agent_skills k where k.name = new.skill_name and not k.enabled;
  if found then
    new.enabled := false;
    new.disabled_by := s.disabled_by;
    new.disabled_reason := left(format('its skill %s is disabled: %s', new.skill_name, s.disabled_reason), 2000);
    new.disabled_at := clock_timestamp();
    new.paused_for := new.skill_name;
  end if;
  return new;
end $$;
comment on function pause_agent_automation is 'Pause an automation that is put into service while its skill is disabled.';
create trigger agent_automations_pause before insert or update of enabled, skill_name on agent_automations
  for each row execute function pause_agent_automation();

-- Those whose skill is disabled already.
update agent_automations a set enabled = a.enabled
 where a.enabled and exists (select from agent_skills k where k.name = a.skill_name and not k.enabled);

comment on column agent_automations.paused_for is 'The skill for which it is paused, whoever disabled that; empty when it is not paused.';

-- A delivery id that comes again with another body: what came is kept for a person to look at, and not handled.

alter table agent_webhook_deliveries add column conflicts int not null default 0;
comment on column agent_webhook_deliveries.conflicts is 'How often it came again with another body; the first of these are in agent_webhook_conflicts.';

create table agent_webhook_conflicts (
  id          uuid primary key default agent_uuid7(),
  delivery    uuid not null references agent_webhook_deliveries (id) on delete cascade,
  headers     jsonb not null default '{}',
  body        bytea not null,
  body_sha256 text not null,
  received_at timestamptz not null default clock_timestamp(),
  constraint agent_webhook_conflicts_once unique (delivery, body_sha256)
);
comment on table agent_webhook_conflicts is
  'Other bodies that came, signed, under the id of a delivery: as they came, a few for each delivery. None of them was handled.';
