package executions

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

// Defaults of a Spec. The columns and start_agent_executions have the same defaults.
const (
	defaultAgent       = "agent"
	defaultPriority    = 2
	defaultOnLost      = "resume"
	defaultMaxAttempts = 5
	emptyInput         = "{}"
)

// Spec describes an execution to start. Flow and Surface are required.
type Spec struct {
	Flow    string
	Surface trace.Surface
	// TraceID is the trace of the execution; empty starts a new trace for the surface.
	TraceID  trace.ID
	Agent    string
	Input    any
	ThreadID string
	ParentID string
	Queue    string // Background (default) or Interactive
	Priority int    // 1 first … 4 last; default 2
	// DedupeKey makes the start idempotent: a second start with the key returns the first execution.
	DedupeKey string
	// Awaited says that the parent waits for this execution, so a cancel of the parent cancels it.
	Awaited bool
	// Inherits lets the execution borrow the lanes of its waiting parent.
	Inherits bool
	// OnLost says what happens when the worker is lost: "resume" (default), "fail" (default of external workers), or
	// "hand_on" for executions of external workers.
	OnLost string
	// MaxAttempts is the number of lost workers without a checkpoint between them that fails the execution; default 5.
	MaxAttempts int
	// ProgressSeconds fails an execution that records no checkpoint for that time. With OnLost "hand_on" it only loses its
	// worker. 0 means no limit.
	ProgressSeconds int
	Labels          Labels
}

// Start inserts a pending execution and wakes a worker, in one transaction of db. If db is a pool, Start uses the
// engine's own pool. In a process that runs executions, most starts are one statement, which also claims the execution
// for a free worker. created is false if an execution has the dedupe key already; then Start returns that execution.
// WithLockTimeout bounds the wait for an open transaction that holds the key.
func (e *Engine) Start(ctx context.Context, db postgres.Beginner, s Spec) (x Execution, created bool, err error) {
	switch {
	case !isPool(db):
		err = postgres.InTx(ctx, db, func(tx pgx.Tx) (err error) {
			x, created, err = e.StartTx(ctx, tx, s)
			return err
		})
	case e.dispatching():
		return e.startLocal(ctx, s)
	default:
		err = e.withKey(ctx, s.lockName(), func(ctx context.Context) error {
			return postgres.InTxWithin(ctx, e.pool, func(tx pgx.Tx) (err error) {
				x, created, err = e.StartTx(ctx, tx, s)
				return err
			})
		})
		err = postgres.ExplainLock(ctx, e.pool, err, s.lockName(), "agent_executions")
	}
	if err != nil {
		return Execution{}, false, err
	}
	e.claimable.wake(s.Flow)
	return x, created, nil
}

// StartByAdmin starts an execution and records the admin's action in the same transaction. reason may be empty. The
// start of a child is recorded in the parent's trace.
func (e *Engine) StartByAdmin(ctx context.Context, s Spec, reason string) (x Execution, created bool, err error) {
	act := activity.Act{
		Name: "start_execution", Reason: reason, Within: true, Input: map[string]any{"flow": s.Flow, "thread_id": s.ThreadID},
	}
	if s.ParentID != "" {
		act.Input["parent_id"] = s.ParentID
		act.TraceID = string(s.TraceID)
	}
	err = e.withKey(ctx, s.lockName(), func(ctx context.Context) error {
		_, err := activity.Record(ctx, e.pool, act, func(tx pgx.Tx, _ string) (_ any, err error) {
			if x, created, err = e.StartTx(ctx, tx, s); err != nil || !created {
				return activity.Unchanged, err
			}
			return map[string]string{"execution_id": x.ID, "trace_id": x.TraceID}, nil
		})
		return err
	})
	if err != nil {
		return Execution{}, false, postgres.ExplainLock(ctx, e.pool, err, s.lockName(), "agent_executions")
	}
	if created && e.dispatching() {
		e.Poll()
	}
	e.claimable.wake(s.Flow)
	return x, created, nil
}

// lockName describes the key that another transaction may hold. It is empty without a key.
func (s Spec) lockName() string {
	if s.DedupeKey == "" {
		return ""
	}
	return fmt.Sprintf("idempotency key %.300q", s.DedupeKey)
}

// StartTx starts an execution in the caller's transaction.
func (e *Engine) StartTx(ctx context.Context, tx pgx.Tx, s Spec) (Execution, bool, error) {
	x, created, err := s.insert(ctx, tx, "pending", "", "")
	if err == nil && created {
		err = e.insertWakeups(ctx, tx, []wakeup{{x.ID, 0, x.Queue, x.Priority}})
	}
	if err != nil {
		return Execution{}, false, fmt.Errorf("start %s: %w", s.Flow, err)
	}
	return x, created, nil
}

// insertWithRetry inserts in its own transaction, and retries while another transaction holds the dedupe key.
func (e *Engine) insertWithRetry(ctx context.Context, s Spec, status, worker string) (Execution, bool, error) {
	created := false
	var x Execution
	err := e.withKey(ctx, s.lockName(), func(ctx context.Context) (err error) {
		x, created, err = s.insert(ctx, e.pool, status, worker, lockTimeout)
		return err
	})
	return x, created, postgres.ExplainLock(ctx, e.pool, err, s.lockName(), "agent_executions")
}

// insert inserts the row and its labels, and records the actor of ctx as requester. If the dedupe key exists, it
// returns the existing row. lockTimeout bounds the wait for another transaction with the key; if it is empty, the
// transaction keeps its own setting.
func (s Spec) insert(
	ctx context.Context, db postgres.Beginner, status, worker, lockTimeout string,
) (x Execution, created bool, err error) {
	if len(s.Labels) == 0 && !activity.HasActor(ctx) {
		return s.insertRow(ctx, db, status, worker, lockTimeout)
	}
	err = postgres.InTx(ctx, db, func(tx pgx.Tx) error {
		x, created, err = s.insertRow(ctx, tx, status, worker, lockTimeout)
		if err != nil || !created {
			return err
		}
		if len(s.Labels) > 0 {
			if err := setLabels(ctx, tx, x.ID, s.Labels, true); err != nil {
				return err
			}
		}
		return activity.RecordRequester(ctx, tx, "execution "+x.ID)
	})
	return x, created, err
}

// insertRow is insert without labels and requester.
func (s Spec) insertRow(
	ctx context.Context, db postgres.DB, status, worker, lockTimeout string,
) (Execution, bool, error) {
	p, err := s.insertParams(status == "running")
	if err != nil {
		return Execution{}, false, err
	}
	rows, err := db.Query(ctx, `
		insert into agent_executions (trace_id, surface, agent, flow, parent_id, awaited, inherits, thread_id, queue,
		  priority, status, claimed_by, claim, started_at, input, dedupe_key, on_lost, max_attempts, progress_seconds)
		select @trace_id, @surface, @agent, @flow, @parent_id, @awaited, @inherits, @thread_id, @queue, @priority,
		       @status::text, @worker, case when @status::text = 'running' then 1 else 0 end,
		       case when @status::text = 'running' then clock_timestamp() end, @input, @dedupe_key, @on_lost, @max_attempts,
		       @progress_seconds
		  from set_config('lock_timeout', coalesce(@lock_timeout, current_setting('lock_timeout')), true)
		on conflict do nothing
		returning `+columns, p.namedArgs(status, worker, lockTimeout))
	if err != nil {
		return Execution{}, false, fmt.Errorf("insert execution: %w", err)
	}
	x, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[Execution])
	if err == nil {
		return x, true, nil
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
	x, err = Get(ctx, db, id)
	if err == nil && IsExternal(x.Flow) != IsExternal(s.Flow) {
		return Execution{}, false, fmt.Errorf("%s already started execution %s of flow %s: use another key, "+
			"such as one that begins with the program's name", s.lockName(), x.ID, x.Flow)
	}
	return x, false, err
}

// insertParams is a Spec with its defaults applied and its input encoded.
type insertParams struct {
	Spec
	input           json.RawMessage
	claimedByCaller bool // the insert claims the execution for a caller of this process
}

// insertParams validates the Spec and applies the defaults.
func (s Spec) insertParams(claimedByCaller bool) (insertParams, error) {
	if s.Flow == "" || s.Surface.Prefix() == "" {
		return insertParams{}, fmt.Errorf("an execution needs a flow and a surface, not %q and %q", s.Flow, s.Surface)
	}
	p := insertParams{Spec: s, input: json.RawMessage(emptyInput), claimedByCaller: claimedByCaller}
	if s.Input != nil {
		var err error
		if p.input, err = json.Marshal(s.Input); err != nil {
			return insertParams{}, fmt.Errorf("encode input: %w", err)
		}
	}
	if s.TraceID == "" {
		p.TraceID = trace.New(s.Surface)
	}
	p.Agent, p.Queue, p.OnLost = cmp.Or(s.Agent, defaultAgent), cmp.Or(s.Queue, Background),
		cmp.Or(s.OnLost, defaultOnLost)
	p.Priority, p.MaxAttempts = cmp.Or(s.Priority, defaultPriority), cmp.Or(s.MaxAttempts, defaultMaxAttempts)
	switch {
	case p.Priority < 1 || p.Priority > 4:
		return insertParams{}, fmt.Errorf("priority must be 1 to 4, got %d", p.Priority)
	case p.MaxAttempts < 1:
		return insertParams{}, fmt.Errorf("the number of lost workers must be 1 or more, got %d", p.MaxAttempts)
	case p.ProgressSeconds < 0:
		return insertParams{}, fmt.Errorf("the progress timeout must be 0 seconds or more, got %d", p.ProgressSeconds)
	}
	return p, nil
}

// namedArgs returns the arguments of a single insert.
func (p insertParams) namedArgs(status, worker, lockTimeout string) postgres.Strict {
	return postgres.Strict{
		"trace_id": string(p.TraceID), "surface": string(p.Surface), "agent": p.Agent, "flow": p.Flow,
		"parent_id": null(p.ParentID), "thread_id": null(p.ThreadID), "queue": p.Queue,
		"priority": p.Priority, "status": status, "worker": null(worker), "input": p.input,
		"dedupe_key": null(p.DedupeKey), "awaited": p.Awaited, "inherits": p.Inherits, "on_lost": p.OnLost,
		"max_attempts": p.MaxAttempts, "progress_seconds": p.ProgressSeconds, "lock_timeout": null(lockTimeout),
	}
}

// null converts an empty string to SQL's null.
func null(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}

// isPool reports whether db is a pool, not the caller's transaction or connection.
func isPool(db postgres.Beginner) bool {
	_, pool := db.(*pgxpool.Pool)
	return pool
}
