-- The shop's own database: the orders of a few customers, two of them late. Run it once, in a database of its own.

create table orders (
  id          int primary key,
  email       text not null,
  item        text not null,
  total       numeric(10, 2) not null,
  ordered_at  timestamptz not null,
  promised_on date not null,
  sent_at     timestamptz,
  late_since  date,                       -- flagged by the agent
  refunded_at timestamptz,
  refund_note text
);
create index orders_open on orders (promised_on) where sent_at is null and refunded_at is null;

insert into orders (id, email, item, total, ordered_at, promised_on, sent_at) values
  (1001, 'ana@example.com', 'Blue lamp', 49.00, now() - interval '9 days', current_date - 4, now() - interval '6 days'),
  (1002, 'ana@example.com', 'Oak shelf', 120.00, now() - interval '6 days', current_date - 2, null),
  (1003, 'ben@example.com', 'Wool rug', 210.00, now() - interval '5 days', current_date - 1, null),
  (1004, 'ben@example.com', 'Tea set', 35.50, now() - interval '1 day', current_date + 3, null);
