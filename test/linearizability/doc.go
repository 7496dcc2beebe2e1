// Package linearizability tests that lanes are linearizable. Each operation takes effect at one moment between its call
// and its answer, by the rules of lanes, under faults of processes, sessions and the server.
//
// A scenario records real histories. Its processes are this test binary, started again. They use the same lanes in
// three ways: through package lanes, through plain SQL (acquire, try, await, renew, release, break, sweep), and as
// executions. Executions park in their lane, lend it to a child and are claimed again (the SQL functions that package
// executions calls). All processes make fenced writes, also under long void tokens, and release and renew lanes that
// they do not hold. Meanwhile the scenario kills processes with kill -9, stops them past every TTL, and ends sessions
// with pg_terminate_backend. A proxy breaks connections before the server receives a request, between its execution and
// the commit, and after the commit. The scenario stops the server in immediate mode, and the server recovers. The wall
// clocks of three processes in four are wrong, by an hour or a year (linux on amd64; elsewhere they are right).
//
// The model (model_test.go, family_test.go) is a sequential lane with the database's clock. porcupine searches
// for an order of the operations that the model accepts. A recorded operation has two moments of the machine's clock,
// which is also the database's, since the server runs on the machine. The model lets an operation happen at any moment
// between them, never before an earlier change; a time in the answer narrows that. So an expiry is no operation: a
// lease may count as ended only if its end may have passed, and as live only if its end cannot have passed.
//
//   - An operation without a received answer may happen at any later time, or never. An operation did nothing if the
//     client never sent it, or if the server rejected it with an SQLSTATE that rolls back.
//   - An acquire may fail because the lane is being changed: the model accepts that only while another operation on the
//     lane overlaps. It may fail because the lane is promised: the model accepts that only while a waiter is possible.
//   - A release that hands the lane over names the new owner. That owner must be waiting then. A release without a
//     received answer may have handed the lane to any waiter.
//   - A release through package lanes to no waiter does not wait for its commit to be durable. A server crash may undo
//     it if no owner has acquired the lane since. All other acknowledged operations must survive the crash.
//   - A history that the checker does not finish within its time counts as a failure.
//
// Fenced writes draw a number after their fence. No write under a token may come after one under a larger token, and
// no token has writes of two owners.
//
// The test does not cover the order of waiters, which package lanes tests. It does not show that a lease's context ends
// in time in a stopped process: it cannot, hence the fence. It shows nothing about a machine whose clock jumps back or
// whose standby is promoted.
//
// Each fault of planted_test.go replaces a function of lanes in its own database. The model must accept its script
// without the fault, and reject it with the fault.
//
// An ordinary run records one round; AGENT_PROVE_ROUNDS=30 records that many, as make prove does. The package exports
// nothing.
package linearizability
