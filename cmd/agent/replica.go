package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5/pgxpool"

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
	return replica.New(replica.Options{
		Primary: primary, Probe: cmp.Or(s.reserved.system, s.pool),
		Open: s.openReplica, Check: migrations.Check, Logger: s.log,
		// On an older state the leases of live workers and lanes would look expired.
		MaxLag: s.config.WorkerLease / 3,
	})
}

// openReplica connects to the replica.
func (s *session) openReplica(ctx context.Context) (*pgxpool.Pool, error) {
	pool, err := postgres.Open(ctx, s.config.ReadURL.Reveal(), postgres.Options{MaxConns: replicaConns})
	if err != nil {
		return nil, errors.New(strings.ReplaceAll(err.Error(), "DATABASE_URL", "DATABASE_READ_URL"))
	}
	if hosts := hostsOf(pool); hosts > 1 {
		pool.Close()
		return nil, fmt.Errorf("it names %d servers, of which each has a lag of its own; name one: %w", hosts, replica.ErrOther)
	}
	return pool, nil
}

// hostsOf counts the servers that a connection string names.
func hostsOf(pool *pgxpool.Pool) int {
	c := pool.Config().ConnConfig
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
		return &exitError{exitUsage, hint(fmt.Errorf("DATABASE_READ_URL: %w", err),
			"name a streaming standby of DATABASE_URL, or unset it: then pages are read from DATABASE_URL")}
	}
	return nil
}
