package postgres

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"unicode"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// openError is an error of Open for an operator. Its text has no secrets; errors.Is and errors.As see the cause.
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

// Todo returns the remedy at the end of an error of [Open]; empty for any other error.
func Todo(err error) string {
	if refused, ok := errors.AsType[*openError](err); ok {
		return refused.todo
	}
	return ""
}

// ForSetting returns an error of [Open] whose remedy names another setting than DATABASE_URL.
func ForSetting(setting string, err error) error {
	refused, ok := errors.AsType[*openError](err)
	if !ok {
		return errors.New(strings.ReplaceAll(err.Error(), "DATABASE_URL", setting))
	}
	renamed := *refused
	renamed.todo = strings.ReplaceAll(refused.todo, "DATABASE_URL", setting)
	return &renamed
}

// WrongParameter reports an error of [Open] for a parameter of the connection string that the server does not take.
func WrongParameter(err error) bool { return strings.HasPrefix(Todo(err), correctParameter) }

// SQLSTATEs with which a server can answer a connection.
const (
	codeAuthorization = "28000"
	codePassword      = "28P01"
	codeNoDatabase    = "3D000"
	codeNoPrivilege   = "42501"
	codeTooMany       = "53300"
	codeStarting      = "57P03"
	codeNoParameter   = "42704"
	codeProtocol      = "08P01"
	codeParameter     = "22023"
)

// explain adds to an error of opening what is wrong and what to do. Errors of PostgreSQL come first; then those of this
// process, of TLS and of the network.
func explain(config *pgx.ConnConfig, err error) error {
	e := &openError{target: target(config), cause: err}
	var pgErr *pgconn.PgError
	problem, remedy := Diagnose(err)
	switch {
	case errors.As(err, &pgErr):
		e.what, e.todo = refusal(config, pgErr)
	case problem != "": // a problem of this process
		e.what, e.todo = problem, remedy
	case isTLS(err):
		e.what = "the two sides do not agree on TLS (" + root(err).Error() + ")"
		e.todo = "add ?sslmode=disable for a server without TLS, or sslrootcert=FILE for its certificate authority"
	case hasSeveralHosts(config) && len(attempts(err)) > 1:
		e.what = "none of its servers can be used (" + strings.Join(attempts(err), "; ") + ")"
		e.todo = "check host and port of each, and target_session_attrs"
	case unreachable(err):
		reason := root(err).Error()
		if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, os.ErrDeadlineExceeded) {
			reason = "no answer"
		}
		e.what = "cannot reach the server (" + reason + ")"
		e.todo = "check host and port, and that PostgreSQL is running there"
	default:
		e.what = root(err).Error()
		e.todo = "check DATABASE_URL and the server's log"
	}
	return e
}

const correctParameter = "remove or correct it in "

// refusal explains an error with which the server refused a connection.
func refusal(config *pgx.ConnConfig, err *pgconn.PgError) (what, todo string) {
	switch err.Code {
	case codePassword, codeAuthorization:
		return "the server refuses user " + strconv.Quote(config.User) + " (" + err.Message + ")",
			"check user name and password in DATABASE_URL, and the server's pg_hba.conf"
	case codeNoDatabase:
		return "there is no such database",
			"create it: createdb " + shellWord(config.Database) + ", or correct the name in DATABASE_URL"
	case codeNoPrivilege:
		if err.Routine != "CheckMyDatabase" { // a parameter of the connection string
			return err.Message, correctParameter + "DATABASE_URL"
		}
		return err.Message, "run grant connect on database " + pgx.Identifier{config.Database}.Sanitize() + " to " +
			pgx.Identifier{config.User}.Sanitize()
	case codeNoParameter, codeParameter:
		return err.Message, correctParameter + "DATABASE_URL"
	case codeProtocol:
		if strings.Contains(err.Message, "startup parameter") { // PgBouncer does not know it
			return err.Message, correctParameter + "DATABASE_URL"
		}
	case codeTooMany:
		return "the server has no free connection (" + err.Message + ")",
			"raise max_connections, or the limit of the role or the database; or lower pool_max_conns in DATABASE_URL"
	case codeStarting:
		return "the server does not take connections now (" + err.Message + ")", "try again in a moment"
	}
	return err.Message + " (SQLSTATE " + err.Code + ")", "see the server's log"
}

// temporary reports an error that a retry may avoid: the server is absent, starting or stopping.
func temporary(err error) bool {
	if code := Code(err); code != "" {
		return IsCode(err, codeStarting, codeTooMany, codeTerminated, codeCrashed)
	}
	return unreachable(err) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF)
}

// Unreachable reports a temporary error of [Open]: the server is absent, starting, or has no free connection.
func Unreachable(err error) bool { return temporary(err) || errors.Is(err, context.DeadlineExceeded) }

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

// root returns the innermost cause, which contains neither the target nor the connection string.
func root(err error) error {
	for {
		var causes []error
		switch e := err.(type) { //nolint:errorlint // it unwraps one level at a time
		case interface{ Unwrap() error }:
			causes = []error{e.Unwrap()}
		case interface{ Unwrap() []error }:
			causes = e.Unwrap()
		}
		if len(causes) == 0 || causes[0] == nil {
			return err
		}
		err = causes[0]
	}
}

func hasSeveralHosts(config *pgx.ConnConfig) bool {
	return slices.ContainsFunc(config.Fallbacks, func(other *pgconn.FallbackConfig) bool {
		return other.Host != config.Host || other.Port != config.Port
	})
}

// attempts returns the errors of all servers that pgx tried, without the errors of a second try.
func attempts(err error) []string {
	failed, ok := errors.AsType[*pgconn.ConnectError](err)
	if !ok {
		return nil
	}
	return slices.Compact(strings.Split(failed.Unwrap().Error(), "\n"))
}

// unusable returns the cause of a connection string's error if it is a missing file or service. It returns "" for any
// other cause, whose text may quote the password.
func unusable(err error) string {
	if file, ok := errors.AsType[*fs.PathError](err); ok {
		return file.Error()
	}
	if cause := root(err).Error(); strings.HasPrefix(cause, "unable to find service") ||
		strings.HasPrefix(cause, "failed to read service file") {
		return cause
	}
	return ""
}

// shellWord quotes a name for a shell where that is necessary.
func shellWord(name string) string {
	if !strings.ContainsFunc(name, func(r rune) bool {
		return r != '_' && r != '-' && r != '.' && !unicode.IsLetter(r) && !unicode.IsDigit(r)
	}) {
		return name
	}
	return "'" + strings.ReplaceAll(name, "'", `'\''`) + "'"
}

func target(config *pgx.ConnConfig) string {
	where := net.JoinHostPort(config.Host, strconv.Itoa(int(config.Port)))
	if strings.HasPrefix(config.Host, "/") {
		where = config.Host
	}
	return strconv.Quote(config.Database) + " at " + where
}
