// Package app wires the components of an agent to one database, and runs them: the engine of executions, the surfaces,
// the HTTP server and the background work. The command agent and package server build on it.
//
// Serve stops in the stages of a graceful shutdown (serve.go). Leases are renewed until the last step has ended. A
// serving process reserves connections for readiness, the admin and visitors (database.go). So one kind of load cannot
// starve another.
package app

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"go.opentelemetry.io/otel"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/api"
	"github.com/lanekeeper/lanekeeper/automations/runner"
	"github.com/lanekeeper/lanekeeper/budgets"
	"github.com/lanekeeper/lanekeeper/builtins"
	"github.com/lanekeeper/lanekeeper/channels"
	"github.com/lanekeeper/lanekeeper/channels/email"
	"github.com/lanekeeper/lanekeeper/channels/slack"
	"github.com/lanekeeper/lanekeeper/channels/telegram"
	"github.com/lanekeeper/lanekeeper/databases"
	"github.com/lanekeeper/lanekeeper/evals"
	evalrunner "github.com/lanekeeper/lanekeeper/evals/runner"
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
	"github.com/lanekeeper/lanekeeper/models/offline"
	"github.com/lanekeeper/lanekeeper/monitor"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/selfheal"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/surfaces/chat"
	"github.com/lanekeeper/lanekeeper/surfaces/heartbeat"
	"github.com/lanekeeper/lanekeeper/surfaces/operate"
	"github.com/lanekeeper/lanekeeper/surfaces/webhook"
	"github.com/lanekeeper/lanekeeper/threads"
	"github.com/lanekeeper/lanekeeper/trace"
	"github.com/lanekeeper/lanekeeper/webhooks"
)

// App is the runtime of one process. Its methods may be called at any time after New; Run and Serve once.
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
	Environ map[string]string   // the settings of OpenTelemetry
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
		Keeper: a.Keeper, Listener: a.listener, Logger: log, Workers: cfg.Workers, StopTimeout: cfg.ShutdownTimeout,
		LeaseTTL: cfg.WorkerLease, SweepEvery: min(cfg.WorkerLease/6, 5*time.Second), Direct: a.Direct,
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
		Admit: func(ctx context.Context, skill, owner string) (bool, error) {
			return selfheal.Admit(ctx, pool, skill, owner)
		},
		After: selfheal.After(pool, func(ctx context.Context, skill string) error {
			return a.Evals.RunOutageCases(ctx,
				skill)
		}),
	}
}

// Monitor judges whether the agent works.
func (a *App) Monitor() monitor.Monitor {
	return monitor.Monitor{Agents: NewDirectory(a.Config), Limits: Limits(a.Config.Limits)}
}

// NewDirectory resolves agents, with the settings as defaults.
func NewDirectory(cfg config.Config) *agents.Directory {
	return &agents.Directory{Settings: agents.Settings{
		Name: cfg.Name, Model: cfg.Model, Effort: cfg.Provider.Effort, Timezone: cfg.Timezone,
		HeartbeatCron: cfg.HeartbeatCron,
		Limits: agents.Limits{
			Iterations: cfg.Budget.MaxIterations, Tokens: cfg.Budget.MaxTokens, CostUSD: cfg.Budget.MaxCostUSD,
			DayUSD: cfg.Limits.DayUSD,
		},
	}}
}

// Limits converts the limits of the settings.
func Limits(l config.Limits) budgets.Limits {
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

// unlimited maps the setting 0, no limit, to the largest int.
func unlimited(n int) int {
	if n == 0 {
		return math.MaxInt
	}
	return n
}

// admission converts the configured concurrency limits.
func admission(cfg config.Config) []executions.Admission {
	limits := make([]executions.Admission, len(cfg.Admission))
	for i, l := range cfg.Admission {
		limits[i] = executions.Admission(l)
	}
	return limits
}

// HealPolicy returns the configured rules of self-heal.
func HealPolicy(cfg config.Config) selfheal.Policy {
	return selfheal.Policy{
		Failures: cfg.SelfHeal.Failures, Window: cfg.SelfHeal.Window, Rate: cfg.SelfHeal.FailureRate,
		RateCalls: cfg.SelfHeal.RateCalls, Cooldown: cfg.SelfHeal.Cooldown,
	}
}

// Run works until ctx ends: it claims executions, renews leases, ticks schedules and serves the surfaces. It waits
// for extra.
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

// surfaces are the entry points of the agent and its dispatchers.
type surfaces struct {
	Operate   *operate.Operate
	Chat      *chat.Chat
	Webhook   *webhook.Surface
	Runner    *runner.Runner
	outgoing  *webhooks.Dispatcher
	threads   *threads.Dispatcher
	Channels  *channels.Runner
	MCPServer *mcp.Server
	Evals     *evalrunner.Runner
}

// registerSurfaces builds the surfaces and registers their flows.
func (a *App) registerSurfaces() (err error) {
	cfg := a.Config
	a.Operate, err = operate.New(operate.Options{
		Pool: a.Pool, Engine: a.Engine, Keeper: a.Keeper, Loop: a.Loop, Logger: a.Log, Agent: cfg.Name,
		Idle: cfg.Operate.Idle, Tools: []reason.Tool{a.Loop.DelegateTool(a.Engine, adminScopes())},
	})
	if err != nil {
		return err
	}
	a.Chat = &chat.Chat{
		Pool: a.Pool, Front: a.reserved.visitors, Engine: a.Engine, Loop: a.Loop, Logger: a.Log, Agents: a.Loop.Agents,
		DoubleTexting: chat.DoubleTexting(cfg.Chat.DoubleTexting), Rate: cfg.Chat.Rate, MaxBody: int64(cfg.Chat.MaxBytes),
		DocumentBytes: int64(cfg.DocumentMaxBytes),
		ApprovalWait:  cfg.Chat.ApprovalWait, Listener: a.listener,
		Visitor: func(r *http.Request) string {
			name, _ := api.VisitorFrom(r.Context())
			return name
		},
		EmbedOrigins: cfg.Chat.EmbedOrigins,
		Browser:      func(key string) bool { return slices.Contains(cfg.Chat.BrowserKeys, key) },
	}
	a.Webhook = &webhook.Surface{
		Pool: a.Pool, RequestPool: a.reserved.visitors, Engine: a.Engine, Loop: a.Loop, Logger: a.Log, Agent: cfg.Name,
		Getenv: a.Getenv, Received: a.metrics.Delivery,
	}
	a.Runner = &runner.Runner{
		Pool: a.Pool, Loop: a.Loop, Engine: a.Engine, Logger: a.Log, Listener: a.listener, Agent: cfg.Name,
	}
	client, err := skills.NewGuardedClient(cfg.PrivateHTTP, nil)
	if err != nil {
		return fmt.Errorf("prepare outgoing webhooks: %w", err)
	}
	a.outgoing = &webhooks.Dispatcher{
		Pool: a.Pool, Client: client, Logger: a.Log, Listener: a.listener, Getenv: a.Getenv,
		PublicURL: a.Config.PublicURL,
	}
	a.threads = &threads.Dispatcher{Pool: a.Pool, Client: client, Logger: a.Log, Listener: a.listener, Getenv: a.Getenv}
	a.Channels = &channels.Runner{
		Pool: a.Pool, Keeper: a.Keeper, Listener: a.listener, Logger: a.Log, Client: client, Getenv: a.Getenv,
		Open: map[string]channels.Open{
			channels.Telegram: telegram.Open, channels.Slack: slack.Open, channels.Email: email.Open,
		},
		Accept: a.Chat.Accept, MaxFile: int64(cfg.DocumentMaxBytes), Principals: approvers{a.Pool}, PublicURL: cfg.PublicURL,
	}
	a.MCPServer = &mcp.Server{
		Pool: a.admin(), Engine: a.Engine, Skills: a.Registry, Invoke: a.Loop.Invoke, Agent: cfg.Name,
		Agents: a.Loop.Agents, Version: a.Version, Logger: a.Log,
	}
	a.Evals = &evalrunner.Runner{
		Pool: a.Pool, Engine: a.Engine, Model: a.Loop.Model, Skills: a.Registry, Agents: a.Loop.Agents, Budget: a.Loop.Budget,
		Logger: a.Log, Surfaces: evalSurfaces(), Version: a.Version, Setup: modelSetup(cfg),
	}
	beat := &heartbeat.Heartbeat{Pool: a.Pool, Loop: a.Loop, Heal: HealPolicy(cfg), Logger: a.Log}
	return errors.Join(beat.Register(a.Engine), a.Chat.Register(a.Engine), a.Webhook.Register(a.Engine),
		a.Runner.Register(), a.MCPServer.Register(), a.Evals.Register())
}

// modelSetup identifies the settings that determine the answers and costs of model calls.
func modelSetup(cfg config.Config) string {
	sum := sha256.Sum256(fmt.Appendf(nil, "%q %q %q %v %v", cfg.OpenAIBaseURL, cfg.OpenAIKey.Reveal(), cfg.Model,
		cfg.Prices, cfg.Budget.MaxCostUSD))
	return hex.EncodeToString(sum[:4])
}

// adminScopes are the scopes of the skills that an admin's agent may call: all.
func adminScopes() []string {
	return []string{skills.ScopeInternal, skills.ScopeExternal, skills.ScopeBoth}
}

// evalSurfaces are the surfaces whose rules and skills a suite of evals may use.
func evalSurfaces() map[string]evalrunner.Surface {
	return map[string]evalrunner.Surface{
		"chat":    {Rules: chat.Rules, Scopes: []string{skills.ScopeExternal}},
		"operate": {Rules: operate.Rules, Scopes: adminScopes()},
	}
}

// EvalInstallation returns the same installation for evals as the runner of an [App], without an App.
func EvalInstallation(cfg config.Config, version string) evals.Installation {
	runner := evalrunner.Runner{
		Agents: NewDirectory(cfg), Surfaces: evalSurfaces(), Version: version, Setup: modelSetup(cfg),
	}
	model := cmp.Or(cfg.Model, DefaultModel)
	if isOffline(cfg) {
		model = offline.Model
	}
	return runner.Installation(model)
}

// background lists the loops that run beside the engine.
func (s *surfaces) background() []func(ctx context.Context) error {
	return []func(ctx context.Context) error{
		s.Chat.Run, s.Runner.Run, s.outgoing.Run, s.threads.Run, s.Channels.Run, s.Evals.Serve,
	}
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
	a.metrics = telemetry.NewMetrics(a.Version, telemetry.NewState(a.Pool, a.Log))
	a.exporter = telemetry.NewExporter(a.Pool, settings, a.Version, a.metrics, a.Log)
	return nil
}
