-- Documents: files that admins and visitors give to the agent. The package `documents` owns the table.
--
-- A document belongs to one thread, to one execution, or to nobody yet. It goes with its thread or its execution. What a
-- visitor has uploaded and attached to no message goes at expires_at.

create table agent_documents (
  id           uuid primary key default agent_uuid7(),
  name         text not null check (name <> '' and name !~ '[[:cntrl:]/\\]'),
  content_type text not null check (content_type <> ''),
  size         bigint not null check (size > 0),
  sha256       bytea not null check (octet_length(sha256) = 32),
  is_text      boolean not null,
  content      bytea not null check (octet_length(content) = size),
  thread_id    text references agent_threads (id) on delete cascade,
  execution_id uuid,
  trace_id     text not null default '',
  owner_kind   text not null check (owner_kind in ('admin', 'key', 'visitor')),
  owner        text not null,
  visitor      text not null default '',
  created_at   timestamptz not null default clock_timestamp(),
  expires_at   timestamptz,
  check ((owner_kind = 'visitor') = (visitor <> '')),
  check (expires_at is null or thread_id is null and execution_id is null)
);
-- A piece of a large document is read without the rest.
alter table agent_documents alter column content set storage external;
create index agent_documents_thread on agent_documents (thread_id, id) where thread_id is not null;
create index agent_documents_execution on agent_documents (execution_id, id) where execution_id is not null;
create index agent_documents_expiry on agent_documents (expires_at) where expires_at is not null;
create index agent_documents_unused on agent_documents (owner, visitor) where expires_at is not null;
comment on table agent_documents is 'Files that admins and visitors gave to the agent, with their content.';
comment on column agent_documents.name is 'The file name, without folders and control characters.';
comment on column agent_documents.content_type is 'The media type, found from content and name. What the client claimed is only a hint.';
comment on column agent_documents.is_text is 'The content is UTF-8 text, which models and flows can read.';
comment on column agent_documents.thread_id is 'The thread whose visitors, flows and models see the document. It goes with the thread.';
comment on column agent_documents.execution_id is 'The execution that sees the document. It goes with the execution.';
comment on column agent_documents.trace_id is 'The trace of the upload.';
comment on column agent_documents.owner_kind is 'Who uploaded it: admin, key or visitor, as owner_kind of agent_threads.';
comment on column agent_documents.owner is 'The chat key, or admin.';
comment on column agent_documents.visitor is 'Of a visitor: SHA-256 of the secret, in hexadecimal.';
comment on column agent_documents.expires_at is 'When an upload goes that no message has used. Null: it stays.';

-- As before, and the documents of the executions go with them.
create or replace function prune_agent_executions_at_once(p_ids uuid[]) returns int
language plpgsql volatile set enable_seqscan = off set jit = off as $$
declare
  gone uuid[];
  gone_events uuid[];
begin
  with held as (
    select x.id from agent_executions x where x.id = any (p_ids) and x.completed_at is not null order by x.id for update skip locked),
  away as (
    delete from agent_executions x using held h where x.id = h.id returning x.id)
  select coalesce(array_agg(a.id), '{}') into gone from away a;
  insert into agent_retention_leftovers
    select g from unnest(gone) g where exists (select from agent_checkpoints c where c.execution_id = g) on conflict do nothing;
  delete from agent_status_changes c where c.execution_id = any (gone);
  delete from agent_requests r where r.execution_id = any (gone);
  delete from agent_message_drafts d where d.execution_id = any (gone);
  delete from agent_documents d where d.execution_id = any (gone);
  delete from agent_lane_holds h where h.execution_id = any (gone);
  delete from agent_claims_lost c where c.execution_id = any (gone);
  perform prune_agent_causes('execution', gone);
  with away as (
    delete from agent_events v where v.external_id in (
      select 'completed ' || g from unnest(gone) g
      union all
      select 'approval ' || a.id from agent_approvals a where a.execution_id = any (gone) and a.parked)
    returning v.id)
  select array_agg(a.id) into gone_events from away a;
  perform prune_agent_causes('event', gone_events);
  return cardinality(gone);
end $$;

-- As before, and documents.
create or replace function agent_audit_object(p_input jsonb) returns text language sql immutable parallel safe as $$
  select coalesce(string_agg(left(v.word || ' ' || v.name, 200), ', ' order by v.place), '')
    from (values
      (1, 'decision:', p_input ->> 'decision'), (2, 'approval', p_input ->> 'approval_id'), (3, 'skill', p_input ->> 'skill'),
      (4, 'automation', p_input ->> 'automation'), (5, 'objective', p_input ->> 'objective'), (6, 'step', p_input ->> 'step'),
      (7, 'conflict', p_input ->> 'conflict'), (8, 'event', p_input ->> 'event'),
      (9, case when p_input ? 'category' then 'memory' else 'key' end, concat_ws(' / ', p_input ->> 'category', p_input ->> 'key')),
      (10, 'lane', p_input ->> 'lane'), (11, 'execution', p_input ->> 'execution'), (12, 'flow', p_input ->> 'flow'),
      (13, 'endpoint', p_input ->> 'endpoint'), (14, 'target', p_input ->> 'target'), (15, 'delivery', p_input ->> 'delivery_id'),
      (16, 'message', p_input ->> 'webhook_id'), (17, 'thread', p_input ->> 'thread_id'), (18, 'access', p_input ->> 'access_id'),
      (19, 'run', p_input ->> 'run'), (20, 'MCP server', p_input ->> 'server'), (21, 'tool', p_input ->> 'tool'),
      (26, 'document', p_input ->> 'document'), (22, 'session', p_input ->> 'session'), (23, 'command', p_input ->> 'command'),
      (24, 'rows:', coalesce(p_input ->> 'kinds', p_input ->> 'keep')),
      (25, 'changed:', case when jsonb_typeof(p_input -> 'changed') = 'array'
                            then (select string_agg(c, ', ') from jsonb_array_elements_text(p_input -> 'changed') c) end)) v (place, word, name)
   where v.name <> ''
$$;
