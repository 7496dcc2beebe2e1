-- A revision of a memory names one value of one key for ever. So it is safe to say "write this if the key is still at revision 3":
-- a key that was forgotten, or has expired, goes on counting when it is kept anew, and a change by hand counts as well.

create table agent_memory_forgotten (
  category     text not null,
  key          text not null,
  revision     int not null,
  forgotten_at timestamptz not null default clock_timestamp(),
  primary key (category, key)
);
create index agent_memory_forgotten_at on agent_memory_forgotten (forgotten_at);
comment on table agent_memory_forgotten is
  'The last revision of keys that are gone, for 90 days, so that their revisions are not given out again. No values are kept.';

create function agent_memory_begin() returns trigger language plpgsql volatile as $$
begin
  new.revision := greatest(new.revision, 1 + coalesce((
    select g.revision from agent_memory_forgotten g where g.category = new.category and g.key = new.key), 0));
  return new;
end $$;

-- A delete that committed while the insert waited for it was not visible to agent_memory_begin.
create function agent_memory_began() returns trigger language plpgsql volatile as $$
begin
  update agent_memory m set revision = g.revision + 1
    from agent_memory_forgotten g
   where m.id = new.id and g.category = new.category and g.key = new.key and g.revision >= m.revision;
  return null;
end $$;

-- What an insert returns was made before agent_memory_began has run. This is the revision that the new row will have:
-- no other session can delete the key any more, and a volatile function sees the deletion that the insert has waited
-- for.
create function agent_memory_revision(in_category text, in_key text, in_revision int) returns int language sql volatile as $$
  select greatest(in_revision, 1 + coalesce((
    select g.revision from agent_memory_forgotten g where g.category = in_category and g.key = in_key), 0))
$$;
comment on function agent_memory_revision(text, text, int) is
  'For the returning clause of an insert into agent_memory: the revision of the row at the end of the statement.';

create function agent_memory_revise() returns trigger language plpgsql volatile as $$
begin
  new.revision := greatest(new.revision, old.revision + 1);
  return new;
end $$;

create function agent_memory_end() returns trigger language plpgsql volatile as $$
begin
  insert into agent_memory_forgotten as g (category, key, revision) values (old.category, old.key, old.revision)
  on conflict (category, key) do update
    set revision = greatest(g.revision, excluded.revision), forgotten_at = excluded.forgotten_at;
  return null;
end $$;

create trigger agent_memory_begin before insert on agent_memory for each row execute function agent_memory_begin();
create trigger agent_memory_began after insert on agent_memory for each row execute function agent_memory_began();
create trigger agent_memory_revise before update on agent_memory for each row
  when (new.revision < old.revision or new.revision = old.revision and new.value is distinct from old.value)
  execute function agent_memory_revise();
create trigger agent_memory_end after delete on agent_memory for each row execute function agent_memory_end();

-- What somebody wanted to keep, and did not, because the key had been written by others meanwhile and nobody was there any more to
-- decide. An admin decides: their value stays (kept), or this one replaces it (taken).
create table agent_memory_conflicts (
  id              uuid primary key default agent_uuid7(),
  category        text not null,
  key             text not null,
  value           jsonb not null,                     -- what was to be kept
  ttl_seconds     float8 not null default 0,          -- 0: for ever
  if_revision     int not null,                       -- what its writer had read; 0: nothing
  found_revision  int not null,                       -- what was there instead; 0: nothing
  found_value     jsonb,
  found_trace_id  text not null default '',
  trace_id        text not null default '',           -- of the writer
  execution_id    uuid,
  status          text not null default 'open' check (status in ('open', 'kept', 'taken')),
  decided_by      text not null default '',
  decided_reason  text not null default '',
  decided_at      timestamptz,
  created_at      timestamptz not null default clock_timestamp(),
  check ((status = 'open') = (decided_at is null)),
  check ((found_revision = 0) = (found_value is null))
);
create index agent_memory_conflicts_status on agent_memory_conflicts (status, id);
create index agent_memory_conflicts_key on agent_memory_conflicts (category, key, id);
create index agent_memory_conflicts_decided on agent_memory_conflicts (decided_at) where status <> 'open';
comment on table agent_memory_conflicts is
  'Memories that were not written because the key had changed since their writer read it. Decided ones go after 90 days.';
