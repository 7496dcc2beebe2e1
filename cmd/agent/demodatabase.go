package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// ownDatabase makes a database beside the one that DATABASE_URL names, and turns the session to it: what is in that one
// stays as it is. drop removes it when the session is closed. Without DATABASE_URL there is nothing to do.
func (s *session) ownDatabase(ctx context.Context, c *cli) (drop func(ctx context.Context) error, err error) {
	if s.url == "" {
		return func(context.Context) error { return nil }, nil
	}
	address, err := url.Parse(s.url)
	if err != nil {
		return nil, usageError("DATABASE_URL: it is not a PostgreSQL URL")
	}
	given, name := s.url, "agent_demo_"+strings.ToLower(rand.Text()[:10])
	if err := administer(ctx, given, "create database "+pgx.Identifier{name}.Sanitize()); err != nil {
		return nil, hint(fmt.Errorf("make a database for the demo: %w", err),
			"let the user of DATABASE_URL create databases, or unset it: then the demo runs a PostgreSQL of its own")
	}
	c.say("playing in the database %s on that server, dropped at the end", name)
	address.Path = "/" + name
	s.url = address.String()
	return func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
		defer cancel()
		if err := administer(ctx, given, "drop database if exists "+pgx.Identifier{name}.Sanitize()+" with (force)"); err != nil {
			return hint(fmt.Errorf("drop the demo's database: %w", err), "drop database %s", name)
		}
		return nil
	}, nil
}

// administer runs one statement on a server.
func administer(ctx context.Context, address, statement string) error {
	conn, err := pgx.Connect(ctx, address)
	if err != nil {
		return err
	}
	_, err = conn.Exec(ctx, statement, pgx.QueryExecModeSimpleProtocol)
	return errors.Join(err, conn.Close(context.WithoutCancel(ctx)))
}
