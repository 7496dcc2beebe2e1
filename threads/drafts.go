package threads

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Draft is the answer of an unfinished turn so far. The first Settled characters are final; the rest may change when
// another process resumes the turn.
type Draft struct {
	Content string
	Settled int
	Claim   int64 // of the writer; SaveDraft has it as an argument
}

// Final returns the part of a draft that no longer changes.
func (d Draft) Final() string {
	characters := []rune(d.Content)
	return string(characters[:min(d.Settled, len(characters))])
}

// SaveDraft stores the answer so far of an execution, under its claim. A claim that has ended changes nothing, and that
// is no error: the draft is for display only.
func SaveDraft(ctx context.Context, db postgres.DB, execution string, claim int64, d Draft) error {
	_, err := db.Exec(ctx, `
		insert into agent_message_drafts as d (execution_id, claim, content, settled)
		select x.id, x.claim, @content, @settled from agent_executions x
		 where x.id = @id and x.claim = @claim and x.status = 'running'
		on conflict (execution_id) do update
		   set claim = excluded.claim, content = excluded.content, settled = excluded.settled, updated_at = clock_timestamp()
		 where d.claim <= excluded.claim`,
		postgres.Strict{"id": execution, "claim": claim, "content": postgres.Text(d.Content), "settled": d.Settled})
	if err != nil {
		return fmt.Errorf("save draft: %w", err)
	}
	return nil
}

// DraftOf reads the draft of an execution; the zero Draft when there is none, or it has become a message.
func DraftOf(ctx context.Context, db postgres.DB, execution string) (Draft, error) {
	var d Draft
	err := db.QueryRow(ctx, `select content, settled, claim from agent_message_drafts where execution_id = @id`,
		postgres.Strict{"id": execution}).Scan(&d.Content, &d.Settled, &d.Claim)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return Draft{}, fmt.Errorf("read draft: %w", err)
	}
	return d, nil
}

// EndDraft locks a thread until tx ends, and deletes the draft of an execution. It returns the seq of the execution's
// interrupted message, or nil. The caller posts the text only if it is nil.
func EndDraft(ctx context.Context, tx pgx.Tx, thread, execution string) (interrupted *int64, err error) {
	args := postgres.Strict{"id": execution}
	b := &pgx.Batch{}
	b.Queue(`select from agent_threads where id = @thread for no key update`, postgres.Strict{"thread": thread})
	b.Queue(`delete from agent_message_drafts where execution_id = @id`, args)
	b.Queue(`select max(seq) from agent_messages where execution_id = @id and interrupted`, args).
		QueryRow(func(row pgx.Row) error { return row.Scan(&interrupted) })
	if err := tx.SendBatch(ctx, b).Close(); err != nil {
		return nil, fmt.Errorf("end draft: %w", err)
	}
	return interrupted, nil
}

// DeleteDraft deletes the draft of an execution, whose answer is a message now.
func DeleteDraft(ctx context.Context, db postgres.DB, execution string) error {
	_, err := db.Exec(ctx, `delete from agent_message_drafts where execution_id = @id`, postgres.Strict{"id": execution})
	if err != nil {
		return fmt.Errorf("delete draft: %w", err)
	}
	return nil
}
