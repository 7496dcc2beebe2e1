package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/internal/sse"
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
	// Change numbers the statuses of a run of a worker outside, which are all kept; 0 for other runs.
	Change int `json:"-"`
}

// mark tells two states of an execution apart; it is the event's id.
func (e statusEvent) mark() string {
	if e.Change > 0 {
		return fmt.Sprintf("%d-%s", e.Change, e.Status)
	}
	return fmt.Sprintf("%d-%d-%s", e.Claim, e.WaitNumber, e.Status)
}

// followExecution streams the status of an execution: first the present one, then each change, until it is
// terminal. A client that comes back is told first what it has missed, where that is known. One that has seen the
// end already gets 204, at which browsers stop asking.
func (s *server) followExecution(w http.ResponseWriter, r *http.Request) {
	in, err := accepted(r, route{access: Admin})
	var x executions.Execution
	if err == nil {
		x, err = s.execution(in)
	}
	var found map[string]statusEvent
	if err == nil {
		found, err = s.watch.read(r.Context(), []string{x.ID})
	}
	now, is := found[x.ID]
	if err == nil && !is {
		err = fmt.Errorf("execution %s: %w", x.ID, executions.ErrNotFound)
	}
	if err != nil {
		problem.Write(w, r, err, "", s.log)
		return
	}
	w.Header().Set("X-Trace-Id", x.TraceID)
	last := r.Header.Get("Last-Event-ID")
	if now.Status.Ended() && last == now.mark() {
		w.WriteHeader(http.StatusNoContent)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("X-Accel-Buffering", "no")
	if err := s.tell(r.Context(), w, now, seen(last, now.Change)); err != nil {
		s.log.DebugContext(r.Context(), "stream of an execution ended", "path", problem.Path(r), "error", err)
	}
}

// seen is the change up to which a client has seen an execution whose present one is given. One that has missed nothing
// or does not say is told the present one.
func seen(lastEventID string, present int) int {
	number, _, _ := strings.Cut(lastEventID, "-")
	if n, err := strconv.Atoi(number); err == nil && n >= 0 && n < present {
		return n
	}
	return present - 1
}

// tell sends states until one is terminal, the execution is gone, or ctx ends. Changes up to and with after are not told.
func (s *server) tell(ctx context.Context, w http.ResponseWriter, now statusEvent, after int) error {
	updates, leave := s.watch.join(ctx, now.ID)
	defer leave()
	alive := time.NewTicker(quiet)
	defer alive.Stop()
	control := http.NewResponseController(w)
	sent := ""
	for {
		if mark := now.mark(); mark != sent {
			news, err := s.news(ctx, now, after)
			if err != nil {
				return err
			}
			for _, e := range news {
				if err := send(w, e); err != nil {
					return err
				}
			}
			sent, after = mark, now.Change
		}
		if err := control.Flush(); err != nil {
			return err
		}
		if now.Status.Ended() {
			return nil
		}
		select {
		case <-ctx.Done():
			return again(ctx, w, control)
		case <-alive.C:
			if _, err := w.Write(sse.Comment(nil, "alive")); err != nil {
				return err
			}
		case now = <-updates:
			if now.ID == "" {
				return nil
			}
		}
	}
}

// again tells a follower, when this process goes down, that it need not wait long before it asks another.
func again(ctx context.Context, w http.ResponseWriter, control *http.ResponseController) error {
	if !errors.Is(context.Cause(ctx), executions.ErrDraining) {
		return nil
	}
	if _, err := w.Write(sse.Again(nil, time.Second)); err != nil {
		return err
	}
	return control.Flush()
}

// send writes one event.
func send(w http.ResponseWriter, e statusEvent) error {
	data, err := json.Marshal(inUTC(e))
	if err != nil {
		return err
	}
	_, err = w.Write(sse.Event{ID: e.mark(), Name: "status", Data: string(data)}.Append(nil))
	return err
}

// news is what led to the state that an execution has now: every change where they are kept, else that state alone.
func (s *server) news(ctx context.Context, now statusEvent, after int) ([]statusEvent, error) {
	if now.Change == 0 {
		return []statusEvent{now}, nil
	}
	rows, err := s.pool.Query(ctx, `
		select n, status, waiting_for, at from agent_status_changes
		 where execution_id = @id and n > @after and n <= @upto order by n`,
		postgres.Strict{"id": now.ID, "after": after, "upto": now.Change})
	if err != nil {
		return nil, fmt.Errorf("read status changes: %w", err)
	}
	list, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (statusEvent, error) {
		e := statusEvent{ID: now.ID, TraceID: now.TraceID}
		return e, row.Scan(&e.Change, &e.Status, &e.WaitingFor, &e.At)
	})
	if err != nil {
		return nil, fmt.Errorf("read status changes: %w", err)
	}
	return list, nil
}
