// Package crash tests the product's promises when processes die, stall or stop, with the real program and real signals.
//
// The tests build cmd/agent once and start it as child processes, with a scripted model, skills that the test serves
// and counts, and their own PostgreSQL. A proxy for the PostgreSQL protocol stands between a process and the database.
// It counts the process's messages. It can kill the process before a statement arrives, or after the statement took
// effect and before its response. It can also delay a write until after its lease.
//
// Proved:
//
//   - kill -9 at every boundary of a heartbeat with a conversation inside: it completes after a restart, and no
//     recorded call is repeated. If a call was in flight, an idempotent skill repeats it under the same idempotency
//     key. Otherwise it ends `unknown`, and the model learns that.
//   - kill -9 at every boundary of a chat answer, of an approval, and of a webhook with several actions and a retry. A
//     visitor or the admin requests the approval. Its decision comes with or without a working process. Every message
//     is answered once and in order, a grant is used once, and each action runs once. A client that repeats a message
//     or a request, or attaches to its answer, gets the existing one.
//   - A stop, a pause and a kill in the middle of streamed answers to several visitors.
//   - The same boundaries with two crashes, a graceful stop, ^C, an admin's cancel, and a broken connection.
//   - Kills, pauses and stops at random moments, while visitors talk and leave. The counted spend is never below the
//     provider's bill, and exceeds it only by amounts marked as unknown.
//   - Kills at random moments while runs, heartbeats and admins (HTTP, command line) write one memory. No acknowledged
//     update is lost, and a late note is recorded as a conflict.
//   - Two processes on one database: one heartbeat per tick, never two at once, even if the leader dies.
//   - A process paused past its lease can neither checkpoint, nor log, nor finish. Its attempts are in the activity
//     log.
//   - Signals: a graceful stop hands work over; ^C cancels; a second signal ends the process at once.
//   - An admin has priority; a busy lane is a skip; `agent dev` leaves no server behind.
//
// There are a few hundred boundaries, so an ordinary run takes an even sample of them. With AGENT_CRASH_ALL=1 a run
// takes every one. The package exports nothing.
package crash
