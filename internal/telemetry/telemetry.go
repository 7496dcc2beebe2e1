// Package telemetry exports the agent's work to OpenTelemetry and to Prometheus.
//
// # Spans
//
// A sender makes each span from a finished row of the database. An execution is a span, and so is each of its
// activities and waits. The trace id is the 16 bytes of the trace's ULID. A span id is the end of the row's uuid; that
// of a wait is a hash of its execution and step. So every sender makes the same span of a row. One thing may differ: an
// activity that outlives its parent ends with it, if the parent has ended by then.
//
// One of the processes with an endpoint ([Exporter]) reads new activities and ends of executions once a second, by
// their time-ordered ids, and sends them. It stores its position in agent_span_export, and advances it when the
// receiver has accepted the spans, or refused them for good. This has advantages over hooks in the running code:
//
//   - The export adds no write, wait or memory to the processes' work. If the receiver is down, it gets the spans
//     later; the work does not wait.
//   - The next exporting process sends the spans of a killed process, including the rows that a takeover closed for it.
//     It also sends runs of external workers, cancels, timeouts, and rows written in plain SQL.
//
// A row may become visible after rows with later ids, because its transaction commits later. So a pass waits for the
// end of every transaction that was writing at its start (by pg_locks), for at most half a minute.
//
// A trace has one root: its first execution without a parent. That root is also the parent of rows without one (a note
// outside executions, a further execution under the same trace). In a trace without executions, the root is the first
// activity. As always in OpenTelemetry, the exporter sends a span when the span ends, possibly after its children.
//
// # Limits
//
// A span comes again, with the same id, if the receiver's answer was lost, or if a process ended before it had stored
// its position. These spans are not sent:
//
//   - those that the receiver refuses for good, and those that are older than [Backlog] when it is available again;
//   - rows of a transaction that took more than half a minute;
//   - the oldest of more than 20,000 open activities, and of more than 5,000 waits in a pass;
//   - rows whose trace id is not one of ours.
//
// A note outside executions may become a second root, if it is sent before the first execution of its trace exists.
//
// # Metrics
//
// [Metrics] has counters, histograms and gauges. A process counts after it has recorded the end of a row. So the
// counters of all processes add up to these rows, except rows that plain SQL ended, and rows whose process died between
// the record and the count. A scrape reads the gauges of [State] from the database, at most once in a few seconds. Each
// process has its own registry. The number of values of a label is bounded; a trace id is never a label.
package telemetry
