// Package soak runs all surfaces of the product at once, with the real program, and then checks the invariants in the
// database.
//
// Two processes of `agent serve` work on one database, the second from the middle on. A scripted model answers by
// rules: it reads the system prompt, the last message and the results of its calls since then. For a while the test
// runs at once
//
//   - heartbeats, by `agent heartbeat` in a loop and by schedule, which pursue an objective;
//   - an admin on POST /v1/operate;
//   - five visitors with the stock Go client, each in a thread: they sometimes send a second message before the answer
//     to the first, and one disconnects in the middle;
//   - a storm of signed webhooks, some of them twice, that raise events, which start automations.
//
// Admin, heartbeats and automations increment one counter in the agent's memory, through the skill memory_write. The
// skill overwrites a value only at the revision that the run has read.
//
// The test then compares the results with the requests. Each invariant is one query that lists violations
// (soak_test.go). It reads the product's tables and a schema `soak` with the test's own records: sent, answered,
// called and logged work. Every query has rows that violate it (planted_test.go).
//
// In visitor_test.go, a visitor sends forbidden requests to a model that obeys every request. The tests check the
// offered tools and the executed calls. One test searches the texts for secrets.
//
// An ordinary run is 20 seconds of load, with -short 10; AGENT_SOAK=5m makes it longer. The package exports nothing.
package soak
