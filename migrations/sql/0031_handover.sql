-- A release hands the lane to who waits first, instead of telling everybody to come and take it: one commit and one notification, where
-- the waiter's own statement and its commit came on top, and nobody else is woken.
--
-- Who stands in the queue says whether it is to be handed the lane (queue_for_agent_lock, handed_seconds). Others, such as callers of
-- await_agent_lock and processes of the version before, are notified as before, and so is one whose place is being changed right now.
-- The lane changes hands in one update, under its row lock: a new token, the new owner's name. The lease is short, at most 10
-- seconds, because nobody has heard yet that its owner is still there: who is renews it to the length that it asked for, and who died
-- meanwhile holds nobody up for longer than an abandoned place does, more or less. Who misses the notification finds the lane its
-- own at its next look. Who gives up leaves the queue and gives the lane back, if it was handed over just then, in one statement
-- (quit_agent_lock_queue): it waits for a hand-over that is under way, which has its place locked.
--
-- Such a release is a grant, so its commit is waited for: the notification leaves after it. Only a release that gives the lane to
-- nobody goes without. Lanes of executions and threads are released as before.

alter table agent_lock_waiters add column handed_seconds int not null default 0;
comment on column agent_lock_waiters.handed_seconds is 'A release may hand the lane to this waiter, who wants a lease of so many seconds; 0: it is to be notified.';

-- As before. What is plain, a lane that is free and wanted by nobody, is asked for first, with as few expressions as that takes: each is
-- prepared anew in each transaction. Its name is valid, or it would not be in the table; an owner who is not plain ASCII goes the long way.
create or replace function ask_agent_lock(p_lane text, p_locked_by text, p_ttl_seconds int) returns agent_lock_answer
language plpgsql volatile set enable_seqscan = off set jit = off as $$
declare
  now_   timestamptz;
  at_    tid;
  token  bigint;
  holder text;
  ends   timestamptz;
  waited timestamptz;
  head   text;
  got    agent_lock_answer;
begin
  select l.ctid into at_ from agent_locks l
   where l.lane = p_lane and l.locked_by = '' and l.expires_at <= clock_timestamp() and l.waited_until <= clock_timestamp()
     and p_locked_by ~ '^[!-~]+$' and length(p_locked_by) < 256 and p_ttl_seconds between 1 and 2592000
     for update skip locked;
  if at_ is not null then
    now_ := clock_timestamp();                                                        -- after the lock
    update agent_locks l
       set locked_by = p_locked_by, fencing_token = agent_lock_token(l.fencing_token, now_), locked_at = now_,
           expires_at = now_ + make_interval(secs => p_ttl_seconds), ttl_seconds = p_ttl_seconds, parked = false,
           execution_id = agent_lock_execution(p_locked_by)
     where l.ctid = at_ and l.expires_at <= now_                                      -- ours, so it stays where it is
    returning true, l.fencing_token, l.expires_at, p_locked_by, '', now_ into got;
    if got.acquired then
      return got;
    end if;
  elsif not agent_lock_fits(p_lane, p_locked_by) or (p_ttl_seconds between 1 and 2592000) is not true then
    perform agent_lock_check(p_lane, p_locked_by, p_ttl_seconds);                     -- says what is wrong
  end if;

  select l.fencing_token, l.locked_by, l.expires_at, l.waited_until into token, holder, ends, waited
    from agent_locks l where l.lane = p_lane;
  if not found then
    -- The very first hold of this lane: no row to lock yet, so racers are told apart by an advisory lock.
    if not pg_try_advisory_xact_lock(hashtextextended('lane ' || p_lane, 0)) then
      return row(false, null, null, null, null, null)::agent_lock_answer;
    end if;
    now_ := clock_timestamp();
    insert into agent_locks as l (lane, locked_by, fencing_token, locked_at, expires_at, ttl_seconds, execution_id)
    values (p_lane, p_locked_by, agent_lock_token(0, now_), now_, now_ + make_interval(secs => p_ttl_seconds),
            p_ttl_seconds, agent_lock_execution(p_locked_by))
    on conflict (lane) do nothing
    returning true, l.fencing_token, l.expires_at, l.locked_by, '', now_ into got;
    return case when got.acquired then got else row(false, null, null, null, null, null)::agent_lock_answer end;
  end if;
  now_ := clock_timestamp();
  if ends > now_ then
    if holder <> p_locked_by then
      return row(false, token, ends, holder, null, null)::agent_lock_answer;          -- busy: a read, no write
    end if;
    -- Ours already. A refresh leaves the key alone, so writes under this token do not hold it up.
    select l.fencing_token, l.locked_by, l.expires_at into token, holder, ends
      from agent_locks l where l.lane = p_lane for no key update skip locked;
    if not found then
      return row(false, null, null, null, null, null)::agent_lock_answer;
    end if;
    now_ := clock_timestamp();                                                        -- after the lock
    if ends > now_ and holder <> p_locked_by then
      return row(false, token, ends, holder, null, null)::agent_lock_answer;
    elsif ends > now_ then
      update agent_locks l
         set expires_at = case when l.parked then l.expires_at else now_ + make_interval(secs => p_ttl_seconds) end,
             ttl_seconds = p_ttl_seconds
       where l.lane = p_lane
      returning true, l.fencing_token, l.expires_at, l.locked_by, '', now_ into got;
      return got;
    end if;
  elsif waited > now_ then
    head := agent_lock_head(p_lane, now_);
    if head <> p_locked_by then
      return row(false, token, ends, head, null, null)::agent_lock_answer;            -- promised to who waits
    end if;
  end if;

  -- Free or expired, and promised to nobody else: the full lock, for which nobody is waited for.
  select l.ctid, l.fencing_token, l.locked_by, l.expires_at, l.waited_until into at_, token, holder, ends, waited
    from agent_locks l where l.lane = p_lane for update skip locked;
  if not found then
    return row(false, null, null, null, null, null)::agent_lock_answer;               -- being changed right now
  end if;
  now_ := clock_timestamp();                                                          -- after the lock
  if ends > now_ then
    return row(false, token, ends, holder, null, null)::agent_lock_answer;            -- taken meanwhile
  elsif waited > now_ then
    head := agent_lock_head(p_lane, now_);
    if head <> p_locked_by then
      return row(false, token, ends, head, null, null)::agent_lock_answer;            -- somebody came just now
    end if;
  end if;
  if holder <> '' and return_agent_lock(p_lane) is not null then
    -- The borrower let it expire, and who lent it is alive: it has gone back.
    select l.locked_by = p_locked_by, l.fencing_token, l.expires_at, l.locked_by, holder, ends into got
      from agent_locks l where l.lane = p_lane;
    return got;
  end if;
  if holder <> '' and agent_lock_execution(holder) is not null then
    perform note_agent_hold(p_lane, 'expired', p_locked_by);
  end if;
  update agent_locks l
     set locked_by = p_locked_by, fencing_token = agent_lock_token(l.fencing_token, now_), locked_at = now_,
         expires_at = now_ + make_interval(secs => p_ttl_seconds), ttl_seconds = p_ttl_seconds, parked = false,
         execution_id = agent_lock_execution(p_locked_by)
   where l.ctid = at_
  returning true, l.fencing_token, l.expires_at, p_locked_by, holder, ends into got;
  return got;
end $$;

-- As before, but for the names of lanes: those that are not in the table are checked with the rest.
create or replace function acquire_many_agent_locks(p_lanes text[], p_owners text[], p_ttls int[])
returns table (n bigint, acquired boolean, fencing_token bigint, expires_at timestamptz, locked_by text, was_holder text, was_until timestamptz)
language plpgsql volatile
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
declare
  free_ text[];
  now_  timestamptz;
  a     agent_lock_answer;
begin
  if (cardinality(p_owners), cardinality(p_ttls)) is distinct from (cardinality(p_lanes), cardinality(p_lanes)) then
    raise exception 'taking % lanes needs as many owners and ttls', coalesce(cardinality(p_lanes), 0) using errcode = '22023';
  end if;
  for i in 1 .. cardinality(p_lanes) loop
    continue when p_owners[i] ~ '^[!-~]+$' and length(p_owners[i]) < 256 and p_ttls[i] between 1 and 2592000;
    perform agent_lock_check(p_lanes[i], p_owners[i], p_ttls[i]);                     -- says what is wrong, if anything is
  end loop;
  -- Those that are free and wanted by nobody, whom to ask or to tell.
  select coalesce(array_agg(t.lane), '{}') into free_ from (
    select l.lane from agent_locks l
     where l.lane = any (p_lanes) and l.locked_by = '' and l.expires_at <= clock_timestamp() and l.waited_until <= clock_timestamp()
     order by l.lane for update skip locked) t;
  now_ := clock_timestamp();
  if free_ <> '{}' then
    return query
    update agent_locks l
       set locked_by = w.owner, fencing_token = agent_lock_token(l.fencing_token, now_), locked_at = now_,
           expires_at = now_ + make_interval(secs => w.ttl), ttl_seconds = w.ttl, parked = false,
           execution_id = agent_lock_execution(w.owner)
      from (select distinct on (u.lane) u.lane, u.owner, u.ttl, u.n
              from unnest(p_lanes, p_owners, p_ttls) with ordinality u (lane, owner, ttl, n) order by u.lane, u.n) w
     where l.lane = any (free_) and l.lane = w.lane and l.expires_at <= now_ and l.waited_until <= now_
    returning w.n, true, l.fencing_token, l.expires_at, l.locked_by, '', now_;
  end if;
  for i in 1 .. cardinality(p_lanes) loop
    continue when p_lanes[i] = any (free_) and array_position(p_lanes, p_lanes[i]) = i;
    a := ask_agent_lock(p_lanes[i], p_owners[i], p_ttls[i]);
    n := i;
    acquired := a.acquired;
    fencing_token := a.fencing_token;
    expires_at := a.expires_at;
    locked_by := a.locked_by;
    was_holder := a.was_holder;
    was_until := a.was_until;
    return next;
  end loop;
end $$;

create function queue_for_agent_lock(p_lane text, p_locked_by text, p_ttl_seconds int, p_patience_seconds int, p_handed boolean)
returns agent_lock_answer language plpgsql volatile set enable_seqscan = off set jit = off as $$
declare
  got  agent_lock_answer;
  mark timestamptz;
begin
  if p_patience_seconds is null or p_patience_seconds <= 0 or p_patience_seconds > 2592000 then
    raise exception 'a place kept for % seconds in the queue of lane % is not valid: give 1 to 2592000 (30 days)',
      coalesce(p_patience_seconds::text, 'null'), coalesce(quote_literal(left(p_lane, 40)), 'null') using errcode = '22023';
  end if;
  got := ask_agent_lock(p_lane, p_locked_by, p_ttl_seconds);
  if not got.acquired then
    -- Stand in the queue, leave the mark that makes a release notify, and look once more: a release
    -- that committed before the mark is seen by this second try, one after it sees the mark.
    mark := clock_timestamp() + make_interval(secs => p_patience_seconds);
    insert into agent_lock_waiters as w (lane, owner, expires_at, handed_seconds)
    values (p_lane, p_locked_by, mark, case when p_handed then p_ttl_seconds else 0 end)
    on conflict (lane, owner) do update set expires_at = excluded.expires_at, handed_seconds = excluded.handed_seconds;
    perform 1 from agent_locks l where l.lane = p_lane for no key update skip locked;
    if found then
      update agent_locks l set waited_until = mark where l.lane = p_lane and l.waited_until < mark;
    end if;
    got := ask_agent_lock(p_lane, p_locked_by, p_ttl_seconds);
  end if;
  if got.acquired then
    delete from agent_lock_waiters w where w.lane = p_lane and w.owner = p_locked_by;
  end if;
  return got;
end $$;
comment on function queue_for_agent_lock is
  'await_agent_lock with whose expired lease was taken over. p_handed: a release may hand the lane over, with a notification on '
  'agent_lanes that says lane, owner, token and end (microseconds), parted by tabs; renew it then. Leave with quit_agent_lock_queue.';

create or replace function await_agent_lock(p_lane text, p_locked_by text, p_ttl_seconds int default 300, p_patience_seconds int default 5)
returns table (acquired boolean, fencing_token bigint, expires_at timestamptz, locked_by text)
language plpgsql volatile as $$
declare
  a agent_lock_answer := queue_for_agent_lock(p_lane, p_locked_by, p_ttl_seconds, p_patience_seconds, false);
begin
  acquired := a.acquired;
  fencing_token := a.fencing_token;
  expires_at := a.expires_at;
  locked_by := a.locked_by;
  return next;
end $$;

create function pass_agent_lock(p_lane text) returns text
language plpgsql volatile set enable_seqscan = off set jit = off as $$
declare
  heir   record;
  now_   timestamptz;
  passed text;
begin
  select w.owner, w.handed_seconds into heir
    from agent_lock_waiters w where w.lane = p_lane and w.expires_at > clock_timestamp() order by w.ticket limit 1;
  if not found or heir.handed_seconds = 0 then
    return null;
  end if;
  -- Nobody is waited for, and nobody overtaken: one who looks or leaves just now is not handed the lane, and stays the first.
  delete from agent_lock_waiters w
   where w.ctid = (select x.ctid from agent_lock_waiters x where x.lane = p_lane and x.owner = heir.owner for update skip locked);
  if not found then
    return null;
  end if;
  now_ := clock_timestamp();                                                          -- after the locks
  update agent_locks l
     set locked_by = heir.owner, fencing_token = agent_lock_token(l.fencing_token, now_), locked_at = now_,
         expires_at = now_ + make_interval(secs => least(heir.handed_seconds, 10)), ttl_seconds = heir.handed_seconds,
         parked = false, execution_id = agent_lock_execution(heir.owner)
   where l.lane = p_lane
  returning concat_ws(E'\t', l.lane, l.locked_by, l.fencing_token, (extract(epoch from l.expires_at) * 1000000)::bigint) into passed;
  perform pg_notify('agent_lanes', passed);
  return passed;
end $$;
comment on function pass_agent_lock is
  'Hand a lane, whose live holder calls and has locked its row, to who waits first. Null when there is nobody who may be handed it.';

create function free_agent_lock(p_lane text, p_locked_by text, p_fencing_token bigint) returns text
language plpgsql volatile set enable_seqscan = off set jit = off as $$
declare
  at_    tid;
  ends   timestamptz;
  waited timestamptz;
  now_   timestamptz;
  passed text;
begin
  select l.ctid, l.expires_at, l.waited_until into at_, ends, waited
    from agent_locks l
   where l.lane = p_lane and l.fencing_token = p_fencing_token and l.locked_by = p_locked_by and l.expires_at > clock_timestamp()
     and not l.parked and l.execution_id is null and l.lane not like 'thread:%'
     for update;
  if at_ is null then
    if not release_agent_lock(p_lane, p_locked_by, p_fencing_token) then
      return null;
    end if;
  else
    now_ := clock_timestamp();                                                        -- after the lock
    if ends <= now_ then
      return null;
    end if;
    if waited > now_ then
      passed := pass_agent_lock(p_lane);
      if passed <> '' then
        return passed;
      end if;
      perform pg_notify('agent_lanes', p_lane);
    end if;
    update agent_locks l
       set locked_by = '', fencing_token = l.fencing_token + 1, expires_at = now_
     where l.ctid = at_;
  end if;
  passed := set_config('synchronous_commit', 'off', true);
  return '';
end $$;
comment on function free_agent_lock is
  'release_agent_lock for who has nothing else in the transaction. Null when it was not released; to whom it went, as notified; '''' when '
  'to nobody: then the commit is not waited for. A server that crashes within a second of it may hold the lane until its lease ends.';

create function free_many_agent_locks(p_lanes text[], p_owners text[], p_tokens bigint[]) returns table (n bigint, passed text)
language plpgsql volatile
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
declare
  mine   text[];
  now_   timestamptz;
  mode   text := current_setting('synchronous_commit');
  handed boolean := false;
  done   int;
  freed  record;
begin
  select coalesce(array_agg(t.lane), '{}') into mine from (
    select l.lane from agent_locks l
      join unnest(p_lanes, p_owners, p_tokens) w (lane, owner, token)
        on l.lane = w.lane and l.locked_by = w.owner and l.fencing_token = w.token
     where l.lane = any (p_lanes) and l.expires_at > clock_timestamp() and not l.parked and l.execution_id is null
       and l.lane not like 'thread:%'
     order by l.lane for update of l skip locked) t;
  now_ := clock_timestamp();                                                          -- after the lock
  return query
  update agent_locks l
     set locked_by = '', fencing_token = l.fencing_token + 1, expires_at = now_
    from unnest(p_lanes, p_owners, p_tokens) with ordinality w (lane, owner, token, n)
   where l.lane = any (mine) and l.lane = w.lane and l.locked_by = w.owner and l.fencing_token = w.token and l.expires_at > now_
     and l.waited_until <= now_
  returning w.n, '';
  get diagnostics done = row_count;
  if done < cardinality(mine) then
    -- Those that somebody waits for, one by one. We have their rows, so nothing is waited for here either.
    for freed in
      select w.n, l.lane, l.locked_by, l.fencing_token
        from agent_locks l join unnest(p_lanes, p_owners, p_tokens) with ordinality w (lane, owner, token, n)
          on l.lane = w.lane and l.locked_by = w.owner and l.fencing_token = w.token
       where l.lane = any (mine) and l.waited_until > now_
    loop
      passed := free_agent_lock(freed.lane, freed.locked_by, freed.fencing_token);
      handed := handed or coalesce(passed, '') <> '';
      if passed is not null then
        n := freed.n;
        return next;
      end if;
    end loop;
  end if;
  mode := set_config('synchronous_commit', case when handed then mode else 'off' end, true);
end $$;
comment on function free_many_agent_locks is
  'free_agent_lock for each of many lanes of jobs, in one commit: answers the numbers, from 1, of those that were released, and to whom. Never '
  'waits. Any other is untouched: release it by itself, it may be somebody else''s, an execution''s, or in use by a fenced write.';

create function quit_agent_lock_queue(p_lane text, p_locked_by text) returns text
language plpgsql volatile set enable_seqscan = off set jit = off as $$
declare
  token bigint;
begin
  delete from agent_lock_waiters w where w.lane = p_lane and w.owner = p_locked_by;   -- waits for a hand-over to this place
  select l.fencing_token into token from agent_locks l where l.lane = p_lane and l.locked_by = p_locked_by;
  return case when token is not null then free_agent_lock(p_lane, p_locked_by, token) end;
end $$;
comment on function quit_agent_lock_queue is 'Leave the queue of a lane, and free the lane, as free_agent_lock does, if it was handed over just then.';
