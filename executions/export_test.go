package executions

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Batcher is a batcher of numbers, for tests.
type Batcher struct{ b *batcher[int, int] }

// NewBatcher makes one from a function that answers each write, and says which it has left.
func NewBatcher(send func(ctx context.Context, in []int) (out []int, left []bool, err error), sure func(error) bool) *Batcher {
	return &Batcher{&batcher[int, int]{sure: sure, send: func(ctx context.Context, in []int) ([]answer[int], error) {
		out, left, err := send(ctx, in)
		answers := make([]answer[int], len(out))
		for i := range out {
			answers[i] = answer[int]{out[i], left[i]}
		}
		return answers, err
	}}}
}

// Patient makes writes wait for others for as long as it takes.
func (b *Batcher) Patient() *Batcher {
	b.b.patience = time.Hour
	return b
}

// Do makes a write.
func (b *Batcher) Do(ctx context.Context, in int, alone func() (int, error)) (int, error) {
	return b.b.do(ctx, in, alone)
}

// Waiting is how many writes have gathered.
func (b *Batcher) Waiting() int {
	b.b.mu.Lock()
	defer b.b.mu.Unlock()
	return len(b.b.waiting)
}

// Busy reports whether a write is under way.
func (b *Batcher) Busy() bool {
	b.b.mu.Lock()
	defer b.b.mu.Unlock()
	return b.b.busy
}

// StartSeveral starts executions in one statement; those of here claimed by this process, for callers who run them.
func (e *Engine) StartSeveral(ctx context.Context, specs []Spec, here []bool) ([]Execution, error) {
	all := make([]postgres.Strict, len(specs))
	for i, s := range specs {
		status := "pending"
		if here[i] {
			status = "running"
		}
		args, err := s.arguments(status, "")
		if err != nil {
			return nil, err
		}
		all[i] = args
	}
	answers, err := e.startSeveral(ctx, all)
	if err != nil {
		return nil, err
	}
	started := make([]Execution, len(answers))
	for i, a := range answers {
		started[i] = a.value
	}
	return started, nil
}

// Works reports whether the workers of this process look for executions.
func (e *Engine) Works() bool { return e.works() }

// ReadBoth reads executions as a claim does, and as pgx does.
func ReadBoth(ctx context.Context, db postgres.DB, mode pgx.QueryExecMode) (ours, theirs []Execution, err error) {
	rows, err := db.Query(ctx, `select `+columns+` from agent_executions order by id`, mode)
	if err != nil {
		return nil, nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var a, b Execution
		if err := errors.Join(scan(rows, a.targets()), rows.Scan(b.targets()...)); err != nil {
			return nil, nil, err
		}
		ours, theirs = append(ours, a), append(theirs, b)
	}
	return ours, theirs, rows.Err()
}

// Scan is how a row of any query is read.
func Scan(rows pgx.Rows, into ...any) error { return scan(rows, into) }
