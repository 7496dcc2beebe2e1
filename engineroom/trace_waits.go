package engineroom

import (
	"context"
	"fmt"
	"net/url"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/human"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/redact"
)

// traceWaits is the limit for each of a trace's ended waits, queue positions and lost claims.
const traceWaits = 200

// spanWait is a wait of a run.
type spanWait struct {
	ExecutionID, Step string
	Event, Kind       string
	From              time.Time
	To                *time.Time // nil while it lasts
	Until             *time.Time // its deadline, while it lasts
	TimedOut          bool
	Key               string // of the awaited approval, execution, lane or event
	Queued            bool   // in the queue of a lane, with its process
}

// waitWords name the object of each kind of wait.
var waitWords = map[string]string{
	"response": "a message", "agent": "another run", "document": "documents", "signature": "a signature", "test": "a test",
	"event": "an event", "delay": "time to pass", "approval": "an approval", "lane": "a lane",
}

// About names the wait's object.
func (w spanWait) About() string { return waitWords[w.Kind] }

// elementID returns an id that stays the same when the wait ends.
func (w spanWait) elementID() string {
	place := "step " + w.Step
	if w.Queued {
		place = "lane " + w.Key
	}
	return elementID("wait-"+w.ExecutionID, place)
}

// waitsOf reads the past and present waits of runs, and their positions in the queues of lanes.
func (room *Room) waitsOf(ctx context.Context, runs []traceRun) ([]spanWait, error) {
	var waited, queued []string
	var waits []spanWait
	for _, r := range runs {
		if r.WaitNumber > 0 {
			waited = append(waited, r.ID)
		}
		switch r.Status {
		case "running":
			queued = append(queued, fmt.Sprintf("%s#%d", r.ID, r.Claim))
		case "waiting":
			waits = append(waits, spanWait{
				ExecutionID: r.ID, Step: postgres.Deref(r.WaitingStep), Kind: postgres.Deref(r.WaitingFor),
				Key: redact.Text(postgres.Deref(r.WaitingKey), 300), From: r.UpdatedAt, Until: r.WaitingUntil,
			})
		}
	}
	past, err := room.pastWaits(ctx, waited)
	if err != nil || len(queued) == 0 {
		return append(past, waits...), err
	}
	queuedWaits, err := room.queuedWaits(ctx, queued)
	return append(append(past, waits...), queuedWaits...), err
}

// pastWaits reads the ended waits of runs.
func (room *Room) pastWaits(ctx context.Context, runs []string) ([]spanWait, error) {
	if len(runs) == 0 {
		return nil, nil
	}
	list, err := postgres.Rows[struct {
		ExecutionID, Step, Event, Kind, Key string
		TimedOut                            bool
		Since                               *time.Time
		Ended                               time.Time
	}](ctx, room.Read, "list waits of trace", `
		select r.id::text as execution_id, left(c.step, 300) as step, left(coalesce(c.event, ''), 100) as event,
		       c.kind, left(coalesce(c.key, ''), 300) as key, c.timed_out, c.since, c.until as ended
		  from unnest(@runs::text[]::uuid[]) r (id) cross join lateral lanekeeper.agent_past_waits(r.id) c
		 order by c.until limit @limit`,
		customPlan, postgres.Strict{"runs": runs, "limit": traceWaits})
	if err != nil {
		return nil, err
	}
	waits := make([]spanWait, len(list))
	for i, l := range list {
		from := l.Ended
		if l.Since != nil && l.Since.Before(from) {
			from = *l.Since
		}
		waits[i] = spanWait{
			ExecutionID: l.ExecutionID, Step: l.Step, Event: l.Event, Kind: l.Kind, From: from, To: new(l.Ended),
			TimedOut: l.TimedOut, Key: redact.Text(l.Key, 300),
		}
	}
	return waits, nil
}

// queuedWaits reads the positions of runs in the queues of lanes. Such a wait occupies a process and leaves no record.
func (room *Room) queuedWaits(ctx context.Context, owners []string) ([]spanWait, error) {
	rows, err := room.Read.Query(ctx, `
		select left(w.owner, 36) as execution_id, w.lane, w.since from agent_lock_waiters w
		 where w.owner = any (@owners) order by w.since limit @limit`,
		customPlan, postgres.Strict{"owners": owners, "limit": traceWaits})
	list, err := postgres.Collect(rows, err, "list queue positions", pgx.RowToStructByName[struct {
		ExecutionID, Lane string
		Since             time.Time
	}])
	if err != nil {
		return nil, err
	}
	waits := make([]spanWait, len(list))
	for i, l := range list {
		waits[i] = spanWait{ExecutionID: l.ExecutionID, Kind: "lane", Key: l.Lane, From: l.Since, Queued: true}
	}
	return waits, nil
}

// Took returns the formatted duration; empty while the wait lasts.
func (w spanWait) Took() string {
	if w.To == nil {
		return ""
	}
	return human.Duration(w.To.Sub(w.From))
}

// Link returns the page of the wait's object; empty if there is none.
func (w spanWait) Link() string {
	switch {
	case w.Key == "":
	case w.Kind == "approval":
		return "/approvals/" + url.PathEscape(w.Key)
	case w.Kind == "agent":
		return "/executions/" + url.PathEscape(w.Key)
	case w.Kind == "response":
		return "/threads/" + url.PathEscape(w.Key)
	case w.Kind == "lane":
		return "/lanes"
	}
	return ""
}
