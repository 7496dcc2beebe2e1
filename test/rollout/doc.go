// Package rollout replaces the replicas of an agent one after the other under load, and checks the effect on clients.
//
// Two processes of `agent serve` work on one database behind a proxy that distributes requests like a Kubernetes
// Service. It uses processes whose /readyz returns 200, without retries elsewhere, on persistent connections. Each
// process in turn gets SIGTERM, ends, and is replaced by a new one. Meanwhile
//
//   - visitors converse, streamed and not, without any key: a client may not repeat such a request, because it cannot
//     know whether its message was stored;
//   - others send messages in threads, without any key either, one after the other;
//   - clients start executions under an Idempotency-Key, and send their events by the API and by webhooks;
//   - clients read rows, and follow executions to their end by streams that break and reopen;
//   - two importers in SQL add to one number under a lane, with the functions of the contract.
//
// A request without a key may not fail at all. A client may repeat a request with a key, or a read, and gets the first
// answer; the test counts the repetitions. At the end every execution is completed, unrepeatable work has happened
// once, and each message of a thread exists once and in order.
//
// The new processes are of the same release, or of one with another schema. For that the test builds the program with a
// change of the tables and another body in each function. It migrates, and replaces the processes of this release. The
// long form also builds the programs of the schema versions with a bridge. Their processes cannot write after the
// bridge. So they may reject requests until they are replaced; rejected work exists once or not at all.
//
// AGENT_ROLL=long rolls ten times as often.
package rollout
