package lanes

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/batch"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

const (
	renewEvery   = 10 * time.Second // at most between two renewals of a lease
	answerLimit  = 2 * time.Second  // for the answer to an acquire after its ctx has ended
	releaseLimit = 5 * time.Second  // for a release or the leaving of a queue, whatever ctx says
)

// Options tune a Keeper. Zero values are the defaults.
type Options struct {
	// Listener shortens the waits of AcquireWait; nil to poll only.
	Listener *Listener
	// Logger gets the lane events; nil for none.
	Logger *slog.Logger
	// Disabled (AGENT_LANES=off) grants everything without asking the database: for local use
	// by one process.
	Disabled bool
	// Observer is told of waits and losses, for metrics; nil for none.
	Observer Observer
}

// Observer is told what happens to lanes in this process. Its methods must return at once.
type Observer interface {
	// LaneWaited says how long AcquireWait took, whether it got the lane or not.
	LaneWaited(lane string, took time.Duration, got bool)
	// LaneLost says that a lease ended before it was released.
	LaneLost(lane string)
}

// unobserved is the Observer of a keeper that has none.
type unobserved struct{}

func (unobserved) LaneWaited(string, time.Duration, bool) {}
func (unobserved) LaneLost(string)                        {}

// Keeper acquires lanes for a process and keeps them. There is one per process. All methods may be
// called from any goroutine.
type Keeper struct {
	db       postgres.DB
	listener *Listener
	log      *slog.Logger
	enabled  bool
	observer Observer
	turns    postgres.KeyedMutex[key]
	changed  chan struct{} // has room for one: wakes Run when a lease is to be renewed sooner than it would look
	tries    batch.Batcher[wanted, answer]
	frees    batch.Batcher[held, release]
	runs     atomic.Int32    // of Run
	closed   context.Context // ends with ReleaseAll
	close    context.CancelFunc

	mu      sync.Mutex
	held    map[key]*hold
	lanes   map[string]map[*hold]struct{} // what is in held, by lane
	planned time.Time                     // when Run looks again
}

// NewKeeper returns a keeper whose lanes are those of db, which has to be a pool: many
// goroutines use it at once. Call Run to have leases renewed.
func NewKeeper(db postgres.DB, opts Options) *Keeper {
	k := &Keeper{
		db: db, listener: opts.Listener, log: opts.Logger, enabled: !opts.Disabled, observer: opts.Observer,
		changed: make(chan struct{}, 1), held: make(map[key]*hold), lanes: make(map[string]map[*hold]struct{}),
	}
	k.closed, k.close = context.WithCancel(context.Background())
	k.tries.Send = func(ctx context.Context, all []wanted) ([]batch.Answer[answer], error) {
		return tryMany(ctx, k.db, all)
	}
	k.tries.Late = k.lateGrant
	k.frees.Send = func(ctx context.Context, all []held) ([]batch.Answer[release], error) {
		return freeMany(ctx, k.db, all)
	}
	scheduler := &batch.Scheduler{}
	share(&k.tries, scheduler)
	share(&k.frees, scheduler)
	if k.log == nil {
		k.log = slog.New(slog.DiscardHandler)
	}
	if k.observer == nil {
		k.observer = unobserved{}
	}
	if !k.enabled {
		k.log.WarnContext(context.Background(), "lanes are off: every lane is granted to everybody; set AGENT_LANES=on")
	}
	return k
}

// share configures batching. A release that a fenced write delays must not delay the rest.
func share[In, Out any](g *batch.Batcher[In, Out], scheduler *batch.Scheduler) {
	g.Scheduler = scheduler
	g.Unchanged, g.MaxSize, g.MaxWait, g.Timeout = postgres.Unchanged, 64, 25*time.Millisecond, 5*time.Second
}

// Adopt keeps a lease that the database granted without this package: the lane of an execution that
// was re-owned when it was claimed. startedBefore is a moment before the statement that did it; from
// there the local end of the lease is counted. The lease counts as one hold of owner.
func (k *Keeper) Adopt(ctx context.Context, owner Owner, lane string, token int64, ttl time.Duration, startedBefore time.Time) *Lease {
	if !k.enabled {
		return localLease(ctx, k, owner, lane)
	}
	return k.enter(ctx, owner, grant{
		lane: lane, token: token, ttl: wholeSeconds(ttl), before: startedBefore, expires: startedBefore.Add(ttl),
	})
}

// Drop forgets every lease of owner without a release and without a word, and cancels their
// contexts. It is for the end or the park of an execution, where SQL releases or parks its lanes: call
// it before that statement, or a renewal may take the release for a loss.
func (k *Keeper) Drop(owner Owner) {
	k.mu.Lock()
	var dropped []*Lease
	for id, h := range k.held {
		if id.owner == owner.name {
			dropped = append(dropped, k.forget(h)...)
		}
	}
	k.mu.Unlock()
	endAll(dropped, context.Canceled)
}

// ReleaseAll ends every lease of the process, at its shutdown: those of executions are dropped, since the next claim
// takes their lanes over; all others are released. It works with a ctx that has ended, and tries again for at most 5
// seconds what a broken connection or an open transaction keeps from being released.
func (k *Keeper) ReleaseAll(ctx context.Context) error {
	k.close()
	var left []held
	var ended []*Lease
	k.mu.Lock()
	for _, h := range k.held {
		if !h.owner.claim {
			left = append(left, held{h.lane, h.owner, h.token})
		}
		ended = append(ended, k.forget(h)...)
	}
	k.mu.Unlock()
	endAll(ended, context.Canceled)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseLimit)
	defer cancel()
	var err error
	for pause := retryFirst; len(left) > 0; pause = min(2*pause, retryMost) {
		if left, err = k.releaseEach(ctx, left); err != nil && (!worthRetrying(err) || !sleep(ctx, pause)) {
			return fmt.Errorf("release %d lanes: %w", len(left), err)
		}
	}
	return nil
}

// releaseEach releases many lanes in one statement, and by itself each that this leaves. It returns those that are
// not released, with why.
func (k *Keeper) releaseEach(ctx context.Context, all []held) (left []held, err error) {
	answers, err := freeMany(ctx, k.db, all)
	if err != nil {
		return all, err
	}
	for i, h := range all {
		released := answers[i].Value
		if answers[i].Alone {
			var failed error
			if released, failed = freeLane(ctx, k.db, h); failed != nil {
				left, err = append(left, h), failed
			}
		}
		if released.done {
			k.logReleased(ctx, h, released.to)
		}
	}
	return left, err
}

func (k *Keeper) wakeRun() {
	select {
	case k.changed <- struct{}{}:
	default:
	}
}

// Listener hears what the database tells a process, over one connection: it shortens the waits of everything that
// takes one. A process has one, and calls its Run once, which returns when its context ends; a connection that breaks
// is opened again. Behind a pooler it says once that nothing is heard. Everything works without one, by looking about
// once a second.
type Listener = postgres.Listener

// NewListener returns the listener of a process. Its connection leads to the database of pool and does not count
// among pool's. logger gets what happens to it; nil for none.
func NewListener(pool *pgxpool.Pool, logger *slog.Logger) *Listener {
	if logger == nil {
		logger = slog.New(slog.DiscardHandler)
	}
	return postgres.NewListener(postgres.Dialer(pool), logger)
}
