// Package telemetry exports the agent's work to OpenTelemetry and to Prometheus.
//
// # Spans
//
// Spans are a projection of the database, never a second truth: each span is made of a finished row. An execution is a
// span, and so is each of its activities and waits. The trace id is the 16 bytes of the trace's ULID, a span id the end
// of the row's uuid, times are the stored ones. So every sender makes the same span of a row, and the row identifies
// its span.
//
// One of the processes with an endpoint ([Exporter]) reads new activities and ends of executions once a second, by
// their time-ordered ids, and sends them. Its position is stored in agent_span_export, and advances when the receiver
// has accepted the spans. Hooks in the running code could not give these properties:
//
//   - The export writes nothing, waits for nothing and keeps no memory where work is done. If the receiver is down, it
//     gets the spans later; the work does not wait.
//   - The next exporting process sends the spans of a killed process, including the rows that a takeover closed for it.
//     It also sends runs of external workers, cancels, timeouts, and rows written in plain SQL.
//   - A span is sent once. It is sent twice, with the same ids, if the receiver took a batch and its answer was lost.
//     It is not sent if the receiver was away for longer than [Backlog].
//
// A row may become visible after rows with later ids, because its transaction commits later. So a pass waits until
// every transaction that was writing at its moment (by pg_locks) has ended, for at most half a minute.
//
// A trace has one root: its first execution without a parent. A row without a parent (a note outside executions, a
// further execution under the same trace) is filed under that root. In a trace without executions the root is its first
// activity. As always in OpenTelemetry, a span is sent when it ends; its children may be sent before it.
//
// Without an endpoint, the process starts no goroutine and sends no statement.
//
// # Metrics
//
// [Metrics] has counters and gauges. The process counts where it records the end of a row, and the counters add up to
// the rows. The gauges are read from the database at a scrape, at most once in a few seconds. The registry is the
// process's own. Labels take values from short lists; a trace id is never a label.
package telemetry
