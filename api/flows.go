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

// flowRoutes returns the routes that read flows and requests to people.
func (s *server) flowRoutes() []route {
	return []route{
		{
			method: "GET", path: "/v1/flows", response: page[flows.Flow]{}, handle: s.listFlows, params: listParams(),
			about: "Flows declared as data, by name, each in its current version.",
		}, {
			method: "GET", path: "/v1/flows/{name}", response: flows.Flow{}, handle: s.getFlow,
			about: "One flow in its current version. POST /v1/executions starts it.",
		}, {
			method: "GET", path: "/v1/schemas/flow", response: json.RawMessage{}, handle: s.flowSchema,
			about: "The JSON Schema of a flow's declaration, for editors and validators.",
		}, {
			method: "GET", path: "/v1/requests", response: page[requests.Record]{}, handle: s.listRequests,
			params: listParams(enumParam("kind", "Kind of the request", "document", "signature", "test"),
				enumParam("status", "State of the request; closed: its execution ended, or its action timed out, first",
					"pending", "completed", "closed"),
				textParam("thread_id", "Id of the thread"),
				param{name: "execution_id", about: "Id of the execution", check: checkUUID}),
			about: "Requests to people, newest first. An event with the request's id as key answers one.",
		}, {
			method: "GET", path: "/v1/requests/{id}", response: requests.Record{}, handle: s.getRequest,
			about: "One request with its answers.",
		},
	}
}

// listFlows pages by name, unlike the listings by id.
func (s *server) listFlows(r request) (response, error) {
	list, err := readPageByKey("flows", r.query, func(f flows.Flow) string { return f.Name },
		func(after string, limit int) ([]flows.Flow, error) {
			return flows.List(r.Context(), s.pool, flows.Filter{After: after, Limit: limit})
		})
	return response{body: list}, err
}

func (s *server) getFlow(r request) (response, error) {
	name := r.PathValue("name")
	if !isPrintableText(name) {
		return response{}, problem.New(http.StatusNotFound, "no flow of this name")
	}
	flow, err := flows.Get(r.Context(), s.pool, name)
	if errors.Is(err, flows.ErrNotFound) {
		return response{}, problem.New(http.StatusNotFound, "no flow %.100q", name)
	}
	return response{body: flow}, err
}

func (s *server) flowSchema(request) (response, error) {
	text, err := flows.JSONSchema()
	return response{body: text}, err
}

func (s *server) listRequests(r request) (response, error) {
	list, err := readPage("requests", r.query, func(x requests.Record) string { return x.ID },
		func(before string, limit int) ([]requests.Record, error) {
			return requests.List(r.Context(), s.pool, requests.Filter{
				Kind: r.query["kind"], Status: r.query["status"], ThreadID: r.query["thread_id"],
				ExecutionID: strings.ToLower(r.query["execution_id"]), Before: before, Limit: limit,
			})
		})
	return response{body: list}, err
}

func (s *server) getRequest(r request) (response, error) {
	id, err := pathUUID(r, "a request")
	if err != nil {
		return response{}, err
	}
	req, err := requests.Get(r.Context(), s.pool, id)
	if errors.Is(err, requests.ErrNotFound) {
		return response{}, problem.New(http.StatusNotFound, "no request %s", id)
	}
	return response{body: req, trace: req.TraceID}, err
}
