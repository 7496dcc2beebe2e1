-- A thread may be lent by a parent that runs, to a child that it has just started. When the parent then waits for anything but that child, the
-- loan ends: the child acts under lanes of its own, as every child does that is not waited for.

create or replace function park_agent_locks(p_execution_id uuid, p_parked boolean) returns void
language plpgsql volatile as $$
declare
  mine text[] := lock_agent_locks(p_execution_id);
  loan record;
begin
  if mine = '{}' then
    return;
  end if;
  if p_parked then
    for loan in
      select distinct on (n.lane) n.lane, n.depth, n.ttl_seconds, x.claim
        from agent_lock_loans n join agent_executions x on x.id = n.lender
       where n.lender = p_execution_id and n.lane = any (mine) and (x.waiting_for = 'agent' and x.waiting_key = n.borrower::text) is not true
       order by n.lane, n.depth
    loop
      delete from agent_lock_loans n where n.lane = loan.lane and n.depth >= loan.depth;
      perform hand_agent_lock(loan.lane, p_execution_id, loan.claim, agent_lock_parks(loan.lane), loan.ttl_seconds);
    end loop;
  end if;
  -- Parking changes the key: the claim that parked may write nothing more under its token.
  update agent_locks l
     set parked = p_parked,
         locked_by = (select x.id || '#' || x.claim from agent_executions x where x.id = p_execution_id),
         fencing_token = agent_lock_token(l.fencing_token, clock_timestamp()),
         expires_at = case when p_parked then timestamptz '9000-01-01 00:00+00'
                           else clock_timestamp() + make_interval(secs => l.ttl_seconds) end
   where l.lane = any (mine) and l.execution_id = p_execution_id and agent_lock_parks(l.lane) and l.parked <> p_parked
     and l.expires_at > clock_timestamp();
end $$;
