package postgres

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// openError is a refusal to open, told to an operator. Its text has no secret in it; the cause is
// kept for errors.Is and errors.As.
type openError struct {
	target string
	what   string
	todo   string
	cause  error
}

func (e *openError) Error() string {
	return fmt.Sprintf("open database %s: %s: %s", e.target, e.what, e.todo)
}

func (e *openError) Unwrap() error { return e.cause }

// Todo is what an operator does about a database that could not be opened; its error ends with that. Empty for any
// other error.
func Todo(err error) string {
	if refused, ok := errors.AsType[*openError](err); ok {
		return refused.todo
	}
	return ""
}

// SQLSTATEs a server can answer a connection with.
const (
	codeAuthorization = "28000"
	codePassword      = "28P01"
	codeNoDatabase    = "3D000"
	codeNoPrivilege   = "42501"
	codeTooMany       = "53300"
	codeStarting      = "57P03"
)

func explain(config *pgx.ConnConfig, err error) error {
	e := &openError{target: target(config), cause: err}
	var pgErr *pgconn.PgError
	trouble, mend := Trouble(err)
	switch {
	case errors.As(err, &pgErr):
		e.what, e.todo = refusal(config, pgErr)
	case trouble != "": // of this process
		e.what, e.todo = trouble, mend
	case isTLS(err):
		e.what = "the two sides do not agree on TLS (" + root(err).Error() + ")"
		e.todo = "add ?sslmode=disable for a server without TLS, or sslrootcert=FILE for its certificate authority"
	case unreachable(err):
		e.what = "cannot reach the server (" + root(err).Error() + ")"
		e.todo = "check host and port, and that PostgreSQL is running there"
	default:
		e.what = root(err).Error()
		e.todo = "check DATABASE_URL and the server's log"
	}
	return e
}

func refusal(config *pgx.ConnConfig, err *pgconn.PgError) (what, todo string) {
	switch err.Code {
	case codePassword, codeAuthorization:
		return "the server refuses user " + strconv.Quote(config.User) + " (" + err.Message + ")",
			"check user name and password in DATABASE_URL, and the server's pg_hba.conf"
	case codeNoDatabase:
		return "there is no such database", "create it: createdb " + config.Database + ", or correct the name in DATABASE_URL"
	case codeNoPrivilege:
		return err.Message, "run grant connect on database " + config.Database + " to " + config.User
	case codeTooMany:
		return "the server has no free connection (" + err.Message + ")",
			"raise max_connections, or the limit of the role or the database; or lower pool_max_conns in DATABASE_URL"
	case codeStarting:
		return "the server does not take connections now (" + err.Message + ")", "try again in a moment"
	}
	return err.Message + " (SQLSTATE " + err.Code + ")", "see the server's log"
}

// passing reports whether a retry may help: the server is not there yet, is starting, or goes down in this moment.
func passing(err error) bool {
	if code := Code(err); code != "" {
		return IsCode(err, codeStarting, codeTooMany, codeTerminated, codeCrashed)
	}
	return unreachable(err) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF)
}

// Unreachable reports an error of [Open] that may pass: the server is away, is starting, or has no free connection.
func Unreachable(err error) bool { return passing(err) || errors.Is(err, context.DeadlineExceeded) }

func unreachable(err error) bool {
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, os.ErrDeadlineExceeded) {
		return true
	}
	_, isNet := errors.AsType[net.Error](err)
	return isNet || errors.Is(err, net.ErrClosed)
}

func isTLS(err error) bool {
	text := err.Error()
	return strings.Contains(text, "tls: ") || strings.Contains(text, "x509: ") || strings.Contains(text, "TLS")
}

// root is the innermost cause: the part that neither repeats the target nor holds the connection string.
func root(err error) error {
	for {
		{
			var inner interface{ Unwrap() error }
			var inner1 interface{ Unwrap() []error }
			switch {
			case errors.As(err, &inner):
				if inner.Unwrap() == nil {
					return err
				}
				err = inner.Unwrap()
			case errors.As(err, &inner1):
				if len(inner1.Unwrap()) == 0 {
					return err
				}
				err = inner1.Unwrap()[0]
			default:
				return err
			}
		}
	}
}

func target(config *pgx.ConnConfig) string {
	where := net.JoinHostPort(config.Host, strconv.Itoa(int(config.Port)))
	if strings.HasPrefix(config.Host, "/") {
		where = config.Host
	}
	return strconv.Quote(config.Database) + " at " + where
}

// refusedWrite is one that the server did not take, for a reason that an operator has to mend.
type refusedWrite struct {
	at  time.Time
	err error
}

// refusals keeps the last one of a pool and of what was reserved beside it.
type refusals struct{ last atomic.Pointer[refusedWrite] }

// note looks at the answer to a statement.
func (r *refusals) note(err error) {
	if r != nil && err != nil && IsCode(err, codeDiskFull, codeReadOnly) {
		r.last.Store(&refusedWrite{time.Now(), err})
	}
}

// LastRefusal is when the server last refused a write of this process because its disk is full or it is read-only;
// the error is nil when it never did. pool was made by [Open] or [Reserve], which share what they note.
func LastRefusal(pool *pgxpool.Pool) (at time.Time, err error) {
	g, ok := pool.Config().ConnConfig.Tracer.(guard)
	if !ok || g.refused == nil {
		return time.Time{}, nil
	}
	last := g.refused.last.Load()
	if last == nil {
		return time.Time{}, nil
	}
	return last.at, last.err
}

// SQLSTATEs of a server that cannot do its work for a while, beside those that it answers a connection with.
const (
	codeReadOnly   = "25006"
	codeDiskFull   = "53100"
	codeMemory     = "53200"
	codeTerminated = "57P01"
	codeCrashed    = "57P02"
	codeIdle       = "25P03" // the session was idle in a transaction for too long
	codeSession    = "57P05" // the session was idle for too long
	codeLocked     = "55P03" // lock_timeout, or nowait
)

// Trouble says what keeps the database, or this process, from its work, and what an operator does about it, when err
// is of that sort: something outside that goes on working by itself once it is mended. Both are empty for any other
// error.
func Trouble(err error) (what, todo string) {
	switch Code(err) {
	case codeDiskFull:
		return "the database server's disk is full", "free space on it, or enlarge it; nothing needs to be restarted here"
	case codeReadOnly:
		return "the database is read-only",
			"check that DATABASE_URL names the primary and not a standby, and default_transaction_read_only; nothing needs to be restarted here"
	case codeMemory:
		return "the database server is out of memory", "give it more, or lower its max_connections and work_mem"
	case codeTooMany:
		return "the database server has no free connection",
			"raise its max_connections, or the limit of the role or the database; or lower pool_max_conns in DATABASE_URL"
	case codeLocked:
		return "another transaction of the database has locked what is to be written",
			"end it: pg_stat_activity lists what is idle in transaction; nothing needs to be restarted here"
	case codeStarting, codeTerminated, codeCrashed:
		return "the database server starts or stops", "try again in a moment; its log says why"
	}
	if errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE) {
		return "this process may not open more files and connections",
			"raise its limit: ulimit -n, or LimitNOFILE= of a systemd unit"
	}
	return "", ""
}

// resetPause is how long a pool that has been emptied is left alone.
const resetPause = time.Second

// moved empties a pool whose server takes no more writes: after a failover the primary is elsewhere, and connections
// to the old one, which may live on as a standby, would fail one by one for as long as they last. New ones go where the
// connection string leads by then.
type moved struct {
	pool atomic.Pointer[pgxpool.Pool]
	last atomic.Int64 // when it was emptied, in nanoseconds of the epoch
}

// note looks at the answer to a statement. Connections that are lent meanwhile end when they are given back.
func (m *moved) note(err error) {
	if m == nil || err == nil || !IsCode(err, codeReadOnly) {
		return
	}
	now, last := time.Now().UnixNano(), m.last.Load()
	if pool := m.pool.Load(); pool != nil && now-last > int64(resetPause) && m.last.CompareAndSwap(last, now) {
		pool.Reset()
	}
}
