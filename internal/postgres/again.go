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
)

// tries is how often [Again] calls, and firstPause how long it waits before the second time, at least; it triples.
const (
	tries      = 4
	firstPause = 10 * time.Millisecond
)

// Again calls fn, and calls it again, up to three times more within a fraction of a second, when it fails because a connection broke.
// Whether what was asked took effect is not known then, so fn must bear being called twice, as a read does. The error of the
// last call comes back as it is.
func Again(ctx context.Context, fn func() error) error {
	pause := firstPause
	for n := 1; ; n++ {
		err := fn()
		if err == nil || n == tries || ctx.Err() != nil || !Broken(err) {
			return err
		}
		timer := time.NewTimer(pause + rand.N(pause))
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return err
		}
		pause *= 3
	}
}

// Broken reports an error of a connection that broke, or that the server ended: another one may well work at once. Time that
// ran out is not of that kind.
func Broken(err error) bool {
	for _, broken := range []error{io.EOF, io.ErrUnexpectedEOF, net.ErrClosed, syscall.ECONNRESET, syscall.EPIPE, pgconn.ErrConnClosed} {
		if errors.Is(err, broken) {
			return true
		}
	}
	return IsCode(err, codeTerminated, codeIdle, codeSession)
}
