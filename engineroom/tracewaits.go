package engineroom

import (
	"context"
	"fmt"
	"hash/fnv"
	"net/url"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/redact"
)

// tracedWait is a time in which a run did nothing but wait.
type tracedWait struct {
	ExecutionID, Step string
	Event, Kind       string
	From              time.Time
	To                *time.Time // nil while it goes on
	Until             *time.Time // its deadline, while it goes on
	TimedOut          bool
	Key               string // what is waited for: an approval, an execution, a lane, the key of an event
	Guessed           bool   // its beginning is not recorded
	Standing          bool   // in the queue of a lane, with its process
}

// waitKindOf is the kind of wait that an event ends.
var waitKindOf = map[string]string{
	"MESSAGE_RECEIVED": "response", "AGENT_COMPLETED": "agent", "DOCUMENT_UPLOADED": "document", "SIGNATURE_COMPLETED": "signature",
	"TEST_COMPLETED": "test", "EVENT_COMPLETED": "event", "SCHEDULE_REACHED": "delay", "APPROVAL_DECIDED": "approval", "LANE_FREED": "lane",
}

// waitWords say what is waited for.
var waitWords = map[string]string{
	"response": "a message", "agent": "another run", "document": "documents", "signature": "a signature", "test": "a test",
	"event": "an event", "delay": "time to pass", "approval": "an approval", "lane": "a lane",
}

// About says what is waited for.
func (w tracedWait) About() string { return waitWords[w.Kind] }

// elementID stays the same when the wait ends.
func (w tracedWait) elementID() string {
	place := "step " + w.Step
	if w.Standing {
		place = "lane " + w.Key
	}
	sum := fnv.New64a()
	_, _ = sum.Write([]byte(place)) // never fails
	return fmt.Sprintf("wait-%s-%x", w.ExecutionID, sum.Sum64())
}

// waitsOf are the waits of runs: those that are over, those that go on, and the places in queues of lanes.
//
// The end of a wait is a checkpoint, the beginning of one that goes on is in the execution's row. The beginning of one
// that is over is not recorded: it is taken to be when the run last wrote something before.
func (room *Room) waitsOf(ctx context.Context, runs []tracedRun) ([]tracedWait, error) {
	var parked, standing []string
	began := map[string]time.Time{}
	var waits []tracedWait
	for _, r := range runs {
		began[r.ID] = r.began()
		if r.WaitNumber > 0 {
			parked = append(parked, r.ID)
		}
		switch r.Status {
		case "running":
			standing = append(standing, fmt.Sprintf("%s#%d", r.ID, r.Claim))
		case "waiting":
			waits = append(waits, tracedWait{
				ExecutionID: r.ID, Step: text(r.WaitingStep), Kind: text(r.WaitingFor), Key: redact.Text(text(r.WaitingKey), 300),
				From: r.UpdatedAt, Until: r.WaitingUntil,
			})
		}
	}
	over, err := room.pastWaits(ctx, parked, began)
	if err != nil || len(standing) == 0 {
		return append(over, waits...), err
	}
	queued, err := room.standingWaits(ctx, standing)
	return append(append(over, waits...), queued...), err
}

// text is what a pointer points to; empty when it is nil.
func text(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}

// pastWaits are the waits of runs that are over.
func (room *Room) pastWaits(ctx context.Context, runs []string, began map[string]time.Time) ([]tracedWait, error) {
	if len(runs) == 0 {
		return nil, nil
	}
	rows, err := room.Read.Query(ctx, `
		select w.execution_id::text, left(w.step, 300) as step, left(w.event, 100) as event, w.timed_out, w.ended,
		       left(coalesce(v.key, ''), 300) as key, greatest(w.before, a.before) as before
		  from (select c.execution_id, c.step, c.ended, c.before, c.output ->> 'event' as event,
		               c.output ->> 'timed_out' = 'true' as timed_out, lanekeeper.agent_uuid(c.output ->> 'event_id') as event_id
		          from (select k.execution_id, k.step, k.created_at as ended, k.output,
		                       lag(k.created_at) over (partition by k.execution_id order by k.created_at) as before
		                  from (select x.execution_id, x.step, x.created_at, x.output from agent_checkpoints x
		                         where x.execution_id = any (@runs::text[]::uuid[]) limit @scan) k) c
		         where case when pg_column_size(c.output) < 65536     -- what is larger is the result of a step, and stays where it is
		                    then jsonb_typeof(c.output) = 'object' and c.output ?& array['event', 'timed_out'] else false end
		         order by c.ended limit @most) w
		  left join agent_events v on v.id = w.event_id
		 cross join lateral (
		       select max(case when b.finished_at <= w.ended then b.finished_at else b.created_at end) as before
		         from (select y.created_at, y.finished_at from agent_activity y
		                where y.execution_id = w.execution_id and y.id < lanekeeper.agent_uuid7_floor(w.ended) and y.created_at <= w.ended
		                order by y.id desc limit 5) b) a
		 order by w.ended`,
		freshPlan, postgres.Strict{"runs": runs, "scan": tracePoints, "most": traceWaits})
	if err != nil {
		return nil, fmt.Errorf("list waits of trace: %w", err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowToStructByName[struct {
		ExecutionID, Step, Event, Key string
		TimedOut                      bool
		Ended                         time.Time
		Before                        *time.Time
	}])
	if err != nil {
		return nil, fmt.Errorf("list waits of trace: %w", err)
	}
	waits := make([]tracedWait, 0, len(list))
	for _, l := range list {
		kind, is := waitKindOf[l.Event]
		if !is {
			continue // the result of a step that happens to look like the end of a wait
		}
		from := began[l.ExecutionID]
		if l.Before != nil && l.Before.After(from) {
			from = *l.Before
		}
		if from.After(l.Ended) {
			from = l.Ended
		}
		waits = append(waits, tracedWait{
			ExecutionID: l.ExecutionID, Step: l.Step, Event: l.Event, Kind: kind, From: from, To: new(l.Ended),
			TimedOut: l.TimedOut, Key: redact.Text(l.Key, 300), Guessed: true,
		})
	}
	return waits, nil
}

// standingWaits are the places that runs have in queues of lanes now. They hold a process, and leave no record.
func (room *Room) standingWaits(ctx context.Context, owners []string) ([]tracedWait, error) {
	rows, err := room.Read.Query(ctx, `
		select left(w.owner, 36) as execution_id, w.lane, w.since from agent_lock_waiters w
		 where w.owner = any (@owners) order by w.since limit @most`,
		freshPlan, postgres.Strict{"owners": owners, "most": traceWaits})
	if err != nil {
		return nil, fmt.Errorf("list places in queues: %w", err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowToStructByName[struct {
		ExecutionID, Lane string
		Since             time.Time
	}])
	if err != nil {
		return nil, fmt.Errorf("list places in queues: %w", err)
	}
	waits := make([]tracedWait, len(list))
	for i, l := range list {
		waits[i] = tracedWait{ExecutionID: l.ExecutionID, Kind: "lane", Key: l.Lane, From: l.Since, Standing: true}
	}
	return waits, nil
}

// Took is how long it lasted in few characters; empty while it goes on.
func (w tracedWait) Took() string {
	if w.To == nil {
		return ""
	}
	return lasting(w.To.Sub(w.From))
}

// Link is the page of what is waited for; empty when it has none.
func (w tracedWait) Link() string {
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
