// Package soak runs all functions of the product at once, with the real program, and then checks the invariants in the
// database.
//
// Two processes of `agent serve` work on one database, the second from the middle on. A scripted model answers by
// rules: it reads the offered tools and the last message, so the same question always gets the same answer. For a while
// the test runs at once
//
//   - heartbeats, by `agent heartbeat` in a loop and by schedule, which pursue an objective;
//   - an admin on POST /v1/operate;
//   - five visitors with the stock Go client, each in a thread: they sometimes send a second message before the answer
//     to the first, and one disconnects in the middle;
//   - a storm of signed webhooks, some of them twice, that raise events, which start automations.
//
// Admin, heartbeats and automations increment one counter in the agent's memory, through the skill memory_write. It
// overwrites only a value that the run has read.
//
// The test then compares the results with the requests. Each invariant is one query that lists violations
// (checks_test.go). It reads the product's tables and a schema `soak` with the test's own records: sent, answered,
// called and logged work. Every query has rows that violate it (planted_test.go).
//
// The second test has a visitor with forbidden requests, and a model that obeys every request. It checks the offered
// tools and the executed calls, not the texts.
//
// An ordinary run is 20 seconds of load; AGENT_SOAK=5m makes it longer. The package exports nothing.
package soak
