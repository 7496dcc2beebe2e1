with recursive names as (
-- The use of memory by category: the first @categories by name, each with its number of entries, counted up to
-- @count_limit, and the entries of the last day and week, among the @window newest entries.
  (select m.category from agent_memory m order by m.category limit 1)
  union all
  select (select m.category from agent_memory m where m.category > n.category order by m.category limit 1)
    from names n where n.category is not null
),
grown as (
  select g.category, count(*) as week, sum(g.bytes)::bigint as week_bytes,
         count(*) filter (where g.created_at > clock_timestamp() - interval '1 day') as day,
         coalesce(sum(g.bytes) filter (where g.created_at > clock_timestamp() - interval '1 day'),
                  0)::bigint as day_bytes
    from (select m.category, m.created_at, octet_length(m.key) + pg_column_size(m.value) as bytes from agent_memory m
           where m.id >= (select lanekeeper.agent_uuid7_floor(clock_timestamp() - interval '7 days'))
             and (m.expires_at is null or m.expires_at > clock_timestamp())
           order by m.id desc limit @window) g
   group by g.category
)
select n.category, h.entries, h.bytes, h.updated_at,
       coalesce(g.day, 0) as day, coalesce(g.day_bytes, 0) as day_bytes,
       coalesce(g.week, 0) as week, coalesce(g.week_bytes, 0) as week_bytes
  from (select category from names where category is not null limit @categories) n
  cross join lateral (
       select count(*) as entries, coalesce(sum(x.bytes), 0)::bigint as bytes, max(x.updated_at) as updated_at
         from (select octet_length(m.key) + pg_column_size(m.value) as bytes, m.updated_at from agent_memory m
                where m.category = n.category and (m.expires_at is null or m.expires_at > clock_timestamp())
                limit @count_limit) x) h
  left join grown g on g.category = n.category
 where h.entries > 0
 order by n.category
