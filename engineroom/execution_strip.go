package engineroom

import (
	"fmt"
	"time"
)

// stripWide is the width of a strip in its own units; the page scales it.
const stripWide = 1000

// strip is the timeline as a picture: bars for the time in the queue and the time since the first claim, ticks for what
// was recorded. The list below it says the same in words.
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

// stripOf draws what lies between the beginning of an execution and the last that is known of it; nil when that is no
// time. What a fork took over happened before.
func stripOf(x executionFact, moments []moment) *strip {
	from, to := time.Time{}, time.Time{}
	var own []moment
	for _, m := range moments {
		if m.Taken || m.At.Before(x.CreatedAt) {
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
	place := func(t time.Time) int { return int(stripWide * (float64(t.Sub(from)) / float64(span))) }
	s := &strip{Label: fmt.Sprintf("%d events in %s, listed below", len(own), millis(span.Milliseconds()))}
	bar := func(a, b time.Time, class, title string) {
		if b.After(a) {
			s.Bars = append(s.Bars, stripBar{X: place(a), Width: max(place(b)-place(a), 1), Y: 12, Height: 8, Class: class, Title: title})
		}
	}
	begun := from
	if x.StartedAt != nil && x.StartedAt.After(from) {
		begun = *x.StartedAt
		if begun.After(to) {
			begun = to
		}
		bar(from, begun, "bar-lane", "in the queue: "+millis(begun.Sub(from).Milliseconds()))
	}
	if x.StartedAt != nil {
		bar(begun, to, "bar-phase", "since its first claim: "+millis(to.Sub(begun).Milliseconds()))
	}
	for _, m := range own {
		s.Bars = append(s.Bars, stripBar{
			X: min(place(m.At), stripWide-4), Width: 4, Y: 4, Height: 24, Class: stripClass(m.Kind), Title: cut(80, m.Word+" "+m.Step),
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
