package lanes

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/batch"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

const (
	maxRenewInterval = 10 * time.Second // between two renewals of a lease
	responseTimeout  = 2 * time.Second  // for the response to an acquire after the end of its ctx
	releaseTimeout   = 5 * time.Second  // for a release or leaving a queue, also after ctx ended
)

// Options configure a Keeper. Zero values are the defaults.
type Options struct {
	// Listener shortens the waits of AcquireWait; nil polls only.
	Listener *Listener
	// Logger gets the lane events; nil for none.
	Logger *slog.Logger
	// Disabled (AGENT_LANES=off) grants every lane without a query: for local use by one process.
	Disabled bool
	// Observer receives waits and losses, for metrics; nil for none.
	Observer Observer
}

// Observer receives the lane events of this process. Its methods must return at once.
type Observer interface {
	// LaneWaited reports the duration of AcquireWait, and whether it acquired the lane.
	LaneWaited(lane string, took time.Duration, acquired bool)
	// LaneLost reports a lease that was lost before its release, with the cancel of its work.
	LaneLost(lane string)
}

// noopObserver is the default Observer.
type noopObserver struct{}

func (noopObserver) LaneWaited(string, time.Duration, bool) {}
func (noopObserver) LaneLost(string)                        {}

// Keeper acquires and renews the lanes of a process. There is one per process. All methods may be called from any
// goroutine.
type Keeper struct {
	db          postgres.DB
	listener    *Listener
	log         *slog.Logger
	enabled     bool
	observer    Observer
	keyed       postgres.KeyedMutex[key]
	renewSooner chan struct{} // wakes Run when a lease is due before nextRenewal
	acquires    batch.Batcher[acquireRequest, acquireResult]
	releases    batch.Batcher[releaseRequest, releaseResult]
	runCount    atomic.Int32 // running calls of Run

	mu          sync.Mutex
	held        map[key]*hold
	lanes       map[string]map[*hold]struct{} // the holds by lane
	nextRenewal time.Time                     // next wake-up of Run
}

// NewKeeper returns a keeper for the lanes of db, which must be a pool. Call Run to renew leases.
func NewKeeper(db postgres.DB, opts Options) *Keeper {
	k := &Keeper{
		db: db, listener: opts.Listener, log: opts.Logger, enabled: !opts.Disabled, observer: opts.Observer,
		renewSooner: make(chan struct{}, 1), held: make(map[key]*hold), lanes: make(map[string]map[*hold]struct{}),
	}
	k.acquires.Send = func(ctx context.Context, requests []acquireRequest) ([]batch.Result[acquireResult], error) {
		return tryBatch(ctx, k.db, requests)
	}
	k.acquires.OnLate = k.releaseLate
	k.releases.Send = func(ctx context.Context, requests []releaseRequest) ([]batch.Result[releaseResult], error) {
		return releaseBatch(ctx, k.db, requests)
	}
	scheduler := &batch.Scheduler{}
	configureBatcher(&k.acquires, scheduler)
	configureBatcher(&k.releases, scheduler)
	if k.log == nil {
		k.log = slog.New(slog.DiscardHandler)
	}
	if k.observer == nil {
		k.observer = noopObserver{}
	}
	if !k.enabled {
		k.log.WarnContext(context.Background(), "lanes are off: every caller gets every lane; set AGENT_LANES=on")
	}
	return k
}

// configureBatcher configures batching. A fenced write may delay a release, which must not delay the rest of its batch.
func configureBatcher[In, Out any](b *batch.Batcher[In, Out], scheduler *batch.Scheduler) {
	b.Scheduler = scheduler
	b.Unchanged, b.MaxSize, b.MaxWait, b.Timeout = postgres.Unchanged, 64, 25*time.Millisecond, 5*time.Second
}

// Drop removes all leases of owner without a release, and cancels their contexts. Call it before the statement that
// ends or suspends an execution, because that statement releases or parks the lanes. Otherwise a renewal may report a
// loss.
func (k *Keeper) Drop(owner Owner) {
	k.mu.Lock()
	var dropped []*Lease
	for id, h := range k.held {
		if id.owner == owner.name {
			dropped = append(dropped, k.remove(h)...)
		}
	}
	k.mu.Unlock()
	cancelAll(dropped, context.Canceled)
}

func (k *Keeper) wakeRenewal() {
	select {
	case k.renewSooner <- struct{}{}:
	default:
	}
}

// Listener receives the database's notifications over one connection, for all users in the process. Call Run once. It
// replaces broken connections and returns when its context ends. Behind a connection pooler, it logs once that there
// are no notifications. Without a listener, lanes are polled once a second.
type Listener = postgres.Listener

// NewListener returns the listener of a process. Its connection is not one of pool's. logger receives its events; nil
// for none.
func NewListener(pool *pgxpool.Pool, logger *slog.Logger) *Listener {
	if logger == nil {
		logger = slog.New(slog.DiscardHandler)
	}
	return postgres.NewListener(postgres.Dialer(pool), logger)
}
