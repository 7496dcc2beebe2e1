-- What brings a database of schema version 118 to the baseline. The tables are the same. The code is applied after this.
alter table agent_threads validate constraint agent_threads_owner_kind;
