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
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/trace"
)

// watchWindow is how far back a watcher searches for turns.
const watchWindow = 10 * time.Minute

// WatchHandler serves GET /v1/operate/watch: the events of Watch, until the client disconnects or the process shuts
// down.
func (o *Operate) WatchHandler() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithCancelCause(r.Context())
		defer cancel(nil)
		stream := newEventStream(w, cancel)
		defer stream.keepAlive(o.KeepAlive)()
		err := o.Watch(ctx, stream.sendEvent)
		switch {
		case err == nil || ctx.Err() != nil:
		case !stream.started():
			problem.Write(w, r, err, "", o.log)
		default:
			stream.sendEvent(Event{"error", toProblem(err, "")})
		}
	})
}

// Watch reports the active admins until ctx ends or the process shuts down, read only: lane events when the holder
// changes, and the events of their turns. Text arrives at the end of each model call. It begins with the running turn.
func (o *Operate) Watch(ctx context.Context, emit func(Event)) error {
	w := &watcher{
		o: o, emit: emit, openTraces: map[string]bool{}, openTurns: map[string]bool{}, statuses: map[string]activity.Status{},
		shownApprovals: map[string]bool{},
	}
	for ctx.Err() == nil {
		if err := w.poll(ctx); err != nil && ctx.Err() == nil {
			return fmt.Errorf("watch: %w", err)
		}
		if o.isDraining() {
			return nil
		}
		o.sleep(ctx, o.Poll, nil)
	}
	return nil
}

// watcher stores what was already reported.
type watcher struct {
	o              *Operate
	emit           func(Event)
	holder         string
	started        bool
	openTraces     map[string]bool            // known traces; false once their turn has ended
	openTurns      map[string]bool            // reported executions; false once they have ended
	statuses       map[string]activity.Status // reported status of each activity
	shownApprovals map[string]bool            // reported approvals
}

// poll reports what is new.
func (w *watcher) poll(ctx context.Context) error {
	holder, err := w.o.Holder(ctx)
	if err != nil {
		return err
	}
	if !w.started || holder.Holder != w.holder {
		w.holder = holder.Holder
		w.emit(Event{"lane", holder})
	}
	first := !w.started
	w.started = true
	traces, err := w.activeTraces(ctx)
	if err != nil {
		return err
	}
	for _, id := range traces {
		turns, err := executions.List(ctx, w.o.Pool, executions.Filter{
			TraceIDs: []trace.ID{trace.ID(id)},
			Flow:     Flow, Limit: 1,
		})
		if err != nil {
			return err
		}
		if len(turns) == 0 {
			w.openTraces[id] = false // its activities belong to no turn
		}
		for _, x := range turns {
			if err := w.reportTurn(ctx, x, first); err != nil {
				return err
			}
		}
	}
	return nil
}

// activeTraces lists the traces of running and recent turns, oldest first. It reads only the newest rows of the log.
func (w *watcher) activeTraces(ctx context.Context) ([]string, error) {
	rows, _, err := activity.Recent(ctx, w.o.Pool, activity.Filter{
		Surface: string(trace.Operate), Since: time.Now().Add(-watchWindow), Limit: activity.MaxLimit,
	})
	if err != nil {
		return nil, err
	}
	var ids []string
	for id, open := range w.openTraces {
		if open {
			ids = append(ids, id)
		}
	}
	for _, row := range rows {
		if _, known := w.openTraces[row.TraceID]; !known {
			w.openTraces[row.TraceID] = true
			ids = append(ids, row.TraceID)
		}
	}
	slices.Sort(ids) // a trace id begins with its time
	return ids, nil
}

// reportTurn reports what is new in a turn. It skips a turn that had ended before the watch.
func (w *watcher) reportTurn(ctx context.Context, x executions.Execution, first bool) error {
	open, known := w.openTurns[x.ID]
	switch {
	case known && !open:
		return nil
	case !known && first && x.Status.Ended():
		w.openTurns[x.ID], w.openTraces[x.TraceID] = false, false
		return nil
	case !known:
		w.openTurns[x.ID] = true
		w.emit(Event{"start", Start{x.TraceID, postgres.Deref(x.ThreadID), x.ID}})
	}
	if err := w.reportActivities(ctx, x); err != nil {
		return err
	}
	if x.Status.Ended() {
		w.openTurns[x.ID], w.openTraces[x.TraceID] = false, false
		w.reportOutcome(ctx, x)
	}
	return nil
}

// reportActivities reports a turn's new activities. It reads them after the turn's row, so an ended turn has no later
// ones. It reads the newest activity.MaxLimit: older ones that no poll has seen are not reported.
func (w *watcher) reportActivities(ctx context.Context, x executions.Execution) error {
	rows, _, err := activity.Recent(ctx, w.o.Pool, activity.Filter{
		TraceID: x.TraceID, Kinds: []activity.Kind{activity.KindCall, activity.KindModel}, Limit: activity.MaxLimit,
	})
	if err != nil {
		return err
	}
	for _, row := range slices.Backward(rows) {
		before, known := w.statuses[row.ID]
		if known && before == row.Status {
			continue
		}
		w.statuses[row.ID] = row.Status
		w.reportActivity(row)
	}
	return w.reportApprovals(ctx, x)
}

func (w *watcher) reportActivity(row activity.Row) {
	if row.Kind == activity.KindModel {
		if text := modelText(row); text != "" {
			w.emit(Event{"delta", Delta{text}})
		}
		return
	}
	w.emit(Event{"tool", toolCallFromRow(row)})
}

// modelText is the text of a successful model call.
func modelText(row activity.Row) string {
	var output struct {
		Content string `json:"content"`
	}
	if row.Status != activity.Success || json.Unmarshal(row.Output, &output) != nil {
		return ""
	}
	return output.Content
}

// toolCallFromRow is the event of a call in the activity log.
func toolCallFromRow(row activity.Row) ToolCall {
	c := ToolCall{
		ID: row.ID, Name: redact.Text(row.SkillName, 200), Arguments: redact.JSON(row.Input, maxEvent),
		Status:     string(row.Status),
		DurationMS: row.DurationMS, Error: redact.Text(postgres.Deref(row.ErrorMessage), maxEvent),
	}
	if row.Status == activity.Running {
		c.Status = "started"
	} else if c.Error == "" {
		c.Result = redact.JSON(row.Output, maxEvent)
	}
	return c
}

// reportApprovals reports the pending approvals of the turn and of its delegated tasks.
func (w *watcher) reportApprovals(ctx context.Context, x executions.Execution) error {
	if kind := postgres.Deref(x.WaitingFor); x.Status != executions.Waiting || kind != "approval" && kind != "agent" {
		return nil
	}
	waiting, err := approvals.List(ctx, w.o.Pool,
		approvals.Filter{TraceIDs: []trace.ID{trace.ID(x.TraceID)}, Status: "pending"})
	if err != nil {
		return err
	}
	for _, a := range slices.Backward(waiting) {
		if !w.shownApprovals[a.ID] {
			w.shownApprovals[a.ID] = true
			w.emit(Event{"approval", newApproval(a)})
		}
	}
	return nil
}

func (w *watcher) reportOutcome(ctx context.Context, x executions.Execution) {
	s := Session{o: w.o, id: postgres.Deref(x.ThreadID)}
	done, err := s.readOutcome(ctx, Done{TraceID: x.TraceID, ExecutionID: x.ID, SessionID: s.id}, x)
	if err != nil {
		w.emit(Event{"error", toProblem(err, x.TraceID)})
		return
	}
	done.Ended = cmp.Or(done.Ended, string(x.Status))
	w.emit(Event{"done", done})
}
