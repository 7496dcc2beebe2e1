package api

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"regexp"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/exactjson"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/principals"
)

// executionRoutes returns the routes that start, read, follow and cancel executions.
func (s *server) executionRoutes() []route {
	return []route{
		{
			method: "POST", path: "/v1/executions", body: startRequest{}, response: executionStatus{},
			status: http.StatusCreated, handle: s.startExecution, conflicts: true, notFound: true, derivesKey: true,
			about: "Start an execution of a flow. An external worker locks and runs the flows external and external:NAME. " +
				"422 for an unknown flow.",
		}, {
			method: "GET", path: "/v1/executions", response: page[executions.Execution]{}, handle: s.listExecutions,
			csv: true, about: "Executions, newest first.",
			params: listParams(param{
				name: "status", check: checkStatuses,
				about: "State of the execution, or several with commas: " + strings.Join(executions.Statuses(), ", "),
			}, surfaceParam,
				textParam("flow", "Name of the flow"), textParam("agent", "Name of the agent"),
				textParam("label", "Label: name=value, or a value"), traceParam,
				timeParam("since", "Created at or after"), timeParam("until", "Created before")),
		}, {
			method: "GET", path: "/v1/executions/{id}", response: executionDetail{}, handle: s.getExecution,
			about: "One execution with its latest checkpoint and open wait.",
		}, {
			method: "GET", path: "/v1/executions/{id}/events", contentType: "text/event-stream", stream: true,
			httpHandler: http.HandlerFunc(s.followExecution), noContent: "Last-Event-ID is the end",
			headers: map[string]string{"Last-Event-ID": "The id of the last event that the client has seen."},
			about: "The status of an execution as server-sent events: event status, data {id, trace_id, status, " +
				"waiting_for, at}. First the current state (for external executions the changes since " +
				"Last-Event-ID), then the changes until the end. 204 if Last-Event-ID is the end.",
		}, {
			method: "POST", path: "/v1/executions/{id}/cancel", body: reasonRequest{}, response: cancelResponse{},
			handle: s.cancelExecution, deferred: true,
			about: "Cancel an execution now. An ended one keeps its status. 202 with cancel_requested if another " +
				"transaction locks the row for more than a second: detail names the blocker, and the cancel follows when it ends.",
		},
	}
}

func (s *server) listExecutions(r request) (response, error) {
	list, err := readPage("executions", r.query, func(x executions.Execution) string { return x.ID },
		func(before string, limit int) ([]executions.Execution, error) {
			return executions.List(r.Context(), s.pool, executions.Filter{
				Statuses: r.query.list("status"), Surface: r.query["surface"], Flow: r.query["flow"], Agent: r.query["agent"],
				Label: r.query["label"], TraceIDs: r.query.traceIDs(), Since: r.query.time("since"), Until: r.query.time("until"),
				Before: before, Limit: limit,
			})
		})
	for i := range list.Items {
		if r.csv { // the table has none of these, and redaction is slow
			list.Items[i].Input, list.Items[i].Variables, list.Items[i].WaitingData, list.Items[i].Result = nil, nil, nil, nil
		}
		list.Items[i] = list.Items[i].Redacted(r.Context())
	}
	return response{body: list}, err
}

// executionDetail is a redacted execution with its latest checkpoint and open wait.
type executionDetail struct {
	executions.Execution
	ResultAltered bool                   `json:"result_altered" doc:"result differs from the flow's: redacted, cut or hidden"`
	Labels        executions.Labels      `json:"labels"`
	Checkpoint    *executions.Checkpoint `json:"checkpoint" doc:"the latest checkpoint; null before the first"`
	Waits         []wait                 `json:"waits" doc:"the open ones"`
}

type wait struct {
	Number int             `json:"number" doc:"1 for the first wait"`
	For    string          `json:"waiting_for"`
	Key    string          `json:"waiting_key"`
	Until  *time.Time      `json:"waiting_until"`
	Data   json.RawMessage `json:"waiting_data"`
}

func (s *server) getExecution(r request) (response, error) {
	x, err := s.execution(r)
	if err != nil {
		return response{}, err
	}
	latest, err := executions.LatestCheckpoint(r.Context(), s.pool, x.ID)
	if err != nil {
		return response{trace: x.TraceID}, err
	}
	stored := x.Result
	x = x.Redacted(r.Context())
	labels, err := executions.LabelsOf(r.Context(), s.pool, []string{x.ID})
	if err != nil {
		return response{trace: x.TraceID}, err
	}
	detail := executionDetail{
		Execution: x, ResultAltered: !exactjson.Equal(stored, x.Result), Labels: labels[x.ID].Redacted(), Waits: []wait{},
	}
	if latest != nil {
		detail.Checkpoint = new(latest.Redacted(r.Context()))
	}
	if x.Status == executions.Waiting {
		w := wait{Number: x.WaitNumber, Until: x.WaitingUntil, Data: x.WaitingData}
		w.For, w.Key = postgres.Deref(x.WaitingFor), postgres.Deref(x.WaitingKey)
		detail.Waits = append(detail.Waits, w)
	}
	return response{body: detail, trace: x.TraceID}, nil
}

// execution reads the execution in the path.
func (s *server) execution(r request) (executions.Execution, error) {
	id, err := pathUUID(r, "an execution")
	if err != nil {
		return executions.Execution{}, err
	}
	return executions.Get(r.Context(), s.pool, id)
}

// pathUUID returns the id in the path, in the lower case of the database's texts.
func pathUUID(r request, kind string) (string, error) {
	id := r.PathValue("id")
	if !uuidForm.MatchString(id) {
		return "", problem.New(http.StatusBadRequest, "%.60q is not the id (uuid) of %s", id, kind).
			Kind("malformed-id", "Malformed id")
	}
	return strings.ToLower(id), nil
}

var uuidForm = regexp.MustCompile(`^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$`)

func (s *server) cancelExecution(r request) (response, error) {
	x, err := s.execution(r)
	if err != nil {
		return response{}, err
	}
	if err := s.mayCancel(r.Context(), x); err != nil {
		return response{trace: x.TraceID}, err
	}
	return s.cancel(r.Context(), x, r.body.(reasonRequest).Reason)
}

// mayCancel lets the scope operate cancel operate turns that the caller has started, but no other execution.
func (s *server) mayCancel(ctx context.Context, x executions.Execution) error {
	caller := principals.From(ctx)
	if caller == nil || caller.May(principals.RunsWrite) {
		return nil
	}
	if x.Flow == "operate" {
		var started bool
		err := s.pool.QueryRow(ctx, `
			select exists (
			  select from agent_links l
			   where l.cause = 'principal ' || @name
			     and l.kind = 'asked'
			     and l.effect = 'execution ' || @id)`,
			postgres.Strict{"name": caller.Name, "id": x.ID}).Scan(&started)
		if err != nil || started {
			return err
		}
	}
	return missingScope(caller, string(principals.RunsWrite))
}

// cancelResponse holds the status after a cancel.
type cancelResponse struct {
	ID      string            `json:"id"`
	TraceID string            `json:"trace_id"`
	Status  executions.Status `json:"status"`
	// CancelRequested is set while another transaction locks the row; the cancel follows. Detail names the blocker.
	CancelRequested bool   `json:"cancel_requested,omitempty"`
	Detail          string `json:"detail,omitempty"`
}

func (s *server) cancel(ctx context.Context, x executions.Execution, reason string) (response, error) {
	status, err := s.engine.Cancel(ctx, x.ID, actorName(ctx), reason)
	if err != nil {
		return response{trace: x.TraceID}, err
	}
	result := cancelResponse{ID: x.ID, TraceID: x.TraceID, Status: status}
	if status.Ended() {
		return response{body: result, trace: x.TraceID}, nil
	}
	if result.Detail, err = executions.CancelDetail(ctx, s.pool); err != nil {
		return response{trace: x.TraceID}, err
	}
	result.CancelRequested = true
	return response{body: result, trace: x.TraceID, status: http.StatusAccepted}, nil
}

// valueError maps errors of unstorable values, such as \u0000 in JSON, to problems.
func valueError(err error) error {
	refused, ok := errors.AsType[*pgconn.PgError](err)
	if !ok || !postgres.IsCode(err,
		"22003", // numeric_value_out_of_range
		"22023", // invalid_parameter_value: the functions of the schema refuse bad input with it
		"22P02", // invalid_text_representation: not JSON
		"22P05", // untranslatable_character: \u0000
	) {
		return err
	}
	return problem.BadBody("%s", postgres.RefusalText(refused))
}
