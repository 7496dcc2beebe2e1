-- Images that came with messages. Their bytes are here and nowhere else: no row of activity and no checkpoint has them.

create table agent_message_images (
  message_id uuid not null references agent_messages (id) on delete cascade,
  place      int not null check (place > 0),
  url        text check (url like 'https://%' and length(url) <= 2048),
  media_type text check (media_type in ('image/png', 'image/jpeg', 'image/gif', 'image/webp')),
  data       bytea check (octet_length(data) between 1 and 5242880),
  detail     text not null default '' check (detail in ('', 'low', 'high', 'auto')),
  primary key (message_id, place),
  check ((url is null) = (data is not null)),
  check ((media_type is null) = (data is null))
);
alter table agent_message_images alter column data set storage external; -- images are compressed already
comment on table agent_message_images is 'Images of messages, in their order. They go with their message.';
comment on column agent_message_images.message_id is 'The message that the image came with.';
comment on column agent_message_images.place is 'Where the image stands among those of its message, from 1.';
comment on column agent_message_images.url is 'Where the model''s server finds the image. The runtime never fetches it.';
comment on column agent_message_images.media_type is 'The format of data.';
comment on column agent_message_images.data is 'The image itself, when the client has sent it.';
comment on column agent_message_images.detail is 'How closely the model shall look, as the client says.';
