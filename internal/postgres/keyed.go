package postgres

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/sleep"
)

// A [KeyedTx] tries leastTries times at least, and for [LockPatience]. It waits for a lock for firstLockWait at
// first, then for twice as long, up to maxLockWait: a key that many processes write to is busy and moves on, and who
// waits longer gets its turn. Between two tries it waits without a connection, for lockPause to twice as long.
const (
	leastTries    = 5
	firstLockWait = 50 * time.Millisecond
	maxLockWait   = 400 * time.Millisecond
	lockPause     = 20 * time.Millisecond
)

// KeyedTx runs one transaction per key at a time. A transaction holds a connection for at most 400 ms while it waits
// for a lock. When another transaction keeps the lock for about [LockPatience], the error is one that [Locked]
// reports. The zero value is ready, and may be used from many goroutines.
type KeyedTx struct {
	// Slots bounds by its capacity how many are under way at once, so that others have the rest of the connections; nil
	// for no bound.
	Slots chan struct{}

	queue KeyQueue
}

// Do is [InTx] for a key. fn may be called several times: each time in a new transaction, when the one before was
// rolled back.
func (k *KeyedTx) Do(ctx context.Context, db Beginner, key string, fn func(tx pgx.Tx) error) error {
	return k.try(ctx, key, func(ctx context.Context, wait time.Duration) error { return inTxWithin(ctx, db, wait, fn) })
}

// Try is Do for a write that bounds its waits for locks itself, by LockTimeout, and changes nothing when it fails.
func (k *KeyedTx) Try(ctx context.Context, key string, write func(ctx context.Context) error) error {
	return k.try(ctx, key, func(ctx context.Context, _ time.Duration) error { return write(ctx) })
}

func (k *KeyedTx) try(ctx context.Context, key string,
	write func(ctx context.Context, wait time.Duration) error,
) error {
	release, err := k.queue.Acquire(ctx, key, LockPatience)
	if err != nil {
		return err
	}
	defer release()
	return again(ctx, LockPatience, func(ctx context.Context, wait time.Duration) error {
		err := k.bounded(ctx, func(ctx context.Context) error { return write(ctx, wait) })
		if Locked(err) && wait == maxLockWait { // before, others may just have been quicker
			k.queue.MarkBlocked(key)
		}
		return err
	})
}

// bounded makes a write in one of the slots.
func (k *KeyedTx) bounded(ctx context.Context, write func(ctx context.Context) error) error {
	if k.Slots == nil {
		return write(ctx)
	}
	select {
	case k.Slots <- struct{}{}:
		defer func() { <-k.Slots }()
		return write(ctx)
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// again tries for so long, leastTries times at least.
func again(ctx context.Context, patience time.Duration,
	write func(ctx context.Context, wait time.Duration) error,
) error {
	until, wait := time.Now().Add(patience), firstLockWait
	for tries := 1; ; tries++ {
		err := write(ctx, wait)
		pause := lockPause + rand.N(lockPause)
		if !Locked(err) || tries >= leastTries && time.Now().Add(pause).After(until) {
			return err
		}
		wait = min(2*wait, maxLockWait)
		if !sleep.For(ctx, pause) {
			return err
		}
	}
}

// KeyQueue lets one goroutine at a time write what a key names, so that of many that wait for a lock one asks the
// database. The zero value is ready.
type KeyQueue struct {
	keys    KeyedMutex[string]
	mu      sync.Mutex
	blocked map[string]bool // keys whose writer has met a lock
}

// Acquire returns when the caller has the key, which release gives back. Behind a writer that has met a lock it fails
// with a LockedError after patience; behind others it waits until ctx ends.
func (q *KeyQueue) Acquire(ctx context.Context, key string, patience time.Duration) (release func(), err error) {
	for {
		bounded, cancel := context.WithTimeout(ctx, patience)
		unlock, err := q.keys.Lock(bounded, key)
		cancel()
		switch {
		case err == nil:
			return func() { q.mark(key, false); unlock() }, nil
		case ctx.Err() != nil:
			return nil, err
		case q.isBlocked(key):
			return nil, &LockedError{What: "what another request waits for"} // the key may be a secret
		}
	}
}

// MarkBlocked notes that the caller, who has the key, has met a lock.
func (q *KeyQueue) MarkBlocked(key string) { q.mark(key, true) }

func (q *KeyQueue) mark(key string, blocked bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if !blocked {
		delete(q.blocked, key)
		return
	}
	if q.blocked == nil {
		q.blocked = map[string]bool{}
	}
	q.blocked[key] = true
}

func (q *KeyQueue) isBlocked(key string) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.blocked[key]
}

// KeyedMutex lets one goroutine at a time have a key. The zero value is ready.
type KeyedMutex[K comparable] struct {
	mu   sync.Mutex
	open map[K]*turn
}

type turn struct {
	token chan struct{} // has room for one: full while somebody has the key
	users int
}

// Lock returns when the caller has the key; the caller gives it back with the returned function. When ctx ends first,
// it returns its cause.
func (m *KeyedMutex[K]) Lock(ctx context.Context, key K) (unlock func(), err error) {
	mine := m.join(key)
	select {
	case mine.token <- struct{}{}:
		return func() { <-mine.token; m.leave(key, mine) }, nil
	case <-ctx.Done():
		m.leave(key, mine)
		return nil, context.Cause(ctx)
	}
}

func (m *KeyedMutex[K]) join(key K) *turn {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.open == nil {
		m.open = make(map[K]*turn)
	}
	mine := m.open[key]
	if mine == nil {
		mine = &turn{token: make(chan struct{}, 1)}
		m.open[key] = mine
	}
	mine.users++
	return mine
}

func (m *KeyedMutex[K]) leave(key K, mine *turn) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if mine.users--; mine.users == 0 {
		delete(m.open, key)
	}
}

const (
	// LockTimeout is how long one try of a write waits for a lock, and holds its connection: firstLockWait, for SQL.
	LockTimeout = "50ms"
	// LockPatience is how long a request tries a write that another transaction holds up.
	LockPatience = time.Second
	// reservedLockTimeout bounds each other wait for a lock on a connection of a reserved pool, in milliseconds.
	reservedLockTimeout = "1000"
)

// LockedError reports a write that an open transaction of somebody else held up for too long. Nothing has changed.
type LockedError struct {
	What    string // what is locked, for example "event id x"
	Holders string // the transactions that may hold it; empty when none is known
	cause   error
}

func (e *LockedError) Error() string {
	text := e.What + " is in use by another transaction of the database"
	if e.Holders != "" {
		text += "; it may be " + e.Holders
	}
	return text
}

// Unwrap is what the database said; nil when another write of this process waited for the same.
func (e *LockedError) Unwrap() error { return e.cause }

// Locked reports that another transaction did not give up a lock in time.
func Locked(err error) bool {
	_, locked := errors.AsType[*LockedError](err)
	return locked || IsCode(err, codeLocked)
}

// ExplainLock makes a LockedError of an error that reports a lock, with the transactions that write to one of tables
// and have been open for longest. Other errors stay as they are.
func ExplainLock(ctx context.Context, db DB, err error, what string, tables ...string) error {
	if !Locked(err) {
		return err
	}
	holders, failed := OpenTransactions(ctx, db, tables...)
	if failed != nil {
		holders = "" // the lock is what the caller has to hear of
	}
	return &LockedError{What: what, Holders: holders, cause: err}
}

// OpenTransactions names up to three transactions of others that have been open for longest and write to one of tables,
// or lock its rows.
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
		                coalesce(a.state, 'hidden'), floor(extract(epoch from clock_timestamp() - a.xact_start))) as who
		    from writing w join pg_stat_activity a on a.pid = w.pid
		   where a.xact_start < clock_timestamp() - interval '500 milliseconds'
		  union all
		  select p.prepared, format('prepared transaction %L (open for %s s)', p.gid,
		    floor(extract(epoch from clock_timestamp() - p.prepared)))
		    from writing w
		    join pg_locks o on w.pid is null and o.locktype = 'transactionid' and o.virtualtransaction = w.virtualtransaction
		    join pg_prepared_xacts p on p.transaction = o.transactionid)
		select coalesce(string_agg(o.who, '; ' order by o.since), '')
		  from (select k.since, k.who from known k order by k.since limit 3) o`,
		Strict{"tables": tables}).Scan(&open)
	if err != nil {
		return "", fmt.Errorf("list open transactions: %w", err)
	}
	return open, nil
}

// InTxWithin is InTx whose waits for locks are bounded by LockTimeout. On a pgx.Tx it is a savepoint, and that
// transaction sets its own bound.
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
