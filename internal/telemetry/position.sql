-- Take the right to send, or keep it, and tell what is to be looked at: up to the moment of this statement, once nothing is under
-- way any more that was then.
with mine as (
  update agent_span_export
     set sender = @me, sender_until = clock_timestamp() + make_interval(secs => @seconds), updated_at = clock_timestamp(),
         -- What is older than the backlog is given up: the receiver was away for too long, or nobody sent.
         sent_upto = greatest(sent_upto, lanekeeper.agent_uuid7_floor(clock_timestamp() - make_interval(secs => @backlog)))
   where sender = @me or sender_until < clock_timestamp()
  returning sent_upto, pending)
select m.sent_upto::text, m.pending::text[], lanekeeper.agent_uuid7_floor(statement_timestamp())::text as now,
       -- A bound on ids is a whole millisecond: what has ended by now lies before the next one.
       lanekeeper.agent_uuid7_floor(statement_timestamp() + interval '1 millisecond')::text as next
  from mine m
