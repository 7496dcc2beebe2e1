package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/replica"
	"github.com/lanekeeper/lanekeeper/migrations"
)

// replicaConns bounds the connections of a process to the read replica.
const replicaConns = 8

// reader reads from the replica, if DATABASE_READ_URL names one, and else from the primary.
func (s *session) reader() *replica.Reader {
	primary := cmp.Or(s.reserved.admin, s.pool)
	if !s.config.ReadURL.IsSet() || s.url != s.config.DatabaseURL.Reveal() {
		return replica.Primary(primary)
	}
	var log *slog.Logger // a command that asks says by itself where the answer is from
	if s.serving {
		log = s.log
	}
	return replica.New(replica.Options{
		Primary: primary, Probe: cmp.Or(s.reserved.system, s.pool),
		Open: s.openReplica, Check: migrations.Check, Logger: log,
		// On an older state the leases of live workers and lanes would look expired.
		MaxLag: s.config.WorkerLease / 3,
	})
}

// openReplica connects to the replica.
func (s *session) openReplica(ctx context.Context) (*pgxpool.Pool, error) {
	url := s.config.ReadURL.Reveal()
	if hosts := hostsOf(url); hosts > 1 {
		return nil, fmt.Errorf("it names %d servers, each with a lag of its own: %w", hosts, replica.ErrOther)
	}
	pool, err := postgres.Open(ctx, url, postgres.Options{MaxConns: replicaConns})
	if err != nil {
		return nil, errors.New(strings.ReplaceAll(err.Error(), "DATABASE_URL", "DATABASE_READ_URL"))
	}
	return pool, nil
}

// reading is withSession for a question, which is asked of the replica where that is possible. The session has only
// that when the primary cannot be reached.
func (c *cli) reading(work func(cmd *cobra.Command, args []string, s *session) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		ctx := cmd.Context()
		s, err := c.session(ctx)
		if postgres.Unreachable(err) {
			s, err = c.withoutPrimary(ctx, err)
		}
		if err != nil {
			return err
		}
		defer s.close(ctx)
		if s.read.Configured() {
			if _, err := s.read.Measure(ctx); err != nil {
				c.say("from the primary, not the replica: %v", err)
			}
		}
		from, err := s.read.Do(ctx, false, func(ctx context.Context) error {
			cmd.SetContext(ctx)
			return work(cmd, args, s)
		})
		if from.Replica() {
			c.say("from the replica, %s", from)
		}
		return err
	}
}

// withoutPrimary is a session that has only the replica; away is why, and the error when that cannot be read either.
func (c *cli) withoutPrimary(ctx context.Context, away error) (*session, error) {
	cfg, log, err := c.settings()
	if err != nil {
		return nil, err
	}
	if !cfg.ReadURL.IsSet() {
		return nil, away
	}
	s := &session{config: cfg, log: log}
	s.read = replica.New(replica.Options{Open: s.openReplica, Check: migrations.Check})
	if _, err := s.read.Measure(ctx); err != nil {
		s.close(ctx)
		return nil, away
	}
	return s, nil
}

// examineReplica looks whether the replica can be read.
func examineReplica(ctx context.Context, s *session, add func(string, error, string) bool) {
	if !s.read.Configured() {
		return
	}
	behind, err := s.read.Measure(ctx)
	if err != nil {
		err = replicaError(err)
	}
	add("replica", err, fmt.Sprintf("a standby of this database, %.1f s behind", behind.Seconds()))
}

// hostsOf counts the servers that a connection string names; 0 for one that cannot be read.
func hostsOf(url string) int {
	c, err := pgx.ParseConfig(url)
	if err != nil {
		return 0
	}
	address := func(host string, port uint16) string {
		return net.JoinHostPort(host, strconv.Itoa(int(port)))
	}
	hosts := map[string]bool{address(c.Host, c.Port): true}
	for _, other := range c.Fallbacks { // a server has one more for each way to speak to it
		hosts[address(other.Host, other.Port)] = true
	}
	return len(hosts)
}

// checkReplica refuses a replica of something else. One that is away, or too far behind, may come.
func (s *session) checkReplica(ctx context.Context) error {
	if !s.read.Configured() {
		return nil
	}
	if _, err := s.read.Measure(ctx); errors.Is(err, replica.ErrOther) {
		return &exitError{exitUsage, replicaError(err)}
	}
	return nil
}

// replicaError says why the replica is not read, and what to do.
func replicaError(err error) error {
	todo := "pages are read from DATABASE_URL until it can be read"
	if errors.Is(err, replica.ErrOther) {
		todo = "name a streaming standby of DATABASE_URL, or unset it: then pages are read from DATABASE_URL"
	}
	return hint(fmt.Errorf("DATABASE_READ_URL: %w", err), "%s", todo)
}
