package postgres

import (
	"errors"
	"strings"
	"syscall"

	"github.com/jackc/pgx/v5/pgconn"
)

// SQLSTATEs of a server that is temporarily unable to work, beside those of a connection.
const (
	codeCheck      = "23514"
	codeReadOnly   = "25006"
	codeDiskFull   = "53100"
	codeMemory     = "53200"
	codeNoIDs      = "53000" // no transaction ids are left; see Code
	codeTerminated = "57P01"
	codeCrashed    = "57P02"
	codeIdle       = "25P03" // the session was idle in a transaction for too long
	codeSession    = "57P05" // the session was idle for too long
	codeLocked     = "55P03" // lock_timeout, or nowait
	codeCancelled  = "57014" // statement_timeout, or a cancel
	codeNUL        = "22P05" // a text with U+0000 in JSON
	codeBytes      = "22021" // a text that is no UTF-8, or with the byte 0
)

// Diagnose returns the outside problem behind an error and the remedy for an operator. Both are empty for any other
// error.
func Diagnose(err error) (what, todo string) {
	switch Code(err) {
	case codeDiskFull:
		return "the database server's disk is full", "free space on it, or enlarge it; nothing needs to be restarted here"
	case codeReadOnly:
		return "the database is read-only",
			"check that DATABASE_URL names the primary and not a standby, and default_transaction_read_only; nothing needs " +
				"to be restarted here"
	case codeNoIDs:
		return "the database server takes no writes until old transaction ids are freed",
			"vacuum the database that its message names, as a superuser; nothing needs to be restarted here"
	case codeMemory:
		refused, _ := errors.AsType[*pgconn.PgError](err)
		if strings.Contains(refused.Hint, "max_locks_per_transaction") {
			return "the database server has no room for further locks", "raise its max_locks_per_transaction, and restart it"
		}
		return "the database server is out of memory", "give it more, or lower its max_connections and work_mem"
	case codeTooMany:
		return "the database server has no free connection",
			"raise its max_connections, or the limit of the role or the database; or lower pool_max_conns in DATABASE_URL"
	case codeLocked:
		return "another transaction of the database has locked the rows to write",
			"end it: pg_stat_activity lists sessions that are idle in transaction; nothing needs to be restarted here"
	case codeCheck:
		refused, _ := errors.AsType[*pgconn.PgError](err)
		if refused.TableName == "agent_activity" && refused.ConstraintName == "" {
			return "the activity log has no partition for this month", "run `agent migrate`, which makes it"
		}
	case codeStarting, codeTerminated, codeCrashed:
		return "the database server starts or stops", "try again in a moment; its log says why"
	}
	if errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE) {
		return "this process may not open more files and connections",
			"raise its limit: ulimit -n, or LimitNOFILE= of a systemd unit"
	}
	return "", ""
}

// explainText rewrites the server's error about a text with U+0000, so that it names the place and the remedy.
func explainText(err error) {
	refused, ok := errors.AsType[*pgconn.PgError](err)
	if !ok || refused.Code != codeNUL && (refused.Code != codeBytes || !strings.HasSuffix(refused.Message, " 0x00")) {
		return
	}
	place := "the text"
	if where, _, _ := strings.Cut(refused.Where, "\n"); strings.HasPrefix(where, "JSON data, ") {
		_, place, _ = strings.Cut(where, ": ")
	}
	refused.Message = `PostgreSQL cannot store the character U+0000: remove \u0000 from ` + place
	refused.Detail = ""
}
