// Package lanes prevents two runs from doing the same work concurrently.
//
// A lane is a name, such as "heartbeat" or "pipeline:prices", that one owner holds for a while. The hold is a lease in
// the table agent_locks: owner, fencing token, expiry. If the holder dies, its lease expires, so no cleanup is needed.
// SQL functions (migrations/schema/020_lanes.sql) enforce the rules for all clients of the database. This package adds
// renewal, cancellation and the count of nested holds.
//
// It guarantees:
//
//   - At most one owner holds a lane at any moment of the database's clock. The tokens of a lane increase in the order
//     of its grants.
//   - Acquire does not wait for the holder. AcquireWait queues, and waiters are served in order. A release hands the
//     lane to the first waiter in its own transaction, and notifies the waiter at the commit. The handed-over lease
//     lasts at most 10 seconds until [Keeper.Run] renews it, so the lease of a dead waiter expires soon. A waiter that
//     gives up releases the lane.
//   - A lost lane cancels the context of its lease with cause [ErrLost], except the lane of a thread. That happens at
//     the latest when the lease expires by the local monotonic clock, counted from before the statement. So in a
//     running process the context ends no later than the database's lease, even without a connection.
//   - An open transaction of another client delays a renewal, an acquire, a release or a break for about a second at
//     most. Then the error is a *BlockedError, which names the transaction.
//   - A break notifies the holder. Without notifications the holder finds the break at its next renewal.
//   - Only the holder can release a lane; an admin can break it. The release of a nested hold never releases the outer
//     one. A grant is durable when it returns, and a handover when it is notified. A release without a waiter becomes
//     durable within a second, or with a later grant. If the server crashes before, the lane is held until its lease
//     expires. An interrupted release continues in the background, see [Lease.Release].
//   - An owner is one claim of one run. The type [Owner] has no constructor from a string, so two instances cannot
//     share an owner by mistake.
//
// A paused process may write after its lease has expired, before it notices. To prevent that, call [Lease.Fence] first
// in the transaction of the write. Fence fails with [ErrStale] when another owner has the lane, and a takeover waits
// for a fenced transaction.
//
// A waiting execution can lend its lanes to a child execution. The borrower has its own token, so the database rejects
// late writes of the lender. The lane returns with a new token when the borrower ends, releases it or lets it expire,
// and when the lender stops waiting. SQL functions decide who may borrow and store the loans. In this package only
// [Keeper.AcquireAs] borrows.
//
// One [Keeper] per process renews all its leases with one statement, see [Keeper.Run].
package lanes

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

var (
	// ErrBusy means that another owner holds the lane. The error is a *BusyError.
	ErrBusy = errors.New("lane busy")
	// ErrLost is the cause of a cancelled lease context: the lane was lost.
	ErrLost = errors.New("lane lost")
	// ErrStale means that the lane no longer has the token of a fenced write (SQLSTATE LK001).
	ErrStale = errors.New("lane token is stale")
	// ErrBlocked means that another open transaction has blocked the lane for about a second (SQLSTATE 55P03). The lane
	// is unchanged. The error is a *BlockedError.
	ErrBlocked = errors.New("lane in use")
	// ErrInvalid means that the database rejects the lane, owner, TTL or reason (SQLSTATE 22023).
	ErrInvalid = errors.New("invalid")
)

// SQLSTATEs of the lane functions, and of invalid UTF-8.
const (
	codeStale       = "LK001"
	codeBlocked     = "55P03"
	codeInvalid     = "22023"
	codeBadEncoding = "22021"
)

// BusyError names the holder of a lane. It matches ErrBusy.
type BusyError struct {
	Lane      string
	Holder    string    // owner of the live lease, or the first waiter; empty when the row was locked
	ExpiresAt time.Time // expiry by the database's clock; zero when unknown or parked
	// WillLend means that the holder is an ancestor of the requesting execution and lends the lane when it waits.
	WillLend bool
}

func (e *BusyError) Error() string {
	switch {
	case e.Holder == "":
		return fmt.Sprintf("acquire %s: lane busy: it is being acquired or released right now", e.Lane)
	case e.ExpiresAt.IsZero():
		return fmt.Sprintf("acquire %s: lane busy: held by %s", e.Lane, e.Holder)
	}
	return fmt.Sprintf("acquire %s: lane busy: held by %s until %s", e.Lane, e.Holder,
		e.ExpiresAt.UTC().Format(time.RFC3339))
}

// Is reports whether target is ErrBusy.
func (e *BusyError) Is(target error) bool { return target == ErrBusy }

// BlockedError names the blocking transaction. It matches ErrBlocked.
type BlockedError struct {
	Reason string // pid, application and start of the transaction, as the database reports them
	Hint   string // the remedy
	cause  *pgconn.PgError
}

func (e *BlockedError) Error() string { return e.Reason }

// Is reports whether target is ErrBlocked.
func (e *BlockedError) Is(target error) bool { return target == ErrBlocked }

// Unwrap returns the database's error.
func (e *BlockedError) Unwrap() error { return e.cause }

// asBlocked turns a lock timeout into a *BlockedError, and returns other errors unchanged.
func asBlocked(err error) error {
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok && postgres.IsCode(err, codeBlocked) {
		return &BlockedError{Reason: pgErr.Message, Hint: pgErr.Hint, cause: pgErr}
	}
	return err
}

// policy has the lease settings of a lane.
type policy struct {
	ttl     time.Duration // default TTL
	renewed bool          // Run renews the lease; otherwise only Lease.Renew or another acquire do
	cancels bool          // the loss of the lane cancels the work
}

const (
	surfaceTTL = 5 * time.Minute
	threadTTL  = 10 * time.Minute
	jobTTL     = time.Hour
)

// policyOf returns the settings for a name. Names that it does not know are lanes of external jobs. Each sent message
// renews the lane of a thread, so the lane expires when nothing is sent for its TTL. The loss cancels nothing, because
// the next message acquires the lane again or queues.
func policyOf(lane string) policy {
	kind, _, named := strings.Cut(lane, ":")
	switch {
	case kind == "thread" && named:
		return policy{ttl: threadTTL}
	case !named && (kind == "heartbeat" || kind == "operate"),
		named && (kind == "webhook" || kind == "automation" || kind == "objective"):
		return policy{ttl: surfaceTTL, renewed: true, cancels: true}
	}
	return policy{ttl: jobTTL, renewed: true, cancels: true}
}

// Option configures one acquire.
type Option func(*settings)

type settings struct {
	ttl     time.Duration
	timeout time.Duration // 0 for a little longer than ttl
	process string        // id in agent_workers of the process whose death releases the lane; empty for none
}

// WithTTL sets the time until a lease without a renewal expires: 1 second to 30 days, rounded up to whole seconds. A
// nested hold never shortens the outer lease.
func WithTTL(ttl time.Duration) Option { return func(s *settings) { s.ttl = ttl } }

// WithTimeout bounds the wait of AcquireWait. The default is longer than the TTL of the lane, so the lease of a dead
// holder expires first.
func WithTimeout(timeout time.Duration) Option { return func(s *settings) { s.timeout = timeout } }

// WithProcess releases the lane after the death of the process with this id in agent_workers, before the lease expires.
// The owner ends with "@" and the id. Use WithProcess with Acquire and AcquireWait only. Executions keep their lanes
// when their process dies.
func WithProcess(id string) Option { return func(s *settings) { s.process = id } }

func settingsFor(lane string, opts []Option) settings {
	s := settings{ttl: policyOf(lane).ttl}
	for _, o := range opts {
		o(&s)
	}
	s.ttl = wholeSeconds(s.ttl)
	if s.timeout <= 0 {
		s.timeout = s.ttl + s.ttl/4 + queuePlaceTTL
	}
	return s
}

// wholeSeconds rounds away from zero, so neither 1 ms nor -1 ms becomes 0.
func wholeSeconds(d time.Duration) time.Duration {
	if d%time.Second == 0 {
		return d
	}
	if d > 0 {
		return d.Truncate(time.Second) + time.Second
	}
	return d.Truncate(time.Second) - time.Second
}

// seconds converts d to whole seconds. It clamps values beyond int32, which the database rejects anyway.
func seconds(d time.Duration) int32 {
	const limit = 1<<31 - 1
	return int32(max(-limit, min(limit, int64(d/time.Second))))
}
