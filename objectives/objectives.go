// Package objectives is what the agent works towards: the tables agent_objectives, agent_objective_steps
// and agent_objective_evidence.
//
// An objective has a goal, criteria of success and steps. Steps are rows, written down by an admin or planned
// by the model, and each is taken once: it goes from pending to done, to failed after three attempts, or to
// skipped, by compare-and-set, with the trace that did it. A declaration in the workspace adds steps and
// changes goals; it never touches what was done.
//
// A step is done only with evidence: a successful call that the agent made, under the trace that reports the
// step and since the step's round began, and that proves no other step; or an admin's word ([ConfirmStep]).
// What awaits approval, was skipped or failed never counts. The database refuses a step that is done without
// it, whoever writes, so nothing that a model says completes a step; [FindEvidence] looks the calls up.
//
// The agent may propose an objective ([Propose]). A proposal is not worked on until an admin accepts it, and
// the database keeps it a proposal until the row says who decided.
//
// An objective is due when it is active, its time has come, and there is something to do: a pending step, or
// no step at all, which means that it has yet to be planned. One whose steps have all ended is not
// due but to be settled ([Advanced], or [Settle] for those that a lost run left behind): with
// review_every it begins its next round then, all steps pending again but the skipped, otherwise it
// is completed, or failed if a step failed.
//
// A run that changes no step makes the objective due later ([BackOff]): 15 minutes, twice as long after each further one,
// a day at most. A step that is added, done, failed or confirmed, and an edit or another status, end that; the database
// sees to it.
//
// Who advances an objective holds its lane; the compare-and-set on each step keeps the ledger right
// even if that lane was lost on the way.
package objectives

import (
	"errors"
	"time"
)

var (
	// ErrNotFound reports an objective that does not exist.
	ErrNotFound = errors.New("objective not found")
	// ErrStepNotFound reports a step that does not exist.
	ErrStepNotFound = errors.New("step not found")
	// ErrNotActive reports an objective that takes no more steps.
	ErrNotActive = errors.New("objective is not active")
	// ErrNoEvidence reports a step that nothing shows to be done.
	ErrNoEvidence = errors.New("no successful action shows that the step is done")
	// ErrTaken reports a proposal whose name another objective has.
	ErrTaken = errors.New("an objective of this name exists and says something else")
	// ErrTooMany reports that the agent has proposed enough until somebody decides.
	ErrTooMany = errors.New("too many proposals are undecided")
	// ErrConflict reports an objective that is not at the revision the caller read.
	ErrConflict = errors.New("objective was changed by somebody else; read it again")
)

// States of an objective.
const (
	Active    = "active"
	Paused    = "paused"
	Completed = "completed"
	Failed    = "failed"
	Proposed  = "proposed" // by the agent, undecided
	Rejected  = "rejected" // by an admin
)

// States of a step; a step may be [Failed] too.
const (
	Pending = "pending"
	Done    = "done"
	Skipped = "skipped"
)

// Unread as the revision of [SetNote] says that the caller has not read the objective.
const Unread = -1

// MaxAttempts is how often a step may fail before it is [Failed].
const MaxAttempts = 3

// Sources of objectives: a workspace file, the agent itself, an admin's command.
const (
	SourceWorkspace = "workspace"
	SourceAgent     = "agent"
	SourceAdmin     = "admin"
)

const (
	maxText     = 4096
	maxTitle    = 500
	maxSteps    = 100
	maxPriority = 9
	maxNote     = 4096
	maxOpen     = 20 // undecided proposals
)

// Objective is a row of agent_objectives with the progress of its round.
type Objective struct {
	ID                 string     `json:"id"`
	Name               string     `json:"name"`
	Goal               string     `json:"goal"`
	SuccessCriteria    string     `json:"success_criteria"`
	Status             string     `json:"status"`
	Agent              string     `json:"agent"`                // whose heartbeat works on it; empty: the default agent
	Priority           int        `json:"priority"`             // 1 comes first
	ReviewEverySeconds int64      `json:"review_every_seconds"` // 0: done when its steps are
	DueAt              time.Time  `json:"due_at"`
	IdleRuns           int        `json:"idle_runs"` // runs in a row without progress, each of which has put DueAt off
	Round              int        `json:"round"`
	Note               string     `json:"note"`           // the agent's last word on its progress
	ProposedBy         string     `json:"proposed_by"`    // the agent; empty for what people declared
	ProposedTrace      string     `json:"proposed_trace"` // under which it was
	DecidedBy          string     `json:"decided_by"`     // who accepted or rejected it
	DecidedReason      string     `json:"decided_reason"`
	DecidedAt          *time.Time `json:"decided_at"`
	Revision           int        `json:"revision"` // grows when what it says, or what was decided, changes
	LastTraceID        string     `json:"last_trace_id"`
	Source             string     `json:"source"`
	CreatedAt          time.Time  `json:"created_at"`
	UpdatedAt          time.Time  `json:"updated_at"`
	Total              int        `json:"total"` // steps, the skipped left out
	Done               int        `json:"done"`
	Failed             int        `json:"failed"`
	Pending            int        `json:"pending"`
	Progress           float64    `json:"progress"` // done of total, 0 to 1
}

// Step is a row of agent_objective_steps.
type Step struct {
	ID          string    `json:"id"`
	ObjectiveID string    `json:"objective_id"`
	Position    int       `json:"position"`
	Title       string    `json:"title"`
	Status      string    `json:"status"`
	Result      string    `json:"result"` // of the last round, until it is done again
	Attempts    int       `json:"attempts"`
	TraceID     string    `json:"trace_id"`
	StartedAt   time.Time `json:"started_at"` // of this round; nothing older is evidence
	CreatedAt   time.Time `json:"created_at"`
	UpdatedAt   time.Time `json:"updated_at"`
}

// Evidence is a row of agent_objective_evidence: a successful call, or an admin's word.
type Evidence struct {
	ID         string    `json:"id"`
	StepID     string    `json:"step_id"`
	ActivityID *string   `json:"activity_id"` // nil for an admin's word
	SkillName  string    `json:"skill_name"`
	TraceID    string    `json:"trace_id"`
	GivenBy    string    `json:"given_by"` // the admin
	Reason     string    `json:"reason"`
	CreatedAt  time.Time `json:"created_at"`
}
