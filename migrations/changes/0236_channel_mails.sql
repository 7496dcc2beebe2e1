-- A mail is kept as it came: its files are read from it, and what its text leaves out is there.
alter table agent_channel_messages add column if not exists raw bytea;
comment on column agent_channel_messages.raw is 'The message as it came, for channels that read its files from it. Null: not kept.';
