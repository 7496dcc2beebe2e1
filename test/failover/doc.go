// Package failover proves, with the real program and real PostgreSQL servers, what the product promises when the
// database goes away, and when a new release comes while the old one serves.
//
// Outages (outage_test.go, primary_test.go). Two processes of `agent serve` work under load: heartbeats by the clock,
// executions that call skills, wait for events and talk, visitors who ask. At the worst moment, with calls of skills
// and of the model under way, the database
//
//   - is restarted, in order and without warning, and stays away for a while, in the long form for longer than a
//     worker's lease;
//   - or is a primary that is killed, or that lives on and takes no more writes, and its synchronous standby is
//     promoted. DATABASE_URL names both, with target_session_attrs=read-write.
//
// The processes stay up, stay alive (/healthz) and say that they are not ready (/readyz), log it, and recover by
// themselves. Then checks_test.go compares what was acknowledged with what is there: every start, event, message and
// answer that was confirmed exists and has come to its end; a call that must not be repeated was made once; what was
// done twice shows in the log; and the fencing tokens of each lane have only grown.
//
// Upgrades (upgrade_test.go, kill_test.go). Migrations are applied while processes serve, by several at once, and are
// killed between any two of their requests to the server; data of a released version is upgraded and what waited in
// it finishes; and each command keeps away from a newer schema.
//
// Read replicas (replica_test.go). Pages and questions are read from a streaming standby: they are the primary's, say
// how far behind they are, and go on when either server is away.
//
// An ordinary run keeps the database away for some seconds. With AGENT_OUTAGES=long it is a minute, and every request
// of a migration is a place to be killed at. There is nothing here to import.
package failover
