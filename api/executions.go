package api

import (
	"encoding/json"
	"net/http"
	"regexp"
	"time"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/problem"
)

// admin is who acts through this API, in the rows that name somebody.
const admin = activity.Admin

var uuidForm = regexp.MustCompile(`^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$`)

// executionDetail is the row with what it has recorded last and what it waits for, as it may be shown.
type executionDetail struct {
	executions.Execution
	Checkpoint *executions.Checkpoint `json:"checkpoint"` // the latest; null before the first
	Waits      []wait                 `json:"waits"`      // those open now
}

// wait is what an execution waits for.
type wait struct {
	Number int             `json:"number"` // counts the waits of the execution
	For    string          `json:"waiting_for"`
	Key    string          `json:"waiting_key"`
	Until  *time.Time      `json:"waiting_until"`
	Data   json.RawMessage `json:"waiting_data"`
}

// cancelled is the status an execution has after a cancel.
type cancelled struct {
	ID      string            `json:"id"`
	TraceID string            `json:"trace_id"`
	Status  executions.Status `json:"status"`
	// Another transaction has it locked: it is cancelled when that ends. Detail says what may be in the way.
	CancelRequested bool   `json:"cancel_requested,omitempty"`
	Detail          string `json:"detail,omitempty"`
}

func (s *server) listExecutions(r request) (answer, error) {
	got, err := paged("executions", r.query, func(x executions.Execution) string { return x.ID },
		func(before string, limit int) ([]executions.Execution, error) {
			return executions.List(r.Context(), s.pool, executions.Filter{
				Status: r.query["status"], Surface: r.query["surface"], Flow: r.query["flow"], Agent: r.query["agent"],
				TraceIDs: r.query.traceIDs(), Before: before, Limit: limit,
			})
		})
	for i := range got.Items {
		got.Items[i] = got.Items[i].Redacted()
	}
	return answer{body: got}, err
}

func (s *server) getExecution(r request) (answer, error) {
	x, err := s.execution(r)
	if err != nil {
		return answer{}, err
	}
	recorded, err := executions.Checkpoints(r.Context(), s.pool, x.ID)
	if err != nil {
		return answer{trace: x.TraceID}, err
	}
	x = x.Redacted()
	detail := executionDetail{Execution: x, Waits: []wait{}}
	if len(recorded) > 0 {
		detail.Checkpoint = new(recorded[len(recorded)-1].Redacted())
	}
	if x.Status == executions.Waiting {
		w := wait{Number: x.WaitNumber, Until: x.WaitingUntil, Data: x.WaitingData}
		w.For, w.Key = value(x.WaitingFor), value(x.WaitingKey)
		detail.Waits = append(detail.Waits, w)
	}
	return answer{body: detail, trace: x.TraceID}, nil
}

func (s *server) cancelExecution(r request) (answer, error) {
	x, err := s.execution(r)
	if err != nil {
		return answer{}, err
	}
	status, err := s.engine.Cancel(r.Context(), x.ID, admin, r.body.(because).Reason)
	if err != nil {
		return answer{trace: x.TraceID}, err
	}
	got := cancelled{ID: x.ID, TraceID: x.TraceID, Status: status}
	if status.Ended() {
		return answer{body: got, trace: x.TraceID}, nil
	}
	if got.Detail, err = executions.CancelDetail(r.Context(), s.pool); err != nil {
		return answer{trace: x.TraceID}, err
	}
	got.CancelRequested = true
	return answer{body: got, trace: x.TraceID, status: http.StatusAccepted}, nil
}

// execution is the one that the path names.
func (s *server) execution(r request) (executions.Execution, error) {
	id, err := uuidIn(r, "an execution")
	if err != nil {
		return executions.Execution{}, err
	}
	return executions.Get(r.Context(), s.pool, id)
}

// uuidIn is the id in the path, which is that of a thing.
func uuidIn(r request, thing string) (string, error) {
	id := r.PathValue("id")
	if !uuidForm.MatchString(id) {
		return "", problem.New(http.StatusBadRequest, "%.60q is not the id of %s, which is a uuid", id, thing).
			Kind("malformed-id", "Malformed id")
	}
	return id, nil
}

// value is what a pointer leads to; zero for nil.
func value[T any](p *T) (v T) {
	if p != nil {
		v = *p
	}
	return v
}
