package engineroom

import (
	"context"
	"fmt"
	"hash/fnv"
	"net/url"
	"slices"
	"time"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// stepsShown bounds the recorded steps on a page.
const stepsShown = 40

// recordedStep is a checkpoint.
type recordedStep struct {
	Step      string
	Claim     int64
	Failed    bool
	Output    string
	Bytes     int64
	Event     *string // of a wait's outcome
	TimedOut  bool
	CreatedAt time.Time
}

// entryKind is the kind of an entry. The page's style sheet knows it as the class moment-KIND.
type entryKind string

const (
	kindBegin  entryKind = "begin"  // the execution was created
	kindStatus entryKind = "status" // another change of status, or the omission of earlier changes
	kindStep   entryKind = "step"   // a recorded step
	kindFailed entryKind = "failed" // a failed step, or a wait that timed out
	kindWait   entryKind = "wait"   // a wait that an event ended
	kindClaim  entryKind = "claim"  // a worker claimed the execution again
	kindOpen   entryKind = "open"   // the execution waits
	kindEnd    entryKind = "end"    // the execution ended
)

// timelineEntry is one line of the timeline.
type timelineEntry struct {
	ID     string // of its element
	At     time.Time
	Kind   entryKind
	Label  string
	Step   string
	Claim  int64
	Copied bool // copied from the forked execution
	Output shownValue
	Fork   string // URL of the fork form from here
}

// timeline is a page of an execution's history, oldest first.
type timeline struct {
	Entries         []timelineEntry
	Strip           *strip
	Earlier, Latest string // URLs of other pages
	// Unreachable means that earlier steps exist, but that the page has no address for them.
	Unreachable bool
	Steps       int
}

// executionTimeline reads a page of recorded steps, and merges the execution's changes of status.
func (room *Room) executionTimeline(ctx context.Context, req *pageRequest) (any, error) {
	subject := req.Subject.(executionSubject)
	x, err := room.readExecution(ctx, subject.ID)
	if err != nil {
		return nil, err
	}
	steps, more, err := room.recordedSteps(ctx, subject)
	if err != nil {
		return nil, err
	}
	changes, err := room.statusEntries(ctx, x)
	if err != nil {
		return nil, err
	}
	if more { // the page of the earlier steps has the earlier changes
		first := steps[0].CreatedAt
		changes = slices.DeleteFunc(changes, func(e timelineEntry) bool { return e.At.Before(first) })
	}
	if subject.before != nil {
		changes = slices.DeleteFunc(changes, func(e timelineEntry) bool { return !e.At.Before(subject.before.At) })
	}
	t := timeline{Entries: append(changes, stepEntries(x, steps)...), Steps: len(steps)}
	slices.SortStableFunc(t.Entries, func(a, b timelineEntry) int { return a.At.Compare(b.At) })
	if more {
		cursor := timeCursor{steps[0].CreatedAt, steps[0].Step}.String()
		if t.Unreachable = len(cursor) > maxFilterBytes; !t.Unreachable { // filtersOf rejects a longer cursor
			t.Earlier = "/executions/" + x.ID + "?before=" + url.QueryEscape(cursor) + "#timeline"
		}
	}
	if subject.before != nil {
		t.Latest = "/executions/" + x.ID + "#timeline"
	}
	t.Strip = stripOf(x, t.Entries)
	return t, nil
}

// recordedSteps returns the newest steps before the cursor, oldest first. more reports whether earlier steps exist. It
// reads outputs for the page's steps only, and cuts them. No column tells a wait from a step: an output with the key
// timed_out counts as a wait's outcome, also if a step returned such an object.
func (room *Room) recordedSteps(
	ctx context.Context, subject executionSubject,
) (list []recordedStep, more bool, err error) {
	var at *time.Time
	step := ""
	if subject.before != nil {
		at, step = &subject.before.At, subject.before.Key
	}
	list, err = postgres.Rows[recordedStep](ctx, room.Read, "read recorded steps", `
		select c.step, c.claim, c.failed, left(o.text, 8192) as output, octet_length(o.text) as bytes,
		       case when jsonb_typeof(c.output) = 'object' and c.output ? 'timed_out'
		            then left(c.output ->> 'event', 100) end as event,
		       coalesce(c.output -> 'timed_out' = 'true', false) as timed_out, c.created_at
		  from (select p.step from agent_checkpoints p
		         where p.execution_id = @id and (@at::timestamptz is null or (p.created_at, p.step) < (@at, @step))
		         order by p.created_at desc, p.step desc limit @limit + 1) p
		  join agent_checkpoints c on c.execution_id = @id and c.step = p.step
		 cross join lateral (select coalesce(c.output::text, '') as text) o
		 order by c.created_at desc, c.step desc`, customPlan,
		postgres.Strict{"id": subject.ID, "at": at, "step": step, "limit": stepsShown})
	if err != nil {
		return nil, false, err
	}
	for i := range list {
		hideJSON(activity.HidesTexts(ctx), &list[i].Output, &list[i].Bytes)
	}
	list, more = firstN(list, stepsShown)
	slices.Reverse(list)
	return list, more, nil
}

// stepEntries returns the recorded steps, and inserts an entry where the claim changes.
func stepEntries(x executionRecord, steps []recordedStep) []timelineEntry {
	all := make([]timelineEntry, 0, len(steps))
	var claim int64
	for _, s := range steps {
		m := timelineEntry{
			ID: elementID("step", s.Step), At: s.CreatedAt, Kind: kindStep, Label: "Recorded", Step: s.Step, Claim: s.Claim,
			Copied: x.ForkedFrom != nil && s.CreatedAt.Before(x.CreatedAt),
			Output: shownJSON(s.Output, s.Bytes),
		}
		switch {
		case s.Failed:
			m.Kind, m.Label = kindFailed, "Failed"
		case s.Event != nil && s.TimedOut:
			m.Kind, m.Label = kindFailed, "Wait timed out"
		case s.Event != nil:
			m.Kind, m.Label = kindWait, "Wait ended by "+*s.Event
		}
		if len(s.Step) <= maxFilterBytes {
			m.Fork = "/executions/" + x.ID + "?from=" + url.QueryEscape(s.Step) + "#fork"
		}
		if claim != 0 && s.Claim != claim {
			all = append(all, timelineEntry{
				ID: fmt.Sprintf("claim-%d", s.Claim), At: s.CreatedAt, Kind: kindClaim, Claim: s.Claim,
				Label: fmt.Sprintf("Claimed again (claim %d)", s.Claim),
			})
		}
		if !m.Copied { // copied steps have claim 1 of the fork, which no worker had
			claim = s.Claim
		}
		all = append(all, m)
	}
	return all
}

// elementID returns the id of an HTML element for any name.
func elementID(kind, name string) string {
	h := fnv.New64a()
	_, _ = h.Write([]byte(name)) // never fails
	return fmt.Sprintf("%s-%x", kind, h.Sum64())
}

// statusEntries returns the stored changes of status. The row of an execution stores only some times. An external
// worker's run stores every change, in agent_status_changes.
func (room *Room) statusEntries(ctx context.Context, x executionRecord) ([]timelineEntry, error) {
	if x.IsExternal {
		return room.statusChanges(ctx, x.ID)
	}
	all := []timelineEntry{{ID: "begun", At: x.CreatedAt, Kind: kindBegin, Label: "Created: pending"}}
	if x.StartedAt != nil {
		all = append(all, timelineEntry{
			ID: "claimed-first", At: *x.StartedAt, Kind: kindStatus, Label: "First claimed: running",
		})
	}
	if x.Status == "waiting" {
		all = append(all, timelineEntry{
			ID: "waits-now", At: x.UpdatedAt, Kind: kindOpen,
			Label: fmt.Sprintf("Waits, for the %s time", ordinal(x.WaitNumber)),
		})
	}
	if x.CompletedAt != nil {
		all = append(all, timelineEntry{ID: "ended", At: *x.CompletedAt, Kind: kindEnd, Label: "Ended: " + x.Status})
	}
	return all, nil
}

// maxStatusChanges bounds the changes of status on the timeline of an external worker's run.
const maxStatusChanges = 200

// statusChanges reads the newest stored changes of status. If there are more, a first entry says so.
func (room *Room) statusChanges(ctx context.Context, id string) ([]timelineEntry, error) {
	list, err := postgres.Rows[struct {
		N                  int
		Status, WaitingFor string
		At                 time.Time
	}](ctx, room.Read, "read changes of status", `
		select c.n, c.status, coalesce(c.waiting_for, '') as waiting_for, c.at
		  from agent_status_changes c
		 where c.execution_id = @id
		 order by c.n desc limit @limit + 1`, postgres.Strict{"id": id, "limit": maxStatusChanges})
	if err != nil {
		return nil, err
	}
	list, more := firstN(list, maxStatusChanges)
	entries := make([]timelineEntry, 0, len(list)+1)
	if more {
		entries = append(entries, timelineEntry{
			ID: "changes-omitted", At: list[len(list)-1].At, Kind: kindStatus, Label: "Earlier changes of status are not shown",
		})
	}
	for _, c := range slices.Backward(list) {
		e := timelineEntry{ID: fmt.Sprintf("change-%d", c.N), At: c.At, Kind: kindStatus, Label: "Became " + c.Status}
		switch {
		case c.Status == "waiting":
			e.Kind, e.Label = kindOpen, "Waits for "+c.WaitingFor
		case executions.Status(c.Status).Ended():
			e.Kind, e.Label = kindEnd, "Ended: "+c.Status
		}
		entries = append(entries, e)
	}
	return entries, nil
}

// ordinal returns a number in the form 1st, 2nd, 3rd, 4th.
func ordinal(n int) string {
	if n%100 < 11 || n%100 > 13 {
		switch n % 10 {
		case 1:
			return fmt.Sprintf("%dst", n)
		case 2:
			return fmt.Sprintf("%dnd", n)
		case 3:
			return fmt.Sprintf("%drd", n)
		}
	}
	return fmt.Sprintf("%dth", n)
}
