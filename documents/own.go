package documents

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/threads"
)

// GetOwn returns a principal's document without its content, or [ErrNotFound].
func GetOwn(ctx context.Context, db postgres.DB, p threads.Principal, id string) (Document, error) {
	rows, err := db.Query(ctx, `select `+columns+` from agent_documents where id = lanekeeper.agent_uuid(@id) and `+ownedBy,
		ownerArgs(p, postgres.Strict{"id": postgres.Text(id)}))
	return collectOne(rows, err, "read document")
}

// ListOwn returns up to limit of a principal's documents without their content, newest or oldest first. After is an
// exclusive cursor: the id of a document, perhaps of a deleted one. It returns [ErrNotFound] for any other text.
func ListOwn(
	ctx context.Context, db postgres.DB, p threads.Principal, after string, oldest bool, limit int,
) ([]Document, error) {
	rows, err := db.Query(ctx, `
		select `+columns+` from agent_documents
		 where `+ownedBy+` and (@after = '' or case when @oldest then id > nullif(@after, '')::uuid
		                                           else id < nullif(@after, '')::uuid end)
		 order by case when @oldest then id end, id desc limit @limit`,
		ownerArgs(p, postgres.Strict{"after": postgres.Text(after), "oldest": oldest, "limit": limit}))
	list, err := postgres.Collect(rows, err, "list documents", pgx.RowToStructByPos[Document])
	if postgres.IsCode(err, "22P02") { // after is not a UUID
		err = fmt.Errorf("list documents: %w", ErrNotFound)
	}
	return list, err
}

// DeleteOwn deletes a principal's unused document, in the caller's transaction. It returns [ErrInUse] for a document of
// a thread or an execution, and [ErrNotFound] for one of another owner.
func DeleteOwn(ctx context.Context, tx pgx.Tx, p threads.Principal, id string) (Document, error) {
	rows, err := tx.Query(ctx, `
		select `+columns+` from agent_documents where id = lanekeeper.agent_uuid(@id) and `+ownedBy+` for update`,
		ownerArgs(p, postgres.Strict{"id": postgres.Text(id)}))
	d, err := collectOne(rows, err, "delete document")
	switch {
	case err != nil:
		return d, err
	case d.ThreadID != nil:
		return d, fmt.Errorf("%w: it belongs to a conversation and is deleted with it", ErrInUse)
	case d.ExecutionID != nil:
		return d, fmt.Errorf("%w: it belongs to an execution and is deleted with it", ErrInUse)
	}
	return Delete(ctx, tx, d.ID)
}

// ErrInUse reports a document of a thread or an execution.
var ErrInUse = errors.New("the document is in use")

// ownedBy selects the documents of a principal; see ownerArgs.
const ownedBy = `owner_kind = @kind and owner = @owner and visitor = @proof`

// ownerArgs adds the arguments of ownedBy to args.
func ownerArgs(p threads.Principal, args postgres.Strict) postgres.Strict {
	args["kind"], args["owner"], args["proof"] = string(p.Kind), postgres.Text(p.Owner), p.Proof
	return args
}

// Attach adds a principal's document to a thread, in the caller's transaction. It copies the document of another
// thread, because each is deleted with its thread. It returns [ErrNotFound] for a document of another owner.
func Attach(ctx context.Context, tx pgx.Tx, p threads.Principal, thread, id string) (Document, error) {
	rows, err := tx.Query(ctx, `
		select `+columns+` from agent_documents where id = lanekeeper.agent_uuid(@id) and `+ownedBy+` for update`,
		ownerArgs(p, postgres.Strict{"id": postgres.Text(id)}))
	d, err := collectOne(rows, err, "attach document")
	if err != nil || d.ThreadID != nil && *d.ThreadID == thread {
		return d, err
	}
	if err := checkThreadQuota(ctx, tx, thread, d.Size); err != nil {
		return d, err
	}
	args := postgres.Strict{"id": d.ID, "thread": thread}
	if d.ThreadID != nil {
		rows, err = tx.Query(ctx, `
			insert into agent_documents (name, content_type, size, sha256, is_text, content, thread_id, trace_id, owner_kind,
			  owner, visitor)
			select name, content_type, size, sha256, is_text, content, @thread, trace_id, owner_kind, owner, visitor
			  from agent_documents where id = @id returning `+columns, args)
		return collectOne(rows, err, "attach document")
	}
	rows, err = tx.Query(ctx, `
		update agent_documents set thread_id = @thread, expires_at = null where id = @id returning `+columns, args)
	return collectOne(rows, err, "attach document")
}

// AddOnce is an idempotent [Add] for a thread. It returns the thread's document of the same owner, name and content if
// there is one.
func AddOnce(ctx context.Context, tx pgx.Tx, u Upload) (Document, error) {
	sum := sha256.Sum256(u.Content)
	rows, err := tx.Query(ctx, `
		select `+columns+` from agent_documents
		 where thread_id = @thread and sha256 = @sum and name = @name and `+ownedBy+` order by id limit 1`,
		ownerArgs(u.By, postgres.Strict{
			"thread": postgres.Text(u.ThreadID), "sum": sum[:], "name": CleanName(u.Name),
		}))
	d, err := collectOne(rows, err, "find document")
	if errors.Is(err, ErrNotFound) {
		return Add(ctx, tx, u)
	}
	return d, err
}
