// Command embedded is a program with its own agent: surfaces and Engine Room beside a flow in Go. DATABASE_URL names
// the database, AGENT_ADMIN_TOKEN has the admin's token.
package main

import (
	"context"
	"log"
	"log/slog"
	"net/http"
	"os"
	"os/signal"
	"syscall"

	"github.com/lanekeeper/lanekeeper"
	"github.com/lanekeeper/lanekeeper/server"
)

func ship(ctx context.Context, order string) (string, error) {
	return lanekeeper.Step(ctx, "pack", func(context.Context) (string, error) { return order + " is packed", nil })
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	settings := map[string]string{
		"DATABASE_URL": os.Getenv("DATABASE_URL"), "AGENT_ADMIN_TOKEN": os.Getenv("AGENT_ADMIN_TOKEN"),
	}
	// README.md shows the rest of main.
	agent := must(server.Open(ctx, settings, slog.Default())) // the settings of agent serve, by name
	defer agent.Close()
	must(lanekeeper.Register(agent.Runtime(), "ship", ship))
	go func() { check(http.ListenAndServe("127.0.0.1:8080", agent.Handler())) }()
	check(agent.Run(ctx))
}

func must[T any](value T, err error) T {
	check(err)
	return value
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
