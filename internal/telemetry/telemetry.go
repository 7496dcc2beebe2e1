// Package telemetry exports the agent's work to OpenTelemetry and to Prometheus.
//
// # Spans
//
// Spans are a projection of the database, never a second truth: a sender makes each span from a finished row. An
// execution is a span, and so is each of its activities and waits. The trace id is the 16 bytes of the trace's ULID,
// and a span id is the end of the row's uuid. Times come from the row. So every sender makes the same span from a row,
// and the row identifies its span.
//
// One of the processes with an endpoint ([Exporter]) reads new activities and ends of executions once a second, by
// their time-ordered ids, and sends them. It stores its position in agent_span_export, and advances it after the
// receiver has accepted the spans. Hooks in the running code could not give these properties:
//
//   - The export adds no write, wait or memory to the processes' work. If the receiver is down, it gets the spans
//     later; the work does not wait.
//   - The next exporting process sends the spans of a killed process, including the rows that a takeover closed for it.
//     It also sends runs of external workers, cancels, timeouts, and rows written in plain SQL.
//   - The exporter sends a span again, with the same id, if the receiver's answer was lost, or if a process ended
//     before it had stored its position. It drops spans if the receiver refuses them for good, or was unavailable for
//     longer than [Backlog]. It also drops those of rows whose transaction took more than half a minute, and of the
//     oldest of more than 20,000 open activities.
//
// A row may become visible after rows with later ids, because its transaction commits later. So a pass waits for the
// end of every transaction that was writing at its start (by pg_locks), for at most half a minute.
//
// A trace has one root: its first execution without a parent. That root is also the parent of rows without one (a note
// outside executions, a further execution under the same trace). In a trace without executions, the root is the first
// activity. As always in OpenTelemetry, the exporter sends a span when the span ends, possibly after its children.
//
// Without an endpoint, the process starts no goroutine and sends no statement.
//
// # Metrics
//
// [Metrics] has counters and gauges. A process counts after it has recorded the end of a row. So the counters of all
// processes add up to these rows, and lack rows that plain SQL ended. A scrape reads the gauges from the database, at
// most once in a few seconds. Each process has its own registry. The number of values of a label is bounded; a trace id
// is never a label.
package telemetry
