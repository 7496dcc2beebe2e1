package api

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/problem"
)

const (
	// maxBulk bounds the executions of one request.
	maxBulk = 200
	// bulkMargin is the time that a request reserves for the action in progress and the response.
	bulkMargin = 10 * time.Second
)

// bulkRequest applies one action to several executions.
type bulkRequest struct {
	Action string   `json:"action" doc:"retry or cancel"`
	IDs    []string `json:"ids"`
	Reason string   `json:"reason"`
}

func (b bulkRequest) check() error {
	switch {
	case b.Action != "retry" && b.Action != "cancel":
		return problem.BadBody("action is %.60q; use retry or cancel", b.Action)
	case len(b.IDs) == 0 || len(b.IDs) > maxBulk:
		return problem.BadBody("ids has %d ids; send 1 to %d", len(b.IDs), maxBulk)
	}
	for i, id := range b.IDs {
		switch {
		case !uuidForm.MatchString(id):
			return problem.BadBody("ids: %.60q is not the id (uuid) of an execution", id)
		case slices.ContainsFunc(b.IDs[:i], func(other string) bool { return strings.EqualFold(other, id) }):
			return problem.BadBody("ids: %s occurs twice", id)
		}
	}
	return reasonRequest{b.Reason}.check()
}

// bulkItem is the result of one execution.
type bulkItem struct {
	ID          string            `json:"id"`
	TraceID     string            `json:"trace_id,omitempty"`
	ExecutionID string            `json:"execution_id,omitempty" doc:"the new execution of a retry"`
	Status      executions.Status `json:"status,omitempty" doc:"of the new execution, or after the cancel"`
	Error       string            `json:"error,omitempty" doc:"of a rejected action"`
	// CancelRequested and Detail are those of the cancel.
	CancelRequested bool   `json:"cancel_requested,omitempty"`
	Detail          string `json:"detail,omitempty"`
}

type bulkResponse struct {
	Done    int        `json:"done" doc:"with requested cancels"`
	Refused int        `json:"refused"`
	Detail  string     `json:"detail" doc:"a sentence"`
	Items   []bulkItem `json:"items"`
}

// bulkExecutions applies the action to each execution in turn. A rejection does not affect other executions. Before the
// request's time ends, it rejects the rest, so the response says which retries not to repeat. Without an
// Idempotency-Key, bulkExecutions stops when the client disconnects. The audit has the completed actions.
func (s *server) bulkExecutions(r request) (response, error) {
	b := r.body.(bulkRequest)
	result := bulkResponse{Items: []bulkItem{}}
	deadline, limited := r.Context().Deadline()
	for i, id := range b.IDs {
		item := bulkItem{ID: id}
		var err error = problem.New(http.StatusServiceUnavailable, "not tried: the request took too long; send the rest anew")
		if i == 0 || !limited || time.Until(deadline) > bulkMargin {
			item, err = s.bulkOne(r, b, id)
		}
		if ended := r.Context().Err(); ended != nil {
			return response{}, fmt.Errorf("%s executions: %d are done: %w", b.Action, result.Done, ended)
		}
		if err != nil {
			p, news := problem.Of(err)
			if news {
				s.log.ErrorContext(r.Context(), "execution of a bulk action failed", "action", b.Action, "execution_id", id,
					"error", err)
			}
			item.Error = p.Detail
			result.Refused++
		} else {
			result.Done++
		}
		result.Items = append(result.Items, item)
	}
	result.Detail = result.describe(b.Action)
	return response{body: result}, nil
}

// bulkOne applies the action to one execution.
func (s *server) bulkOne(r request, b bulkRequest, id string) (bulkItem, error) {
	item := bulkItem{ID: id}
	x, err := executions.Get(r.Context(), s.pool, id)
	if err != nil {
		return item, err
	}
	item.TraceID = x.TraceID
	if b.Action == "cancel" {
		if x.Status.Ended() {
			return item, problem.New(http.StatusConflict, "execution %s has ended: %s", id, x.Status)
		}
		done, err := s.cancel(r.Context(), x, b.Reason)
		if c, ok := done.body.(cancelResponse); ok {
			item.Status, item.CancelRequested, item.Detail = c.Status, c.CancelRequested, c.Detail
		}
		return item, err
	}
	done, err := s.retry(r.Context(), x, b.Reason)
	if f, ok := done.body.(forkResponse); ok {
		item.TraceID, item.ExecutionID, item.Status = f.TraceID, f.ID, f.Status
	}
	return item, err
}

// describe returns the number of successes, and the reasons of the first requested cancel and the first rejection.
func (b bulkResponse) describe(action string) string {
	verb := map[string]string{"retry": "retried", "cancel": "cancelled"}[action]
	requested := slices.DeleteFunc(slices.Clone(b.Items), func(i bulkItem) bool { return !i.CancelRequested })
	text := fmt.Sprintf("%d of %d executions %s.", b.Done-len(requested), len(b.Items), verb)
	if len(requested) > 0 {
		text += fmt.Sprintf(" %d requested: %s", len(requested), requested[0].Detail)
	}
	if b.Refused == 0 {
		return text
	}
	first := b.Items[slices.IndexFunc(b.Items, func(i bulkItem) bool { return i.Error != "" })]
	return fmt.Sprintf("%s %d refused, the first because: %s", text, b.Refused, first.Error)
}
