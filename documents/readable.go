package documents

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Readable lists the documents that an execution may read, newest first, at most so many: those of its thread, its own,
// and those of the executions that started it. Without a thread they are also an admin's that belong to nobody.
func Readable(ctx context.Context, db postgres.DB, execution string, most int) ([]Document, error) {
	rows, err := db.Query(ctx, `
		select `+columns+` from agent_documents
		 where id in (select lanekeeper.agent_readable_documents(nullif(@execution, '')::uuid)) order by id desc limit @most`,
		postgres.Strict{"execution": execution, "most": most})
	if err != nil {
		return nil, fmt.Errorf("list documents of execution: %w", err)
	}
	got, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Document])
	if err != nil {
		return nil, fmt.Errorf("list documents of execution: %w", err)
	}
	return got, nil
}

// GetReadable reads a document without its content, if the execution may read it: one of [Readable], and any for an
// admin's operate session. Every other id is [ErrNotFound].
func GetReadable(ctx context.Context, db postgres.DB, execution, id string) (Document, error) {
	rows, err := db.Query(ctx, `
		select `+columns+` from agent_documents
		 where id in (select lanekeeper.agent_readable_documents(nullif(@execution, '')::uuid, lanekeeper.agent_uuid(@id)))`,
		postgres.Strict{"execution": execution, "id": postgres.Text(id)})
	return one(rows, err, "read document")
}
