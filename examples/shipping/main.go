// Command shipping ships an order in three durable steps. Kill it during any of them and start it again: it continues
// after the last recorded step. The database is DATABASE_URL.
package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper"
)

// README.md shows ship and main.
func ship(ctx context.Context, order string) (string, error) {
	for _, task := range []string{"charge", "pack", "send"} {
		_, err := lanekeeper.Step(ctx, task, func(ctx context.Context) (string, error) {
			return do(task, order, lanekeeper.StepKey(ctx))
		})
		if err != nil {
			return "", err
		}
	}
	return order + " is on its way", nil
}

func main() {
	ctx := context.Background()
	pool := must(pgxpool.New(ctx, os.Getenv("DATABASE_URL")))
	check(lanekeeper.Migrate(ctx, pool))
	runtime := must(lanekeeper.Open(ctx, pool, lanekeeper.WithLease(5*time.Second)))
	flow := must(lanekeeper.Register(runtime, "ship", ship))
	go func() { check(runtime.Run(ctx)) }()
	handle := must(flow.Start(ctx, "order-7", lanekeeper.Key("order-7")))
	fmt.Println(must(handle.Wait(ctx)))
}

// do is the effect on the world: it prints the task, and takes a second.
func do(task, order, key string) (string, error) {
	fmt.Println(task, order, key)
	time.Sleep(time.Second)
	return key, nil
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
