// Package webhook is the surface on which other systems reach the agent: POST /webhooks/{endpoint}.
//
// Nothing of a body is read when its endpoint is not there, or the header lacks a signature or has a time that is not
// now's. Else a request is read as it is, within the endpoint's limit; it is verified before anything looks into it;
// and it is stored, together with the execution that will handle it, in one transaction. Only then is it
// acknowledged: 202 with the trace id. So what was acknowledged is never lost, and what could not be stored is sent
// again by its sender. A delivery id that came before is answered 200 with the first trace id and changes nothing,
// also when fifty come at once: the unique key of the delivery decides, not a look beforehand.
//
// The execution (flow "webhook", a wh_ trace, background queue) holds the lane webhook:{endpoint}:{delivery}, and
// does what the endpoint's actions say: raise an event or end a wait, with the step's checkpoint in the same
// transaction; start a flow with the payload as its input; make a run of an automation due; or let the model act on
// the payload, which is data for it and never instruction. Each action that has been done is not done again, neither
// after a crash nor when another action of the delivery is tried again. An action that fails is tried again after
// durable pauses; when the attempts are used up the delivery is dead, says why, and can be replayed: a new execution
// and a new trace for the same delivery, which double clicks cannot double.
//
// An unverified request leaves nothing but a note in the log and the activity log, once a minute and endpoint.
package webhook

import (
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

// Flow is the name under which the handling of deliveries is registered with the engine.
const Flow = "webhook"

// Surface receives deliveries and acts on them. Pool, Engine and Logger are required, and Loop for endpoints with a
// prompt. It is safe for concurrent use. Bearer tokens are compared and slowed down as all secrets are
// (internal/credentials); an endpoint whose token is too weak takes nothing.
type Surface struct {
	Pool   *pgxpool.Pool
	Front  *pgxpool.Pool // for requests, whose senders are anybody; Pool when nil
	Engine *executions.Engine
	Loop   *reason.Loop
	Logger *slog.Logger
	Agent  string
	// Automate starts a run of an automation in the transaction that also records that this was done, and returns the
	// run's id. Nil starts one of package automations; some process must have its runner registered.
	Automate func(ctx context.Context, tx pgx.Tx, r AutomationRequest) (string, error)
	// Getenv resolves the secrets of endpoints; nil is the process's environment.
	Getenv func(string) string
	// Now is the time that signed times are compared with; nil is the process's clock.
	Now func() time.Time
	// Backoff is how long after a failed attempt the next one is made; default 10 s, 1 min, 6 min, 36 min, then 2 h.
	Backoff func(attempt int) time.Duration
	// Received is told of each request at an endpoint: accepted, repeated, conflict or refused. It must return at once;
	// may be nil.
	Received func(endpoint, result string)

	intake    postgres.KeyedTx
	guardOnce sync.Once
	guard     *credentials.Guard // of bearer tokens
	mu        sync.Mutex
	refusals  map[string]refusals // by endpoint
}

// AutomationRequest is what an action asks of an automation.
type AutomationRequest struct {
	Automation string // its name
	Key        string // names this request: the same whenever the same action of the same execution asks
	TraceID    string
	Payload    json.RawMessage
}

// Register tells the engine how to handle deliveries.
func (s *Surface) Register(e *executions.Engine) error {
	if s.Backoff == nil {
		s.Backoff = backoff
	}
	if s.Now == nil {
		s.Now = time.Now
	}
	s.Engine = e
	e.Unforkable(Flow, "a delivery has one handling at a time; agent webhooks replay handles it again")
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

// input is what the flow is started with.
type input struct {
	Delivery string `json:"delivery"`
}

// start inserts the execution of a delivery, in the transaction that stored or reopened it.
func (s *Surface) start(ctx context.Context, tx pgx.Tx, d webhooks.Delivery) (string, error) {
	x, created, err := s.Engine.StartTx(ctx, tx, executions.Spec{
		Flow: Flow, Surface: trace.Webhook, TraceID: trace.ID(d.LastTraceID), Agent: s.Agent, Queue: executions.Background,
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

// Replay handles a delivery again that is done, ignored or dead: with a new execution and a new trace, in which the
// first row is the act of the admin, with the reason. seen is how many replays the caller saw, so that of two who press
// the button at once, one succeeds; below 0 leaves that out. webhooks.ErrUnderWay when it is being handled or was
// replayed meanwhile.
func (s *Surface) Replay(ctx context.Context, id string, seen int, reason string) (webhooks.Delivery, error) {
	var d webhooks.Delivery
	err := postgres.InTx(ctx, s.Pool, func(tx pgx.Tx) error {
		first, err := webhooks.Get(ctx, tx, id)
		if err != nil {
			return err
		}
		if d, err = webhooks.Reopen(ctx, tx, first.ID, string(trace.New(trace.Webhook)), seen); err != nil {
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
				"endpoint": d.Endpoint, "delivery_id": d.DeliveryID, "delivery": d.ID, "replay": d.Replays, "of_trace": first.LastTraceID,
			},
		}, func(pgx.Tx, string) (any, error) { return map[string]string{"execution_id": execution}, nil })
		return err
	})
	if err != nil && !errors.Is(err, webhooks.ErrNotFound) && !errors.Is(err, webhooks.ErrInProgress) {
		err = fmt.Errorf("replay delivery: %w", err)
	}
	return d, err
}

// begin starts a flow with the delivery's data as input, in the transaction of the checkpoint, and does not wait for
// its end. It belongs to the delivery's trace. A delivery that is handled again by an admin's wish starts another.
func (s *Surface) begin(ctx context.Context, c webhooks.Content, t task) (result, error) {
	switch known, err := s.knows(ctx, t.Action.Flow); {
	case err != nil:
		return result{}, err
	case !known:
		return result{}, fmt.Errorf("there is no flow %q; see agent flows ls", t.Action.Flow)
	}
	input, err := data(c, t.Action)
	if err != nil {
		return result{}, err
	}
	thread, err := s.conversation(ctx, c, t.Action.Thread)
	if err != nil {
		return result{}, err
	}
	x, _ := executions.Current(ctx)
	started, err := executions.Trigger(ctx, "begin", executions.Child{
		Flow: t.Action.Flow, Input: input, ThreadID: thread, DedupeKey: fmt.Sprintf("webhook flow %s %d", x.ID, t.Number),
	})
	return result{Flow: t.Action.Flow, Started: started.ExecutionID}, err
}

// conversation is the thread that a template names for a delivery, begun when there is none. The name is the
// endpoint's own: who sends the delivery chooses it, and must not get into a thread of somebody else's by it.
func (s *Surface) conversation(ctx context.Context, c webhooks.Content, template string) (string, error) {
	if template == "" {
		return "", nil
	}
	name, err := c.Text(template)
	if err != nil {
		return "", fmt.Errorf("thread: %w", err)
	}
	return executions.Step(ctx, "thread", func(ctx context.Context) (string, error) {
		got, _, err := threads.Open(ctx, s.Pool, endpoint(c.Endpoint), threads.Thread{Name: name, Agent: s.Agent})
		return got.ID, err
	})
}

// endpoint is a webhook endpoint as the owner of threads.
func endpoint(name string) threads.Principal {
	return threads.Principal{Kind: threads.ByWebhook, Owner: name}
}

// threadOf is the key of a message's event: of the endpoint's own thread that it names, or of one that was opened to
// the endpoint. A name that no thread has is the key itself, because a wait need not be about a conversation that is
// kept here.
func (s *Surface) threadOf(ctx context.Context, c webhooks.Content, key string) (string, error) {
	return executions.RetryTransient(ctx, func(ctx context.Context) (string, error) {
		id, known, err := threads.Resolve(ctx, s.Pool, endpoint(c.Endpoint), key)
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
		return "", fmt.Errorf("the endpoint has no thread %q; agent threads open lets it into somebody else's", key)
	})
}

// knows reports whether a flow can be started: one of this program, or of workers outside.
func (s *Surface) knows(ctx context.Context, flow string) (bool, error) {
	if executions.IsExternal(flow) {
		return true, nil
	}
	return executions.RetryTransient(ctx, func(ctx context.Context) (bool, error) { return s.Engine.HasFlow(ctx, flow) })
}

// automate starts the run in the transaction of the checkpoint. How the run then fares is its own story: it has
// attempts and a dead letter of its own.
func (s *Surface) automate(ctx context.Context, c webhooks.Content, t task) (result, error) {
	payload, err := data(c, webhooks.Action{})
	if err != nil {
		return result{}, err
	}
	begin := s.Automate
	if begin == nil {
		begin = s.startRun
	}
	x, _ := executions.Current(ctx)
	return executions.StepTx(ctx, "automate", func(ctx context.Context, tx pgx.Tx) (result, error) {
		run, err := begin(ctx, tx, AutomationRequest{
			Automation: t.Action.Automation, Key: fmt.Sprintf("webhook %s %d", x.ID, t.Number),
			TraceID: x.TraceID, Payload: payload,
		})
		return result{Run: run}, err
	})
}

// startRun makes a run, claims it and starts its execution: all of it, or nothing.
func (s *Surface) startRun(ctx context.Context, tx pgx.Tx, r AutomationRequest) (string, error) {
	a, err := automations.Get(ctx, tx, r.Automation)
	if err != nil {
		return "", err
	}
	if !a.Enabled {
		return "", fmt.Errorf("automation %s is out of service: %s", a.Name, a.DisabledReason)
	}
	run, err := automations.RunManually(ctx, tx, a.ID, r.TraceID)
	if err != nil {
		return "", err
	}
	x, _, err := s.Engine.StartTx(ctx, tx, runner.Spec(s.Agent, run))
	if err != nil {
		return "", err
	}
	_, ok, err := automations.ClaimRun(ctx, tx, run.ID, run.Attempt, x.ID, x.TraceID)
	if err == nil && !ok {
		err = errors.New("its run was taken by somebody else")
	}
	return run.ID, err
}
