-- Counts over the activity log that do not grow with it: per hour and per day, and for durations per day. Both are kept, since
-- thirty days of hours are too many rows to add up for a page, and days alone cannot begin in the middle of one.
--
-- A row is counted once, after it ended, by a pass that anybody may call (count_agent_activity). Which rows a pass takes is a
-- range of ids, so nothing has to be written where rows are written. What makes that safe:
--
--   * A range ends 20 seconds before a pass began (the candidate), and is counted by a later pass, once every transaction that
--     was under way when the candidate was set has ended: its xid is above all of theirs, and pg_snapshot_xmin reaches it. What
--     those wrote is visible then, or rolled back.
--   * Who writes later than that writes ids of its own time, which are above the candidate. A row whose id is more than 5
--     seconds old when it is inserted (an import, a statement that waited long) is listed in agent_activity_uncounted by a
--     trigger, in its own transaction. So the two cases leave nothing between them, unless the server's clock is put back by
--     more than the 15 seconds that lie between.
--   * What is listed there is left out of ranges, and counted by itself when a range has passed it and it has ended. Rows that
--     a range finds running go to the same list.
--
-- One pass works at a time, and a pass is one transaction: killed anywhere, it has not been. Counts stay when rows are deleted.
-- A row that is changed after it ended keeps the count that it had. A partition that is attached with rows in it is not
-- counted, since one that comes back from an archive was; `insert into agent_activity_uncounted select id from …` counts it.
-- A write transaction that stays open, in any database of the server, holds counting up; readers add what is not counted yet.

create table agent_activity_counts (
  span              text not null check (span in ('hour', 'day')),
  start             timestamptz not null,   -- of the hour or the day, UTC
  kind              text not null,
  skill             text not null,          -- what a model was called for; else the skill's name
  surface           text not null,
  model             text not null,
  calls             bigint not null default 0,   -- all that have ended, however
  successes         bigint not null default 0,
  errors            bigint not null default 0,
  pending_approval  bigint not null default 0,
  skipped           bigint not null default 0,
  unknown           bigint not null default 0,
  worked            bigint not null default 0,   -- successes and errors that agent_skill_calls has: what a skill's health goes by
  failed            bigint not null default 0,
  prompt_tokens     bigint not null default 0,
  completion_tokens bigint not null default 0,
  tokens            bigint not null default 0,
  cost_usd          numeric not null default 0,
  duration_ms       bigint not null default 0,
  primary key (span, start, kind, skill, surface, model)
) with (fillfactor = 80);
create index agent_activity_counts_skill on agent_activity_counts (skill, span, start);
comment on table agent_activity_counts is
  'The activity log, counted by hour, and once more by day. Rows since agent_activity_counted.counted_upto and those in '
  'agent_activity_uncounted are not in it yet.';

create table agent_activity_durations (
  day    date not null,                     -- UTC
  skill  text not null,
  bucket int not null,                      -- durations from 1.05 ^ bucket ms up to the next; -1 is less than 1 ms
  calls  bigint not null,
  primary key (day, skill, bucket)
) with (fillfactor = 80);
comment on table agent_activity_durations is
  'How long the calls of agent_skill_calls took. A bucket is 5 per cent wide, so a percentile is right to 2.5 per cent.';

create table agent_activity_counted (
  single        boolean primary key default true check (single),
  counted_upto  uuid not null default '00000000-0000-0000-0000-000000000000',  -- ids below it are counted, or listed as uncounted
  candidate     uuid,                       -- ids below it are counted next,
  candidate_xid xid8,                       -- when no transaction below this one is under way
  looked        uuid not null default '00000000-0000-0000-0000-000000000000'   -- how far the last pass got in agent_activity_uncounted
);
insert into agent_activity_counted default values;

create table agent_activity_uncounted (activity_id uuid primary key);
comment on table agent_activity_uncounted is 'Rows that are counted by themselves: they came with an old id, or had not ended when their time was counted.';

create function agent_activity_late() returns trigger language plpgsql as $$
begin
  insert into agent_activity_uncounted values (new.id) on conflict do nothing;
  return null;
end $$;
-- After the insert: by then its transaction has an xid. The comparison is all that an ordinary insert pays.
create trigger agent_activity_late after insert on agent_activity
  for each row when (new.id < agent_uuid7_floor(clock_timestamp() - interval '5 seconds'))
  execute function agent_activity_late();

create function agent_count_key(p_text text) returns text language sql immutable parallel safe as $$
  select case when octet_length(p_text) <= 300 then p_text else left(p_text, 60) || '… ' || md5(p_text) end
$$;
comment on function agent_count_key is 'A text that fits into an index. A model may call its tools what it likes.';

create function agent_count_tokens(p_text text) returns bigint language sql immutable parallel safe as $$
  select case when p_text ~ '^-?[0-9]{1,12}$' then p_text::bigint else 0 end
$$;
comment on function agent_count_tokens is 'A number of tokens; 0 when it is none, so that a bad row does not stop the count of others.';

create function agent_duration_bucket(p_ms bigint) returns int language sql immutable parallel safe as $$
  select case when p_ms < 1 then -1 else floor(ln(p_ms::float8) / ln(1.05::float8))::int end
$$;

create view agent_activity_measured as
  select a.id, a.skill_name, a.created_at, a.status, date_trunc('hour', a.created_at at time zone 'UTC') at time zone 'UTC' as hour, a.kind,
         agent_count_key(case a.kind when 'model' then coalesce(nullif(a.purpose, ''), a.skill_name) else a.skill_name end) as skill,
         agent_count_key(a.surface) as surface, agent_count_key(a.model) as model,
         a.kind = 'call' and a.status in ('success', 'error')
           and a.error_class not in ('invalid_params', 'unknown_tool', 'denied', 'stale', 'cancelled', 'interrupted', 'stall',
                                     'disabled', 'on_trial', 'yielded', 'budget') as telling,
         case a.kind when 'model' then agent_count_tokens(a.token_usage ->> 'prompt_tokens') else 0 end as prompt_tokens,
         case a.kind when 'model' then agent_count_tokens(a.token_usage ->> 'completion_tokens') else 0 end as completion_tokens,
         case a.kind when 'model' then agent_count_tokens(a.token_usage ->> 'total_tokens') else 0 end as tokens,
         case a.kind when 'model' then a.cost_usd else 0 end as cost_usd,
         case when a.duration_ms is not null then greatest(0, least(a.duration_ms, 1000000000000)) end as duration_ms
    from agent_activity a;
comment on view agent_activity_measured is
  'What each row of the log counts for. telling: it says something about its skill, as in agent_skill_calls.';

create function count_agent_activity(
  p_most int default 20000, p_lag interval default '20 seconds', out counted int, out more boolean)
language plpgsql volatile set enable_seqscan = off set jit = off set plan_cache_mode = force_custom_plan as $$
declare
  s agent_activity_counted;
  -- From when the transaction began: that is before it has an xid, whatever was done in it.
  horizon uuid := agent_uuid7_floor(now() - p_lag);
  bound uuid;
  seen int;
  furthest uuid;
begin
  if not coalesce(p_most > 0 and p_lag > interval '0', false) then
    raise exception 'a pass counts at least one row, and lags behind the clock' using errcode = '22023';
  end if;
  counted := 0;
  more := false;
  -- Idle is the common case, and costs no write.
  select x.* into s from agent_activity_counted x;
  if s.candidate is null and not exists (select from agent_activity a where a.id >= s.counted_upto and a.id < horizon)
     and not exists (select from agent_activity_uncounted u
                      where u.activity_id < s.counted_upto
                        and not exists (select from agent_activity_open o where o.activity_id = u.activity_id)) then
    return;
  end if;
  select x.* into s from agent_activity_counted x for update skip locked;
  if not found then
    return;
  end if;
  bound := s.counted_upto;
  if s.candidate_xid >= pg_snapshot_xmax(pg_current_snapshot()) then
    s.candidate := null;                    -- of another server: the database was restored from a dump
  elsif s.candidate_xid <= pg_snapshot_xmin(pg_current_snapshot()) then
    select a.id into bound from agent_activity a
     where a.id >= s.counted_upto and a.id < s.candidate order by a.id offset p_most limit 1;
    bound := coalesce(bound, s.candidate);
  end if;
  with fresh as materialized (
    select m.* from agent_activity_measured m
     where m.id >= s.counted_upto and m.id < bound
       and not exists (select from agent_activity_uncounted u where u.activity_id = m.id)),
  looked as materialized (
    select u.activity_id from agent_activity_uncounted u
     where u.activity_id < s.counted_upto and u.activity_id > s.looked
       and not exists (select from agent_activity_open o where o.activity_id = u.activity_id)
     order by u.activity_id limit p_most),
  found as materialized (
    select l.activity_id, m.* from looked l left join agent_activity_measured m on m.id = l.activity_id),
  settled as (
    delete from agent_activity_uncounted u using found f
     where u.activity_id = f.activity_id and f.status is distinct from 'running'),   -- ended, or gone
  postponed as (
    insert into agent_activity_uncounted select f.id from fresh f where f.status = 'running' on conflict do nothing),
  ended as materialized (
    select f.* from fresh f where f.status <> 'running'
    union all
    select f.id, f.skill_name, f.created_at, f.status, f.hour, f.kind, f.skill, f.surface, f.model, f.telling, f.prompt_tokens, f.completion_tokens,
           f.tokens, f.cost_usd, f.duration_ms
      from found f where f.status <> 'running'),
  hours as materialized (
    select e.hour, e.kind, e.skill, e.surface, e.model, count(*) as calls, count(*) filter (where e.status = 'success') as successes,
           count(*) filter (where e.status = 'error') as errors, count(*) filter (where e.status = 'pending_approval') as pending_approval,
           count(*) filter (where e.status = 'skipped') as skipped, count(*) filter (where e.status = 'unknown') as unknown,
           count(*) filter (where e.telling) as worked, count(*) filter (where e.telling and e.status = 'error') as failed,
           sum(e.prompt_tokens) as prompt_tokens, sum(e.completion_tokens) as completion_tokens, sum(e.tokens) as tokens,
           sum(e.cost_usd) as cost_usd, coalesce(sum(e.duration_ms), 0) as duration_ms
      from ended e group by 1, 2, 3, 4, 5),
  added as (
    insert into agent_activity_counts as c
           (span, start, kind, skill, surface, model, calls, successes, errors, pending_approval, skipped, unknown, worked, failed,
            prompt_tokens, completion_tokens, tokens, cost_usd, duration_ms)
    select 'hour', h.* from hours h
    union all
    select 'day', date_trunc('day', h.hour at time zone 'UTC') at time zone 'UTC', h.kind, h.skill, h.surface, h.model, sum(h.calls),
           sum(h.successes), sum(h.errors), sum(h.pending_approval), sum(h.skipped), sum(h.unknown), sum(h.worked), sum(h.failed),
           sum(h.prompt_tokens), sum(h.completion_tokens), sum(h.tokens), sum(h.cost_usd), sum(h.duration_ms)
      from hours h group by 2, 3, 4, 5, 6
    on conflict (span, start, kind, skill, surface, model) do update
       set calls = c.calls + excluded.calls, successes = c.successes + excluded.successes, errors = c.errors + excluded.errors,
           pending_approval = c.pending_approval + excluded.pending_approval, skipped = c.skipped + excluded.skipped,
           unknown = c.unknown + excluded.unknown, worked = c.worked + excluded.worked, failed = c.failed + excluded.failed,
           prompt_tokens = c.prompt_tokens + excluded.prompt_tokens,
           completion_tokens = c.completion_tokens + excluded.completion_tokens, tokens = c.tokens + excluded.tokens,
           cost_usd = c.cost_usd + excluded.cost_usd, duration_ms = c.duration_ms + excluded.duration_ms),
  lasted as (
    insert into agent_activity_durations as d (day, skill, bucket, calls)
    select (e.hour at time zone 'UTC')::date, e.skill, agent_duration_bucket(e.duration_ms), count(*)
      from ended e where e.telling and e.duration_ms is not null group by 1, 2, 3
    on conflict (day, skill, bucket) do update set calls = d.calls + excluded.calls)
  select (select count(*) from ended), (select count(*) from looked), (select max(l.activity_id::text collate "C")::uuid from looked l)
    into counted, seen, furthest;
  more := bound < s.candidate and bound > s.counted_upto or seen = p_most;
  if bound = s.candidate then
    s.candidate := null;
  end if;
  if s.candidate is null and exists (select from agent_activity a where a.id >= bound and a.id < horizon) then
    s.candidate := horizon;
    s.candidate_xid := pg_current_xact_id();
  end if;
  update agent_activity_counted
     set counted_upto = bound, candidate = s.candidate,
         candidate_xid = case when s.candidate is not null then s.candidate_xid end,
         looked = case when seen = p_most then furthest else '00000000-0000-0000-0000-000000000000' end;
end $$;
comment on function count_agent_activity is
  'Count at most p_most rows of the log, and as many that are counted by themselves; more says that others can be counted at '
  'once. Does nothing while another pass is at work. p_lag is not below the 5 seconds of the trigger agent_activity_late.';

create function uncounted_agent_activity(p_most int)
returns table (id uuid, status text, hour timestamptz, kind text, skill text, surface text, model text, telling boolean,
               prompt_tokens bigint, completion_tokens bigint, tokens bigint, cost_usd numeric, duration_ms bigint, beyond boolean)
language sql stable set enable_seqscan = off set jit = off as $$
  -- Ids from counted_upto on are all rows of the log from there on; below it they are listed one by one.
  with counted as materialized (
    select c.counted_upto from agent_activity_counted c),
  fresh as materialized (
    select m.* from agent_activity_measured m
     where m.id >= (select c.counted_upto from counted c) order by m.id limit p_most + 1),
  late as materialized (
    select m.*
      from (select u.activity_id from agent_activity_uncounted u
             where u.activity_id < (select c.counted_upto from counted c) order by u.activity_id limit p_most + 1) u
      join agent_activity_measured m on m.id = u.activity_id),
  left_out as materialized (
    select min(x.id::text collate "C")::uuid as id
      from ((select f.id from fresh f order by f.id offset p_most) union all (select l.id from late l order by l.id offset p_most)) x)
  select r.id, r.status, r.hour, r.kind, r.skill, r.surface, r.model, r.telling, r.prompt_tokens, r.completion_tokens, r.tokens,
         r.cost_usd, r.duration_ms, coalesce(r.id >= o.id, false)
    from (select f.* from fresh f union all select l.* from late l) r cross join left_out o
$$;
comment on function uncounted_agent_activity is
  'What the counts lack, in the snapshot of who asks: at most p_most of the newest rows and as many of those counted by '
  'themselves. When there are more, those that are beyond the first that is left out are marked: sums are complete up to there.';

create function agent_skill_streak(p_skill text, p_since timestamptz, p_enabled_at timestamptz, p_most int, out streak int, out more boolean)
language plpgsql stable set enable_seqscan = off set jit = off set plan_cache_mode = force_generic_plan as $$
declare
  r record;
  seen int := 0;
begin
  streak := 0;
  more := false;
  -- By name too, as the index has it: by id alone a skill that is seldom called would be looked for among all others.
  for r in
    select m.telling, m.status, m.created_at from agent_activity_measured m
     where m.skill_name between p_skill and p_skill and m.id >= agent_uuid7_floor(greatest(p_since, p_enabled_at))
     order by m.skill_name desc, m.id desc limit p_most
  loop
    seen := seen + 1;
    continue when not r.telling or r.created_at <= p_enabled_at;
    if r.status = 'success' then
      return;
    end if;
    streak := streak + 1;
  end loop;
  more := seen = p_most;
end $$;
comment on function agent_skill_streak is
  'Failures of a skill since its last success, since a moment and since it was enabled: among its newest p_most rows, and more '
  'when none of those is a success.';
