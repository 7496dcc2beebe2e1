// Package randomflows runs random flows of the Go API in processes under faults, and compares each result with a model
// of the flow.
//
// A number determines a flow. It has steps that succeed, fail, exceed a limit of their own or contain others, effects
// in the database (StepTx), and calls that may or may not be repeated. It waits for events, for time, for children and
// for events that never come. It has branches that run and wait at the same time, phases, scopes, long loops,
// variables, and lanes of threads with several contenders, nested to some depth. Few names of steps exist, so
// occurrences count. Three processes, which are this test binary started again, run many of them on one database.
// Meanwhile processes are killed with kill -9, stopped past their lease, or ended by SIGTERM and replaced. Their
// connections break, some between the server's receipt of a request and the arrival of its answer. The agent is paused
// and resumed. Events come before and after their waits, and twice.
//
// The model is the same flow without any fault. In the end
//
//   - every execution is completed, with the result and the variables that the model computes, and its replay equals
//     its record;
//   - the writes of StepTx exist exactly once;
//   - a repeatable call was made, under one key; a non-repeatable one was made once, or is recorded as unknown and was
//     made once at most;
//   - an execution in a thread's lane is alone in it, from its begin to its end, for every fate of its process;
//   - a parent has each of its children once, each end was reported once, and each event ended one wait;
//   - nothing is left: no claim, no open call, no wait;
//   - a fork from any recorded step, run without faults, has the result of its execution, and its replay equals its
//     record.
//
// For each of the first points, planted_test.go has a database that violates it.
//
// An ordinary run has 80 flows and ten seconds of faults; AGENT_FLOWS=1000 has that many flows, and a minute for every
// 500. A run's random choices follow from a seed, which a failed one prints; AGENT_FLOW_SEED sets it. The package
// exports nothing.
package randomflows
