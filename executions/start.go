package executions

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

// What is not given, as the columns and start_agent_executions have it.
const (
	defaultAgent       = "agent"
	defaultPriority    = 2
	defaultOnLost      = "resume"
	defaultMaxAttempts = 5
	noInput            = "{}"
)

// Spec describes an execution to start. Flow and Surface are required.
type Spec struct {
	Flow    string
	Surface trace.Surface
	// TraceID is the trace to belong to; empty begins a new one for the surface.
	TraceID  trace.ID
	Agent    string
	Input    any
	ThreadID string
	ParentID string
	Queue    string // Background (default) or Interactive
	Priority int    // 1 first … 4 last; default 2
	// DedupeKey makes the start idempotent: the second start with a key returns the first's execution.
	DedupeKey string
	// Awaited says that the parent waits for this run: it is cancelled with its parent.
	Awaited bool
	// Inherits lets the run borrow the lanes of the parent that waits for it.
	Inherits bool
	// OnLost is what a worker's loss means: "resume" (default), "fail", or "hand_on" for runs of outside workers.
	OnLost string
	// MaxAttempts is how many workers may be lost without a checkpoint between; default 5.
	MaxAttempts int
	// ProgressSeconds ends a run that has recorded nothing for so long; 0 is no bound.
	ProgressSeconds int
}

// Start inserts a pending execution together with its wake-up, in one transaction of db. With a pool for db, whichever
// it is, the engine uses its own; in a process that runs executions that is one statement, and its workers look at
// once. The second return value is false when the dedupe key was taken; then the execution is the earlier one. A key
// that an open transaction holds is waited for as WithLockPatience says.
func (e *Engine) Start(ctx context.Context, db postgres.Beginner, s Spec) (got Execution, created bool, err error) {
	switch {
	case !isPool(db):
		err = postgres.InTx(ctx, db, func(tx pgx.Tx) (err error) {
			got, created, err = e.StartTx(ctx, tx, s)
			return err
		})
	case e.works():
		return e.startHere(ctx, s)
	default:
		err = e.withKey(ctx, s.lockName(), func(ctx context.Context) error {
			return postgres.InTxWithin(ctx, e.pool, func(tx pgx.Tx) (err error) {
				got, created, err = e.StartTx(ctx, tx, s)
				return err
			})
		})
		err = postgres.ExplainLock(ctx, e.pool, err, s.lockName(), "agent_executions")
	}
	if err != nil {
		return Execution{}, false, err
	}
	return got, created, nil
}

// StartByAdmin is Start in the engine's pool, recorded in its transaction as an act of the admin. reason may be empty.
func (e *Engine) StartByAdmin(ctx context.Context, s Spec, reason string) (got Execution, created bool, err error) {
	act := activity.Act{
		Name: "start_execution", Reason: reason, Within: true, Input: map[string]any{"flow": s.Flow, "thread_id": s.ThreadID},
	}
	err = e.withKey(ctx, s.lockName(), func(ctx context.Context) error {
		_, err := activity.Record(ctx, e.pool, act, func(tx pgx.Tx, _ string) (_ any, err error) {
			if got, created, err = e.StartTx(ctx, tx, s); err != nil || !created {
				return activity.Unchanged, err
			}
			return map[string]string{"execution_id": got.ID, "trace_id": got.TraceID}, nil
		})
		return err
	})
	if err != nil {
		return Execution{}, false, postgres.ExplainLock(ctx, e.pool, err, s.lockName(), "agent_executions")
	}
	if created && e.works() {
		e.Look()
	}
	return got, created, nil
}

// lockName names what another transaction may hold of a start; empty for nothing.
func (s Spec) lockName() string {
	if s.DedupeKey == "" {
		return ""
	}
	return fmt.Sprintf("idempotency key %.300q", s.DedupeKey)
}

// StartTx is Start in a transaction of the caller's: the execution exists when that commits.
func (e *Engine) StartTx(ctx context.Context, tx pgx.Tx, s Spec) (Execution, bool, error) {
	got, created, err := s.insert(ctx, tx, "pending", "", "")
	if err == nil && created {
		err = e.sendHints(ctx, tx, []hint{{got.ID, 0, got.Queue, got.Priority}})
	}
	if err != nil {
		return Execution{}, false, fmt.Errorf("start %s: %w", s.Flow, err)
	}
	return got, created, nil
}

// insertNow is insert in a transaction of its own. While another transaction holds the dedupe key, it tries again.
func (e *Engine) insertNow(ctx context.Context, s Spec, status, worker string) (Execution, bool, error) {
	created := false
	var got Execution
	err := e.withKey(ctx, s.lockName(), func(ctx context.Context) (err error) {
		got, created, err = s.insert(ctx, e.pool, status, worker, lockPatience)
		return err
	})
	return got, created, postgres.ExplainLock(ctx, e.pool, err, s.lockName(), "agent_executions")
}

// insert writes the row. A dedupe key that is taken leads to the row that has it. patience bounds how long it waits for another transaction that
// holds the key; empty for as long as the transaction's lock_timeout says.
func (s Spec) insert(ctx context.Context, db postgres.DB, status, worker, patience string) (Execution, bool, error) {
	o, err := s.opening(status == "running")
	if err != nil {
		return Execution{}, false, err
	}
	rows, err := db.Query(ctx, `
		insert into agent_executions (trace_id, surface, agent, flow, parent_id, awaited, inherits, thread_id, queue, priority, status,
		       claimed_by, claim, started_at, input, dedupe_key, on_lost, max_attempts, progress_seconds)
		select @trace_id, @surface, @agent, @flow, @parent_id, @awaited, @inherits, @thread_id, @queue, @priority, @status::text, @worker,
		       case when @status::text = 'running' then 1 else 0 end,
		       case when @status::text = 'running' then clock_timestamp() end, @input, @dedupe_key,
		       @on_lost, @max_attempts, @progress_seconds
		  from set_config('lock_timeout', coalesce(@patience, current_setting('lock_timeout')), true)
		on conflict do nothing
		returning `+columns, o.arguments(status, worker, patience))
	if err != nil {
		return Execution{}, false, fmt.Errorf("insert execution: %w", err)
	}
	got, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[Execution])
	if err == nil {
		return got, true, nil
	}
	if !errors.Is(err, pgx.ErrNoRows) {
		return Execution{}, false, fmt.Errorf("insert execution: %w", err)
	}
	var id string
	err = db.QueryRow(ctx, `select id::text from agent_executions where dedupe_key = @key`,
		postgres.Strict{"key": s.DedupeKey}).Scan(&id)
	if err != nil {
		return Execution{}, false, fmt.Errorf("read execution of dedupe key %s: %w", s.DedupeKey, err)
	}
	got, err = Get(ctx, db, id)
	return got, false, err
}

// opening is a start as it is sent: what the spec leaves out is filled in.
type opening struct {
	Spec
	input json.RawMessage
	here  bool // for a caller who runs it
}

// opening fills in what is left out.
func (s Spec) opening(here bool) (opening, error) {
	if s.Flow == "" || s.Surface.Prefix() == "" {
		return opening{}, fmt.Errorf("an execution needs a flow and a surface, not %q and %q", s.Flow, s.Surface)
	}
	o := opening{Spec: s, input: json.RawMessage(noInput), here: here}
	if s.Input != nil {
		var err error
		if o.input, err = json.Marshal(s.Input); err != nil {
			return opening{}, fmt.Errorf("encode input: %w", err)
		}
	}
	if s.TraceID == "" {
		o.TraceID = trace.New(s.Surface)
	}
	o.Agent, o.Queue, o.OnLost = cmp.Or(s.Agent, defaultAgent), cmp.Or(s.Queue, Background), cmp.Or(s.OnLost, defaultOnLost)
	o.Priority, o.MaxAttempts = cmp.Or(s.Priority, defaultPriority), cmp.Or(s.MaxAttempts, defaultMaxAttempts)
	return o, nil
}

// arguments are those of a start by itself.
func (o opening) arguments(status, worker, patience string) postgres.Strict {
	return postgres.Strict{
		"trace_id": string(o.TraceID), "surface": string(o.Surface), "agent": o.Agent, "flow": o.Flow,
		"parent_id": null(o.ParentID), "thread_id": null(o.ThreadID), "queue": o.Queue,
		"priority": o.Priority, "status": status, "worker": null(worker), "input": o.input,
		"dedupe_key": null(o.DedupeKey), "awaited": o.Awaited, "inherits": o.Inherits, "on_lost": o.OnLost,
		"max_attempts": o.MaxAttempts, "progress_seconds": o.ProgressSeconds, "patience": null(patience),
	}
}

// null turns an empty string into SQL's null.
func null(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}
