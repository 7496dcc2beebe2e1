// Package rollout replaces the replicas of an agent one after the other while everybody uses it, and asks what they
// noticed.
//
// Two processes of `agent serve` work on one database behind a proxy that shares out requests as a Kubernetes Service
// does: among those whose /readyz says 200, without trying a request again elsewhere, on connections that it keeps.
// Each process in turn gets SIGTERM, ends, and is replaced by a new one. Meanwhile
//
//   - visitors converse, streamed and not, without any key: a client may not send such a request again, because it
//     cannot know whether its message was taken;
//   - others speak in threads, without any key either, one message after the other;
//   - executions are started under an Idempotency-Key, and their events come by the API and by webhooks;
//   - what is there is read, and executions are followed to their end by streams that break and are opened again;
//   - two importers in SQL add to one number under a lane, with the functions of the contract.
//
// A request without a key may not fail at all. One with a key, or one that only reads, may be sent again, and gets
// what the first one got; that is counted. In the end every execution is completed, what may happen once has happened
// once, and what was said in a thread is there once and in order.
//
// The new processes are of the same release, or of one with another schema: the program is built with a change of the
// tables and another body in each function, migrates, and replaces the processes of this release. The long form
// builds the programs of the schema versions that a bridge leads from, too. The runs of their processes cannot write
// after the bridge. So requests may be refused until they are replaced; what was refused is there once or not at all.
//
// AGENT_ROLL=long rolls ten times as often.
package rollout
