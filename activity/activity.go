// Package activity is the structured log of the agent's actions: one row of agent_activity per action.
//
// An action with effects is opened before it acts (status running) and closed afterwards, in the same row. A crash in
// between leaves the running row as evidence; the claim that recovers the run marks it `unknown`. Note writes a
// finished row at once. A row always has a trace id, and a parent where it is part of a larger action, so the rows of
// a trace form a tree.
//
// A flow writes its rows under the live claim of its execution. Fence and row are one statement, so a process that was
// paused past its lease gets ErrStale and changes nothing. Reject then records the rejected write without a fence,
// marked stale. Input and output are redacted and bounded before they leave the process. An action that cannot be
// logged returns an error.
//
// Times are the database's. Ids are time-ordered UUIDs, so newest first is an order by id, and a range of time is a
// range of ids. All functions are safe for concurrent use. The caller decides what commits together: it passes a
// pool, a transaction or a batch.
package activity

import (
	"errors"
	"fmt"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// ErrStale reports a write under a claim that is no longer live.
var ErrStale = errors.New("stale claim: the run was handed on, has ended, or its worker's lease expired")

// Kind is the kind of a row.
type Kind string

// The kinds of rows. A call becomes unknown when its process dies, because it may have had an effect. A phase only
// groups others, and the next claim continues it.
const (
	KindCall  Kind = "call"
	KindModel Kind = "model"
	KindPhase Kind = "phase"
	KindNote  Kind = "note"
)

// Status is the state of an action.
type Status string

// The states of a row.
const (
	Running         Status = "running"
	Success         Status = "success"
	Error           Status = "error"
	PendingApproval Status = "pending_approval"
	Skipped         Status = "skipped"
	Unknown         Status = "unknown"
)

// Statuses returns the names of all states.
func Statuses() []string {
	return []string{
		string(Running), string(Success), string(Error), string(PendingApproval), string(Skipped), string(Unknown),
	}
}

// Entry describes an action before it happens. Skill is required. Empty fields for trace, execution, parent, cause,
// surface and agent come from the context's trace.Span.
type Entry struct {
	TraceID        string
	ExecutionID    string
	Claim          int64 // of the execution; 0 writes without a fence (outside executions only)
	ParentID       string
	CauseID        string // the model call that requested it
	Step           string // key of the durable step
	Kind           Kind
	Agent          string
	Surface        string
	Skill          string
	SkillID        string
	Purpose        string
	Input          any
	Model          string
	IdempotencyKey string
	ThreadID       string
	Lane           string
}

// Outcome describes how an action ended.
type Outcome struct {
	Status  Status
	Output  any
	Message string // of the error; empty for none
	Class   string // a stable word for the kind of error: timeout, http_status, invalid_params, …
	Usage   Usage
	CostUSD float64
	Model   string // as answered, where it differs from the requested one
	// LedTo is the number of calls of each skill in a model call's answer, for the attribution of its cost.
	LedTo map[string]int
}

// wrapError maps a stale claim to ErrStale.
func wrapError(verb string, err error) error {
	switch {
	case err == nil:
		return nil
	case postgres.IsCode(err, "LK001"):
		return fmt.Errorf("%s: %w", verb, ErrStale)
	default:
		return fmt.Errorf("%s: %w", verb, err)
	}
}
