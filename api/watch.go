package api

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

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
