// Package resourcefaults tests the product's promises when resources fail and no process dies. The database's disk is
// full, the database is read-only, the connection pool is exhausted, the process may not open another file, or a clock
// jumps.
//
// Promises:
//
//   - If the result of a step cannot be recorded, its run ends. Its cause and a log line name the fault and the remedy.
//     Its execution keeps a true state (running, under a claim that is handed over), never one beyond the database's
//     record.
//   - The program acknowledges only durable work. Every start, event and delivery answered with 2xx, and every command
//     that ended with exit code 0, exists afterwards. A failed write gets 503, or exit code 1, and a text that names
//     the fault.
//   - When the fault ends, all work resumes without a restart: clients can repeat rejected requests, and started work
//     completes, with each recorded step once.
//   - Leases, deadlines and schedules follow the database's clock. A process whose clock is hours wrong, or jumps,
//     neither acquires a held lane or claim, nor loses its own.
//
// The faults are as real as possible. If the tests may mount a file system (root in a machine or a privileged
// container), the full disk is a tablespace on one, filled to the last byte. For a full write-ahead log, the server's
// log is on one. Elsewhere, and always in addition, triggers reject every write with the same SQLSTATE (53100). A
// read-only database is default_transaction_read_only of the whole server. For an exhausted pool, the test holds the
// connections. The kernel limits file descriptors (setrlimit, of the child process). The process's clock jumps in a
// program built with another time.Now. That build takes minutes, so only the long run has it (AGENT_FAULTS_ALL=1), as
// well as the full write-ahead log. The package exports nothing.
package resourcefaults
