package postgres

import (
	"errors"
	"syscall"
)

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
