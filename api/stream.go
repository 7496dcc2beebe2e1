package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/internal/sse"
)

// keepAliveInterval is the longest silence of a stream.
const keepAliveInterval = 15 * time.Second

// statusEvent is the data of a status event.
type statusEvent struct {
	ID         string            `json:"id"`
	TraceID    string            `json:"trace_id"`
	Status     executions.Status `json:"status"`
	WaitingFor *string           `json:"waiting_for"`
	At         time.Time         `json:"at"`
	Claim      int64             `json:"-"`
	WaitNumber int               `json:"-"`
	// Change numbers the stored status changes of an external execution; 0 for others.
	Change int `json:"-"`
}

// eventID distinguishes two states of an execution.
func (e statusEvent) eventID() string {
	if e.Change > 0 {
		return fmt.Sprintf("%d-%s", e.Change, e.Status)
	}
	return fmt.Sprintf("%d-%d-%s", e.Claim, e.WaitNumber, e.Status)
}

// followExecution streams the status of an execution until it has ended: the current state, then each change. A
// reconnecting client first gets missed changes, where they are stored. A client that has seen the end gets 204, and
// browsers stop reconnecting.
func (s *server) followExecution(w http.ResponseWriter, r *http.Request) {
	in, err := parseRequest(r, route{access: Admin})
	var x executions.Execution
	if err == nil {
		x, err = s.execution(in)
	}
	var found map[string]statusEvent
	if err == nil {
		found, err = s.watcher.read(r.Context(), []string{x.ID})
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
	if now.Status.Ended() && last == now.eventID() {
		w.WriteHeader(http.StatusNoContent)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("X-Accel-Buffering", "no")
	if err := s.stream(r.Context(), w, now, lastSeen(last, now.Change)); err != nil {
		s.log.DebugContext(r.Context(), "stream of an execution ended", "path", problem.Path(r), "error", err)
	}
}

// lastSeen returns the last change the client has seen. A client that missed nothing, or does not say, gets the
// current state.
func lastSeen(lastEventID string, present int) int {
	number, _, _ := strings.Cut(lastEventID, "-")
	if n, err := strconv.Atoi(number); err == nil && n >= 0 && n < present {
		return n
	}
	return present - 1
}

// stream sends states after the given change until a terminal one, a deleted execution, or the end of ctx.
func (s *server) stream(ctx context.Context, w http.ResponseWriter, now statusEvent, after int) error {
	updates, unsubscribe := s.watcher.subscribe(ctx, now.ID)
	defer unsubscribe()
	alive := time.NewTicker(keepAliveInterval)
	defer alive.Stop()
	control := http.NewResponseController(w)
	sent := ""
	for {
		if mark := now.eventID(); mark != sent {
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
	if _, err := w.Write(sse.Again(nil, time.Second)); err != nil {
		return err
	}
	return control.Flush()
}

func sendEvent(w http.ResponseWriter, e statusEvent) error {
	data, err := json.Marshal(inUTC(e))
	if err != nil {
		return err
	}
	_, err = w.Write(sse.Event{ID: e.eventID(), Name: "status", Data: string(data)}.Append(nil))
	return err
}

// changesAfter returns the stored changes up to the current state, or only that state.
func (s *server) changesAfter(ctx context.Context, now statusEvent, after int) ([]statusEvent, error) {
	if now.Change == 0 {
		return []statusEvent{now}, nil
	}
	rows, err := s.pool.Query(ctx, `
		select n, status, waiting_for, at from agent_status_changes
		 where execution_id = @id and n > @after and n <= @upto order by n`,
		postgres.Strict{"id": now.ID, "after": after, "upto": now.Change})
	return postgres.Collect(rows, err, "read status changes", func(row pgx.CollectableRow) (statusEvent, error) {
		e := statusEvent{ID: now.ID, TraceID: now.TraceID}
		return e, row.Scan(&e.Change, &e.Status, &e.WaitingFor, &e.At)
	})
}

// watchInterval is the pause between polls of followed executions.
const watchInterval = 250 * time.Millisecond

// statusWatcher polls all followed executions in one query. Its goroutine runs only while there are followers.
type statusWatcher struct {
	db  postgres.DB
	log *slog.Logger

	mu        sync.Mutex
	followers map[string]map[chan statusEvent]struct{} // by execution
	stop      func()                                   // ends the goroutine and waits; nil without one
}

// subscribe follows an execution. The channel holds the latest state; a zero value means the execution is gone. The
// caller must call unsubscribe.
func (h *statusWatcher) subscribe(ctx context.Context, id string) (updates <-chan statusEvent, unsubscribe func()) {
	ch := make(chan statusEvent, 1)
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.followers == nil {
		h.followers = map[string]map[chan statusEvent]struct{}{}
	}
	if h.followers[id] == nil {
		h.followers[id] = map[chan statusEvent]struct{}{}
	}
	h.followers[id][ch] = struct{}{}
	if h.stop == nil {
		h.start(context.WithoutCancel(ctx))
	}
	return ch, func() { h.unsubscribe(id, ch) }
}

func (h *statusWatcher) start(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		h.run(ctx)
	}()
	h.stop = func() {
		cancel()
		<-done
	}
}

func (h *statusWatcher) unsubscribe(id string, ch chan statusEvent) {
	h.mu.Lock()
	delete(h.followers[id], ch)
	if len(h.followers[id]) == 0 {
		delete(h.followers, id)
	}
	var stop func()
	if len(h.followers) == 0 {
		stop, h.stop = h.stop, nil
	}
	h.mu.Unlock()
	if stop != nil {
		stop()
	}
}

func (h *statusWatcher) run(ctx context.Context) {
	tick := time.NewTicker(watchInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		ids := h.ids()
		found, err := h.read(ctx, ids)
		if err != nil {
			if ctx.Err() == nil {
				h.log.WarnContext(ctx, "followed executions not read", "error", err)
			}
			continue
		}
		h.publish(ids, found)
	}
}

func (h *statusWatcher) ids() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	list := make([]string, 0, len(h.followers))
	for id := range h.followers {
		list = append(list, id)
	}
	return list
}

func (h *statusWatcher) read(ctx context.Context, ids []string) (map[string]statusEvent, error) {
	ctx, cancel := context.WithTimeout(ctx, defaultLimits().request)
	defer cancel()
	rows, err := h.db.Query(ctx, `
		select e.id::text, e.trace_id, e.status, e.waiting_for, e.updated_at as at, e.claim, e.wait_number,
		       case when e.outside then coalesce((select max(c.n) from agent_status_changes c where c.execution_id = e.id), 0)
		         else 0 end as change
		  from agent_executions e where e.id = any (@ids::uuid[])`, postgres.Strict{"ids": ids})
	if err != nil {
		return nil, err
	}
	list, err := pgx.CollectRows(rows, pgx.RowToStructByName[statusEvent])
	if err != nil {
		return nil, err
	}
	found := make(map[string]statusEvent, len(list))
	for _, e := range list {
		found[e.ID] = e
	}
	return found, nil
}

// publish replaces an unread state by the latest one.
func (h *statusWatcher) publish(ids []string, found map[string]statusEvent) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, id := range ids {
		for ch := range h.followers[id] {
			select {
			case <-ch:
			default:
			}
			ch <- found[id] // has room: this is the only sender
		}
	}
}
