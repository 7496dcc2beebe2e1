// Package objectives is what the agent works towards: the tables agent_objectives, agent_objective_steps and
// agent_objective_evidence.
//
// An objective has a goal, criteria of success and steps. Steps are rows, written down by an admin or planned by the
// model, and each is taken once: it goes from pending to done, to failed after three attempts, or to skipped, by
// compare-and-set, with the trace that did it. A declaration in the workspace adds steps and changes goals; it never
// touches what was done.
//
// A step is done only with evidence: a successful call that the agent made, under the trace that reports the step and
// since the step's round began, and that proves no other step; or an admin's word ([ConfirmStep]). What awaits
// approval, was skipped or failed never counts. The database refuses a step that is done without it, whoever writes,
// so nothing that a model says completes a step; [FindEvidence] looks the calls up.
//
// The agent may propose an objective ([Propose]). A proposal is not worked on until an admin accepts it, and the
// database keeps it a proposal until the row says who decided.
//
// An objective is due when it is active, its time has come, and there is something to do: a pending step, or no step
// at all, which means that it has yet to be planned. One whose steps have all ended is not due but to be settled
// ([Advanced], or [Settle] for those that a lost run left behind): with review_every it begins its next round then,
// all steps pending again but the skipped, otherwise it is completed, or failed if a step failed.
//
// A run that changes no step makes the objective due later ([BackOff]): 15 minutes, twice as long after each further
// one, a day at most. A step that is added, done, failed or confirmed, and an edit or another status, end that; the
// database sees to it.
//
// Who advances an objective holds its lane; the compare-and-set on each step keeps the ledger right even if that lane
// was lost on the way.
package objectives

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
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

// Filter narrows [List]; the zero value lists the newest 100.
type Filter struct {
	Status string
	Source string
	Before string // an id: only older rows
	Limit  int    // 100 when 0, at most 1000
}

// selected is an objective with its progress.
const selected = `
		select o.id, o.name, o.goal, o.success_criteria, o.status, o.agent, o.priority,
		       coalesce(extract(epoch from o.review_every), 0)::bigint as review_every_seconds, o.due_at, o.idle_runs, o.round, o.note,
		       o.proposed_by, o.proposed_trace, o.decided_by, o.decided_reason, o.decided_at, o.revision, o.last_trace_id,
		       o.source, o.created_at, o.updated_at, p.total, p.done, p.failed, p.pending,
		       coalesce(round(p.done::numeric / nullif(p.total, 0), 3), 0)::float8 as progress
		  from agent_objectives o, lateral (
		       select count(*) as steps, count(*) filter (where s.status <> 'skipped') as total,
		              count(*) filter (where s.status = 'done') as done, count(*) filter (where s.status = 'failed') as failed,
		              count(*) filter (where s.status = 'pending') as pending
		         from agent_objective_steps s where s.objective_id = o.id) p`

// List returns objectives with their progress, newest first.
func List(ctx context.Context, db postgres.DB, f Filter) ([]Objective, error) {
	if f.Limit <= 0 {
		f.Limit = 100
	}
	rows, err := db.Query(ctx, selected+`
		 where (@status = '' or o.status = @status) and (@source = '' or o.source = @source)
		   and (@before = '' or o.id < nullif(@before, '')::uuid)
		 order by o.id desc limit @limit`,
		pgx.StrictNamedArgs{"status": f.Status, "source": f.Source, "before": f.Before, "limit": min(f.Limit, 1000)})
	return collect("list objectives", rows, err)
}

// Whose says whose objectives are meant: those of an agent, or, without one, all but those of others.
type Whose struct {
	Agent  string
	Except []string
}

// Due returns the objectives that have work now, the most important and longest waiting first: active,
// their time come, with a pending step or with no step at all. limit is 10 when 0.
func Due(ctx context.Context, db postgres.DB, w Whose, limit int) ([]Objective, error) {
	if limit <= 0 {
		limit = 10
	}
	rows, err := db.Query(ctx, selected+`
		 where o.status = 'active' and o.due_at <= clock_timestamp() and (p.pending > 0 or p.steps = 0)
		   and case when @agent <> '' then o.agent = @agent else o.agent <> all(@except::text[]) end
		 order by o.priority, o.due_at, o.id limit @limit`,
		pgx.StrictNamedArgs{"agent": w.Agent, "except": append([]string{}, w.Except...), "limit": limit})
	return collect("list due objectives", rows, err)
}

// Get returns one objective by its name or id, or [ErrNotFound].
func Get(ctx context.Context, db postgres.DB, nameOrID string) (Objective, error) {
	rows, err := db.Query(ctx, selected+`
		 where o.name = @key or o.id::text = @key
		 order by o.id::text = @key desc limit 1`, pgx.StrictNamedArgs{"key": nameOrID})
	found, err := collect(fmt.Sprintf("get objective %q", nameOrID), rows, err)
	if err == nil && len(found) == 0 {
		err = fmt.Errorf("get objective %q: %w", nameOrID, ErrNotFound)
	}
	if err != nil {
		return Objective{}, err
	}
	return found[0], nil
}

func collect(what string, rows pgx.Rows, err error) ([]Objective, error) {
	if err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	found, err := pgx.CollectRows(rows, pgx.RowToStructByName[Objective])
	if err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	return found, nil
}

// Steps returns the steps of an objective in their order.
func Steps(ctx context.Context, db postgres.DB, objectiveID string) ([]Step, error) {
	rows, err := db.Query(ctx, `
		select id, objective_id, position, title, status, result, attempts, trace_id, started_at, created_at, updated_at
		  from agent_objective_steps where objective_id = @id order by position`, pgx.StrictNamedArgs{"id": objectiveID})
	if err != nil {
		return nil, fmt.Errorf("list steps: %w", err)
	}
	steps, err := pgx.CollectRows(rows, pgx.RowToStructByName[Step])
	if err != nil {
		return nil, fmt.Errorf("list steps: %w", err)
	}
	return steps, nil
}

// SetStatus pauses, resumes or ends an objective by hand: from is the status it must have. False when
// it has another. A proposal is decided with [Accept] or [Reject] and with nothing else.
func SetStatus(ctx context.Context, db postgres.DB, objectiveID, from, to string) (bool, error) {
	tag, err := db.Exec(ctx, `
		update agent_objectives set status = @to, updated_at = clock_timestamp() where id = @id and status = @from and status not in ('proposed', 'rejected') and @to not in ('proposed', 'rejected')`,
		pgx.StrictNamedArgs{"id": objectiveID, "from": from, "to": to})
	if err != nil {
		return false, fmt.Errorf("set objective to %s: %w", to, err)
	}
	return tag.RowsAffected() > 0, nil
}

// AtRevision locks an objective until the end of the transaction, so that what follows is based on what the caller
// has read. It is a [*postgres.StaleError] when the objective is at another revision, and [ErrNotFound] when there is
// none. 0 is whatever it is at.
func AtRevision(ctx context.Context, tx pgx.Tx, name string, revision int) error {
	if revision == 0 {
		return nil
	}
	var current int
	err := tx.QueryRow(ctx, `
		select revision from agent_objectives where name = @name or id::text = @name
		 order by id::text = @name desc limit 1 for update`,
		postgres.Strict{"name": name}).Scan(&current)
	if errors.Is(err, pgx.ErrNoRows) {
		err = ErrNotFound
	}
	if err != nil {
		return fmt.Errorf("look at objective %q: %w", name, err)
	}
	return postgres.AtRevision("objective", name, revision, current)
}

// Propose writes down an objective that the agent by wants to pursue, and returns it. It is not worked on until
// an admin accepts it. Proposing the same again changes nothing; [ErrTaken] when the name belongs to an
// objective that says something else, [ErrTooMany] when 20 proposals await a decision.
func Propose(ctx context.Context, db postgres.Beginner, d Definition, by, traceID string) (o Objective, err error) {
	if err := Validate(d); err != nil {
		return Objective{}, fmt.Errorf("propose objective %q: %w", d.Name, err)
	}
	if strings.TrimSpace(by) == "" || traceID == "" {
		return Objective{}, fmt.Errorf("propose objective %q: say who proposes it, under which trace", d.Name)
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

// insertProposal writes the row; no id when the name is taken. The lock makes the count of open ones exact.
func insertProposal(ctx context.Context, tx pgx.Tx, d Definition, by, traceID string) (id string, err error) {
	review, err := parseReview(d.ReviewEvery)
	if err != nil {
		return "", err
	}
	if d.Priority == 0 {
		d.Priority = defaultPriority
	}
	if _, err := tx.Exec(ctx, `select pg_advisory_xact_lock(hashtextextended('lanekeeper objective proposals', 0))`); err != nil {
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
	if open >= maxOpen {
		return "", ErrTooMany
	}
	err = tx.QueryRow(ctx, `
		insert into agent_objectives (name, goal, success_criteria, priority, review_every, status, proposed_by, proposed_trace, source)
		values (@name, @goal, @criteria, @priority, make_interval(secs => nullif(@review::float8, 0)), 'proposed', @by, @trace_id, @source)
		on conflict (name) do nothing returning id`,
		pgx.StrictNamedArgs{
			"name": d.Name, "goal": strings.TrimSpace(d.Goal), "criteria": strings.TrimSpace(d.SuccessCriteria), "priority": d.Priority,
			"review": review.Seconds(), "by": by, "trace_id": traceID, "source": SourceAgent,
		}).Scan(&id)
	if errors.Is(err, pgx.ErrNoRows) {
		err = nil
	}
	return id, err
}

// sameProposal lets a proposal pass that was made before, in the same words.
func sameProposal(ctx context.Context, tx pgx.Tx, o Objective, d Definition) error {
	if o.ProposedBy == "" || o.Goal != strings.TrimSpace(d.Goal) || o.SuccessCriteria != strings.TrimSpace(d.SuccessCriteria) {
		return ErrTaken
	}
	var missing bool
	err := tx.QueryRow(ctx, `
		select exists (select from unnest(@titles::text[]) t (title)
		                where not exists (select from agent_objective_steps s where s.objective_id = @id and s.title = t.title))`,
		pgx.StrictNamedArgs{"id": o.ID, "titles": append([]string{}, d.Steps...)}).Scan(&missing)
	if err == nil && missing {
		err = ErrTaken
	}
	return err
}

// Accept makes a proposal active, due now, by an admin's decision. False when it is not a proposal; a rejected
// one may be accepted still. [ErrNotFound] when there is no such objective.
func Accept(ctx context.Context, db postgres.DB, nameOrID, by, reason string) (bool, error) {
	return decide(ctx, db, nameOrID, Active, by, reason)
}

// Reject refuses a proposal, by an admin's decision. False when it is not an undecided proposal;
// [ErrNotFound] when there is no such objective.
func Reject(ctx context.Context, db postgres.DB, nameOrID, by, reason string) (bool, error) {
	return decide(ctx, db, nameOrID, Rejected, by, reason)
}

func decide(ctx context.Context, db postgres.DB, nameOrID, status, by, reason string) (bool, error) {
	if strings.TrimSpace(by) == "" {
		return false, fmt.Errorf("decide objective %q: name the admin who does it", nameOrID)
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
		pgx.StrictNamedArgs{"id": o.ID, "status": status, "by": storable(by), "reason": storable(reason)})
	if err != nil {
		return false, fmt.Errorf("decide objective %q: %w", nameOrID, err)
	}
	return tag.RowsAffected() > 0, nil
}

// SetNote replaces the note on an objective's progress and returns the objective. revision is the one that the caller
// has read, or [Unread]: then there must be no note. With [ErrConflict], which tells that it is otherwise, the
// objective is returned as it is. 0 replaces whatever is there. It is [ErrNotActive] for an objective that is not
// worked on or proposed.
func SetNote(ctx context.Context, db postgres.DB, nameOrID, note, traceID string, revision int) (Objective, error) {
	if err := checkText("note", note, maxNote); err != nil {
		return Objective{}, fmt.Errorf("note objective %q: %w", nameOrID, err)
	}
	o, err := Get(ctx, db, nameOrID)
	if err != nil {
		return Objective{}, err
	}
	if o.Status != Active && o.Status != Proposed && o.Status != Paused {
		return Objective{}, fmt.Errorf("note objective %q: %w", nameOrID, ErrNotActive)
	}
	tag, err := db.Exec(ctx, `
		update agent_objectives set note = @note, last_trace_id = @trace_id, updated_at = clock_timestamp()
		 where id = @id and status = @status and (@revision = 0 or revision = @revision or @revision = -1 and note = '')`,
		pgx.StrictNamedArgs{"id": o.ID, "note": note, "trace_id": traceID, "status": o.Status, "revision": revision})
	if err != nil {
		return Objective{}, fmt.Errorf("note objective %q: %w", nameOrID, err)
	}
	o, err = Get(ctx, db, o.ID)
	if err == nil && tag.RowsAffected() == 0 {
		err = fmt.Errorf("note objective %q: %w", nameOrID, ErrConflict)
	}
	return o, err
}
