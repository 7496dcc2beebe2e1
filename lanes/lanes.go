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
	"context"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/oklog/ulid/v2"
	"golang.org/x/text/unicode/norm"

	"github.com/lanekeeper/lanekeeper/trace"
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

// longestName of a lane or an owner, in characters.
const longestName = 255

// unseen are characters of which a reader sees nothing, or that change how others are seen. agent_name_fault has the
// same.
var unseen = &unicode.RangeTable{
	R16: []unicode.Range16{
		{0x80, 0xa0, 1},
		{0xad, 0xad, 1},
		{0x34f, 0x34f, 1},
		{0x61c, 0x61c, 1},
		{0x115f, 0x1160, 1},
		{0x1680, 0x1680, 1},
		{0x17b4, 0x17b5, 1},
		{0x180b, 0x180f, 1},
		{0x2000, 0x200f, 1},
		{0x2028, 0x202f, 1},
		{0x205f, 0x206f, 1},
		{0x2800, 0x2800, 1},
		{0x3000, 0x3000, 1},
		{0x3164, 0x3164, 1},
		{0xfe00, 0xfe0f, 1},
		{0xfeff, 0xfeff, 1},
		{0xffa0, 0xffa0, 1},
		{0xfff0, 0xfffb, 1},
	},
	R32:         []unicode.Range32{{0x1d173, 0x1d17a, 1}, {0xe0000, 0xe0fff, 1}},
	LatinOffset: 2,
}

// ValidName reports whether a lane or an owner may have a name: 1 to 255 printable characters, not only blanks, that
// look like no other name. So it has no invisible characters, none that change the direction of the text, no blanks
// other than the space, and its accents are composed (Unicode's normal form C). The database refuses every other name
// with 22023.
func ValidName(name string) bool {
	if n := utf8.RuneCountInString(name); n < 1 || n > longestName || !utf8.ValidString(name) || strings.Trim(name, " ") == "" {
		return false
	}
	for _, r := range name {
		if unicode.IsControl(r) || unicode.Is(unseen, r) {
			return false
		}
	}
	return norm.NFC.IsNormalString(name)
}

// Owner is one claim of one run: who holds a lane. The zero value owns nothing. Owners are made by
// ClaimOwner for executions and by Acquire and AcquireWait for everything else, where each call
// is an owner of its own.
type Owner struct {
	name  string
	claim bool // of an execution: its lanes end with it, in SQL
}

var executionID = regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)

// ClaimOwner is the owner of the lanes of an execution under one of its claims. With anything but
// an execution's id and a claim number above 0 it is the zero Owner, which every function
// refuses with ErrInvalid.
func ClaimOwner(execution string, claim int64) Owner {
	if claim <= 0 || !executionID.MatchString(execution) {
		return Owner{}
	}
	return Owner{name: execution + "#" + strconv.FormatInt(claim, 10), claim: true}
}

// String is the owner as it stands in agent_locks.locked_by.
func (o Owner) String() string { return o.name }

// runOwner is a new owner for work outside executions, never the same twice. A trace in
// ctx becomes its beginning, so that the live view can name it, and a process its end, so that the sweep finds it.
func runOwner(ctx context.Context, process string) Owner {
	name := "run"
	if id, ok := trace.From(ctx); ok {
		name = string(id.TraceID)
	}
	name += "/" + ulid.Make().String()
	if process != "" {
		name += "@" + process
	}
	return Owner{name: name}
}

// policy is what a lane's name says about its leases. It is decided here and nowhere else.
type policy struct {
	ttl     time.Duration // default
	renewed bool          // by Run; otherwise only by Lease.Renew or by acquiring again
	cancels bool          // losing it cancels the work
}

const (
	surfaceTTL = 5 * time.Minute
	threadTTL  = 10 * time.Minute
	jobTTL     = time.Hour
)

// policyOf knows the lanes of the runtime by name; any other name is an external job's.
// A thread's lane ends when nothing was sent for its TTL: each send renews it, and losing it cancels
// nothing, because the next send acquires it again or queues.
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

// Option changes one acquisition.
type Option func(*settings)

type settings struct {
	ttl      time.Duration
	patience time.Duration // 0: a little longer than ttl
	process  string        // its id in agent_workers; empty: the lease ends by its time only
}

// WithTTL sets how long the lease lasts without a renewal, 1 second to 30 days, in whole seconds
// (rounded up). A nested hold never shortens the lease of the outer one.
func WithTTL(ttl time.Duration) Option { return func(s *settings) { s.ttl = ttl } }

// WithPatience sets how long AcquireWait waits. The default is longer than the lane's TTL, so
// that a holder that died is outlived.
func WithPatience(patience time.Duration) Option { return func(s *settings) { s.patience = patience } }

// WithProcess has the lane go free when a process of that id in agent_workers is dead, and not at the end of its
// lease only: the owner ends with "@" and the id, by which the sweep finds it. It is for Acquire and AcquireWait;
// lanes of an execution go on with it.
func WithProcess(id string) Option { return func(s *settings) { s.process = id } }

func settingsFor(lane string, opts []Option) settings {
	s := settings{ttl: policyOf(lane).ttl}
	for _, o := range opts {
		o(&s)
	}
	s.ttl = wholeSeconds(s.ttl)
	if s.patience <= 0 {
		s.patience = s.ttl + s.ttl/4 + queuePlace
	}
	return s
}

// wholeSeconds rounds away from zero, so that neither 1 ms nor -1 ms becomes the invalid 0.
func wholeSeconds(d time.Duration) time.Duration {
	if d%time.Second == 0 {
		return d
	}
	if d > 0 {
		return d.Truncate(time.Second) + time.Second
	}
	return d.Truncate(time.Second) - time.Second
}

// seconds is d for an int parameter; what does not fit is out of every allowed range anyway.
func seconds(d time.Duration) int32 {
	const most = 1<<31 - 1
	return int32(max(-most, min(most, int64(d/time.Second))))
}
