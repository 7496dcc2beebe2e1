-- A lane that is lent stays until it has gone back. Its lease could end, or somebody let go of its row, after a sweep had given back what
-- expired, and before it took away what is free for longer than asked: the lane went, its loans with it, and the parent that waited found it lost.

-- As before, but it leaves alone what is lent.
create or replace function sweep_agent_locks(p_idle interval default '1 day') returns int
language plpgsql volatile as $$
declare
  back text;
  n int;
begin
  if p_idle is null or p_idle < interval '0' then
    raise exception 'lanes free for % cannot be swept: give an interval of 0 or more', coalesce(p_idle::text, 'null')
      using errcode = '22023';
  end if;
  delete from agent_lock_waiters w where w.expires_at < clock_timestamp() - interval '1 minute';
  for back in                                               -- lent ones that the borrower has let expire go back
    select l.lane from agent_locks l
     where l.expires_at <= clock_timestamp() and exists (select from agent_lock_loans k where k.lane = l.lane)
     order by l.lane limit 1000 for update skip locked
  loop
    perform return_agent_lock(back);
  end loop;
  with old as (
    select l.lane, l.execution_id, l.fencing_token, l.locked_at, l.expires_at from agent_locks l
     where l.expires_at < clock_timestamp() - p_idle and not exists (select from agent_lock_loans k where k.lane = l.lane)
     order by l.lane limit 1000 for update skip locked),
  noted as (
    insert into agent_lane_holds (lane, execution_id, fencing_token, held_from, held_until, ended)
    select o.lane, o.execution_id, o.fencing_token, o.locked_at, o.expires_at, 'expired' from old o where o.execution_id is not null
    on conflict do nothing)
  delete from agent_locks l using old where l.lane = old.lane;
  get diagnostics n = row_count;
  return n;
end $$;
