-- The months of the activity log begin and end in UTC, whatever the time zone of the session. They were reckoned from the first of this month back
-- by a month of the session, so that where clocks change, or stand behind UTC, a month began an hour or some days before or after the last one
-- ended: another could not be attached, and in the end no row was taken. What is missing is found now by what is there, not by name.

create function cover_agent_activity(p_at timestamptz, p_months int) returns int
language plpgsql volatile as $$
declare
  piece record;
  name text;
  n int := 0;
begin
  perform pg_advisory_xact_lock(hashtextextended('activity partitions', 0));
  for piece in
    select to_char(m.month, '"agent_activity_"YYYY_MM') as name, s.id as lower_id,
           least(m.upper_id, (select p.lower_id from agent_activity_partitions p where p.lower_id > s.id order by p.lower_id limit 1)) as upper_id
      from (select t.month, agent_uuid7_floor(t.month at time zone 'UTC') as lower_id,
                   agent_uuid7_floor((t.month + interval '1 month') at time zone 'UTC') as upper_id
              from date_trunc('month', p_at at time zone 'UTC') this,
                   generate_series(this - interval '1 month', this + make_interval(months => p_months), interval '1 month') t (month)) m
     cross join lateral (select m.lower_id
                         union
                         select p.upper_id from agent_activity_partitions p where p.upper_id > m.lower_id and p.upper_id < m.upper_id) s (id)
     where not exists (select from agent_activity_partitions p where p.lower_id <= s.id and s.id < p.upper_id)
     order by s.id
  loop
    name := piece.name;
    for i in 2 .. 1000 loop
      exit when to_regclass(name) is null;
      name := piece.name || '_' || i;
    end loop;
    -- Made beside the table and then attached: `partition of` would wait for every reader of the log, and hold up every writer
    -- meanwhile.
    execute format('create table %I (like agent_activity including all) with (fillfactor = 80)', name);
    execute format('alter table agent_activity attach partition %I for values from (%L) to (%L)', name, piece.lower_id, piece.upper_id);
    n := n + 1;
  end loop;
  return n;
end $$;
comment on function cover_agent_activity is
  'Make the partitions of the activity log that are missing from the month before p_at to p_months after it.';

create or replace function ensure_agent_activity_partitions(p_months int default 3) returns int
language sql volatile as $$ select cover_agent_activity(clock_timestamp(), p_months) $$;

select ensure_agent_activity_partitions();
