-- Retention: how long rows are kept.
--
-- Each kind of row has a policy (agent_retention). A row stays while it is active, and while another row needs it.
-- The statements that find and delete old rows are in the Go package retention.

create table agent_retention (
  kind text primary key,
  keep interval, min_keep interval not null check (min_keep > '00:00:00'::interval), about text not null,
  changed_at timestamptz not null default clock_timestamp(), changed_by text not null default '',
  constraint agent_retention_check check (keep >= min_keep)
);
comment on table agent_retention is
  'How long rows are kept after their end. Change it with set_agent_retention, which records the actor and the reason.';
comment on column agent_retention.kind is 'The kind of row.';
comment on column agent_retention.keep is 'How long its rows are kept. Null: for ever.';
comment on column agent_retention.min_keep is 'The shortest time that keep may be.';
comment on column agent_retention.about is 'The kind, described for people.';
comment on column agent_retention.changed_at is 'When keep was set.';
comment on column agent_retention.changed_by is 'The person who set it. Empty: as installed.';

create table agent_retention_passes (
  kind text primary key references agent_retention(kind),
  place_at timestamptz not null default '-infinity'::timestamptz, place_key text not null default '',
  began_at timestamptz not null default clock_timestamp(), ended_at timestamptz, removed bigint not null default 0
);
comment on table agent_retention_passes is
  'The progress of the pass over each kind. A new pass begins once a day, and visits again rows that were still '
  'needed.';
comment on column agent_retention_passes.kind is 'The kind of row.';
comment on column agent_retention_passes.place_at is 'This pass has visited the rows before this time and key.';
comment on column agent_retention_passes.place_key is 'The key, for rows of the same time.';
comment on column agent_retention_passes.began_at is 'When the pass began.';
comment on column agent_retention_passes.ended_at is 'When the pass had visited all old rows. Null: there are more.';
comment on column agent_retention_passes.removed is 'Rows removed since the installation.';

create table agent_retention_leftovers (
  execution_id uuid primary key
);
comment on table agent_retention_leftovers is
  'Pruned executions that still have checkpoints. Checkpoints may be many, so they are deleted in batches.';

insert into agent_retention (kind, keep, min_keep, about) values
  ('activity', null, '7 days', 'the activity log; by whole months from 60 days on'),
  ('executions', null, '1 day', 'ended executions, with their checkpoints, requests and completion events'),
  ('events', null, '1 day', 'events that were consumed, or that no execution waited for'),
  ('messages', null, '1 day', 'threads without a new message for so long, with their messages'),
  ('approvals', null, '1 day', 'approvals that were used, rejected or have expired'),
  ('automation_runs', null, '1 day', 'runs of automations that succeeded or were skipped; dead letters stay'),
  ('deliveries', '90 days', '1 day', 'webhook deliveries that are done or ignored; dead ones stay'),
  ('outbox', '90 days', '1 day', 'outgoing webhooks that were sent or given up'),
  ('budgets', '60 days', '31 days', 'the spend of runs and days'),
  ('hour_counts', null, '35 days', 'the activity log''s counts by hour; those by day stay for ever'),
  ('prompts', '30 days', '1 day', 'the prompts of model calls; their rows in the activity log stay'),
  ('evals', '90 days', '1 day', 'runs of evals that ended, with their trials and the samples of recorded turns'),
  ('channel_messages', '30 days', '1 day', 'messages from channels that were handled; their text stays in its thread'),
  ('eval_labels', null, '30 days', 'labels of the answers of trials, which calibrate judges')
  on conflict do nothing;

insert into agent_retention_passes (kind) select r.kind from agent_retention r on conflict do nothing;

-- Code

create or replace function set_agent_retention(p_keep jsonb, p_by text default 'admin', p_reason text default '')
returns table (changed boolean, trace_id text, activity_id uuid)
language plpgsql volatile security definer set search_path from current as $$
#variable_conflict use_column
declare
  wish record;
  was agent_retention;
  span interval;
  before_ jsonb := '{}';
  after_ jsonb := '{}';
begin
  perform lanekeeper.check_agent_reason(p_by, p_reason);
  if p_keep is null or jsonb_typeof(p_keep) <> 'object' or p_keep = '{}' then
    raise exception 'no policy is given'
      using errcode = '22023', hint = 'Such as {"activity": "90 days", "events": "forever"}.';
  end if;
  for wish in select w.key, w.value #>> '{}' as said from jsonb_each(p_keep) w order by w.key loop
    select r.* into was from agent_retention r where r.kind = wish.key for update;
    if not found then
      raise exception '% is not a kind of retention policy', quote_literal(left(wish.key, 40)) using errcode = '22023',
        hint = 'Kinds: ' || (select string_agg(r.kind, ', ' order by r.kind) from agent_retention r) || '.';
    end if;
    begin
      span := nullif(coalesce(wish.said, ''), 'forever')::interval;
    exception when others then
      raise exception '% is not a retention time for %: give a number of days such as 90d, or forever',
        quote_literal(left(wish.said, 40)), wish.key
        using errcode = '22023';
    end;
    if span < was.min_keep or span > interval '100 years' then
      raise exception '% cannot be kept for %: give % to 100 years, or forever', wish.key, span, was.min_keep
        using errcode = '22023';
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
    insert into agent_activity as a (trace_id, kind, agent, surface, skill_name, purpose, status, input, output,
                                     finished_at, duration_ms)
    values (lanekeeper.agent_trace_id('op'), 'note', p_by, 'operate', 'set_retention', coalesce(p_reason, ''),
            'success',
            lanekeeper.agent_actor() || jsonb_build_object('keep', after_, 'by', p_by, 'reason', p_reason),
            jsonb_build_object('was', before_), clock_timestamp(), 0)
    returning true, a.trace_id, a.id;
end $$;
comment on function set_agent_retention is
  'Change policies, such as {"activity": "90 days", "events": "forever"}. All change or, with 22023, none. The '
  'change is recorded in the activity log.';

create or replace function void_agent_leases(out workers int, out executions int, out lanes int)
language plpgsql volatile security definer set search_path from current as $$
declare
  others text;
begin
  select string_agg(format('pid %s (%s)', s.pid, coalesce(nullif(s.application_name, ''), 'no name')), ', '
                    order by s.pid)
    into others
    from pg_stat_activity s left join pg_roles r on r.oid = s.usesysid
   where s.datname = current_database() and s.pid <> pg_backend_pid()
     and (s.usename = current_user or pg_has_role(r.oid, current_user, 'member')
                                      and (not r.rolsuper or s.application_name like 'agent%'));
  if others is not null then
    raise exception 'other sessions of the owner are on this database: %', left(others, 500)
      using errcode = '55000',
            hint = 'Stop every process of the agent, and end the other sessions: select pg_terminate_backend(pid).';
  end if;
  update agent_workers w set expires_at = 'epoch';
  get diagnostics workers = row_count;
  -- Exceed any claim that the original database has given since the copy.
  update agent_executions x set claim = x.claim + 1000000 where x.status in ('pending', 'running', 'waiting');
  get diagnostics executions = row_count;
  update agent_locks l
     set fencing_token = greatest(l.fencing_token + 1, (extract(epoch from clock_timestamp()) * 1000000)::bigint),
         locked_by = case when l.parked then coalesce((select x.id || '#' || x.claim
                                                         from agent_executions x
                                                        where x.id = l.execution_id),
                                                      l.locked_by)
                          else l.locked_by end,
         expires_at = case when l.parked then l.expires_at else least(l.expires_at, clock_timestamp()) end
   where l.locked_by <> '';
  get diagnostics lanes = row_count;
  delete from lanekeeper.agent_trial_transactions;           -- their ids come from the other server
end $$;
comment on function void_agent_leases is
  'Prepare a restored copy before any process works on it: void every lease, claim and token. A process of the '
  'original database can then write nothing here. Executions continue from their checkpoints, and waits continue. '
  '55000: another session of the owner, or of a member of its role, is on this database. A session of another '
  'superuser counts only if its application_name begins with agent.';
