-- Budgets: what model calls may cost.
--
-- A call reserves its worst case before it is made and settles what it used. A reservation is keyed by execution and
-- step, so that a retry uses the one that is there. A call whose usage no provider reported counts at its worst case,
-- and is flagged.

create table agent_budgets (
  scope           text primary key check ((scope <> '') AND (length(scope) <= 255)),
  tokens          bigint not null default 0 check (tokens >= 0),
  cost_usd        numeric not null default 0 check (cost_usd >= (0)::numeric),
  reserved_tokens bigint not null default 0 check (reserved_tokens >= 0),
  reserved_usd    numeric not null default 0 check (reserved_usd >= (0)::numeric),
  unsettled       int not null default 0,
  created_at      timestamptz not null default clock_timestamp(),
  updated_at      timestamptz not null default clock_timestamp(),
  unknown_tokens  bigint not null default 0,
  unknown_usd     numeric not null default 0
) with (fillfactor = 50);
create index agent_budgets_age on agent_budgets (created_at);
comment on index agent_budgets_age is 'Finds budgets of old runs and days, which are to go.';
comment on table agent_budgets is
  'What was spent, and what is reserved, by scope. The limits come with each reservation, from the settings.';
comment on column agent_budgets.scope is
  'What is counted: a run (run:TRACE), a day (day:DATE), or a surface or agent of a day.';
comment on column agent_budgets.tokens is 'Tokens spent.';
comment on column agent_budgets.cost_usd is 'US dollars spent.';
comment on column agent_budgets.reserved_tokens is 'Tokens of calls under way, at their worst case.';
comment on column agent_budgets.reserved_usd is 'US dollars of calls under way, at their worst case.';
comment on column agent_budgets.unsettled is 'Calls whose usage no provider reported.';
comment on column agent_budgets.unknown_tokens is 'The part of tokens that no provider reported, at its worst case.';
comment on column agent_budgets.unknown_usd is 'The part of cost_usd that no provider reported, at its worst case.';

create table agent_budget_reservations (
  execution_id uuid not null,
  step         text not null,
  scopes       text[] not null,
  granted      bigint not null,
  tokens       bigint not null,
  cost_usd     numeric not null,
  created_at   timestamptz not null default clock_timestamp(),
  claim        bigint,
  activity_id  uuid,
  primary key (execution_id, step)
);
comment on table agent_budget_reservations is
  'Model calls under way. A step makes one request at a time, under one claim.';
comment on column agent_budget_reservations.step is 'The step that makes the call.';
comment on column agent_budget_reservations.scopes is 'The budgets that it is reserved in.';
comment on column agent_budget_reservations.granted is 'Completion tokens that the call may use.';
comment on column agent_budget_reservations.tokens is 'The reservation: the granted tokens and those of the prompt.';
comment on column agent_budget_reservations.cost_usd is 'The reservation in US dollars.';
comment on column agent_budget_reservations.claim is 'The claim that reserved it. A later claim writes it off.';
comment on column agent_budget_reservations.activity_id is 'The row of the log of the call.';

-- Code

create or replace function lanekeeper.reserve_agent_budget(
  p_execution_id uuid, p_claim bigint, p_step text, p_scopes text[], p_token_limits bigint[], p_usd_limits numeric[],
  p_prompt_tokens bigint, p_prompt_usd numeric, p_token_usd numeric, p_wanted bigint, p_enough bigint, p_least bigint)
returns table (granted bigint, scope text, unit text, kind text, bound numeric, spent numeric, reserved numeric)
language plpgsql volatile set plan_cache_mode = force_generic_plan set enable_seqscan = off set jit = off as $$
#variable_conflict use_column
declare
  day text := to_char(clock_timestamp() at time zone 'UTC', 'YYYY-MM-DD');
  names text[];
  b record;
  most bigint;        -- completion tokens that any scope will ever have room for
  fits bigint;
  held_by bigint;     -- the claim of a reservation that is there
begin
  if p_step is null or p_step = '' or coalesce(cardinality(p_scopes), 0) = 0
     or cardinality(p_scopes) is distinct from cardinality(p_token_limits)
     or cardinality(p_scopes) is distinct from cardinality(p_usd_limits)
     or not coalesce(p_prompt_tokens >= 0 and p_prompt_usd >= 0 and p_token_usd >= 0
                     and p_least > 0 and p_enough >= p_least and p_wanted >= p_enough, false) then
    raise exception 'a reservation needs a step, scopes with a token and a money limit each (0 for none), a worst case of 0 or '
      'more, and 0 < least <= enough <= wanted' using errcode = '22023';
  end if;
  perform lanekeeper.fence_agent_execution(p_execution_id, p_claim);
  -- Who settles one locks it before its budgets; so does this.
  perform from agent_budget_reservations r where r.execution_id = p_execution_id and r.step = p_step for update;
  select array_agg(replace(s, '{day}', day) order by i) into names from unnest(p_scopes) with ordinality u (s, i);
  insert into agent_budgets (scope) select distinct s from unnest(names) s order by s on conflict do nothing;
  perform 1 from agent_budgets x where x.scope = any (names) order by x.scope for update;
  -- Read after the lock: a try before this one may have been at work.
  select r.granted, r.claim into fits, held_by
    from agent_budget_reservations r where r.execution_id = p_execution_id and r.step = p_step;
  if found and held_by < p_claim then
    perform lanekeeper.write_off_agent_budget(p_execution_id, p_step);
  elsif found then
    return query select fits, null::text, null::text, null::text, null::numeric, null::numeric, null::numeric;
    return;
  end if;
  fits := p_wanted;
  for b in
    -- rest: completion tokens that fit when all calls under way give back what is set aside for them;
    -- room: those that fit now.
    with bounds as (
      select x.scope, 'tokens' as unit, l.tokens::numeric as bound, x.tokens::numeric as spent,
             x.reserved_tokens::numeric as reserved, p_prompt_tokens::numeric as prompt, 1::numeric as each, l.i
        from unnest(names, p_token_limits) with ordinality l (scope, tokens, i) join agent_budgets x on x.scope = l.scope
       where l.tokens > 0
      union all
      select x.scope, 'usd', l.usd, x.cost_usd, x.reserved_usd, p_prompt_usd, p_token_usd, l.i
        from unnest(names, p_usd_limits) with ordinality l (scope, usd, i) join agent_budgets x on x.scope = l.scope
       where l.usd > 0 and (p_prompt_usd > 0 or p_token_usd > 0)),        -- what costs nothing is not bounded by money
    rests as (
      select m.*, m.bound - m.spent - m.prompt as free, m.bound - m.spent - m.prompt - m.reserved as free_now from bounds m)
    select r.scope, r.unit, r.bound, r.spent, r.reserved,
           case when r.free < 0 then -1 when r.each = 0 then p_wanted else least(floor(r.free / r.each), p_wanted) end::bigint as rest,
           case when r.free_now < 0 then -1 when r.each = 0 then p_wanted else least(floor(r.free_now / r.each), p_wanted) end::bigint as room
      from rests r order by 6, 7, r.i
  loop
    most := coalesce(most, b.rest);
    if b.rest < p_least then
      return query select null::bigint, b.scope, b.unit, 'spent', b.bound, b.spent, b.reserved;
      return;
    elsif b.room < least(p_enough, most) then
      return query select null::bigint, b.scope, b.unit, 'reserved', b.bound, b.spent, b.reserved;
      return;
    end if;
    fits := least(fits, b.room);
  end loop;
  insert into agent_budget_reservations (execution_id, step, scopes, granted, tokens, cost_usd, claim, activity_id)
  values (p_execution_id, p_step, (select array_agg(distinct s) from unnest(names) s), fits, p_prompt_tokens + fits,
          p_prompt_usd + fits * p_token_usd, p_claim,
          (select o.activity_id from agent_activity_open o
            where o.execution_id = p_execution_id and o.claim = p_claim and o.step = p_step));
  update agent_budgets x
     set reserved_tokens = x.reserved_tokens + p_prompt_tokens + fits,
         reserved_usd = x.reserved_usd + p_prompt_usd + fits * p_token_usd, updated_at = clock_timestamp()
   where x.scope = any (names);
  return query select fits, null::text, null::text, null::text, null::numeric, null::numeric, null::numeric;
end $$;
comment on function lanekeeper.reserve_agent_budget is
  'Set the worst case of a model call aside in every scope ({day} in a name is today, UTC) and answer how many '
  'completion tokens are granted: at most p_wanted, fewer where a limit has no more left. When nothing is '
  'granted, the answer names the scope and unit that refused, and why: spent (fewer than p_least will ever fit) '
  'or reserved (calls under way hold what is missing; ask again). A step asked twice under one claim has one '
  'reservation; what an earlier claim reserved is written off. Locks come after executions and lanes.';

create or replace function lanekeeper.settle_agent_budget(
  p_execution_id uuid, p_step text, p_tokens bigint, p_usd numeric, p_unknown_tokens bigint default 0, p_unknown_usd numeric default 0)
returns boolean
language plpgsql volatile set plan_cache_mode = force_generic_plan set enable_seqscan = off set jit = off as $$
declare
  r agent_budget_reservations;
begin
  if not coalesce(p_unknown_tokens between 0 and p_tokens and p_unknown_usd between 0 and p_usd, false) then
    raise exception 'a call is settled with tokens and dollars of 0 or more, of which no more than all are unknown' using errcode = '22023';
  end if;
  delete from agent_budget_reservations x where x.execution_id = p_execution_id and x.step = p_step returning x.* into r;
  if not found then
    return false;
  end if;
  perform 1 from agent_budgets x where x.scope = any (r.scopes) order by x.scope for update;
  update agent_budgets x
     set tokens = x.tokens + p_tokens, cost_usd = x.cost_usd + p_usd, reserved_tokens = x.reserved_tokens - r.tokens,
         reserved_usd = x.reserved_usd - r.cost_usd, unknown_tokens = x.unknown_tokens + p_unknown_tokens,
         unknown_usd = x.unknown_usd + p_unknown_usd,
         unsettled = x.unsettled + case when p_unknown_tokens > 0 or p_unknown_usd > 0 then 1 else 0 end,
         updated_at = clock_timestamp()
   where x.scope = any (r.scopes);
  return true;
end $$;
comment on function lanekeeper.settle_agent_budget is
  'Turn a reservation into what was used, which may be more, and say how much of that is the worst case of a '
  'request without an answer. False, and nothing changes, when there is none.';

-- An execution that ends with a call under way.
create or replace function lanekeeper.settle_agent_budgets(p_execution_id uuid) returns void language plpgsql as $$
declare
  r record;
begin
  for r in
    select x.step from agent_budget_reservations x where x.execution_id = p_execution_id order by x.step
  loop
    perform lanekeeper.write_off_agent_budget(p_execution_id, r.step);
  end loop;
end $$;

create or replace function lanekeeper.write_off_agent_budget(p_execution_id uuid, p_step text, out tokens bigint, out cost_usd numeric)
language plpgsql volatile as $$
#variable_conflict use_column
declare
  r agent_budget_reservations;
begin
  delete from agent_budget_reservations x where x.execution_id = p_execution_id and x.step = p_step returning x.* into r;
  tokens := coalesce(r.tokens, 0);
  cost_usd := coalesce(r.cost_usd, 0);
  if r.execution_id is null then
    return;
  end if;
  perform 1 from agent_budgets x where x.scope = any (r.scopes) order by x.scope for update;
  update agent_budgets x
     set tokens = x.tokens + r.tokens, cost_usd = x.cost_usd + r.cost_usd, reserved_tokens = x.reserved_tokens - r.tokens,
         reserved_usd = x.reserved_usd - r.cost_usd, unknown_tokens = x.unknown_tokens + r.tokens,
         unknown_usd = x.unknown_usd + r.cost_usd, unsettled = x.unsettled + 1, updated_at = clock_timestamp()
   where x.scope = any (r.scopes);
  update agent_activity a
     set cost_usd = a.cost_usd + r.cost_usd,
         token_usage = a.token_usage || jsonb_build_object(
           'prompt_tokens', lanekeeper.agent_count_tokens(a.token_usage ->> 'prompt_tokens') + r.tokens - r.granted,
           'completion_tokens', lanekeeper.agent_count_tokens(a.token_usage ->> 'completion_tokens') + r.granted,
           'total_tokens', lanekeeper.agent_count_tokens(a.token_usage ->> 'total_tokens') + r.tokens,
           'unknown_tokens', lanekeeper.agent_count_tokens(a.token_usage ->> 'unknown_tokens') + r.tokens,
           'unknown_usd', lanekeeper.agent_usd(a.token_usage, 'unknown_usd') + r.cost_usd)
   where a.id = r.activity_id;
end $$;
comment on function lanekeeper.write_off_agent_budget is
  'Count a reservation as spent at its worst case, because nobody knows what its request has used: in its '
  'scopes and in the row of its call, marked as unknown. Answers how much that is; 0 when there is no '
  'reservation.';
