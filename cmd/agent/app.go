package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/budgets"
	"github.com/lanekeeper/lanekeeper/builtins"
	"github.com/lanekeeper/lanekeeper/databases"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/flows"
	"github.com/lanekeeper/lanekeeper/internal/config"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/replica"
	"github.com/lanekeeper/lanekeeper/internal/schedule"
	"github.com/lanekeeper/lanekeeper/internal/telemetry"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/mcp"
	"github.com/lanekeeper/lanekeeper/memory"
	"github.com/lanekeeper/lanekeeper/models"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/selfheal"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/surfaces/heartbeat"
	"github.com/lanekeeper/lanekeeper/trace"
)

// app is the runtime of one process: everything that works on the database, wired together.
type app struct {
	config   config.Config
	getenv   func(string) string // resolves the secrets that files name
	log      *slog.Logger
	pool     *pgxpool.Pool
	reserved reserved
	read     *replica.Reader
	listener *postgres.Listener
	keeper   *lanes.Keeper
	engine   *executions.Engine
	registry *skills.Registry
	loop     *reason.Loop
	remote   *mcp.Client
	index    *memory.Index // nil: memories are found by words alone
	named    *databases.Client
	metrics  *telemetry.Metrics
	exporter *telemetry.Exporter
	surfaces
}

// app wires the runtime for a command. It makes no goroutine; see run and beat.
func (c *cli) app(s *session, model *models.Client) (*app, error) {
	cfg, log, pool := s.config, s.log, s.pool
	a := &app{config: cfg, log: log, pool: pool, reserved: s.reserved, read: s.read, getenv: c.getenv}
	if err := c.observe(a); err != nil {
		return nil, err
	}
	a.listener = postgres.NewListener(postgres.Dialer(s.sessions()), log)
	a.keeper = lanes.NewKeeper(pool, lanes.Options{Listener: a.listener, Logger: log, Disabled: !cfg.LanesEnabled, Observer: a.metrics})
	var err error
	a.engine, err = executions.New(pool, executions.Options{
		Keeper: a.keeper, Listener: a.listener, Logger: log, Workers: cfg.Workers, StopTimeout: cfg.ShutdownTimeout,
		LeaseTTL: cfg.WorkerLease, SweepEvery: min(cfg.WorkerLease/6, 5*time.Second),
		Direct: s.direct, Lease: s.reserved.system, Observer: a.metrics,
	})
	if err != nil {
		return nil, err
	}
	a.remote = mcp.NewClient(mcp.Options{
		Pool: pool, AllowPrivate: cfg.PrivateHTTP, Getenv: a.getenv, Logger: log, Agent: cfg.Name, Version: buildVersion(),
	})
	a.named = &databases.Client{DB: pool, Getenv: a.getenv}
	if a.index, err = newIndex(cfg, log); err != nil {
		return nil, err
	}
	a.registry, err = skills.New(skills.Options{
		Builtins: builtins.New(pool, directory(a.config), a.index), Pool: pool, AllowPrivate: cfg.PrivateHTTP, Logger: log,
		MCP:       a.remote.Call,
		Databases: a.named.Open, Getenv: a.getenv,
		Flow: skills.Flows(pool, a.engine, cfg.Name),
	})
	if err != nil {
		return nil, fmt.Errorf("prepare skills: %w", err)
	}
	zone, err := schedule.Location(a.config.Timezone)
	if err != nil {
		return nil, err
	}
	a.loop = a.newLoop(model, zone)
	a.engine.Fallback((&flows.Interpreter{Pool: pool, Engine: a.engine, Loop: a.loop, Logger: log}).Find)
	if err := errors.Join(a.loop.RegisterDelegate(a.engine), registerCalls(a, a.loop)); err != nil {
		return nil, err
	}
	return a, a.addSurfaces()
}

// newLoop is the reasoning loop under the configured budgets.
func (a *app) newLoop(model *models.Client, zone *time.Location) *reason.Loop {
	b, pool := a.config.Budget, a.pool
	return &reason.Loop{
		Pool: pool, Model: model, Skills: a.registry, Agents: directory(a.config), Logger: a.log,
		Budget: reason.Budget{
			Iterations: b.MaxIterations, Tokens: unbounded(b.MaxTokens), CostUSD: b.MaxCostUSD, Time: b.RunTimeout,
			Context: b.ContextTokens,
		},
		Limits: limits(a.config.Limits), Zone: zone,
		Admit: func(ctx context.Context, skill, owner string) (bool, error) {
			return selfheal.Admit(ctx, pool, skill, owner)
		},
		After: selfheal.After(pool),
	}
}

// directory finds agents, and says what the settings are for those that say nothing else.
func directory(cfg config.Config) *agents.Directory {
	return &agents.Directory{Settings: agents.Settings{
		Name: cfg.Name, Model: cfg.Model, Effort: cfg.Provider.Effort, Timezone: cfg.Timezone, HeartbeatCron: cfg.HeartbeatCron,
		Limits: agents.Limits{
			Iterations: cfg.Budget.MaxIterations, Tokens: cfg.Budget.MaxTokens, CostUSD: cfg.Budget.MaxCostUSD,
			DayUSD: cfg.Limits.DayUSD,
		},
	}}
}

// limits are the daily budgets as configured.
func limits(l config.Limits) budgets.Limits {
	limit := func(tokens int, usd float64) budgets.Limit { return budgets.Limit{Tokens: int64(tokens), USD: usd} }
	return budgets.Limits{
		Day: limit(l.DayTokens, l.DayUSD),
		Surface: map[trace.Surface]budgets.Limit{
			trace.Heartbeat: limit(l.HeartbeatTokens, l.HeartbeatUSD),
			trace.Operate:   limit(l.OperateTokens, l.OperateUSD),
			trace.Chat:      limit(l.ChatTokens, l.ChatUSD),
			trace.Webhook:   limit(l.WebhookTokens, l.WebhookUSD),
		},
	}
}

// unbounded turns a setting of 0, which means no bound, into one that is never reached.
func unbounded(n int) int {
	if n == 0 {
		return math.MaxInt
	}
	return n
}

// admission is how many executions may run at once, as configured.
func admission(cfg config.Config) []executions.Admission {
	limits := make([]executions.Admission, len(cfg.Admission))
	for i, l := range cfg.Admission {
		limits[i] = executions.Admission(l)
	}
	return limits
}

// healPolicy is self-heal's rule as configured.
func healPolicy(cfg config.Config) selfheal.Policy {
	return selfheal.Policy{
		Failures: cfg.SelfHeal.Failures, Window: cfg.SelfHeal.Window, Rate: cfg.SelfHeal.Rate,
		RateCalls: cfg.SelfHeal.RateCalls, Cooldown: cfg.SelfHeal.Cooldown,
	}
}

// run works until ctx ends: takes executions, keeps leases, ticks schedules, serves the surfaces. more runs beside
// it and is waited for.
func (a *app) run(ctx context.Context, more ...func(ctx context.Context) error) error {
	err := postgres.InTx(ctx, a.pool, func(tx pgx.Tx) error { return heartbeat.Sync(ctx, tx, a.loop.Agents, true) })
	if err != nil {
		return err
	}
	if err := a.engine.SetLimits(ctx, admission(a.config)); err != nil {
		return err
	}
	a.warnOfPrices(ctx)
	return a.living(ctx, func(ctx context.Context) error {
		group, ctx := errgroup.WithContext(ctx)
		group.Go(func() error { return a.engine.Run(ctx) })
		group.Go(func() error { return a.housekeep(ctx) })
		group.Go(func() error { return a.read.Run(ctx) })
		group.Go(func() error { return a.index.Run(ctx, a.pool) })
		group.Go(func() error { return count(ctx, a.pool, countEvery, a.log) })
		for _, f := range slices.Concat(a.beside(), more) {
			group.Go(func() error { return f(ctx) })
		}
		return group.Wait()
	}, a.remote.Run)
}

// beat keeps what a command needs that runs one execution itself, while fn works.
func (a *app) beat(ctx context.Context, fn func(ctx context.Context) error) error {
	return a.living(ctx, fn, a.engine.Beat)
}

// living keeps leases, notifications and what else is given while fn works, however it ends: they are needed until
// the last of it has stopped.
func (a *app) living(ctx context.Context, fn func(ctx context.Context) error, more ...func(ctx context.Context) error) error {
	living, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	var under errgroup.Group
	for _, keep := range append(more, a.listener.Run, a.keeper.Run, a.exporter.Run) {
		under.Go(func() error { return keep(living) })
	}
	err := fn(ctx)
	err = errors.Join(err, a.operate.Close(context.WithoutCancel(ctx)))
	stop()
	if below := under.Wait(); err == nil {
		err = below
	}
	a.remote.Close()
	a.named.Close()
	return err
}
