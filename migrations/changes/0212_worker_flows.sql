-- Programs that embed the runtime register flows in Go. Other processes find them here, and so may start them.
alter table agent_workers add column if not exists flows text[] not null default '{}';
comment on column agent_workers.flows is 'The flows in Go that the process runs.';
