// Package telemetry shows what the agent does to OpenTelemetry and to Prometheus.
//
// # Spans
//
// Spans are a projection of what the database says, and never a second truth: each is made of a row that is finished.
// An execution is a span, and so is each of its activities and waits. The trace id is the 16 bytes of the trace's
// ULID, a span id the end of the row's uuid, times are the stored ones. So a span looks the same whoever sends it,
// and whoever knows the row knows the span.
//
// One process of those that are configured to send ([Exporter]) reads, once a second, the activities and the ends of
// executions that came since the last time, by their time-ordered ids, and sends them. How far it got is kept in
// agent_span_export, and is moved when the receiver has taken them. That gives what hooks in the code that runs could
// not:
//
//   - Nothing is written, waited for or kept in memory where work is done. A receiver that is down is behind, not in
//     the way.
//   - What a killed process did is sent by whoever takes its place, including the rows that a takeover closed for it.
//     So are runs of workers outside, cancels, timeouts, and what was written in plain SQL.
//   - A span is sent once. It can be sent twice where a receiver took a batch and its answer was lost, with the same
//     ids; it is not sent when the receiver was away for longer than [Backlog].
//
// A row may become visible after rows with later ids, because its transaction commits later. So a pass goes up to a
// moment only when every transaction that was writing at that moment, which pg_locks tells, has ended, or half a
// minute has gone by.
//
// A trace has one root: its first execution without a parent. What has no parent of its own (a note outside
// executions, a further execution under the same trace) is filed under that root; in a trace without executions,
// under its first activity. The span of what is under way comes when it ends, as always in OpenTelemetry; what is
// inside may come before it.
//
// Without an endpoint none of this exists: no goroutine, no statement.
//
// # Metrics
//
// [Metrics] are the counters of one process, counted where it records the end of a row, so that they add up to the
// rows; and gauges of what the database says, asked for at a scrape and at most once in a few seconds. The registry
// is the process's own. Labels take values from short lists; trace ids are none.
package telemetry
