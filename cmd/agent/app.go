package main

import (
	"context"
	"crypto/hkdf"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net/http"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/api"
	"github.com/lanekeeper/lanekeeper/automations/runner"
	"github.com/lanekeeper/lanekeeper/budgets"
	"github.com/lanekeeper/lanekeeper/builtins"
	"github.com/lanekeeper/lanekeeper/databases"
	"github.com/lanekeeper/lanekeeper/documents"
	"github.com/lanekeeper/lanekeeper/engineroom"
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
	"github.com/lanekeeper/lanekeeper/surfaces/chat"
	"github.com/lanekeeper/lanekeeper/surfaces/heartbeat"
	"github.com/lanekeeper/lanekeeper/surfaces/operate"
	"github.com/lanekeeper/lanekeeper/surfaces/webhook"
	"github.com/lanekeeper/lanekeeper/threads"
	"github.com/lanekeeper/lanekeeper/trace"
	"github.com/lanekeeper/lanekeeper/webhooks"
)

// app is the runtime of one process: all components, wired to one database.
type app struct {
	config    config.Config
	getenv    func(string) string // resolves secrets named in files
	log       *slog.Logger
	pool      *pgxpool.Pool
	reserved  reservedPools
	read      *replica.Reader
	listener  *postgres.Listener
	keeper    *lanes.Keeper
	engine    *executions.Engine
	registry  *skills.Registry
	loop      *reason.Loop
	mcpClient *mcp.Client
	index     *memory.Index // nil without an embedding model
	databases *databases.Client
	metrics   *telemetry.Metrics
	exporter  *telemetry.Exporter
	surfaces
}

// app wires the runtime for a command. It starts no goroutine; run and runWithLeases do.
func (c *cli) app(s *session, model *models.Client) (*app, error) {
	cfg, log, pool := s.config, s.log, s.pool
	a := &app{config: cfg, log: log, pool: pool, reserved: s.reserved, read: s.read, getenv: c.getenv}
	if err := c.initTelemetry(a); err != nil {
		return nil, err
	}
	a.listener = postgres.NewListener(postgres.Dialer(s.sessionPool()), log)
	a.keeper = lanes.NewKeeper(pool, lanes.Options{
		Listener: a.listener, Logger: log, Disabled: !cfg.LanesEnabled,
		Observer: a.metrics,
	})
	var err error
	a.engine, err = executions.New(pool, executions.Options{
		Keeper: a.keeper, Listener: a.listener, Logger: log, Workers: cfg.Workers, StopTimeout: cfg.ShutdownTimeout,
		LeaseTTL: cfg.WorkerLease, SweepEvery: min(cfg.WorkerLease/6, 5*time.Second),
		Direct: s.direct, Lease: s.reserved.system, Observer: a.metrics,
	})
	if err != nil {
		return nil, err
	}
	a.mcpClient = mcp.NewClient(mcp.Options{
		Pool: pool, AllowPrivate: cfg.PrivateHTTP, Getenv: a.getenv, Logger: log, Agent: cfg.Name, Version: buildVersion(),
	})
	a.databases = &databases.Client{DB: pool, Getenv: a.getenv}
	if a.index, err = newIndex(cfg, log); err != nil {
		return nil, err
	}
	a.registry, err = skills.New(skills.Options{
		Builtins: builtins.New(pool, newDirectory(a.config), a.index), Pool: pool, AllowPrivate: cfg.PrivateHTTP, Logger: log,
		MCP:       a.mcpClient.Call,
		Databases: a.databases.Open, Getenv: a.getenv,
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
	if err := errors.Join(a.loop.RegisterDelegate(a.engine), registerCallFlow(a, a.loop)); err != nil {
		return nil, err
	}
	return a, a.registerSurfaces()
}

// newLoop builds the reasoning loop with the configured budgets.
func (a *app) newLoop(model *models.Client, zone *time.Location) *reason.Loop {
	b, pool := a.config.Budget, a.pool
	return &reason.Loop{
		Pool: pool, Model: model, Skills: a.registry, Agents: newDirectory(a.config), Logger: a.log,
		Budget: reason.Budget{
			Iterations: b.MaxIterations, Tokens: unlimited(b.MaxTokens), CostUSD: b.MaxCostUSD, Time: b.RunTimeout,
			Context: b.ContextTokens,
		},
		Limits: limits(a.config.Limits), Zone: zone,
		Admit: func(ctx context.Context, skill, owner string) (bool, error) {
			return selfheal.Admit(ctx, pool, skill, owner)
		},
		After: selfheal.After(pool),
	}
}

// newDirectory resolves agents, with the settings as defaults.
func newDirectory(cfg config.Config) *agents.Directory {
	return &agents.Directory{Settings: agents.Settings{
		Name: cfg.Name, Model: cfg.Model, Effort: cfg.Provider.Effort, Timezone: cfg.Timezone,
		HeartbeatCron: cfg.HeartbeatCron,
		Limits: agents.Limits{
			Iterations: cfg.Budget.MaxIterations, Tokens: cfg.Budget.MaxTokens, CostUSD: cfg.Budget.MaxCostUSD,
			DayUSD: cfg.Limits.DayUSD,
		},
	}}
}

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

func healPolicy(cfg config.Config) selfheal.Policy {
	return selfheal.Policy{
		Failures: cfg.SelfHeal.Failures, Window: cfg.SelfHeal.Window, Rate: cfg.SelfHeal.Rate,
		RateCalls: cfg.SelfHeal.RateCalls, Cooldown: cfg.SelfHeal.Cooldown,
	}
}

// run works until ctx ends: it claims executions, renews leases, ticks schedules and serves the surfaces. It waits
// for extra.
func (a *app) run(ctx context.Context, extra ...func(ctx context.Context) error) error {
	err := postgres.InTx(ctx, a.pool, func(tx pgx.Tx) error { return heartbeat.Sync(ctx, tx, a.loop.Agents, true) })
	if err != nil {
		return err
	}
	if err := a.engine.SetLimits(ctx, admission(a.config)); err != nil {
		return err
	}
	a.warnUnpriced(ctx)
	return a.withBackground(ctx, func(ctx context.Context) error {
		group, ctx := errgroup.WithContext(ctx)
		group.Go(func() error { return a.engine.Run(ctx) })
		group.Go(func() error { return a.runHousekeeping(ctx) })
		group.Go(func() error { return a.read.Run(ctx) })
		group.Go(func() error { return a.index.Run(ctx, a.pool) })
		group.Go(func() error { return runActivityCounts(ctx, a.pool, countEvery, a.log) })
		for _, f := range slices.Concat(a.background(), extra) {
			group.Go(func() error { return f(ctx) })
		}
		return group.Wait()
	}, a.mcpClient.Run)
}

// runWithLeases renews leases while fn runs. Commands use it to run one execution in their own process.
func (a *app) runWithLeases(ctx context.Context, fn func(ctx context.Context) error) error {
	return a.withBackground(ctx, fn, a.engine.KeepAlive)
}

// withBackground runs lease renewal, notifications and telemetry while fn runs. They outlive ctx, because fn needs
// them until it returns.
func (a *app) withBackground(
	ctx context.Context, fn func(ctx context.Context) error, services ...func(ctx context.Context) error,
) error {
	background, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	var group errgroup.Group
	for _, service := range append(services, a.listener.Run, a.keeper.Run, a.exporter.Run) {
		group.Go(func() error { return service(background) })
	}
	err := fn(ctx)
	err = errors.Join(err, a.operate.Close(context.WithoutCancel(ctx)))
	stop()
	if groupErr := group.Wait(); err == nil {
		err = groupErr
	}
	a.mcpClient.Close()
	a.databases.Close()
	return err
}

// surfaces are the entry points of the agent and its dispatchers.
type surfaces struct {
	operate   *operate.Operate
	chat      *chat.Chat
	webhook   *webhook.Surface
	runner    *runner.Runner
	outgoing  *webhooks.Dispatcher
	threads   *threads.Dispatcher
	mcpServer *mcp.Server
}

// registerSurfaces builds the surfaces and registers their flows.
func (a *app) registerSurfaces() (err error) {
	cfg := a.config
	scopes := []string{skills.ScopeInternal, skills.ScopeExternal, skills.ScopeBoth}
	a.operate, err = operate.New(operate.Options{
		Pool: a.pool, Engine: a.engine, Keeper: a.keeper, Loop: a.loop, Logger: a.log, Agent: cfg.Name,
		Idle: cfg.Operate.Idle, Tools: []reason.Tool{a.loop.DelegateTool(a.engine, scopes)},
	})
	if err != nil {
		return err
	}
	a.chat = &chat.Chat{
		Pool: a.pool, Front: a.reserved.visitors, Engine: a.engine, Loop: a.loop, Logger: a.log, Agents: a.loop.Agents,
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
	a.webhook = &webhook.Surface{
		Pool: a.pool, RequestPool: a.reserved.visitors, Engine: a.engine, Loop: a.loop, Logger: a.log, Agent: cfg.Name,
		Getenv: a.getenv, Received: a.metrics.Delivery,
	}
	a.runner = &runner.Runner{
		Pool: a.pool, Loop: a.loop, Engine: a.engine, Logger: a.log, Listener: a.listener, Agent: cfg.Name,
	}
	client, err := skills.NewGuardedClient(cfg.PrivateHTTP, nil)
	if err != nil {
		return fmt.Errorf("prepare outgoing webhooks: %w", err)
	}
	a.outgoing = &webhooks.Dispatcher{
		Pool: a.pool, Client: client, Logger: a.log, Listener: a.listener, Getenv: a.getenv,
	}
	a.threads = &threads.Dispatcher{Pool: a.pool, Client: client, Logger: a.log, Listener: a.listener, Getenv: a.getenv}
	a.mcpServer = &mcp.Server{
		Pool: a.adminPool(), Engine: a.engine, Skills: a.registry, Invoke: a.loop.Invoke, Agent: cfg.Name,
		Version: buildVersion(), Logger: a.log,
	}
	beat := &heartbeat.Heartbeat{Pool: a.pool, Loop: a.loop, Heal: healPolicy(cfg), Logger: a.log}
	return errors.Join(beat.Register(a.engine), a.chat.Register(a.engine), a.webhook.Register(a.engine),
		a.runner.Register(), a.mcpServer.Register())
}

// background lists the loops that run beside the engine.
func (s *surfaces) background() []func(ctx context.Context) error {
	return []func(ctx context.Context) error{s.chat.Run, s.runner.Run, s.outgoing.Run, s.threads.Run}
}

const eventStream = "text/event-stream"

func (a *app) endpoints() []api.Endpoint {
	var all []api.Endpoint
	for _, some := range [][]api.Endpoint{
		a.operateEndpoints(), a.chatEndpoints(), a.visitorEndpoints(), a.webhookEndpoints(), a.mcpEndpoints(),
		a.metricsEndpoints(),
	} {
		all = append(all, some...)
	}
	return all
}

// engineRoom builds the admin's web interface and its endpoints. Its actions call the API through routes.
func (a *app) engineRoom(routes func() http.Handler) (*engineroom.Room, []api.Endpoint, error) {
	key, err := hkdf.Key(sha256.New, []byte(a.config.AdminToken.Reveal()), nil, "lanekeeper engine room 1", sha256.Size)
	if err != nil {
		return nil, nil, fmt.Errorf("make the Engine Room: %w", err)
	}
	room, err := engineroom.New(engineroom.Options{
		Pool: a.adminPool(), Read: a.read, API: routes, Logger: a.log, Agent: a.config.Name, Key: key,
		Limits: limits(a.config.Limits),
		Agents: newDirectory(a.config),
	})
	if err != nil {
		return nil, nil, err
	}
	var all []api.Endpoint
	for _, r := range room.Routes() {
		e := api.Endpoint{
			Method: r.Method, Path: r.Path, About: "A page of the Engine Room.", Access: api.Admin, Page: true, Stream: r.Stream,
			Handler: r.Handler,
		}
		if r.Public {
			e.Access = api.Public
		}
		if r.Stream {
			e.ContentType, e.Finite = eventStream, r.Method == "POST"
		}
		all = append(all, e)
	}
	return room, all, nil
}

func (a *app) operateEndpoints() []api.Endpoint {
	return []api.Endpoint{
		{
			Method: "POST", Path: "/v1/operate", Access: api.Admin, Body: operate.Body{}, ContentType: eventStream,
			Stream: true, Finite: true,
			Idempotent: true, Handler: a.operate.Handler(),
			About: "Talk to the agent: events start, delta, tool, approval, done, error. With Accept: application/json the " +
				"response " +
				"is one document. 409 while another admin holds the lane.",
		}, {
			Method: "GET", Path: "/v1/operate/watch", Access: api.Admin, ContentType: eventStream, Stream: true,
			Handler: a.operate.WatchHandler(),
			About:   "Watch the current admin: events of their traces, live.",
		},
	}
}

func (a *app) chatEndpoints() []api.Endpoint {
	limit := int64(a.config.Chat.MaxBytes)
	return []api.Endpoint{
		{
			Method: "POST", Path: "/v1/chat/completions", Access: api.Visitor, Body: json.RawMessage{},
			Response: json.RawMessage{},
			Stream:   true, Finite: true, OpenAIErrors: true, MaxBody: limit, Handler: a.chat.CompletionsHandler(),
			About: "OpenAI's chat completions, streamed or not. X-Thread-Id, metadata.thread_id or user select the thread; " +
				"the response names it in X-Thread-Id. X-Visitor-Token is a visitor's secret (new requests one), X-Thread-Join a join token.",
		}, {
			Method: "GET", Path: "/v1/chat/completions/{id}", Access: api.Visitor, Response: json.RawMessage{}, Stream: true,
			Finite: true, OpenAIErrors: true,
			Handler: a.chat.CompletionHandler(),
			About:   "A finished or running completion, for a client that lost its connection; ?stream=true attaches to it.",
		}, {
			Method: "POST", Path: "/v1/responses", Access: api.Visitor, Body: json.RawMessage{},
			Response: json.RawMessage{}, Stream: true, Finite: true, OpenAIErrors: true, MaxBody: limit,
			Handler: a.chat.ResponsesHandler(),
			About: "OpenAI's Responses, streamed or not, on the same threads. The thread is conversation, " +
				"else that of previous_response_id, else X-Thread-Id, else new. background: true returns at once.",
		}, {
			Method: "GET", Path: "/v1/responses/{id}", Access: api.Visitor, Response: json.RawMessage{},
			Stream: true, Finite: true, OpenAIErrors: true, Handler: a.chat.ResponseHandler(),
			About: "The current state of a response; ?stream=true attaches to it.",
		}, {
			Method: "POST", Path: "/v1/responses/{id}/cancel", Access: api.Visitor, Body: json.RawMessage{},
			Response: json.RawMessage{}, OpenAIErrors: true, Handler: a.chat.CancelResponseHandler(),
			About: "Cancel a running response. Its text so far stays in the thread.",
		}, {
			Method: "GET", Path: "/v1/responses/{id}/input_items", Access: api.Visitor, Response: json.RawMessage{},
			OpenAIErrors: true, Handler: a.chat.InputItemsHandler(), About: "The input messages of a response.",
		}, {
			Method: "DELETE", Path: "/v1/responses/{id}", Access: api.Visitor, Response: json.RawMessage{},
			OpenAIErrors: true, Handler: a.chat.DeleteResponseHandler(),
			About: "Always rejected: a response is a message of its thread.",
		}, {
			Method: "GET", Path: "/v1/conversations/{id}/items", Access: api.Visitor, Response: json.RawMessage{},
			OpenAIErrors: true,
			Handler:      a.chat.ConversationItemsHandler(),
			About:        "OpenAI's list of the items of a conversation. Unfinished answers have the status in_progress.",
			Query: map[string]string{
				"after": "The id of the item that the page follows", "limit": "Page size, at most 100", "order": "desc, or asc",
			},
		},
	}
}

// visitorEndpoints are the chat page, the files of visitors, and the models.
func (a *app) visitorEndpoints() []api.Endpoint {
	return []api.Endpoint{
		{
			Method: "POST", Path: "/v1/files", Access: api.Visitor, Body: json.RawMessage{}, Response: json.RawMessage{},
			OpenAIErrors: true, MaxBody: int64(a.config.DocumentMaxBytes) + documents.FormOverhead,
			Handler: a.chat.FilesHandler(),
			About:   "OpenAI's file upload. A message refers to the file by id. An unused file is deleted after a day.",
		}, {
			Method: "GET", Path: "/v1/files", Access: api.Visitor, Response: json.RawMessage{}, OpenAIErrors: true,
			Handler: a.chat.FileListHandler(), About: "The caller's files.",
			Query: map[string]string{
				"after": "The id that the page follows", "limit": "Page size, at most 10000", "order": "desc, or asc",
				"purpose": "user_data",
			},
		}, {
			Method: "GET", Path: "/v1/files/{id}", Access: api.Visitor, Response: json.RawMessage{}, OpenAIErrors: true,
			Handler: a.chat.FileHandler(), About: "A file of the caller.",
		}, {
			Method: "GET", Path: "/v1/files/{id}/content", Access: api.Visitor, ContentType: "application/octet-stream",
			OpenAIErrors: true,
			Handler:      a.chat.FileContentHandler(), About: "The content of a file, always as an attachment.",
		}, {
			Method: "DELETE", Path: "/v1/files/{id}", Access: api.Visitor, Response: json.RawMessage{}, OpenAIErrors: true,
			Handler: a.chat.DeleteFileHandler(), About: "Delete a file. 409 if a message or flow uses it.",
		}, {
			Method: "GET", Path: "/v1/models", Access: api.Visitor, Response: json.RawMessage{}, OpenAIErrors: true,
			Handler: a.chat.ModelsHandler(), About: "OpenAI's list of models: the agent.",
		}, {
			Method: "GET", Path: "/v1/models/{id}", Access: api.Visitor, Response: json.RawMessage{}, OpenAIErrors: true,
			Handler: a.chat.ModelHandler(), About: "One of the models.",
		}, {
			Method: "GET", Path: "/chat", Access: api.Public, ContentType: "text/html", Handler: a.chat.PageHandler(),
			About: "A chat page. It asks for the chat key.",
		}, {
			Method: "GET", Path: "/chat/{file}", Access: api.Public, ContentType: "text/plain", Handler: a.chat.PageHandler(),
			About: "Assets of the chat page.",
		},
	}
}

func (a *app) webhookEndpoints() []api.Endpoint {
	return []api.Endpoint{
		{
			Method: "POST", Path: "/webhooks/{endpoint}", Access: api.Public, Body: json.RawMessage{},
			Response: webhook.Receipt{}, Status: 202,
			Again: true, MaxBody: webhooks.MostMaxBytes, Expect: a.webhook.Expect, Handler: a.webhook.Receive(),
			About: "Receive a webhook: verify, store and acknowledge it with its trace. A repeated delivery returns 200 with " +
				"the first trace.",
		}, {
			Method: "GET", Path: "/v1/webhooks/deliveries", Access: api.Admin, Response: webhook.Page{},
			Handler: a.webhook.Deliveries(),
			About:   "Received webhooks, newest first.",
			Query: map[string]string{
				"endpoint": "Name of the endpoint", "status": "State of the delivery",
				"limit":  "Page size, default 50, at most 500",
				"cursor": "next_cursor of the previous page",
			},
		}, {
			Method: "GET", Path: "/v1/webhooks/deliveries/{id}", Access: api.Admin, Response: webhook.Shown{},
			Handler: a.webhook.Delivery(),
			About:   "One delivery, with its body.",
		}, {
			Method: "POST", Path: "/v1/webhooks/deliveries/{id}/replay", Access: api.Admin, Body: json.RawMessage{},
			Response: webhook.Replayed{},
			Status:   202, Idempotent: true, Handler: a.webhook.ReplayDelivery(),
			About: "Process a delivery again, under a new trace.",
		},
	}
}

func (a *app) mcpEndpoints() []api.Endpoint {
	handler := a.mcpServer.Handler()
	var all []api.Endpoint
	for _, method := range []string{"POST", "GET", "DELETE"} {
		all = append(all, api.Endpoint{
			Method: method, Path: "/mcp", Access: api.Admin, Stream: true, Finite: method == "POST", Handler: handler,
			About: "Offered skills over the Model Context Protocol (streamable HTTP).",
		})
	}
	return all
}
