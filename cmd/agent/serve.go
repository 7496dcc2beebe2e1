package main

import (
	"context"
	"fmt"
	"net"
	"net/http"

	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/api"
	"github.com/lanekeeper/lanekeeper/builtins"
	"github.com/lanekeeper/lanekeeper/internal/config"
	"github.com/lanekeeper/lanekeeper/migrations"
	"github.com/lanekeeper/lanekeeper/models"
	"github.com/lanekeeper/lanekeeper/webhooks"
)

func (c *cli) serveCommand() *cobra.Command {
	var migrate bool
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Run the agent: heartbeats, executions, HTTP",
		Long: `Run the agent on the database that DATABASE_URL names. As many as wanted may serve one database.
Pages and questions are read from the standby that DATABASE_READ_URL names, if it is set.

AGENT_ADMIN_TOKEN guards the HTTP API. SIGTERM or ^C stops: /readyz says 503 at once and the rest goes on for AGENT_DRAIN_DELAY;
then no connection is taken and requests under way finish within AGENT_SHUTDOWN_TIMEOUT; then no work is taken and steps
under way finish within AGENT_SHUTDOWN_TIMEOUT. What is unfinished goes on elsewhere, and the exit code is 0. A second signal
exits at once. systemd is told when NOTIFY_SOCKET is set.`,
		Args: args(0, 0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error { return c.serve(cmd.Context(), migrate) },
	}
	cmd.Flags().BoolVar(&migrate, "migrate", false, "migrate the schema first")
	return cmd
}

func (c *cli) serve(ctx context.Context, migrate bool) error {
	cfg, log, err := c.settingsBy(config.LoadServe)
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
	s, err := c.openToServe(ctx, cfg, log)
	if err != nil {
		return err
	}
	defer s.close(ctx)
	if migrate {
		if _, err := s.migrate(ctx, c); err != nil {
			return err
		}
	}
	if err := migrations.Check(ctx, s.pool); err != nil {
		return err
	}
	if err := s.checkReplica(ctx); err != nil {
		return err
	}
	if _, err := builtins.Put(ctx, s.pool); err != nil {
		return err
	}
	if err := migrations.Rights(ctx, s.pool); err != nil {
		log.WarnContext(ctx, "rights are missing", "error", err)
	}
	model, about, stop, err := newModel(ctx, cfg, log, models.Retry{})
	if err != nil {
		return err
	}
	defer stop()
	a, err := c.app(s, model)
	if err != nil {
		return err
	}
	if err := a.reportTokens(ctx); err != nil {
		return err
	}
	base := "http://" + listener.Addr().String()
	log.InfoContext(ctx, "serving", "listen", base, "engine_room", base+"/", "model", about,
		"heartbeat", cfg.HeartbeatCron+" "+cfg.Timezone)
	err = a.serving(ctx, listener)
	log.InfoContext(ctx, "stopped")
	return err
}

// listen takes the port before anything else is started, so that a taken one is found at once.
func listen(ctx context.Context, cfg config.Config) (net.Listener, error) {
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", cfg.Listen)
	if err != nil {
		return nil, hint(fmt.Errorf("take the port: %w", err), "set AGENT_LISTEN to a free address, for example 127.0.0.1:8081")
	}
	return listener, nil
}

// httpServer is the HTTP server of the API and the pages, which hear of the stages of a stop.
func (a *app) httpServer(at stages) (*http.Server, error) {
	keys := make(map[string]string, len(a.config.ChatKeys))
	for name, key := range a.config.ChatKeys {
		keys[name] = key.Reveal()
	}
	var handler http.Handler
	room, pages, err := a.engineRoom(func() http.Handler { return handler })
	if err != nil {
		return nil, err
	}
	handler, err = api.New(api.Options{
		Pool: a.adminPool(), Read: a.read, Ready: a.reserved.system, Engine: a.engine, Agents: a.loop.Agents, Memory: a.index, AdminToken: a.config.AdminToken.Reveal(), ChatKeys: keys,
		Proxies: a.config.Proxies, Endpoints: append(a.endpoints(), pages...), Pages: room, Logger: a.log, Listener: a.listener,
		DocumentBytes: int64(a.config.DocumentMaxBytes), Draining: at.draining, Stopping: at.stopping, Cutting: at.cutting,
	})
	if err != nil {
		return nil, fmt.Errorf("prepare HTTP: %w", err)
	}
	return api.Server(handler, a.log), nil
}

// reportTokens says which endpoints take nothing because their bearer tokens are too weak.
func (a *app) reportTokens(ctx context.Context) error {
	all, err := webhooks.Endpoints(ctx, a.pool)
	if err != nil {
		return err
	}
	for _, e := range all {
		if err := webhooks.CheckTokens(e.Scheme, e.Secrets, a.getenv); err != nil && e.Enabled {
			a.log.ErrorContext(ctx, "webhook endpoint takes nothing", "endpoint", e.Name, "error", err)
		}
	}
	return nil
}
