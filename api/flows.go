package api

import (
	"encoding/json"
	"errors"
	"net/http"
	"strings"

	"github.com/lanekeeper/lanekeeper/flows"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/requests"
)

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
