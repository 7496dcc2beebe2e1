package api

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
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
	"github.com/lanekeeper/lanekeeper/requests"
	"github.com/lanekeeper/lanekeeper/threads"
)

// Bounds of an event, in bytes.
const (
	maxEventKey = 500
	maxEventID  = 255
)

// event is something that happened outside, for whoever waits for it.
type event struct {
	Event string          `json:"event"`
	Key   string          `json:"key"`
	Data  json.RawMessage `json:"data,omitempty"`
	ID    string          `json:"id,omitempty"` // the same id twice counts once
}

// delivered says which event it is, and what it resumed.
type delivered struct {
	EventID string   `json:"event_id"`
	Resumed []string `json:"resumed"`
}

// outside are the events that come from outside. The others say what the agent itself did, or what only
// another route may decide; who could raise them could approve, or end what has not ended.
func outside() []string {
	return []string{"MESSAGE_RECEIVED", "DOCUMENT_UPLOADED", "SIGNATURE_COMPLETED", "TEST_COMPLETED", "EVENT_COMPLETED"}
}

// reserved begin the ids of the agent's own events.
func reserved() []string { return []string{"completed ", "approval "} }

func (e event) check() error {
	switch {
	case !slices.Contains(outside(), e.Event):
		return badBody("event is %.60q; it can be %s", e.Event, strings.Join(outside(), ", "))
	case e.Key == "" || len(e.Key) > maxEventKey || !storable(e.Key):
		return badBody("key has to be 1 to %d bytes of text", maxEventKey)
	case len(e.ID) > maxEventID || !storable(e.ID):
		return badBody("id has to be at most %d bytes of text", maxEventID)
	}
	for _, prefix := range reserved() {
		if strings.HasPrefix(e.ID, prefix) {
			return badBody("an id that begins with %q is the agent's own", prefix)
		}
	}
	return nil
}

func (s *server) raiseEvent(r request) (answer, error) {
	e := r.body.(event)
	keyed := ""
	if e.ID == "" {
		keyed = keyedID(r.Request, e)
	}
	var got executions.Delivered
	err := onceMore(r.Context(), s.pool, keyed, func(key string) (_ string, err error) {
		e.ID = cmp.Or(key, e.ID)
		got, err = s.deliver(r.Context(), e)
		return got.EventID, err
	})
	if err != nil {
		return answer{}, refusedValue(err)
	}
	if err := activity.LinkExecutions(r.Context(), s.pool, got.Resumed); err != nil {
		s.log.WarnContext(r.Context(), "caller's trace not linked", "event_id", got.EventID, "error", err)
	}
	if got.Resumed == nil {
		got.Resumed = []string{}
	}
	return answer{body: delivered(got), status: http.StatusAccepted}, nil
}

// deliver raises an event. A message for a conversation that there is becomes a message of it, as when its visitor had said it.
func (s *server) deliver(ctx context.Context, e event) (executions.Delivered, error) {
	ctx = executions.WithLockPatience(ctx, postgres.LockPatience)
	data, content := said(e)
	if content == "" {
		return s.engine.Deliver(ctx, s.pool, e.Event, e.Key, e.Data, e.ID)
	}
	var arrived threads.Arrived
	what := fmt.Sprintf("thread %q, or the message id,", e.Key)
	err := s.locks.Do(ctx, s.pool, what, func(tx pgx.Tx) (err error) {
		arrived, err = threads.Receive(ctx, s.engine, tx, threads.Incoming{ThreadID: e.Key, Content: content, Data: data, ID: e.ID})
		return err
	})
	err = postgres.ExplainLock(ctx, s.pool, err, what, "agent_events", "agent_threads", "agent_locks")
	if errors.Is(err, threads.ErrNotFound) { // a wait need not be about a conversation that is kept here
		return s.engine.Deliver(ctx, s.pool, e.Event, e.Key, e.Data, e.ID)
	}
	return executions.Delivered{EventID: arrived.EventID, Resumed: arrived.Resumed}, err
}

// said is what a message says, under the names that a wait for a response reads; "" of other events and of what is no text.
func said(e event) (data map[string]any, content string) {
	var members map[string]json.RawMessage // as they came, also long numbers
	if e.Event != "MESSAGE_RECEIVED" || json.Unmarshal(e.Data, &members) != nil {
		return nil, ""
	}
	vars, err := requests.Variables("response", executions.Outcome{Event: e.Event, Data: e.Data})
	if err != nil {
		return nil, ""
	}
	content, _ = vars["lastResponse"].(string)
	if len(content) > maxMessage || strings.TrimSpace(content) == "" {
		return nil, ""
	}
	data = map[string]any{}
	for name, value := range members {
		data[name] = value
	}
	return data, content
}

// keyedID makes the event an effect of its Idempotency-Key, so that it counts once also when the process
// died between raising it and keeping the answer.
func keyedID(r *http.Request, e event) string {
	key := r.Header.Get(keyHeader)
	if key == "" {
		return ""
	}
	sum := sha256.Sum256([]byte(strings.Join([]string{key, e.Event, e.Key, string(e.Data)}, "\n")))
	return "request " + hex.EncodeToString(sum[:])
}
