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
	"github.com/lanekeeper/lanekeeper/flows"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
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

// deliver raises an event. A message for a conversation that there is becomes a message of it, as when its visitor
// had said it.
func (s *server) deliver(ctx context.Context, e event) (executions.Delivered, error) {
	ctx = executions.WithLockTimeout(ctx, postgres.LockPatience)
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

// said is what a message says, under the names that a wait for a response reads; "" of other events and of what is no
// text.
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

// flowing is what flows are, and what executions have asked of people.
func (s *server) flowing() []route {
	return []route{
		{
			method: "GET", path: "/v1/flows", answer: page[flows.Flow]{}, handle: s.listFlows, params: listing(),
			about: "Flows that are written down as data, by name, each in the version that new executions begin with.",
		}, {
			method: "GET", path: "/v1/flows/{name}", answer: flows.Flow{}, handle: s.getFlow,
			about: "One flow, in the version that new executions begin with. POST /v1/executions starts it.",
		}, {
			method: "GET", path: "/v1/schemas/flow", answer: json.RawMessage{}, handle: s.flowSchema,
			about: "The JSON Schema of a flow's declaration, for editors and validators.",
		}, {
			method: "GET", path: "/v1/requests", answer: page[requests.Record]{}, handle: s.listRequests,
			params: listing(oneOf("kind", "What was asked for", "document", "signature", "test"),
				oneOf("status", "Whether it was answered; closed: its execution ended before", "pending", "completed", "closed"),
				text("thread_id", "Id of the thread"), param{name: "execution_id", about: "Id of the execution", check: checkUUID}),
			about: "What executions have asked of people, newest first. An event with the request's id as key answers it.",
		}, {
			method: "GET", path: "/v1/requests/{id}", answer: requests.Record{}, handle: s.getRequest,
			about: "One request: what was asked, and what has come.",
		},
	}
}

// checkUUID accepts an id.
func checkUUID(text string) error {
	if !uuidForm.MatchString(text) {
		return errors.New("has to be a uuid")
	}
	return nil
}

// listFlows goes by name, so it does not fit the listings that go by id, newest first.
func (s *server) listFlows(r request) (answer, error) {
	after, err := unseal("flows", r.query["cursor"])
	if err != nil {
		return answer{}, err
	}
	limit := r.query.limit()
	rows, err := flows.List(r.Context(), s.pool, flows.Filter{After: after, Limit: limit})
	if err != nil || len(rows) < limit {
		return answer{body: pageOf(rows, "")}, err
	}
	last := rows[len(rows)-1].Name
	more, err := flows.List(r.Context(), s.pool, flows.Filter{After: last, Limit: 1})
	if err != nil || len(more) == 0 {
		return answer{body: pageOf(rows, "")}, err
	}
	return answer{body: pageOf(rows, seal("flows", last))}, nil
}

func (s *server) getFlow(r request) (answer, error) {
	name := r.PathValue("name")
	if !storable(name) {
		return answer{}, problem.New(http.StatusNotFound, "there is no flow of this name")
	}
	flow, err := flows.Get(r.Context(), s.pool, name)
	if errors.Is(err, flows.ErrNotFound) {
		return answer{}, problem.New(http.StatusNotFound, "there is no flow %.100q", name)
	}
	return answer{body: flow}, err
}

func (s *server) listRequests(r request) (answer, error) {
	got, err := paged("requests", r.query, func(x requests.Record) string { return x.ID },
		func(before string, limit int) ([]requests.Record, error) {
			return requests.List(r.Context(), s.pool, requests.Filter{
				Kind: r.query["kind"], Status: r.query["status"], ThreadID: r.query["thread_id"],
				ExecutionID: strings.ToLower(r.query["execution_id"]), Before: before, Limit: limit,
			})
		})
	return answer{body: got}, err
}

func (s *server) getRequest(r request) (answer, error) {
	id, err := uuidIn(r, "a request")
	if err != nil {
		return answer{}, err
	}
	asked, err := requests.Get(r.Context(), s.pool, id)
	if errors.Is(err, requests.ErrNotFound) {
		return answer{}, problem.New(http.StatusNotFound, "there is no request %s", id)
	}
	return answer{body: asked, trace: asked.TraceID}, err
}

// flowSchema is what a flow may look like, for editors.
func (s *server) flowSchema(request) (answer, error) {
	text, err := flows.JSONSchema()
	return answer{body: text}, err
}
