-- The name of an agent that nobody named is "agent".

alter table agent_executions alter column agent set default 'agent';
alter table agent_activity alter column agent set default 'agent';
alter table agent_threads alter column agent set default 'agent';

do $$
declare f record;
begin
  for f in
    select p.oid from pg_proc p
     where p.pronamespace = current_schema()::regnamespace and p.prokind = 'f'
       and (p.prosrc like '%''flowpilot''%' or pg_get_function_arguments(p.oid) like '%''flowpilot''%')
  loop
    execute replace(pg_get_functiondef(f.oid), '''flowpilot''', '''agent''');
  end loop;
end $$;
