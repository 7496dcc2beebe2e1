package postgres

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

const (
	// LockTimeout bounds the wait of one try for a lock: firstLockWait, for SQL.
	LockTimeout = "50ms"
	// LockRetryTimeout bounds the retries of a request's write that another transaction blocks.
	LockRetryTimeout = time.Second
	// reservedLockTimeout bounds every other lock wait on a connection of a reserved pool, in milliseconds.
	reservedLockTimeout = "1000"
)

// LockedError reports a write that another open transaction blocked for too long. The write had no effect.
type LockedError struct {
	What    string // the locked object, for example "event id x"
	Holders string // the transactions that may hold it; empty if none is known
	cause   error
}

func (e *LockedError) Error() string {
	text := e.What + " is in use by another transaction of the database"
	if e.Holders != "" {
		text += "; it may be " + e.Holders
	}
	return text
}

// Unwrap returns the database's error; nil if another write of this process waited for the same lock.
func (e *LockedError) Unwrap() error { return e.cause }

// Locked reports that another transaction did not release a lock in time.
func Locked(err error) bool {
	_, locked := errors.AsType[*LockedError](err)
	return locked || IsCode(err, codeLocked)
}

// ExplainLock converts an error that reports a lock to a LockedError. The LockedError names the longest open
// transactions that write to one of tables. ExplainLock returns other errors unchanged.
func ExplainLock(ctx context.Context, db DB, err error, what string, tables ...string) error {
	if !Locked(err) {
		return err
	}
	holders, failed := OpenTransactions(ctx, db, tables...)
	if failed != nil {
		holders = "" // report the lock, not the failed query
	}
	return &LockedError{What: what, Holders: holders, cause: err}
}

// OpenTransactions names the three longest open transactions of other sessions that write to one of tables, or lock its
// rows. Those of another role come first, because PostgreSQL hides their age.
func OpenTransactions(ctx context.Context, db DB, tables ...string) (string, error) {
	var open string
	err := db.QueryRow(ctx, `
		with writing as (
		  select distinct l.pid, l.virtualtransaction from pg_locks l
		   where l.granted and l.locktype = 'relation' and l.relation = any (@tables::text[]::regclass[]::oid[])
		     and l.database = (select d.oid from pg_database d where d.datname = current_database())
		     and l.mode in ('RowShareLock', 'RowExclusiveLock') and l.pid is distinct from pg_backend_pid()),
		known as (
		  select a.xact_start as since,
		         format('session %s (%s, %s, its transaction is open for %s s)', a.pid,
		                coalesce(nullif(a.application_name, ''), 'no name'),
		                coalesce(a.state, 'role ' || a.usename),
		                coalesce(floor(extract(epoch from clock_timestamp() - a.xact_start))::text, '?')) as who
		    from writing w join pg_stat_activity a on a.pid = w.pid
		   where a.xact_start < clock_timestamp() - interval '500 milliseconds' or a.state is null -- of another role
		  union all
		  select p.prepared,
		         format('prepared transaction %L (open for %s s)', p.gid,
		                floor(extract(epoch from clock_timestamp() - p.prepared)))
		    from writing w
		    join pg_locks o on w.pid is null and o.locktype = 'transactionid' and o.virtualtransaction = w.virtualtransaction
		    join pg_prepared_xacts p on p.transaction = o.transactionid)
		select coalesce(string_agg(o.who, '; ' order by o.since nulls first), '')
		  from (select k.since, k.who from known k order by k.since nulls first limit 3) o`,
		Strict{"tables": tables}).Scan(&open)
	if err != nil {
		return "", fmt.Errorf("list open transactions: %w", err)
	}
	return open, nil
}

// InTxWithin is InTx with lock waits bounded by LockTimeout. On a pgx.Tx it is a savepoint, and the outer transaction
// sets its own bound.
func InTxWithin(ctx context.Context, db Beginner, fn func(tx pgx.Tx) error) error {
	return inTxWithin(ctx, db, firstLockWait, fn)
}

func inTxWithin(ctx context.Context, db Beginner, wait time.Duration, fn func(tx pgx.Tx) error) error {
	if b, ok := db.(txBeginner); ok {
		begin := fmt.Sprintf("begin isolation level read committed; set local lock_timeout = %d", wait.Milliseconds())
		return pgx.BeginTxFunc(ctx, b, pgx.TxOptions{BeginQuery: begin}, fn)
	}
	return pgx.BeginFunc(ctx, db, fn)
}
