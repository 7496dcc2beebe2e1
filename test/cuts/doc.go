// Package cuts tests that a connection to the database may break at any message and change nothing.
//
// Three stories run on the parts of `agent serve`, wired in the same way, in the test's own process. In the first, a
// heartbeat, a model pursues an objective. In the second, a visitor's chat answer needs an admin's approval. In the
// third, a flow waits for an event and for a child. A fourth is idle for a while, which covers the periodic work of a
// process. A proxy for the PostgreSQL protocol stands between the parts and the database. It reads messages up to the
// next one whose answer the client awaits (a statement, a batch, a preparation, a new connection), and breaks the
// connection at one of them:
//
//   - before: the server never receives it;
//   - after: the server has executed it, and committed if it commits, and the client never gets the answer.
//
// A message has a name that does not depend on the order of goroutines. It is its text and the number of earlier
// messages with that text, over all connections of the process ("the second time of this statement"). The name of a
// transaction's end includes its last statement. An undisturbed run lists the messages. A separate run, on a new
// database, cuts each of them. The test compares its end with that of the undisturbed run: every row of every lasting
// table, without ids, times and the counters of attempts, and the external effects, counted by idempotency key.
//
// A different end, or a retry by an external client, is an exception. A table of this package and docs/exceptions.md
// list the exceptions with the reason. An unlisted exception fails the test, and so does a listed one that has not
// occurred in a whole run.
//
// An ordinary run cuts a sample: each statement of each story at least once in both ways. With AGENT_CUT_ALL=1 a run
// cuts every message in both ways. The package exports nothing.
package cuts
