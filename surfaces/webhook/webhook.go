// Package webhook is the surface for other systems: POST /webhooks/{endpoint}.
//
// The surface rejects a request for an unknown endpoint, without a signature or with an outdated timestamp before it
// reads the body. Otherwise it reads the body within the endpoint's limit, and verifies the body before it parses it.
// It stores the delivery and its execution in one transaction, and only then responds with 202 and the trace id. So an
// acknowledged delivery is in the database, and a sender can repeat any other. A repeated delivery id returns 200 with
// the first trace id and starts nothing, even among fifty concurrent requests, because a unique key decides. Retention
// ends this: after it has deleted the row, the id is new.
//
// The execution (flow "webhook", a wh_ trace, background queue) holds the lane webhook:{endpoint}:{delivery} and runs
// the endpoint's actions: raise an event in the checkpoint's transaction, start a flow with the payload, trigger an
// automation, or run a prompt on the payload, which is data and never instruction. An execution does not run a finished
// action again, neither after a crash nor in a later attempt. A failed action is retried after durable pauses. After
// the last attempt the delivery is dead with its error. A replay is a new execution and trace, and runs all actions.
//
// Senders that check an address first get their challenge back, if the endpoint says so: Slack's from a signed body,
// Meta's from a GET with the verify token. A challenge is not a delivery and starts nothing.
//
// An unverified request leaves only a log line and an activity, once a minute per endpoint and process.
package webhook

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/credentials"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/reason"
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
	// Getenv resolves the secrets of endpoints; nil reads the process's environment.
	Getenv func(string) string
	// Now is the clock for signed timestamps; nil is the system's.
	Now func() time.Time
	// Backoff returns the pause after a failed attempt; default 10 s, 1 min, 6 min, 36 min, then 2 h.
	Backoff func(runAttempt int) time.Duration
	// Received counts requests by result: accepted, repeated, conflict, refused or busy. It must not block; may be nil.
	Received func(endpoint, result string)

	deliveryTx postgres.KeyedTx
	guardOnce  sync.Once
	guard      *credentials.Guard // of bearer tokens
	mu         sync.Mutex
	rejections map[string]rejectionCount // by class and endpoint
	served     sync.Map                  // names of endpoints that had a request
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
