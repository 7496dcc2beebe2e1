-- As before, and of an owner with more than p_most entries the newest are compared.
create or replace function agent_memory_nearest(p_owner text, p_model text, p_query real[], p_most int, p_limit int)
  returns table (memory_id uuid, distance float8) language plpgsql stable as $$
declare
  home text;
begin
  select quote_ident(n.nspname) into home
    from pg_extension x join pg_namespace n on n.oid = x.extnamespace where x.extname = 'vector';
  if home is null then
    return;
  end if;
  return query execute format($q$
    select v.memory_id, (v.vector::%1$s.vector operator(%1$s.<=>) $3::%1$s.vector)::float8
      from (select e.memory_id, e.vector
              from (select m.id, m.revision from agent_memory m
                     where m.owner = $1 and (m.expires_at is null or m.expires_at > clock_timestamp())
                     order by m.updated_at desc limit $4) m
              join agent_memory_embeddings e on e.memory_id = m.id and e.revision = m.revision
             where e.model = $2 and e.dimensions = cardinality($3) offset 0) v
     order by 2, 1 limit $5 $q$, home)
    using p_owner, p_model, p_query, p_most, p_limit;
end $$;
comment on function agent_memory_nearest(text, text, real[], int, int) is
  'The memories that are nearest to a vector by cosine distance, of the p_most newest of one owner. It is an exact scan.';
