// Package crash proves, with the real program and real signals, the product's promises when processes die, stall, or
// stop.
//
// The tests build cmd/agent once and start it as child processes, with a scripted model, skills that the test serves
// and counts, and a PostgreSQL of their own. Between a process and the database stands a proxy that knows the protocol.
// It counts the process's messages. It can kill the process before a statement arrives, or after the statement took
// effect and before its answer arrives. It can also delay a write until its time has long passed.
//
// Proved:
//
//   - kill -9 at every boundary of a heartbeat with a conversation inside: it completes after a restart, and no
//     recorded call is repeated. A call in flight is repeated under the same idempotency key if its skill is
//     idempotent; otherwise it ends `unknown`, and the model learns that.
//   - kill -9 at every boundary of a chat answer, of an approval, and of a webhook with several actions and a retry. A
//     visitor or the admin requests the approval; its decision comes with or without a working process. Every message
//     is answered once and in order, a grant is used once, and each action runs once. A client that repeats a message
//     or a request, or attaches to its answer, gets the existing one.
//   - A stop, a pause and a kill in the middle of streamed answers, under several visitors.
//   - The same boundaries with two crashes, a graceful stop, ^C, an admin's cancel, and a connection that breaks.
//   - Kills, pauses and stops at random moments, under visitors who talk and leave: the counted spend is never below
//     the provider's bill, and exceeds it only by amounts marked as unknown.
//   - Kills at random moments under runs, heartbeats and admins (HTTP, command line) that write one memory: no
//     acknowledged update is lost, and a late note is recorded as a conflict.
//   - Two processes on one database: one heartbeat per tick, never two at once, even if the leader dies.
//   - A process paused past its lease can neither checkpoint, nor log, nor finish, and its attempts are in the activity
//     log.
//   - Signals: a graceful stop hands work over; ^C cancels; a second signal ends the process at once.
//   - An admin has priority; a busy lane is a skip; processes wait for a restarting database; `agent dev` leaves no
//     server behind.
//
// The boundaries are a few hundred, so an ordinary run takes an even sample of them. With AGENT_CRASH_ALL=1 a run takes
// every one. The package exports nothing.
package crash
