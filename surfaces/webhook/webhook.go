// Package webhook is the surface for other systems: POST /webhooks/{endpoint}.
//
// The surface rejects a request for an unknown endpoint, without a signature or with an outdated timestamp before it
// reads the body. Otherwise it reads the body within the endpoint's limit, and verifies the body before it parses it.
// It stores the delivery and its execution in one transaction, and only then responds with 202 and the trace id. So an
// acknowledged delivery is never lost, and the sender repeats any other delivery. A repeated delivery id returns 200
// with the first trace id and changes nothing, even among fifty concurrent requests, because a unique key decides.
//
// The execution (flow "webhook", a wh_ trace, background queue) holds the lane webhook:{endpoint}:{delivery} and runs
// the endpoint's actions: raise an event in the checkpoint's transaction, start a flow with the payload, trigger an
// automation, or run a prompt on the payload, which is data and never instruction. A finished action never runs
// again, neither after a crash nor in a later attempt. A failed action is retried after durable pauses. After the
// last attempt the delivery is dead with its error, and can be replayed: a new execution and trace, at most one per
// click.
//
// Senders that check an address first get their challenge back, if the endpoint says so: Slack's from a signed body,
// Meta's from a GET with the verify token. A challenge is not a delivery and starts nothing.
//
// An unverified request leaves only a log line and an activity, once a minute per endpoint.
package webhook

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/automations/runner"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/credentials"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/threads"
	"github.com/lanekeeper/lanekeeper/trace"
	"github.com/lanekeeper/lanekeeper/webhooks"
)

// Flow is the registered name of delivery executions.
const Flow = "webhook"

// Surface receives deliveries and runs their actions. Pool, Engine and Logger are required; Loop for endpoints with a
// prompt. It is safe for concurrent use. Bearer tokens are throttled like all credentials (internal/credentials). An
// endpoint with a weak token rejects everything.
type Surface struct {
	Pool        *pgxpool.Pool
	RequestPool *pgxpool.Pool // for requests of unauthenticated senders; Pool when nil
	Engine      *executions.Engine
	Loop        *reason.Loop
	Logger      *slog.Logger
	Agent       string
	// Automate starts a run of an automation in the given transaction and returns the run's id. Nil means package
	// automations. Some process must register its runner.
	Automate func(ctx context.Context, tx pgx.Tx, r AutomationRequest) (string, error)
	// Getenv resolves the secrets of endpoints; nil reads the process's environment.
	Getenv func(string) string
	// Now is the clock for signed timestamps; nil is the system's.
	Now func() time.Time
	// Backoff returns the pause after a failed attempt; default 10 s, 1 min, 6 min, 36 min, then 2 h.
	Backoff func(runAttempt int) time.Duration
	// Received counts each request: accepted, repeated, conflict or refused. It must not block; may be nil.
	Received func(endpoint, result string)

	deliveryTx postgres.KeyedTx
	guardOnce  sync.Once
	guard      *credentials.Guard // of bearer tokens
	mu         sync.Mutex
	rejections map[string]rejectionCount // by endpoint
}

// AutomationRequest is an action's request to run an automation.
type AutomationRequest struct {
	Automation string // its name
	Key        string // identifies the request; equal for repeats by the same action of the same execution
	TraceID    string
	Payload    json.RawMessage
}

// Register registers the flow with the engine.
func (s *Surface) Register(e *executions.Engine) error {
	if s.Backoff == nil {
		s.Backoff = backoff
	}
	if s.Now == nil {
		s.Now = time.Now
	}
	s.Engine = e
	e.Unforkable(Flow, "only one execution handles a delivery at a time; agent webhooks replay starts another")
	return e.Register(Flow, s.run)
}

func backoff(attempt int) time.Duration {
	pause := 10 * time.Second
	for range attempt - 1 {
		if pause *= 6; pause >= 2*time.Hour {
			return 2 * time.Hour
		}
	}
	return pause
}

type input struct {
	Delivery string `json:"delivery"`
}

// defaultAgent returns the name of the default agent.
func (s *Surface) defaultAgent(ctx context.Context, db postgres.DB) (string, error) {
	if s.Loop == nil || s.Loop.Agents == nil {
		return s.Agent, nil
	}
	a, err := s.Loop.Agents.Default(ctx, db)
	return a.Name, err
}

// start inserts the execution in the transaction that stored or reopened the delivery.
func (s *Surface) start(ctx context.Context, tx pgx.Tx, d webhooks.Delivery) (string, error) {
	agent, err := s.defaultAgent(ctx, tx)
	if err != nil {
		return "", fmt.Errorf("start webhook: %w", err)
	}
	x, created, err := s.Engine.StartTx(ctx, tx, executions.Spec{
		Flow: Flow, Surface: trace.Webhook, TraceID: trace.ID(d.LastTraceID), Agent: agent, Queue: executions.Background,
		Input: input{d.ID}, DedupeKey: fmt.Sprintf("webhook %s %d", d.ID, d.Replays),
	})
	switch {
	case err != nil:
		return "", err
	case !created:
		return "", fmt.Errorf("start webhook: %w", webhooks.ErrInProgress)
	}
	return x.ID, webhooks.Link(ctx, tx, d.ID, x.ID)
}

// Replay processes a done, ignored or dead delivery again with a new execution and trace. The trace begins with the
// admin's action and reason. expected is the replay count that the caller saw, so only one of two concurrent clicks
// succeeds; a negative value skips the check. It returns webhooks.ErrInProgress for a delivery in progress or replayed
// meanwhile.
func (s *Surface) Replay(ctx context.Context, id string, expected int, reason string) (webhooks.Delivery, error) {
	var d webhooks.Delivery
	err := postgres.InTx(ctx, s.Pool, func(tx pgx.Tx) error {
		first, err := webhooks.Get(ctx, tx, id)
		if err != nil {
			return err
		}
		if d, err = webhooks.Reopen(ctx, tx, first.ID, string(trace.New(trace.Webhook)), expected); err != nil {
			return err
		}
		execution, err := s.start(ctx, tx, d)
		if err != nil {
			return err
		}
		d.ExecutionID = &execution
		_, err = activity.Record(ctx, tx, activity.Act{
			Name: "webhook_replay", Reason: reason, TraceID: d.LastTraceID,
			Input: map[string]any{
				"endpoint": d.Endpoint, "delivery_id": d.DeliveryID, "delivery": d.ID, "replay": d.Replays,
				"of_trace": first.LastTraceID,
			},
		}, func(pgx.Tx, string) (any, error) { return map[string]string{"execution_id": execution}, nil })
		return err
	})
	if err != nil && !errors.Is(err, webhooks.ErrNotFound) && !errors.Is(err, webhooks.ErrInProgress) {
		err = fmt.Errorf("replay delivery: %w", err)
	}
	return d, err
}

// startFlow starts a flow with the delivery's data in the checkpoint's transaction, under the delivery's trace. It does
// not wait for the end of the flow. A replay starts another execution.
func (s *Surface) startFlow(ctx context.Context, c webhooks.Content, t task) (actionResult, error) {
	switch known, err := s.flowExists(ctx, t.Action.Flow); {
	case err != nil:
		return actionResult{}, err
	case !known:
		return actionResult{}, fmt.Errorf("there is no flow %q; see agent flows ls", t.Action.Flow)
	}
	input, err := eventData(c, t.Action)
	if err != nil {
		return actionResult{}, err
	}
	thread, err := s.openThread(ctx, c, t.Action.Thread)
	if err != nil {
		return actionResult{}, err
	}
	x, _ := executions.Current(ctx)
	started, err := executions.Trigger(ctx, "begin", executions.Child{
		Flow: t.Action.Flow, Input: input, ThreadID: thread, DedupeKey: fmt.Sprintf("webhook flow %s %d", x.ID, t.Number),
	})
	return actionResult{Flow: t.Action.Flow, Started: started.ExecutionID}, err
}

// openThread returns the thread that a template names, and creates it if it is missing. Each endpoint has its own
// names, because the sender chooses them and must not reach other threads.
func (s *Surface) openThread(ctx context.Context, c webhooks.Content, template string) (string, error) {
	if template == "" {
		return "", nil
	}
	name, err := c.Text(template)
	if err != nil {
		return "", fmt.Errorf("thread: %w", err)
	}
	return executions.Step(ctx, "thread", func(ctx context.Context) (string, error) {
		agent, err := s.defaultAgent(ctx, s.Pool)
		if err != nil {
			return "", err
		}
		got, _, err := threads.Open(ctx, s.Pool, endpointPrincipal(c.Endpoint), threads.Thread{Name: name, Agent: agent})
		return got.ID, err
	})
}

func endpointPrincipal(name string) threads.Principal {
	return threads.Principal{Kind: threads.ByWebhook, Owner: name}
}

// threadKey resolves the key of a message event to a thread that the endpoint may use. A key that names no thread stays
// as it is, because a wait may name a conversation in another system.
func (s *Surface) threadKey(ctx context.Context, c webhooks.Content, key string) (string, error) {
	return executions.RetryTransient(ctx, func(ctx context.Context) (string, error) {
		id, known, err := threads.Resolve(ctx, s.Pool, endpointPrincipal(c.Endpoint), key)
		if errors.Is(err, threads.ErrInvalid) {
			return key, nil
		}
		if err != nil || known {
			return id, err
		}
		switch _, err := threads.Get(ctx, s.Pool, key); {
		case errors.Is(err, threads.ErrNotFound):
			return key, nil
		case err != nil:
			return "", err
		}
		return "", fmt.Errorf("the endpoint has no access to the thread %q; agent threads open grants it", key)
	})
}

// flowExists reports whether a flow can be started, including external ones.
func (s *Surface) flowExists(ctx context.Context, flow string) (bool, error) {
	if executions.IsExternal(flow) {
		return true, nil
	}
	return executions.RetryTransient(ctx, func(ctx context.Context) (bool, error) { return s.Engine.HasFlow(ctx, flow) })
}

// triggerAutomation starts the run of an automation in the checkpoint's transaction. The run has its own attempts.
func (s *Surface) triggerAutomation(ctx context.Context, c webhooks.Content, t task) (actionResult, error) {
	payload, err := eventData(c, webhooks.Action{})
	if err != nil {
		return actionResult{}, err
	}
	trigger := s.Automate
	if trigger == nil {
		trigger = s.startAutomation
	}
	x, _ := executions.Current(ctx)
	return executions.StepTx(ctx, "automate", func(ctx context.Context, tx pgx.Tx) (actionResult, error) {
		run, err := trigger(ctx, tx, AutomationRequest{
			Automation: t.Action.Automation, Key: fmt.Sprintf("webhook %s %d", x.ID, t.Number),
			TraceID: x.TraceID, Payload: payload,
		})
		return actionResult{Run: run}, err
	})
}

// startAutomation creates a run, claims it and starts its execution in one transaction.
func (s *Surface) startAutomation(ctx context.Context, tx pgx.Tx, r AutomationRequest) (string, error) {
	a, err := automations.Get(ctx, tx, r.Automation)
	if err != nil {
		return "", err
	}
	if !a.Enabled {
		return "", fmt.Errorf("automation %s is out of service: %s", a.Name, a.DisabledReason)
	}
	agent, err := s.defaultAgent(ctx, tx)
	if err != nil {
		return "", err
	}
	run, err := automations.RunManually(ctx, tx, a.ID, r.TraceID)
	if err != nil {
		return "", err
	}
	x, _, err := s.Engine.StartTx(ctx, tx, runner.Spec(cmp.Or(a.Agent, agent), run))
	if err != nil {
		return "", err
	}
	_, ok, err := automations.ClaimRun(ctx, tx, run.ID, run.Attempt, x.ID, x.TraceID)
	if err == nil && !ok {
		err = errors.New("another execution claimed its run")
	}
	return run.ID, err
}
