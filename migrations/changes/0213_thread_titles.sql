-- Sessions of admins have names that people give them.
alter table agent_threads add column title text not null default '';
comment on column agent_threads.title is 'A name that a person gave the conversation. Empty: none.';
