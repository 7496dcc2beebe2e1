-- Brings a database of schema version 118 to the baseline. Other tables are the same. The code is applied after this.
alter table agent_threads validate constraint agent_threads_owner_kind;
create index agent_documents_own on agent_documents (owner_kind, owner, visitor, id);
