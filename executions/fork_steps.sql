-- The checkpoints that a fork of execution @id from step @from copies: those recorded before the step, or all if @from is
-- null. A parallel branch keeps its checkpoints from before that time. The query omits a request for approval that was
-- not used by then, and a request to people without a later checkpoint. The fork makes these requests again.
with cut as (
  -- The time of the step's checkpoint, or of the first checkpoint in a scope or unfinished step. It is infinity for the
  -- step that the execution waits in or failed at, because that step comes after all checkpoints.
  select case when @from::text is null then timestamptz 'infinity' else coalesce(
      (select c.created_at from agent_checkpoints c where c.execution_id = @id and c.step = @from),
      (select min(c.created_at) from agent_checkpoints c
        where c.execution_id = @id and (starts_with(c.step, @from || '/') or starts_with(c.step, @from || '@'))),
      (select timestamptz 'infinity' from agent_executions x where x.id = @id and (x.waiting_step = @from or x.failed_step = @from))) end as at),
kept as (
  select c.*, regexp_replace(c.step, '[^/]*$', '') as scope from agent_checkpoints c
   where c.execution_id = @id and c.created_at < (select at from cut)
     -- The fork repeats the parts of a step, phase, scope or loop, and the waits before it.
     and (@from::text is null or not (c.step = @from or starts_with(c.step, @from || '/') or starts_with(c.step, @from || '@')
          or starts_with(c.step, regexp_replace(@from, '([^/]*)$', 'before \1/'))))),
-- Requests for approval to omit. An approval permits one call of one execution. A fork that does not keep the call
-- requests another approval.
unused_approvals as (
  select a.id, a.step from agent_approvals a
   where a.execution_id = @id and a.parked
     and not exists (
       select from kept k
        where a.consumed_at is not null
          and (k.step = substr(a.consumed_for, 38)
               or right(k.step, length(a.consumed_for) - 36) = '/' || substr(a.consumed_for, 38)))
     and not (a.status in ('rejected', 'expired')
              and exists (
                select from kept k
                 where k.step <> a.step
                   and (strpos(k.step, a.id::text) > 0
                        or exists (
                          select from agent_events v
                           where v.id = lanekeeper.agent_uuid(k.output ->> 'event_id')
                             and v.event = 'APPROVAL_DECIDED' and v.key = a.id::text))))),
-- Requests to people to omit: those without a later kept checkpoint in their scope.
open_requests as (
  select distinct on (r.id) k.step from agent_requests r
    join kept k on strpos(k.output::text, r.id::text) > 0
   where r.execution_id = @id
     and not exists (select from kept later where later.scope = k.scope and later.created_at > k.created_at)
   order by r.id, k.created_at)
select k.step, k.claim, k.fingerprint, k.failed, k.output, k.created_at
  from cut
  left join kept k on not exists (select from unused_approvals a where a.step = k.step)
   and not exists (select from open_requests r where r.step = k.step)
   and not exists (select from unused_approvals a
                     join agent_events v on v.event = 'APPROVAL_DECIDED' and v.key = a.id::text
                    where v.id = lanekeeper.agent_uuid(k.output ->> 'event_id'))
 where cut.at is not null
