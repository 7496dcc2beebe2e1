package postgres

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/lanekeeper/lanekeeper/internal/sleep"
)

// Backoff pauses between two tries. The pause doubles from First to Max, plus a random part of up to its length. Set
// First and Max, and use a new Backoff for each series of tries.
type Backoff struct {
	First, Max time.Duration

	next time.Duration
}

// Wait pauses. It returns false when ctx ends first.
func (b *Backoff) Wait(ctx context.Context) bool {
	pause := max(b.next, b.First)
	b.next = min(2*pause, b.Max)
	return sleep.For(ctx, pause+rand.N(pause))
}

// tries bounds the calls of [RetryOnDisconnect]. firstPause is the shortest pause before the second call.
const (
	tries      = 4
	firstPause = 15 * time.Millisecond
)

// RetryOnDisconnect calls fn again while fn fails because of a broken connection, up to three times within a fraction
// of a second. The first call may have taken effect, so fn must be idempotent, like a read. RetryOnDisconnect returns
// the error of the last call unchanged.
func RetryOnDisconnect(ctx context.Context, fn func() error) error {
	backoff := Backoff{First: firstPause, Max: 4 * firstPause}
	for n := 1; ; n++ {
		err := fn()
		if err == nil || n == tries || ctx.Err() != nil || !Broken(err) || !backoff.Wait(ctx) {
			return err
		}
	}
}

// Transient reports an error that a retry may avoid. The server is unavailable, starting or stopping, or it aborted the
// transaction because of a conflict. A cancelled statement (57014) is not transient: the cancel may be deliberate.
func Transient(err error) bool {
	if code := Code(err); code != "" {
		switch code[:2] {
		case "08", "40", "57":
			return code != codeCancelled
		case "53":
			return code != "53400" // disk full, out of memory, too many connections; not a configured limit
		case "23": // the row of an earlier try that still ran when its connection broke
			return Constraint(err) == "agent_activity_open_step"
		}
		return code == codeLocked || code == codeReadOnly || code == codeIdle // read-only while a failover settles
	}
	var connect *pgconn.ConnectError
	_, network := errors.AsType[net.Error](err)
	return errors.As(err, &connect) || pgconn.SafeToRetry(err) || pgconn.Timeout(err) || network || Broken(err)
}

// Broken reports the error of a broken connection, or of a connection that the server closed. A new connection may work
// at once. A timeout is not such an error.
func Broken(err error) bool {
	for _, broken := range []error{
		io.EOF, io.ErrUnexpectedEOF, net.ErrClosed, syscall.ECONNRESET, syscall.EPIPE,
		pgconn.ErrConnClosed,
	} {
		if errors.Is(err, broken) {
			return true
		}
	}
	return IsCode(err, codeTerminated, codeIdle, codeSession)
}
