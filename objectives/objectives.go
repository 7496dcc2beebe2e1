// Package objectives owns the agent's objectives: the tables agent_objectives, agent_objective_steps and
// agent_objective_evidence.
//
// An objective has a goal, success criteria and steps. An admin or the model writes steps. A step goes once from
// pending to done, to failed after three attempts, or to skipped, by compare-and-set, with its trace. A declaration
// in the workspace adds steps and changes goals. It never changes results.
//
// A step is done only with evidence: a successful call of the agent, in the reporting trace and since the round
// began, that proves no other step; or an admin's confirmation ([ConfirmStep]). Pending, skipped and failed calls do
// not count. The database enforces it, so a model's claim alone completes nothing. [FindEvidence] finds the calls.
//
// The agent may propose an objective ([Propose]). Work starts after an admin accepts it; the database enforces that.
//
// An active objective is due when its time has come and it has a pending step, or no step at all. Without any step,
// planning is due. Without pending steps it is settled instead ([Advanced], or [Settle] after a lost run). With
// review_every it starts its next round: all steps but the skipped are pending again. Otherwise it is completed, or
// failed if a step failed.
//
// A run without progress delays the objective ([BackOff]): 15 minutes, doubled for each further run, at most a day. A
// new, done, failed or confirmed step, an edit, or another status ends the delay; the database does that.
//
// The worker holds the objective's lane. The compare-and-set on each step keeps the state correct if the lane is
// lost.
package objectives

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
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
	// ErrNoEvidence reports a step without evidence.
	ErrNoEvidence = errors.New("no successful action shows that the step is done")
	// ErrNameTaken reports a proposal under the name of another objective.
	ErrNameTaken = errors.New("an objective of this name exists with another definition")
	// ErrTooMany reports that too many proposals are undecided.
	ErrTooMany = errors.New("too many proposals are undecided")
	// ErrConflict reports an objective at another revision than the caller read.
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

// Unread is the revision that a caller of [SetNote] passes who has not read the objective.
const Unread = -1

// MaxAttempts is the number of failures after which a step is [Failed].
const MaxAttempts = 3

// Sources of objectives: a workspace file, the agent, or an admin's command.
const (
	SourceWorkspace = "workspace"
	SourceAgent     = "agent"
	SourceAdmin     = "admin"
)

const (
	maxText      = 4096
	maxTitle     = 500
	maxSteps     = 100
	maxPriority  = 9
	maxNote      = 4096
	maxUndecided = 20 // undecided proposals
)

// Objective is a row of agent_objectives with the progress of its round.
type Objective struct {
	ID              string `json:"id"`
	Name            string `json:"name"`
	Goal            string `json:"goal"`
	SuccessCriteria string `json:"success_criteria"`
	Status          string `json:"status"`
	// agent of the heartbeat that works on it; empty for the default agent
	Agent              string     `json:"agent"`
	Priority           int        `json:"priority"`             // 1 is first
	ReviewEverySeconds int64      `json:"review_every_seconds"` // 0: completed with its steps
	DueAt              time.Time  `json:"due_at"`
	IdleRuns           int        `json:"idle_runs"` // consecutive runs without progress; each one delays DueAt
	Round              int        `json:"round"`
	Note               string     `json:"note"`           // the agent's last note on its progress
	ProposedBy         string     `json:"proposed_by"`    // the agent; empty for a declaration
	ProposedTrace      string     `json:"proposed_trace"` // trace of the proposal
	DecidedBy          string     `json:"decided_by"`     // the admin who accepted or rejected it
	DecidedReason      string     `json:"decided_reason"`
	DecidedAt          *time.Time `json:"decided_at"`
	Revision           int        `json:"revision"` // grows with each change of its definition or decision
	LastTraceID        string     `json:"last_trace_id"`
	Source             string     `json:"source"`
	CreatedAt          time.Time  `json:"created_at"`
	UpdatedAt          time.Time  `json:"updated_at"`
	Total              int        `json:"total"` // steps without skipped ones
	Done               int        `json:"done"`
	Failed             int        `json:"failed"`
	Pending            int        `json:"pending"`
	Progress           float64    `json:"progress"` // markDone / total, 0 to 1
}

// Step is a row of agent_objective_steps.
type Step struct {
	ID          string    `json:"id"`
	ObjectiveID string    `json:"objective_id"`
	Position    int       `json:"position"`
	Title       string    `json:"title"`
	Status      string    `json:"status"`
	Result      string    `json:"result"` // of the last round, until the next completion
	Attempts    int       `json:"attempts"`
	TraceID     string    `json:"trace_id"`
	StartedAt   time.Time `json:"started_at"` // start of this round; older calls are no evidence
	CreatedAt   time.Time `json:"created_at"`
	UpdatedAt   time.Time `json:"updated_at"`
}

// Evidence is a row of agent_objective_evidence: a successful call, or an admin's confirmation.
type Evidence struct {
	ID         string    `json:"id"`
	StepID     string    `json:"step_id"`
	ActivityID *string   `json:"activity_id"` // nil for an admin's confirmation
	SkillName  string    `json:"skill_name"`
	TraceID    string    `json:"trace_id"`
	GivenBy    string    `json:"given_by"` // the admin
	Reason     string    `json:"reason"`
	CreatedAt  time.Time `json:"created_at"`
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

// AgentFilter selects objectives by agent: one agent's, or, without one, all but those of the others.
type AgentFilter struct {
	Agent  string
	Except []string
}

// Due returns the objectives with work now, by priority and waiting time: active, due, with a pending step or without
// any step. limit is 10 when 0.
func Due(ctx context.Context, db postgres.DB, w AgentFilter, limit int) ([]Objective, error) {
	if limit <= 0 {
		limit = 10
	}
	return postgres.Rows[Objective](ctx, db, "list due objectives", selectObjectives+`
		 where o.status = 'active' and o.due_at <= clock_timestamp() and (p.pending > 0 or p.steps = 0)
		   and case when @agent <> '' then o.agent = @agent else o.agent <> all(@except::text[]) end
		 order by o.priority, o.due_at, o.id limit @limit`,
		pgx.StrictNamedArgs{"agent": w.Agent, "except": append([]string{}, w.Except...), "limit": limit})
}

// Get returns one objective by name or id, or [ErrNotFound].
func Get(ctx context.Context, db postgres.DB, nameOrID string) (Objective, error) {
	return postgres.RowOr[Objective](ctx, db, ErrNotFound, fmt.Sprintf("get objective %q", nameOrID), selectObjectives+`
		 where o.name = @key or o.id::text = @key
		 order by o.id::text = @key desc limit 1`, pgx.StrictNamedArgs{"key": nameOrID})
}

// Steps returns the steps of an objective in order.
func Steps(ctx context.Context, db postgres.DB, objectiveID string) ([]Step, error) {
	return postgres.Rows[Step](ctx, db, "list steps", `
		select id, objective_id, position, title, status, result, attempts, trace_id, started_at, created_at, updated_at
		  from agent_objective_steps where objective_id = @id order by position`, pgx.StrictNamedArgs{"id": objectiveID})
}

// SetStatus pauses, resumes or ends an objective. from is the required status; for another it returns false. Only
// [Accept] and [Reject] decide a proposal.
func SetStatus(ctx context.Context, db postgres.DB, objectiveID, from, to string) (bool, error) {
	tag, err := db.Exec(ctx, `
		update agent_objectives set status = @to, updated_at = clock_timestamp() where id = @id and status = @from
		  and status not in ('proposed', 'rejected') and @to not in ('proposed', 'rejected')`,
		pgx.StrictNamedArgs{"id": objectiveID, "from": from, "to": to})
	return postgres.Changed(tag, err, fmt.Sprintf("set objective to %s", to))
}

// AtRevision locks an objective until the transaction ends. It returns a [*postgres.StaleError] if it has another
// revision, and [ErrNotFound] for none. Revision 0 matches every revision.
func AtRevision(ctx context.Context, tx pgx.Tx, name string, revision int) error {
	return postgres.LockRevision(ctx, tx, "objective", `
		select revision from agent_objectives where name = @name or id::text = @name
		 order by id::text = @name desc limit 1 for update`, name, revision, ErrNotFound)
}

// Propose stores an objective that the agent by proposes, and returns it. Work starts after an admin accepts it.
// Proposing the same again changes nothing. It returns [ErrNameTaken] for the name of a different objective, and
// [ErrTooMany] while 20 proposals are undecided.
func Propose(ctx context.Context, db postgres.Beginner, d Definition, by, traceID string) (o Objective, err error) {
	if err := Validate(d); err != nil {
		return Objective{}, fmt.Errorf("propose objective %q: %w", d.Name, err)
	}
	if strings.TrimSpace(by) == "" || traceID == "" {
		return Objective{}, fmt.Errorf("propose objective %q: the proposer or its trace is missing", d.Name)
	}
	err = postgres.InTx(ctx, db, func(tx pgx.Tx) error {
		id, err := insertProposal(ctx, tx, d, by, traceID)
		if err == nil && id != "" {
			_, err = addSteps(ctx, tx, id, d.Steps)
		}
		if err != nil {
			return err
		}
		if o, err = Get(ctx, tx, d.Name); err == nil && id == "" {
			err = sameProposal(ctx, tx, o, d)
		}
		return err
	})
	if err != nil {
		return Objective{}, fmt.Errorf("propose objective %q: %w", d.Name, err)
	}
	return o, nil
}

// insertProposal inserts the row; no id if the name is taken. A lock makes the count of open proposals exact.
func insertProposal(ctx context.Context, tx pgx.Tx, d Definition, by, traceID string) (id string, err error) {
	review, err := parseReview(d.ReviewEvery)
	if err != nil {
		return "", err
	}
	d.Priority = cmp.Or(d.Priority, defaultPriority)
	if _, err := tx.Exec(ctx,
		`select pg_advisory_xact_lock(hashtextextended('lanekeeper objective proposals', 0))`); err != nil {
		return "", err
	}
	var taken bool
	var open int
	err = tx.QueryRow(ctx, `
		select exists (select from agent_objectives where name = @name),
		       (select count(*) from agent_objectives where status = 'proposed')`,
		pgx.StrictNamedArgs{"name": d.Name}).Scan(&taken, &open)
	if err != nil || taken {
		return "", err
	}
	if open >= maxUndecided {
		return "", ErrTooMany
	}
	err = tx.QueryRow(ctx, `
		insert into agent_objectives (name, goal, success_criteria, priority, review_every, status, proposed_by,
		  proposed_trace, source)
		values (@name, @goal, @criteria, @priority, make_interval(secs => nullif(@review::float8, 0)), 'proposed', @by,
		  @trace_id, @source)
		on conflict (name) do nothing returning id`,
		pgx.StrictNamedArgs{
			"name": d.Name, "goal": strings.TrimSpace(d.Goal), "criteria": strings.TrimSpace(d.SuccessCriteria),
			"priority": d.Priority,
			"review":   review.Seconds(), "by": by, "trace_id": traceID, "source": SourceAgent,
		}).Scan(&id)
	if errors.Is(err, pgx.ErrNoRows) {
		err = nil
	}
	return id, err
}

// sameProposal accepts a repeated, equal proposal.
func sameProposal(ctx context.Context, tx pgx.Tx, o Objective, d Definition) error {
	if o.ProposedBy == "" || o.Goal != strings.TrimSpace(d.Goal) ||
		o.SuccessCriteria != strings.TrimSpace(d.SuccessCriteria) {
		return ErrNameTaken
	}
	var missing bool
	err := tx.QueryRow(ctx, `
		select exists (select from unnest(@titles::text[]) t (title)
		                where not exists (select from agent_objective_steps s where s.objective_id = @id
		                  and s.title = t.title))`,
		pgx.StrictNamedArgs{"id": o.ID, "titles": append([]string{}, d.Steps...)}).Scan(&missing)
	if err == nil && missing {
		err = ErrNameTaken
	}
	return err
}

// Accept activates a proposal for an admin; it is due now. It returns false for an objective that is no proposal. A
// rejected one can still be accepted. [ErrNotFound] reports an unknown one.
func Accept(ctx context.Context, db postgres.DB, nameOrID, by, reason string) (bool, error) {
	return decide(ctx, db, nameOrID, Active, by, reason)
}

// Reject rejects a proposal for an admin. It returns false if the objective is no undecided proposal, and
// [ErrNotFound] for none.
func Reject(ctx context.Context, db postgres.DB, nameOrID, by, reason string) (bool, error) {
	return decide(ctx, db, nameOrID, Rejected, by, reason)
}

func decide(ctx context.Context, db postgres.DB, nameOrID, status, by, reason string) (bool, error) {
	if strings.TrimSpace(by) == "" {
		return false, fmt.Errorf("decide objective %q: an admin is required", nameOrID)
	}
	o, err := Get(ctx, db, nameOrID)
	if err != nil {
		return false, err
	}
	tag, err := db.Exec(ctx, `
		update agent_objectives
		   set status = @status, decided_by = @by, decided_reason = @reason, decided_at = clock_timestamp(),
		       due_at = clock_timestamp(), updated_at = clock_timestamp()
		 where id = @id and (status = 'proposed' or status = 'rejected' and @status = 'active')`,
		pgx.StrictNamedArgs{"id": o.ID, "status": status, "by": truncate(by), "reason": truncate(reason)})
	return postgres.Changed(tag, err, fmt.Sprintf("decide objective %q", nameOrID))
}

// SetNote replaces the note on an objective's progress and returns the objective. revision is the one that the caller
// read, or [Unread], which demands that no note exists; 0 replaces any note. [ErrConflict] reports another revision
// and returns the current objective. [ErrNotActive] reports an objective that is neither active nor proposed.
func SetNote(ctx context.Context, db postgres.DB, nameOrID, note, traceID string, revision int) (Objective, error) {
	if err := checkText("note", note, maxNote); err != nil {
		return Objective{}, fmt.Errorf("set note of objective %q: %w", nameOrID, err)
	}
	o, err := Get(ctx, db, nameOrID)
	if err != nil {
		return Objective{}, err
	}
	if o.Status != Active && o.Status != Proposed && o.Status != Paused {
		return Objective{}, fmt.Errorf("set note of objective %q: %w", nameOrID, ErrNotActive)
	}
	tag, err := db.Exec(ctx, `
		update agent_objectives set note = @note, last_trace_id = @trace_id, updated_at = clock_timestamp()
		 where id = @id and status = @status and (@revision = 0 or revision = @revision or @revision = -1 and note = '')`,
		pgx.StrictNamedArgs{"id": o.ID, "note": note, "trace_id": traceID, "status": o.Status, "revision": revision})
	if err != nil {
		return Objective{}, fmt.Errorf("set note of objective %q: %w", nameOrID, err)
	}
	o, err = Get(ctx, db, o.ID)
	if err == nil && tag.RowsAffected() == 0 {
		err = fmt.Errorf("set note of objective %q: %w", nameOrID, ErrConflict)
	}
	return o, err
}
