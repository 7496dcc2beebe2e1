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
	"syscall"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
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
