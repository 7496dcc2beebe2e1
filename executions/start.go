package executions

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/batch"
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
	// OnLost says what happens when the worker is lost: "resume" (default), "fail", or "hand_on" for executions of
	// external workers.
	OnLost string
	// MaxAttempts is the number of workers that may be lost without a checkpoint between them; default 5.
	MaxAttempts int
	// ProgressSeconds ends an execution that records no checkpoint for that time; 0 means no limit.
	ProgressSeconds int
	Labels          Labels
}

// Start inserts a pending execution and wakes a worker, in one transaction of db. If db is a pool, Start uses the
// engine's own pool. In a process that runs executions, Start needs one statement, and a free worker starts at once.
// created is false if an execution has the dedupe key already; then Start returns that execution. WithLockTimeout
// bounds the wait for an open transaction that holds the key.
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

// StartByAdmin starts an execution and records the admin's action in the same transaction. reason may be empty.
func (e *Engine) StartByAdmin(ctx context.Context, s Spec, reason string) (x Execution, created bool, err error) {
	act := activity.Act{
		Name: "start_execution", Reason: reason, Within: true, Input: map[string]any{"flow": s.Flow, "thread_id": s.ThreadID},
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
	if p.Priority < 1 || p.Priority > 4 || p.MaxAttempts < 1 || p.ProgressSeconds < 0 {
		return insertParams{}, fmt.Errorf("priority must be 1 to 4, max attempts 1 or more, progress seconds 0 or more; "+
			"got %d, %d and %d", p.Priority, p.MaxAttempts, p.ProgressSeconds)
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

// startLocal starts an execution in a process that runs executions. If a worker is free and no queued execution comes
// first, the insert also claims the execution, so the flow runs after one round trip. Otherwise the execution is
// queued. Concurrent starts share a statement.
func (e *Engine) startLocal(ctx context.Context, s Spec) (Execution, bool, error) {
	// A start with a dedupe key may wait for another transaction and would delay a batch. Labels and a requester need
	// further rows.
	if s.DedupeKey != "" || len(s.Labels) > 0 || activity.HasActor(ctx) {
		return e.startPending(ctx, s)
	}
	p, err := s.insertParams(false)
	if err != nil {
		return Execution{}, false, fmt.Errorf("start %s: %w", s.Flow, err)
	}
	single := func() (Execution, error) {
		x, err := e.startBatch(ctx, []insertParams{p})
		if postgres.IsCode(err, pausedCode) { // the agent was paused meanwhile
			queued, _, err := e.startPending(ctx, s)
			return queued, err
		}
		if err != nil {
			return Execution{}, err
		}
		return x[0].Value, nil
	}
	var x Execution
	if postgres.IsSealed(ctx) { // a replay must not join a batch
		x, err = single()
	} else {
		x, err = e.batchers.starts.Do(ctx, p, single)
	}
	if err != nil {
		return Execution{}, false, fmt.Errorf("start %s: %w", s.Flow, err)
	}
	return x, true, nil
}

// startPending inserts a queued execution and wakes a worker of this process.
func (e *Engine) startPending(ctx context.Context, s Spec) (Execution, bool, error) {
	x, created, err := e.insertWithRetry(ctx, s, "pending", "")
	if err != nil {
		return Execution{}, false, fmt.Errorf("start %s: %w", s.Flow, err)
	}
	if created {
		e.notifyReady(x.Queue, 1)
	}
	return x, created, nil
}

// startBatch inserts executions in one statement and runs those that it claimed for free workers.
//
// If all executions are claimed by their callers, the commit does not wait for the disk. The next commit of the run
// makes such a start durable, and the caller gets no result before. If the server crashes before that commit, the
// execution does not exist and its run ends with an error. All other starts are durable when startBatch returns. If the
// lease of this process has ended, the statement queues the executions instead of claiming them.
func (e *Engine) startBatch(ctx context.Context, inserts []insertParams) ([]batch.Result[Execution], error) {
	if len(inserts) > 1 {
		bounded, cancel := context.WithTimeout(ctx, e.opts.LeaseTTL)
		defer cancel()
		ctx = bounded
	}
	worker, err := e.WorkerID(ctx)
	if err != nil {
		return nil, err
	}
	queued := 0
	for i := range inserts {
		if !inserts[i].claimedByCaller {
			queued++
		}
	}
	reserved := e.reserveSlots(queued)
	defer reserved.release()
	args, err := startBatchArgs(inserts)
	if err != nil {
		return nil, err
	}
	args["worker"], args["slots"] = worker, []int{reserved.background, reserved.interactive}
	args["durable"] = queued > 0
	args["skip"] = append(e.pools[Background].skippedFlows(), e.pools[Interactive].skippedFlows()...)
	rows, err := e.pool.Query(ctx, `
		select n, id::text, claimed, at, parent_id::text, on_lost, input,
		       case when n = 1 and claimed and not @durable then set_config('synchronous_commit', 'off', true) end
		  from lanekeeper.start_agent_executions(@traces, @surfaces, @flows, (@inputs::text[])::jsonb[], @options, @worker,
		                                         @slots, @skip)`, args)
	if err != nil {
		return nil, err
	}
	results := make([]batch.Result[Execution], len(inserts))
	var position int
	var row startedRow
	dest := []any{&position, &row.id, &row.claimed, &row.at, &row.parent, &row.onLost, &row.input, nil}
	_, err = pgx.ForEachRow(rows, dest, func() error {
		row.execution(&results[position-1].Value, &inserts[position-1], worker)
		row.input = nil // so the next row does not overwrite it
		return nil
	})
	if err != nil {
		return nil, err
	}
	for i := range results {
		x := &results[i].Value
		switch {
		case inserts[i].claimedByCaller:
			continue
		case x.ClaimedBy == nil:
			e.notifyReady(x.Queue, 1)
			continue
		}
		claimed := claimedExecution{Execution: *x, checkpoints: map[string]Checkpoint{}, interrupted: map[string]bool{}}
		reserved.start(claimed, worker)
	}
	return results, nil
}

// startedRow has the columns of a started execution that the database sets.
type startedRow struct {
	id, onLost string
	claimed    bool
	at         time.Time
	parent     *string
	input      json.RawMessage
}

// execution sets x to the inserted row, as a query would read it.
func (row *startedRow) execution(x *Execution, p *insertParams, worker string) {
	*x = Execution{
		ID: row.id, ParentID: row.parent, Input: row.input, OnLost: row.onLost, Status: Pending,
		Variables: json.RawMessage("{}"), CreatedAt: row.at, UpdatedAt: row.at,
		TraceID: string(p.TraceID), Surface: string(p.Surface), Agent: p.Agent, Flow: p.Flow,
		ThreadID: null(p.ThreadID), Queue: p.Queue, Priority: p.Priority,
		MaxAttempts: p.MaxAttempts, Progress: p.ProgressSeconds, Inherits: p.Inherits,
	}
	if row.claimed {
		at := row.at
		x.Status, x.ClaimedBy, x.Claim, x.StartedAt = Running, &worker, 1, &at
	}
}

// startBatchArgs returns the arguments of start_agent_executions that describe the executions. An argument is null if
// all executions have the default.
func startBatchArgs(inserts []insertParams) (postgres.Strict, error) {
	n := len(inserts)
	traces, surfaces, flows, inputs, options := make([]string, n), make([]string, n), make([]string, n), make([]string, n),
		make([]startOptions, n)
	for i := range inserts {
		p := &inserts[i]
		traces[i], surfaces[i], flows[i], inputs[i], options[i] = string(p.TraceID), string(p.Surface), p.Flow,
			string(p.input), p.options()
	}
	args := postgres.Strict{"traces": traces, "surfaces": surfaces, "flows": flows, "inputs": nil, "options": nil}
	if slices.ContainsFunc(inputs, func(input string) bool { return input != emptyInput }) {
		args["inputs"] = inputs
	}
	if slices.ContainsFunc(options, func(p startOptions) bool { return p != startOptions{} }) {
		text, err := json.Marshal(options)
		if err != nil {
			return nil, fmt.Errorf("encode options: %w", err)
		}
		args["options"] = json.RawMessage(text)
	}
	return args, nil
}

// startOptions are parameters for which most starts use the defaults.
type startOptions struct {
	Queued      bool   `json:"queued,omitempty"`
	Queue       string `json:"queue,omitempty"`
	Agent       string `json:"agent,omitempty"`
	ParentID    string `json:"parent_id,omitempty"`
	Awaited     bool   `json:"awaited,omitempty"`
	Inherits    bool   `json:"inherits,omitempty"`
	ThreadID    string `json:"thread_id,omitempty"`
	Priority    int    `json:"priority,omitempty"`
	OnLost      string `json:"on_lost,omitempty"`
	MaxAttempts int    `json:"max_attempts,omitempty"`
	Progress    int    `json:"progress_seconds,omitempty"`
}

// options returns the parameters that differ from their defaults.
func (p *insertParams) options() startOptions {
	return startOptions{
		Queued: !p.claimedByCaller, ParentID: p.ParentID, Awaited: p.Awaited, Inherits: p.Inherits, ThreadID: p.ThreadID,
		Progress: p.ProgressSeconds,
		Queue:    zeroIfDefault(p.Queue, Background), Agent: zeroIfDefault(p.Agent, defaultAgent),
		OnLost:   zeroIfDefault(p.OnLost, defaultOnLost),
		Priority: zeroIfDefault(p.Priority, defaultPriority), MaxAttempts: zeroIfDefault(p.MaxAttempts, defaultMaxAttempts),
	}
}

func zeroIfDefault[T comparable](value, defaultValue T) T {
	if value == defaultValue {
		var zero T
		return zero
	}
	return value
}
