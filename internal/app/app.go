// Package app wires the components of an agent to one database, and runs them: the engine of executions, the surfaces,
// the HTTP server and the background work. The command agent and package server build on it.
//
// Serve stops in the stages of a graceful shutdown (serve.go). Leases are renewed until the last step has ended. A
// serving process with enough connections reserves some for readiness, the admin and visitors (database.go). So one
// kind of load cannot take the connections of another.
package app

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"go.opentelemetry.io/otel"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/builtins"
	"github.com/lanekeeper/lanekeeper/databases"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/flows"
	"github.com/lanekeeper/lanekeeper/internal/config"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/schedule"
	"github.com/lanekeeper/lanekeeper/internal/telemetry"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/mcp"
	"github.com/lanekeeper/lanekeeper/memory"
	"github.com/lanekeeper/lanekeeper/models"
	"github.com/lanekeeper/lanekeeper/monitor"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/selfheal"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/surfaces/heartbeat"
)

// App is the runtime of one process. One of Run, Serve and RunWithLeases may be called, once; it closes the clients of
// MCP servers and of named databases.
type App struct {
	Options
	Keeper    *lanes.Keeper
	Engine    *executions.Engine
	Registry  *skills.Registry
	Loop      *reason.Loop
	MCPClient *mcp.Client
	Index     *memory.Index // nil without an embedding model
	Databases *databases.Client
	listener  *postgres.Listener
	metrics   *telemetry.Metrics
	exporter  *telemetry.Exporter
	surfaces
}

// Options are the settings and connections of an App.
type Options struct {
	Config config.Config
	Log    *slog.Logger
	Database
	Environ map[string]string   // the settings of OpenTelemetry and systemd
	Getenv  func(string) string // resolves secrets named in files
	Version string              // of the program
	// Commands runs commands of the command line for callers of POST /v1/commands; nil for none.
	Commands http.Handler
}

// New wires the runtime. It starts no goroutine; Run, Serve and RunWithLeases do. model may be nil for a command that
// does not reason. A wrong setting is a *config.Error.
func New(o Options, model *models.Client) (*App, error) {
	cfg, log, pool := o.Config, o.Log, o.Pool
	a := &App{Options: o}
	if err := a.initTelemetry(); err != nil {
		return nil, err
	}
	a.listener = postgres.NewListener(postgres.Dialer(a.Sessions()), log)
	a.Keeper = lanes.NewKeeper(pool, lanes.Options{
		Listener: a.listener, Logger: log, Disabled: !cfg.LanesEnabled, Observer: a.metrics,
	})
	var err error
	a.Engine, err = executions.New(pool, executions.Options{
		Keeper: a.Keeper, Listener: a.listener, Logger: log, Workers: cfg.Workers,
		StopTimeout: max(cfg.ShutdownTimeout, 1), // 0 is the default
		LeaseTTL:    cfg.WorkerLease, SweepEvery: min(cfg.WorkerLease/6, 5*time.Second), Direct: a.Direct,
		Lease: a.reserved.system, Observer: a.metrics,
	})
	if err != nil {
		return nil, err
	}
	a.MCPClient = mcp.NewClient(mcp.Options{
		Pool: pool, AllowPrivate: cfg.PrivateHTTP, Getenv: a.Getenv, Logger: log, Agent: cfg.Name, Version: a.Version,
	})
	a.Databases = &databases.Client{DB: pool, Getenv: a.Getenv}
	if a.Index, err = NewIndex(cfg, log); err != nil {
		return nil, err
	}
	a.Registry, err = skills.New(skills.Options{
		Builtins: builtins.New(pool, NewDirectory(a.Config), a.Index), Pool: pool, AllowPrivate: cfg.PrivateHTTP, Logger: log,
		MCP: a.MCPClient.Call, Databases: a.Databases.Open, Getenv: a.Getenv, Flow: skills.Flows(pool, a.Engine, cfg.Name),
	})
	if err != nil {
		return nil, fmt.Errorf("prepare skills: %w", err)
	}
	zone, err := schedule.Location(a.Config.Timezone)
	if err != nil {
		return nil, err
	}
	a.Loop = a.newLoop(model, zone)
	a.Engine.Fallback((&flows.Interpreter{Pool: pool, Engine: a.Engine, Loop: a.Loop, Logger: log}).Find)
	if err := errors.Join(a.Loop.RegisterDelegate(a.Engine), registerCallFlow(a, a.Loop)); err != nil {
		return nil, err
	}
	return a, a.registerSurfaces()
}

// newLoop builds the reasoning loop with the configured budgets.
func (a *App) newLoop(model *models.Client, zone *time.Location) *reason.Loop {
	b, pool := a.Config.Budget, a.Pool
	return &reason.Loop{
		Pool: pool, Model: model, Skills: a.Registry, Agents: NewDirectory(a.Config), Logger: a.Log,
		Budget: reason.Budget{
			Iterations: b.MaxIterations, Tokens: unlimited(b.MaxTokens), CostUSD: b.MaxCostUSD, Time: b.RunTimeout,
			Context: b.ContextTokens,
		},
		Limits: Limits(a.Config.Limits), Zone: zone,
		AdmitTrial: func(ctx context.Context, skill, owner string) (bool, error) {
			return selfheal.Admit(ctx, pool, skill, owner)
		},
		AfterCall: selfheal.After(pool, func(ctx context.Context, skill string) error {
			return a.Evals.RunOutageCases(ctx, skill) // registerSurfaces sets Evals after the loop
		}),
	}
}

// Monitor returns the monitor that judges whether the agent works.
func (a *App) Monitor() monitor.Monitor {
	return monitor.Monitor{Agents: NewDirectory(a.Config), Limits: Limits(a.Config.Limits)}
}

// Run works until ctx ends: it claims executions, renews leases, starts due schedules and runs the dispatchers of the
// surfaces. It also runs extra, and returns when all have returned.
func (a *App) Run(ctx context.Context, extra ...func(ctx context.Context) error) error {
	err := postgres.InTx(ctx, a.Pool, func(tx pgx.Tx) error { return heartbeat.Sync(ctx, tx, a.Loop.Agents, true) })
	if err != nil {
		return err
	}
	if err := a.Engine.SetLimits(ctx, admission(a.Config)); err != nil {
		return err
	}
	a.warnUnpriced(ctx)
	return a.withBackground(ctx, func(ctx context.Context) error {
		group, ctx := errgroup.WithContext(ctx)
		group.Go(func() error { return a.Engine.Run(ctx) })
		group.Go(func() error { return a.runHousekeeping(ctx) })
		group.Go(func() error { return a.Read.Run(ctx) })
		group.Go(func() error { return a.Index.Run(ctx, a.Pool) })
		group.Go(func() error { return runActivityCounts(ctx, a.Pool, countEvery, a.Log) })
		group.Go(func() error { return runExecutionCounts(ctx, a.Pool, time.Minute, a.Log) })
		group.Go(func() error { return a.Monitor().Watch(ctx, a.Pool, a.Log) })
		for _, f := range slices.Concat(a.background(), extra) {
			group.Go(func() error { return f(ctx) })
		}
		return group.Wait()
	}, a.MCPClient.Run)
}

// RunWithLeases renews leases while fn runs. Commands use it to run one execution in their own process.
func (a *App) RunWithLeases(ctx context.Context, fn func(ctx context.Context) error) error {
	return a.withBackground(ctx, fn, a.Engine.KeepAlive)
}

// withBackground runs lease renewal, notifications and telemetry while fn runs. They outlive ctx, because fn needs
// them until it returns.
func (a *App) withBackground(
	ctx context.Context, fn func(ctx context.Context) error, services ...func(ctx context.Context) error,
) error {
	background, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	var group errgroup.Group
	for _, service := range append(services, a.listener.Run, a.Keeper.Run, a.exporter.Run) {
		group.Go(func() error { return service(background) })
	}
	err := fn(ctx)
	err = errors.Join(err, a.Operate.Close(context.WithoutCancel(ctx)))
	stop()
	if groupErr := group.Wait(); err == nil {
		err = groupErr
	}
	a.MCPClient.Close()
	a.Databases.Close()
	return err
}

// initTelemetry builds the metrics and, if configured, the trace exporter.
func (a *App) initTelemetry() error {
	settings, err := telemetry.Load(a.Environ)
	if err != nil {
		return &config.Error{Problems: strings.Split(err.Error(), "\n")}
	}
	if settings.Endpoint != "" { // SDK errors, such as a partially rejected batch
		otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) { a.Log.Warn("OpenTelemetry", "error", err) }))
	}
	a.metrics = telemetry.NewMetrics(a.Version, telemetry.NewState(a.admin(), a.Log))
	a.exporter = telemetry.NewExporter(a.Pool, settings, a.Version, a.metrics, a.Log)
	return nil
}
