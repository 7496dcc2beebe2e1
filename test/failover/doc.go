// Package failover proves the product's promises when the database fails, and when a new release starts while the old
// one serves. It uses the real program and real PostgreSQL servers.
//
// Outages (outage_test.go, primary_test.go). Two processes of `agent serve` work under load: scheduled heartbeats,
// executions that call skills, wait for events and send messages, and visitors who ask. At the worst moment, with
// running calls of skills and of the model, the database
//
//   - restarts, gracefully and by a crash, and stays down for a while, in the long form for longer than a worker's
//     lease;
//   - or is a primary that is killed, or that runs on and refuses writes, and its synchronous standby is promoted.
//     DATABASE_URL names both, with target_session_attrs=read-write.
//
// The processes stay up, stay alive (/healthz) and report that they are not ready (/readyz), log it, and recover
// without a restart. Then checks_test.go compares the acknowledged work with the database. Every confirmed start,
// event, message and answer exists and has ended. A call that must not be repeated was made once. The log shows
// repeated work. The fencing tokens of each lane have only grown.
//
// Upgrades (upgrade_test.go, kill_test.go). Several processes apply migrations at once, while others serve, and are
// killed between any two of their requests to the server. Data of a released version is upgraded, and its waiting
// executions finish. Each command refuses a newer schema.
//
// Read replicas (replica_test.go). Pages and questions are read from a streaming standby: they equal the primary's,
// report the lag, and still work when either server is down.
//
// An ordinary run stops the database for some seconds. With AGENT_OUTAGES=long it is a minute, and a migration is
// killed at every request. The package exports nothing.
package failover
