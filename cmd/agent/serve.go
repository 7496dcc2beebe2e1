package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"go.opentelemetry.io/otel"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/api"
	"github.com/lanekeeper/lanekeeper/builtins"
	"github.com/lanekeeper/lanekeeper/internal/config"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/sdnotify"
	"github.com/lanekeeper/lanekeeper/internal/telemetry"
	"github.com/lanekeeper/lanekeeper/migrations"
	"github.com/lanekeeper/lanekeeper/models"
	"github.com/lanekeeper/lanekeeper/retention"
	"github.com/lanekeeper/lanekeeper/webhooks"
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
		log.WarnContext(ctx, "database privileges are missing", "error", err)
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
	if err := a.warnWeakTokens(ctx); err != nil {
		return err
	}
	base := "http://" + listener.Addr().String()
	log.InfoContext(ctx, "serving", "listen", base, "engine_room", base+"/", "model", about,
		"heartbeat", cfg.HeartbeatCron+" "+cfg.Timezone)
	err = a.runServer(ctx, listener)
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

// httpServer builds the server of API and pages. at signals the phases of the shutdown.
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
		Pool: a.adminPool(), Read: a.read, Ready: a.reserved.system, Engine: a.engine, Agents: a.loop.Agents, Memory: a.index,
		AdminToken: a.config.AdminToken.Reveal(), ChatKeys: keys,
		Proxies: a.config.Proxies, Endpoints: append(a.endpoints(), pages...), Pages: room, Logger: a.log,
		Listener:      a.listener,
		DocumentBytes: int64(a.config.DocumentMaxBytes), Draining: at.draining, Stopping: at.stopping, Cutting: at.cutting,
	})
	if err != nil {
		return nil, fmt.Errorf("prepare HTTP: %w", err)
	}
	return api.Server(handler, a.log), nil
}

// warnWeakTokens logs endpoints that reject everything because their bearer tokens are weak.
func (a *app) warnWeakTokens(ctx context.Context) error {
	all, err := webhooks.Endpoints(ctx, a.pool)
	if err != nil {
		return err
	}
	for _, e := range all {
		if err := webhooks.CheckTokens(e.Scheme, e.Secrets, a.getenv); err != nil && e.Enabled {
			a.log.ErrorContext(ctx, "webhook endpoint rejects all requests", "endpoint", e.Name, "error", err)
		}
	}
	return nil
}

// cutTimeout bounds the last phase: cut responses write their final event.
const cutTimeout = 5 * time.Second

// stages signal the phases of a graceful shutdown:
//
//  1. draining starts at once. /readyz answers 503, so load balancers stop sending requests. Connections close
//     after their current response. Work continues for AGENT_DRAIN_DELAY.
//  2. stopping closes the listener and the streams that only watch. Requests in flight, streamed ones too, have
//     AGENT_SHUTDOWN_TIMEOUT, and the engine still works for them.
//  3. cutting ends the remaining responses with a pointer to their result. The engine accepts no work, finishes
//     running steps within AGENT_SHUTDOWN_TIMEOUT, and hands the rest to other processes.
type stages struct{ draining, stopping, cutting chan struct{} }

// runServer runs the engine and HTTP until ctx ends, then shuts down in stages. It waits for extra.
func (a *app) runServer(ctx context.Context, listener net.Listener, extra ...func(ctx context.Context) error) error {
	manager := sdnotify.New(a.getenv)
	watchdog, stopWatchdog := context.WithCancel(context.WithoutCancel(ctx))
	var watching sync.WaitGroup
	watching.Go(func() { manager.Watchdog(watchdog) })
	defer watching.Wait()
	defer stopWatchdog()
	work, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	return a.run(work, append(extra, func(work context.Context) error {
		defer end()
		return a.serveHTTP(work, ctx.Done(), listener, manager)
	})...)
}

// serveHTTP serves until stop closes and the requests in flight are done, or until work ends.
func (a *app) serveHTTP(
	work context.Context, stop <-chan struct{}, listener net.Listener, manager *sdnotify.Manager,
) error {
	at := stages{make(chan struct{}), make(chan struct{}), make(chan struct{})}
	server, err := a.httpServer(at)
	if err != nil {
		return err
	}
	server.BaseContext = func(net.Listener) context.Context { return context.WithoutCancel(work) }
	failed := make(chan error, 1)
	go func() { failed <- server.Serve(api.Listen(listener)) }()
	a.notify(work, manager, sdnotify.Ready)
	select {
	case err := <-failed:
		return fmt.Errorf("serve HTTP: %w", err)
	case <-stop:
	case <-work.Done():
	}
	a.notify(work, manager, sdnotify.Stopping)
	a.drain(work, at, server)
	if err := <-failed; !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve HTTP: %w", err)
	}
	return nil
}

// drain runs the shutdown phases. After a failed engine it skips the waits.
func (a *app) drain(work context.Context, at stages, server *http.Server) {
	began := time.Now()
	close(at.draining)
	a.log.InfoContext(work, "stopping", "drain_delay", a.config.DrainDelay)
	select {
	case <-time.After(a.config.DrainDelay):
	case <-work.Done():
	}
	close(at.stopping)
	closing, cancel := context.WithTimeout(work, a.config.ShutdownTimeout)
	err := server.Shutdown(closing)
	cancel()
	close(at.cutting)
	if err != nil {
		last, cancel := context.WithTimeout(context.WithoutCancel(work), cutTimeout)
		err = server.Shutdown(last)
		cancel()
	}
	if err != nil {
		a.log.WarnContext(work, "requests cut off", "error", err)
	}
	a.log.InfoContext(work, "requests answered", "after", time.Since(began))
}

// notify reports a state to the service manager.
func (a *app) notify(ctx context.Context, manager *sdnotify.Manager, state string) {
	if err := manager.Tell(state); err != nil {
		a.log.WarnContext(ctx, "service manager not notified", "state", state, "error", err)
	}
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

// initTelemetry builds the metrics and, if configured, the trace exporter.
func (c *cli) initTelemetry(a *app) error {
	settings, err := telemetry.Load(c.environ)
	if err != nil {
		return &exitError{exitUsage, &config.Error{Problems: strings.Split(err.Error(), "\n")}}
	}
	if settings.Endpoint != "" { // SDK errors, such as a partially rejected batch
		otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) { a.log.Warn("OpenTelemetry", "error", err) }))
	}
	a.metrics = telemetry.NewMetrics(buildVersion(), telemetry.NewState(a.pool, a.log))
	a.exporter = telemetry.NewExporter(a.pool, settings, buildVersion(), a.metrics, a.log)
	return nil
}

// metricsEndpoints serves Prometheus without a token. It exposes counts and names, never content.
func (a *app) metricsEndpoints() []api.Endpoint {
	return []api.Endpoint{{
		Method: "GET", Path: "/metrics", Access: api.Public, ContentType: "text/plain",
		About:   "Counters of this process and gauges of the database, for Prometheus. Works without the database.",
		Handler: a.metrics.Handler(),
	}}
}

// linkRetention keeps trace links long enough for their traces to end.
const linkRetention = 60 * 24 * time.Hour

func (a *app) pruneLinks(ctx context.Context) {
	if _, err := activity.PruneLinks(ctx, a.pool, linkRetention); err != nil && ctx.Err() == nil {
		a.log.WarnContext(ctx, "old trace links not pruned", "error", err)
	}
}

const (
	housekeepEvery = time.Hour
	countEvery     = 5 * time.Second
)

// runHousekeeping prunes rows past their retention until ctx ends. Several processes may run it.
func (a *app) runHousekeeping(ctx context.Context) error {
	tick := time.NewTicker(housekeepEvery)
	defer tick.Stop()
	for {
		if _, err := retention.Run(ctx, a.pool, retention.Options{Logger: a.log}); err != nil && ctx.Err() == nil {
			a.log.WarnContext(ctx, "old rows not pruned; the next pass retries", "error", err)
		}
		a.pruneLinks(ctx)
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// runActivityCounts updates the counters of the activity log until ctx ends. Several processes may run it. It works
// off a backlog at half speed.
func runActivityCounts(ctx context.Context, db postgres.Beginner, every time.Duration, log *slog.Logger) error {
	next := time.NewTimer(0)
	defer next.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-next.C:
		}
		began := time.Now()
		more, err := activity.Count(ctx, db)
		if err != nil && ctx.Err() == nil {
			log.WarnContext(ctx, "activity not counted; reports are slower", "error", err)
		}
		if more {
			next.Reset(time.Since(began))
		} else {
			next.Reset(every)
		}
	}
}

// warnUnpriced warns that a dollar limit has no effect because the model has no price.
func (a *app) warnUnpriced(ctx context.Context) {
	l := a.config.Limits
	bounded := a.config.Budget.MaxCostUSD > 0 || l.DayUSD+l.HeartbeatUSD+l.OperateUSD+l.ChatUSD+l.WebhookUSD > 0
	if bounded && a.loop.Model != nil && !a.loop.Model.Priced() {
		a.log.WarnContext(ctx, "the model has no price, so dollar limits have no effect; set AGENT_PRICES", "model",
			a.loop.Model.Model())
	}
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
			if _, err := builtins.Put(ctx, s.pool); err != nil {
				return err
			}
			missing, err := migrations.ClientMissing(ctx, s.pool)
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
