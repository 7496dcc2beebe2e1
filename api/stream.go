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

// tell sends states until one is terminal, the execution is gone, or ctx ends. Changes up to and with after are not
// told.
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

// watchEvery is how often the executions that are followed are looked at.
const watchEvery = 250 * time.Millisecond

// watch looks at the executions that somebody follows, all in one query however many follow. It works
// while there is a follower, and its goroutine has ended when the last one has left.
type watch struct {
	db  postgres.DB
	log *slog.Logger

	mu        sync.Mutex
	followers map[string]map[chan statusEvent]struct{} // by execution
	stop      func()                                   // ends the goroutine and waits for it; nil without one
}

// join follows an execution. The channel has its latest state, whether it is new or not; the zero value
// says that there is no such execution any more. leave has to be called.
func (h *watch) join(ctx context.Context, id string) (updates <-chan statusEvent, leave func()) {
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
	return ch, func() { h.leave(id, ch) }
}

func (h *watch) start(ctx context.Context) {
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

func (h *watch) leave(id string, ch chan statusEvent) {
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

func (h *watch) run(ctx context.Context) {
	tick := time.NewTicker(watchEvery)
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
				h.log.WarnContext(ctx, "executions that are followed cannot be read", "error", err)
			}
			continue
		}
		h.hand(ids, found)
	}
}

func (h *watch) ids() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	list := make([]string, 0, len(h.followers))
	for id := range h.followers {
		list = append(list, id)
	}
	return list
}

func (h *watch) read(ctx context.Context, ids []string) (map[string]statusEvent, error) {
	ctx, cancel := context.WithTimeout(ctx, usual().request)
	defer cancel()
	rows, err := h.db.Query(ctx, `
		select e.id::text, e.trace_id, e.status, e.waiting_for, e.updated_at as at, e.claim, e.wait_number,
		       case when e.outside then coalesce((select max(c.n) from agent_status_changes c where c.execution_id = e.id), 0) else 0 end as change
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

// hand gives each follower the latest state in place of one that it has not taken yet.
func (h *watch) hand(ids []string, found map[string]statusEvent) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, id := range ids {
		for ch := range h.followers[id] {
			select {
			case <-ch:
			default:
			}
			ch <- found[id] // has room: nobody else sends
		}
	}
}
