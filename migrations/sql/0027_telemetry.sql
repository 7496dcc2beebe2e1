-- What the export of traces needs to know. Spans are a projection of the activity log and of the ends of executions, so nothing is
-- written where those are written. All that is kept is how far the projection has been sent, and the traces of others that ours
-- were asked for by.

create table agent_trace_links (
  trace_id    text not null,
  traceparent text not null,                -- of the W3C header, as it came
  created_at  timestamptz not null default clock_timestamp(),
  primary key (trace_id, traceparent)
);
create index agent_trace_links_age on agent_trace_links (created_at);
comment on table agent_trace_links is
  'Spans of other systems that asked for a trace of ours. They are not trusted: each is a link, and the trace id stays ours.';

create table agent_span_export (
  single       boolean primary key default true check (single),
  sent_upto    uuid not null default agent_uuid7_floor(clock_timestamp()), -- activities and ends of executions with ids up to it are sent,
  pending      uuid[] not null default '{}',                                -- but for these activities, which had not ended
  sender       text not null default '',     -- the process that sends, until
  sender_until timestamptz not null default '-infinity',
  updated_at   timestamptz not null default clock_timestamp()
) with (fillfactor = 50);
insert into agent_span_export default values;
comment on table agent_span_export is
  'How far spans have been sent. One process at a time sends; it moves sent_upto when the receiver has taken what was before it.';
