package main

import (
	"context"
	"fmt"
	"io"
	"net"

	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/builtins"
	"github.com/lanekeeper/lanekeeper/internal/app"
	"github.com/lanekeeper/lanekeeper/internal/config"
	"github.com/lanekeeper/lanekeeper/migrations"
	"github.com/lanekeeper/lanekeeper/models"
)

func (c *cli) serveCommand() *cobra.Command {
	var migrate bool
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Run the agent: heartbeats, executions, HTTP",
		Long: `Run the agent on the database of DATABASE_URL. Any number of processes can serve one database.
Pages and queries read from the standby of DATABASE_READ_URL, if set. AGENT_ADMIN_TOKEN protects the HTTP API.
SIGTERM or ^C stops in phases: /readyz answers 503 at once, and everything else continues for AGENT_DRAIN_DELAY. Then
the listener closes, and requests in flight finish within AGENT_SHUTDOWN_TIMEOUT. Then claiming stops, and running steps
finish within AGENT_SHUTDOWN_TIMEOUT. Other processes resume unfinished work; the exit code is 0. A second signal exits
at once. With NOTIFY_SOCKET it notifies systemd.`,
		Args: positionalArgs(0, 0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error { return c.serve(cmd.Context(), migrate) },
	}
	cmd.Flags().BoolVar(&migrate, "migrate", false, "migrate the schema first")
	return cmd
}

// serve runs the agent until ctx ends. It opens the port before the database. Without migrate, the schema of another
// version is an error.
func (c *cli) serve(ctx context.Context, migrate bool) error {
	cfg, log, err := c.loadSettings(config.LoadServe)
	if err != nil {
		return err
	}
	if err := cfg.RequireServe(); err != nil {
		return &exitError{exitUsage, err}
	}
	listener, err := listen(ctx, cfg)
	if err != nil {
		return err
	}
	defer listener.Close()
	s, err := c.openServing(ctx, cfg, log)
	if err != nil {
		return err
	}
	defer s.close(ctx)
	if migrate {
		if _, err := s.migrate(ctx, c); err != nil {
			return err
		}
	}
	if err := migrations.Check(ctx, s.Pool); err != nil {
		return err
	}
	if err := s.checkReplica(ctx); err != nil {
		return err
	}
	if err := migrations.CheckObjects(ctx, s.Pool); err != nil {
		log.WarnContext(ctx, "the schema is incomplete", "error", err)
	}
	if _, err := builtins.Put(ctx, s.Pool); err != nil {
		return err
	}
	if err := migrations.Rights(ctx, s.Pool); err != nil {
		log.WarnContext(ctx, "database privileges are missing", "error", err)
	}
	model, about, stop, err := app.NewModel(ctx, cfg, log, models.Retry{})
	if err != nil {
		return err
	}
	defer stop()
	a, err := c.app(s, model)
	if err != nil {
		return err
	}
	a.Commands = newCommandHost(c, s)
	if err := a.WarnWeakTokens(ctx); err != nil {
		return err
	}
	base := "http://" + listener.Addr().String()
	log.InfoContext(ctx, "serving", "listen", base, "engine_room", base+"/", "model", about,
		"heartbeat", cfg.HeartbeatCron+" "+cfg.Timezone)
	err = a.Serve(ctx, listener)
	log.InfoContext(ctx, "stopped")
	return err
}

// listen binds the port first, so that a conflict shows before anything starts.
func listen(ctx context.Context, cfg config.Config) (net.Listener, error) {
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", cfg.Listen)
	if err != nil {
		return nil, hint(fmt.Errorf("listen: %w", err), "set AGENT_LISTEN to a free address, for example 127.0.0.1:8081")
	}
	return listener, nil
}

func (c *cli) migrateCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "migrate",
		Short: "Migrate the database's schema to this version",
		Long: `Migrate the database's schema to this version of agent, including River's tables. It can run concurrently and
while agent serve runs. It rejects the schema of a newer version.`,
		Args: positionalArgs(0, 0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx := cmd.Context()
			c.quietLogs()
			cfg, log, err := c.settings()
			if err != nil {
				return err
			}
			s, err := c.openSession(ctx, cfg, log)
			if err != nil {
				return err
			}
			defer s.close(ctx)
			applied, err := s.migrate(ctx, c)
			if err == nil {
				err = migrations.CheckObjects(ctx, s.Pool)
			}
			if err != nil {
				return err
			}
			if _, err := builtins.Put(ctx, s.Pool); err != nil {
				return err
			}
			missing, err := migrations.ClientMissing(ctx, s.Pool)
			if err != nil {
				return err
			}
			if missing != "" {
				fmt.Fprintf(cmd.ErrOrStderr(), "the role for the SQL contract is missing; run this as a superuser, then agent "+
					"migrate again:\n  %s\n", missing)
			}
			if err := migrations.CheckCreators(ctx, s.Pool); err != nil {
				fmt.Fprintln(cmd.ErrOrStderr(), "warning:", err)
			}
			return c.print(map[string]any{"version": migrations.Version(), "applied": append([]string{}, applied...)},
				func(w io.Writer) {
					for _, name := range applied {
						fmt.Fprintln(w, "applied", name)
					}
					fmt.Fprintf(w, "schema version %d, up to date\n", migrations.Version())
				})
		},
	}
}
