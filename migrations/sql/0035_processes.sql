-- A lane that a process keeps for something that is no execution, as the session of an admin between its turns, names the process
-- at the end of its owner, after "@". When the process is dead, who swept gives the lane back: nobody should wait for the rest of a lease
-- that nobody renews. A process that was only paused finds the lane lost when it wakes, as it finds its claims.

create function free_agent_worker_lanes() returns trigger
language plpgsql volatile set enable_seqscan = off set jit = off as $$
declare
  h record;
begin
  for h in
    select l.lane, l.locked_by, l.fencing_token from agent_locks l
     where l.locked_by <> '' and right(l.locked_by, 37) = '@' || old.id and l.execution_id is null
     order by l.lane for update skip locked                 -- who changes it in this moment is alive
  loop
    perform release_agent_lock(h.lane, h.locked_by, h.fencing_token);
  end loop;
  return null;
end $$;
comment on function free_agent_worker_lanes is
  'After a process has been found dead: gives back the lanes whose owner ends with its id.';

create trigger agent_workers_lanes after delete on agent_workers
  for each row when (old.kind = 'process') execute function free_agent_worker_lanes();
