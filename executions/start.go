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

// What is not given, as the columns and start_agent_executions have it.
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
// that an open transaction holds is waited for as WithLockTimeout says.
func (e *Engine) Start(ctx context.Context, db postgres.Beginner, s Spec) (got Execution, created bool, err error) {
	switch {
	case !isPool(db):
		err = postgres.InTx(ctx, db, func(tx pgx.Tx) (err error) {
			got, created, err = e.StartTx(ctx, tx, s)
			return err
		})
	case e.dispatching():
		return e.startLocal(ctx, s)
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
	if created && e.dispatching() {
		e.Poll()
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
		err = e.insertWakeups(ctx, tx, []wakeup{{got.ID, 0, got.Queue, got.Priority}})
	}
	if err != nil {
		return Execution{}, false, fmt.Errorf("start %s: %w", s.Flow, err)
	}
	return got, created, nil
}

// insertWithRetry is insert in a transaction of its own. While another transaction holds the dedupe key, it tries
// again.
func (e *Engine) insertWithRetry(ctx context.Context, s Spec, status, worker string) (Execution, bool, error) {
	created := false
	var got Execution
	err := e.withKey(ctx, s.lockName(), func(ctx context.Context) (err error) {
		got, created, err = s.insert(ctx, e.pool, status, worker, lockTimeout)
		return err
	})
	return got, created, postgres.ExplainLock(ctx, e.pool, err, s.lockName(), "agent_executions")
}

// insert writes the row. A dedupe key that is taken leads to the row that has it. patience bounds how long it waits
// for another transaction that holds the key; empty for as long as the transaction's lock_timeout says.
func (s Spec) insert(ctx context.Context, db postgres.DB, status, worker, lockTimeout string) (Execution, bool, error) {
	o, err := s.insertParams(status == "running")
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
		returning `+columns, o.namedArgs(status, worker, lockTimeout))
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

// insertParams is a start as it is sent: what the spec leaves out is filled in.
type insertParams struct {
	Spec
	input           json.RawMessage
	claimedByCaller bool // for a caller who runs it
}

// insertParams fills in what is left out.
func (s Spec) insertParams(claimedByCaller bool) (insertParams, error) {
	if s.Flow == "" || s.Surface.Prefix() == "" {
		return insertParams{}, fmt.Errorf("an execution needs a flow and a surface, not %q and %q", s.Flow, s.Surface)
	}
	o := insertParams{Spec: s, input: json.RawMessage(emptyInput), claimedByCaller: claimedByCaller}
	if s.Input != nil {
		var err error
		if o.input, err = json.Marshal(s.Input); err != nil {
			return insertParams{}, fmt.Errorf("encode input: %w", err)
		}
	}
	if s.TraceID == "" {
		o.TraceID = trace.New(s.Surface)
	}
	o.Agent, o.Queue, o.OnLost = cmp.Or(s.Agent, defaultAgent), cmp.Or(s.Queue, Background), cmp.Or(s.OnLost, defaultOnLost)
	o.Priority, o.MaxAttempts = cmp.Or(s.Priority, defaultPriority), cmp.Or(s.MaxAttempts, defaultMaxAttempts)
	return o, nil
}

// namedArgs are those of a start by itself.
func (o insertParams) namedArgs(status, worker, lockTimeout string) postgres.Strict {
	return postgres.Strict{
		"trace_id": string(o.TraceID), "surface": string(o.Surface), "agent": o.Agent, "flow": o.Flow,
		"parent_id": null(o.ParentID), "thread_id": null(o.ThreadID), "queue": o.Queue,
		"priority": o.Priority, "status": status, "worker": null(worker), "input": o.input,
		"dedupe_key": null(o.DedupeKey), "awaited": o.Awaited, "inherits": o.Inherits, "on_lost": o.OnLost,
		"max_attempts": o.MaxAttempts, "progress_seconds": o.ProgressSeconds, "patience": null(lockTimeout),
	}
}

// null turns an empty string into SQL's null.
func null(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}

// startLocal starts an execution in a process that runs executions. As long as this process has workers free and
// nothing else is to come before it, it begins claimed by one of them, so that one round trip lies between the call
// and the function. Starts at the same time share a statement. The rest goes to the queue, where workers look at
// once.
func (e *Engine) startLocal(ctx context.Context, s Spec) (Execution, bool, error) {
	if s.DedupeKey != "" { // another transaction may hold the key: not one to wait for with others
		return e.startPending(ctx, s)
	}
	o, err := s.insertParams(false)
	if err != nil {
		return Execution{}, false, fmt.Errorf("start %s: %w", s.Flow, err)
	}
	alone := func() (Execution, error) {
		got, err := e.startBatch(ctx, []insertParams{o})
		if postgres.IsCode(err, pausedCode) { // paused in this moment
			queued, _, err := e.startPending(ctx, s)
			return queued, err
		}
		if err != nil {
			return Execution{}, err
		}
		return got[0].Value, nil
	}
	var got Execution
	if postgres.IsSealed(ctx) { // a replay: the seal is to refuse it, and others must not take it along
		got, err = alone()
	} else {
		got, err = e.batchers.starts.Do(ctx, o, alone)
	}
	if err != nil {
		return Execution{}, false, fmt.Errorf("start %s: %w", s.Flow, err)
	}
	return got, true, nil
}

// startPending inserts an execution that the workers of this process look for at once.
func (e *Engine) startPending(ctx context.Context, s Spec) (Execution, bool, error) {
	got, created, err := e.insertWithRetry(ctx, s, "pending", "")
	if err != nil {
		return Execution{}, false, fmt.Errorf("start %s: %w", s.Flow, err)
	}
	if created {
		e.notifyReady(got.Queue, 1)
	}
	return got, created, nil
}

// startBatch starts executions in one statement, and puts workers to those that it claimed.
//
// Who starts one for others waits until it is on disk. Where each is for a caller who runs it here, nobody is told
// before it has ended, and what is committed after it makes it durable with itself: its first record, the intent of a
// call, a lane, its end. So the statement does not wait for the disk, unless the lease of this process has ended, so
// that they are in the queue, of which callers are told. A server that crashes before any of these has never had the
// execution, and the run, whose claim is gone, ends with an error.
func (e *Engine) startBatch(ctx context.Context, inserts []insertParams) ([]batch.Answer[Execution], error) {
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
	args["worker"], args["places"], args["waited_for"] = worker, []int{reserved.background, reserved.interactive}, queued > 0
	args["skip"] = append(e.pools[Background].skippedFlows(), e.pools[Interactive].skippedFlows()...)
	rows, err := e.pool.Query(ctx, `
		select n, id::text, claimed, at, parent_id::text, on_lost, input,
		       case when n = 1 and claimed and not @waited_for then set_config('synchronous_commit', 'off', true) end
		  from lanekeeper.start_agent_executions(@traces, @surfaces, @flows, (@inputs::text[])::jsonb[], @options, @worker, @places, @skip)`, args)
	if err != nil {
		return nil, err
	}
	answers := make([]batch.Answer[Execution], len(inserts))
	var n int
	var b startedRow
	_, err = pgx.ForEachRow(rows, []any{&n, &b.id, &b.claimed, &b.at, &b.parent, &b.onLost, &b.input, nil}, func() error {
		b.execution(&answers[n-1].Value, &inserts[n-1], worker)
		b.input = nil // the next row has bytes of its own
		return nil
	})
	if err != nil {
		return nil, err
	}
	for i := range answers {
		x := &answers[i].Value
		switch {
		case inserts[i].claimedByCaller: // the caller runs it
			continue
		case x.ClaimedBy == nil:
			e.notifyReady(x.Queue, 1)
			continue
		}
		reserved.start(claimedExecution{Execution: *x, checkpoints: map[string]Checkpoint{}, interrupted: map[string]bool{}}, worker)
	}
	return answers, nil
}

// startedRow is what only the database knows of an execution that was started.
type startedRow struct {
	id, onLost string
	claimed    bool
	at         time.Time
	parent     *string
	input      json.RawMessage
}

// execution makes the row, as it would be read.
func (b *startedRow) execution(x *Execution, o *insertParams, worker string) {
	*x = Execution{
		ID: b.id, ParentID: b.parent, Input: b.input, OnLost: b.onLost, Status: Pending, Variables: json.RawMessage("{}"),
		CreatedAt: b.at, UpdatedAt: b.at,
		TraceID: string(o.TraceID), Surface: string(o.Surface), Agent: o.Agent, Flow: o.Flow,
		ThreadID: null(o.ThreadID), Queue: o.Queue, Priority: o.Priority,
		MaxAttempts: o.MaxAttempts, Progress: o.ProgressSeconds, Inherits: o.Inherits,
	}
	if b.claimed {
		at := b.at
		x.Status, x.ClaimedBy, x.Claim, x.StartedAt = Running, &worker, 1, &at
	}
}

// startBatchArgs turns several starts into what start_agent_executions takes. What all leave at its default is null.
func startBatchArgs(batch []insertParams) (postgres.Strict, error) {
	n := len(batch)
	traces, surfaces, flows, inputs, options := make([]string, n), make([]string, n), make([]string, n), make([]string, n), make([]startOptions, n)
	for i := range batch {
		o := &batch[i]
		traces[i], surfaces[i], flows[i], inputs[i], options[i] = string(o.TraceID), string(o.Surface), o.Flow, string(o.input), o.options()
	}
	args := postgres.Strict{"traces": traces, "surfaces": surfaces, "flows": flows, "inputs": nil, "options": nil}
	if slices.ContainsFunc(inputs, func(input string) bool { return input != emptyInput }) {
		args["inputs"] = inputs
	}
	if slices.ContainsFunc(options, func(o startOptions) bool { return o != startOptions{} }) {
		text, err := json.Marshal(options)
		if err != nil {
			return nil, fmt.Errorf("encode options: %w", err)
		}
		args["options"] = json.RawMessage(text)
	}
	return args, nil
}

// startOptions are what most starts leave at its default.
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

func (o *insertParams) options() startOptions {
	return startOptions{
		Queued: !o.claimedByCaller, ParentID: o.ParentID, Awaited: o.Awaited, Inherits: o.Inherits, ThreadID: o.ThreadID, Progress: o.ProgressSeconds,
		Queue: zeroIfDefault(o.Queue, Background), Agent: zeroIfDefault(o.Agent, defaultAgent), OnLost: zeroIfDefault(o.OnLost, defaultOnLost),
		Priority: zeroIfDefault(o.Priority, defaultPriority), MaxAttempts: zeroIfDefault(o.MaxAttempts, defaultMaxAttempts),
	}
}

// zeroIfDefault is a value; zero where it is the default.
func zeroIfDefault[T comparable](value, defaultValue T) T {
	if value == defaultValue {
		var zero T
		return zero
	}
	return value
}
