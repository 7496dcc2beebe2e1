package engineroom

import (
	"fmt"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/human"
)

// stripWidth is the strip's width in its own units.
const stripWidth = 1000

// strip draws a page of the timeline: bars for the queue time and the time since the first claim, ticks for entries.
// The list below the strip has these entries, too.
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

// stripOf draws the entries of a page, from the first to the last; nil without a duration. It omits a fork's copied
// steps. The time since the first claim counts from the claim, also if an earlier page shows it.
func stripOf(x executionRecord, entries []timelineEntry) *strip {
	from, to := time.Time{}, time.Time{}
	var own []timelineEntry
	for _, m := range entries {
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
	xOf := func(t time.Time) int { return int(stripWidth * (float64(t.Sub(from)) / float64(span))) }
	s := &strip{Label: fmt.Sprintf("%s in %s, listed below",
		human.Counted(int64(len(own)), "event"), human.Millis(span.Milliseconds()))}
	addBar := func(start, end time.Time, class, title string) {
		if end.After(start) {
			s.Bars = append(s.Bars, stripBar{
				X: xOf(start), Width: max(xOf(end)-xOf(start), 1), Y: 12, Height: 8, Class: class, Title: title,
			})
		}
	}
	start := from
	if x.StartedAt != nil && x.StartedAt.After(from) {
		start = *x.StartedAt
		if start.After(to) {
			start = to
		}
		addBar(from, start, "bar-lane", "in the queue: "+human.Millis(start.Sub(from).Milliseconds()))
	}
	if x.StartedAt != nil {
		addBar(start, to, "bar-phase", "since its first claim: "+human.Millis(to.Sub(*x.StartedAt).Milliseconds()))
	}
	for _, m := range own {
		s.Bars = append(s.Bars, stripBar{
			X: min(xOf(m.At), stripWidth-4), Width: 4, Y: 4, Height: 24, Class: stripClass(m.Kind),
			Title: cut(80, m.Label+" "+m.Step),
		})
	}
	return s
}

// stripClass is the colour of a tick.
func stripClass(kind entryKind) string {
	switch kind {
	case kindFailed:
		return "bar-bad"
	case kindWait, kindOpen:
		return "bar-wait"
	case kindClaim:
		return "bar-retry"
	case kindBegin, kindEnd, kindStatus:
		return "bar-accent"
	case kindStep:
	}
	return "bar-call"
}
