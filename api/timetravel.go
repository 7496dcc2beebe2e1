package api

import (
	"encoding/json"
	"errors"
	"net/http"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/problem"
)

// forking says where another execution is to go on from what one has recorded.
type forking struct {
	From   string          `json:"from,omitempty"`  // a recorded step, a scope, or the step it waits in; empty: after all that is recorded
	Input  json.RawMessage `json:"input,omitempty"` // the other's when left out
	Latest bool            `json:"latest,omitempty"`
	Reason string          `json:"reason,omitempty"`
}

// forked is the new execution.
type forked struct {
	ID         string            `json:"id"`
	TraceID    string            `json:"trace_id"`
	Status     executions.Status `json:"status"`
	ForkedFrom string            `json:"forked_from"`
	From       string            `json:"from"`
}

func (f forking) check() error {
	if !storable(f.Reason) || len(f.Reason) > maxReason {
		return badBody("reason has at most %d bytes of text", maxReason)
	}
	if !storable(f.From) || len(f.From) > 4*maxStep {
		return badBody("from has to be the key of a recorded step")
	}
	return nil
}

// travelling is what is done with what executions have recorded, and how the live ones are doing.
func (s *server) travelling() []route {
	return []route{
		{
			method: "POST", path: "/v1/executions/{id}/fork", body: forking{}, answer: forked{}, status: http.StatusCreated,
			handle: s.forkExecution, conflicts: true,
			about: "Start an execution that begins with what another had recorded before a step, and does the rest anew. The other is " +
				"not touched. 409 when the input contradicts a record, or the flow cannot be forked.",
		}, {
			method: "POST", path: "/v1/executions/{id}/retry", answer: forked{}, status: http.StatusCreated,
			handle: s.retryExecution, conflicts: true,
			about: "Fork what failed, timed out or was cancelled, so that what ended it is done anew. 409 for any other.",
		}, {
			method: "POST", path: "/v1/executions/{id}/replay", answer: executions.Replayed{}, handle: s.replayExecution,
			conflicts: true,
			about: "Call the flow with what was recorded, and with no way to do anything new: the digests of the record and of the replay, and " +
				"the step in which they differ. 409 while it is being run.",
		}, {
			method: "GET", path: "/v1/monitor/status", answer: page[executions.StatusCount]{}, handle: s.countExecutions,
			about: "How many executions are pending, running and waiting, and their mean age in seconds.",
		}, {
			method: "GET", path: "/v1/monitor/waiting", answer: page[executions.WaitingRow]{}, handle: s.listWaiting,
			params: []param{oneOf("for", "Kind of the wait", "response", "agent", "document", "signature", "test", "event", "delay", "approval", "lane")},
			about:  "What waits, the nearest deadline first; at most 500.",
		}, {
			method: "GET", path: "/v1/monitor/stuck", answer: page[executions.WaitingRow]{}, handle: s.listStuck,
			about: "What waits although its deadline has passed, untouched for an hour; at most 500.",
		},
	}
}

func (s *server) forkExecution(r request) (answer, error) {
	x, err := s.execution(r)
	if err != nil {
		return answer{}, err
	}
	body := r.body.(forking)
	var got executions.Execution
	_, err = s.audited(r.Context(), "fork_execution", body.Reason, map[string]any{"execution": x.ID, "from": body.From}, func(tx pgx.Tx, _ string) (any, error) {
		got, err = s.engine.Fork(r.Context(), tx, executions.ForkSpec{
			ID: x.ID, From: body.From, Input: notNull(body.Input), Latest: body.Latest,
		})
		return begunExecution(got), err
	})
	return newFork(x, got, body.From, err)
}

// notNull is a value that was given; null is none.
func notNull(v json.RawMessage) json.RawMessage {
	if !given(v) {
		return nil
	}
	return v
}

func (s *server) retryExecution(r request) (answer, error) {
	x, err := s.execution(r)
	if err != nil {
		return answer{}, err
	}
	var got executions.Execution
	from := ""
	_, err = s.audited(r.Context(), "retry_execution", "", map[string]any{"execution": x.ID}, func(tx pgx.Tx, _ string) (any, error) {
		got, from, err = s.engine.Retry(r.Context(), tx, x.ID)
		return begunExecution(got), err
	})
	return newFork(x, got, from, err)
}

// begunExecution says in the row of an admin's act which execution began.
func begunExecution(x executions.Execution) map[string]string {
	return map[string]string{"execution_id": x.ID, "trace_id": x.TraceID}
}

func newFork(x, got executions.Execution, from string, err error) (answer, error) {
	switch {
	case errors.Is(err, executions.ErrNoStep):
		return answer{trace: x.TraceID}, badBody("from: %s", err)
	case errors.Is(err, executions.ErrNoFork), errors.Is(err, executions.ErrNotFailed):
		return answer{trace: x.TraceID}, problem.New(http.StatusConflict, "%s", err).Kind("no-fork", "Cannot be forked")
	case errors.Is(err, executions.ErrChanged):
		return answer{trace: x.TraceID}, problem.New(http.StatusConflict, "%s", err).Kind("input-changed", "Input contradicts the record")
	case err != nil:
		return answer{trace: x.TraceID}, refusedValue(err)
	}
	return answer{body: forked{got.ID, got.TraceID, got.Status, x.ID, from}, trace: got.TraceID, status: http.StatusCreated}, nil
}

func (s *server) replayExecution(r request) (answer, error) {
	x, err := s.execution(r)
	if err != nil {
		return answer{}, err
	}
	got, err := s.engine.Replay(r.Context(), x.ID)
	if errors.Is(err, executions.ErrRunning) || errors.Is(err, executions.ErrUnknownFlow) {
		err = problem.New(http.StatusConflict, "%s", err).Kind("no-replay", "Cannot be replayed")
	}
	if err != nil {
		return answer{trace: x.TraceID}, err
	}
	return answer{body: got, trace: x.TraceID}, nil
}

func (s *server) countExecutions(r request) (answer, error) {
	got, err := executions.CountByStatus(r.Context(), s.pool)
	return answer{body: page[executions.StatusCount]{Items: got}}, err
}

func (s *server) listWaiting(r request) (answer, error) {
	return s.waitingRows(r, r.query["for"], false)
}

func (s *server) listStuck(r request) (answer, error) { return s.waitingRows(r, "", true) }

func (s *server) waitingRows(r request, kind string, stuck bool) (answer, error) {
	got, err := executions.ListWaiting(r.Context(), s.pool, kind, stuck, 500)
	for i := range got {
		got[i] = got[i].Redacted()
	}
	return answer{body: page[executions.WaitingRow]{Items: got}}, err
}
