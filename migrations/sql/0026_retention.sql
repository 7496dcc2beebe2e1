-- Retention: how long is kept what is over.
--
-- A kind of rows has one policy: how long its rows are kept after they are over, or for ever. A pass looks at rows in the order of
-- their age and takes away those that are over for longer. It is made of small pieces: each call of prune_agent is one transaction, a
-- fraction of a second long, which locks rows with `skip locked`, waits for nobody, and leaves the database whole. So a pass may be
-- killed anywhere, any number may run at once (one works on a kind, the others pass by), and it goes on where it stopped.
--
-- What is not finished is not touched, by whatever policy, nor is what it may still need: an execution that has not ended, with everything
-- of its trace and its own parents and children; its activity, checkpoints and requests; events that it may still take; the messages of
-- its threads; leave that was asked for and not decided; deliveries that are not settled. Memory, skills, automations, objectives
-- and flows are not subject to retention at all. The functions old_agent_… say which rows go, and are all that says so.
--
-- Activity is partitioned by month. A policy of 60 days or more takes whole months: the partition is detached and dropped, once nothing in
-- it is needed; so rows may stay for a month longer than they must. `alter table … detach partition … concurrently` waits for
-- readers without a lock that others would have to wait for, and cannot be part of a function: agent does it, and drop_agent_activity_partition
-- what follows. Months in which something is needed, and shorter policies, go row by row.

create table agent_retention (
  kind       text primary key check (kind in ('activity', 'executions', 'events', 'messages', 'approvals', 'automation_runs',
                                              'deliveries', 'outbox', 'budgets', 'hour_counts')),
  keep       interval check (keep >= least),              -- null: for ever
  least      interval not null check (least > interval '0'),
  about      text not null,
  changed_at timestamptz not null default clock_timestamp(),
  changed_by text not null default ''                     -- empty: as installed
);
comment on table agent_retention is 'How long rows are kept after they are over. Change it with set_agent_retention, which records who did and why.';
insert into agent_retention (kind, keep, least, about) values
  ('activity', null, '7 days', 'the activity log; by whole months from 60 days on'),
  ('executions', null, '1 day', 'executions that ended, with their checkpoints, requests and what followed from their end'),
  ('events', null, '1 day', 'events that were taken, or that nobody came for'),
  ('messages', null, '1 day', 'threads in which nothing was said for so long, with their messages'),
  ('approvals', null, '1 day', 'approvals that were used, rejected or have expired'),
  ('automation_runs', null, '1 day', 'runs of automations that succeeded or were skipped; dead letters stay'),
  ('deliveries', '90 days', '1 day', 'webhook deliveries that are done or ignored; dead ones stay'),
  ('outbox', '90 days', '1 day', 'outgoing webhooks that were sent or given up'),
  ('budgets', '60 days', '31 days', 'what runs and days have spent of their limits'),
  ('hour_counts', null, '35 days', 'the activity log''s counts by hour; those by day stay for ever');

-- How far a pass has come. Rows before the place were looked at; what was left because somebody needed it is looked at again when a
-- pass begins anew, once a day.
create table agent_retention_passes (
  kind      text primary key references agent_retention,
  place_at  timestamptz not null default '-infinity',
  place_key text not null default '',
  began_at  timestamptz not null default clock_timestamp(),
  ended_at  timestamptz,                                  -- when all that is old had been looked at; null: there is more
  removed   bigint not null default 0                     -- rows, ever
);
insert into agent_retention_passes (kind) select r.kind from agent_retention r;

-- Executions that are gone and have checkpoints left: those may be many, and go in pieces. Nobody can find them meanwhile.
create table agent_retention_leftovers (
  execution_id uuid primary key
);

-- Partitions that are on their way out, so that a table that somebody else detached is never dropped.
create table agent_activity_retired (
  partition  text primary key,                            -- with its schema
  lower_id   uuid not null,
  upper_id   uuid not null,
  decided_at timestamptz not null default clock_timestamp()
);

create function set_agent_retention(p_keep jsonb, p_by text default 'admin', p_reason text default '')
returns table (changed boolean, trace_id text, activity_id uuid)
language plpgsql volatile as $$
#variable_conflict use_column
declare
  wish record;
  was agent_retention;
  span interval;
  before_ jsonb := '{}';
  after_ jsonb := '{}';
begin
  perform agent_pause_check(p_by, p_reason);
  if p_keep is null or jsonb_typeof(p_keep) <> 'object' or p_keep = '{}' then
    raise exception 'no policy is given' using errcode = '22023', hint = 'Such as {"activity": "90 days", "events": "forever"}.';
  end if;
  for wish in select w.key, w.value #>> '{}' as said from jsonb_each(p_keep) w order by w.key loop
    select r.* into was from agent_retention r where r.kind = wish.key for update;
    if not found then
      raise exception '% is not a kind of what is kept', quote_literal(left(wish.key, 40)) using errcode = '22023',
        hint = 'Kinds: ' || (select string_agg(r.kind, ', ' order by r.kind) from agent_retention r) || '.';
    end if;
    begin
      span := nullif(wish.said, 'forever')::interval;
    exception when others then
      raise exception '% is not a time to keep %: give a number of days such as 90d, or forever', quote_literal(left(wish.said, 40)), wish.key
        using errcode = '22023';
    end;
    if span < was.least or span > interval '100 years' then
      raise exception '% cannot be kept for %: give % to 100 years, or forever', wish.key, span, was.least using errcode = '22023';
    end if;
    continue when span is not distinct from was.keep;
    update agent_retention r set keep = span, changed_at = clock_timestamp(), changed_by = p_by where r.kind = wish.key;
    before_ := before_ || jsonb_build_object(wish.key, coalesce(was.keep::text, 'forever'));
    after_ := after_ || jsonb_build_object(wish.key, coalesce(span::text, 'forever'));
  end loop;
  if after_ = '{}' then
    return query select false, '', null::uuid;
    return;
  end if;
  return query
    insert into agent_activity as a (trace_id, kind, agent, surface, skill_name, purpose, status, input, output, finished_at, duration_ms)
    values (agent_trace_id('op'), 'note', p_by, 'operate', 'set_retention', p_reason, 'success',
            jsonb_build_object('keep', after_, 'by', p_by, 'reason', p_reason), jsonb_build_object('was', before_), clock_timestamp(), 0)
    returning true, a.trace_id, a.id;
end $$;
comment on function set_agent_retention is
  'Change policies, such as {"activity": "90 days", "events": "forever"}: all of them or, with 22023, none. Recorded as an activity.';

-- Which rows go ------------------------------------------------------------------------------------

create type agent_old_rows as (
  going     text[],                                       -- keys of the rows that go
  place_at  timestamptz,                                  -- the last row that was looked at
  place_key text,
  seen      int                                           -- how many were looked at
);

create function old_agent_activity(p_before timestamptz, p_after uuid, p_most int) returns agent_old_rows
language plpgsql stable set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off set jit = off as $$
declare
  now_ timestamptz := clock_timestamp();
  -- What is not counted yet stays until it is.
  bound uuid := (select least(agent_uuid7_floor(p_before), c.counted_upto) from agent_activity_counted c);
  o agent_old_rows;
begin
  with looked as materialized (
    select a.id, a.trace_id, a.execution_id, a.created_at from agent_activity a
     where a.id > p_after and a.id < bound order by a.id limit p_most),
  needed as materialized (
    select t.trace_id from (select distinct l.trace_id from looked l) t
     where exists (select from agent_executions e where e.trace_id = t.trace_id and e.completed_at is null)
        or exists (select from agent_approvals p where p.trace_id = t.trace_id and p.status in ('pending', 'approved') and p.expires_at > now_))
  select array_agg(l.id::text order by l.id) filter (where l.created_at < p_before
           and l.trace_id not in (select n.trace_id from needed n)
           and not exists (select from agent_activity_open w where w.activity_id = l.id)
           and not exists (select from agent_activity_uncounted u where u.activity_id = l.id)
           and not exists (select from agent_executions e where e.id = l.execution_id and e.completed_at is null)),
         now_, max(l.id::text collate "C"), count(*)
    into o from looked l;
  return o;
end $$;

create function old_agent_executions(p_before timestamptz, p_after uuid, p_most int) returns agent_old_rows
language plpgsql stable set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off set jit = off as $$
declare
  now_ timestamptz := clock_timestamp();
  bound uuid := agent_uuid7_floor(p_before);
  o agent_old_rows;
begin
  -- A trace goes as a whole: when all its executions are over for long enough.
  with looked as materialized (
    select x.id, x.trace_id, x.parent_id, x.completed_at, x.dedupe_key from agent_executions x
     where x.id > p_after and x.id < bound order by x.id limit p_most),
  needed as materialized (
    select t.trace_id from (select distinct l.trace_id from looked l) t
     where exists (select from agent_executions e
                    where e.trace_id = t.trace_id and (e.completed_at is null or e.completed_at >= p_before))
        or exists (select from agent_approvals p where p.trace_id = t.trace_id and p.status in ('pending', 'approved') and p.expires_at > now_))
  select array_agg(l.id::text order by l.id) filter (where l.completed_at < p_before
           and l.trace_id not in (select n.trace_id from needed n)
           and not exists (select from agent_executions e where e.id = l.parent_id and e.completed_at is null)
           and not exists (select from agent_executions e where e.parent_id = l.id and e.completed_at is null)
           and not exists (select from agent_executions e where e.waiting_for = 'agent' and e.waiting_key = l.id::text)
           and not exists (select from agent_untold_ends u where u.execution_id = l.id)
           and not exists (select from agent_automation_runs r where r.execution_id = l.id and r.status = 'claimed')
           and not exists (select from agent_messages m where m.execution_id = l.id and m.status in ('queued', 'sending'))
           and not exists (select from agent_locks k where k.execution_id = l.id)
           and not exists (select from agent_budget_reservations b where b.execution_id = l.id)
           and not exists (select from agent_events v join agent_executions e on e.id = v.consumed_by
                            where v.external_id = 'completed ' || l.id and e.completed_at is null)
           and not exists (select from agent_mcp_calls c where c.id = agent_uuid(substr(l.dedupe_key, 10))
                             and l.dedupe_key like 'mcp.call %' and c.collected_at is null)),
         now_, max(l.id::text collate "C"), count(*)
    into o from looked l;
  return o;
end $$;

create function old_agent_events(p_before timestamptz, p_keep interval, p_after uuid, p_most int) returns agent_old_rows
language plpgsql stable set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off set jit = off as $$
declare
  bound uuid := agent_uuid7_floor(p_before);
  -- Of the executions that have not ended. By state too, as the index has it: by id alone they would be looked for among all others.
  oldest text := (
    select min(f.id::text collate "C") from unnest(array['pending', 'running', 'waiting']) s (status)
     cross join lateral (select x.id from agent_executions x where x.status between s.status and s.status order by x.status, x.id limit 1) f);
  o agent_old_rows;
begin
  with looked as materialized (
    select v.id, v.event, v.key, v.execution_id, v.consumed_by, v.created_at from agent_events v
     where v.id > p_after and v.id < bound order by v.id limit p_most)
  select array_agg(l.id::text order by l.id) filter (where l.created_at < p_before
           -- Nobody reads it, who goes on.
           and not exists (select from agent_executions x where x.id = l.consumed_by and x.completed_at is null)
           and case
             -- An end, and a decision, belong to their execution, and go with it: who waits for it later, or forks it, asks for them.
             when l.event = 'AGENT_COMPLETED' then
               not exists (select from agent_executions x where x.id = coalesce(l.execution_id, agent_uuid(l.key)))
             when l.event = 'APPROVAL_DECIDED' then
               not exists (select from agent_approvals a join agent_executions x on x.id = a.execution_id where a.id = agent_uuid(l.key))
             -- What nobody has taken may be for any execution that has not ended and began before it, or while it was to be kept.
             when l.consumed_by is null and agent_event_kind(l.event) is not null then
               coalesce(oldest >= (agent_uuid7_floor(l.created_at + p_keep))::text collate "C", true)
             else true end),
         null::timestamptz, max(l.id::text collate "C"), count(*)
    into o from looked l;
  return o;
end $$;

create function old_agent_approvals(p_before timestamptz, p_after uuid, p_most int) returns agent_old_rows
language plpgsql stable set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off set jit = off as $$
declare
  bound uuid := agent_uuid7_floor(p_before);
  o agent_old_rows;
begin
  with looked as materialized (
    select a.id, a.status, a.execution_id, a.parked, a.created_at, a.decided_at, a.consumed_at, a.consumed_for, a.expires_at from agent_approvals a
     where a.id > p_after and a.id < bound order by a.id limit p_most)
  select array_agg(l.id::text order by l.id) filter (where
           (l.status in ('rejected', 'expired', 'consumed') or l.expires_at < p_before)
           and greatest(l.created_at, l.decided_at, l.consumed_at) < p_before
           -- A fork of its execution asks what was decided.
           and not exists (select from agent_executions x where x.id = l.execution_id and (l.parked or x.completed_at is null))
           and not exists (select from agent_executions x where x.id = agent_uuid(left(l.consumed_for, 36)) and x.completed_at is null)),
         null::timestamptz, max(l.id::text collate "C"), count(*)
    into o from looked l;
  return o;
end $$;

create function old_agent_automation_runs(p_before timestamptz, p_after uuid, p_most int) returns agent_old_rows
language plpgsql stable set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off set jit = off as $$
declare
  bound uuid := agent_uuid7_floor(p_before);
  o agent_old_rows;
begin
  with looked as materialized (
    select r.id, r.status, r.execution_id, r.claimed_at, r.finished_at from agent_automation_runs r
     where r.id > p_after and r.id < bound order by r.id limit p_most)
  select array_agg(l.id::text order by l.id) filter (where l.status in ('success', 'skipped')
           and coalesce(l.finished_at, l.claimed_at) < p_before
           and not exists (select from agent_executions x where x.id = l.execution_id and x.completed_at is null)),
         null::timestamptz, max(l.id::text collate "C"), count(*)
    into o from looked l;
  return o;
end $$;

create function old_agent_deliveries(p_before timestamptz, p_after uuid, p_most int) returns agent_old_rows
language plpgsql stable set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off set jit = off as $$
declare
  bound uuid := agent_uuid7_floor(p_before);
  o agent_old_rows;
begin
  with looked as materialized (
    select d.id, d.status, d.execution_id, d.finished_at from agent_webhook_deliveries d
     where d.id > p_after and d.id < bound order by d.id limit p_most)
  select array_agg(l.id::text order by l.id) filter (where l.status in ('done', 'ignored') and coalesce(l.finished_at, '-infinity') < p_before
           and not exists (select from agent_executions x where x.id = l.execution_id and x.completed_at is null)),
         null::timestamptz, max(l.id::text collate "C"), count(*)
    into o from looked l;
  return o;
end $$;

create function old_agent_outbox(p_before timestamptz, p_after uuid, p_most int) returns agent_old_rows
language plpgsql stable set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off set jit = off as $$
declare
  bound uuid := agent_uuid7_floor(p_before);
  o agent_old_rows;
begin
  with looked as materialized (
    select w.id, w.status, w.finished_at from agent_webhook_outbox w
     where w.id > p_after and w.id < bound order by w.id limit p_most)
  select array_agg(l.id::text order by l.id) filter (where l.status in ('sent', 'dead') and coalesce(l.finished_at, '-infinity') < p_before),
         null::timestamptz, max(l.id::text collate "C"), count(*)
    into o from looked l;
  return o;
end $$;

create function old_agent_threads(p_before timestamptz, p_after_at timestamptz, p_after text, p_most int) returns agent_old_rows
language plpgsql stable set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off set jit = off as $$
declare
  now_ timestamptz := clock_timestamp();
  o agent_old_rows;
begin
  with looked as materialized (
    select t.id, t.updated_at from agent_threads t
     where (t.updated_at, t.id) > (p_after_at, p_after) and t.updated_at < p_before order by t.updated_at, t.id limit p_most)
  select array_agg(l.id order by l.updated_at, l.id) filter (where
               not exists (select from agent_executions x where x.thread_id = l.id and x.completed_at is null)
           and not exists (select from agent_executions x where x.waiting_for = 'response' and x.waiting_key = l.id)
           and not exists (select from agent_messages m where m.thread_id = l.id and m.status in ('queued', 'sending'))
           and not exists (select from agent_locks k
                            where k.lane = agent_thread_lane(l.id) and k.locked_by <> '' and (k.parked or k.expires_at > now_))),
         (array_agg(l.updated_at order by l.updated_at desc, l.id desc))[1], (array_agg(l.id order by l.updated_at desc, l.id desc))[1], count(*)
    into o from looked l;
  return o;
end $$;

create function old_agent_budgets(p_before timestamptz, p_after_at timestamptz, p_after text, p_most int) returns agent_old_rows
language plpgsql stable set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off set jit = off as $$
declare
  o agent_old_rows;
begin
  -- By time alone, as the index has it: the rows of one moment are few.
  with looked as materialized (
    select b.scope, b.created_at, b.reserved_tokens, b.reserved_usd from agent_budgets b
     where b.created_at >= p_after_at and (b.created_at > p_after_at or b.scope > p_after) and b.created_at < p_before
     order by b.created_at, b.scope limit p_most)
  select array_agg(l.scope order by l.created_at, l.scope) filter (where l.reserved_tokens = 0 and l.reserved_usd = 0
           and not exists (select from agent_executions x where l.scope like 'run:%' and x.trace_id = substr(l.scope, 5) and x.completed_at is null)),
         (array_agg(l.created_at order by l.created_at desc, l.scope desc))[1],
         (array_agg(l.scope order by l.created_at desc, l.scope desc))[1], count(*)
    into o from looked l;
  return o;
end $$;

create function agent_retention_before(p_kind text, p_keep interval) returns timestamptz
language sql stable as $$
  -- Whole months of activity, so that their partitions can be dropped.
  select case when p_kind = 'activity' and p_keep >= interval '60 days'
              then date_trunc('month', (now() - p_keep) at time zone 'UTC') at time zone 'UTC'
              else now() - p_keep end
$$;
comment on function agent_retention_before is 'The moment before which rows of a kind are old by a policy, from the beginning of the transaction.';

create function old_agent_rows(p_kind text, p_keep interval, p_after_at timestamptz, p_after text, p_most int) returns agent_old_rows
language plpgsql stable as $$
declare
  before_ timestamptz := agent_retention_before(p_kind, p_keep);
  after_ uuid := case when p_kind not in ('messages', 'budgets', 'hour_counts') then coalesce(agent_uuid(p_after), '00000000-0000-0000-0000-000000000000') end;
begin
  return case p_kind
    when 'activity' then old_agent_activity(before_, after_, p_most)
    when 'executions' then old_agent_executions(before_, after_, p_most)
    when 'events' then old_agent_events(before_, p_keep, after_, p_most)
    when 'messages' then old_agent_threads(before_, p_after_at, p_after, p_most)
    when 'approvals' then old_agent_approvals(before_, after_, p_most)
    when 'automation_runs' then old_agent_automation_runs(before_, after_, p_most)
    when 'deliveries' then old_agent_deliveries(before_, after_, p_most)
    when 'outbox' then old_agent_outbox(before_, after_, p_most)
    when 'budgets' then old_agent_budgets(before_, p_after_at, p_after, p_most)
  end;
end $$;
comment on function old_agent_rows is
  'Which of the next p_most rows of a kind, in the order of their age behind a place, go by a policy. It only reads.';

-- Taking them away ---------------------------------------------------------------------------------

-- What caused something is known as long as that is there.
create function prune_agent_causes(p_what text, p_ids uuid[]) returns void language sql volatile set enable_seqscan = off as $$
  delete from agent_links l where l.effect = any (array(select p_what || ' ' || i from unnest(p_ids) i))
$$;

create function prune_agent_executions(p_ids uuid[]) returns int
language plpgsql volatile set enable_seqscan = off as $$
declare
  gone uuid[];
  gone_events uuid[];
begin
  with held as (
    select x.id from agent_executions x where x.id = any (p_ids) and x.completed_at is not null order by x.id for update skip locked),
  away as (
    delete from agent_executions x using held h where x.id = h.id returning x.id)
  select coalesce(array_agg(a.id), '{}') into gone from away a;
  insert into agent_retention_leftovers
    select g from unnest(gone) g where exists (select from agent_checkpoints c where c.execution_id = g) on conflict do nothing;
  delete from agent_status_changes c where c.execution_id = any (gone);
  delete from agent_requests r where r.execution_id = any (gone);
  delete from agent_message_drafts d where d.execution_id = any (gone);
  delete from agent_lane_holds h where h.execution_id = any (gone);
  delete from agent_claims_lost c where c.execution_id = any (gone);
  perform prune_agent_causes('execution', gone);
  with away as (
    delete from agent_events v where v.external_id in (
      select 'completed ' || g from unnest(gone) g
      union all
      select 'approval ' || a.id from agent_approvals a where a.execution_id = any (gone) and a.parked)
    returning v.id)
  select array_agg(a.id) into gone_events from away a;
  perform prune_agent_causes('event', gone_events);
  return cardinality(gone);
end $$;

create function prune_agent_leftovers(p_most int) returns boolean
language plpgsql volatile set enable_seqscan = off as $$
declare
  of uuid[];
begin
  of := array(select l.execution_id from agent_retention_leftovers l order by l.execution_id limit p_most for update skip locked);
  with few as (
    select c.execution_id, c.step from unnest(of) u (id) cross join lateral (
      select k.execution_id, k.step from agent_checkpoints k where k.execution_id = u.id order by k.step limit p_most) c
     limit p_most)
  delete from agent_checkpoints c using few f where c.execution_id = f.execution_id and c.step = f.step;
  delete from agent_retention_leftovers l
   where l.execution_id = any (of) and not exists (select from agent_checkpoints c where c.execution_id = l.execution_id);
  return exists (select from agent_retention_leftovers);
end $$;

create function prune_agent_thread(p_id text, p_before timestamptz, p_most int, out removed int, out gone boolean)
language plpgsql volatile set enable_seqscan = off as $$
declare
  oldest uuid[];
begin
  removed := 0;
  gone := false;
  perform 1 from agent_threads t where t.id = p_id and t.updated_at < p_before for update skip locked;
  if not found then
    return;
  end if;
  -- The oldest first, so that a thread that wakes up has its latest.
  oldest := array(select m.id from agent_messages m where m.thread_id = p_id order by m.turn, m.seq limit p_most);
  if exists (select from agent_messages m join agent_executions x on x.id = m.execution_id
              where m.id = any (oldest) and x.completed_at is null) then
    return;                                               -- it has spoken here, and may wait for an answer
  end if;
  delete from agent_messages m where m.id = any (oldest) and m.status not in ('queued', 'sending');
  get diagnostics removed = row_count;
  if removed = cardinality(oldest) and removed < p_most then
    delete from agent_threads t where t.id = p_id;
    gone := true;
  end if;
end $$;

create function prune_agent(p_kind text, p_most int default 500, p_anew boolean default false, out removed int, out more boolean)
language plpgsql volatile set enable_seqscan = off set lock_timeout = '100ms' as $$
declare
  policy agent_retention;
  pass agent_retention_passes;
  o agent_old_rows;
  ids uuid[];
  id_ text;
  t record;
begin
  removed := 0;
  more := false;
  if coalesce(p_most, 0) not between 1 and 100000 then
    raise exception 'pieces of % rows are not valid: give 1 to 100000', coalesce(p_most::text, 'null') using errcode = '22023';
  end if;
  select r.* into policy from agent_retention r where r.kind = p_kind;
  if not found then
    raise exception '% is not a kind of what is kept', coalesce(quote_literal(left(p_kind, 40)), 'null') using errcode = '22023',
      hint = 'Kinds: ' || (select string_agg(r.kind, ', ' order by r.kind) from agent_retention r) || '.';
  end if;
  if not pg_try_advisory_xact_lock(hashtextextended('retention ' || p_kind, 0)) then
    return;                                               -- somebody is at it
  end if;
  select s.* into pass from agent_retention_passes s where s.kind = p_kind;
  if p_kind = 'executions' then
    more := prune_agent_leftovers(p_most);
    if more or policy.keep is null then
      return;
    end if;
  elsif policy.keep is null then
    return;
  end if;
  if p_anew or pass.ended_at is not null and pass.began_at < clock_timestamp() - interval '1 day' then
    pass.place_at := '-infinity';
    pass.place_key := '';
    pass.began_at := clock_timestamp();
  end if;
  if p_kind = 'hour_counts' then
    with held as (
      select c.ctid as at from agent_activity_counts c
       where c.span = 'hour' and c.start < date_trunc('hour', now() - policy.keep) order by c.span, c.start limit p_most for update skip locked)
    delete from agent_activity_counts c using held h where c.ctid = h.at;
    get diagnostics removed = row_count;
    o := row(null, '-infinity', '', removed);
  else
    o := old_agent_rows(p_kind, policy.keep, pass.place_at, pass.place_key, case when p_kind = 'messages' then least(p_most, 50) else p_most end);
  end if;
  if p_kind not in ('messages', 'budgets') then
    ids := coalesce(o.going, '{}')::uuid[];
  end if;
  more := o.seen = case when p_kind = 'messages' then least(p_most, 50) else p_most end;
  if p_kind = 'activity' and ids <> '{}' then
    delete from agent_activity a where a.id = any (ids) and a.id >= ids[1] and a.id <= ids[cardinality(ids)];
    get diagnostics removed = row_count;
  elsif p_kind = 'executions' then
    removed := prune_agent_executions(ids);
    more := more or exists (select from agent_retention_leftovers);
  elsif p_kind = 'events' then
    with held as (select v.id from agent_events v where v.id = any (ids) for update skip locked),
    away as (
      delete from agent_events v using held h where v.id = h.id returning v.id)
    select array_agg(a.id), count(*) into ids, removed from away a;
    perform prune_agent_causes('event', ids);
  elsif p_kind = 'approvals' then
    with held as (select a.id from agent_approvals a where a.id = any (ids) for update skip locked)
    delete from agent_approvals a using held h where a.id = h.id;
    get diagnostics removed = row_count;
  elsif p_kind = 'automation_runs' then
    with held as (select r.id from agent_automation_runs r where r.id = any (ids) and r.status in ('success', 'skipped') for update skip locked),
    away as (
      delete from agent_automation_runs r using held h where r.id = h.id returning r.id)
    select array_agg(a.id), count(*) into ids, removed from away a;
    perform prune_agent_causes('run', ids);
  elsif p_kind = 'deliveries' then
    with held as (select d.id from agent_webhook_deliveries d where d.id = any (ids) and d.status in ('done', 'ignored') for update skip locked)
    delete from agent_webhook_deliveries d using held h where d.id = h.id;
    get diagnostics removed = row_count;
  elsif p_kind = 'outbox' then
    with held as (select w.id from agent_webhook_outbox w where w.id = any (ids) and w.status in ('sent', 'dead') for update skip locked),
    away as (
      delete from agent_webhook_outbox w using held h where w.id = h.id returning w.id)
    select array_agg(a.id), count(*) into ids, removed from away a;
    perform prune_agent_causes('outgoing', ids);
  elsif p_kind = 'budgets' then
    with held as (
      select b.scope from agent_budgets b where b.scope = any (o.going) and b.reserved_tokens = 0 and b.reserved_usd = 0 for update skip locked)
    delete from agent_budgets b using held h where b.scope = h.scope;
    get diagnostics removed = row_count;
  elsif p_kind = 'messages' then
    foreach id_ in array coalesce(o.going, '{}') loop
      select g.removed, g.gone into t from prune_agent_thread(id_, agent_retention_before(p_kind, policy.keep), p_most - removed) g;
      removed := removed + t.removed;
      if removed >= p_most then                           -- the next piece goes on with this thread
        o.place_at := (select x.updated_at - interval '1 microsecond' from agent_threads x where x.id = id_);
        o.place_key := '';
        more := true;
        exit;
      end if;
    end loop;
  end if;
  if removed > 0 or o.seen > 0 or p_anew or pass.ended_at is null or pass.began_at > pass.ended_at then
    update agent_retention_passes s
       set place_at = coalesce(o.place_at, pass.place_at), place_key = coalesce(o.place_key, pass.place_key), began_at = pass.began_at,
           ended_at = case when not more then clock_timestamp() end, removed = s.removed + prune_agent.removed
     where s.kind = p_kind;
  end if;
end $$;
comment on function prune_agent is
  'One piece of a pass over a kind: look at the next p_most rows and take away those that are old by its policy and that nothing unfinished '
  'needs. more: call it again. One caller at a time does the work; the others are answered 0. With p_anew the pass begins with the oldest row.';

create procedure prune_agent_all(p_most int default 500)
language plpgsql as $$
declare
  kind_ text;
begin
  -- Executions first: what belonged to them goes by its own policy afterwards.
  foreach kind_ in array array(select r.kind from agent_retention r order by r.kind <> 'executions', r.kind) loop
    while (select p.more from prune_agent(kind_, p_most) p) loop
      commit;
    end loop;
    commit;
  end loop;
end $$;
comment on procedure prune_agent_all is
  'A pass over every kind, committed piece by piece: call it outside a transaction. agent serve makes one every hour.';

-- Whole months of activity -------------------------------------------------------------------------

create view agent_activity_partitions as
  select format('%I.%I', n.nspname, c.relname) as partition,
         substring(b.bounds from '^FOR VALUES FROM \(''([0-9a-f-]{36})''\)')::uuid as lower_id,
         substring(b.bounds from ' TO \(''([0-9a-f-]{36})''\)$')::uuid as upper_id,
         i.inhdetachpending as leaving
    from pg_inherits i join pg_class c on c.oid = i.inhrelid join pg_namespace n on n.oid = c.relnamespace
   cross join lateral (select pg_get_expr(c.relpartbound, c.oid) as bounds) b
   where i.inhparent = 'agent_activity'::regclass;
comment on view agent_activity_partitions is
  'The partitions of the activity log, with the ids that they hold. leaving: one is being detached, and is not read any more.';

create function agent_activity_needed(p_partition text, p_lower uuid, p_upper uuid) returns text
language plpgsql stable set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off set jit = off as $$
declare
  found_ boolean;
begin
  if (select c.counted_upto from agent_activity_counted c) < p_upper
     or exists (select from agent_activity_uncounted u where u.activity_id >= p_lower and u.activity_id < p_upper) then
    return 'it has rows that are not counted yet';
  elsif exists (select from agent_activity_open o where o.activity_id >= p_lower and o.activity_id < p_upper) then
    return 'calls in it are under way';
  end if;
  execute format('select exists (select from agent_executions e where e.status in (''pending'', ''running'', ''waiting'')
                                    and (exists (select from %1$s a where a.trace_id = e.trace_id)
                                         or exists (select from %1$s a where a.execution_id = e.id)))', p_partition) into found_;
  if found_ then
    return 'executions that have not ended have rows in it';
  end if;
  execute format('select exists (select from agent_approvals p
                                  where p.status in (''pending'', ''approved'') and p.expires_at > clock_timestamp()
                                    and exists (select from %1$s a where a.trace_id = p.trace_id))', p_partition) into found_;
  return case when found_ then 'approvals for it are not decided, or not used' end;
end $$;
comment on function agent_activity_needed is 'Why a partition of the activity log cannot go; null when it can.';

create function agent_activity_retirable()
returns table (partition text, lower_id uuid, upper_id uuid, began boolean, attached boolean)
language plpgsql stable as $$
#variable_conflict use_column
declare
  keep_ interval := (select r.keep from agent_retention r where r.kind = 'activity');
  bound uuid;
begin
  return query
    select r.partition, r.lower_id, r.upper_id, true, exists (select from agent_activity_partitions p where p.partition = r.partition and not p.leaving)
      from agent_activity_retired r order by r.lower_id;
  if keep_ is null then
    return;
  end if;
  -- Last month's partition is always there: ensure_agent_activity_partitions would make it again.
  bound := agent_uuid7_floor(least(agent_retention_before('activity', keep_),
                                   (date_trunc('month', now() at time zone 'UTC') - interval '1 month') at time zone 'UTC'));
  return query
    select p.partition, p.lower_id, p.upper_id, false, true from agent_activity_partitions p
     where p.upper_id <= bound and not p.leaving and not exists (select from agent_activity_retired r where r.partition = p.partition)
       and agent_activity_needed(p.partition, p.lower_id, p.upper_id) is null
     order by p.lower_id;
end $$;
comment on function agent_activity_retirable is
  'The partitions of the activity log that go by its policy, the oldest first: those that have begun to, and those in which nothing is needed.';

create function retire_agent_activity_partition(p_partition text) returns boolean
language plpgsql volatile as $$
begin
  insert into agent_activity_retired (partition, lower_id, upper_id)
  select r.partition, r.lower_id, r.upper_id from agent_activity_retirable() r where r.partition = p_partition and not r.began
  on conflict do nothing;
  return exists (select from agent_activity_retired r where r.partition = p_partition);
end $$;
comment on function retire_agent_activity_partition is
  'Note that a partition is on its way out. Then, outside a transaction: alter table agent_activity detach partition … concurrently; and '
  'drop_agent_activity_partition. False when it is not to go.';

create function drop_agent_activity_partition(p_partition text) returns text
language plpgsql volatile set lock_timeout = '50ms' as $$
declare
  r agent_activity_retired;
  leaving_ boolean;
  reason text;
begin
  select x.* into r from agent_activity_retired x where x.partition = p_partition for update skip locked;
  if not found then
    return 'it is not on its way out, or somebody is at it';
  end if;
  select p.leaving into leaving_ from agent_activity_partitions p where p.partition = p_partition;
  if found and not leaving_ then
    reason := agent_activity_needed(r.partition, r.lower_id, r.upper_id);
    if reason is not null then
      delete from agent_activity_retired x where x.partition = p_partition;
      return reason;
    end if;
    return 'it is not detached yet';
  elsif leaving_ then
    -- Somebody who detached it was stopped while he waited for readers. Nobody new reads it; old snapshots may.
    if exists (select from pg_stat_activity s
                where s.datid = (select d.oid from pg_database d where d.datname = current_database())
                  and s.pid <> pg_backend_pid() and s.backend_xmin is not null and s.xact_start < clock_timestamp() - interval '50 milliseconds') then
      return 'others read what was before';
    end if;
    execute format('alter table agent_activity detach partition %s finalize', p_partition);
  elsif to_regclass(p_partition) is null then
    delete from agent_activity_retired x where x.partition = p_partition;
    return 'dropped';
  end if;
  -- Nobody can write to it any more: look again, for what came while it was detached.
  reason := agent_activity_needed(r.partition, r.lower_id, r.upper_id);
  if reason is null then
    execute format('drop table %s', p_partition);
    delete from agent_activity_retired x where x.partition = p_partition;
    return 'dropped';
  end if;
  execute format('alter table agent_activity attach partition %s for values from (%L) to (%L)', p_partition, r.lower_id, r.upper_id);
  delete from agent_activity_retired x where x.partition = p_partition;
  return reason;
end $$;
comment on function drop_agent_activity_partition is
  'Drop a partition that was detached on its way out, or attach it again when something in it is needed after all. Answers `dropped`, or '
  'why not. It never waits for a lock for more than 50 ms (55P03: try again later).';

-- What reads what retention takes away -------------------------------------------------------------

create or replace function fork_agent_execution(p_id uuid, p_step text, p_input jsonb, p_trace_id text, p_latest boolean default false)
returns uuid language plpgsql volatile as $$
declare
  was agent_executions;
  version_ int;
  fork uuid;
begin
  select x.* into was from agent_executions x where x.id = p_id;
  if not found then
    return null;
  end if;
  if was.completed_at is not null then
    -- Its checkpoints must not go while they are copied.
    perform 1 from agent_executions x where x.id = p_id for key share;
    if not found then
      return null;
    end if;
  end if;
  version_ := was.flow_version;
  if p_latest then
    version_ := coalesce((select f.version from agent_flows f where f.name = was.flow and f.current), version_);
  end if;
  -- Its claim begins at 1, so that the first who claims it loads what it begins with.
  insert into agent_executions (trace_id, surface, agent, flow, flow_version, thread_id, queue, priority, status, claim, input, on_lost,
         max_attempts, progress_seconds, forked_from, forked_step)
  values (p_trace_id, 'flow', was.agent, was.flow, version_, was.thread_id, 'background',
          was.priority, 'pending', 1, coalesce(p_input, was.input), was.on_lost, was.max_attempts, was.progress_seconds, p_id, p_step)
  returning id into fork;
  insert into agent_checkpoints (execution_id, step, claim, fingerprint, failed, output, created_at)
  select fork, c.step, 1, c.fingerprint, c.failed,
         case when c.step = 'flow version' and was.flow_version is not null and not c.failed then to_jsonb(version_) else c.output end,
         c.created_at from agent_fork_steps(p_id, p_step) c;
  return fork;
end $$;

create or replace function prune_agent_budgets(p_keep interval default '60 days') returns int
language plpgsql volatile as $$
declare
  n int;
begin
  with held as (
    select x.scope from agent_budgets x
     where x.created_at < clock_timestamp() - greatest(p_keep, interval '31 days') and x.reserved_tokens = 0
       and not exists (select from agent_executions e where x.scope like 'run:%' and e.trace_id = substr(x.scope, 5) and e.completed_at is null)
     for update skip locked)
  delete from agent_budgets x using held h where x.scope = h.scope;
  get diagnostics n = row_count;
  return n;
end $$;
comment on function prune_agent_budgets is
  'Forget scopes that are older than p_keep, at least 31 days, but those of runs that have not ended. Answers how many. prune_agent does '
  'it by its policy, and in pieces.';

-- A restored copy ----------------------------------------------------------------------------------

create function void_agent_leases(out workers int, out executions int, out lanes int)
language plpgsql volatile as $$
begin
  if exists (select from pg_stat_activity s
              where s.datname = current_database() and s.pid <> pg_backend_pid() and s.application_name like 'agent%') then
    raise exception 'processes of agent work on this database: stop them first' using errcode = '55000';
  end if;
  update agent_workers w set expires_at = 'epoch';
  get diagnostics workers = row_count;
  -- Further than any claim that the database had behind the copy.
  update agent_executions x set claim = x.claim + 1000000 where x.status in ('pending', 'running', 'waiting');
  get diagnostics executions = row_count;
  update agent_locks l
     set fencing_token = agent_lock_token(l.fencing_token, clock_timestamp()),
         locked_by = case when l.parked then coalesce((select x.id || '#' || x.claim from agent_executions x where x.id = l.execution_id), l.locked_by)
                          else l.locked_by end,
         expires_at = case when l.parked then l.expires_at else least(l.expires_at, clock_timestamp()) end
   where l.locked_by <> '';
  get diagnostics lanes = row_count;
end $$;
comment on function void_agent_leases is
  'For a restored copy, before any process works on it: every lease, claim and token that anybody has from before is void, so that a '
  'process of the old world can write nothing here. Executions go on from their checkpoints, what waits goes on waiting.';

-- Spend ---------------------------------------------------------------------------------------------

-- A cost that is no number counts for nothing: added up, it would be the sum.
create or replace view agent_activity_measured as
  select a.id, a.skill_name, a.created_at, a.status, date_trunc('hour', a.created_at at time zone 'UTC') at time zone 'UTC' as hour, a.kind,
         agent_count_key(case a.kind when 'model' then coalesce(nullif(a.purpose, ''), a.skill_name) else a.skill_name end) as skill,
         agent_count_key(a.surface) as surface, agent_count_key(a.model) as model,
         a.kind = 'call' and a.status in ('success', 'error')
           and a.error_class not in ('invalid_params', 'unknown_tool', 'denied', 'stale', 'cancelled', 'interrupted', 'stall',
                                     'disabled', 'on_trial', 'yielded', 'budget') as telling,
         case a.kind when 'model' then agent_count_tokens(a.token_usage ->> 'prompt_tokens') else 0 end as prompt_tokens,
         case a.kind when 'model' then agent_count_tokens(a.token_usage ->> 'completion_tokens') else 0 end as completion_tokens,
         case a.kind when 'model' then agent_count_tokens(a.token_usage ->> 'total_tokens') else 0 end as tokens,
         case when a.kind = 'model' and a.cost_usd <> 'NaN' then a.cost_usd else 0 end as cost_usd,
         case when a.duration_ms is not null then greatest(0, least(a.duration_ms, 1000000000000)) end as duration_ms
    from agent_activity a;

-- What is counted by day, and the rows that are not counted yet, in one snapshot.
create or replace view agent_spend as
  select s.skill, s.surface, s.model, (s.start at time zone 'UTC')::date as day, sum(s.calls)::bigint as calls,
         sum(s.prompt_tokens)::bigint as prompt_tokens, sum(s.completion_tokens)::bigint as completion_tokens,
         sum(s.tokens)::bigint as tokens, sum(s.cost_usd) as cost_usd
    from (select c.skill, c.surface, c.model, c.start, c.calls, c.prompt_tokens, c.completion_tokens, c.tokens, c.cost_usd
            from agent_activity_counts c where c.span = 'day' and c.kind = 'model'
          union all
          select u.skill, u.surface, u.model, u.hour, 1, u.prompt_tokens, u.completion_tokens, u.tokens, u.cost_usd
            from uncounted_agent_activity(2000000000) u where u.kind = 'model') s
   group by 1, 2, 3, 4;
comment on view agent_spend is
  'Model calls, tokens and money by what they were made for, surface, model and day (UTC): of the counts, so that what retention took '
  'away is in it, and of the rows that are not counted yet. A usage or a cost that is no number counts for nothing.';
