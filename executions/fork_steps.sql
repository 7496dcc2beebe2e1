-- What a fork of execution @id from step @from begins with: what was recorded before it, or all of it when @from is
-- null. A parallel branch keeps what it had by then. A request for approval that was not used by then, or one to people
-- that nothing followed, is left out: it is made anew.
with cut as (
  -- The moment when the step was recorded, or the first one in a scope or in a step under way. A step that comes next is
  -- after all.
  select case when @from::text is null then timestamptz 'infinity' else coalesce(
      (select c.created_at from agent_checkpoints c where c.execution_id = @id and c.step = @from),
      (select min(c.created_at) from agent_checkpoints c
        where c.execution_id = @id and (starts_with(c.step, @from || '/') or starts_with(c.step, @from || '@'))),
      (select timestamptz 'infinity' from agent_executions x where x.id = @id and (x.waiting_step = @from or x.failed_step = @from))) end as at),
kept as (
  select c.*, regexp_replace(c.step, '[^/]*$', '') as scope from agent_checkpoints c
   where c.execution_id = @id and c.created_at < (select at from cut)
     -- What a step, a phase, a scope or a loop consists of, and what was waited for before it, is done anew with it.
     and (@from::text is null or not (c.step = @from or starts_with(c.step, @from || '/') or starts_with(c.step, @from || '@')
          or starts_with(c.step, regexp_replace(@from, '([^/]*)$', 'before \1/'))))),
-- An approval is given to one execution, for one call: an execution that has not made the call asks anew.
asked as (
  select a.id, a.step from agent_approvals a
   where a.execution_id = @id and a.parked
     and not exists (select from kept k where a.consumed_at is not null
            and (k.step = substr(a.consumed_for, 38) or right(k.step, length(a.consumed_for) - 36) = '/' || substr(a.consumed_for, 38)))
     and not (a.status in ('rejected', 'expired') and exists (
            select from kept k where k.step <> a.step and (strpos(k.step, a.id::text) > 0 or exists (
              select from agent_events v where v.id = lanekeeper.agent_uuid(k.output ->> 'event_id') and v.event = 'APPROVAL_DECIDED'
                 and v.key = a.id::text))))),
-- So is what was asked of people, as long as nothing that follows is kept.
open as (
  select distinct on (r.id) k.step from agent_requests r
    join kept k on strpos(k.output::text, r.id::text) > 0
   where r.execution_id = @id
     and not exists (select from kept later where later.scope = k.scope and later.created_at > k.created_at)
   order by r.id, k.created_at)
select k.step, k.claim, k.fingerprint, k.failed, k.output, k.created_at
  from cut left join kept k on not exists (select from asked a where a.step = k.step)
   and not exists (select from open o where o.step = k.step)
   and not exists (select from asked a join agent_events v on v.event = 'APPROVAL_DECIDED' and v.key = a.id::text
                    where v.id = lanekeeper.agent_uuid(k.output ->> 'event_id'))
 where cut.at is not null
