-- Retention: what goes, and when.
--
-- Each kind of row has a policy (agent_retention). What is under way, and what something else needs, stays.

-- Which rows go ------------------------------------------------------------------------------------

create type agent_old_rows as (
  going     text[],                                       -- keys of the rows that go
  place_at  timestamptz,                                  -- the last row that was looked at
  place_key text,
  seen      int                                           -- how many were looked at
);
comment on type agent_old_rows is 'A piece of a pass: the rows to remove, and the place that it came to.';

create table agent_retention (
  kind       text primary key
             check (kind in ('activity', 'executions', 'events', 'messages', 'approvals', 'automation_runs', 'deliveries', 'outbox', 'budgets', 'hour_counts', 'prompts')),
  keep       interval,
  least      interval not null check ("least" > '00:00:00'::interval),
  about      text not null,
  changed_at timestamptz not null default clock_timestamp(),
  changed_by text not null default '',
  constraint agent_retention_check check (keep >= "least")
);
comment on table agent_retention is
  'How long rows are kept after they are over. Change it with set_agent_retention, which records who did and why.';
comment on column agent_retention.kind is 'The kind of row.';
comment on column agent_retention.keep is 'How long its rows are kept. Null: for ever.';
comment on column agent_retention.least is 'The shortest time that keep may be.';
comment on column agent_retention.about is 'The kind, described for people.';
comment on column agent_retention.changed_at is 'When keep was set.';
comment on column agent_retention.changed_by is 'The person who set it. Empty: as installed.';

create table agent_retention_passes (
  kind      text primary key references agent_retention(kind),
  place_at  timestamptz not null default '-infinity'::timestamptz,
  place_key text not null default '',
  began_at  timestamptz not null default clock_timestamp(),
  ended_at  timestamptz,
  removed   bigint not null default 0
);
comment on table agent_retention_passes is
  'How far the pass over each kind has come. A new pass begins once a day, and comes to the rows that were needed '
  'before.';
comment on column agent_retention_passes.kind is 'The kind of row.';
comment on column agent_retention_passes.place_at is 'Rows before this time and key were visited in this pass.';
comment on column agent_retention_passes.place_key is 'The key, for rows of the same time.';
comment on column agent_retention_passes.began_at is 'When the pass began.';
comment on column agent_retention_passes.ended_at is 'When it had visited all old rows. Null: there are more.';
comment on column agent_retention_passes.removed is 'Rows removed since the installation.';

create table agent_retention_leftovers (
  execution_id uuid primary key
);
comment on table agent_retention_leftovers is
  'Executions that are gone and still have checkpoints. These may be many, and are removed in pieces.';

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

insert into agent_retention_passes (kind) select r.kind from agent_retention r;

insert into agent_retention (kind, keep, least, about) values
  ('prompts', '30 days', '1 day', 'the prompts of model calls; their rows in the activity log stay');

insert into agent_retention_passes (kind) values ('prompts');

-- Code

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
  'Forget scopes that are older than p_keep, at least 31 days, but those of runs that have not ended. Answers '
  'how many. prune_agent does it by its policy, and in pieces.';

create or replace function set_agent_retention(p_keep jsonb, p_by text default 'admin', p_reason text default '')
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
  'Change policies, such as {"activity": "90 days", "events": "forever"}. All change or, with 22023, none. The '
  'change is recorded in the activity log.';

create or replace function old_agent_activity(p_before timestamptz, p_after uuid, p_most int) returns agent_old_rows
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

create or replace function old_agent_executions(p_before timestamptz, p_after uuid, p_most int) returns agent_old_rows
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

-- As it was, but it says which states it asks for: the index has no others.
create or replace function old_agent_events(p_before timestamptz, p_keep interval, p_after uuid, p_most int) returns agent_old_rows
language plpgsql stable set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off set jit = off as $$
declare
  bound uuid := agent_uuid7_floor(p_before);
  -- Of the executions that have not ended. By state too, as the index has it: by id alone they would be looked for among all others.
  oldest text := (
    select min(f.id::text collate "C") from unnest(array['pending', 'running', 'waiting']) s (status)
     cross join lateral (select x.id from agent_executions x where x.status in ('pending', 'running', 'waiting') and x.status between s.status and s.status
                         order by x.status, x.id limit 1) f);
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

create or replace function old_agent_approvals(p_before timestamptz, p_after uuid, p_most int) returns agent_old_rows
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

create or replace function old_agent_automation_runs(p_before timestamptz, p_after uuid, p_most int) returns agent_old_rows
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

create or replace function old_agent_deliveries(p_before timestamptz, p_after uuid, p_most int) returns agent_old_rows
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

create or replace function old_agent_outbox(p_before timestamptz, p_after uuid, p_most int) returns agent_old_rows
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

create or replace function old_agent_threads(p_before timestamptz, p_after_at timestamptz, p_after text, p_most int) returns agent_old_rows
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

create or replace function old_agent_budgets(p_before timestamptz, p_after_at timestamptz, p_after text, p_most int) returns agent_old_rows
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

create or replace function agent_retention_before(p_kind text, p_keep interval) returns timestamptz
language sql stable as $$
  -- Whole months of activity, so that their partitions can be dropped.
  select case when p_kind = 'activity' and p_keep >= interval '60 days'
              then date_trunc('month', (now() - p_keep) at time zone 'UTC') at time zone 'UTC'
              else now() - p_keep end
$$;
comment on function agent_retention_before is
  'The moment before which rows of a kind are old by a policy, from the beginning of the transaction.';

create or replace function old_agent_rows(p_kind text, p_keep interval, p_after_at timestamptz, p_after text, p_most int) returns agent_old_rows
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
    when 'prompts' then old_agent_prompts(greatest(before_, (        -- no longer than the rows that they belong to
      select agent_retention_before(r.kind, r.keep) from agent_retention r where r.kind = 'activity' and r.keep is not null)), after_, p_most)
    when 'budgets' then old_agent_budgets(before_, p_after_at, p_after, p_most)
  end;
end $$;
comment on function old_agent_rows is
  'Which of the next p_most rows of a kind, in the order of their age behind a place, go by a policy. It only '
  'reads.';

-- What caused something is known as long as that is there.
create or replace function prune_agent_causes(p_what text, p_ids uuid[]) returns void language sql volatile set enable_seqscan = off
set jit = off as $$
  delete from agent_links l where l.effect = any (array(select p_what || ' ' || i from unnest(p_ids) i))
$$;

create or replace function prune_agent_executions(p_ids uuid[]) returns int
language plpgsql volatile set enable_seqscan = off set jit = off as $$
declare
  half constant int := cardinality(p_ids) / 2;
begin
  if p_ids = '{}' then
    return 0;
  end if;
  begin
    return prune_agent_executions_at_once(p_ids);
  exception when lock_not_available then
    if half = 0 then
      return 0;                                             -- the next pass comes to it again
    end if;
  end;
  return prune_agent_executions(p_ids[1:half]) + prune_agent_executions(p_ids[half + 1:cardinality(p_ids)]);
end $$;
comment on function prune_agent_executions is
  'Take executions away with what belongs to them, but for those of which another transaction has something '
  'locked.';

create or replace function prune_agent_leftovers(p_most int) returns boolean
language plpgsql volatile set enable_seqscan = off
set jit = off as $$
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

-- As before, but for a thread of which another transaction has something locked.
create or replace function prune_agent_thread(p_id text, p_before timestamptz, p_most int, out removed int, out gone boolean)
language plpgsql volatile set enable_seqscan = off set jit = off as $$
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
exception when lock_not_available then                      -- the next pass comes to it again
  removed := 0;
  gone := false;
end $$;

-- As before, and prompts with their parts.
create or replace function prune_agent(p_kind text, p_most int default 500, p_anew boolean default false, out removed int, out more boolean)
language plpgsql volatile set enable_seqscan = off set jit = off set lock_timeout = '100ms' as $$
declare
  policy agent_retention;
  pass agent_retention_passes;
  o agent_old_rows;
  ids uuid[];
  id_ text;
  n bigint;
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
    with held as (
      select a.id from agent_activity a where a.id = any (ids) and a.id >= ids[1] and a.id <= ids[cardinality(ids)] for update skip locked)
    delete from agent_activity a using held h where a.id = h.id and a.id >= ids[1] and a.id <= ids[cardinality(ids)];
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
  elsif p_kind = 'prompts' then
    removed := prune_agent_prompts(ids);
    n := prune_agent_prompt_parts(p_most);
    removed := removed + n;
    more := more or n = p_most;
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
  'One piece of a pass over a kind: look at the next p_most rows and take away those that are old by its policy '
  'and that nothing unfinished needs. more: call it again. One caller at a time does the work; the others are '
  'answered 0. With p_anew the pass begins with the oldest row.';

create or replace procedure prune_agent_all(p_most int default 500)
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
  'A pass over every kind, committed piece by piece: call it outside a transaction. agent serve makes one every '
  'hour.';

create or replace function agent_activity_needed(p_partition text, p_lower uuid, p_upper uuid) returns text
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

create or replace function agent_activity_retirable()
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
  'The partitions of the activity log that go by its policy, the oldest first: those that have begun to, and '
  'those in which nothing is needed.';

create or replace function retire_agent_activity_partition(p_partition text) returns boolean
language plpgsql volatile as $$
begin
  insert into agent_activity_retired (partition, lower_id, upper_id)
  select r.partition, r.lower_id, r.upper_id from agent_activity_retirable() r where r.partition = p_partition and not r.began
  on conflict do nothing;
  return exists (select from agent_activity_retired r where r.partition = p_partition);
end $$;
comment on function retire_agent_activity_partition is
  'Note that a partition is on its way out. Then, outside a transaction: alter table agent_activity detach '
  'partition … concurrently; and drop_agent_activity_partition. False when it is not to go.';

create or replace function drop_agent_activity_partition(p_partition text) returns text
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
  'Drop a partition that was detached on its way out, or attach it again when something in it is needed after '
  'all. Answers `dropped`, or why not. It never waits for a lock for more than 50 ms (55P03: try again later).';

create or replace function void_agent_leases(out workers int, out executions int, out lanes int)
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
  'Prepare a restored copy, before any process works on it: void every lease, claim and token. A process of the '
  'original database can then write nothing here. Executions go on from their checkpoints; waits go on.';

-- As before, and the documents of the executions go with them.
create or replace function prune_agent_executions_at_once(p_ids uuid[]) returns int
language plpgsql volatile set enable_seqscan = off set jit = off as $$
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
  delete from agent_documents d where d.execution_id = any (gone);
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

create or replace function old_agent_prompts(p_before timestamptz, p_after uuid, p_most int) returns agent_old_rows
language plpgsql stable set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off set jit = off as $$
declare
  bound uuid := agent_uuid7_floor(p_before);
  o agent_old_rows;
begin
  with looked as materialized (
    select p.activity_id from agent_prompts p where p.activity_id > p_after and p.activity_id < bound order by p.activity_id limit p_most)
  select array_agg(l.activity_id::text order by l.activity_id)
           filter (where not exists (select from agent_activity_open w where w.activity_id = l.activity_id)),
         null::timestamptz, max(l.activity_id::text collate "C"), count(*)
    into o from looked l;
  return o;
end $$;
comment on function old_agent_prompts is
  'Which of the next p_most prompts go by a policy: those whose model call is not under way.';

create or replace function prune_agent_prompts(p_ids uuid[]) returns bigint
language plpgsql volatile set enable_seqscan = off set jit = off as $$
declare
  removed bigint;
begin
  with held as (select p.activity_id from agent_prompts p where p.activity_id = any (p_ids) for update skip locked)
  delete from agent_prompts p using held h where p.activity_id = h.activity_id;
  get diagnostics removed = row_count;
  return removed;
end $$;
comment on function prune_agent_prompts is 'Delete prompts, but for those that another transaction has locked.';

create or replace function prune_agent_prompt_parts(p_most int) returns bigint
language plpgsql volatile set enable_seqscan = off set jit = off as $$
declare
  -- A prompt marks its parts in its own transaction: a part that was last used before the oldest prompt is in none. A
  -- day less, for transactions that go past midnight.
  oldest constant timestamptz := (select p.created_at from agent_prompts p order by p.activity_id limit 1);
  bound constant date := (least(oldest, now()) at time zone 'UTC')::date - 1;
  removed bigint;
begin
  with held as (
    select p.digest from agent_prompt_parts p where p.used_on < bound order by p.used_on limit p_most for update skip locked)
  delete from agent_prompt_parts p using held h where p.digest = h.digest;
  get diagnostics removed = row_count;
  return removed;
end $$;
comment on function prune_agent_prompt_parts is 'Delete at most p_most parts that no prompt has any more.';
