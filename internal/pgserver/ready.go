//go:build unix

package pgserver

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// awaitReady returns when the server accepts connections to database, which it makes when missing.
// errNoServer when gone reports that the server is gone.
func awaitReady(ctx context.Context, l layout, database string, gone func() (bool, error)) error {
	ctx, cancel := context.WithTimeoutCause(ctx, readyLimit,
		fmt.Errorf("the server does not accept connections after %s; see %s", readyLimit, l.path(logFile)))
	defer cancel()
	return poll(ctx, func() (bool, error) {
		// What is recorded by a server that is only starting may still change.
		if sockets, err := recordedSockets(l); err == nil {
			l.sockets = sockets
		}
		err := greet(ctx, l, database)
		if err == nil {
			return true, nil
		}
		if postgres.Code(err) != "" && !postgres.IsCode(err, "57P03", "53300") {
			return false, err
		}
		if left, goneErr := gone(); left || goneErr != nil {
			return false, errors.Join(errNoServer, goneErr)
		}
		return false, nil
	})
}

func greet(ctx context.Context, l layout, database string) error {
	conn, err := pgx.Connect(ctx, connString(l, superuser, database))
	if postgres.IsCode(err, "3D000") {
		return createDatabase(ctx, l, database)
	}
	if err != nil {
		return err
	}
	return conn.Close(ctx)
}

func createDatabase(ctx context.Context, l layout, database string) error {
	conn, err := pgx.Connect(ctx, connString(l, superuser, "postgres"))
	if err != nil {
		return err
	}
	_, err = conn.Exec(ctx, "create database "+pgx.Identifier{database}.Sanitize())
	if postgres.IsCode(err, "42P04", "23505") { // another process was faster
		err = nil
	}
	return errors.Join(err, conn.Close(ctx))
}

// tail is the end of a text file, or why it cannot be read.
func tail(path string, lines int) string {
	text, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	return lastLines(string(text), lines)
}

func lastLines(text string, n int) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}
