// Package automations is what the agent does on its own: the tables agent_automations and
// agent_automation_runs.
//
// An automation calls a skill, or gives the model a goal, for one of three reasons:
//
//	cron    a time of a schedule has come. The run's unique key is the claim: of any number of processes that see
//	        it, one inserts the row ([Claim]), and the same transaction moves the automation to its next
//	        time. A time that came while nobody was there is run once, not once for each that was missed:
//	        the next time is the first after the database's now.
//	event   something was recorded in agent_events. A trigger makes a run due in the event's own transaction,
//	        whoever raised it; a condition over the event and the counters may let it pass unused.
//	signal  a condition over the counters has become true ([Watch]).
//
// Every run is claimed before anything runs ([Claim], [Take]), by a statement that one of many callers wins. A process
// that dies after that has left a row that says so. Package runner runs what is claimed.
//
// The agent may propose an automation ([Propose]). It is out of service until an admin accepts it, and the database
// keeps it so until the row says who decided.
//
// A run whose execution was cancelled, or failed for good, is claimed by nobody any more; [Abandoned] finds it,
// to be ended with [Finish] like any other that failed.
//
// A failed run is tried again, later each time, until the automation's attempts are used up; then
// it is dead, and stays there to be looked at ([Runs]) or tried again by hand ([Redrive]).
//
// The automations of a skill are paused when it is disabled, whoever does that, and exactly those ([PausedFor]) resume when
// it is enabled: what an admin disabled, before or since, stays disabled. The database does it, so no writer has to.
package automations

import (
	"encoding/json"
	"errors"
	"time"
)

var (
	// ErrNotFound reports an automation that does not exist.
	ErrNotFound = errors.New("automation not found")
	// ErrRunNotFound reports a run that does not exist.
	ErrRunNotFound = errors.New("automation run not found")
	// ErrTaken reports a proposal whose name another automation has.
	ErrTaken = errors.New("an automation of this name exists and says something else")
	// ErrTooMany reports that the agent has proposed enough until somebody decides.
	ErrTooMany = errors.New("too many proposals are undecided")
	// ErrProposal reports a proposal that has to be accepted first.
	ErrProposal = errors.New("it is a proposal; accept it first")
	// ErrSkillDisabled reports an automation whose skill is out of service: nothing was changed.
	ErrSkillDisabled = errors.New("its skill is disabled")
)

// Triggers.
const (
	Cron   = "cron"
	Event  = "event"
	Signal = "signal"
)

// Manual is the cause of a run by an admin's hand; the others are the triggers.
const Manual = "manual"

// maxOpen is how many proposals may await a decision.
const maxOpen = 20

// States of a run.
const (
	DueNow  = "due"     // an event, a signal or an admin wants it; nobody has it yet
	Claimed = "claimed" // somebody runs it, or died doing so
	Success = "success"
	Error   = "error" // to be tried again at its retry_at
	Dead    = "dead"  // the attempts are used up
	Skipped = "skipped"
)

// SelfHeal is who disabled an automation that is paused for a skill which self-heal disabled.
const SelfHeal = "self_heal"

// Proposal is who disabled an automation that the agent proposed and nobody accepted.
const Proposal = "proposal"

// Sources of automations: a workspace file, the agent itself.
const (
	SourceWorkspace = "workspace"
	SourceAgent     = "agent"
)

// Automation is a row of agent_automations.
type Automation struct {
	ID             string          `json:"id"`
	Name           string          `json:"name"`
	Description    string          `json:"description"`
	Agent          string          `json:"agent"` // who acts in its runs; empty: the default agent
	Trigger        string          `json:"trigger"`
	Cron           string          `json:"cron"`
	Timezone       string          `json:"timezone"`
	Event          string          `json:"event"`
	Condition      string          `json:"condition"` // over the event and the counters; empty: always
	Signal         string          `json:"signal"`    // over the counters
	Armed          bool            `json:"armed"`     // the signal was false since it last fired
	SkillName      string          `json:"skill_name"`
	Arguments      json.RawMessage `json:"arguments"`
	Prompt         string          `json:"prompt"`
	Flow           string          `json:"flow"`
	MaxAttempts    int             `json:"max_attempts"`
	Enabled        bool            `json:"enabled"`
	DisabledReason string          `json:"disabled_reason"`
	DisabledBy     string          `json:"disabled_by"`
	DisabledAt     *time.Time      `json:"disabled_at"`
	PausedFor      string          `json:"paused_for"`  // the skill for which it is paused
	ProposedBy     string          `json:"proposed_by"` // the agent; empty for what people declared
	DecidedBy      string          `json:"decided_by"`  // who accepted or refused it
	Revision       int             `json:"revision"`    // grows when what it says, or what was decided, changes
	NextRunAt      *time.Time      `json:"next_run_at"` // nil for events and signals
	LastRunAt      *time.Time      `json:"last_run_at"`
	LastTraceID    string          `json:"last_trace_id"`
	Source         string          `json:"source"`
	CreatedAt      time.Time       `json:"created_at"`
	UpdatedAt      time.Time       `json:"updated_at"`
}

// Run is a row of agent_automation_runs.
type Run struct {
	ID           string          `json:"id"`
	AutomationID string          `json:"automation_id"`
	Cause        string          `json:"cause"` // cron, event, signal, manual
	ScheduledFor time.Time       `json:"scheduled_for"`
	EventID      *string         `json:"event_id"`
	Status       string          `json:"status"`
	Attempt      int             `json:"attempt"`
	RetryAt      *time.Time      `json:"retry_at"`
	ExecutionID  *string         `json:"execution_id"`
	TraceID      string          `json:"trace_id"`
	ErrorMessage *string         `json:"error_message"`
	Output       json.RawMessage `json:"output"`
	CreatedAt    time.Time       `json:"created_at"`
	FinishedAt   *time.Time      `json:"finished_at"`
}

// AwaitedApproval is the approval that the run's call waits for; empty when it waits for none.
func (r Run) AwaitedApproval() string {
	var output struct {
		ApprovalID string `json:"approval_id"`
	}
	if r.Status != Skipped || json.Unmarshal(r.Output, &output) != nil {
		return ""
	}
	return output.ApprovalID
}
