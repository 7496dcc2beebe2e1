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

// cutLimit is how long answers that are cut may take to say so.
const cutLimit = 5 * time.Second

// stages signal the phases of a graceful shutdown:
//
//  1. draining starts at once. /readyz answers 503, so load balancers stop sending requests. Connections close
//     after their current response. Work continues for AGENT_DRAIN_DELAY.
//  2. stopping closes the listener and the streams that only watch. Requests in flight, streamed ones too, have
//     AGENT_SHUTDOWN_TIMEOUT, and the engine still works for them.
//  3. cutting ends the remaining responses with a pointer to their result. The engine accepts no work, finishes
//     running steps within AGENT_SHUTDOWN_TIMEOUT, and hands the rest to other processes.
type stages struct{ draining, stopping, cutting chan struct{} }

// serving works and answers until ctx ends, and then stops in stages. more runs beside it.
func (a *app) serving(ctx context.Context, listener net.Listener, more ...func(ctx context.Context) error) error {
	manager := sdnotify.New(a.getenv)
	alive, dead := context.WithCancel(context.WithoutCancel(ctx))
	var watching sync.WaitGroup
	watching.Go(func() { manager.Watchdog(alive) })
	defer watching.Wait()
	defer dead()
	work, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	return a.run(work, append(more, func(work context.Context) error {
		defer end()
		return a.serveHTTP(work, ctx.Done(), listener, manager)
	})...)
}

// serveHTTP answers until stop is closed and the requests under way have been answered, or until work ends.
func (a *app) serveHTTP(work context.Context, stop <-chan struct{}, listener net.Listener, manager *sdnotify.Manager) error {
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

// drain goes through the stages. When work has ended by itself nobody can be served, and there is nothing to wait for.
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
		last, cancel := context.WithTimeout(context.WithoutCancel(work), cutLimit)
		err = server.Shutdown(last)
		cancel()
	}
	if err != nil {
		a.log.WarnContext(work, "requests cut off", "error", err)
	}
	a.log.InfoContext(work, "requests answered", "after", time.Since(began))
}

// notify tells the service manager, where there is one.
func (a *app) notify(ctx context.Context, manager *sdnotify.Manager, state string) {
	if err := manager.Tell(state); err != nil {
		a.log.WarnContext(ctx, "service manager not told", "state", state, "error", err)
	}
}

// healthLimit is how long a process may take to answer its probe.
const healthLimit = 3 * time.Second

func (c *cli) healthcheckCommand() *cobra.Command {
	var ready bool
	cmd := &cobra.Command{
		Use:   "healthcheck",
		Short: "Ask the agent that serves on this machine whether it is alive",
		Long: `Ask the agent that serves at AGENT_LISTEN on this machine whether it is alive; with --ready whether it may be sent
requests. Exit code 0 means yes, 1 no. It needs no other setting, no database and no shell: it is for HEALTHCHECK in containers.`,
		Args: args(0, 0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error { return c.healthcheck(cmd.Context(), ready) },
	}
	cmd.Flags().BoolVar(&ready, "ready", false, "ask /readyz instead of /healthz")
	return cmd
}

func (c *cli) healthcheck(ctx context.Context, ready bool) error {
	path := "/healthz"
	if ready {
		path = "/readyz"
	}
	base, err := c.probed()
	if err != nil {
		return &exitError{exitUsage, err}
	}
	ctx, cancel := context.WithTimeout(ctx, healthLimit)
	defer cancel()
	said, err := probe(ctx, base+path)
	if err != nil {
		return err
	}
	return c.print(json.RawMessage(said), func(w io.Writer) error {
		_, err := fmt.Fprintf(w, "%s%s: ok\n", base, path)
		return err
	})
}

// probed is where the process listens that AGENT_LISTEN is the setting of. Other settings may be missing or wrong.
func (c *cli) probed() (string, error) {
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

// probe asks once, and returns what a well process says.
func probe(ctx context.Context, url string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
	if err != nil {
		return nil, fmt.Errorf("ask %s: %w", url, err)
	}
	client := &http.Client{Transport: &http.Transport{Proxy: nil, DisableKeepAlives: true}}
	resp, err := client.Do(req)
	if err != nil {
		return nil, hint(err, "is agent serve running, with this AGENT_LISTEN?")
	}
	defer resp.Body.Close()
	said, err := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	if err != nil {
		return nil, fmt.Errorf("ask %s: %w", url, err)
	}
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s: %s%s", url, resp.Status, failing(said))
	}
	return said, nil
}

// failing names the checks of a /readyz that failed.
func failing(said []byte) string {
	var got struct {
		Checks map[string]struct {
			OK     bool
			Detail string
		}
	}
	if json.Unmarshal(said, &got) != nil {
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

// observe makes the metrics of the process, and what sends its traces where the environment names a receiver.
func (c *cli) observe(a *app) error {
	settings, err := telemetry.Load(c.environ)
	if err != nil {
		return &exitError{exitUsage, &config.Error{Problems: strings.Split(err.Error(), "\n")}}
	}
	if settings.Endpoint != "" { // what the SDK has to say, such as that a receiver did not take all of a batch
		otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) { a.log.Warn("OpenTelemetry", "error", err) }))
	}
	a.metrics = telemetry.NewMetrics(buildVersion(), telemetry.NewState(a.pool, a.log))
	a.exporter = telemetry.NewExporter(a.pool, settings, buildVersion(), a.metrics, a.log)
	return nil
}

// metricsEndpoints is what Prometheus scrapes. Like the probes it asks for no token: it has counts, and names of
// surfaces, skills, models and webhook endpoints, and nothing of what was said.
func (a *app) metricsEndpoints() []api.Endpoint {
	return []api.Endpoint{{
		Method: "GET", Path: "/metrics", Access: api.Public, ContentType: "text/plain",
		About:   "Counters of this process and gauges of the database, for Prometheus. Answers also when the database is away.",
		Handler: a.metrics.Handler(),
	}}
}

// keepLinks is how long it is kept who asked for a trace. A link is needed until the trace has ended.
const keepLinks = 60 * 24 * time.Hour

// forgetLinks takes away links of traces that ended long ago.
func (a *app) forgetLinks(ctx context.Context) {
	if _, err := activity.PruneLinks(ctx, a.pool, keepLinks); err != nil && ctx.Err() == nil {
		a.log.WarnContext(ctx, "old links of traces not forgotten", "error", err)
	}
}

const (
	// housekeepEvery is how often what is kept long enough is looked for.
	housekeepEvery = time.Hour
	// countEvery is how often the activity log is looked at for what is to be counted.
	countEvery = 5 * time.Second
)

// housekeep takes away what was kept as long as its policy says, until ctx ends. Any number of processes may do it.
func (a *app) housekeep(ctx context.Context) error {
	tick := time.NewTicker(housekeepEvery)
	defer tick.Stop()
	for {
		if _, err := retention.Run(ctx, a.pool, retention.Options{Logger: a.log}); err != nil && ctx.Err() == nil {
			a.log.WarnContext(ctx, "old rows not removed; the next pass goes on", "error", err)
		}
		a.forgetLinks(ctx)
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// count keeps the counts of the activity log up to date, until ctx ends. Any number of processes may do it.
// A backlog is worked off in small passes, with as much rest between as they took.
func count(ctx context.Context, db postgres.Beginner, every time.Duration, log *slog.Logger) error {
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
			log.WarnContext(ctx, "activity not counted; sums over it take longer", "error", err)
		}
		if more {
			next.Reset(time.Since(began))
		} else {
			next.Reset(every)
		}
	}
}

// warnOfPrices says when a limit in dollars bounds nothing, because the model has no price.
func (a *app) warnOfPrices(ctx context.Context) {
	l := a.config.Limits
	bounded := a.config.Budget.MaxCostUSD > 0 || l.DayUSD+l.HeartbeatUSD+l.OperateUSD+l.ChatUSD+l.WebhookUSD > 0
	if bounded && a.loop.Model != nil && !a.loop.Model.Priced() {
		a.log.WarnContext(ctx, "the model has no price, so limits in dollars bound nothing; set AGENT_PRICES", "model", a.loop.Model.Model())
	}
}

func (c *cli) migrateCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "migrate",
		Short: "Bring the database's schema to this version",
		Long: `Bring the database's schema to this version of agent, River's tables included. Safe to run while others
run it, and while agent serves. A schema that a newer version made is refused.`,
		Args: args(0, 0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx := cmd.Context()
			c.calm()
			cfg, log, err := c.settings()
			if err != nil {
				return err
			}
			s, err := c.open(ctx, cfg, log)
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
				fmt.Fprintf(cmd.ErrOrStderr(), "other programs have no role for the SQL contract; let a superuser run this, then run agent migrate again:\n  %s\n", missing)
			}
			return c.print(map[string]any{"version": migrations.Version(), "applied": append([]string{}, applied...)}, func(w io.Writer) error {
				for _, name := range applied {
					fmt.Fprintln(w, "applied", name)
				}
				_, err := fmt.Fprintf(w, "schema version %d, up to date\n", migrations.Version())
				return err
			})
		},
	}
}
