// Package resourcefaults proves what the product promises on days on which nothing dies, and nothing works either: the
// database's disk is full, the database is read-only, the connection pool is taken, the process may not open another
// file, a clock jumps.
//
// Promises:
//
//   - A step whose result cannot be recorded ends its run, with a cause and a log line that name the trouble and what
//     to do. Its execution keeps a state that is true (running, under a claim that is handed on), never one that says
//     more than the database has.
//   - Nothing is acknowledged that is not durable: every start, event and delivery that was answered with 2xx, and
//     every command that ended with exit code 0, is there afterwards; what could not be written is answered with 503,
//     or exit code 1, and words that name the trouble.
//   - When the trouble is over everything goes on by itself, without a restart: what was refused can be sent again,
//     and what had begun completes, each recorded step once.
//   - Leases, deadlines and schedules follow the database's clock, so a process whose clock is hours wrong, or
//     jumps, neither takes a lane nor a claim that is held, nor loses its own.
//
// How real the troubles are: the full disk is a tablespace on a file system of its own, filled to the last byte,
// where the tests may mount one (root in a machine or a privileged container), and for the write-ahead log a server
// whose log is there; elsewhere, and always besides, triggers refuse every write with the same SQLSTATE (53100). A
// read-only database is default_transaction_read_only of the whole server, a taken pool is connections that somebody
// holds, and the limit of file descriptors is the kernel's (setrlimit, of the child process). The process's clock is
// jumped in a program that was built with another time.Now; that build takes minutes, so it is part of the long run
// only (AGENT_FAULTS_ALL=1), as is the full write-ahead log. There is nothing here to import.
package resourcefaults
