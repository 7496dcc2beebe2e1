package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/internal/app"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/replica"
)

// withReader is withSession for queries that may read from the replica. Without a primary the session has only the
// replica.
func (c *cli) withReader(
	work func(cmd *cobra.Command, args []string, s *session) error,
) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		ctx := cmd.Context()
		s, err := c.session(ctx)
		if postgres.Unreachable(err) {
			s, err = c.replicaSession(ctx, err)
		}
		if err != nil {
			return err
		}
		defer s.close(ctx)
		if s.Read.Configured() {
			if _, err := s.Read.Measure(ctx); err != nil {
				c.infof("read from the primary, not the replica: %v", err)
			}
		}
		from, err := s.Read.Do(ctx, false, func(ctx context.Context) error {
			cmd.SetContext(ctx)
			return work(cmd, args, s)
		})
		if from.Replica() {
			c.infof("read from the replica, %s", from)
		}
		return err
	}
}

// replicaSession opens a session with only the replica. It returns cause when there is none.
func (c *cli) replicaSession(ctx context.Context, cause error) (*session, error) {
	cfg, log, err := c.settings()
	if err != nil {
		return nil, err
	}
	if !cfg.ReadURL.IsSet() {
		return nil, cause
	}
	s := &session{config: cfg, log: log}
	s.Read = app.ReplicaOnly(cfg)
	if _, err := s.Read.Measure(ctx); err != nil {
		s.close(ctx)
		return nil, cause
	}
	return s, nil
}

// checkReplica rejects a replica of another database. An unreachable or lagging replica is accepted: it may recover.
func (s *session) checkReplica(ctx context.Context) error {
	if !s.Read.Configured() {
		return nil
	}
	if _, err := s.Read.Measure(ctx); errors.Is(err, replica.ErrOther) {
		return &exitError{exitUsage, replicaError(err)}
	}
	return nil
}

func replicaError(err error) error {
	todo := "reads use DATABASE_URL until it is available"
	if errors.Is(err, replica.ErrOther) {
		todo = "name a streaming standby of DATABASE_URL, or unset it to read from DATABASE_URL"
	}
	return hint(fmt.Errorf("DATABASE_READ_URL: %w", err), "%s", todo)
}
