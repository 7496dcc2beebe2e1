package documents

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/threads"
)

// quota bounds the documents of one owner: a thread, a chat key or a visitor.
type quota struct {
	lock               string                                            // the advisory lock's name, before the owner
	queueCount         func(b *pgx.Batch, owner string) *pgx.QueuedQuery // the number of documents and their bytes
	maxCount, maxBytes int64
	limit              string // format of the limits in the error
}

var (
	threadQuota = quota{
		"documents of thread ",
		func(b *pgx.Batch, owner string) *pgx.QueuedQuery {
			return b.Queue(`select count(*), coalesce(sum(size), 0) from agent_documents where thread_id = @owner`,
				postgres.Strict{"owner": owner})
		},
		MaxPerThread, MaxThreadBytes, "limit per thread is %d documents and %d bytes",
	}
	keyQuota = quota{
		"documents of key ",
		func(b *pgx.Batch, owner string) *pgx.QueuedQuery {
			return b.Queue(`
				select count(*), coalesce(sum(size), 0) from agent_documents
				 where owner = @owner and owner_kind <> 'admin' and expires_at >= statement_timestamp()`,
				postgres.Strict{"owner": owner})
		},
		MaxUnused, MaxUnusedBytes, "limit per chat key is %d unused uploads and %d bytes; try again later",
	}
)

// visitorQuota bounds the documents of a visitor of a chat key.
func visitorQuota(proof string) quota {
	return quota{
		keyQuota.lock,
		func(b *pgx.Batch, owner string) *pgx.QueuedQuery {
			return b.Queue(`
				select count(*), coalesce(sum(size), 0) from agent_documents
				 where owner = @owner and visitor = @visitor and expires_at >= statement_timestamp()`,
				postgres.Strict{"owner": owner, "visitor": proof})
		},
		MaxVisitorUnused, MaxVisitorUnusedBytes,
		"limit per visitor is %d unused uploads and %d bytes; use or delete one, or try again in an hour",
	}
}

// check runs b, locks the owner's documents until the transaction ends, and returns [ErrTooMany] if a document of
// addBytes exceeds the quota.
func (q quota) check(ctx context.Context, tx pgx.Tx, b *pgx.Batch, owner string, addBytes int64) error {
	var count, size int64
	owner = postgres.Text(owner)
	b.Queue(`select pg_advisory_xact_lock(hashtextextended(@lock::text || @owner::text, 0))`,
		postgres.Strict{"lock": q.lock, "owner": owner})
	q.queueCount(b, owner).QueryRow(func(row pgx.Row) error { return row.Scan(&count, &size) })
	if err := tx.SendBatch(ctx, b).Close(); err != nil {
		return fmt.Errorf("count documents: %w", err)
	}
	if count >= q.maxCount || size+addBytes > q.maxBytes {
		return fmt.Errorf("%w: "+q.limit, ErrTooMany, q.maxCount, q.maxBytes)
	}
	return nil
}

// checkQuota applies the quota of the upload's thread, or those of its visitor and its chat key for an unused upload.
func checkQuota(ctx context.Context, tx pgx.Tx, u Upload) error {
	switch size := int64(len(u.Content)); {
	case u.ThreadID != "":
		return checkThreadQuota(ctx, tx, u.ThreadID, size)
	case u.isUnused():
		if u.By.Kind == threads.ByVisitor {
			if err := visitorQuota(u.By.Proof).check(ctx, tx, &pgx.Batch{}, u.By.Owner, size); err != nil {
				return err
			}
		}
		return keyQuota.check(ctx, tx, &pgx.Batch{}, u.By.Owner, size)
	}
	return nil
}

// checkThreadQuota applies the quota of a thread, or returns [threads.ErrNotFound]. Lock order: thread row, then
// advisory lock. Writers of messages lock the row first, too.
func checkThreadQuota(ctx context.Context, tx pgx.Tx, thread string, addBytes int64) error {
	b := &pgx.Batch{}
	b.Queue(`select 1 from agent_threads where id = @thread for key share`,
		postgres.Strict{"thread": postgres.Text(thread)}).
		QueryRow(func(row pgx.Row) error { return row.Scan(new(int)) })
	err := threadQuota.check(ctx, tx, b, thread, addBytes)
	if errors.Is(err, pgx.ErrNoRows) {
		return threads.ErrNotFound
	}
	return err
}

// DeleteExpired deletes the unused uploads past their time. Housekeeping calls it.
func DeleteExpired(ctx context.Context, db postgres.DB) error {
	_, err := db.Exec(ctx, `
		with old as (
		  select d.id from agent_documents d where d.expires_at < statement_timestamp() for update skip locked)
		delete from agent_documents d using old o where d.id = o.id`)
	if err != nil {
		return fmt.Errorf("delete expired documents: %w", err)
	}
	return nil
}
