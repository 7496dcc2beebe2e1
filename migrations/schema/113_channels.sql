-- Channels: conversations in Telegram, in Slack and by e-mail.
--
-- A message is a row before its provider gets the acknowledgement, unique by the provider's id. It enters a thread as a
-- chat message does. A part of an answer is marked before it is sent.
create table agent_channels (
  id uuid default lanekeeper.agent_uuid7() primary key,
  name text not null unique check (name ~ '^[a-z0-9][a-z0-9_-]{0,63}$'), description text not null default '',
  type text not null check (type in ('telegram', 'slack', 'email')), agent text not null default '',
  secrets jsonb not null default '{}', settings jsonb not null default '{}',
  pairing text not null default 'required' check (pairing in ('required', 'open')), report_to text not null default '',
  enabled boolean not null default true, disabled_reason text not null default '', disabled_by text not null default '',
  disabled_at timestamptz,
  state text not null default 'new' check (state in ('new', 'connected', 'failing')), error text not null default '',
  state_at timestamptz not null default clock_timestamp(), seen_at timestamptz,
  cursor text not null default '', cursor_at timestamptz,
  source text not null default '', created_at timestamptz not null default clock_timestamp(),
  updated_at timestamptz not null default clock_timestamp(),
  constraint agent_channels_check check (enabled = (disabled_by = ''))
) with (fillfactor = 50);
comment on table agent_channels is 'Channels by which people reach an agent.';
comment on column agent_channels.type is 'The provider.';
comment on column agent_channels.agent is 'The agent that answers. Empty: the default agent.';
comment on column agent_channels.secrets is 'References to the secrets of the provider, by name.';
comment on column agent_channels.settings is 'Details of the type, by name.';
comment on column agent_channels.pairing is 'required: an admin confirms an unknown sender. open: everybody may write.';
comment on column agent_channels.report_to is
  'The conversation that gets the reports of heartbeats and the requests for approval. Empty: none.';
comment on column agent_channels.disabled_reason is 'Why it was disabled.';
comment on column agent_channels.disabled_by is 'The person or program that disabled it. Empty: it is enabled.';
comment on column agent_channels.disabled_at is 'When it was disabled.';
comment on column agent_channels.state is 'new: not connected yet. failing: the last contact failed with error.';
comment on column agent_channels.error is 'Why the last contact failed.';
comment on column agent_channels.state_at is 'When the state began.';
comment on column agent_channels.seen_at is 'When the provider last answered. An old time: the connection is silent.';
comment on column agent_channels.cursor is 'The position up to which messages of the provider were received.';
comment on column agent_channels.cursor_at is 'When the cursor last moved.';
comment on column agent_channels.source is 'The declaring side, such as workspace.';

create table agent_channel_messages (
  id uuid default lanekeeper.agent_uuid7() primary key, channel text not null,
  external_id text not null check (external_id <> '' and octet_length(external_id) <= 512),
  conversation text not null, sender text not null, sender_name text not null default '',
  content text not null default '', files jsonb not null default '[]', click text not null default '',
  ref text not null default '', message_ref text not null default '',
  status          text not null default 'received'
                  check (status in ('received', 'running', 'done', 'ignored', 'failed')),
  attempts int not null default 0, next_attempt_at timestamptz not null default clock_timestamp(),
  error_message text not null default '', thread_id text, execution_id uuid, trace_id text not null default '',
  draft_id text not null default '', received_at timestamptz not null default clock_timestamp(),
  finished_at timestamptz, raw bytea, claim bigint,
  constraint agent_channel_messages_once unique (channel, external_id)
) with (fillfactor = 70);
create index agent_channel_messages_open on agent_channel_messages (channel, status, conversation, id)
  where status in ('received', 'running');
comment on index agent_channel_messages_open is 'Finds messages that are not done, the first of each conversation.';
create index agent_channel_messages_execution on agent_channel_messages (execution_id) where execution_id is not null;
comment on index agent_channel_messages_execution is 'Finds the message that a turn answers.';
create index agent_channel_messages_recent on agent_channel_messages (channel, id);
comment on index agent_channel_messages_recent is 'Lists the messages of a channel.';
comment on table agent_channel_messages is
  'Messages received on a channel, one row for each id of the provider. The row is committed before the provider '
  'gets its acknowledgement.';
comment on column agent_channel_messages.channel is 'The name of the channel.';
comment on column agent_channel_messages.external_id is 'The provider''s id of the message or click.';
comment on column agent_channel_messages.conversation is 'The provider''s id of the conversation, which is one thread.';
comment on column agent_channel_messages.sender is 'The provider''s id of the sender, never a display name.';
comment on column agent_channel_messages.sender_name is 'The name that the sender shows.';
comment on column agent_channel_messages.content is 'The text.';
comment on column agent_channel_messages.files is
  'References to files. The turn fetches them when it reads the message.';
comment on column agent_channel_messages.click is 'The nonce of the button that was pressed. Empty: a message.';
comment on column agent_channel_messages.ref is 'The data that the provider needs to answer a click.';
comment on column agent_channel_messages.message_ref is
  'The provider''s id of the message, or of the message with the button.';
comment on column agent_channel_messages.status is
  'received: stored. running: a turn answers it. ignored: its sender may not write. failed: no further attempt.';
comment on column agent_channel_messages.attempts is 'Attempts to bring it to its thread.';
comment on column agent_channel_messages.next_attempt_at is 'When the next attempt is due.';
comment on column agent_channel_messages.error_message is 'Why it failed or was ignored.';
comment on column agent_channel_messages.thread_id is 'The thread that has the message.';
comment on column agent_channel_messages.execution_id is 'The turn that answers it.';
comment on column agent_channel_messages.trace_id is 'The trace of the turn.';
comment on column agent_channel_messages.draft_id is
  'The provider''s id of the message that shows the answer while it is written. ?: its id was lost.';
comment on column agent_channel_messages.received_at is 'When it was received.';
comment on column agent_channel_messages.finished_at is 'When it was done, ignored or failed.';
comment on column agent_channel_messages.raw is
  'The message as received, for channels that read its files from it. Null: not kept.';
comment on column agent_channel_messages.claim is
  'The fencing token of the worker whose attempt is in flight. Null: no attempt is, and next_attempt_at ends a pause.';

create table agent_channel_sends (
  message_id uuid primary key references agent_messages(id) on delete cascade,
  channel text not null, thread_id text not null, seq bigint not null,
  status          text not null default 'queued'
                  check (status in ('queued', 'sending', 'sent', 'failed', 'maybe_sent')),
  attempts int not null default 0, next_attempt_at timestamptz not null default clock_timestamp(),
  parts text[] not null default '{}', attempting boolean not null default false, error_message text not null default '',
  created_at timestamptz not null default clock_timestamp(), finished_at timestamptz, claim bigint
) with (fillfactor = 70);
create index agent_channel_sends_open on agent_channel_sends (channel, thread_id, seq)
  where status in ('queued', 'sending');
comment on index agent_channel_sends_open is 'Finds the next message of each thread of a channel.';
create index agent_channel_sends_lost on agent_channel_sends (channel, message_id)
  where status in ('failed', 'maybe_sent');
comment on index agent_channel_sends_lost is 'Lists failed messages, and messages whose arrival is unknown.';
create index agent_channel_sends_recent on agent_channel_sends (channel, message_id);
comment on index agent_channel_sends_recent is 'Lists what a channel sent.';
comment on table agent_channel_sends is
  'Messages of threads that a channel is sending, written in the transaction of the message.';
comment on column agent_channel_sends.message_id is 'The message.';
comment on column agent_channel_sends.channel is 'The name of the channel.';
comment on column agent_channel_sends.thread_id is 'The thread, whose messages leave in order.';
comment on column agent_channel_sends.seq is 'The place in the thread.';
comment on column agent_channel_sends.status is
  'sending: an attempt is in flight or will be repeated. failed: no further attempt. maybe_sent: the answer to a part '
  'was lost, so the part was sent once or not at all.';
comment on column agent_channel_sends.attempts is 'Attempts so far.';
comment on column agent_channel_sends.next_attempt_at is 'When the next attempt is due.';
comment on column agent_channel_sends.parts is
  'The provider''s ids of the parts so far. Empty: the part was maybe sent.';
comment on column agent_channel_sends.attempting is
  'A part was handed to the provider, and its answer is not recorded yet.';
comment on column agent_channel_sends.error_message is 'The error of the last attempt.';
comment on column agent_channel_sends.finished_at is 'When it was sent or failed.';
comment on column agent_channel_sends.claim is
  'The fencing token of the worker whose attempt is in flight. Null: no attempt is, and next_attempt_at ends a pause.';

create table agent_channel_identities (
  id uuid default lanekeeper.agent_uuid7() primary key, channel text not null, subject text not null,
  name text not null default '', conversation text not null,
  status text not null check (status in ('pending', 'paired')), code_sha256 text not null default '',
  expires_at timestamptz, paired_by text not null default '', paired_at timestamptz,
  created_at timestamptz not null default clock_timestamp(),
  constraint agent_channel_identities_once unique (channel, subject),
  constraint agent_channel_identities_check check ((status = 'pending') = (expires_at is not null))
);
comment on table agent_channel_identities is
  'Senders of channels: confirmed by an admin, or waiting for an admin. Pairing makes a visitor only.';
comment on column agent_channel_identities.channel is 'The name of the channel.';
comment on column agent_channel_identities.subject is 'The provider''s id of the sender.';
comment on column agent_channel_identities.name is 'The name that the sender shows.';
comment on column agent_channel_identities.conversation is 'The conversation in which the sender wrote first.';
comment on column agent_channel_identities.status is 'pending: waits for an admin. paired: may write.';
comment on column agent_channel_identities.code_sha256 is 'SHA-256 of the pairing code, in hexadecimal.';
comment on column agent_channel_identities.expires_at is 'When the code ends. Null: paired.';
comment on column agent_channel_identities.paired_by is 'The admin who confirmed the code.';
comment on column agent_channel_identities.paired_at is 'When the admin confirmed the code.';

create table agent_channel_buttons (
  nonce text primary key, channel text not null, conversation text not null,
  approval_id uuid not null references agent_approvals(id) on delete cascade, approve boolean not null,
  arguments_hash text not null, message_ref text not null default '',
  created_at timestamptz not null default clock_timestamp(), expires_at timestamptz not null,
  used_at timestamptz, used_by text not null default ''
);
create index agent_channel_buttons_approval on agent_channel_buttons (approval_id, channel);
comment on index agent_channel_buttons_approval is 'Finds the buttons of an approval.';
comment on table agent_channel_buttons is
  'Buttons that decide an approval. Each works once, for the arguments that were shown with it.';
comment on column agent_channel_buttons.nonce is 'The value that the provider returns for a click.';
comment on column agent_channel_buttons.channel is 'The name of the channel.';
comment on column agent_channel_buttons.approval_id is 'The approval.';
comment on column agent_channel_buttons.conversation is 'The conversation that shows the button.';
comment on column agent_channel_buttons.approve is 'true: approve. false: reject.';
comment on column agent_channel_buttons.arguments_hash is 'The arguments that were shown with the button.';
comment on column agent_channel_buttons.message_ref is 'The provider''s id of the message with the button.';
comment on column agent_channel_buttons.expires_at is 'When the button ends.';
comment on column agent_channel_buttons.used_at is 'When the button was used. Null: it was not.';
comment on column agent_channel_buttons.used_by is 'The click that used it: a row of agent_channel_messages.';
