-- The functions that are kept from sequential scans are kept from just-in-time compilation too. Where no index can serve (is there any
-- limit at all?) a scan counts as 10,000,000,000 cost units, which is above every threshold of the compiler: a server with jit = on, the default
-- since version 12, then spends a second or more on each call of what takes a fraction of a millisecond.

do $$
declare
  routine regprocedure;
begin
  for routine in
    select p.oid from pg_proc p
     where p.pronamespace = current_schema()::regnamespace and p.proname like '%agent%'
       and 'enable_seqscan=off' = any (p.proconfig) and not 'jit=off' = any (p.proconfig)
  loop
    execute format('alter routine %s set jit = off', routine);
  end loop;
end $$;
