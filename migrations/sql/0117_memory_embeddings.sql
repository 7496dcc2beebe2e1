-- Search of the memory by meaning. The package `memory` owns the table. Neither this file nor anything else here needs the
-- extension vector (pgvector): where it is not installed, agent_memory_nearest finds nothing. It may be installed later.
--
-- A row without a vector is a claim: a process embeds that revision until due_at, or it is to be tried again then. A row
-- with a vector has no due_at.

create table agent_memory_embeddings (
  memory_id  uuid not null references agent_memory (id) on delete cascade,
  model      text not null check (model <> ''),
  revision   int not null,
  vector     real[] check (cardinality(vector) between 1 and 16000),
  dimensions int,
  attempts   int not null default 0,
  due_at     timestamptz,
  updated_at timestamptz not null default clock_timestamp(),
  primary key (memory_id, model),
  check ((vector is null) = (dimensions is null)),
  check ((vector is null) = (due_at is not null))
);
-- Vectors do not compress.
alter table agent_memory_embeddings alter column vector set storage external;
create index agent_memory_embeddings_due on agent_memory_embeddings (due_at) where due_at is not null;
create index agent_memory_embeddings_model on agent_memory_embeddings (model, updated_at);
comment on table agent_memory_embeddings is 'The vectors of memories, by embedding model. They are made after the memory was written.';
comment on column agent_memory_embeddings.memory_id is 'The memory. The row goes with it.';
comment on column agent_memory_embeddings.model is 'The embedding model. Vectors of two models are not compared.';
comment on column agent_memory_embeddings.revision is 'The revision of the memory that was embedded, or is being embedded.';
comment on column agent_memory_embeddings.vector is 'The embedding. Null: it is still to be made.';
comment on column agent_memory_embeddings.dimensions is 'The length of the vector.';
comment on column agent_memory_embeddings.attempts is 'How often the server has refused this text.';
comment on column agent_memory_embeddings.due_at is 'When a vector that is still to be made is tried again.';
comment on column agent_memory_embeddings.updated_at is 'When the row was claimed or its vector was stored.';

create function agent_vector_version() returns text language sql stable as $$
  select x.extversion from pg_extension x where x.extname = 'vector'
$$;
comment on function agent_vector_version() is 'The version of the extension vector in this database. Null: it is not installed.';

-- The extension may be in any schema, and need not exist when this function is made: so the query is composed at each call.
create function agent_memory_nearest(p_owner text, p_model text, p_query real[], p_most int, p_limit int)
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
              from agent_memory m join agent_memory_embeddings e on e.memory_id = m.id and e.revision = m.revision
             where m.owner = $1 and e.model = $2 and e.dimensions = cardinality($3)
               and (m.expires_at is null or m.expires_at > clock_timestamp())
             limit $4) v
     order by 2, 1 limit $5 $q$, home)
    using p_owner, p_model, p_query, p_most, p_limit;
end $$;
comment on function agent_memory_nearest(text, text, real[], int, int) is
  'The memories of one owner that are nearest to a vector by cosine distance, an exact scan of at most p_most of them.';
