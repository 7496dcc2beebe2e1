// Package replica reads pages and reports from a streaming standby of the database, if DATABASE_READ_URL names one.
//
// A read for display may use the standby: the pages of the Engine Room, queries of the log over HTTP, and `agent why`,
// `agent trace` and `agent activity`. Every other read uses the primary: for a decision, a write, a check of a token, a
// login or a lane, a running turn, or the base of a client's next write.
//
// In code, only a [Reader] reaches the standby, in the field Read beside the pool. It reads from the primary unless its
// context is from [Reader.Choose] or [Reader.Do]. These choose one source for a page or a response.
//
// Guarantees:
//
//   - A [Source] has the lag of its reads, for each page and response to show.
//   - A browser that wrote reads from the primary for [FreshFor]; another client asks with Cache-Control: no-cache. By
//     then every usable standby has replayed the write.
//   - The reader skips a standby that is unreachable, starting, promoted, too far behind, or of another database. It
//     logs one line then, and one when it uses the standby again.
//   - While the primary works, a caller of [Reader.Do] sees no error of the standby. Do repeats a failed read on the
//     primary, and [Reader.Measure] cancels the reads of a standby that stops answering.
//   - While the primary is unreachable, the reader uses the standby, and the source reports it.
//
// The reader measures the lag once a second. The age of the last transaction is no measure, because it grows while the
// primary idles. A measurement reads the primary's WAL position, then polls the standby until it has replayed that
// position. If this takes longer than [ReplayWait], the lag is the age of the newest replayed position.
package replica

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

const (
	// MaxLag is the largest lag of a usable standby.
	MaxLag = 30 * time.Second
	// FreshFor is how long a client reads from the primary after its write. It exceeds MaxLag plus the age of a
	// measurement.
	FreshFor = MaxLag + validFor + 2*time.Second
	// interval is the pause between measurements, and validFor the lifetime of one.
	interval = time.Second
	validFor = 8 * time.Second
	// queryTimeout bounds one query of a measurement.
	queryTimeout = 2 * time.Second
	// ReplayWait bounds a measurement's wait for the replay, and replayTick is its poll interval.
	ReplayWait = 250 * time.Millisecond
	replayTick = 25 * time.Millisecond
)

// Options configure a Reader.
type Options struct {
	// Primary is nil for a command that could not reach the primary.
	Primary *pgxpool.Pool
	// Probe reads the primary's position; Primary when nil.
	Probe *pgxpool.Pool
	// Open connects to the standby. The reader retries it until it succeeds.
	Open func(ctx context.Context) (*pgxpool.Pool, error)
	// Check reports a standby whose schema is not this program's.
	Check func(ctx context.Context, pool *pgxpool.Pool) error
	// MaxLag is the largest lag of a usable standby; the constant when 0 or above the constant.
	MaxLag time.Duration
	Logger *slog.Logger // nil for none
}

// Reader reads from the standby or the primary. It is safe for concurrent use.
type Reader struct {
	Options
	state  atomic.Pointer[state]
	wakeup chan struct{} // a read failed: measure now

	reading sync.Map // cancels the reads of Do on the standby, by *Source

	measuring sync.Mutex // guards the fields below
	standby   *pgxpool.Pool
	checked   bool // the standby's schema is checked
	lag       lagMeter
	identity  string // of the primary's database, once known
}

// state is the result of the latest measurement.
type state struct {
	standby     *pgxpool.Pool // nil: read from the primary
	reason      error         // why standby is nil
	behind      time.Duration
	primaryDown bool
	at          time.Time
}

// Primary is a Reader without a standby.
func Primary(pool *pgxpool.Pool) *Reader { return &Reader{Options: Options{Primary: pool}} }

// New makes a Reader. It reads from the primary until the first measurement.
func New(o Options) *Reader {
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.Probe == nil {
		o.Probe = o.Primary
	}
	if o.MaxLag <= 0 || o.MaxLag > MaxLag {
		o.MaxLag = MaxLag
	}
	return &Reader{Options: o, wakeup: make(chan struct{}, 1)}
}

// Configured reports whether the Reader may have a standby; a nil Reader has none.
func (r *Reader) Configured() bool { return r != nil && r.Open != nil }

// Run measures until ctx ends.
func (r *Reader) Run(ctx context.Context) error {
	if !r.Configured() {
		return nil
	}
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		_, _ = r.Measure(ctx) // Measure logs its errors
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		case <-r.wakeup:
		}
	}
}

// Close closes the connections to the standby.
func (r *Reader) Close() {
	r.measuring.Lock()
	defer r.measuring.Unlock()
	r.state.Store(nil)
	if r.standby != nil {
		r.standby.Close()
		r.standby = nil
	}
}

// ErrOther reports a standby of another database, or with another schema: a mistake in DATABASE_READ_URL.
var ErrOther = errors.New("it does not name a standby of this database")

var errPrimaryUnreachable = errors.New("the primary could not be reached")

// Measure measures the lag of the standby. The error says why the standby is unusable.
func (r *Reader) Measure(ctx context.Context) (time.Duration, error) {
	r.measuring.Lock()
	defer r.measuring.Unlock()
	now := r.measure(ctx)
	if ctx.Err() != nil {
		return 0, ctx.Err()
	}
	now.at = time.Now()
	r.report(ctx, r.state.Swap(&now), &now)
	return now.behind, now.reason
}

// report logs a change between the primary and the standby once.
func (r *Reader) report(ctx context.Context, before, now *state) {
	switch {
	case now.standby == nil && (before == nil || before.standby != nil):
		r.Logger.WarnContext(ctx, "the read replica is not read; pages are read from the primary", "reason", now.reason)
	case now.standby != nil && (before == nil || before.standby == nil):
		r.Logger.InfoContext(ctx, "pages are read from the replica", "behind", now.behind)
	}
	if now.standby != nil && now.primaryDown && (before == nil || !before.primaryDown) {
		r.Logger.WarnContext(ctx, "the primary does not answer; pages are read from the replica all the same")
	}
}

// measure probes both servers. The state has the standby if that passes all checks, or otherwise the reason. It cannot
// compare the databases until the primary has answered once.
func (r *Reader) measure(ctx context.Context) state {
	askedAt := time.Now()
	primary, primaryErr := position{}, errPrimaryUnreachable
	if r.Probe != nil {
		primary, primaryErr = readPosition(ctx, r.Probe)
	}
	if primaryErr == nil {
		r.identity = primary.Identity
		r.lag.add(askedAt, primary.Position)
	}
	now := state{primaryDown: primaryErr != nil}
	standby, err := r.readStandby(ctx)
	if err != nil && primaryErr == nil {
		r.cancelReads()
	}
	if err == nil && r.identity != "" && standby.Identity != r.identity {
		err = fmt.Errorf("it is another database than DATABASE_URL; %w", ErrOther)
	}
	if err == nil && !standby.Standby {
		r.standby.Reset() // its name may resolve to another server by now
		err = errors.New("it is not a standby")
	}
	if err == nil {
		now.behind, err = r.behind(ctx, askedAt, standby, primaryErr == nil)
	}
	if err == nil && !r.checked {
		err = r.Check(ctx, r.standby)
		r.checked = err == nil
		if err != nil && now.behind <= ReplayWait { // else the standby may replay a migration later
			err = fmt.Errorf("%w: %w", ErrOther, err)
		}
	}
	if err != nil {
		now.reason = err
		return now
	}
	now.standby = r.standby
	return now
}

// readStandby reads the standby's position, and connects first if necessary.
func (r *Reader) readStandby(ctx context.Context) (position, error) {
	if r.standby == nil {
		openCtx, cancel := context.WithTimeout(ctx, queryTimeout)
		defer cancel()
		pool, err := r.Open(openCtx)
		if err != nil {
			return position{}, err
		}
		r.standby, r.checked = pool, false
	}
	pos, err := readPosition(ctx, r.standby)
	if err != nil {
		return position{}, fmt.Errorf("it does not answer: %w", err)
	}
	return pos, nil
}

// cancelReads ends the reads of Do on the standby, which then repeat on the primary.
func (r *Reader) cancelReads() {
	r.reading.Range(func(_, cancel any) bool {
		cancel.(context.CancelFunc)()
		return true
	})
}

// behind returns the lag of the standby. A lag above MaxLag is an error while the primary answers.
func (r *Reader) behind(
	ctx context.Context, askedAt time.Time, standby position, primaryAnswers bool,
) (time.Duration, error) {
	behind, known := r.lag.behind(askedAt, standby, primaryAnswers)
	for wait := time.Now().Add(ReplayWait); primaryAnswers && behind > 0 && time.Now().Before(wait); {
		select {
		case <-ctx.Done():
			return 0, ctx.Err()
		case <-time.After(replayTick):
		}
		later, err := readPosition(ctx, r.standby)
		if err != nil {
			return 0, err
		}
		behind, known = r.lag.behind(askedAt, later, primaryAnswers)
		if behind == 0 {
			behind = time.Since(askedAt)
			break
		}
	}
	switch {
	case !primaryAnswers:
		return behind, nil
	case !known:
		return 0, errors.New("how far it is behind is not known yet")
	case behind > r.MaxLag:
		return behind, fmt.Errorf("it is %s behind, more than %s", behind.Round(time.Second), r.MaxLag)
	}
	return behind, nil
}
