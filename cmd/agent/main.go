// Command agent runs autonomous agents on PostgreSQL: their heartbeat, their surfaces, and the tools to
// see and steer what they do. One binary, one database; `agent dev` needs nothing else.
//
// main is a process, run is the program: tests call run. Each command is one file. What a command prints
// as its result goes to stdout, everything else to stderr; --json makes the result one JSON document.
// Exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 75 a lane is busy, 130 interrupted.
package main

import (
	"context"
	"os"

	"github.com/lanekeeper/lanekeeper/internal/heap"
	"github.com/lanekeeper/lanekeeper/internal/pgserver"
)

func main() {
	pgserver.GuardMain()
	heap.Roomy()
	ctx, stop := signals(context.Background())
	code := run(ctx, os.Args[1:], os.Environ(), os.Stdin, os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}
