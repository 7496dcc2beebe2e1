// Command bench measures what a person would notice, each figure beside the raw floor of the same run.
//
//	go run ./bench chat-priority
//	go run ./bench waiting
//	go run ./bench engine-room
//	go run ./bench lanes
//	go run ./bench idle
//	go run ./bench story
//	go run ./bench why
//	go run ./bench executions
//	go run ./bench turn
//	go run ./bench scaling
//
// Every benchmark starts a PostgreSQL of its own, durable as that of `agent dev`, in a temporary folder that is
// removed at the end, and runs the product's own packages against it in this process. What is compared is measured in
// one run on one machine, one after the other; absolute figures are the machine's, ratios carry over. Results go to
// stdout as a Markdown table, progress to stderr. Benchmarks of single operations are Go benchmarks beside the code
// (`make bench` runs both).
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/lanekeeper/lanekeeper/internal/heap"
	"github.com/lanekeeper/lanekeeper/internal/pgserver"
)

func main() {
	pgserver.GuardMain()
	heap.Roomy()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// run is the program.
func run(ctx context.Context, args []string, out, errw io.Writer) error {
	if len(args) > 0 {
		switch args[0] {
		case "chat-priority":
			return chatPriority(ctx, args[1:], out, errw)
		case "waiting":
			return waiting(ctx, args[1:], out, errw)
		case "engine-room":
			return engineRoom(ctx, args[1:], out, errw)
		case "lanes":
			return lanesBench(ctx, args[1:], out, errw)
		case "idle":
			return idle(ctx, args[1:], out, errw)
		case "story":
			return story(ctx, args[1:], out, errw)
		case "why":
			return whyBenchmark(ctx, args[1:], out, errw)
		case "turn":
			return turn(ctx, args[1:], out, errw)
		case "executions":
			return engineSpeed(ctx, args[1:], out, errw)
		case "scaling":
			return scaling(ctx, args[1:], out, errw)
		}
	}
	return errors.New("name a benchmark: chat-priority, waiting, engine-room, lanes, executions, turn, idle, scaling, " +
		"story, why")
}
