package api

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/problem"
)

// forkRoutes returns the routes that fork, retry and replay executions.
func (s *server) forkRoutes() []route {
	return []route{
		{
			method: "POST", path: "/v1/executions/{id}/fork", body: forkRequest{}, response: forkResponse{},
			status: http.StatusCreated,
			handle: s.forkExecution, conflicts: true,
			about: "Start a new execution from a step of another: it copies the checkpoints before the step and " +
				"runs the rest. 409 if the input contradicts a checkpoint, or the flow cannot be forked.",
		}, {
			method: "POST", path: "/v1/executions/{id}/retry", response: forkResponse{}, status: http.StatusCreated,
			handle: s.retryExecution, conflicts: true,
			about: "Fork a failed, timed out or cancelled execution and repeat the failed part. 409 for any other.",
		}, {
			method: "POST", path: "/v1/executions/bulk", body: bulkRequest{}, response: bulkResponse{}, handle: s.bulkExecutions,
			about: "Retry or cancel up to 200 executions, each with its own row in the audit. Each item has its " +
				"result; a refused item has an error. Unlike its own route, the cancel of an ended execution is refused.",
		}, {
			method: "POST", path: "/v1/executions/{id}/replay", response: executions.Replayed{}, handle: s.replayExecution,
			conflicts: true,
			about: "Replay the flow with recorded results and without side effects. Returns the digests of record " +
				"and replay, and the first different step. 409 while it runs.",
		},
	}
}

// forkRequest names the step to restart from.
type forkRequest struct {
	From   string          `json:"from,omitempty" doc:"a recorded step or scope, or the waiting step; empty: after the last checkpoint"`
	Input  json.RawMessage `json:"input,omitempty" doc:"default the original's"`
	Latest bool            `json:"latest,omitempty"`
	Reason string          `json:"reason,omitempty"`
}

func (f forkRequest) check() error {
	if !isPrintableText(f.Reason) || len(f.Reason) > maxReason {
		return problem.BadBody("reason has at most %d bytes of text", maxReason)
	}
	if !isPrintableText(f.From) || len(f.From) > 4*maxStep {
		return problem.BadBody("from must be the key of a recorded step")
	}
	return nil
}

type forkResponse struct {
	ID         string            `json:"id"`
	TraceID    string            `json:"trace_id"`
	Status     executions.Status `json:"status"`
	ForkedFrom string            `json:"forked_from"`
	From       string            `json:"from"`
}

func (s *server) forkExecution(r request) (response, error) {
	x, err := s.execution(r)
	if err != nil {
		return response{}, err
	}
	body := r.body.(forkRequest)
	var fork executions.Execution
	_, err = s.record(r.Context(), "fork_execution", body.Reason, map[string]any{"execution": x.ID, "from": body.From},
		func(tx pgx.Tx, _ string) (any, error) {
			fork, err = s.engine.Fork(r.Context(), tx, executions.ForkSpec{
				ID: x.ID, From: body.From, Input: notNull(body.Input), Latest: body.Latest,
			})
			return executionRef(fork), err
		})
	return forkResult(x, fork, body.From, err)
}

func (s *server) retryExecution(r request) (response, error) {
	x, err := s.execution(r)
	if err != nil {
		return response{}, err
	}
	return s.retry(r.Context(), x, "")
}

// retry forks an execution to repeat the failed part.
func (s *server) retry(ctx context.Context, x executions.Execution, reason string) (response, error) {
	var fork executions.Execution
	from := ""
	_, err := s.record(ctx, "retry_execution", reason, map[string]any{"execution": x.ID},
		func(tx pgx.Tx, _ string) (_ any, err error) {
			fork, from, err = s.engine.Retry(ctx, tx, x.ID)
			return executionRef(fork), err
		})
	return forkResult(x, fork, from, err)
}

// executionRef is the output of a recorded fork.
func executionRef(x executions.Execution) map[string]string {
	return map[string]string{"execution_id": x.ID, "trace_id": x.TraceID}
}

func forkResult(x, fork executions.Execution, from string, err error) (response, error) {
	switch {
	case errors.Is(err, executions.ErrNoStep):
		return response{trace: x.TraceID}, problem.BadBody("from: %s", err)
	case errors.Is(err, executions.ErrNoFork), errors.Is(err, executions.ErrNotFailed):
		return response{trace: x.TraceID}, problem.New(http.StatusConflict, "%s", err).Kind("no-fork", "Cannot be forked")
	case errors.Is(err, executions.ErrChanged):
		return response{trace: x.TraceID}, problem.New(http.StatusConflict, "%s", err).Kind("input-changed",
			"Input contradicts the record")
	case err != nil:
		return response{trace: x.TraceID}, valueError(err)
	}
	return response{
		body: forkResponse{fork.ID, fork.TraceID, fork.Status, x.ID, from}, trace: fork.TraceID,
		status: http.StatusCreated,
	}, nil
}

func (s *server) replayExecution(r request) (response, error) {
	x, err := s.execution(r)
	if err != nil {
		return response{}, err
	}
	replay, err := s.engine.Replay(r.Context(), x.ID)
	if errors.Is(err, executions.ErrRunning) || errors.Is(err, executions.ErrUnknownFlow) {
		err = problem.New(http.StatusConflict, "%s", err).Kind("no-replay", "Cannot be replayed")
	}
	if err != nil {
		return response{trace: x.TraceID}, err
	}
	return response{body: replay, trace: x.TraceID}, nil
}
