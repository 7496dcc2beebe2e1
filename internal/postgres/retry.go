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

// Backoff pauses between two tries. The pause doubles from First to Max, and as much again is added at random at most.
// Set First and Max, and use a new one for each series of tries.
type Backoff struct {
	First, Max time.Duration

	next time.Duration
}

// Wait pauses; false when ctx has ended first.
func (b *Backoff) Wait(ctx context.Context) bool {
	pause := max(b.next, b.First)
	b.next = min(2*pause, b.Max)
	return sleep.For(ctx, pause+rand.N(pause))
}

// tries is how often [Again] calls, and firstPause how long it waits before the second time, at least.
const (
	tries      = 4
	firstPause = 15 * time.Millisecond
)

// Again calls fn, and calls it again, up to three times more within a fraction of a second, when it fails because a
// connection broke. Whether what was asked took effect is not known then, so fn must bear being called twice, as a
// read does. The error of the last call comes back as it is.
func Again(ctx context.Context, fn func() error) error {
	backoff := Backoff{First: firstPause, Max: 4 * firstPause}
	for n := 1; ; n++ {
		err := fn()
		if err == nil || n == tries || ctx.Err() != nil || !Broken(err) || !backoff.Wait(ctx) {
			return err
		}
	}
}

// Transient reports an error that another try may not meet: the server is away, starting or stopping, or the
// transaction was chosen to give way. A cancelled statement (57014) is not: the cancel may have been meant.
func Transient(err error) bool {
	if code := Code(err); code != "" {
		switch code[:2] {
		case "08", "40", "57":
			return code != "57014"
		case "53":
			return code != "53400" // disk full, out of memory, too many connections; not a limit that somebody configured
		case "23": // a try whose connection broke was still at work: the next sees the row that it opened
			return Constraint(err) == "agent_activity_open_step"
		}
		return code == codeLocked || code == codeReadOnly || code == codeIdle // read-only while a failover settles
	}
	var connect *pgconn.ConnectError
	_, network := errors.AsType[net.Error](err)
	return errors.As(err, &connect) || pgconn.SafeToRetry(err) || pgconn.Timeout(err) || network || Broken(err)
}

// Broken reports an error of a connection that broke, or that the server ended: another one may well work at once.
// Time that ran out is not of that kind.
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
