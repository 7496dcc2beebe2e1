// Package replica reads what is only shown from a streaming standby of the database, where DATABASE_READ_URL names one.
//
// The rule. A read may come from the standby when somebody only looks at its result: the pages of the Engine Room, the
// questions about the log over HTTP, and `agent why`, `agent trace` and `agent activity`. All else reads from the
// primary: what decides, writes, checks a token, a login or a lane, follows a turn under way, or is the state that a
// client's next write is based on.
//
// In code, a [Reader] is the only way to the standby, and stands beside the pool as the field Read. It reads from the
// primary unless its context is from [Reader.Choose] or [Reader.Do], which choose once for a page or an answer.
//
// It promises:
//
//   - A [Source] says how far behind the primary its reads are, so that each page and answer can tell.
//   - Who wrote reads from the primary for [FreshFor], in which every standby that is read has replayed the write.
//   - A standby that is away, starts, is too far behind, was promoted, or belongs to another database is not read. One
//     log line says so, and another that it is read again.
//   - A reader meets no error of the standby while the primary works: what failed there is read again from the
//     primary.
//   - While the primary is away the standby is read, and the source says so.
//
// The lag is measured once a second, not estimated from the time of the last transaction, which grows while the primary
// idles. The primary is asked for its position in the log, and the standby until it has replayed that. One that does
// not within [ReplayWait] is as far behind as the newest position is old that it has replayed.
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
	// MaxLag is the most that a standby may be behind and be read.
	MaxLag = 30 * time.Second
	// FreshFor is how long who wrote reads from the primary: longer than MaxLag and the age of a measurement together.
	FreshFor = MaxLag + validFor + 2*time.Second
	// every is the pause between measurements, and validFor how long one holds.
	every    = time.Second
	validFor = 8 * time.Second
	// askWithin bounds one question of a measurement.
	askWithin = 2 * time.Second
	// ReplayWait is how long a measurement waits for the standby to replay, and replayTick how often it looks.
	ReplayWait = 250 * time.Millisecond
	replayTick = 25 * time.Millisecond
)

// Options say what a Reader reads.
type Options struct {
	// Primary is nil for a command that could not reach it.
	Primary *pgxpool.Pool
	// Probe asks the primary for its position; Primary when nil.
	Probe *pgxpool.Pool
	// Open connects to the standby. It is called again until it works.
	Open func(ctx context.Context) (*pgxpool.Pool, error)
	// Check reports a standby whose schema is not this program's.
	Check func(ctx context.Context, pool *pgxpool.Pool) error
	// MaxLag is the most that the standby may be behind; the constant when 0 or more than that.
	MaxLag time.Duration
	Logger *slog.Logger // nil for none
}

// Reader reads from the standby or the primary. It is safe for concurrent use.
type Reader struct {
	Options
	state atomic.Pointer[state]
	again chan struct{} // a read failed: measure now

	measuring sync.Mutex // guards what follows
	standby   *pgxpool.Pool
	checked   bool // the standby's schema
	lag       meter
	identity  string // of the primary's database, once known
}

// state is what the latest measurement found.
type state struct {
	standby     *pgxpool.Pool // nil: read from the primary
	reason      error         // why, when it is nil
	behind      time.Duration
	primaryAway bool
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
	return &Reader{Options: o, again: make(chan struct{}, 1)}
}

// Configured reports whether there may be a standby; a nil Reader has none.
func (r *Reader) Configured() bool { return r != nil && r.Open != nil }

// Run measures until ctx ends.
func (r *Reader) Run(ctx context.Context) error {
	if !r.Configured() {
		return nil
	}
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		_, _ = r.Measure(ctx) // which logs what keeps the standby from being read
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		case <-r.again:
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

var errAway = errors.New("the primary could not be reached")

// Measure finds out whether the standby can be read, and how far behind it is. The error says why it is not read.
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
	if now.standby != nil && now.primaryAway && (before == nil || !before.primaryAway) {
		r.Logger.WarnContext(ctx, "the primary does not answer; pages are read from the replica all the same")
	}
}

func (r *Reader) measure(ctx context.Context) state {
	asked := time.Now()
	primary, away := position{}, errAway
	if r.Probe != nil {
		primary, away = ask(ctx, r.Probe)
	}
	if away == nil {
		r.identity = primary.Identity
		r.lag.note(asked, primary.Position)
	}
	now := state{primaryAway: away != nil}
	standby, err := r.askStandby(ctx)
	if err == nil && r.identity != "" && standby.Identity != r.identity {
		err = fmt.Errorf("it is another database than DATABASE_URL: %w", ErrOther)
	}
	if err == nil && !standby.Standby {
		r.standby.Reset() // its name may lead to another server by now
		err = errors.New("it is not a standby")
	}
	if err == nil {
		now.behind, err = r.behind(ctx, asked, standby, away == nil)
	}
	if err == nil && !r.checked {
		err = r.Check(ctx, r.standby)
		r.checked = err == nil
		if err != nil && now.behind <= ReplayWait { // else a migration may be on its way
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

// askStandby asks the standby, to which it connects if need be.
func (r *Reader) askStandby(ctx context.Context) (position, error) {
	if r.standby == nil {
		opening, cancel := context.WithTimeout(ctx, askWithin)
		defer cancel()
		pool, err := r.Open(opening)
		if err != nil {
			return position{}, err
		}
		r.standby, r.checked = pool, false
	}
	found, err := ask(ctx, r.standby)
	if err != nil {
		return position{}, fmt.Errorf("it does not answer: %w", err)
	}
	return found, nil
}

// behind is how far the standby is behind. Too far is an error while the primary answers.
func (r *Reader) behind(ctx context.Context, asked time.Time, standby position, answers bool) (time.Duration, error) {
	behind, known := r.lag.behind(asked, standby, answers)
	for wait := time.Now().Add(ReplayWait); answers && behind > 0 && time.Now().Before(wait); {
		select {
		case <-ctx.Done():
			return 0, ctx.Err()
		case <-time.After(replayTick):
		}
		later, err := ask(ctx, r.standby)
		if err != nil {
			return 0, err
		}
		behind, known = r.lag.behind(asked, later, answers)
		if behind == 0 {
			behind = time.Since(asked)
			break
		}
	}
	switch {
	case !answers:
		return behind, nil
	case !known:
		return 0, errors.New("how far it is behind is not known yet")
	case behind > r.MaxLag:
		return behind, fmt.Errorf("it is %s behind, more than %s", behind.Round(time.Second), r.MaxLag)
	}
	return behind, nil
}
