package documents

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// readableIDs selects the documents that @execution may read. With @id, it selects only that document.
const readableIDs = `
	with recursive run as (
	  select x.id, x.parent_id, x.thread_id, x.surface, 0 as depth from agent_executions x
	    where x.id = nullif(@execution, '')::uuid
	  union all
	  select x.id, x.parent_id, x.thread_id, x.surface, r.depth + 1 from run r
	    join agent_executions x on x.id = r.parent_id where r.depth < 100)
	-- the documents of its thread
	select d.id from run r join agent_documents d on d.thread_id = r.thread_id
	 where r.depth = 0 and d.id = coalesce(lanekeeper.agent_uuid(@id), d.id)
	union
	-- the documents of the execution itself or of an ancestor
	select d.id from run r join agent_documents d on d.execution_id = r.id
	 where d.id = coalesce(lanekeeper.agent_uuid(@id), d.id)
	union
	-- without a thread: documents of the admin that belong to no thread and no execution
	select d.id from run r join agent_documents d on d.thread_id is null and d.execution_id is null
	  and d.owner_kind = 'admin'
	 where r.depth = 0 and r.thread_id is null and d.id = coalesce(lanekeeper.agent_uuid(@id), d.id)
	union
	-- an operate session: any document, by its id
	select d.id from run r join agent_documents d on d.id = lanekeeper.agent_uuid(@id)
	 where r.depth = 0 and r.surface = 'operate'`

// ListReadable returns up to limit documents that an execution may read, newest first: those of its thread, its own,
// and its ancestors' own. Without a thread, these include the admin's documents that belong to no thread and execution.
func ListReadable(ctx context.Context, db postgres.DB, execution string, limit int) ([]Document, error) {
	rows, err := db.Query(ctx, `
		select `+columns+` from agent_documents
		 where id in (`+readableIDs+`) order by id desc limit @limit`,
		postgres.Strict{"execution": execution, "id": "", "limit": limit})
	return postgres.Collect(rows, err, "list documents of execution", pgx.RowToStructByPos[Document])
}

// GetReadable returns a document without its content, or [ErrNotFound] if the execution may not read it. An execution
// may read those of [ListReadable]; an operate session may read all.
func GetReadable(ctx context.Context, db postgres.DB, execution, id string) (Document, error) {
	rows, err := db.Query(ctx, `
		select `+columns+` from agent_documents
		 where id = lanekeeper.agent_uuid(@id) and id in (`+readableIDs+`)`,
		postgres.Strict{"execution": execution, "id": postgres.Text(id)})
	return collectOne(rows, err, "read document")
}
