package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"time"

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

// healthTimeout bounds a probe.
const healthTimeout = 3 * time.Second

func (c *cli) healthcheckCommand() *cobra.Command {
	var ready bool
	cmd := &cobra.Command{
		Use:   "healthcheck",
		Short: "Check the agent that serves on this machine",
		Long: `Check whether the agent at AGENT_LISTEN on this machine is alive; with --ready whether it accepts requests. The exit
code is 0 or 1. It needs no other setting, no database and no shell, so containers can use it in HEALTHCHECK.`,
		Args: positionalArgs(0, 0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error { return c.healthcheck(cmd.Context(), ready) },
	}
	cmd.Flags().BoolVar(&ready, "ready", false, "check /readyz instead of /healthz")
	return cmd
}

func (c *cli) healthcheck(ctx context.Context, ready bool) error {
	path := "/healthz"
	if ready {
		path = "/readyz"
	}
	base, err := c.probeURL()
	if err != nil {
		return &exitError{exitUsage, err}
	}
	ctx, cancel := context.WithTimeout(ctx, healthTimeout)
	defer cancel()
	body, err := probe(ctx, base+path)
	if err != nil {
		return err
	}
	return c.printf(json.RawMessage(body), "%s%s: ok\n", base, path)
}

// probeURL derives the local address from AGENT_LISTEN and ignores all other settings.
func (c *cli) probeURL() (string, error) {
	cfg, err := config.Load(map[string]string{"AGENT_LISTEN": c.environ["AGENT_LISTEN"]})
	if err != nil {
		return "", err
	}
	host, port, err := net.SplitHostPort(cfg.Listen)
	if err != nil {
		return "", err
	}
	if addr, err := netip.ParseAddr(host); host == "" || err == nil && addr.IsUnspecified() {
		host = "127.0.0.1"
		if addr.Is6() {
			host = "::1"
		}
	}
	return "http://" + net.JoinHostPort(host, port), nil
}

// probe requests url once and returns the body of a 200 response.
func probe(ctx context.Context, url string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
	if err != nil {
		return nil, fmt.Errorf("probe %s: %w", url, err)
	}
	client := &http.Client{Transport: &http.Transport{Proxy: nil, DisableKeepAlives: true}}
	resp, err := client.Do(req)
	if err != nil {
		return nil, hint(err, "check that agent serve runs with this AGENT_LISTEN")
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	if err != nil {
		return nil, fmt.Errorf("probe %s: %w", url, err)
	}
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s: %s%s", url, resp.Status, failedChecks(body))
	}
	return body, nil
}

// failedChecks lists the failed checks of a /readyz response.
func failedChecks(body []byte) string {
	var got struct {
		Checks map[string]struct {
			OK     bool
			Detail string
		}
	}
	if json.Unmarshal(body, &got) != nil {
		return ""
	}
	var bad []string
	for name, check := range got.Checks {
		if !check.OK {
			bad = append(bad, name+": "+check.Detail)
		}
	}
	slices.Sort(bad)
	if len(bad) == 0 {
		return ""
	}
	return " (" + strings.Join(bad, "; ") + ")"
}

func (c *cli) migrateCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "migrate",
		Short: "Migrate the database's schema to this version",
		Long: `Migrate the database's schema to this version of agent, including River's tables. It can run concurrently and while
agent serve runs. It rejects the schema of a newer version.`,
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
