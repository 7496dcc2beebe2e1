package engineroom

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"time"
)

// tracedBar is a rectangle of a line. X and Width are SVG lengths.
type tracedBar struct {
	Class    string
	X, Width string
	Open     bool // it goes on
}

// tracedTick is a mark of the time axis: how long after the beginning.
type tracedTick struct{ X, Word string }

// tracedGap is a time in which nothing was done, drawn shorter than it was.
type tracedGap struct {
	X, Width, Middle string
	MS               int64
	After            int64 // milliseconds from the beginning
	Rest             bool  // it is not idle: not all that happened in it is shown
	Roomy            bool  // its length fits beside its mark
}

// traceScale maps moments to places from 0 to 100, the first to the last moment of a trace. Time in which no call ran
// is drawn shorter where it is long beside the rest: a wait of three days must not leave a pixel for the work around
// it.
type traceScale struct {
	stretches []stretch
	whole     float64 // of the drawing, in drawn seconds
	start     time.Time
	open      bool // something goes on: the right edge is now
}

// stretch is a piece of the scale that is drawn at one scale.
type stretch struct {
	from, to time.Time
	at, wide float64 // in drawn seconds
	short    bool    // drawn shorter than it was
	rest     bool    // not all that happened in it is shown
}

const (
	leastIdle = time.Second // idle time of up to three times this is drawn as it is
	mostGaps  = 12          // the longest ones
	leastBar  = 0.35        // width of the shortest bar, in percent
	openTail  = 0.06        // part of the drawing that is kept for what goes on
)

// newTraceScale makes the scale for nodes; nil for none.
func newTraceScale(nodes []*tracedNode) *traceScale {
	var moments []time.Time
	t := &traceScale{}
	for _, n := range nodes {
		moments = append(moments, n.From)
		switch {
		case n.To != nil:
			moments = append(moments, *n.To)
		case !n.Point():
			t.open = true
		}
	}
	if len(moments) == 0 {
		return nil
	}
	slices.SortFunc(moments, time.Time.Compare)
	moments = slices.CompactFunc(moments, time.Time.Equal)
	t.start = moments[0]
	var rest *tracedNode
	if i := slices.IndexFunc(nodes, func(n *tracedNode) bool { return n.Sort == "more" }); i >= 0 {
		rest = nodes[i]
		moments = slices.DeleteFunc(moments, func(at time.Time) bool { return at.After(rest.From) && at.Before(*rest.To) })
	}
	t.stretch(moments, busyOf(nodes, moments[len(moments)-1]), rest)
	return t
}

// period is a piece of time.
type period struct{ from, to time.Time }

// busyOf are the times in which a call ran, in order and without overlaps.
func busyOf(nodes []*tracedNode, last time.Time) []period {
	var all []period
	for _, n := range nodes {
		if n.Row != nil && n.Row.acts() {
			to := last
			if n.To != nil {
				to = *n.To
			}
			all = append(all, period{n.From, to})
		}
	}
	slices.SortFunc(all, func(a, b period) int { return a.from.Compare(b.from) })
	var busy []period
	for _, p := range all {
		if i := len(busy) - 1; i >= 0 && !p.from.After(busy[i].to) {
			if p.to.After(busy[i].to) {
				busy[i].to = p.to
			}
			continue
		}
		busy = append(busy, p)
	}
	return busy
}

// stretch lays out the time between moments. All gaps together take at most two fifths of the drawing, and the rest, of
// which little is known, as much again as is shown whole.
func (t *traceScale) stretch(moments []time.Time, busy []period, rest *tracedNode) {
	worked := time.Duration(0)
	for _, p := range busy {
		if rest == nil || !p.from.After(rest.From) || !p.to.Before(*rest.To) {
			worked += p.to.Sub(p.from)
		}
	}
	limit := max(leastIdle, worked/8)
	next := 0
	for i := 1; i < len(moments); i++ {
		s := stretch{from: moments[i-1], to: moments[i]}
		for next < len(busy) && !busy[next].to.After(s.from) {
			next++
		}
		idle := next == len(busy) || !busy[next].from.Before(s.to)
		s.rest = rest != nil && s.from.Equal(rest.From)
		s.short = idle && !s.rest && s.to.Sub(s.from) > 3*limit
		t.stretches = append(t.stretches, s)
	}
	t.keepLongest()
	linear, gaps := 0.0, 0
	for _, s := range t.stretches {
		switch {
		case s.short:
			gaps++
		case !s.rest:
			linear += s.to.Sub(s.from).Seconds()
		}
	}
	wide := limit.Seconds()
	if linear > 0 && gaps > 0 {
		wide = min(wide, linear*2/3/float64(gaps))
	}
	for i := range t.stretches {
		s := &t.stretches[i]
		s.at, s.wide = t.whole, s.to.Sub(s.from).Seconds()
		switch {
		case s.short:
			s.wide = wide
		case s.rest:
			s.wide = min(s.wide, max(linear, limit.Seconds()))
		}
		t.whole += s.wide
	}
}

// keepLongest leaves only the longest gaps short.
func (t *traceScale) keepLongest() {
	var short []int
	for i, s := range t.stretches {
		if s.short {
			short = append(short, i)
		}
	}
	if len(short) <= mostGaps {
		return
	}
	slices.SortFunc(short, func(a, b int) int {
		x, y := t.stretches[a], t.stretches[b]
		return cmp.Compare(y.to.Sub(y.from), x.to.Sub(x.from))
	})
	for _, i := range short[mostGaps:] {
		t.stretches[i].short = false
	}
}

// place is where a moment is drawn, in percent.
func (t *traceScale) place(at time.Time) float64 {
	edge := 100.0
	if t.open {
		edge -= 100 * openTail
	}
	i, _ := slices.BinarySearchFunc(t.stretches, at, func(s stretch, at time.Time) int { return s.to.Compare(at) })
	if i == len(t.stretches) || t.whole == 0 {
		if at.After(t.start) {
			return edge
		}
		return 0
	}
	s := t.stretches[i]
	part := 0.0
	if long := s.to.Sub(s.from).Seconds(); long > 0 {
		part = min(max(at.Sub(s.from).Seconds()/long, 0), 1)
	}
	return edge * (s.at + part*s.wide) / t.whole
}

// percent is an SVG length.
func percent(x float64) string { return strconv.FormatFloat(x, 'f', 2, 64) + "%" }

// draw gives nodes their bars.
func (t *traceScale) draw(nodes []*tracedNode) {
	for _, n := range nodes {
		switch {
		case n.Sort == "run" && n.Run.StartedAt != nil && n.Run.StartedAt.Sub(n.From) > 0:
			n.Bars = []tracedBar{t.bar("queue", n.From, n.Run.StartedAt), t.bar("run", *n.Run.StartedAt, n.To)}
		case n.Point() && n.Sort == "note":
			n.Bars = []tracedBar{{Class: "note", X: percent(min(t.place(n.From), 99.6))}}
		default:
			n.Bars = []tracedBar{t.bar(n.Sort, n.From, n.To)}
		}
	}
}

// bar is the rectangle from a moment to another, or to the edge.
func (t *traceScale) bar(class string, from time.Time, to *time.Time) tracedBar {
	x, end := t.place(from), 100.0
	if to != nil {
		end = t.place(*to)
	}
	wide := max(end-x, leastBar)
	return tracedBar{Class: class, X: percent(min(x, 100-wide)), Width: percent(wide), Open: to == nil}
}

// gaps are the times that are drawn short.
func (t *traceScale) gaps() []tracedGap {
	var all []tracedGap
	last := -100.0
	for _, s := range t.stretches {
		if !s.short && !s.rest {
			continue
		}
		x, end := t.place(s.from), t.place(s.to)
		roomy := (x+end)/2-last >= 20
		if roomy {
			last = (x + end) / 2
		}
		all = append(all, tracedGap{
			X: percent(x), Width: percent(end - x), Middle: percent((x + end) / 2), MS: s.to.Sub(s.from).Milliseconds(),
			After: s.from.Sub(t.start).Milliseconds(), Roomy: roomy, Rest: s.rest,
		})
	}
	return all
}

// ticks are the marks of the axis: round times after the beginning, where time is drawn as it was.
func (t *traceScale) ticks() []tracedTick {
	if t.whole == 0 {
		return []tracedTick{{percent(0), "0"}}
	}
	step := roundStep(t.whole / 4)
	all := []tracedTick{{percent(0), "0"}}
	last := 0.0
	for _, s := range t.stretches {
		if s.short || s.rest {
			continue
		}
		from, to := s.from.Sub(t.start).Seconds(), s.to.Sub(t.start).Seconds()
		for n := int64(from/step) + 1; float64(n)*step <= to && len(all) < 24; n++ {
			after := time.Duration(float64(n) * step * float64(time.Second))
			x := t.place(t.start.Add(after))
			if x-last >= 16 && x <= 88 {
				all = append(all, tracedTick{percent(x), lasting(after)})
				last = x
			}
		}
	}
	return all
}

// roundStep is the smallest round number of seconds that is not less.
func roundStep(seconds float64) float64 {
	for _, s := range []float64{
		.001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400,
	} {
		if s >= seconds {
			return s
		}
	}
	const day = 86400
	return float64(int64(seconds/day)+1) * day
}

// lasting writes a duration in few characters: 250 ms, 12 s, 3 min 20 s, 2 h 5 min, 3 d 4 h.
func lasting(d time.Duration) string {
	day := 24 * time.Hour
	switch {
	case d < time.Second:
		return fmt.Sprintf("%d ms", d.Milliseconds())
	case d < time.Minute:
		return strconv.FormatFloat(float64(d.Round(10*time.Millisecond).Milliseconds())/1000, 'f', -1, 64) + " s"
	case d < time.Hour:
		return pair(d, time.Minute, "min", time.Second, "s")
	case d < day:
		return pair(d, time.Hour, "h", time.Minute, "min")
	}
	return pair(d, day, "d", time.Hour, "h")
}

// pair writes a duration in two units, the smaller one where it is not 0.
func pair(d, big time.Duration, bigName string, small time.Duration, smallName string) string {
	if rest := d % big / small; rest > 0 {
		return fmt.Sprintf("%d %s %d %s", d/big, bigName, rest, smallName)
	}
	return fmt.Sprintf("%d %s", d/big, bigName)
}

// lastingMS is lasting, in milliseconds.
func lastingMS(ms int64) string { return lasting(time.Duration(ms) * time.Millisecond) }

// Word is the gap's length.
func (g tracedGap) Word() string { return lastingMS(g.MS) }

// Place is how long after the beginning the gap begins.
func (g tracedGap) Place() string { return lastingMS(g.After) }
