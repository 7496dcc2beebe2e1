// Package lanes keeps two runs from doing the same work at once.
//
// A lane is a name, such as "heartbeat" or "pipeline:prices", that one owner holds for a while. The
// hold is a lease in the table agent_locks: owner, fencing token, end. A holder that dies loses the
// lane when the lease ends, so nothing has to clean up after it. The rules are SQL functions
// (migrations/schema/020_lanes.sql), so any client of the database obeys them; this package is a thin
// client that adds what only a process can: renewal, cancellation and counting.
//
// It promises:
//
//   - At most one owner holds a lane at any moment of the database's clock, and the tokens of one
//     lane grow in the order of its grants.
//   - A try never waits. AcquireWait keeps a place in a queue: nobody is overtaken or starves. A release hands the lane to
//     who waits first, in its own transaction, and the notification that tells it so leaves after the commit: the waiter
//     sends nothing. The lease that begins so is short, at most 10 seconds, until [Keeper.Run] has renewed it: a waiter that died
//     meanwhile lets it run out, and one that gives up gives it back.
//   - The context of a lease is cancelled with cause [ErrLost] when the lane is lost, and at the
//     latest when the lease ends by the local monotonic clock, started before the call that
//     acquired or renewed it. So it ends no later than the database's lease, even when the
//     database cannot be reached.
//   - No transaction of another client, however long it stays open, delays a renewal or a try, or a release or a break for longer than
//     about a second: then that is a *BlockedError, which says who is in the way.
//   - A break reaches its holder by notification; without notifications the holder finds it at its next renewal.
//   - Only the holder releases, only once, and a nested hold of the same owner never frees the outer one. A grant is
//     durable when it is answered, a hand-over when it is notified; a release to nobody is within a second. A release that a broken
//     connection interrupts goes on in the background, see [Lease.Release]. A server that crashes meanwhile shows the lane as held
//     until its lease ends, unless somebody else has got it: that grant makes the release durable with itself.
//   - An owner is one claim of one run. The type [Owner] has no constructor from a mere string, so a
//     constant owner, which would let a second instance in, cannot be written.
//
// A paused process can still write after its lease has ended, before it notices. A write that must
// not happen then begins with [Lease.Fence] in its transaction: it fails with [ErrStale] once the
// lane has gone to somebody else, and a takeover waits for a fenced transaction that is under way.
//
// A lane can be lent: a child execution acts in the lanes of the parent that waits for it. The borrower has a token of
// its own, so the lender's late writes are refused; the lane goes back, with a new token again, when the borrower ends,
// gives it back or lets it expire, and when a lender stops waiting. SQL decides who may borrow and keeps the
// loans (migrations/schema/020_lanes.sql); here it is only [Keeper.AcquireAs].
//
// One [Keeper] per process renews every lease it holds with one statement, see [Keeper.Run].
package lanes

import (
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

var (
	// ErrBusy reports a lane that somebody else holds. The error is a *BusyError.
	ErrBusy = errors.New("lane busy")
	// ErrLost is the cause of the cancellation of a lease's context: the lane was lost.
	ErrLost = errors.New("lane lost")
	// ErrStale reports a fenced write under a token that is no longer its lane's (SQLSTATE LK001).
	ErrStale = errors.New("lane token is stale")
	// ErrBlocked reports a lane that another transaction has in use, such as a fenced write that is still open, for
	// longer than about a second (SQLSTATE 55P03). Nothing has changed. The error is a *BlockedError.
	ErrBlocked = errors.New("lane in use")
	// ErrInvalid reports a lane, owner, TTL or reason that the database refuses (SQLSTATE 22023).
	ErrInvalid = errors.New("invalid")
)

// SQLSTATEs that the lane functions raise, and that of a text which does not come as far as to them.
const (
	codeStale   = "LK001"
	codeBlocked = "55P03"
	codeInvalid = "22023"
	codeNoText  = "22021"
)

// BusyError says who holds a lane. It matches ErrBusy.
type BusyError struct {
	Lane      string
	Holder    string    // owner of the live lease, or who waits first; empty when the row was being changed
	ExpiresAt time.Time // end of that lease by the database's clock; zero when unknown or parked
	// Soon says that an execution holds it which has started the one that asks, and lends it when it begins to wait.
	Soon bool
}

func (e *BusyError) Error() string {
	switch {
	case e.Holder == "":
		return fmt.Sprintf("acquire %s: lane busy: somebody takes or releases it right now", e.Lane)
	case e.ExpiresAt.IsZero():
		return fmt.Sprintf("acquire %s: lane busy: held by %s", e.Lane, e.Holder)
	}
	return fmt.Sprintf("acquire %s: lane busy: held by %s until %s", e.Lane, e.Holder, e.ExpiresAt.UTC().Format(time.RFC3339))
}

// Is makes errors.Is(err, ErrBusy) true.
func (e *BusyError) Is(target error) bool { return target == ErrBusy }

// BlockedError says which transaction is in the way. It matches ErrBlocked.
type BlockedError struct {
	Reason string // pid, application and since when, in the words of the database
	Hint   string // what to do
	cause  *pgconn.PgError
}

func (e *BlockedError) Error() string { return e.Reason }

// Is makes errors.Is(err, ErrBlocked) true.
func (e *BlockedError) Is(target error) bool { return target == ErrBlocked }

// Unwrap is what the database said.
func (e *BlockedError) Unwrap() error { return e.cause }

// blocked makes a *BlockedError of an error that says so, and leaves every other as it is.
func blocked(err error) error {
	if said, ok := errors.AsType[*pgconn.PgError](err); ok && said.Code == codeBlocked {
		return &BlockedError{Reason: said.Message, Hint: said.Hint, cause: said}
	}
	return err
}
