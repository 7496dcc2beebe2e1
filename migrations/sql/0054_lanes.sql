-- What a client does in a transaction that it leaves open, or that is prepared, holds up nobody but itself.
--
-- 1. A waiter writes nothing to the row of the lane. It marked the row (waited_until) so that a release notifies, and in a transaction
--    that stayed open this kept the holder from renewing. Now the queue itself (agent_lock_waiters) and the executions that wait for the
--    lane are the mark. A release that does not see a waiter yet, because that has not committed, notifies nobody; the waiter's next look,
--    a moment later, finds the lane free. The column stays until no release before this one can run.
-- 2. release_agent_lock, free_agent_lock, break_agent_lock and renew_agent_lock wait for another transaction that uses the row for about a
--    second, then raise 55P03 and say who is in the way. Nothing has changed then: the caller tries again.
-- 3. No function sets synchronous_commit: it belongs to the caller's transaction. Who releases and has nothing else to commit sets it.
-- 4. A name is what is seen of it: no invisible characters, none that change the direction of the text, and one way to write an accent
--    (NFC). What is held under another name from before can still be released, renewed and broken.
-- 5. A lease that has ended is cleared by the sweep, and the process that sweeps logs it.

-- Names -----------------------------------------------------------------------------------------------

create function agent_name_fault(p_name text) returns text
language plpgsql immutable parallel safe as $$
begin
  if p_name is null or length(p_name) not between 1 and 255 or p_name ~ '[[:cntrl:]]' then
    return '1 to 255 printable characters';
  elsif p_name ~ '^[ -~]+$' then
    return case when p_name !~ '[^ ]' then '1 to 255 printable characters, not only blanks' end;
  elsif p_name ~ ('[\u0080-\u00a0\u00ad\u034f\u061c\u115f\u1160\u1680\u17b4\u17b5\u180b-\u180f\u2000-\u200f\u2028-\u202f\u205f-\u206f'
                  '\u2800\u3000\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U0001d173-\U0001d17a\U000e0000-\U000e0fff]') then
    return 'without characters that are invisible, change the direction of the text, or are blanks other than the space';
  elsif p_name is not nfc normalized then
    return format('in Unicode''s normal form C: write %L', normalize(p_name, nfc));
  end if;
  return null;
end $$;
comment on function agent_name_fault is 'What the name of a lane or an owner has to be, where it is not; null for a valid name.';

create or replace function agent_lock_fits(p_lane text, p_locked_by text) returns boolean
language sql immutable parallel safe as $$
  select (length(p_lane) between 1 and 255 and length(p_locked_by) between 1 and 255
          and (p_lane || p_locked_by ~ '^[!-~]+$' or agent_name_fault(p_lane) is null and agent_name_fault(p_locked_by) is null)) is true
$$;
comment on function agent_lock_fits is 'Whether the names of a lane and of an owner are valid: see agent_name_fault.';

create or replace function agent_lock_check(p_lane text, p_locked_by text, p_ttl_seconds int) returns void
language plpgsql immutable as $$
begin
  if agent_name_fault(p_lane) is not null then
    raise exception 'lane % is not valid: a lane is %', coalesce(quote_literal(left(p_lane, 40)), 'null'), agent_name_fault(p_lane)
      using errcode = '22023';
  elsif agent_name_fault(p_locked_by) is not null then
    raise exception 'owner % of lane % is not valid: an owner is %',
      coalesce(quote_literal(left(p_locked_by, 40)), 'null'), quote_literal(p_lane), agent_name_fault(p_locked_by) using errcode = '22023';
  elsif p_ttl_seconds is null or p_ttl_seconds <= 0 or p_ttl_seconds > 2592000 then
    raise exception 'ttl of % seconds for lane % is not valid: give 1 to 2592000 (30 days)',
      coalesce(p_ttl_seconds::text, 'null'), quote_literal(p_lane) using errcode = '22023';
  end if;
end $$;

-- Who is in the way -----------------------------------------------------------------------------------

create function agent_lock_blockers(p_xmax xid) returns text
language plpgsql volatile as $$
declare
  holders xid[] := array[p_xmax];
  blockers text;
begin
  if not exists (select from pg_locks k where k.locktype = 'transactionid' and k.transactionid = p_xmax and k.granted) then
    begin
      holders := array(select m.xid from pg_get_multixact_members(p_xmax) m);         -- several have locked the row
    exception when others then
      holders := '{}';                                                                -- it was one, which has ended
    end;
  end if;
  select string_agg(t.who, '; ') into blockers from (
    select coalesce(
             (select format('prepared transaction %L since %s UTC', p.gid, to_char(p.prepared at time zone 'UTC', 'YYYY-MM-DD HH24:MI:SS'))
                from pg_prepared_xacts p
               where k.pid is null and p.transaction in (
                 select o.transactionid from pg_locks o where o.locktype = 'transactionid' and o.virtualtransaction = k.virtualtransaction)
               limit 1),
             (select format('pid %s (%s) in a transaction since %s', a.pid, coalesce(nullif(left(a.application_name, 64), ''), 'no name'),
                            coalesce(to_char(a.xact_start at time zone 'UTC', 'YYYY-MM-DD HH24:MI:SS') || ' UTC', 'some time'))
                from pg_stat_activity a where a.pid = k.pid),
             format('pid %s', k.pid)) as who
      from pg_locks k
     where k.locktype = 'transactionid' and k.transactionid = any (holders) and k.granted and k.pid is distinct from pg_backend_pid()
     order by k.pid limit 5) t;
  return coalesce(blockers, 'a transaction that has ended just now');
end $$;
comment on function agent_lock_blockers is
  'Which open transactions have locked a row, by its xmax: pid, application and since when, or the name of a prepared transaction.';

create function lock_agent_lock_row(p_lane text, p_renewal boolean default false) returns void
language plpgsql volatile set enable_seqscan = off set jit = off set lock_timeout = '1s' as $$
begin
  if p_renewal then
    perform 1 from agent_locks l where l.lane = p_lane for no key update;
  else
    perform 1 from agent_locks l where l.lane = p_lane for update;
  end if;
exception when lock_not_available then
  raise exception 'lane % is in use by %', quote_literal(p_lane),
      agent_lock_blockers((select l.xmax from agent_locks l where l.lane = p_lane))
    using errcode = '55P03', hint = 'Nothing has changed. Try again, or end that transaction: pg_terminate_backend(pid), rollback prepared.';
end $$;
comment on function lock_agent_lock_row is
  'Lock the row of a lane that another transaction uses. Waits for about a second, then raises 55P03 and says who is in the way.';

create function agent_lock_wanted(p_lane text) returns boolean
language sql volatile as $$
  select exists (select from agent_lock_waiters w where w.lane = p_lane and w.expires_at > clock_timestamp())
      or exists (select from agent_executions x where x.waiting_for = 'lane' and x.waiting_key = p_lane)
$$;
comment on function agent_lock_wanted is 'Whether somebody stands in the queue of a lane, or an execution waits for it: then a release notifies.';

comment on column agent_locks.waited_until is 'Not used: agent_lock_wanted says whether somebody waits.';

-- Acquire and wait ------------------------------------------------------------------------------------

create or replace function ask_agent_lock(p_lane text, p_locked_by text, p_ttl_seconds int) returns agent_lock_answer
language plpgsql volatile set enable_seqscan = off set jit = off as $$
declare
  now_   timestamptz;
  at_    tid;
  token  bigint;
  holder text;
  ends   timestamptz;
  head   text;
  got    agent_lock_answer;
begin
  select l.ctid into at_ from agent_locks l
   where l.lane = p_lane and l.locked_by = '' and l.expires_at <= clock_timestamp()
     and not exists (select from agent_lock_waiters w where w.lane = p_lane and w.expires_at > clock_timestamp())
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

  select l.fencing_token, l.locked_by, l.expires_at into token, holder, ends from agent_locks l where l.lane = p_lane;
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
  else
    head := agent_lock_head(p_lane, now_);
    if head <> p_locked_by then
      return row(false, token, ends, head, null, null)::agent_lock_answer;            -- promised to who waits
    end if;
  end if;

  -- Free or expired, and promised to nobody else: the full lock, for which nobody is waited for.
  select l.ctid, l.fencing_token, l.locked_by, l.expires_at into at_, token, holder, ends
    from agent_locks l where l.lane = p_lane for update skip locked;
  if not found then
    return row(false, null, null, null, null, null)::agent_lock_answer;               -- being changed right now
  end if;
  now_ := clock_timestamp();                                                          -- after the lock
  if ends > now_ then
    return row(false, token, ends, holder, null, null)::agent_lock_answer;            -- taken meanwhile
  end if;
  head := agent_lock_head(p_lane, now_);
  if head <> p_locked_by then
    return row(false, token, ends, head, null, null)::agent_lock_answer;              -- somebody came just now
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
  if head = p_locked_by then
    delete from agent_lock_waiters w where w.lane = p_lane and w.owner = p_locked_by;
  end if;
  update agent_locks l
     set locked_by = p_locked_by, fencing_token = agent_lock_token(l.fencing_token, now_), locked_at = now_,
         expires_at = now_ + make_interval(secs => p_ttl_seconds), ttl_seconds = p_ttl_seconds, parked = false,
         execution_id = agent_lock_execution(p_locked_by)
   where l.ctid = at_
  returning true, l.fencing_token, l.expires_at, p_locked_by, holder, ends into got;
  return got;
end $$;

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
     where l.lane = any (p_lanes) and l.locked_by = '' and l.expires_at <= clock_timestamp()
       and not exists (select from agent_lock_waiters w where w.lane = l.lane and w.expires_at > clock_timestamp())
     order by l.lane for update of l skip locked) t;
  now_ := clock_timestamp();
  if free_ <> '{}' then
    return query
    update agent_locks l
       set locked_by = w.owner, fencing_token = agent_lock_token(l.fencing_token, now_), locked_at = now_,
           expires_at = now_ + make_interval(secs => w.ttl), ttl_seconds = w.ttl, parked = false,
           execution_id = agent_lock_execution(w.owner)
      from (select distinct on (u.lane) u.lane, u.owner, u.ttl, u.n
              from unnest(p_lanes, p_owners, p_ttls) with ordinality u (lane, owner, ttl, n) order by u.lane, u.n) w
     where l.lane = any (free_) and l.lane = w.lane and l.expires_at <= now_
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

create or replace function queue_for_agent_lock(p_lane text, p_locked_by text, p_ttl_seconds int, p_patience_seconds int, p_handed boolean)
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
    -- Stand in the queue, and look once more: a release that committed before is seen by this second try. A waiter that died keeps
    -- nobody from a free lane for longer than a minute.
    mark := clock_timestamp() + make_interval(secs => least(p_patience_seconds, 60));
    update agent_lock_waiters w set expires_at = mark, handed_seconds = case when p_handed then p_ttl_seconds else 0 end
     where w.ctid = (select x.ctid from agent_lock_waiters x where x.lane = p_lane and x.owner = p_locked_by for update skip locked);
    if not found and not exists (select from agent_lock_waiters w where w.lane = p_lane and w.owner = p_locked_by) then
      insert into agent_lock_waiters as w (lane, owner, expires_at, handed_seconds)
      values (p_lane, p_locked_by, mark, case when p_handed then p_ttl_seconds else 0 end)
      on conflict (lane, owner) do update set expires_at = excluded.expires_at, handed_seconds = excluded.handed_seconds;
    end if;                                                 -- one that is locked is being handed the lane in an open transaction
    got := ask_agent_lock(p_lane, p_locked_by, p_ttl_seconds);
  end if;
  if got.acquired then
    delete from agent_lock_waiters w where w.lane = p_lane and w.owner = p_locked_by;
  elsif got.locked_by is null then                                                    -- being changed right now; it may be ours
    delete from agent_lock_waiters w
     where w.ctid = (select x.ctid from agent_lock_waiters x where x.lane = p_lane and x.owner = p_locked_by for update skip locked)
       and exists (select from agent_locks l where l.lane = p_lane and l.locked_by = p_locked_by and l.expires_at > clock_timestamp());
  end if;
  return got;
end $$;
comment on function await_agent_lock is
  'One look at a lane by somebody who waits for it: like acquire_agent_lock, but keeps a place in the queue for p_patience_seconds, 60 at most. '
  'Call again on a notification on channel agent_lanes, or after a second or two. In a transaction that stays open the place counts for nobody.';

-- Release, renew, break --------------------------------------------------------------------------------

create or replace function release_agent_lock(p_lane text, p_locked_by text, p_fencing_token bigint default null)
returns boolean language plpgsql volatile set enable_seqscan = off set jit = off as $$
declare
  at_    tid;
  ends   timestamptz;
  wanted boolean;
  kept   boolean;
  of     uuid;
begin
  for try in 1 .. 2 loop
    select l.ctid, l.expires_at, l.parked, l.execution_id,
           exists (select from agent_lock_waiters w where w.lane = p_lane and w.expires_at > clock_timestamp())
           or exists (select from agent_executions x where x.waiting_for = 'lane' and x.waiting_key = p_lane)
      into at_, ends, kept, of, wanted
      from agent_locks l
     where l.lane = p_lane and l.locked_by = p_locked_by and l.expires_at > clock_timestamp()
       and (p_fencing_token is null or l.fencing_token = p_fencing_token) for update skip locked;
    exit when at_ is not null or try = 2;
    if not exists (select from agent_locks l
                    where l.lane = p_lane and l.locked_by = p_locked_by and l.expires_at > clock_timestamp()
                      and (p_fencing_token is null or l.fencing_token = p_fencing_token)) then
      if not agent_lock_fits(p_lane, p_locked_by) then
        perform agent_lock_check(p_lane, p_locked_by, 1);                             -- says what is wrong
      end if;
      return false;
    end if;
    perform lock_agent_lock_row(p_lane);                                              -- by a write under its token, most likely
  end loop;
  if at_ is null or kept or ends <= clock_timestamp() then                            -- after the lock
    return false;
  end if;
  -- Only an execution borrows, and few lanes are lent. Not one condition: with a query in it, it would be one for every lane.
  if of is not null then
    if exists (select from agent_lock_loans n where n.lane = p_lane) and return_agent_lock(p_lane) is not null then
      return true;                                                                    -- to the ancestor who lent it
    end if;
    perform note_agent_hold(p_lane, 'released');
  end if;
  update agent_locks l
     set locked_by = '', fencing_token = l.fencing_token + 1, expires_at = clock_timestamp(), parked = false,
         execution_id = null
   where l.ctid = at_;
  if wanted then
    perform pg_notify('agent_lanes', p_lane);
  end if;
  if p_lane like 'thread:%' then
    perform agent_lane_freed(p_lane);
  end if;
  return true;
end $$;
comment on function release_agent_lock is
  'Give a lane back. Only its live owner can; anybody else gets false and changes nothing. Voids the token. A parked lane belongs to '
  'its waiting execution: the claim that parked it is over, and cannot give it away. While another transaction uses the lane, such as '
  'a write that is fenced by it, it waits for about a second, then raises 55P03 and says who is in the way.';

create or replace function free_agent_lock(p_lane text, p_locked_by text, p_fencing_token bigint) returns text
language plpgsql volatile set enable_seqscan = off set jit = off as $$
declare
  at_    tid;
  ends   timestamptz;
  wanted boolean;
  now_   timestamptz;
  passed text;
begin
  for try in 1 .. 2 loop
    select l.ctid, l.expires_at,
           exists (select from agent_lock_waiters w where w.lane = p_lane and w.expires_at > clock_timestamp())
           or exists (select from agent_executions x where x.waiting_for = 'lane' and x.waiting_key = p_lane)
      into at_, ends, wanted
      from agent_locks l
     where l.lane = p_lane and l.fencing_token = p_fencing_token and l.locked_by = p_locked_by and l.expires_at > clock_timestamp()
       and not l.parked and l.execution_id is null and l.lane not like 'thread:%'
       for update skip locked;
    exit when at_ is not null or try = 2;
    if not exists (select from agent_locks l
                    where l.lane = p_lane and l.fencing_token = p_fencing_token and l.locked_by = p_locked_by
                      and l.expires_at > clock_timestamp() and not l.parked and l.execution_id is null and l.lane not like 'thread:%') then
      return case when release_agent_lock(p_lane, p_locked_by, p_fencing_token) then '' end;
    end if;
    perform lock_agent_lock_row(p_lane);                                              -- by a write under its token, most likely
  end loop;
  now_ := clock_timestamp();                                                          -- after the lock
  if at_ is null or ends <= now_ then
    return null;
  end if;
  if wanted then
    passed := pass_agent_lock(p_lane);
    if passed <> '' then
      return passed;
    end if;
    perform pg_notify('agent_lanes', p_lane);
  end if;
  update agent_locks l
     set locked_by = '', fencing_token = l.fencing_token + 1, expires_at = now_
   where l.ctid = at_;
  return '';
end $$;
comment on function free_agent_lock is
  'release_agent_lock that hands the lane to who waits first. Null when it was not released; to whom it went, as notified; an empty text when to '
  'nobody. Raises 55P03 as that does. Who has nothing else in the transaction need not wait for the commit of a release to nobody '
  '(synchronous_commit = off): a server that crashes within a second of it may then hold the lane until its lease ends.';

create or replace function free_many_agent_locks(p_lanes text[], p_owners text[], p_tokens bigint[]) returns table (n bigint, passed text)
language plpgsql volatile
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
#variable_conflict use_column
declare
  mine   text[];
  now_   timestamptz;
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
     and not exists (select from agent_lock_waiters q where q.lane = l.lane and q.expires_at > now_)
     and not exists (select from agent_executions x where x.waiting_for = 'lane' and x.waiting_key = l.lane)
  returning w.n, '';
  get diagnostics done = row_count;
  if done < cardinality(mine) then
    -- Those that somebody waits for, one by one. We have their rows, so nothing is waited for here either.
    for freed in
      select w.n, l.lane, l.locked_by, l.fencing_token
        from agent_locks l join unnest(p_lanes, p_owners, p_tokens) with ordinality w (lane, owner, token, n)
          on l.lane = w.lane and l.locked_by = w.owner and l.fencing_token = w.token
       where l.lane = any (mine)
    loop
      passed := free_agent_lock(freed.lane, freed.locked_by, freed.fencing_token);
      if passed is not null then
        n := freed.n;
        return next;
      end if;
    end loop;
  end if;
end $$;

create or replace function quit_agent_lock_queue(p_lane text, p_locked_by text) returns text
language plpgsql volatile set enable_seqscan = off set jit = off set lock_timeout = '1s' as $$
declare
  token bigint;
begin
  begin
    delete from agent_lock_waiters w where w.lane = p_lane and w.owner = p_locked_by; -- waits for a hand-over to this place
  exception when lock_not_available then
    raise exception 'the place of % in the queue of lane % is in use by %', quote_literal(p_locked_by), quote_literal(p_lane),
        agent_lock_blockers((select w.xmax from agent_lock_waiters w where w.lane = p_lane and w.owner = p_locked_by))
      using errcode = '55P03', hint = 'Nothing has changed: the place ends by itself, and a lane that is handed over within ten seconds.';
  end;
  select l.fencing_token into token from agent_locks l where l.lane = p_lane and l.locked_by = p_locked_by;
  return case when token is not null then free_agent_lock(p_lane, p_locked_by, token) end;
end $$;

create or replace function renew_agent_lock(p_lane text, p_locked_by text, p_fencing_token bigint, p_ttl_seconds int)
returns boolean language plpgsql volatile set enable_seqscan = off set jit = off as $$
declare
  at_  tid;
  ends timestamptz;
begin
  if (p_ttl_seconds between 1 and 2592000) is not true then
    perform agent_lock_check(p_lane, p_locked_by, p_ttl_seconds);                     -- says what is wrong
  end if;
  for try in 1 .. 2 loop
    select l.ctid, l.expires_at into at_, ends from agent_locks l
     where l.lane = p_lane and l.locked_by = p_locked_by and l.fencing_token = p_fencing_token for no key update skip locked;
    exit when at_ is not null or try = 2;
    if not exists (select from agent_locks l
                    where l.lane = p_lane and l.locked_by = p_locked_by and l.fencing_token = p_fencing_token) then
      perform agent_lock_check(p_lane, p_locked_by, p_ttl_seconds);
      return false;
    end if;
    perform lock_agent_lock_row(p_lane, true);
  end loop;
  if at_ is null or ends <= clock_timestamp() then                                    -- after the lock
    return false;
  end if;
  update agent_locks l
     set expires_at = case when l.parked then l.expires_at
                           else clock_timestamp() + make_interval(secs => p_ttl_seconds) end
   where l.ctid = at_;
  return true;
end $$;
comment on function renew_agent_lock is
  'Prolong a live lease. False once it is lost or expired, even if nobody took it. While another transaction changes the lane it waits for '
  'about a second, then raises 55P03 and says who is in the way.';

create or replace function break_agent_lock(p_lane text, p_reason text) returns boolean
language plpgsql volatile as $$
declare
  held agent_locks;
  e record;
  trace text;
begin
  if p_reason is null or btrim(p_reason) = '' then
    perform agent_lock_check(p_lane, 'admin', 1);
    raise exception 'breaking lane % needs a reason', quote_literal(p_lane) using errcode = '22023';
  end if;
  perform lock_agent_lock_row(p_lane);
  select l.* into held from agent_locks l where l.lane = p_lane for update;
  if not found or held.expires_at <= clock_timestamp() then
    perform agent_lock_check(p_lane, 'admin', 1);
    return false;
  end if;
  perform note_agent_hold(p_lane, 'broken', 'admin');
  update agent_locks l
     set locked_by = '', fencing_token = l.fencing_token + 1, expires_at = clock_timestamp(), parked = false,
         execution_id = null
   where l.lane = p_lane;
  select x.trace_id, x.surface, x.agent, x.id into e from agent_executions x where x.id = held.execution_id;
  trace := coalesce(e.trace_id, substring(held.locked_by from '^(?:hb|op|ch|wh|fl)_[0-9A-HJKMNP-TV-Z]{26}'),
                    agent_trace_id('op'));
  insert into agent_activity (trace_id, execution_id, kind, agent, surface, skill_name, status, input, lane, finished_at, duration_ms)
  values (trace, e.id, 'note', coalesce(e.agent, 'flowpilot'), coalesce(e.surface, 'operate'), 'break_lane', 'success',
          jsonb_build_object('lane', p_lane, 'reason', p_reason, 'holder', held.locked_by,
                             'fencing_token', held.fencing_token), p_lane, clock_timestamp(), 0);
  delete from agent_lock_loans n where n.lane = p_lane;
  perform pg_notify('agent_lanes', p_lane);                 -- who waits, and who held it
  perform agent_lane_freed(p_lane);
  return true;
end $$;
comment on function break_agent_lock is
  'Take a lane away from its holder, whose token is void from then on; recorded with the reason under the holder''s trace. The holder is '
  'notified on agent_lanes. While a fenced write is under way it waits for about a second, then raises 55P03 and says who is in the way.';

create or replace function free_agent_locks(p_execution_id uuid, p_threads boolean) returns int
language plpgsql volatile as $$
declare
  mine text[] := lock_agent_locks(p_execution_id);
  freed record;
  n int := 0;
begin
  if mine = '{}' then
    return 0;
  end if;
  for freed in
    select l.lane, cut.depth from agent_locks l
      left join lateral (select min(k.depth) as depth from agent_lock_loans k
                          where k.lane = l.lane and k.lender = p_execution_id) cut on true
     where l.lane = any (mine) and (l.execution_id = p_execution_id or cut.depth is not null)
       and (p_threads or l.lane not like 'thread:%')
     order by l.lane
  loop
    n := n + 1;
    delete from agent_lock_loans k where k.lane = freed.lane and k.depth >= freed.depth;    -- what it had lent comes back first
    continue when return_agent_lock(freed.lane) is not null;
    perform note_agent_hold(freed.lane, case when p_threads then 'ended' else 'handed back' end);
    update agent_locks l
       set locked_by = '', fencing_token = l.fencing_token + 1, parked = false, execution_id = null,
           expires_at = least(l.expires_at, clock_timestamp())
     where l.lane = freed.lane;
    if agent_lock_wanted(freed.lane) then
      perform pg_notify('agent_lanes', freed.lane);
    end if;
    perform agent_lane_freed(freed.lane);
  end loop;
  return n;
end $$;

create or replace function clean_agent_threads(p_overdue interval default '0', p_unwanted interval default '0')
returns table (thread_id text, locked_by text, execution_id uuid, idle_seconds bigint)
language plpgsql volatile as $$
#variable_conflict use_column
declare
  l agent_locks;
  lane_ text;
begin
  for lane_ in
    select k.lane from agent_locks k
     where k.lane like 'thread:%' and k.locked_by <> '' and not k.parked
       and (k.expires_at <= clock_timestamp() - p_overdue
            and (k.expires_at <= clock_timestamp() - p_unwanted or exists (
              select from agent_messages m where m.thread_id = substr(k.lane, 8) and m.status = 'queued'))
            or k.execution_id is not null and not exists (
              select from agent_executions x where x.id = k.execution_id and x.completed_at is null))
     order by k.lane
  loop
    -- Look again under the lock: it may have been taken over since.
    select k.* into l from agent_locks k where k.lane = lane_ for update skip locked;
    continue when not found or l.locked_by = '' or l.parked
      or l.expires_at > clock_timestamp() - p_overdue and (l.execution_id is null or exists (
           select from agent_executions x where x.id = l.execution_id and x.completed_at is null));
    thread_id := substr(l.lane, 8);
    locked_by := l.locked_by;
    execution_id := l.execution_id;
    idle_seconds := extract(epoch from clock_timestamp() - l.expires_at + make_interval(secs => l.ttl_seconds));
    if return_agent_lock(l.lane) is null then
      perform note_agent_hold(l.lane, 'expired');
      update agent_locks k set locked_by = '', fencing_token = k.fencing_token + 1, parked = false, execution_id = null,
             expires_at = least(k.expires_at, clock_timestamp()) where k.lane = l.lane;
      if agent_lock_wanted(l.lane) then
        perform pg_notify('agent_lanes', l.lane);
      end if;
      perform agent_lane_freed(l.lane);
    end if;
    return next;
  end loop;
end $$;

-- Sweep ------------------------------------------------------------------------------------------------

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
  delete from agent_lock_waiters w where w.ctid = any (array(
    select x.ctid from agent_lock_waiters x where x.expires_at < clock_timestamp() - interval '1 minute' for update skip locked));
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

create function expire_agent_locks(p_after text, p_limit int, p_overdue interval default '10 seconds')
returns table (after_lane text, lane text, locked_by text, execution_id uuid, ended_for double precision)
language plpgsql volatile set enable_seqscan = off set jit = off as $$
#variable_conflict use_column
declare
  held  text[];
  lane_ text;
  l     agent_locks;
begin
  delete from agent_lock_waiters w where w.ctid = any (array(
    select x.ctid from agent_lock_waiters x where x.expires_at < clock_timestamp() - interval '1 minute' for update skip locked));
  -- So many of those that are held, in the order of their names: an index by the end of the lease would be written by each renewal.
  held := array(select k.lane from agent_locks k where k.locked_by <> '' and k.lane > p_after order by k.lane limit p_limit);
  after_lane := case when cardinality(held) = p_limit then held[p_limit] else '' end;
  return next;
  foreach lane_ in array held loop
    select k.* into l from agent_locks k
     where k.lane = lane_ and k.locked_by <> '' and k.expires_at <= clock_timestamp() - p_overdue and not k.parked
       and k.lane not like 'thread:%' and not exists (select from agent_lock_loans n where n.lane = k.lane)
       for update of k skip locked;
    continue when not found or l.expires_at > clock_timestamp() - p_overdue;          -- after the lock
    if l.execution_id is not null then
      perform note_agent_hold(lane_, 'expired');
    end if;
    update agent_locks k set locked_by = '', fencing_token = k.fencing_token + 1, execution_id = null where k.lane = lane_;
    if agent_lock_wanted(lane_) then
      perform pg_notify('agent_lanes', lane_);
    end if;
    lane := l.lane;
    locked_by := l.locked_by;
    execution_id := l.execution_id;
    ended_for := extract(epoch from clock_timestamp() - l.expires_at);
    return next;
  end loop;
end $$;
comment on function expire_agent_locks is
  'Clear the lanes whose lease ended p_overdue ago, among the p_limit held ones that come after a name. The first row only says after which name '
  'to go on; an empty text when all were looked at. clean_agent_threads clears threads; sweep_agent_locks returns what is lent.';

-- As before, and a process that was given up too early hears that its lanes are gone.
create or replace function free_agent_worker_lanes() returns trigger
language plpgsql volatile set enable_seqscan = off set jit = off as $$
declare
  h record;
begin
  for h in
    select l.lane, l.locked_by, l.fencing_token from agent_locks l
     where l.locked_by <> '' and right(l.locked_by, 37) = '@' || old.id and l.execution_id is null
     order by l.lane
  loop
    begin
      if release_agent_lock(h.lane, h.locked_by, h.fencing_token) then
        perform pg_notify('agent_lanes', h.lane);
      end if;
    exception when lock_not_available then
      null;                                                 -- by a write under its token, or an open transaction of somebody else
    end;
  end loop;
  return null;
end $$;

-- An execution that waits for a lane is found by its wait, and marks nothing.
create or replace function park_agent_execution(p_id uuid, p_claim bigint, p_step text, p_kind text, p_key text,
                                     p_timeout interval, p_data jsonb) returns jsonb
language plpgsql volatile as $$
declare
  came agent_events;
  outcome jsonb;
  unsent uuid;
  sent record;
  target uuid;
begin
  if agent_wait_event(p_kind) is null then
    raise exception 'wait for % is not known', coalesce(quote_literal(p_kind), 'null') using errcode = '22023';
  elsif p_step is null or p_key is null or (p_key = '' and p_kind <> 'delay') then
    raise exception 'wait for % needs a step and a key', p_kind using errcode = '22023';
  elsif p_kind = 'delay' and p_timeout is null then
    raise exception 'a delay needs its time' using errcode = '22023';
  end if;
  if p_kind in ('agent', 'document', 'signature', 'test') then
    target := agent_uuid(p_key);
    p_key := coalesce(target::text, p_key);                 -- as the events have it
  end if;
  if p_kind = 'agent' and p_timeout is null then
    p_data := coalesce(p_data, '{}') || '{"patient": true}';
  end if;
  p_timeout := coalesce(p_timeout, agent_wait_standard(p_kind));
  if p_timeout < interval '0' or p_timeout > agent_wait_longest(p_kind) then
    raise exception 'timeout % of the wait for % is not valid: give up to %', p_timeout, p_kind, agent_wait_longest(p_kind)
      using errcode = '22023';
  end if;
  perform agent_wait_lock(p_kind, p_key);
  -- The end of what is waited for either comes before this, and its event is seen below, or finds who waits.
  if p_kind = 'agent' and target < p_id then
    perform 1 from agent_executions x where x.id = target for share;
  end if;
  -- For update, because the claim is part of the key: two parks that shared the row would deadlock here.
  perform 1 from agent_executions x where x.id = p_id and x.claim = p_claim for update;
  if p_kind = 'agent' and target > p_id then
    perform 1 from agent_executions x where x.id = target for share;
  end if;
  perform fence_agent_execution(p_id, p_claim);
  -- A try before this one had an outcome at once, and its answer was lost on the way.
  select c.output into outcome from agent_checkpoints c where c.execution_id = p_id and c.step = p_step;
  if found then
    return outcome;
  end if;
  if p_kind in ('document', 'signature', 'test') and exists (select from agent_requests r where r.id = target and r.kind = p_kind) then
    outcome := agent_request_outcome(p_kind, p_key);
  elsif p_kind = 'response' then
    unsent := agent_queued_message(p_id, p_key);
    select agent_last_sent(p_id, p_key) as at, max(m.seq) as seq into sent from agent_messages m
     where m.execution_id = p_id and m.thread_id = p_key and m.role = 'assistant' and m.seq is not null;
    -- The order of the thread decides what an answer can be; the clock only where the event is of no message of it.
    select v.* into came from agent_events v
     where v.event = 'MESSAGE_RECEIVED' and v.key = p_key and v.consumed_by is null and v.execution_id is null and unsent is null
       and v.id >= agent_uuid7_floor(sent.at - interval '1 minute')
       and coalesce((select m.seq > sent.seq from agent_messages m
                      where m.id = agent_uuid(v.data ->> 'message_id') and m.thread_id = p_key), v.created_at > sent.at)
     order by v.id limit 1 for update;
  elsif p_kind = 'agent' and exists (select from agent_events v where v.external_id = 'completed ' || p_key) then
    -- An end is a fact, not a message: it answers everyone who waits for it, however often.
    select v.* into came from agent_events v where v.external_id = 'completed ' || p_key;
  elsif p_kind not in ('delay', 'lane') then
    select v.* into came from agent_events v
     where v.event = agent_wait_event(p_kind) and v.key = p_key and v.consumed_by is null and v.execution_id is null
     order by v.id limit 1 for update;
  elsif p_kind = 'lane' then
    if agent_lane_open(p_key)
       or exists (select from agent_locks l where l.lane = p_key and l.execution_id = p_id) then    -- it is its own
      outcome := jsonb_build_object('event', 'LANE_FREED', 'data', '{}'::jsonb, 'timed_out', false);
    end if;
  end if;
  if came.id is not null then
    update agent_events v set consumed_by = p_id where v.id = came.id;
    outcome := jsonb_build_object('event', came.event, 'event_id', came.id, 'data', came.data, 'timed_out', false);
  end if;
  if outcome is not null then
    insert into agent_checkpoints (execution_id, step, claim, output, waited_for, waited_key, waited_since)
    values (p_id, p_step, p_claim, outcome, p_kind, p_key, clock_timestamp());
    return outcome;
  end if;
  update agent_executions x
     set status = 'waiting', claim = x.claim + 1, wait_number = x.wait_number + 1, attempt = 0,
         waiting_for = p_kind, waiting_key = p_key, waiting_step = p_step,
         -- A question that still stands in the queue cannot be answered: the time runs from when it leaves.
         waiting_until = clock_timestamp() + case when unsent is null then p_timeout else interval '30 days' end,
         waiting_data = case when unsent is null then p_data
                             else coalesce(nullif(p_data, 'null'), '{}') || jsonb_build_object('queued_message', unsent,
                                    'timeout_seconds', extract(epoch from p_timeout)) end
   where x.id = p_id and x.claim = p_claim;
  if p_kind = 'agent' then                                  -- also when it waits again, after a time that was too short
    update agent_executions x set awaited = true
     where x.id = target and x.parent_id = p_id and not x.awaited and x.completed_at is null;
  end if;
  perform park_agent_locks(p_id, true);
  return null;
end $$;
