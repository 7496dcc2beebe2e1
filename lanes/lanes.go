// Package lanes keeps two runs from doing the same work at once.
//
// A lane is a name, such as "heartbeat" or "pipeline:prices", that one owner holds for a while. The hold is a lease in
// the table agent_locks: owner, fencing token, expiry. A holder that dies loses the lane when the lease expires, so
// nothing has to clean up. The rules are SQL functions (migrations/schema/020_lanes.sql), so they bind every client of
// the database. This package adds the process's part: renewal, cancellation and counting of nested holds.
//
// It promises:
//
//   - At most one owner holds a lane at any moment of the database's clock. The tokens of a lane grow in the order of
//     its grants.
//   - Acquire never waits. AcquireWait queues: no waiter is overtaken or starves. A release hands the lane to the
//     first waiter in its own transaction, and notifies it at the commit. The handed-over lease is short, at most 10
//     seconds, until [Keeper.Run] renews it. So the lease of a dead waiter expires, and a waiter that gives up
//     releases it.
//   - A lost lane cancels the context of its lease with cause [ErrLost]. That happens at the latest when the lease
//     expires by the local monotonic clock, counted from before the statement. So the context ends no later than the
//     database's lease, even without a connection.
//   - An open transaction of another client delays a renewal, an acquire, a release or a break for about a second at
//     most. Then the error is a *BlockedError, which names the transaction.
//   - A notification tells the holder of a break; without notifications the holder finds it at its next renewal.
//   - Only the holder releases, once, and a nested hold of the same owner never releases the outer one. A grant is
//     durable when it returns, a handover when it is notified. A release to no waiter becomes durable within a
//     second. An interrupted release continues in the background, see [Lease.Release]. A server crash before that
//     shows the lane as held until its lease expires. A later grant makes the release durable with itself.
//   - An owner is one claim of one run. The type [Owner] has no constructor from a string, so no constant owner can
//     let a second instance in.
//
// A paused process can write after its lease has expired, before it notices. Start a write that must not happen then
// with [Lease.Fence] in its transaction. It fails with [ErrStale] once another owner has the lane, and a takeover
// waits for a fenced transaction.
//
// A lane can be lent: a child execution uses the lanes of its waiting parent. The borrower has its own token, so the
// lender's late writes are refused. The lane returns with a new token when the borrower ends, releases it or lets it
// expire, and when the lender stops waiting. SQL decides who may borrow and stores the loans. Here it is only
// [Keeper.AcquireAs].
//
// One [Keeper] per process renews all its leases with one statement, see [Keeper.Run].
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

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

var (
	// ErrBusy reports a lane that another owner holds. The error is a *BusyError.
	ErrBusy = errors.New("lane busy")
	// ErrLost is the cause of a cancelled lease context: the lane was lost.
	ErrLost = errors.New("lane lost")
	// ErrStale reports a fenced write under a token that its lane no longer has (SQLSTATE LK001).
	ErrStale = errors.New("lane token is stale")
	// ErrBlocked reports a lane that another open transaction blocks for more than about a second (SQLSTATE 55P03).
	// Nothing has changed. The error is a *BlockedError.
	ErrBlocked = errors.New("lane in use")
	// ErrInvalid reports a lane, owner, TTL or reason that the database rejects (SQLSTATE 22023).
	ErrInvalid = errors.New("invalid")
)

// SQLSTATEs of the lane functions, and that of text which is not valid UTF-8.
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
	// WillLend reports that the holder started the requesting execution, and lends the lane when it waits.
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

// Is makes errors.Is(err, ErrBusy) true.
func (e *BusyError) Is(target error) bool { return target == ErrBusy }

// BlockedError names the blocking transaction. It matches ErrBlocked.
type BlockedError struct {
	Reason string // pid, application and start of the transaction, as the database reports them
	Hint   string // the remedy
	cause  *pgconn.PgError
}

func (e *BlockedError) Error() string { return e.Reason }

// Is makes errors.Is(err, ErrBlocked) true.
func (e *BlockedError) Is(target error) bool { return target == ErrBlocked }

// Unwrap is the database's error.
func (e *BlockedError) Unwrap() error { return e.cause }

// asBlocked turns a lock timeout into a *BlockedError, and returns other errors unchanged.
func asBlocked(err error) error {
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok && postgres.IsCode(err, codeBlocked) {
		return &BlockedError{Reason: pgErr.Message, Hint: pgErr.Hint, cause: pgErr}
	}
	return err
}

// maxNameLength is in characters.
const maxNameLength = 255

// invisible are characters that a reader does not see, or that change how others look. agent_lock_check has the same
// table.
var invisible = &unicode.RangeTable{
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

// ValidName reports whether a name is valid for a lane or an owner: 1 to 255 printable characters, not only spaces,
// that resemble no other name. So it has no invisible characters, no characters that change the text direction, no
// blanks but the space, and composed accents (Unicode's normal form C). The database rejects other names with 22023.
func ValidName(name string) bool {
	if n := utf8.RuneCountInString(name); n < 1 || n > maxNameLength || !utf8.ValidString(name) ||
		strings.Trim(name, " ") == "" {
		return false
	}
	for _, r := range name {
		if unicode.IsControl(r) || unicode.Is(invisible, r) {
			return false
		}
	}
	return norm.NFC.IsNormalString(name)
}

// Owner is one claim of one run: the holder of a lane. The zero value owns nothing. ClaimOwner makes the owner of an
// execution. Acquire and AcquireWait make a new owner for each call.
type Owner struct {
	name  string
	claim bool // of an execution: SQL ends its lanes with it
}

var executionID = regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)

// ClaimOwner is the owner of the lanes of an execution under one claim. For an invalid id or claim it is the zero
// Owner, which every function rejects with ErrInvalid.
func ClaimOwner(execution string, claim int64) Owner {
	if claim <= 0 || !executionID.MatchString(execution) {
		return Owner{}
	}
	return Owner{name: execution + "#" + strconv.FormatInt(claim, 10), claim: true}
}

// String is the owner as in agent_locks.locked_by.
func (o Owner) String() string { return o.name }

// runOwner is a new unique owner for work outside executions. It starts with the trace of ctx, which the live view
// shows, and ends with the process, by which the sweep finds it.
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

// policy derives the lease settings from a lane's name.
type policy struct {
	ttl     time.Duration // default
	renewed bool          // by Run; otherwise only by Lease.Renew or another acquire
	cancels bool          // its loss cancels the work
}

const (
	surfaceTTL = 5 * time.Minute
	threadTTL  = 10 * time.Minute
	jobTTL     = time.Hour
)

// policyOf knows the lanes of the runtime by name; any other name is an external job's. A thread's lane expires when
// nothing was sent for its TTL: each send renews it. Its loss cancels nothing, because the next send acquires it
// again or queues.
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
	timeout time.Duration // 0: a little longer than ttl
	process string        // its id in agent_workers; empty: the lease only expires
}

// WithTTL sets the lease's lifetime without a renewal: 1 second to 30 days, rounded up to whole seconds. A nested
// hold never shortens the outer lease.
func WithTTL(ttl time.Duration) Option { return func(s *settings) { s.ttl = ttl } }

// WithTimeout bounds the wait of AcquireWait. The default is longer than the lane's TTL, so it outlasts a dead
// holder.
func WithTimeout(timeout time.Duration) Option { return func(s *settings) { s.timeout = timeout } }

// WithProcess releases the lane when the process with that id in agent_workers is dead, and not only at the end of
// its lease. The owner ends with "@" and the id. Use it with Acquire and AcquireWait; lanes of executions outlive
// their process.
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

// wholeSeconds rounds away from zero, so neither 1 ms nor -1 ms becomes the invalid 0.
func wholeSeconds(d time.Duration) time.Duration {
	if d%time.Second == 0 {
		return d
	}
	if d > 0 {
		return d.Truncate(time.Second) + time.Second
	}
	return d.Truncate(time.Second) - time.Second
}

// seconds converts d for an int parameter; larger values are out of range anyway.
func seconds(d time.Duration) int32 {
	const limit = 1<<31 - 1
	return int32(max(-limit, min(limit, int64(d/time.Second))))
}
