package monitor

import (
	"context"
	_ "embed"
	"slices"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

const (
	// failuresRead bounds the failed executions that are read, failuresOfCall the failed calls of one name, and
	// failingNames the names.
	failuresRead, failuresOfCall, failingNames = 200, 30, 30
	// failedScanned bounds the failed executions that are searched for those that count.
	failedScanned = 5000
	// outcomesRead bounds the runs of a flow, or calls of a skill, that are searched for successes.
	outcomesRead = 100
	// newestRead bounds the newest rows of the log that are searched for names, because the counts lag behind.
	newestRead = 500
	// rejectionsRead bounds the rejected approvals that are read. Their executions are no failures.
	rejectionsRead = 500
	// FailingStreak is the number of consecutive failures that makes a flow or skill failing.
	FailingStreak = 3
)

// failure is a failed execution or call.
type failure struct {
	Kind                    string // flow, skill, action, model
	Name, Agent, ID, Parent string // Parent is the id of the parent execution
	TraceID, Message, Step  string // Step is the failed step
	InnerName, InnerStep    string // name and step of the last error inside the execution; empty for none
	InnerMessage, Class     string
	At                      time.Time
	Retried                 bool // the execution has a fork
}

// outcome counts how the newest runs of a flow by an agent, or the newest calls of a name, ended.
type outcome struct {
	Kind, Name, Agent           string // Kind is flow or call; only a flow has an agent
	LatestFailed                bool
	Streak, HourAll, HourFailed int64
	Since                       *time.Time // the first failure of the streak
}

// Failing reports whether the flow or the name fails by the rule of [Verdict].
func (o outcome) Failing() bool {
	return o.LatestFailed && (o.Streak >= FailingStreak || 2*o.HourFailed > o.HourAll)
}

//go:embed failing.sql
var failingSQL string

//go:embed outcomes.sql
var outcomesSQL string

// Failures has the newest failures of the last day, up to the bounds above, and the outcomes of the failed subjects.
type Failures struct {
	list     []failure
	outcomes []outcome
}

// ReadFailures reads the failures.
func ReadFailures(ctx context.Context, db postgres.DB) (result Failures, err error) {
	since := time.Now().Add(-24 * time.Hour)
	result.list, err = postgres.RowsGeneric[failure](ctx, db, "list failures", failingSQL, postgres.Strict{
		"since": since, "max_executions": failuresRead, "max_calls": failuresOfCall, "max_names": failingNames,
		"max_scanned": failedScanned, "max_outcomes": outcomesRead, "newest": newestRead, "rejections": rejectionsRead,
	})
	if err != nil || len(result.list) == 0 {
		return result, err
	}
	flows, calls, models := []string{}, []string{}, false
	for _, f := range result.list {
		switch {
		case f.Kind == "model":
			models = true
		case f.Kind == "flow" && !slices.Contains(flows, f.Name) && len(flows) < failingNames:
			flows = append(flows, f.Name)
		case f.Kind != "flow" && !slices.Contains(calls, f.Name):
			calls = append(calls, f.Name)
		}
	}
	result.outcomes, err = postgres.RowsGeneric[outcome](ctx, db, "read outcomes", outcomesSQL, postgres.Strict{
		"flows": flows, "calls": calls, "models": models, "max_outcomes": outcomesRead, "since": since,
		"hour": time.Now().Add(-time.Hour), "rejections": rejectionsRead,
	})
	return result, err
}

// Failing has the names of the failing flows, and of the failing skills, actions and models.
type Failing struct{ Flows, Calls []string }

// Failing returns the names of the failing subjects.
func (f Failures) Failing() *Failing {
	names := &Failing{Flows: []string{}, Calls: []string{}}
	for _, o := range f.outcomes {
		switch {
		case !o.Failing():
		case o.Kind == "flow":
			names.Flows = append(names.Flows, o.Name)
		default:
			names.Calls = append(names.Calls, o.Name)
		}
	}
	return names
}

// outcomeOf returns the outcome of a failed subject.
func (f Failures) outcomeOf(subject failure) outcome {
	i := slices.IndexFunc(f.outcomes, func(o outcome) bool {
		return o.Name == subject.Name && (subject.Kind != "flow" && o.Kind == "call" || subject.Kind == "flow" &&
			o.Kind == "flow" && o.Agent == subject.Agent)
	})
	if i < 0 {
		return outcome{}
	}
	return f.outcomes[i]
}
