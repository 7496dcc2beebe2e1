package cuts_test

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/api"
	"github.com/lanekeeper/lanekeeper/automations/runner"
	"github.com/lanekeeper/lanekeeper/budgets"
	"github.com/lanekeeper/lanekeeper/builtins"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/flows"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/models"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/selfheal"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/surfaces/chat"
	"github.com/lanekeeper/lanekeeper/surfaces/heartbeat"
	"github.com/lanekeeper/lanekeeper/threads"
	"github.com/lanekeeper/lanekeeper/trace"
	"github.com/lanekeeper/lanekeeper/webhooks"
)

// These are the secrets of the process's HTTP API.
const (
	adminToken = "a-long-random-text-for-tests"
	chatKey    = "a-visitors-long-random-text"
)

// lease is the worker's lease, long enough for a busy machine. A loss that only a renewal detects takes two thirds of
// it.
const lease = 15 * time.Second

// never is a heartbeat schedule that does not fire during a test.
const never = "0 0 29 2 *"

// settings are the settings that differ between stories.
type settings struct {
	sweep       time.Duration // 0 for 1 s
	automations time.Duration // pause between polls of automations; 0 for none, so that a heartbeat runs the due ones
}

// agent is a process: its parts, wired like `agent serve`.
type agent struct {
	log      *slog.Logger
	pool     *pgxpool.Pool
	listener *postgres.Listener
	keeper   *lanes.Keeper
	engine   *executions.Engine
	loop     *reason.Loop
	chat     *chat.Chat
	runner   *runner.Runner
	outgoing *webhooks.Dispatcher
	threads  *threads.Dispatcher
	handler  http.Handler
	settings
}

// newAgent wires the parts.
func newAgent(pool *pgxpool.Pool, modelURL string, s settings, log *slog.Logger) (*agent, error) {
	if s.sweep == 0 {
		s.sweep = time.Second
	}
	a := &agent{log: log, pool: pool, settings: s}
	a.listener = postgres.NewListener(postgres.Dialer(pool), log)
	a.keeper = lanes.NewKeeper(pool, lanes.Options{Listener: a.listener, Logger: log})
	var err error
	a.engine, err = executions.New(pool, executions.Options{
		Keeper: a.keeper, Listener: a.listener, Logger: log, Workers: 4, LeaseTTL: lease, SweepEvery: s.sweep,
		StopTimeout: 5 * time.Second,
	})
	if err != nil {
		return nil, err
	}
	private := []string{"127.0.0.1"}
	registry, err := skills.New(skills.Options{
		Builtins: builtins.New(pool, nil, nil), Pool: pool, AllowPrivate: private, Logger: log,
		Flow: skills.Flows(pool, a.engine, "agent"),
	})
	if err != nil {
		return nil, err
	}
	model, err := models.New(models.Config{
		BaseURL: modelURL, APIKey: "secret-of-the-test", Model: modeltest.Model,
		Logger: log,
	})
	if err != nil {
		return nil, err
	}
	a.loop = &reason.Loop{
		Pool: pool, Model: model, Skills: registry, Logger: log, Limits: budgets.Limits{Day: budgets.Limit{Tokens: 1 << 40}},
		AdmitTrial: func(ctx context.Context, skill, owner string) (bool, error) {
			return selfheal.Admit(ctx, pool, skill, owner)
		},
		AfterCall: selfheal.After(pool),
	}
	a.engine.Fallback((&flows.Interpreter{Pool: pool, Engine: a.engine, Loop: a.loop, Logger: log}).Find)
	return a, errors.Join(a.loop.RegisterDelegate(a.engine), a.addSurfaces(private))
}

// addSurfaces adds the surfaces and the HTTP handler.
func (a *agent) addSurfaces(private []string) error {
	a.chat = &chat.Chat{
		Pool: a.pool, Engine: a.engine, Loop: a.loop, Logger: a.log, Rate: -1, Listener: a.listener,
		Visitor: func(r *http.Request) string {
			name, _ := api.VisitorFrom(r.Context())
			return name
		},
	}
	a.runner = &runner.Runner{
		Pool: a.pool, Loop: a.loop, Engine: a.engine, Logger: a.log, Listener: a.listener, PollEvery: a.automations,
		SignalsEvery: a.automations,
	}
	guarded, err := skills.NewGuardedClient(private, nil)
	if err != nil {
		return err
	}
	a.outgoing = &webhooks.Dispatcher{Pool: a.pool, Client: guarded, Logger: a.log, Listener: a.listener}
	a.threads = &threads.Dispatcher{Pool: a.pool, Client: guarded, Logger: a.log, Listener: a.listener}
	beat := &heartbeat.Heartbeat{
		Pool: a.pool, Loop: a.loop, Logger: a.log,
		Heal: selfheal.Policy{Failures: 3, Window: 72 * time.Hour, Rate: 0.5, RateCalls: 20, Cooldown: 24 * time.Hour},
	}
	if err := errors.Join(beat.Register(a.engine), a.chat.Register(a.engine), a.runner.Register()); err != nil {
		return err
	}
	a.handler, err = api.New(api.Options{
		Pool: a.pool, Engine: a.engine, AdminToken: adminToken, ChatKeys: map[string]string{"visitor": chatKey},
		Logger: a.log,
		Endpoints: []api.Endpoint{
			{
				Method: "POST", Path: "/v1/chat/completions", About: "Chat.", Access: api.Visitor, Stream: true, OpenAIErrors: true,
				Handler: a.chat.CompletionsHandler(),
			},
			{
				Method: "GET", Path: "/v1/chat/completions/{id}", About: "An answer.", Access: api.Visitor, Stream: true,
				OpenAIErrors: true,
				Handler:      a.chat.CompletionHandler(),
			},
		},
	})
	return err
}

// run works until ctx ends.
func (a *agent) run(ctx context.Context) error {
	schedule := executions.Schedule{
		Name: heartbeat.Flow, Flow: heartbeat.Flow, Surface: trace.Heartbeat, Cron: never, Timezone: "UTC",
	}
	if err := a.engine.PutSchedule(ctx, schedule); err != nil {
		return err
	}
	if err := a.engine.SetLimits(ctx, nil); err != nil {
		return err
	}
	living, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	var below errgroup.Group
	below.Go(func() error { return a.listener.Run(living) })
	below.Go(func() error { return a.keeper.Run(living) })
	above, ctx := errgroup.WithContext(ctx)
	for _, part := range []func(ctx context.Context) error{
		a.engine.Run, a.chat.Run, a.outgoing.Run, a.threads.Run,
		a.count,
	} {
		above.Go(func() error { return part(ctx) })
	}
	if a.automations > 0 {
		above.Go(func() error { return a.runner.Run(ctx) })
	}
	err := above.Wait()
	stop()
	return errors.Join(err, below.Wait())
}

// count updates the counts of the activity log.
func (a *agent) count(ctx context.Context) error {
	next := time.NewTicker(5 * a.sweep)
	defer next.Stop()
	for {
		if _, err := activity.Count(ctx, a.pool); err != nil && ctx.Err() == nil {
			a.log.WarnContext(ctx, "activity not counted", "error", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-next.C:
		}
	}
}
