-- Budgets: tokens and money, reserved before a model is asked and settled after. A scope is a name such as
-- day:2026-11-21, day:2026-11-21:chat or run:ch_01…; limits come with each reservation, from the
-- configuration. What is spent and what is set aside for calls under way is kept per scope, so a
-- reservation is decided under the scope's row lock: any number of concurrent calls fit together.

create table agent_budgets (
  scope           text primary key check (scope <> '' and length(scope) <= 255),
  tokens          bigint not null default 0 check (tokens >= 0),
  cost_usd        numeric not null default 0 check (cost_usd >= 0),
  reserved_tokens bigint not null default 0 check (reserved_tokens >= 0),
  reserved_usd    numeric not null default 0 check (reserved_usd >= 0),
  unsettled       int not null default 0,
  created_at      timestamptz not null default clock_timestamp(),
  updated_at      timestamptz not null default clock_timestamp()
) with (fillfactor = 50);
create index agent_budgets_age on agent_budgets (created_at);
comment on column agent_budgets.unsettled is
  'Calls whose usage nobody reported, because their execution ended first: they are in tokens and cost_usd at their worst case.';

create table agent_budget_reservations (
  execution_id uuid not null,
  step         text not null,
  scopes       text[] not null,
  granted      bigint not null,             -- completion tokens
  tokens       bigint not null,             -- with the prompt's
  cost_usd     numeric not null,
  created_at   timestamptz not null default clock_timestamp(),
  primary key (execution_id, step)
);
comment on table agent_budget_reservations is
  'Model calls under way. The key is the call''s, so a call that is repeated after a crash finds its reservation.';

create function reserve_agent_budget(
  p_execution_id uuid, p_claim bigint, p_step text, p_scopes text[], p_token_limits bigint[], p_usd_limits numeric[],
  p_prompt_tokens bigint, p_prompt_usd numeric, p_token_usd numeric, p_wanted bigint, p_enough bigint, p_least bigint)
returns table (granted bigint, scope text, unit text, kind text, bound numeric, spent numeric, reserved numeric)
language plpgsql volatile as $$
#variable_conflict use_column
declare
  day text := to_char(clock_timestamp() at time zone 'UTC', 'YYYY-MM-DD');
  names text[];
  b record;
  most bigint;        -- completion tokens that any scope will ever have room for
  fits bigint;
begin
  if p_step is null or p_step = '' or coalesce(cardinality(p_scopes), 0) = 0
     or cardinality(p_scopes) is distinct from cardinality(p_token_limits)
     or cardinality(p_scopes) is distinct from cardinality(p_usd_limits)
     or not coalesce(p_prompt_tokens >= 0 and p_prompt_usd >= 0 and p_token_usd >= 0
                     and p_least > 0 and p_enough >= p_least and p_wanted >= p_enough, false) then
    raise exception 'a reservation needs a step, scopes with a token and a money limit each (0 for none), a worst case of 0 or '
      'more, and 0 < least <= enough <= wanted' using errcode = '22023';
  end if;
  perform fence_agent_execution(p_execution_id, p_claim);
  select array_agg(replace(s, '{day}', day) order by i) into names from unnest(p_scopes) with ordinality u (s, i);
  insert into agent_budgets (scope) select distinct s from unnest(names) s order by s on conflict do nothing;
  perform 1 from agent_budgets x where x.scope = any (names) order by x.scope for update;
  -- Read after the lock: a try before this one may have been at work.
  select r.granted into fits from agent_budget_reservations r where r.execution_id = p_execution_id and r.step = p_step;
  if found then
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
  insert into agent_budget_reservations (execution_id, step, scopes, granted, tokens, cost_usd)
  values (p_execution_id, p_step, (select array_agg(distinct s) from unnest(names) s), fits, p_prompt_tokens + fits,
          p_prompt_usd + fits * p_token_usd);
  update agent_budgets x
     set reserved_tokens = x.reserved_tokens + p_prompt_tokens + fits,
         reserved_usd = x.reserved_usd + p_prompt_usd + fits * p_token_usd, updated_at = clock_timestamp()
   where x.scope = any (names);
  return query select fits, null::text, null::text, null::text, null::numeric, null::numeric, null::numeric;
end $$;
comment on function reserve_agent_budget is
  'Set the worst case of a model call aside in every scope ({day} in a name is today, UTC) and answer how many completion '
  'tokens are granted: at most p_wanted, fewer where a limit has no more left. When nothing is granted, the answer '
  'names the scope and unit that refused, and why: spent (fewer than p_least will ever fit) or reserved (calls under way '
  'hold what is missing; ask again). The same step asked twice has one reservation. Locks come after executions and lanes.';

create function settle_agent_budget(p_execution_id uuid, p_step text, p_tokens bigint, p_usd numeric) returns boolean
language plpgsql volatile as $$
declare
  r agent_budget_reservations;
begin
  if not coalesce(p_tokens >= 0 and p_usd >= 0, false) then
    raise exception 'a call is settled with tokens and dollars of 0 or more' using errcode = '22023';
  end if;
  delete from agent_budget_reservations x where x.execution_id = p_execution_id and x.step = p_step returning x.* into r;
  if not found then
    return false;
  end if;
  perform 1 from agent_budgets x where x.scope = any (r.scopes) order by x.scope for update;
  update agent_budgets x
     set tokens = x.tokens + p_tokens, cost_usd = x.cost_usd + p_usd, reserved_tokens = x.reserved_tokens - r.tokens,
         reserved_usd = x.reserved_usd - r.cost_usd, updated_at = clock_timestamp()
   where x.scope = any (r.scopes);
  return true;
end $$;
comment on function settle_agent_budget is
  'Turn a reservation into what was really used, which may be more. False, and nothing changes, when there is none.';

-- An execution that ends with a call under way: what the call used is not known, so it counts in full.
create function agent_budgets_ended() returns trigger language plpgsql as $$
declare
  r record;
begin
  for r in
    select x.step, x.scopes, x.tokens, x.cost_usd from agent_budget_reservations x
     where x.execution_id = new.id order by x.step
  loop
    perform settle_agent_budget(new.id, r.step, r.tokens, r.cost_usd);
    update agent_budgets x set unsettled = x.unsettled + 1 where x.scope = any (r.scopes);
  end loop;
  return null;
end $$;
create trigger agent_executions_ended_budgets after update of status on agent_executions  -- by name after agent_executions_ended
  for each row when (old.status is distinct from new.status
                     and new.status in ('completed', 'failed', 'timeout', 'cancelled'))
  execute function agent_budgets_ended();

create function prune_agent_budgets(p_keep interval default '60 days') returns int
language plpgsql volatile as $$
declare
  n int;
begin
  delete from agent_budgets x
   where x.created_at < clock_timestamp() - greatest(p_keep, interval '31 days') and x.reserved_tokens = 0;
  get diagnostics n = row_count;
  return n;
end $$;
comment on function prune_agent_budgets is
  'Forget scopes that are older than p_keep, at least 31 days, longer than any wait. Answers how many.';

create view agent_budget_today as
  select x.scope, x.tokens, x.cost_usd, x.reserved_tokens, x.reserved_usd, x.unsettled
    from agent_budgets x, to_char(clock_timestamp() at time zone 'UTC', 'YYYY-MM-DD') as today
   where x.scope = 'day:' || today or starts_with(x.scope, 'day:' || today || ':')
   order by x.scope;
comment on view agent_budget_today is
  'What was spent today (UTC), in all and by surface, and what is set aside for model calls under way.';
