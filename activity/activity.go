// Package activity is the structured log of what the agent did: one row of agent_activity per action.
//
// An action with effects is opened before it acts (status running) and closed after, as the same row.
// A crash in between leaves the running row, which is honest evidence; the claim that recovers the run
// turns it into `unknown`. What is known at once is written by Note in one go. A row always has a trace
// id, and a parent where the action was part of a larger one, so the rows of a trace form a tree.
//
// What it promises: a row of an execution is written only under that execution's live claim. The fence
// and the row are one statement, so a process that was paused past its lease and wakes gets ErrStale and
// changes nothing; Reject then keeps what it wanted to write, marked stale, so that the ledger is
// complete. Input and output are redacted and bounded before they leave the process. An action that
// cannot be logged is an error for whoever acts: nothing is swallowed.
//
// Times are the database's. Ids are time-ordered uuids, so newest-first is an order by id and a range of
// time is a range of ids. All functions are safe for concurrent use; what commits together is decided
// by the caller, who passes a pool, a transaction or a batch.
package activity

import (
	"errors"
	"fmt"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// ErrStale reports a write under a claim that is no longer the execution's live one.
var ErrStale = errors.New("stale claim: the run was handed on, has ended, or its worker's lease expired")

// Kind says what sort of action a row is.
type Kind string

// The kinds of rows. A call may have had an effect when its process dies, so it becomes unknown then; a
// phase only groups others, and the next claim goes on with it.
const (
	KindCall  Kind = "call"
	KindModel Kind = "model"
	KindPhase Kind = "phase"
	KindNote  Kind = "note"
)

// Status is how an action stands.
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

// Usage is what a model call consumed, in tokens. UnknownTokens of TotalTokens, and UnknownUSD of the call's cost,
// are what the provider may have billed and did not report: the worst case of requests without an answer, the
// estimate of answers without usage. CachedTokens and CacheWriteTokens are part of PromptTokens: what the provider
// had read before, and what it keeps.
type Usage struct {
	PromptTokens     int     `json:"prompt_tokens"`
	CachedTokens     int     `json:"cached_tokens,omitempty"`
	CacheWriteTokens int     `json:"cache_write_tokens,omitempty"`
	CompletionTokens int     `json:"completion_tokens"`
	TotalTokens      int     `json:"total_tokens"`
	Estimated        bool    `json:"estimated,omitempty"`
	UnknownTokens    int     `json:"unknown_tokens,omitempty"`
	UnknownUSD       float64 `json:"unknown_usd,omitempty"`
}

// Entry describes an action before it happens. Skill is required; trace, execution, parent, cause,
// surface and agent are taken from the context's trace.Span where they are empty.
type Entry struct {
	TraceID        string
	ExecutionID    string
	Claim          int64 // of the execution; 0 writes without a fence (outside executions only)
	ParentID       string
	CauseID        string // the model call whose answer asked for it
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
	Message string // of the error; empty when there is none
	Class   string // a stable word for the sort of error: timeout, http_status, invalid_params, …
	Usage   Usage
	CostUSD float64
	Model   string // as answered, where it differs from what was asked
	// LedTo is how often the answer of a model call calls each skill: what the call is charged to.
	LedTo map[string]int
}

// translate names what the database refused.
func translate(verb string, err error) error {
	switch {
	case err == nil:
		return nil
	case postgres.IsCode(err, "LK001"):
		return fmt.Errorf("%s: %w", verb, ErrStale)
	default:
		return fmt.Errorf("%s: %w", verb, err)
	}
}
