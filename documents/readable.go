package documents

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// readableIDs are the ids of the documents that @execution may read; with the id of one in @id, that one or none.
const readableIDs = `
	with recursive run as (
	  select x.id, x.parent_id, x.thread_id, x.surface, 0 as depth from agent_executions x where x.id = nullif(@execution, '')::uuid
	  union all
	  select x.id, x.parent_id, x.thread_id, x.surface, r.depth + 1 from run r join agent_executions x on x.id = r.parent_id where r.depth < 100)
	select d.id from run r join agent_documents d on d.thread_id = r.thread_id where r.depth = 0 and d.id = coalesce(lanekeeper.agent_uuid(@id), d.id)
	union
	select d.id from run r join agent_documents d on d.execution_id = r.id where d.id = coalesce(lanekeeper.agent_uuid(@id), d.id)
	union
	select d.id from run r join agent_documents d on d.thread_id is null and d.execution_id is null and d.owner_kind = 'admin'
	 where r.depth = 0 and r.thread_id is null and d.id = coalesce(lanekeeper.agent_uuid(@id), d.id)
	union
	select d.id from run r join agent_documents d on d.id = lanekeeper.agent_uuid(@id) where r.depth = 0 and r.surface = 'operate'`

// Readable lists the documents that an execution may read, newest first, at most so many: those of its thread, its own,
// and those of the executions that started it. Without a thread they are also an admin's that belong to nobody.
func Readable(ctx context.Context, db postgres.DB, execution string, most int) ([]Document, error) {
	rows, err := db.Query(ctx, `
		select `+columns+` from agent_documents
		 where id in (`+readableIDs+`) order by id desc limit @most`,
		postgres.Strict{"execution": execution, "id": "", "most": most})
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
		 where id = lanekeeper.agent_uuid(@id) and id in (`+readableIDs+`)`,
		postgres.Strict{"execution": execution, "id": postgres.Text(id)})
	return one(rows, err, "read document")
}
