// Package randomflows runs random flows of the Go API in processes to which everything happens, and asks whether each
// ended as a model of it says.
//
// A flow is drawn from a number: steps that succeed, fail, are cut short by a limit of their own and are made of
// others, effects in the database (StepTx), calls that may be repeated and calls that may not, waits for events, for
// time, for children and for what never comes, branches that run at the same time and wait beside each other, phases,
// scopes, long loops, variables and lanes of threads that several want, in each other to some depth. Names of steps
// are drawn from few, so that occurrences count. Three processes, which are this test binary started again, run many
// of them on one database. Meanwhile processes are killed with kill -9, stopped past their lease, ended by SIGTERM
// and replaced, their connections break, some after the server has taken a request and before its answer has come,
// and the agent is paused and goes on. Events come before and after they are waited for, and twice.
//
// The model is the same flow without any of it. In the end
//
//   - every execution is completed, with the result and the variables that the model computes, and its replay equals
//     its record;
//   - what StepTx wrote is there exactly once;
//   - a call that may be repeated was made, under one key; one that may not was made once, or is called unknown and
//     was made once at most;
//   - who is in a thread's lane is alone in it, from its begin to its end, whatever happened to its process;
//   - a parent has each of its children once, each end was told once, and each event ended one wait;
//   - nothing is left: no claim, no open call, no wait;
//   - a fork from any recorded step, run in peace, comes to what its execution came to, and its replay to what it has
//     on record.
//
// Each of the first is tested by a database in which it does not hold (planted_test.go).
//
// An ordinary run has 80 flows and ten seconds of trouble; AGENT_FLOWS=1000 has so many, and a minute for every 500.
// What a run draws follows from a seed, which a failed one prints; AGENT_FLOW_SEED sets it. There is nothing here to
// import.
package randomflows
