-- Own memory: an agent with memory: own has entries that no other agent reads, writes, finds or forgets. Its name is a part
-- of their key. '' is the memory that is shared.

alter table agent_memory add column owner text not null default '';
alter table agent_memory_forgotten add column owner text not null default '';
alter table agent_memory_conflicts add column owner text not null default '';
comment on column agent_memory.owner is 'The agent whose own memory it is; empty: the shared one.';
comment on column agent_memory_forgotten.owner is 'As that of agent_memory.';
comment on column agent_memory_conflicts.owner is 'As that of agent_memory.';

create unique index agent_memory_owner_key on agent_memory (owner, category, key);
create index agent_memory_category on agent_memory (category, key);
create unique index agent_memory_forgotten_owner_key on agent_memory_forgotten (owner, category, key);
alter table agent_memory drop constraint agent_memory_category_key_key;
alter table agent_memory_forgotten drop constraint agent_memory_forgotten_pkey;
alter table agent_memory add constraint agent_memory_owner_key unique using index agent_memory_owner_key;
alter table agent_memory_forgotten
  add constraint agent_memory_forgotten_owner_key primary key using index agent_memory_forgotten_owner_key;

create or replace function agent_memory_begin() returns trigger language plpgsql volatile as $$
begin
  new.revision := greatest(new.revision, 1 + coalesce((
    select g.revision from agent_memory_forgotten g
     where g.owner = new.owner and g.category = new.category and g.key = new.key), 0));
  return new;
end $$;

create or replace function agent_memory_began() returns trigger language plpgsql volatile as $$
begin
  update agent_memory m set revision = g.revision + 1
    from agent_memory_forgotten g
   where m.id = new.id and g.owner = new.owner and g.category = new.category and g.key = new.key and g.revision >= m.revision;
  return null;
end $$;

create function agent_memory_owned_revision(in_owner text, in_category text, in_key text, in_revision int)
  returns int language sql volatile as $$
  select greatest(in_revision, 1 + coalesce((
    select g.revision from agent_memory_forgotten g
     where g.owner = in_owner and g.category = in_category and g.key = in_key), 0))
$$;
comment on function agent_memory_owned_revision(text, text, text, int) is
  'For the returning clause of an insert into agent_memory: the revision of the row at the end of the statement.';

create or replace function agent_memory_revision(in_category text, in_key text, in_revision int)
  returns int language sql volatile as $$
  select agent_memory_owned_revision('', in_category, in_key, in_revision)
$$;

create or replace function agent_memory_end() returns trigger language plpgsql volatile as $$
begin
  insert into agent_memory_forgotten as g (owner, category, key, revision)
  values (old.owner, old.category, old.key, old.revision)
  on conflict (owner, category, key) do update
    set revision = greatest(g.revision, excluded.revision), forgotten_at = excluded.forgotten_at;
  return null;
end $$;
