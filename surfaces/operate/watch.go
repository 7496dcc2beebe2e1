package operate

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"time"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/approvals"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/trace"
)

// watchBack is how far back a watcher looks for turns that it has not met.
const watchBack = 10 * time.Minute

// Holder is who has the lane.
type Holder struct {
	Lane      string   `json:"lane"`
	Held      bool     `json:"held"`
	Holder    string   `json:"holder,omitempty"`
	TraceID   string   `json:"trace_id,omitempty"`
	SessionID string   `json:"session_id,omitempty"`
	HeldFor   float64  `json:"held_for,omitempty"`   // seconds
	ExpiresIn *float64 `json:"expires_in,omitempty"` // seconds, unless it is renewed
}

// Holder says who has the lane now.
func (o *Operate) Holder(ctx context.Context) (Holder, error) {
	h := Holder{Lane: Lane}
	live, err := lanes.Live(ctx, o.Pool)
	if err != nil {
		return h, err
	}
	for _, l := range live {
		if l.Lane != Lane {
			continue
		}
		h.Held, h.Holder, h.TraceID, h.HeldFor, h.ExpiresIn = true, l.LockedBy, deref(l.TraceID), l.HeldFor, l.ExpiresIn
		if h.TraceID == "" {
			return h, nil
		}
		turns, err := executions.List(ctx, o.Pool, executions.Filter{TraceIDs: []trace.ID{trace.ID(h.TraceID)}, Flow: Flow, Limit: 1})
		if err == nil && len(turns) > 0 {
			h.SessionID = deref(turns[0].ThreadID)
		}
		return h, err
	}
	return h, nil
}

// Explain says who is in the way, for people.
func (o *Operate) Explain(ctx context.Context, busy *lanes.BusyError) string {
	text := busy.Error()
	h, err := o.Holder(ctx)
	if err != nil || !h.Held {
		return text
	}
	if h.SessionID != "" {
		text += " (session " + h.SessionID + ")"
	}
	return text + fmt.Sprintf("; at work for %s", time.Duration(h.HeldFor*float64(time.Second)).Round(time.Second))
}

// RecordSkipped records that a turn of a session was not taken, because another admin is at work, as a skipped activity
// with the holder under a trace of its own.
func (o *Operate) RecordSkipped(ctx context.Context, session string, busy *lanes.BusyError) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	_, err := activity.Note(ctx, o.Pool, activity.Entry{
		TraceID: string(trace.New(trace.Operate)), Surface: string(trace.Operate), Agent: o.Agent, Skill: Flow, Lane: busy.Lane,
		Input: map[string]string{"session": session, "lane": busy.Lane, "holder": busy.Holder},
	}, activity.Outcome{Status: activity.Skipped, Output: busy.Error()})
	if err != nil {
		o.log.WarnContext(ctx, "skipped turn not recorded", "session", session, "holder", busy.Holder, "error", err)
	}
}

// WatchHandler answers GET /v1/operate/watch: what Watch shows, as server-sent events, until the client leaves or the
// process shuts down.
func (o *Operate) WatchHandler() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ctx, leave := context.WithCancelCause(r.Context())
		defer leave(nil)
		out := newStream(w, leave)
		defer out.keepAlive(o.KeepAlive)()
		err := o.Watch(ctx, out.event)
		switch {
		case err == nil || ctx.Err() != nil:
		case !out.opened():
			problem.Write(w, r, err, "", o.log)
		default:
			out.event(Event{"error", said(err, "")})
		}
	})
}

// Watch follows the admins at work, read only, until ctx ends: who has the lane (event lane, whenever that changes),
// and the turns taken in it, in the events that the admin sees, except that text comes with the end of each model
// call. It begins with the turn that is under way.
func (o *Operate) Watch(ctx context.Context, emit func(Event)) error {
	w := &watcher{o: o, emit: emit, open: map[string]bool{}, turns: map[string]bool{}, seen: map[string]activity.Status{}, asked: map[string]bool{}}
	for ctx.Err() == nil {
		if err := w.look(ctx); err != nil && ctx.Err() == nil {
			return fmt.Errorf("watch: %w", err)
		}
		if o.draining() {
			return nil
		}
		o.pause(ctx, o.Poll, nil)
	}
	return nil
}

// watcher remembers what it has shown.
type watcher struct {
	o      *Operate
	emit   func(Event)
	holder string
	began  bool
	open   map[string]bool            // traces that were met; false once their turn was seen to have ended
	turns  map[string]bool            // executions begun and not ended, as far as was shown
	seen   map[string]activity.Status // activities of those
	asked  map[string]bool            // approvals
}

// look shows what is new.
func (w *watcher) look(ctx context.Context) error {
	holder, err := w.o.Holder(ctx)
	if err != nil {
		return err
	}
	if !w.began || holder.Holder != w.holder {
		w.holder = holder.Holder
		w.emit(Event{"lane", holder})
	}
	first := !w.began
	w.began = true
	traces, err := w.traces(ctx)
	if err != nil {
		return err
	}
	for _, id := range traces {
		turns, err := executions.List(ctx, w.o.Pool, executions.Filter{TraceIDs: []trace.ID{trace.ID(id)}, Flow: Flow, Limit: 1})
		if err != nil {
			return err
		}
		if len(turns) == 0 {
			w.open[id] = false // what was done under it is no turn
		}
		for _, x := range turns {
			if err := w.turn(ctx, x, first); err != nil {
				return err
			}
		}
	}
	return nil
}

// traces are those of turns that may have news, oldest first: what is under way, and what has acted lately. Only the
// newest rows of the log are looked at, however long it is.
func (w *watcher) traces(ctx context.Context) ([]string, error) {
	rows, _, err := activity.Recent(ctx, w.o.Pool, activity.Filter{
		Surface: string(trace.Operate), Since: time.Now().Add(-watchBack), Limit: activity.MaxLimit,
	})
	if err != nil {
		return nil, err
	}
	var ids []string
	for id, open := range w.open {
		if open {
			ids = append(ids, id)
		}
	}
	for _, row := range rows {
		if _, known := w.open[row.TraceID]; !known {
			w.open[row.TraceID] = true
			ids = append(ids, row.TraceID)
		}
	}
	slices.Sort(ids) // by the time they were made
	return ids, nil
}

// turn shows what is new in a turn. One that had ended when the watch began is passed over.
func (w *watcher) turn(ctx context.Context, x executions.Execution, first bool) error {
	shown, known := w.turns[x.ID]
	switch {
	case known && !shown:
		return nil
	case !known && first && x.Status.Ended():
		w.turns[x.ID], w.open[x.TraceID] = false, false
		return nil
	case !known:
		w.turns[x.ID] = true
		w.emit(Event{"start", Start{x.TraceID, deref(x.ThreadID), x.ID}})
	}
	if err := w.activities(ctx, x); err != nil {
		return err
	}
	if x.Status.Ended() {
		w.turns[x.ID], w.open[x.TraceID] = false, false
		w.end(x)
	}
	return nil
}

// activities shows what a turn did since the last look. They were read after the turn's row, so that when that says
// it has ended, all of them are there.
func (w *watcher) activities(ctx context.Context, x executions.Execution) error {
	rows, _, err := activity.Recent(ctx, w.o.Pool, activity.Filter{
		TraceID: x.TraceID, Kinds: []activity.Kind{activity.KindCall, activity.KindModel}, Limit: activity.MaxLimit,
	})
	if err != nil {
		return err
	}
	for _, row := range slices.Backward(rows) {
		before, known := w.seen[row.ID]
		if known && before == row.Status {
			continue
		}
		w.seen[row.ID] = row.Status
		w.activity(row)
	}
	return w.approvals(ctx, x)
}

// activity shows one row.
func (w *watcher) activity(row activity.Row) {
	if row.Kind == activity.KindModel {
		var said struct {
			Content string `json:"content"`
		}
		if row.Status == activity.Success && json.Unmarshal(row.Output, &said) == nil && said.Content != "" {
			w.emit(Event{"delta", Delta{said.Content}})
		}
		return
	}
	c := ToolCall{
		ID: row.ID, Name: redact.Text(row.SkillName, 200), Arguments: redact.JSON(row.Input, maxEvent), Status: string(row.Status),
		DurationMS: row.DurationMS, Error: redact.Text(deref(row.ErrorMessage), maxEvent),
	}
	if row.Status == activity.Running {
		c.Status = "started"
	} else if c.Error == "" {
		c.Result = redact.JSON(row.Output, maxEvent)
	}
	w.emit(Event{"tool", c})
}

// approvals shows what a turn waits for.
func (w *watcher) approvals(ctx context.Context, x executions.Execution) error {
	if x.Status != executions.Waiting || deref(x.WaitingFor) != "approval" {
		return nil
	}
	waiting, err := approvals.List(ctx, w.o.Pool, approvals.Filter{TraceIDs: []trace.ID{trace.ID(x.TraceID)}, Status: "pending"})
	if err != nil {
		return err
	}
	for _, a := range slices.Backward(waiting) {
		if !w.asked[a.ID] {
			w.asked[a.ID] = true
			w.emit(Event{"approval", approvalOf(a)})
		}
	}
	return nil
}

// end shows how a turn ended.
func (w *watcher) end(x executions.Execution) {
	s := Session{o: w.o, id: deref(x.ThreadID)}
	done, err := s.outcome(Done{TraceID: x.TraceID, ExecutionID: x.ID, SessionID: s.id}, x)
	if err != nil {
		w.emit(Event{"error", said(err, x.TraceID)})
		return
	}
	done.Ended = cmp.Or(done.Ended, string(x.Status))
	w.emit(Event{"done", done})
}
