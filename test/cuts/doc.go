// Package cuts proves that a connection to the database may break at any message and change nothing.
//
// Three stories are told by the parts of `agent serve`, wired as it wires them, in the test's own process: a
// heartbeat in which a model pursues an objective, a visitor's chat answer that needs an admin's approval, and a flow
// that waits for an event and for a child. A fourth does nothing for a while, so that what a process does beside its
// runs comes round. Between the parts and PostgreSQL stands a proxy that knows the protocol. It reads messages up to
// the one after which the client waits for an answer (a statement, a batch, a preparation, a new connection), and
// breaks the connection at one of them:
//
//   - before: the server never sees it;
//   - after: the server has done it, and committed where it does, and the client never hears of it.
//
// A message has a name that does not depend on how goroutines interleave: its text, and how often that text was sent
// before, over all connections of the process ("the second time of this statement"); an end of a transaction is named
// after the last statement in it. An undisturbed run tells which messages there are. Each is then cut in a run of its
// own, on a database of its own, and the end is compared with that of the undisturbed run: every row of every table
// that lasts, without ids, times and the counters of attempts, and what went out to the world, counted by idempotency
// key.
//
// Where the end is another, or somebody outside had to ask again, that is an exception. Exceptions are listed, with
// the reason, in a table of this package and in docs/exceptions.md; one that is not listed fails the test, and so
// does one of the table that has not occurred in a whole run.
//
// An ordinary run cuts a sample, in which each statement of each story is cut in both ways at least once. With
// AGENT_CUT_ALL=1 every message is cut in both ways. There is nothing here to import.
package cuts
