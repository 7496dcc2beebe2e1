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

// keepAliveInterval is the longest silence of a stream.
const keepAliveInterval = 15 * time.Second

// eventID distinguishes two states of an execution.
func eventID(e executions.StatusChange) string {
	if e.Change > 0 {
		return fmt.Sprintf("%d-%s", e.Change, e.Status)
	}
	return fmt.Sprintf("%d-%d-%s", e.Claim, e.WaitNumber, e.Status)
}

// followExecution streams the status of an execution until the execution has ended: the current state, then changes.
// External executions have stored changes: the stream has each of them, and a reconnecting client first gets those that
// it missed. Of other executions, it has the latest state of each poll. A client that has seen the end gets 204, and
// browsers stop reconnecting.
func (s *server) followExecution(w http.ResponseWriter, r *http.Request) {
	in, err := parseRequest(r, route{access: Admin, scopes: authenticated})
	var x executions.Execution
	if err == nil {
		x, err = s.execution(in)
	}
	var now executions.StatusChange
	if err == nil {
		now, err = s.engine.CurrentStatus(r.Context(), x.ID)
	}
	if err != nil {
		problem.Write(w, r, err, "", s.log)
		return
	}
	w.Header().Set("X-Trace-Id", x.TraceID)
	last := r.Header.Get("Last-Event-ID")
	if now.Status.Ended() && last == eventID(now) {
		w.WriteHeader(http.StatusNoContent)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("X-Accel-Buffering", "no")
	if err := s.stream(r.Context(), w, now, lastSeen(last, now.Change)); err != nil {
		s.log.DebugContext(r.Context(), "stream of an execution ended", "path", problem.Path(r), "error", err)
	}
}

// lastSeen returns the last change that the client has seen. A client without missed changes, or without Last-Event-ID,
// gets the current state.
func lastSeen(lastEventID string, present int) int {
	number, _, _ := strings.Cut(lastEventID, "-")
	if n, err := strconv.Atoi(number); err == nil && n >= 0 && n < present {
		return n
	}
	return present - 1
}

// stream sends states after the given change until a terminal one, a deleted execution, or the end of ctx.
func (s *server) stream(ctx context.Context, w http.ResponseWriter, now executions.StatusChange, after int) error {
	updates, unsubscribe := s.engine.Watch(ctx, now.ID)
	defer unsubscribe()
	alive := time.NewTicker(keepAliveInterval)
	defer alive.Stop()
	control := http.NewResponseController(w)
	sent := ""
	for {
		if mark := eventID(now); mark != sent {
			changes, err := s.changesAfter(ctx, now, after)
			if err != nil {
				return err
			}
			for _, e := range changes {
				if err := sendEvent(w, e); err != nil {
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
			return sendRetry(ctx, w, control)
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

// sendRetry tells a client at shutdown to reconnect soon.
func sendRetry(ctx context.Context, w http.ResponseWriter, control *http.ResponseController) error {
	if !errors.Is(context.Cause(ctx), executions.ErrDraining) {
		return nil
	}
	if _, err := w.Write(sse.Retry(nil, time.Second)); err != nil {
		return err
	}
	return control.Flush()
}

func sendEvent(w http.ResponseWriter, e executions.StatusChange) error {
	data, err := json.Marshal(inUTC(e))
	if err != nil {
		return err
	}
	_, err = w.Write(sse.Event{ID: eventID(e), Name: "status", Data: string(data)}.Append(nil))
	return err
}

// changesAfter returns the stored changes up to the current state, or only that state.
func (s *server) changesAfter(
	ctx context.Context, now executions.StatusChange, after int,
) ([]executions.StatusChange, error) {
	if now.Change == 0 {
		return []executions.StatusChange{now}, nil
	}
	rows, err := s.pool.Query(ctx, `
		select n, status, waiting_for, at
		  from agent_status_changes
		 where execution_id = @id
		   and n > @after
		   and n <= @upto
		 order by n`,
		postgres.Strict{"id": now.ID, "after": after, "upto": now.Change})
	change := func(row pgx.CollectableRow) (executions.StatusChange, error) {
		e := executions.StatusChange{ID: now.ID, TraceID: now.TraceID}
		return e, row.Scan(&e.Change, &e.Status, &e.WaitingFor, &e.At)
	}
	return postgres.Collect(rows, err, "read status changes", change)
}
