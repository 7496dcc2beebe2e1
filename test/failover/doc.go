// Package failover tests the product's promises when the database fails, and when a new release starts while the old
// one serves. It uses the real program and real PostgreSQL servers.
//
// Outages (outage_test.go). Two processes of `agent serve` work under load: scheduled heartbeats,
// executions that call skills, wait for events and send messages, and visitors' questions. At the worst moment, with
// running calls of skills and of the model, the database
//
//   - restarts, gracefully and by a crash, and stays down for a while, in the long form for longer than a worker's
//     lease;
//   - or the primary is killed, or runs on and rejects writes, and its synchronous standby is promoted. DATABASE_URL
//     names both, with target_session_attrs=read-write.
//
// The processes stay up, stay alive (/healthz), report that they are not ready (/readyz), log it, and recover without a
// restart. Then load_test.go compares the acknowledged work with the database. Every confirmed start, event, message
// and answer exists and has ended. A non-repeatable call was made once. The log shows repeated work. The fencing tokens
// of each lane only grow.
//
// Upgrades (upgrade_test.go, outage_test.go). Several processes apply migrations at once, while others serve. They are
// killed between any two of their requests to the server. The program upgrades data of a released version, and its
// waiting executions finish. Each command rejects a newer schema.
//
// Read replicas (replica_test.go). Pages and why read from a streaming standby: they equal the primary's, report the
// lag, and still work when either server is down.
//
// An ordinary run stops the database for some seconds. With AGENT_OUTAGES=long it stops it for a minute, and kills a
// migration at every request. The package exports nothing.
package failover
