-- Acquire or renew the right to send. Return the bound of the pass: the time of this statement, once all transactions
-- of that time have ended.
with mine as (
  update agent_span_export
     set sender = @me, sender_until = clock_timestamp() + make_interval(secs => @seconds), updated_at = clock_timestamp(),
         -- The exporter gives up spans older than the backlog: the receiver was away for too long, or no process sent.
         sent_upto = greatest(sent_upto, lanekeeper.agent_uuid7_floor(clock_timestamp() - make_interval(secs => @backlog)))
   where sender = @me or sender_until < clock_timestamp()
  returning sent_upto, pending)
select m.sent_upto::text, m.pending::text[], lanekeeper.agent_uuid7_floor(statement_timestamp())::text as now,
       -- A bound on ids is a whole millisecond. Rows that have ended by now are before the next millisecond.
       lanekeeper.agent_uuid7_floor(statement_timestamp() + interval '1 millisecond')::text as next
  from mine m
