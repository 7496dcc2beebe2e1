package api

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"time"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/problem"
)

// quiet is after how long a stream shows that it lives.
const quiet = 15 * time.Second

// statusEvent is what followers of an execution are told.
type statusEvent struct {
	ID         string            `json:"id"`
	TraceID    string            `json:"trace_id"`
	Status     executions.Status `json:"status"`
	WaitingFor *string           `json:"waiting_for"`
	At         time.Time         `json:"at"`
	Claim      int64             `json:"-"`
	WaitNumber int               `json:"-"`
}

// mark tells two states of an execution apart; it is the event's id.
func (e statusEvent) mark() string { return fmt.Sprintf("%d-%d-%s", e.Claim, e.WaitNumber, e.Status) }

// followExecution streams the status of an execution: first the present one, then each change, until it is
// terminal. A client that has seen the end already gets 204, at which browsers stop asking.
func (s *server) followExecution(w http.ResponseWriter, r *http.Request) {
	in, err := accepted(r, route{access: Admin})
	var x executions.Execution
	if err == nil {
		x, err = s.execution(in)
	}
	if err != nil {
		problem.Write(w, r, err, "", s.log)
		return
	}
	now := statusEvent{x.ID, x.TraceID, x.Status, x.WaitingFor, x.UpdatedAt, x.Claim, x.WaitNumber}
	w.Header().Set("X-Trace-Id", x.TraceID)
	if now.Status.Ended() && r.Header.Get("Last-Event-ID") == now.mark() {
		w.WriteHeader(http.StatusNoContent)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("X-Accel-Buffering", "no")
	if err := s.tell(r.Context(), w, now); err != nil {
		s.log.DebugContext(r.Context(), "client went away", "path", r.URL.Path, "error", err)
	}
}

// tell sends states until one is terminal, the execution is gone, or ctx ends.
func (s *server) tell(ctx context.Context, w http.ResponseWriter, now statusEvent) error {
	updates, leave := s.watch.join(ctx, now.ID)
	defer leave()
	alive := time.NewTicker(quiet)
	defer alive.Stop()
	control := http.NewResponseController(w)
	sent := ""
	for {
		if mark := now.mark(); mark != sent {
			sent = mark
			data, err := json.Marshal(inUTC(now))
			if err != nil {
				return err
			}
			if _, err := fmt.Fprintf(w, "id: %s\nevent: status\ndata: %s\n\n", mark, data); err != nil {
				return err
			}
		}
		if err := control.Flush(); err != nil {
			return err
		}
		if now.Status.Ended() {
			return nil
		}
		select {
		case <-ctx.Done():
			return nil
		case <-alive.C:
			if _, err := fmt.Fprint(w, ": alive\n\n"); err != nil {
				return err
			}
		case now = <-updates:
			if now.ID == "" {
				return nil
			}
		}
	}
}
