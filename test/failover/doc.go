// Package failover tests the product's promises when the database fails, and when a new release starts while the old
// one serves. It uses the real program and real PostgreSQL servers.
//
// Outages (outage_test.go). Two processes of `agent serve` work under load: scheduled heartbeats, executions that call
// skills, wait for events and send messages, and visitors' questions. While calls of skills and of the model run, one
// of three things happens:
//
//   - One process is killed, and then the database restarts, gracefully and by a crash. It stays down for some seconds,
//     in the long form for longer than a worker's lease. The other process stays up and alive (/healthz), reports that
//     it is not ready (/readyz), logs the outage, and recovers without a restart.
//   - The primary is killed, and its synchronous standby is promoted. DATABASE_URL names both, with
//     target_session_attrs=read-write.
//   - The database is dumped and restored elsewhere. The executions continue there, and the holders from before the
//     dump are fenced.
//
// After the first two, load_test.go compares the acknowledged work with the database. Every confirmed start, event,
// message and answer exists and has ended. A call that must not be repeated was made once, and each repeated call has
// its own row in the log. The fencing tokens of each lane only grow.
//
// Upgrades (upgrade_test.go, outage_test.go). A newer version migrates while two processes serve. An `agent migrate` is
// killed at one of its requests to the server, and the next run completes the migration. Data of a released version is
// upgraded, and its waiting executions finish. `agent serve` rejects a newer schema.
//
// Read replicas (replica_test.go). The pages and the answers of `why` come from a streaming standby: they equal the
// primary's, report the lag, and still come when either server is down.
//
// With AGENT_OUTAGES=long the database stops for a minute, and a migration is killed at each of its requests in turn.
// The package exports nothing.
package failover
