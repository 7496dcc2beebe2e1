package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// tick is the unit of times in /proc, which is the same on every Linux that Go supports.
const tick = 10 * time.Millisecond

// cpuTime is the processor time that was used so far, by the server and by this process. It says more than the time on the
// clock where others use the machine as well.
type cpuTime struct{ server, own time.Duration }

// cpu reads it; zero where the system does not say.
func cpu(ctx context.Context, pool *pgxpool.Pool) (cpuTime, error) {
	var pid int
	if err := pool.QueryRow(ctx, `select pg_backend_pid()`).Scan(&pid); err != nil {
		return cpuTime{}, fmt.Errorf("ask for the server's processes: %w", err)
	}
	backend, ok := procStat(strconv.Itoa(pid))
	if !ok {
		return cpuTime{}, nil
	}
	var used cpuTime
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		return cpuTime{}, fmt.Errorf("list processes: %w", err)
	}
	for _, path := range stats {
		p, ok := procStat(filepath.Base(filepath.Dir(path)))
		switch {
		case !ok: // it has ended
		case p.parent == backend.parent:
			used.server += p.used
		case p.pid == backend.parent:
			used.server += p.children
		case p.pid == strconv.Itoa(os.Getpid()):
			used.own = p.used
		}
	}
	return used, nil
}

func (t cpuTime) minus(u cpuTime) cpuTime { return cpuTime{t.server - u.server, t.own - u.own} }

// per says how much it is for each of n.
func (t cpuTime) per(n int) string {
	return fmt.Sprintf("%d µs server, %d µs own", (t.server / time.Duration(n)).Microseconds(), (t.own / time.Duration(n)).Microseconds())
}

type proc struct {
	pid, parent    string
	used, children time.Duration // its own time, and that of children that have ended
}

// procStat reads /proc/PID/stat; false when there is none.
func procStat(pid string) (proc, bool) {
	text, err := os.ReadFile("/proc/" + pid + "/stat")
	if err != nil {
		return proc{}, false
	}
	_, rest, _ := strings.Cut(string(text), ") ") // after the name, which may hold anything
	fields := strings.Fields(rest)
	if len(fields) < 15 {
		return proc{}, false
	}
	ticks := func(from int) (sum time.Duration) {
		for _, field := range fields[from : from+2] {
			n, err := strconv.ParseInt(field, 10, 64)
			if err == nil {
				sum += time.Duration(n) * tick
			}
		}
		return sum
	}
	return proc{pid: pid, parent: fields[1], used: ticks(11), children: ticks(13)}, true
}
