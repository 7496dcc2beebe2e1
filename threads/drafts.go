package threads

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Sketch is what a turn under way has said so far. The first Settled characters will stay; what follows may be said
// anew when the turn goes on elsewhere.
type Sketch struct {
	Content string
	Settled int
	Claim   int64 // under which it was said; not given to [SaveSketch] with it
}

// Keep returns the part of a sketch that stays.
func (s Sketch) Keep() string {
	letters := []rune(s.Content)
	return string(letters[:min(s.Settled, len(letters))])
}

// SaveSketch stores what an execution has said so far, under its claim. A claim that is over changes nothing,
// and that is no error: the sketch is for onlookers.
func SaveSketch(ctx context.Context, db postgres.DB, execution string, claim int64, s Sketch) error {
	_, err := db.Exec(ctx, `
		insert into agent_message_drafts as d (execution_id, claim, content, settled)
		select x.id, x.claim, @content, @settled from agent_executions x
		 where x.id = @id and x.claim = @claim and x.status = 'running'
		on conflict (execution_id) do update
		   set claim = excluded.claim, content = excluded.content, settled = excluded.settled, updated_at = clock_timestamp()
		 where d.claim <= excluded.claim`,
		postgres.Strict{"id": execution, "claim": claim, "content": postgres.Text(s.Content), "settled": s.Settled})
	if err != nil {
		return fmt.Errorf("save what was said so far: %w", err)
	}
	return nil
}

// SketchOf reads what an execution has said so far; the zero Sketch when that is nothing, or stored as a message.
func SketchOf(ctx context.Context, db postgres.DB, execution string) (Sketch, error) {
	var s Sketch
	err := db.QueryRow(ctx, `select content, settled, claim from agent_message_drafts where execution_id = @id`,
		postgres.Strict{"id": execution}).Scan(&s.Content, &s.Settled, &s.Claim)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return Sketch{}, fmt.Errorf("read what was said so far: %w", err)
	}
	return s, nil
}

// DropSketch forgets what an execution has said so far: it is a message now.
func DropSketch(ctx context.Context, db postgres.DB, execution string) error {
	_, err := db.Exec(ctx, `delete from agent_message_drafts where execution_id = @id`, postgres.Strict{"id": execution})
	if err != nil {
		return fmt.Errorf("drop what was said so far: %w", err)
	}
	return nil
}
