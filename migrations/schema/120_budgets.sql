-- Budgets: limits on the cost of model calls.
--
-- A call reserves its worst case beforehand and settles its use afterwards. Execution and step are the key of a
-- reservation, so a retry reuses it. A call whose usage no provider reported counts at its worst case, and is flagged.

create table agent_budgets (
  scope text primary key check (scope <> '' and length(scope) <= 255),
  tokens bigint not null default 0 check (tokens >= 0),
  cost_usd numeric not null default 0 check (cost_usd >= (0)::numeric),
  reserved_tokens bigint not null default 0 check (reserved_tokens >= 0),
  reserved_usd numeric not null default 0 check (reserved_usd >= (0)::numeric), unsettled int not null default 0,
  created_at timestamptz not null default clock_timestamp(),
  updated_at timestamptz not null default clock_timestamp(), unknown_tokens bigint not null default 0,
  unknown_usd numeric not null default 0
) with (fillfactor = 50);
create index agent_budgets_age on agent_budgets (created_at);
comment on index agent_budgets_age is 'Finds budgets of old runs and days to delete.';
comment on table agent_budgets is
  'Spent and reserved usage by scope. Each reservation brings the limits of the settings.';
comment on column agent_budgets.scope is
  'The counted unit: a run (run:TRACE), a day (day:DATE), or a surface or agent of a day.';
comment on column agent_budgets.tokens is 'Tokens spent.';
comment on column agent_budgets.cost_usd is 'US dollars spent.';
comment on column agent_budgets.reserved_tokens is 'Tokens of calls in flight, at their worst case.';
comment on column agent_budgets.reserved_usd is 'US dollars of calls in flight, at their worst case.';
comment on column agent_budgets.unsettled is 'Calls whose usage no provider reported.';
comment on column agent_budgets.unknown_tokens is 'The part of tokens that no provider reported, at its worst case.';
comment on column agent_budgets.unknown_usd is 'The part of cost_usd that no provider reported, at its worst case.';

create table agent_budget_reservations (
  execution_id uuid not null, step text not null, scopes text[] not null,
  granted bigint not null, tokens bigint not null, cost_usd numeric not null,
  created_at timestamptz not null default clock_timestamp(), claim bigint, activity_id uuid,
  primary key (execution_id, step)
);
comment on table agent_budget_reservations is
  'Model calls in flight. A step makes one request at a time, under one claim.';
comment on column agent_budget_reservations.step is 'The step that makes the call.';
comment on column agent_budget_reservations.scopes is 'The budgets that it is reserved in.';
comment on column agent_budget_reservations.granted is 'Completion tokens that the call may use.';
comment on column agent_budget_reservations.tokens is 'The reservation: the granted tokens and those of the prompt.';
comment on column agent_budget_reservations.cost_usd is 'The reservation in US dollars.';
comment on column agent_budget_reservations.claim is 'The claim that reserved it. A later claim writes it off.';
comment on column agent_budget_reservations.activity_id is 'The row of the log of the call.';

-- Code

create or replace function lanekeeper.reserve_agent_budget(
  p_execution_id uuid, p_claim bigint, p_step text, p_limits jsonb, p_need jsonb,
  out granted bigint, out scope text, out unit text, out kind text,
  out bound numeric, out spent numeric, out reserved numeric)
language plpgsql volatile set plan_cache_mode = force_generic_plan set enable_seqscan = off set jit = off as $$
#variable_conflict use_column
declare
  day constant text := to_char(clock_timestamp() at time zone 'UTC', 'YYYY-MM-DD');
  names constant text[] := array(
    select distinct replace(entry ->> 'scope', '{day}', day) from jsonb_array_elements(p_limits) entry order by 1);
  need record;
  fit record;         -- the rest of a limit
  most bigint;        -- completion tokens that will ever fit
  held_by bigint;     -- the claim of an existing reservation
begin
  select * into need from jsonb_to_record(p_need) as (
    prompt_tokens bigint, prompt_usd numeric, token_usd numeric, wanted bigint, enough bigint, least bigint);
  if not coalesce(p_step <> '' and cardinality(names) > 0
                  and need.prompt_tokens >= 0 and need.prompt_usd >= 0 and need.token_usd >= 0 and need.least > 0
                  and need.enough >= need.least and need.wanted >= need.enough, false) then
    raise exception 'a reservation needs a step, scopes, a worst case of 0 or more, and 0 < least <= enough <= wanted'
      using errcode = '22023';
  end if;
  perform fence_agent_execution(p_execution_id, p_claim);
  -- Lock the reservation before its budgets, as settling does.
  perform from agent_budget_reservations held
   where held.execution_id = p_execution_id and held.step = p_step for update;
  insert into agent_budgets (scope) select unnest(names) on conflict do nothing;
  perform 1 from agent_budgets budget where budget.scope = any (names) order by budget.scope for update;
  -- Read after the lock: an earlier try may have reserved meanwhile.
  select held.granted, held.claim into granted, held_by from agent_budget_reservations held
   where held.execution_id = p_execution_id and held.step = p_step;
  if held_by < p_claim then
    perform lanekeeper.settle_agent_budget(p_execution_id, p_step);
  elsif granted is not null then
    return;
  end if;
  granted := need.wanted;
  for fit in
    -- rest: completion tokens that fit once no reservation is open. room: completion tokens that fit now.
    select part.*,
           case when part.free < 0 then -1
                else least(floor(part.free / nullif(part.each, 0)), need.wanted) end::bigint as rest,
           case when part.free < part.reserved then -1
                else least(floor((part.free - part.reserved) / nullif(part.each, 0)), need.wanted) end::bigint as room
      from (select budget.scope, measure.*, measure.bound - measure.spent - measure.prompt as free, entry.i
              from rows from (jsonb_to_recordset(p_limits) as (scope text, tokens numeric, usd numeric))
                   with ordinality entry (scope, tokens, usd, i)
              join agent_budgets budget  -- any(names): the planner expects 100 entries, and would read all budgets
                on budget.scope = any (names) and budget.scope = replace(entry.scope, '{day}', day)
             cross join lateral (values
                     ('tokens', entry.tokens, budget.tokens::numeric, budget.reserved_tokens::numeric,
                      need.prompt_tokens::numeric, 1::numeric),
                     ('usd', entry.usd, budget.cost_usd, budget.reserved_usd, need.prompt_usd, need.token_usd)
                   ) measure (unit, bound, spent, reserved, prompt, each)
             where measure.bound > 0 and measure.prompt + measure.each > 0) part  -- a free call has no cost limit
     order by rest, room, part.i, part.unit
  loop
    most := coalesce(most, fit.rest);
    kind := case when fit.rest < need.least then 'spent' when fit.room < least(need.enough, most) then 'reserved' end;
    if kind is not null then
      granted := null; scope := fit.scope; unit := fit.unit;
      bound := fit.bound; spent := fit.spent; reserved := fit.reserved;
      return;
    end if;
    granted := least(granted, fit.room);
  end loop;
  insert into agent_budget_reservations (execution_id, step, scopes, granted, tokens, cost_usd, claim, activity_id)
  values (p_execution_id, p_step, names, granted, need.prompt_tokens + granted,
          need.prompt_usd + granted * need.token_usd, p_claim,
          (select opened.activity_id from agent_activity_open opened
            where opened.execution_id = p_execution_id and opened.claim = p_claim and opened.step = p_step));
  update agent_budgets budget
     set reserved_tokens = budget.reserved_tokens + need.prompt_tokens + granted,
         reserved_usd = budget.reserved_usd + need.prompt_usd + granted * need.token_usd, updated_at = clock_timestamp()
   where budget.scope = any (names);
end $$;
comment on function lanekeeper.reserve_agent_budget is
  'Reserve the worst case of a model call in every scope of p_limits: [{scope, tokens, usd}], 0 for no limit; {day} in '
  'a name is today, UTC. granted has the completion tokens: at most p_need.wanted, fewer if a limit has no more left. '
  'A refusal names the scope, the unit and the kind: spent (fewer than p_need.least will ever fit) or reserved (calls '
  'in flight hold the rest; ask again). A step has one reservation under a claim. The reservation of an earlier claim '
  'is settled as unknown. Its locks come after executions and lanes.';

create or replace function lanekeeper.settle_agent_budget(
  p_execution_id uuid, p_step text, p_spend jsonb default null, out tokens bigint, out cost_usd numeric)
language plpgsql volatile set plan_cache_mode = force_generic_plan set enable_seqscan = off set jit = off as $$
#variable_conflict use_column
declare
  reservation agent_budget_reservations;
  used bigint := (p_spend ->> 'tokens')::bigint;
  usd numeric := (p_spend ->> 'usd')::numeric;
  unknown bigint := (p_spend ->> 'unknown_tokens')::bigint;
  usd_unknown numeric := (p_spend ->> 'unknown_usd')::numeric;
begin
  if p_spend is not null and not coalesce(unknown between 0 and used and usd_unknown between 0 and usd, false) then
    raise exception 'a call is settled with tokens and dollars of 0 or more, and no larger unknown parts'
      using errcode = '22023';
  end if;
  tokens := 0;
  cost_usd := 0;
  delete from agent_budget_reservations held where held.execution_id = p_execution_id and held.step = p_step
  returning held.* into reservation;
  if not found then
    return;
  elsif p_spend is null then
    used := reservation.tokens; usd := reservation.cost_usd;
    unknown := used; usd_unknown := usd;
  end if;
  tokens := used;
  cost_usd := usd;
  perform 1 from agent_budgets budget where budget.scope = any (reservation.scopes) order by budget.scope for update;
  update agent_budgets budget
     set tokens = budget.tokens + used, cost_usd = budget.cost_usd + usd,
         reserved_tokens = budget.reserved_tokens - reservation.tokens,
         reserved_usd = budget.reserved_usd - reservation.cost_usd, unknown_tokens = budget.unknown_tokens + unknown,
         unknown_usd = budget.unknown_usd + usd_unknown,
         unsettled = budget.unsettled + (unknown > 0 or usd_unknown > 0)::int,
         updated_at = clock_timestamp()
   where budget.scope = any (reservation.scopes);
  if p_spend is not null then
    return;
  end if;
  update agent_activity call
     set cost_usd = call.cost_usd + reservation.cost_usd,
         token_usage = call.token_usage || jsonb_build_object(
           'prompt_tokens',
           lanekeeper.agent_tokens(call.token_usage, 'prompt_tokens') + reservation.tokens - reservation.granted,
           'completion_tokens', lanekeeper.agent_tokens(call.token_usage, 'completion_tokens') + reservation.granted,
           'total_tokens', lanekeeper.agent_tokens(call.token_usage, 'total_tokens') + reservation.tokens,
           'unknown_tokens', lanekeeper.agent_tokens(call.token_usage, 'unknown_tokens') + reservation.tokens,
           'unknown_usd', coalesce((call.token_usage ->> 'unknown_usd')::numeric, 0) + reservation.cost_usd)
   where call.id = reservation.activity_id;
end $$;
comment on function lanekeeper.settle_agent_budget is
  'Replace a reservation by the usage p_spend: {tokens, usd, unknown_tokens, unknown_usd}. The usage may be more than '
  'the reservation. The unknown part is the worst case of requests without an answer. Without p_spend the usage is '
  'unknown: the worst case of the reservation counts, as unknown, in its scopes and in the row of its call. Returns '
  'the counted usage; 0 without a reservation.';
