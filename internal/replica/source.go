package replica

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/human"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Source is the server that a page or a response is read from. A nil Source is the primary.
type Source struct {
	standby *pgxpool.Pool
	failed  atomic.Bool
	// Behind is the lag of the reads. PrimaryAway reports that the primary did not answer.
	Behind      time.Duration
	PrimaryAway bool
}

// Replica reports whether the source is the standby.
func (s *Source) Replica() bool { return s != nil && s.standby != nil }

// Failed reports whether a read from the standby failed.
func (s *Source) Failed() bool { return s.Replica() && s.failed.Load() }

// String formats the lag: "400 ms behind".
func (s *Source) String() string {
	text := human.Duration(s.Behind) + " behind"
	if s.PrimaryAway {
		text += "; the primary does not answer"
	}
	return text
}

// noteError remembers a failed read. A missing row is no failure.
func (s *Source) noteError(err error) {
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		s.failed.Store(true)
	}
}

type sourceKey struct{}

// From returns the chosen source of a context.
func From(ctx context.Context) *Source {
	s, _ := ctx.Value(sourceKey{}).(*Source)
	return s
}

// Choose returns a context with its source. fresh selects the primary, for a client that wrote a moment ago. While the
// primary is unreachable, the source is the standby even then.
func (r *Reader) Choose(ctx context.Context, fresh bool) (context.Context, *Source) {
	s := &Source{}
	now := r.state.Load()
	usable := now != nil && now.standby != nil && time.Since(now.at) < validFor
	if usable && (!fresh || now.primaryDown) {
		s.standby, s.Behind, s.PrimaryAway = now.standby, now.behind, now.primaryDown
	}
	return context.WithValue(ctx, sourceKey{}, s), s
}

// Do calls fn, and repeats it on the primary after an error on the standby. A missing row is such an error: the primary
// may already have the row.
func (r *Reader) Do(ctx context.Context, fresh bool, fn func(ctx context.Context) error) (*Source, error) {
	chosenCtx, source := r.Choose(ctx, fresh)
	if source.Replica() && r.Primary != nil {
		var cancel context.CancelFunc
		chosenCtx, cancel = context.WithCancel(chosenCtx)
		defer cancel()
		r.reading.Store(source, cancel)
		defer r.reading.Delete(source)
	}
	err := fn(chosenCtx)
	if !source.Replica() || err == nil && !source.Failed() || ctx.Err() != nil || r.Primary == nil {
		return source, err
	}
	if source.Failed() {
		r.wake()
	}
	return nil, fn(context.WithValue(ctx, sourceKey{}, &Source{}))
}

// wake makes Run measure at once.
func (r *Reader) wake() {
	select {
	case r.wakeup <- struct{}{}:
	default:
	}
}

var _ postgres.DB = (*Reader)(nil)

// Exec is part of postgres.DB.
func (r *Reader) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	s := From(ctx)
	if !s.Replica() {
		return r.Primary.Exec(ctx, sql, args...)
	}
	tag, err := s.standby.Exec(ctx, sql, args...)
	s.noteError(err)
	return tag, err
}

// Query is part of postgres.DB.
func (r *Reader) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	s := From(ctx)
	if !s.Replica() {
		return r.Primary.Query(ctx, sql, args...)
	}
	result, err := s.standby.Query(ctx, sql, args...)
	s.noteError(err)
	return rows{result, s}, err
}

// QueryRow is part of postgres.DB.
func (r *Reader) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	s := From(ctx)
	if !s.Replica() {
		return r.Primary.QueryRow(ctx, sql, args...)
	}
	return row{s.standby.QueryRow(ctx, sql, args...), s}
}

// SendBatch is part of postgres.DB.
func (r *Reader) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	s := From(ctx)
	if !s.Replica() {
		return r.Primary.SendBatch(ctx, b)
	}
	return results{s.standby.SendBatch(ctx, b), s}
}

// rows, row and results note failed reads.
type rows struct {
	pgx.Rows
	source *Source
}

func (r rows) Err() error {
	err := r.Rows.Err()
	r.source.noteError(err)
	return err
}

type row struct {
	pgx.Row
	source *Source
}

func (r row) Scan(dest ...any) error {
	err := r.Row.Scan(dest...)
	r.source.noteError(err)
	return err
}

type results struct {
	pgx.BatchResults
	source *Source
}

func (r results) Exec() (pgconn.CommandTag, error) {
	tag, err := r.BatchResults.Exec()
	r.source.noteError(err)
	return tag, err
}

func (r results) Query() (pgx.Rows, error) {
	result, err := r.BatchResults.Query()
	r.source.noteError(err)
	return rows{result, r.source}, err
}

func (r results) QueryRow() pgx.Row { return row{r.BatchResults.QueryRow(), r.source} }

func (r results) Close() error {
	err := r.BatchResults.Close()
	r.source.noteError(err)
	return err
}
