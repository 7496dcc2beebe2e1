-- Take the right to send, or keep it, and tell what is to be looked at: up to a moment just before this statement, once nothing is
-- under way any more that was then. The moment comes before the snapshot, so who is not in the snapshot writes later ids. The
-- margin is for statements that had made an id and had no number yet.
with mine as (
  update agent_span_export
     set sender = @me, sender_until = clock_timestamp() + make_interval(secs => @seconds), updated_at = clock_timestamp(),
         -- What is older than the backlog is given up: the receiver was away for too long, or nobody sent.
         sent_upto = greatest(sent_upto, agent_uuid7_floor(clock_timestamp() - make_interval(secs => @backlog)))
   where sender = @me or sender_until < clock_timestamp()
  returning sent_upto, pending)
select m.sent_upto::text, m.pending::text[], agent_uuid7_floor(statement_timestamp() - interval '50 milliseconds')::text as upto,
       agent_uuid7_floor(statement_timestamp())::text as now, pg_snapshot_xmax(pg_current_snapshot())::text::bigint as after
  from mine m
