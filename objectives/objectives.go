// Package objectives owns the agent's objectives: the tables agent_objectives, agent_objective_steps and
// agent_objective_evidence.
//
// An objective has a goal, success criteria and steps. An admin or the model writes steps. In each round, a pending
// step becomes done, or failed after [MaxAttempts] failed attempts. Each transition is a compare-and-set, and stores
// its trace. A skipped step stays skipped; no function of this package skips a step. A declaration in the
// workspace adds steps and changes goals. It never changes results.
//
// A step is done only with evidence: a successful call of the agent, in the reporting trace and since the round
// began, that is not yet the evidence of another step; or an admin's confirmation ([ConfirmStep]). Pending, skipped
// and failed calls do not count. The database enforces it, so a model's claim alone completes nothing. [FindEvidence]
// finds the calls.
//
// The agent may propose an objective ([Propose]). Work starts after an admin accepts it ([Accept]), or after a
// declaration takes its name ([Put]). The database requires decided_by for each status but proposed.
//
// An active objective is due when its due_at has passed. [Due] returns due objectives with a pending step, and those
// without any step, which the model has to plan. A due objective whose steps have all ended is settled ([Advanced], or
// [Settle] after a lost run). With review_every it starts its next round: all steps but the skipped are pending again.
// Otherwise it is completed, or failed if a step failed.
//
// A run without progress delays the objective ([BackOff]): 15 minutes, doubled for each further run, at most a day. A
// new step, an attempt at a step, an edit, or another status ends the delay. Triggers of the database do that.
//
// The worker holds the objective's lane. The compare-and-set on each step keeps the state correct if the lane is
// lost.
package objectives

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

var (
	// ErrNotFound reports an unknown objective.
	ErrNotFound = errors.New("objective not found")
	// ErrStepNotFound reports an unknown step.
	ErrStepNotFound = errors.New("step not found")
	// ErrNotActive reports an objective that accepts no steps.
	ErrNotActive = errors.New("objective is not active")
	// ErrInvalid reports an invalid note or title, or too many steps; the error says why.
	ErrInvalid = errors.New("invalid")
	// ErrNoEvidence reports a step without evidence.
	ErrNoEvidence = errors.New("no successful action shows that the step is done")
	// ErrNameTaken reports a proposal under the name of another objective.
	ErrNameTaken = errors.New("an objective of this name exists with another definition")
	// ErrTooMany reports that too many proposals are undecided.
	ErrTooMany = errors.New("too many proposals are undecided")
	// ErrConflict reports an objective that has changed since the caller read it.
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

// Statuses returns all states of an objective.
func Statuses() []string { return []string{Proposed, Active, Paused, Completed, Failed, Rejected} }

// States of a step; a step may be [Failed] too.
const (
	Pending = "pending"
	Done    = "done"
	Skipped = "skipped"
)

// NoPriorNote is the revision for [SetNote] that allows only the first note.
const NoPriorNote = -1

// Sources of objectives: a workspace file, the agent, or an admin's command.
const (
	SourceWorkspace = "workspace"
	SourceAgent     = "agent"
	SourceAdmin     = "admin"
	SourcePruned    = "pruned" // was SourceWorkspace; Remove paused it
)

// maxNote bounds a note, in bytes.
const maxNote = 4096

// Objective is a row of agent_objectives with the progress of its round.
type Objective struct {
	ID              string `json:"id"`
	Name            string `json:"name"`
	Goal            string `json:"goal"`
	SuccessCriteria string `json:"success_criteria"`
	Status          string `json:"status"`
	// Agent is the agent whose heartbeat works on the objective; empty for the default agent.
	Agent              string     `json:"agent"`
	Priority           int        `json:"priority"`             // 1 comes first
	ReviewEverySeconds int64      `json:"review_every_seconds"` // pause between rounds; 0: there is one round
	DueAt              time.Time  `json:"due_at"`
	IdleRuns           int        `json:"idle_runs"` // consecutive runs without progress; each one delays DueAt
	Round              int        `json:"round"`
	Note               string     `json:"note"`           // the agent's last note on its progress
	ProposedBy         string     `json:"proposed_by"`    // the agent; empty for a declaration
	ProposedTrace      string     `json:"proposed_trace"` // trace of the proposal
	DecidedBy          string     `json:"decided_by"`     // the admin; or the source of the declaration that accepted it
	DecidedReason      string     `json:"decided_reason"`
	DecidedAt          *time.Time `json:"decided_at"`
	// Revision increases with each change, except of DueAt, IdleRuns, LastTraceID and UpdatedAt.
	Revision    int       `json:"revision"`
	LastTraceID string    `json:"last_trace_id"`
	Source      string    `json:"source"`
	CreatedAt   time.Time `json:"created_at"`
	UpdatedAt   time.Time `json:"updated_at"`
	Total       int       `json:"total"` // steps without skipped ones
	Done        int       `json:"done"`
	Failed      int       `json:"failed"`
	Pending     int       `json:"pending"`
	Progress    float64   `json:"progress"` // done / total, 0 to 1
}

// Filter narrows [List]; the zero value lists the newest 100.
type Filter struct {
	Status string
	Source string
	Before string // an id; returns only older rows
	Limit  int    // 100 when 0, at most 1000
}

// selectObjectives selects an objective with its progress.
const selectObjectives = `
		select o.id, o.name, o.goal, o.success_criteria, o.status, o.agent, o.priority,
		       coalesce(extract(epoch from o.review_every), 0)::bigint as review_every_seconds, o.due_at, o.idle_runs,
		       o.round, o.note, o.proposed_by, o.proposed_trace, o.decided_by, o.decided_reason, o.decided_at, o.revision,
		       o.last_trace_id, o.source, o.created_at, o.updated_at, p.total, p.done, p.failed, p.pending,
		       coalesce(round(p.done::numeric / nullif(p.total, 0), 3), 0)::float8 as progress
		  from agent_objectives o, lateral (
		       select count(*) as steps, count(*) filter (where s.status <> 'skipped') as total,
		              count(*) filter (where s.status = 'done') as done,
		              count(*) filter (where s.status = 'failed') as failed,
		              count(*) filter (where s.status = 'pending') as pending
		         from agent_objective_steps s where s.objective_id = o.id) p`

// List returns objectives with their progress, newest first.
func List(ctx context.Context, db postgres.DB, f Filter) ([]Objective, error) {
	if f.Limit <= 0 {
		f.Limit = 100
	}
	return postgres.Rows[Objective](ctx, db, "list objectives", selectObjectives+`
		 where (@status = '' or o.status = @status) and (@source = '' or o.source = @source)
		   and (@before = '' or o.id < nullif(@before, '')::uuid)
		 order by o.id desc limit @limit`,
		pgx.StrictNamedArgs{"status": f.Status, "source": f.Source, "before": f.Before, "limit": min(f.Limit, 1000)})
}

// AgentFilter selects the objectives of one agent or, if Agent is empty, all except those of the agents in Except.
type AgentFilter struct {
	Agent  string
	Except []string
}

// Due returns active objectives whose due_at has passed and that have a pending step or no step at all, by priority and
// due_at. limit is 10 when 0.
func Due(ctx context.Context, db postgres.DB, f AgentFilter, limit int) ([]Objective, error) {
	if limit <= 0 {
		limit = 10
	}
	return postgres.Rows[Objective](ctx, db, "list due objectives", selectObjectives+`
		 where o.status = 'active' and o.due_at <= clock_timestamp() and (p.pending > 0 or p.steps = 0)
		   and case when @agent <> '' then o.agent = @agent else o.agent <> all(@except::text[]) end
		 order by o.priority, o.due_at, o.id limit @limit`,
		pgx.StrictNamedArgs{"agent": f.Agent, "except": append([]string{}, f.Except...), "limit": limit})
}

// Get returns one objective by name or id, or [ErrNotFound].
func Get(ctx context.Context, db postgres.DB, nameOrID string) (Objective, error) {
	return postgres.RowOr[Objective](ctx, db, ErrNotFound, fmt.Sprintf("get objective %q", nameOrID), selectObjectives+`
		 where o.name = @key or o.id::text = @key
		 order by o.id::text = @key desc limit 1`, pgx.StrictNamedArgs{"key": nameOrID})
}

// SetStatus pauses, resumes or ends an objective. It returns false if the objective's status is not from. It decides no
// proposal: [Accept], [Reject] and [Put] do.
func SetStatus(ctx context.Context, db postgres.DB, objectiveID, from, to string) (bool, error) {
	tag, err := db.Exec(ctx, `
		update agent_objectives
		   set status = @to, source = case source when @pruned then @workspace else source end,
		       updated_at = clock_timestamp()
		 where id = @id and status = @from
		   and status not in ('proposed', 'rejected') and @to not in ('proposed', 'rejected')`,
		pgx.StrictNamedArgs{
			"id": objectiveID, "from": from, "to": to, "pruned": SourcePruned, "workspace": SourceWorkspace,
		})
	return postgres.Changed(tag, err, fmt.Sprintf("set objective to %s", to))
}

// LockRevision locks an objective until the transaction ends. It returns a [*postgres.StaleError] if the objective has
// another revision, and [ErrNotFound] if it is unknown. For revision 0, LockRevision does nothing.
func LockRevision(ctx context.Context, tx pgx.Tx, name string, revision int) error {
	return postgres.LockRevision(ctx, tx, "objective", `
		select revision from agent_objectives where name = @name or id::text = @name
		 order by id::text = @name desc limit 1 for update`, name, revision, ErrNotFound)
}

// SetNote replaces the note on an objective's progress and returns the objective. revision is the one that the caller
// read; 0 replaces any note, and [NoPriorNote] requires that there is none. SetNote returns [ErrConflict] and the
// current objective if the objective has another revision, or if its status changes meanwhile. It returns
// [ErrNotActive] for an objective that is not active, paused or proposed, and [ErrInvalid] for an empty or too long
// note.
func SetNote(ctx context.Context, db postgres.DB, nameOrID, note, traceID string, revision int) (Objective, error) {
	if err := checkText("note", note, maxNote); err != nil {
		return Objective{}, fmt.Errorf("set note of objective %q: %w: %w", nameOrID, ErrInvalid, err)
	}
	o, err := Get(ctx, db, nameOrID)
	if err != nil {
		return Objective{}, err
	}
	if o.Status != Active && o.Status != Proposed && o.Status != Paused {
		return Objective{}, fmt.Errorf("set note of objective %q: %w", nameOrID, ErrNotActive)
	}
	tag, err := db.Exec(ctx, `
		update agent_objectives
		   set note = @note, last_trace_id = @trace_id, updated_at = clock_timestamp()
		 where id = @id and status = @status
		   and (@revision = 0 or revision = @revision or @revision = @no_prior_note and note = '')`,
		pgx.StrictNamedArgs{
			"id": o.ID, "note": note, "trace_id": traceID, "status": o.Status, "revision": revision,
			"no_prior_note": NoPriorNote,
		})
	if err != nil {
		return Objective{}, fmt.Errorf("set note of objective %q: %w", nameOrID, err)
	}
	o, err = Get(ctx, db, o.ID)
	if err == nil && tag.RowsAffected() == 0 {
		err = fmt.Errorf("set note of objective %q: %w", nameOrID, ErrConflict)
	}
	return o, err
}
