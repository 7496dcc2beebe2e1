package documents

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/threads"
)

// ErrInUse reports a document that a conversation or an execution has.
var ErrInUse = errors.New("the document is in use")

// owned narrows a query to the documents of a principal.
const owned = `owner_kind = @kind and owner = @owner and visitor = @proof`

// of are the arguments of owned, and an id.
func of(p threads.Principal, id string) postgres.Strict {
	return postgres.Strict{
		"id": postgres.Text(id), "kind": string(p.Kind), "owner": postgres.Text(p.Owner),
		"proof": p.Proof,
	}
}

// GetOwn reads a document of a principal without its content. Somebody else's is [ErrNotFound].
func GetOwn(ctx context.Context, db postgres.DB, p threads.Principal, id string) (Document, error) {
	rows, err := db.Query(ctx, `select `+columns+` from agent_documents where id = lanekeeper.agent_uuid(@id) and `+owned,
		of(p, id))
	return one(rows, err, "read document")
}

// ListOwn reads the documents of a principal without their content, at most so many: newest first, or oldest first.
// They follow the document named after, where one is named.
func ListOwn(ctx context.Context, db postgres.DB, p threads.Principal, after string, oldest bool, most int) ([]Document,
	error,
) {
	args := of(p, after)
	args["most"], args["oldest"] = most, oldest
	rows, err := db.Query(ctx, `
		select `+columns+` from agent_documents
		 where `+owned+` and (@id = '' or case when @oldest then id > lanekeeper.agent_uuid(@id) else id < lanekeeper.agent_uuid(@id) end)
		 order by case when @oldest then id end, id desc limit @most`, args)
	if err != nil {
		return nil, fmt.Errorf("list documents: %w", err)
	}
	got, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Document])
	if err != nil {
		return nil, fmt.Errorf("list documents: %w", err)
	}
	return got, nil
}

// DeleteOwn deletes a document of a principal that nothing uses, in the caller's transaction. [ErrInUse]: a thread or
// an execution has it. Somebody else's is [ErrNotFound].
func DeleteOwn(ctx context.Context, tx pgx.Tx, p threads.Principal, id string) (Document, error) {
	rows, err := tx.Query(ctx, `
		select `+columns+` from agent_documents where id = lanekeeper.agent_uuid(@id) and `+owned+` for update`, of(p, id))
	d, err := one(rows, err, "delete document")
	switch {
	case err != nil:
		return d, err
	case d.ThreadID != nil:
		return d, fmt.Errorf("%w: it belongs to a conversation, and goes with it", ErrInUse)
	case d.ExecutionID != nil:
		return d, fmt.Errorf("%w: it belongs to an execution, and goes with it", ErrInUse)
	}
	return Delete(ctx, tx, d.ID)
}
