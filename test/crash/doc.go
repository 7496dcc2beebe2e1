// Package crash proves, with the real program and real signals, what the product promises when
// processes die, stall, or are told to go.
//
// The tests build cmd/agent once, start it as child processes, and let it talk to a scripted model, to
// skills that the test serves and counts, and to a PostgreSQL of their own. Between a process and the
// database stands a proxy that knows the protocol: it counts what the process sends, and can kill it
// before a statement arrives, after one took effect and before its answer is heard, or keep a write back
// until its time is long over.
//
// What is proved:
//
//   - kill -9 at every boundary of a heartbeat with a conversation inside: it completes after a restart,
//     nothing that was recorded is called again, a call in flight is made again under the same
//     idempotency key when its skill is idempotent, and otherwise ends `unknown` and the model is told.
//   - kill -9 at every boundary of a chat answer, of an approval (asked for by a visitor or by the admin, decided
//     while a process works or while none does) and of a webhook with several actions and a retry: every message is
//     answered once and in order, a grant is used once, each action is done once, and a client that says or sends the
//     same again, or attaches to its answer, gets the one that was made.
//   - A stop, a pause and a kill in the middle of streamed answers, under several visitors.
//   - The same boundaries with two crashes, a graceful stop, ^C, an admin's cancel, and a connection that breaks.
//   - Kills, pauses and stops at random moments, under visitors who talk and leave: what is counted as spent is never
//     below what the provider bills, and above it only by what is marked as unknown.
//   - Kills at random moments under runs, heartbeats and admins (HTTP, command line) who write one memory: no
//     acknowledged update is lost, and a note that came too late is a conflict that was recorded.
//   - Two processes on one database: one heartbeat per tick, never two at once, also when the leader dies.
//   - A process paused past its lease can neither checkpoint, nor log, nor finish, and what it tried is in
//     the activity log.
//   - Signals: a graceful stop hands work on; ^C cancels; a second signal ends the process at once.
//   - An admin goes first; a busy lane is a skip; a database that restarts is waited for; `agent dev` leaves
//     no server behind.
//
// The boundaries are a few hundred, so an ordinary run takes an even sample of them. With
// AGENT_CRASH_ALL=1 every one is taken. There is nothing here to import.
package crash
