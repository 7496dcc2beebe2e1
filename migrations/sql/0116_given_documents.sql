-- Stored documents for flows and skills: an event answers a request by a document's id, and a run reads the documents that it may.
--
-- A request takes a document of its thread, of its execution, or an admin's that belongs to nobody; that one belongs to the
-- execution from then on. A run reads the documents of its thread, of its execution and of those that started it. Without a
-- thread it also reads an admin's documents that belong to nobody; an admin's operate session reads any.

alter table agent_requests add column documents jsonb not null default '{}';
comment on column agent_requests.documents is 'Of each document that came: {document, url}, and of a stored one id, name, content_type, size.';

create function take_agent_document(p_document text, p_execution uuid, p_thread text) returns jsonb
language plpgsql volatile as $$
declare
  d record;
begin
  update agent_documents x set execution_id = p_execution
   where x.id = agent_uuid(p_document) and x.owner_kind = 'admin' and x.thread_id is null and x.execution_id is null;
  select x.id, x.name, x.content_type, x.size into d from agent_documents x
   where x.id = agent_uuid(p_document) and (x.thread_id = p_thread or x.execution_id = p_execution);
  if not found then
    raise exception 'there is no document % that the request may take', coalesce(quote_literal(left(p_document, 60)), 'null')
      using errcode = '22023', hint = 'Give a document of the request''s thread, or one that an admin has uploaded.';
  end if;
  return jsonb_build_object('id', d.id, 'name', d.name, 'content_type', d.content_type, 'size', d.size,
                            'url', '/v1/documents/' || d.id || '/content');
end $$;
comment on function take_agent_document is 'The document that answers a request, as flows see it. Refused with 22023 when it is somebody else''s.';

-- As before, and a document may be named by its id.
create or replace function answer_agent_request(p_kind text, p_key text, p_event uuid, p_data jsonb) returns uuid
language plpgsql volatile as $$
declare
  r agent_requests;
  doc jsonb;
  urls jsonb;
  name_ text;
  given jsonb;
begin
  select x.* into r from agent_requests x where x.id = agent_uuid(p_key) and x.kind = p_kind for update;
  if not found or r.answer is not null then                 -- it is answered once
    return r.execution_id;
  end if;
  if p_kind = 'document' then
    urls := coalesce(p_data -> 'documentUrls', p_data -> 'document_urls');
    if jsonb_typeof(urls) = 'array' and jsonb_array_length(urls) = cardinality(r.items) and not p_data ?| array['documents', 'document', 'name'] then
      p_data := jsonb_build_object('documents', (select jsonb_agg(jsonb_build_object('document', i, 'url', urls -> (n::int - 1)) order by n)
                                                   from unnest(r.items) with ordinality u (i, n)));
    end if;
    for doc in select * from jsonb_array_elements(
        case when jsonb_typeof(p_data -> 'documents') = 'array' then p_data -> 'documents' else jsonb_build_array(p_data) end) loop
      continue when jsonb_typeof(doc) <> 'object';
      name_ := coalesce(doc ->> 'document', doc ->> 'name', case when cardinality(r.items) = 1 then r.items[1] end, '');
      given := jsonb_build_object('document', name_, 'url', coalesce(doc ->> 'url', ''));
      if doc ? 'document_id' then
        given := given || take_agent_document(doc ->> 'document_id', r.execution_id, r.thread_id);
      end if;
      if name_ = any (r.items) then
        r.received := r.received || jsonb_build_object(name_, given ->> 'url');
        r.documents := r.documents || jsonb_build_object(name_, given);
      else
        r.unexpected := r.unexpected || jsonb_build_object(name_, given ->> 'url');
      end if;
    end loop;
    if r.received ?& r.items then
      r.answer := (
        select jsonb_build_object('documents', r.received, 'documentUrls', jsonb_agg(r.received -> i order by n),
                                  'files', jsonb_agg(coalesce(r.documents -> i, jsonb_build_object('document', i, 'url', r.received -> i)) order by n))
          from unnest(r.items) with ordinality u (i, n));
    end if;
  else
    r.answer := p_data;
  end if;
  update agent_requests x
     set received = r.received, documents = r.documents, unexpected = r.unexpected, answer = r.answer,
         event_id = case when r.answer is not null then p_event end,
         status = case when x.status = 'pending' and r.answer is not null then 'completed' else x.status end,
         completed_at = case when r.answer is not null then coalesce(x.completed_at, clock_timestamp()) end
   where x.id = r.id;
  return r.execution_id;
end $$;
comment on function answer_agent_request is
  'Note what came for a request; the execution that made it, or null when the key is not that of a request. A document is '
  '{document, url}, or {document, document_id} for a stored one; several are {documents: [...]}, all of them in the order of the '
  'request {documentUrls: [url]}; the request is answered when all that were asked for are there. A '
  'signature or a test is answered by its first event. What comes after the answer changes nothing.';

create function lock_agent_document_request(p_thread text) returns table (request_id uuid, missing text[], waiter uuid)
language plpgsql volatile as $$
begin
  select r.id into request_id from agent_requests r
   where r.thread_id = p_thread and r.kind = 'document' and r.status = 'pending' order by r.id limit 1;
  if not found then
    return;
  end if;
  -- The order in which an event that answers it locks: the wait, executions, the request.
  perform agent_wait_lock('document', request_id::text);
  select x.id into waiter from agent_executions x
   where x.waiting_for = 'document' and x.waiting_key = request_id::text and (x.status = 'waiting') is true
   order by x.id limit 1 for no key update;
  select array_agg(i order by n) into missing
    from agent_requests r cross join unnest(r.items) with ordinality u (i, n)
   where r.id = request_id and r.status = 'pending' and not r.received ? i;
  if missing is not null then
    return next;
  end if;
end $$;
comment on function lock_agent_document_request is
  'The oldest request of a thread that documents are missing for, locked as an event locks it: what is missing, and who waits.';

create function agent_readable_documents(p_execution uuid, p_document uuid default null) returns setof uuid
language sql stable as $$
  with recursive run as (
    select x.id, x.parent_id, x.thread_id, x.surface, 0 as depth from agent_executions x where x.id = p_execution
    union all
    select x.id, x.parent_id, x.thread_id, x.surface, r.depth + 1 from run r join agent_executions x on x.id = r.parent_id where r.depth < 100)
  select d.id from run r join agent_documents d on d.thread_id = r.thread_id where r.depth = 0 and d.id = coalesce(p_document, d.id)
  union
  select d.id from run r join agent_documents d on d.execution_id = r.id where d.id = coalesce(p_document, d.id)
  union
  select d.id from run r join agent_documents d on d.thread_id is null and d.execution_id is null and d.owner_kind = 'admin'
   where r.depth = 0 and r.thread_id is null and d.id = coalesce(p_document, d.id)
  union
  select d.id from run r join agent_documents d on d.id = p_document where r.depth = 0 and r.surface = 'operate'
$$;
comment on function agent_readable_documents is 'The documents that an execution may read; with an id, that one or none.';
create index agent_documents_free on agent_documents (id) where thread_id is null and execution_id is null and owner_kind = 'admin';
