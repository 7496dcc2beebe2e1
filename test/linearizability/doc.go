// Package linearizability proves that lanes are linearizable: whatever processes and sessions do to a lane, and
// whatever happens to them, each operation takes effect at one moment between its call and its answer, as the rules
// of lanes say.
//
// A scene records real histories. Processes, which are this test binary started again, use the same lanes through
// package lanes, through plain SQL (acquire, try, await, renew, release, break, sweep), and as executions that park
// in their lane, lend it to a child and are claimed again (the SQL functions that package executions calls). All make
// fenced writes, also under tokens that are long void, and release and renew what is not theirs. Meanwhile processes
// are killed with kill -9 and stopped past every TTL, sessions are ended with pg_terminate_backend, a proxy breaks
// connections before the server sees a request, after it has run it and before the commit, and after the commit, and
// the server is stopped in immediate mode and recovers. The wall clocks of three processes in four are wrong, by an
// hour or a year (linux on amd64; elsewhere they are right).
//
// The model (model_test.go, family_model_test.go) is a sequential lane with the database's clock, and porcupine looks
// for an order of the operations that it accepts. An operation is recorded with two moments of the clock of the
// machine, which is that of the database, since the server runs on it. The model lets an operation happen at any
// moment between them, never before an earlier change; the answer narrows that where it has a time in it. So an
// expiry is no operation: a lease may count as ended only when its end can have passed, and as live only when it
// cannot have.
//
//   - An operation whose answer nobody heard may happen at any later time, or never. One that the client never sent,
//     or that was refused with an SQLSTATE that rolls back, did nothing.
//   - "It is being changed right now" is accepted only while another operation on the lane overlaps, and "promised to
//     who waits" only while somebody can be waiting.
//   - A release that hands the lane over says to whom, who has to be waiting then. One of which nobody heard may have
//     handed it to anybody who waits.
//   - A release through package lanes to nobody does not wait for its commit to be durable: a crash of the server may
//     undo it, if nobody took the lane since. Everything else that was acknowledged has to survive the crash.
//   - A history that the checker does not finish within its time counts as a failure.
//
// Fenced writes draw a number after their fence. No write under a token may come after one under a larger token, and
// no token has writes of two owners.
//
// Not claimed: the order in which waiters are served (package lanes tests that), that a lease's context ends in time
// in a process that was stopped (it cannot: hence the fence), and anything about a machine whose clock jumps back or
// whose standby is promoted.
//
// Each fault of planted_test.go is made by replacing a function of lanes in a database of the test's own; its script
// is accepted with lanes as they are, and has to be refused with the fault.
//
// An ordinary run records one round; AGENT_PROVE_ROUNDS=30 that many, which is what make prove does. There is nothing
// here to import.
package linearizability
