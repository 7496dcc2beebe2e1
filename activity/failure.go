package activity

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/redact"
)

// FailedSpan is a failed span of a trace: an activity or an execution.
type FailedSpan struct {
	ID          string    `json:"id"`           // of the activity or execution
	ExecutionID string    `json:"execution_id"` // an execution's own id; empty for an activity outside executions
	IsExecution bool      `json:"is_execution"`
	IsRoot      bool      `json:"-"` // an execution that no other execution of the trace started
	ParentID    string    `json:"-"` // the containing activity, or the parent execution
	Name        string    `json:"name"`
	Step        string    `json:"step"` // an execution's failed step
	Status      string    `json:"status"`
	Class       string    `json:"error_class"`
	Message     string    `json:"error_message"`
	At          time.Time `json:"at"`
}

// RootCause is the failure that made a trace fail.
type RootCause struct {
	FailedSpan
	Upstream int `json:"upstream"` // failures that pass it on
	Attempts int `json:"attempts"` // failed attempts at its step
}

// String is the cause on one line.
func (c *RootCause) String() string {
	text := plainText(c.Name)
	if message := cmp.Or(plainText(c.Message), plainText(c.Class)); message != "" {
		text += ": " + truncate(message, 300)
	}
	if c.Attempts > 1 {
		text += fmt.Sprintf(", %d attempts", c.Attempts)
	}
	if c.Upstream > 0 {
		text += fmt.Sprintf(", ×%d upstream", c.Upstream)
	}
	return text
}

const (
	maxFailures   = 200    // failures of each kind
	maxExecutions = 1000   // executions in which failures are searched
	maxActivities = 20_000 // activities that are read or searched for failures
	comparedBytes = 300    // the part of a message that another message must contain to pass it on
	minContained  = 12     // a shorter message must end the other message
)

// RootCauseOf reads the failures of a trace and returns their root cause; nil if the trace did not fail.
func RootCauseOf(ctx context.Context, db postgres.DB, traceID string) (*RootCause, error) {
	failures, err := failuresOf(ctx, db, traceID)
	return redacted(FindRootCause(failures)), err
}

// redacted removes secrets from a cause's message and converts its time to UTC; nil stays nil.
func redacted(c *RootCause) *RootCause {
	if c != nil {
		c.Message, c.At = redact.Text(c.Message, 4000), c.At.UTC()
	}
	return c
}

// RootCauseOfExecution is RootCauseOf for one execution of a trace; nil if it did not fail.
func RootCauseOfExecution(ctx context.Context, db postgres.DB, traceID, executionID string) (*RootCause, error) {
	failures, err := failuresOf(ctx, db, traceID)
	failed := false
	for i := range failures {
		failures[i].IsRoot = failures[i].ID == executionID
		failed = failed || failures[i].IsRoot
	}
	if !failed {
		return nil, err
	}
	return redacted(FindRootCause(failures)), err
}

// failuresOf reads the failures of a trace, up to the bounds.
func failuresOf(ctx context.Context, db postgres.DB, traceID string) ([]FailedSpan, error) {
	return postgres.Rows[FailedSpan](ctx, db, "read failures of trace", `
		(select e.id::text, e.id::text as execution_id, true as is_execution, p.id is null as is_root,
		        coalesce(e.parent_id::text, '') as parent_id, left(e.flow, 200) as name,
		        left(coalesce(e.failed_step, ''), 300) as step, e.status, '' as class,
		        left(coalesce(e.error_message, ''), 8000) as message, coalesce(e.completed_at, e.created_at) as at
		   from (select x.id, x.parent_id, x.flow, x.failed_step, x.status, x.error_message, x.completed_at, x.created_at
		           from agent_executions x where x.trace_id = @id order by x.id limit @executions) e
		   left join agent_executions p on p.id = e.parent_id and p.trace_id = @id
		  where e.status in ('failed', 'timeout') order by e.id limit @most)
		union all
		(select a.id::text, coalesce(a.execution_id::text, ''), false, false, coalesce(a.parent_id::text, ''),
		        left(a.skill_name, 200), left(a.step, 300), a.status, left(a.error_class, 100),
		        left(coalesce(a.error_message, ''), 8000), coalesce(a.finished_at, a.created_at)
		   from (select x.id, x.created_at from (
		           select y.id, y.status, y.created_at from agent_activity y
		            where y.trace_id = @id order by y.created_at limit @activities) x
		          where x.status in ('error', 'unknown') order by x.created_at desc limit @most) f
		   join agent_activity a on a.id = f.id)`,
		postgres.Strict{
			"id": traceID, "most": maxFailures, "executions": maxExecutions, "activities": maxActivities,
		})
}

// FindRootCause returns the failure that made a trace fail; nil if none did.
//
// The search begins at the last root execution that failed. In a trace without a failed execution it begins at the
// last failed activity outside executions. A failure passes another one on if its message contains the other's, as
// wrapped errors do. If the first failure passes none on, the search goes on from the deepest failure in its failed
// step. The root cause is the failure passed on with the shortest message. Ties go to a failure in the failed step,
// then to the deepest, then to the latest. If none is passed on, the first failure itself is the root cause. Other
// failures, such as handled errors, are no causes.
func FindRootCause(failures []FailedSpan) *RootCause {
	first := decisive(failures)
	if first < 0 {
		return nil
	}
	chain := passedOn(failures, first)
	if deepest := deepestOfStep(failures, first); len(chain) == 1 && deepest >= 0 {
		chain = append(chain, passedOn(failures, deepest)...)
	}
	inner := chain[1:]
	if len(inner) == 0 {
		inner = chain
	}
	outsideStep := func(f FailedSpan) int {
		if slices.ContainsFunc(chain, func(c int) bool { return failures[c].failedIn(f) }) {
			return 0
		}
		return 1
	}
	best := slices.MinFunc(inner, func(a, b int) int {
		x, y := failures[a], failures[b]
		return cmp.Or(
			cmp.Compare(comparedLength(x), comparedLength(y)), cmp.Compare(outsideStep(x), outsideStep(y)),
			cmp.Compare(depth(failures, b), depth(failures, a)), y.At.Compare(x.At))
	})
	cause := &RootCause{FailedSpan: failures[best], Attempts: 1}
	for i, f := range failures {
		switch {
		case i == best:
		case f.sameStep(cause.FailedSpan):
			cause.Attempts++
		case slices.Contains(chain, i):
			cause.Upstream++
		}
	}
	return cause
}

// decisive returns the index of the failure that the trace ended with; -1 for none.
func decisive(failures []FailedSpan) int {
	last := -1
	for i, f := range failures {
		if f.IsRoot {
			last = i
		}
	}
	if last >= 0 {
		return last
	}
	for i, f := range failures {
		if f.IsExecution {
			return -1 // the root handled it
		}
		if f.ExecutionID == "" && f.Status == string(Error) && (last < 0 || !f.At.Before(failures[last].At)) {
			last = i
		}
	}
	return last
}

// passedOn returns the first failure and those that it passes on, directly or through others.
func passedOn(failures []FailedSpan, first int) []int {
	chain := []int{first}
	for at := 0; at < len(chain); at++ {
		for i := range failures {
			if !slices.Contains(chain, i) && failures[chain[at]].contains(failures[i]) {
				chain = append(chain, i)
			}
		}
	}
	return chain
}

// contains reports whether f's message contains inner's. A short message must be its end, after a colon.
func (f FailedSpan) contains(inner FailedSpan) bool {
	text := strings.TrimSpace(inner.Message)
	if text == "" || f.IsRoot && inner.IsRoot {
		return false
	}
	text = text[:min(len(text), comparedBytes)]
	return f.Message == inner.Message || strings.HasSuffix(f.Message, ": "+text) ||
		len(text) >= minContained && strings.Contains(f.Message, text)
}

// comparedLength is the length of the compared part of a message.
func comparedLength(f FailedSpan) int { return min(len(strings.TrimSpace(f.Message)), comparedBytes) }

// failedIn reports whether inner is an activity in the failed step of execution f.
func (f FailedSpan) failedIn(inner FailedSpan) bool {
	return f.IsExecution && !inner.IsExecution && f.Step != "" && f.ExecutionID == inner.ExecutionID &&
		(inner.Step == f.Step || strings.HasPrefix(inner.Step, f.Step+"/"))
}

// sameStep reports whether two activities are attempts at the same step.
func (f FailedSpan) sameStep(other FailedSpan) bool {
	return !f.IsExecution && !other.IsExecution && f.Step != "" && f.ExecutionID == other.ExecutionID &&
		f.Step == other.Step
}

// deepestOfStep returns the deepest, then latest failure in the failed step of an execution; -1 for none.
func deepestOfStep(failures []FailedSpan, execution int) int {
	best := -1
	for i, f := range failures {
		if !failures[execution].failedIn(f) {
			continue
		}
		if best < 0 || cmp.Or(cmp.Compare(depth(failures, i), depth(failures, best)), f.At.Compare(failures[best].At)) >= 0 {
			best = i
		}
	}
	return best
}

// depth measures how deep a failure is: 100 for each failed execution above it, 1 for each enclosing step.
func depth(failures []FailedSpan, i int) int {
	levels := 0
	if f := failures[i]; !f.IsExecution {
		levels = 1 + strings.Count(f.Step, "/")
	}
	at := failures[i].ExecutionID
	for range len(failures) {
		above := slices.IndexFunc(failures, func(f FailedSpan) bool { return f.IsExecution && f.ID == at })
		if above < 0 || failures[above].ParentID == "" {
			break
		}
		levels, at = levels+100, failures[above].ParentID
	}
	return levels
}
