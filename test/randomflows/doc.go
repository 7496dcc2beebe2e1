// Package randomflows runs random flows of the Go API in processes under faults, and compares each result with a model
// of the flow.
//
// A number determines a flow. It has steps that succeed, fail, exceed their own limit or contain others, effects in the
// database (StepTx), and repeatable and non-repeatable calls. It waits for events, for time, for children and for
// events that never come. It has branches that run and wait at the same time, phases, scopes, long loops, variables,
// and thread lanes with several contenders, nested to some depth. There are few step names, so occurrences count. Three
// processes, which are this test binary started again, run many flows on one database. Meanwhile the test kills
// processes with kill -9, stops them past their lease, or ends them with SIGTERM and replaces them. It breaks their
// connections, some between the server's receipt of a request and the arrival of its answer. It pauses and resumes the
// agent. Events come before and after their waits, and twice.
//
// The model is the same flow without faults. At the end
//
//   - every execution is completed, with the model's result and variables, and its replay equals its record;
//   - the writes of StepTx exist exactly once;
//   - a repeatable call was made, under one key; a non-repeatable one was made once, or is recorded as unknown and was
//     made at most once;
//   - an execution in a thread's lane is alone in it, from its begin to its end, whatever happens to its process;
//   - a parent has each of its children once, each end was emitted once, and each event ended one wait;
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
