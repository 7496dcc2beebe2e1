// Package soak lets everything that the product does happen at once, with the real program, and then asks the
// database whether all of it holds together.
//
// Two processes of `agent serve` work on one database, the second from the middle on. A scripted model answers by
// rules: it looks at the tools it is offered and at what it was told last, so that the same question always gets the
// same answer. For a while there are at once
//
//   - heartbeats, by `agent heartbeat` in a loop and by the clock, which pursue an objective;
//   - an admin on POST /v1/operate;
//   - five visitors with the stock Go client, each in a thread, who now and then send a second message before
//     the first is answered, and one of whom hangs up in the middle;
//   - a storm of signed webhooks, some of them twice, that raise events, which start automations.
//
// Admin, heartbeats and automations count one counter in the agent's memory up, through the skill memory_write, which
// writes only over what a run has read.
//
// What was done is then compared with what was asked for. Each invariant is one query that lists violations
// (checks_test.go), over the product's tables and a schema `soak` that holds what only the test
// can know: what was sent, answered, called, and logged. Every query is tested by rows that violate it
// (planted_test.go).
//
// The second test is a visitor who wants what visitors may not have, and a model that does whatever it is told. What
// counts is what the model was offered and what was executed, not what anybody said.
//
// An ordinary run is 20 seconds of load; AGENT_SOAK=5m makes it longer. There is nothing here to import.
package soak
