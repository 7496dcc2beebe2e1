-- Evals: the guard of isolation knows a trial by a row, which nothing in its transaction can remove.
create unlogged table lanekeeper.agent_trial_transactions (id xid8 primary key);
comment on table lanekeeper.agent_trial_transactions is
  'Transactions that have fenced the claim of a trial of an eval. Each sees its own row only, and those that are over.';
comment on column lanekeeper.agent_trial_transactions.id is 'The transaction.';

-- On a database that gets this file before the code of 080_agents, the function gets its body from there.
do $$
declare
  t record;
begin
  if to_regprocedure('lanekeeper.check_agent_trial()') is null then
    create function lanekeeper.check_agent_trial() returns trigger language plpgsql as 'begin return null; end';
  end if;
  for t in select pg_get_triggerdef(c.oid) as was from pg_trigger c
            where c.tgname like '%\_no\_trial' and not c.tgisinternal loop
    execute regexp_replace(regexp_replace(t.was, '^CREATE TRIGGER', 'CREATE OR REPLACE TRIGGER'),
      'FOR EACH STATEMENT WHEN .*$', 'FOR EACH STATEMENT EXECUTE FUNCTION lanekeeper.check_agent_trial()');
  end loop;
end $$;
create trigger agent_trial_transactions_stay before update or delete on lanekeeper.agent_trial_transactions
  for each row when (old.id = pg_current_xact_id_if_assigned()) execute function lanekeeper.check_agent_trial();
create trigger agent_trial_transactions_whole before truncate on lanekeeper.agent_trial_transactions
  for each statement execute function lanekeeper.check_agent_trial();
