// Package lanekeeper makes Go functions durable. PostgreSQL records every step of such a function, a flow. A flow
// survives the death of its process: another process, or the next start of the same one, continues it after the last
// recorded step. It can wait for days without a process.
//
// # A program
//
// Open a [Runtime] on a pool, register flows, and run it:
//
//	rt, err := lanekeeper.Open(ctx, pool)                  // after lanekeeper.Migrate
//	ship, err := lanekeeper.Register(rt, "ship", shipOrder) // func(context.Context, Order) (Receipt, error)
//	go rt.Run(ctx)
//	handle, err := ship.Start(ctx, Order{ID: "7"}, lanekeeper.Key("order 7"))
//	receipt, err := handle.Wait(ctx)
//
// [Flow.SetSchedules] starts a flow at the times of cron expressions.
//
// # Steps
//
// A flow is ordinary code with one rule: anything that may differ between two runs happens inside a [Step]. That
// includes time, randomness, and every effect on the world. After a crash the runtime calls the function again from its
// top. Recorded steps return their results without running again.
//
//	paid, err := lanekeeper.Step(ctx, "charge", func(ctx context.Context) (Payment, error) {
//		return bank.Charge(ctx, order, lanekeeper.StepKey(ctx)) // the same key in every attempt
//	})
//	if err != nil {
//		return Receipt{}, err
//	}
//
// A step may run a second time if the process died before its record. StepKey makes the repetition harmless where the
// other side deduplicates. [StepTx] is for effects in the same database: effect and record are one transaction.
//
// # Waits and children
//
// [WaitEvent] and [Sleep] suspend the flow: the flow leaves memory, and continues in any process. [Flow.Call] starts
// another flow and waits for its result. All three return an error when the flow is suspended, and the flow must return
// that error ([IsControl]). Code that ignores it does no harm: every later step fails.
//
// [Flow.StartChild] starts another flow, and [Child.Wait] suspends the flow until that child ends. Children run at the
// same time if the flow starts them all before it waits for the first:
//
//	var children []lanekeeper.Child[Box]
//	for _, item := range order.Items {
//		child, err := pack.StartChild(ctx, "pack "+item.ID, item)
//		if err != nil {
//			return Receipt{}, err
//		}
//		children = append(children, child)
//	}
//	for _, child := range children {
//		box, err := child.Wait(ctx)
//		...
//	}
//
// An execution waits for one thing at a time. When one of several parallel branches waits, the runtime stops running
// steps in the other branches. It calls them again after the wait, under the same StepKey. Waits of other branches
// begin after that wait. Put waits before or after the branches, or make each branch a child.
//
// # Guarantees
//
//   - An acknowledged [Flow.Start] is executed, even if any process dies. All starts with one [Key] share an execution.
//   - A recorded step is never called again. A process that lost its lease, because it was paused or cut off, cannot
//     record anything: the database refuses the write.
//   - One process at a time may record steps of an execution. [WithLane] extends this to all executions that share a
//     lane's name.
//   - A shutdown ([Runtime.Run] returns) lets running steps finish within [WithShutdownTimeout], and hands the rest to
//     other processes.
//   - `agent pause` on the database also pauses these flows: they start and continue after `agent resume`.
//
// The commands `agent executions`, `agent trace` and `agent why`, the HTTP API and the Engine Room show and start these
// flows like all others. The package executions has further functions.
package lanekeeper

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/logging"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/migrations"
)

// Migrate brings the schema of the database to this version, as `agent migrate` does. Migrate keeps all rows, may run
// while other processes serve, and does nothing where the schema is current. Concurrent calls wait for each other.
func Migrate(ctx context.Context, pool *pgxpool.Pool) error {
	_, err := migrations.Up(ctx, pool)
	return err
}

// Runtime runs flows in this process. It is safe for concurrent use.
type Runtime struct {
	pool     *pgxpool.Pool
	listener *postgres.Listener
	keeper   *lanes.Keeper
	engine   *executions.Engine
	started  atomic.Bool
}

// Of returns a Runtime for an engine that other code runs, such as the agent of package server.
func Of(pool *pgxpool.Pool, engine *executions.Engine) *Runtime {
	r := &Runtime{pool: pool, engine: engine}
	r.started.Store(true)
	return r
}

// Option configures a [Runtime].
type Option func(*executions.Options)

// WithLogger sets the logger; the default discards. Lines of a run get its trace_id and execution_id, and secrets in
// them are redacted.
func WithLogger(log *slog.Logger) Option { return func(o *executions.Options) { o.Logger = log } }

// WithWorkers bounds the executions that run at once in this process; the default is 16. Flows with [Interactive] have
// as many workers of their own. Waiting executions do not count.
func WithWorkers(n int) Option { return func(o *executions.Options) { o.Workers = n } }

// WithLease sets how long a dead process keeps its executions; the default is 30 s. It is rounded down to whole
// seconds, at least 1 s and at most a day.
func WithLease(d time.Duration) Option { return func(o *executions.Options) { o.LeaseTTL = d } }

// WithShutdownTimeout bounds how long running steps may finish after the context of Run has ended; the default is
// 20 s.
func WithShutdownTimeout(d time.Duration) Option {
	return func(o *executions.Options) { o.StopTimeout = d }
}

// Open returns a Runtime on a database with a current schema; see [Migrate]. It starts nothing. The pool stays the
// caller's, and must outlive Run. The program needs as many connections as it has busy workers, and two more; with
// fewer, which pgxpool's default often is, workers wait for one another.
func Open(ctx context.Context, pool *pgxpool.Pool, opts ...Option) (*Runtime, error) {
	if n := pool.Config().MaxConns; n < 2 {
		return nil, fmt.Errorf("open runtime: the pool has %d connection: set MaxConns to the number of workers and 2 more",
			n)
	}
	if err := migrations.Check(ctx, pool); err != nil {
		if errors.Is(err, migrations.ErrOutdated) {
			err = fmt.Errorf("%w, or call lanekeeper.Migrate", err)
		}
		return nil, fmt.Errorf("open runtime: %w", err)
	}
	var o executions.Options
	for _, option := range opts {
		option(&o)
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	o.Logger = slog.New(logging.Handler(o.Logger.Handler()))
	r := &Runtime{pool: pool, listener: postgres.NewListener(postgres.Dialer(pool), o.Logger)}
	r.keeper = lanes.NewKeeper(pool, lanes.Options{Listener: r.listener, Logger: o.Logger})
	o.Keeper, o.Listener = r.keeper, r.listener
	engine, err := executions.New(pool, o)
	if err != nil {
		return nil, fmt.Errorf("open runtime: %w", err)
	}
	r.engine = engine
	return r, nil
}

// Run executes the registered flows until ctx ends. Then it finishes running steps, hands the rest to other processes,
// and returns nil. It survives an outage of the database. A Runtime runs once. A program that only starts flows, and
// waits for their results, needs no Run.
func (r *Runtime) Run(ctx context.Context) error {
	if r.started.Swap(true) {
		return errors.New("run: the runtime runs already or has ended; open another")
	}
	base, stop := context.WithCancel(context.WithoutCancel(ctx)) // leases are renewed until the last step has ended
	defer stop()
	var services errgroup.Group
	services.Go(func() error { return r.listener.Run(base) })
	services.Go(func() error { return r.keeper.Run(base) })
	err := r.engine.Run(ctx)
	stop()
	return errors.Join(err, services.Wait())
}

// SendEvent delivers an event to the flows that wait for key in [WaitEvent]. Without such a flow, the event is kept for
// the first one. data must survive encoding/json. A second event with the same id counts once, and with another key is
// refused; an empty id never deduplicates. key has at most 2,400 bytes.
func (r *Runtime) SendEvent(ctx context.Context, key string, data any, id string) error {
	encoded, err := encode(data)
	if err == nil && key == "" {
		err = errors.New("a key is required")
	}
	if err == nil {
		err = checkStorable(key+id, encoded)
	}
	if err != nil {
		return fmt.Errorf("send event %q: %w", key, err)
	}
	_, err = r.engine.Deliver(ctx, r.pool, eventCompleted, key, encoded, id)
	return err
}

// eventCompleted is the event that ends a wait for an event.
const eventCompleted = "EVENT_COMPLETED"
