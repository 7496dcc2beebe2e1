package engineroom

import (
	"context"
	"fmt"
	"hash/fnv"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/human"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// stepsShown bounds the recorded steps on a page.
const stepsShown = 40

// stepCursor is a recorded step's position.
type stepCursor struct {
	At   time.Time
	Step string
}

// parseStepCursor parses a position; nil for none.
func parseStepCursor(text string) (*stepCursor, error) {
	if text == "" {
		return nil, nil
	}
	at, step, found := strings.Cut(text, " ")
	moment, err := time.Parse(time.RFC3339Nano, at)
	if err != nil || !found {
		return nil, invalidCursor()
	}
	return &stepCursor{moment, step}, nil
}

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

// moment is one line of the timeline.
type moment struct {
	ID     string // of its element
	At     time.Time
	Kind   string // begin, status, step, failed, wait, claim, open, end
	Word   string
	Step   string
	Claim  int64
	Copied bool // copied from the forked execution
	Output shownValue
	Fork   string // URL of the fork form from here
}

// timeline is a page of an execution's history, oldest first.
type timeline struct {
	Moments         []moment
	Strip           *strip
	Earlier, Latest string // URLs of other pages
	Steps           int
}

// executionTimeline reads a page of recorded steps, and merges the row's changes of status.
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
	all, err := room.statusMoments(ctx, x)
	if err != nil {
		return nil, err
	}
	if more {
		first := steps[0].CreatedAt
		all = slices.DeleteFunc(all, func(m moment) bool { return m.At.Before(first) })
	}
	if subject.before != nil {
		all = slices.DeleteFunc(all, func(m moment) bool { return !m.At.Before(subject.before.At) })
	}
	t := timeline{Moments: append(all, stepMoments(x, steps)...), Steps: len(steps)}
	slices.SortStableFunc(t.Moments, func(a, b moment) int { return a.At.Compare(b.At) })
	if more {
		place := steps[0].CreatedAt.UTC().Format(time.RFC3339Nano) + " " + steps[0].Step
		t.Earlier = "/executions/" + x.ID + "?before=" + url.QueryEscape(place) + "#timeline"
		if len(place) > maxFilterBytes {
			t.Earlier = ""
		}
	}
	if subject.before != nil {
		t.Latest = "/executions/" + x.ID + "#timeline"
	}
	t.Strip = stripOf(x, t.Moments)
	return t, nil
}

// recordedSteps reads the newest steps before a position, oldest first, and whether earlier steps exist. It reads
// outputs for the page's steps only, and cuts them.
func (room *Room) recordedSteps(ctx context.Context, subject executionSubject) (list []recordedStep, more bool,
	err error,
) {
	var at *time.Time
	step := ""
	if subject.before != nil {
		at, step = &subject.before.At, subject.before.Step
	}
	list, err = postgres.Rows[recordedStep](ctx, room.Read, "read recorded steps", `
		select c.step, c.claim, c.failed, left(o.text, 8192) as output, octet_length(o.text) as bytes,
		       case when jsonb_typeof(c.output) = 'object' and c.output ? 'timed_out' then left(c.output ->> 'event', 100) end
		         as event,
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
	hide, err := room.hidesTextsOf(ctx, subject.ID)
	if err != nil {
		return nil, false, err
	}
	for i := range list {
		hideJSON(hide, &list[i].Output, &list[i].Bytes)
	}
	list, more = firstN(list, stepsShown)
	slices.Reverse(list)
	return list, more, nil
}

// stepMoments returns the recorded steps, with a line at each new claim.
func stepMoments(x executionRecord, steps []recordedStep) []moment {
	all := make([]moment, 0, len(steps))
	var claim int64
	for _, s := range steps {
		m := moment{
			ID: elementID("step", s.Step), At: s.CreatedAt, Kind: "step", Word: "Recorded", Step: s.Step, Claim: s.Claim,
			Copied: x.ForkedFrom != nil && s.CreatedAt.Before(x.CreatedAt),
			Output: shownJSON(s.Output, s.Bytes),
		}
		switch {
		case s.Failed:
			m.Kind, m.Word = "failed", "Failed"
		case s.Event != nil && s.TimedOut:
			m.Kind, m.Word = "failed", "Wait timed out"
		case s.Event != nil:
			m.Kind, m.Word = "wait", "Wait ended by "+*s.Event
		}
		if len(s.Step) <= maxFilterBytes {
			m.Fork = "/executions/" + x.ID + "?from=" + url.QueryEscape(s.Step) + "#fork"
		}
		if claim != 0 && s.Claim != claim && !m.Copied {
			all = append(all, moment{
				ID: fmt.Sprintf("claim-%d", s.Claim), At: s.CreatedAt, Kind: "claim", Claim: s.Claim,
				Word: fmt.Sprintf("Under claim %d from here on", s.Claim),
			})
		}
		claim = s.Claim
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

// statusMoments returns the stored changes of status. The execution's row has some times; an external worker's run has
// all changes.
func (room *Room) statusMoments(ctx context.Context, x executionRecord) ([]moment, error) {
	all := []moment{{ID: "begun", At: x.CreatedAt, Kind: "begin", Word: "Created: pending"}}
	if x.IsExternal {
		changes, err := room.statusChanges(ctx, x.ID)
		if err != nil {
			return nil, err
		}
		return append(all[:0], changes...), nil
	}
	if x.StartedAt != nil {
		all = append(all, moment{ID: "claimed-first", At: *x.StartedAt, Kind: "status", Word: "First claimed: running"})
	}
	if x.Status == "waiting" {
		all = append(all, moment{
			ID: "waits-now", At: x.UpdatedAt, Kind: "open",
			Word: fmt.Sprintf("Waits, for the %s time", ordinal(x.WaitNumber)),
		})
	}
	if x.CompletedAt != nil {
		all = append(all, moment{ID: "ended", At: *x.CompletedAt, Kind: "end", Word: "Ended: " + x.Status})
	}
	return all, nil
}

// statusChanges reads the newest stored changes of status.
func (room *Room) statusChanges(ctx context.Context, id string) ([]moment, error) {
	rows, err := room.Read.Query(ctx, `
		select n, status, coalesce(waiting_for, ''), at from agent_status_changes where execution_id = @id
		  order by n desc limit 200`,
		postgres.Strict{"id": id})
	if err != nil {
		return nil, fmt.Errorf("read changes of status: %w", err)
	}
	var all []moment
	var n int
	var status, waitsFor string
	var at time.Time
	_, err = pgx.ForEachRow(rows, []any{&n, &status, &waitsFor, &at}, func() error {
		m := moment{ID: fmt.Sprintf("change-%d", n), At: at, Kind: "status", Word: "Became " + status}
		switch status {
		case "waiting":
			m.Kind, m.Word = "open", "Waits for "+waitsFor
		case "completed", "failed", "timeout", "cancelled":
			m.Kind, m.Word = "end", "Ended: "+status
		}
		all = append(all, m)
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read changes of status: %w", err)
	}
	return all, nil
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

// stripWidth is the strip's width in its own units.
const stripWidth = 1000

// strip draws the timeline: bars for the queue time and the time since the first claim, ticks for records. The list
// below the strip has the same content.
type strip struct {
	Label string
	Bars  []stripBar
}

// stripBar is a rectangle of the strip.
type stripBar struct {
	X, Width, Y, Height int
	Class               string
	Title               string
}

// stripOf draws an execution from its creation to its last record; nil without a duration. It omits a fork's copied
// records.
func stripOf(x executionRecord, moments []moment) *strip {
	from, to := time.Time{}, time.Time{}
	var own []moment
	for _, m := range moments {
		if m.Copied || m.At.Before(x.CreatedAt) {
			continue
		}
		if from.IsZero() {
			from = m.At
		}
		to = m.At
		own = append(own, m)
	}
	span := to.Sub(from)
	if span <= 0 {
		return nil
	}
	place := func(t time.Time) int { return int(stripWidth * (float64(t.Sub(from)) / float64(span))) }
	s := &strip{Label: fmt.Sprintf("%d events in %s, listed below", len(own), human.Millis(span.Milliseconds()))}
	bar := func(a, b time.Time, class, title string) {
		if b.After(a) {
			s.Bars = append(s.Bars, stripBar{
				X: place(a), Width: max(place(b)-place(a), 1), Y: 12, Height: 8,
				Class: class, Title: title,
			})
		}
	}
	start := from
	if x.StartedAt != nil && x.StartedAt.After(from) {
		start = *x.StartedAt
		if start.After(to) {
			start = to
		}
		bar(from, start, "bar-lane", "in the queue: "+human.Millis(start.Sub(from).Milliseconds()))
	}
	if x.StartedAt != nil {
		bar(start, to, "bar-phase", "since its first claim: "+human.Millis(to.Sub(start).Milliseconds()))
	}
	for _, m := range own {
		s.Bars = append(s.Bars, stripBar{
			X: min(place(m.At), stripWidth-4), Width: 4, Y: 4, Height: 24, Class: stripClass(m.Kind),
			Title: cut(80, m.Word+" "+m.Step),
		})
	}
	return s
}

// stripClass is the colour of a tick.
func stripClass(kind string) string {
	switch kind {
	case "failed":
		return "bar-bad"
	case "wait", "open":
		return "bar-wait"
	case "claim":
		return "bar-retry"
	case "begin", "end", "status":
		return "bar-accent"
	}
	return "bar-call"
}
