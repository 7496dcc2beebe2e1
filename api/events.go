package api

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/principals"
	"github.com/lanekeeper/lanekeeper/threads"
)

// eventRoutes returns the routes that raise events.
func (s *server) eventRoutes() []route {
	return []route{
		{
			method: "POST", path: "/v1/events", body: eventRequest{}, response: eventResponse{}, status: http.StatusAccepted,
			handle: s.raiseEvent, derivesKey: true,
			about: "Raise an event and resume its waiters; without a waiter it is stored for the first one. " +
				"The same id counts once; that of another event is refused.",
		},
	}
}

// maxEventID bounds the id of an event in bytes. The database bounds the key of the event.
const maxEventID = 255

// eventRequest is an external event.
type eventRequest struct {
	Event string          `json:"event"`
	Key   string          `json:"key"`
	Data  json.RawMessage `json:"data,omitempty"`
	ID    string          `json:"id,omitempty" doc:"idempotency id"`
}

// eventResponse lists the resumed executions.
type eventResponse struct {
	EventID string   `json:"event_id"`
	Resumed []string `json:"resumed"`
}

// externalEvents lists the events that clients may raise. All other events belong to the agent or to stricter routes,
// such as approvals.
func externalEvents() []string {
	return []string{"MESSAGE_RECEIVED", "DOCUMENT_UPLOADED", "SIGNATURE_COMPLETED", "TEST_COMPLETED", "EVENT_COMPLETED"}
}

func (e eventRequest) check() error {
	switch {
	case !slices.Contains(externalEvents(), e.Event):
		return problem.BadBody("event is %.60q; use %s", e.Event, strings.Join(externalEvents(), ", "))
	case e.Key == "" || !isPrintableText(e.Key):
		return problem.BadBody("key must be text, and not empty")
	case len(e.ID) > maxEventID || !isPrintableText(e.ID):
		return problem.BadBody("id must be at most %d bytes of text", maxEventID)
	}
	for _, prefix := range []string{"completed ", "approval "} {
		if strings.HasPrefix(e.ID, prefix) {
			return problem.BadBody("ids that begin with %q are reserved", prefix)
		}
	}
	return nil
}

func (s *server) raiseEvent(r request) (response, error) {
	e := r.body.(eventRequest)
	keyed := ""
	if e.ID == "" {
		keyed = derivedKey(r.Request, e.Event, e.Key, string(e.Data))
	}
	var delivered executions.Delivered
	err := withFreshKey(r.Context(), s.pool, keyed, func(key string) (_ string, err error) {
		e.ID = cmp.Or(key, e.ID)
		delivered, err = s.deliver(r.Context(), e)
		return delivered.EventID, err
	})
	if err != nil {
		return response{}, valueError(err)
	}
	if err := activity.LinkExecutions(r.Context(), s.pool, delivered.Resumed); err != nil {
		s.log.WarnContext(r.Context(), "caller's trace not linked", "event_id", delivered.EventID, "error", err)
	}
	if delivered.Resumed == nil {
		delivered.Resumed = []string{}
	}
	return response{body: eventResponse(delivered), status: http.StatusAccepted}, nil
}

// deliver raises an event, and records its sender: four eyes count the sender as a requester of the resumed
// executions. Root may decide every approval, so its events other than messages join a batch without that record.
func (s *server) deliver(ctx context.Context, e eventRequest) (delivered executions.Delivered, err error) {
	ctx = executions.WithLockTimeout(ctx, postgres.LockRetryTimeout)
	isRoot := !activity.HasActor(ctx) || activity.ActorFrom(ctx).Name == principals.Root
	what := fmt.Sprintf("the wait for %s %.300q", e.Event, e.Key)
	switch {
	case e.Event == "MESSAGE_RECEIVED":
		what = fmt.Sprintf("thread %q, or the message id,", e.Key)
	case isRoot:
		return s.engine.Deliver(ctx, s.pool, e.Event, e.Key, e.Data, e.ID)
	}
	err = s.locks.Do(ctx, s.pool, what, func(tx pgx.Tx) (err error) {
		delivered, err = threads.Deliver(ctx, s.engine, tx, e.Event, e.Key, e.Data, e.ID)
		if err == nil {
			err = activity.RecordRequester(ctx, tx, "event "+delivered.EventID)
		}
		return err
	})
	if errors.Is(err, threads.ErrTooLong) {
		err = problem.BadBody("data: %s", threads.ErrTooLong)
	}
	return delivered, postgres.ExplainLock(ctx, s.pool, err, what,
		"agent_events", "agent_executions", "agent_threads", "agent_locks")
}
