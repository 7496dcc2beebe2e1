package engineroom

import (
	"cmp"
	"math"
	"slices"
	"strconv"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/human"
)

// spanBar is a rectangle of a line. X and Width are SVG lengths.
type spanBar struct {
	Class    string
	X, Width string
	Open     bool // the work is running
}

// timeTick is a mark of the time axis, relative to the start. Zoom is the least factor at which the page shows the
// mark.
type timeTick struct {
	X, Label string
	Zoom     int
}

// timeGap is idle time, drawn shorter.
type timeGap struct {
	X, Width, Middle string
	MS               int64
	After            int64 // milliseconds from the start
	Omitted          bool  // omitted rows instead of idle time
	LabelFits        bool  // the label does not overlap the label of the previous gap
}

// traceScale maps times to positions from 0 to 100. It draws long idle time shorter, so a wait of three days leaves
// room for the work around it.
type traceScale struct {
	segments []segment
	total    float64 // of the drawing, in drawn seconds
	start    time.Time
	running  bool // some work is running: the right edge is now
}

// segment is a part of the scale with one ratio.
type segment struct {
	from, to      time.Time
	offset, width float64 // in drawn seconds
	shortened     bool    // drawn shorter
	omitted       bool    // the page omits the rows of this time
}

const (
	minIdle   = time.Second // idle time is drawn to scale up to three times this, or more in a busy trace
	maxGaps   = 12          // number of shortened gaps, the longest first
	minBar    = 0.02        // least width of a bar, in percent; its outline makes it visible
	scaleStep = 1.1         // growth of the scale of a running trace
	openTail  = 0.06        // share of the drawing for running work

	// Least distances of texts, in percent of the drawing.
	gapLabelWidth = 20 // between the middles of the labels of gaps
	tickWidth     = 16 // between ticks, divided by their zoom
	lastTickWidth = 12 // between a tick and the right edge, which would cut its text, divided by the zoom
	// maxTicks bounds the new ticks of a zoom, multiplied by the zoom.
	maxTicks = 24
)

// newTraceScale returns the scale of nodes; nil for none.
func newTraceScale(nodes []*spanNode) *traceScale {
	var moments []time.Time
	t := &traceScale{}
	for _, n := range nodes {
		moments = append(moments, n.From)
		switch {
		case n.To != nil:
			moments = append(moments, *n.To)
		case !n.Point():
			t.running = true
		}
	}
	if len(moments) == 0 {
		return nil
	}
	slices.SortFunc(moments, time.Time.Compare)
	moments = slices.CompactFunc(moments, time.Time.Equal)
	t.start = moments[0]
	var omitted *spanNode
	if i := slices.IndexFunc(nodes, func(n *spanNode) bool { return n.Type == "more" }); i >= 0 {
		omitted = nodes[i]
		moments = slices.DeleteFunc(moments, func(at time.Time) bool {
			return at.After(omitted.From) && at.Before(*omitted.To)
		})
	}
	t.layOut(moments, busyPeriods(nodes, moments[len(moments)-1]), omitted)
	return t
}

// period is a period of time.
type period struct{ from, to time.Time }

// busyPeriods returns the periods with a running call, in order and disjoint.
func busyPeriods(nodes []*spanNode, end time.Time) []period {
	var all []period
	for _, n := range nodes {
		if n.Row != nil && n.Row.isCall() {
			to := end
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

// layOut lays out the time between moments. Beside work, all gaps together take at most two fifths of the drawing.
// Omitted rows take at most as much of it as the shown rows, or as one gap.
func (t *traceScale) layOut(moments []time.Time, busy []period, omitted *spanNode) {
	busyTime := time.Duration(0)
	for _, p := range busy {
		if omitted == nil || !p.from.After(omitted.From) || !p.to.Before(*omitted.To) {
			busyTime += p.to.Sub(p.from)
		}
	}
	limit := max(minIdle, busyTime/8)
	next := 0
	for i := 1; i < len(moments); i++ {
		s := segment{from: moments[i-1], to: moments[i]}
		for next < len(busy) && !busy[next].to.After(s.from) {
			next++
		}
		idle := next == len(busy) || !busy[next].from.Before(s.to)
		s.omitted = omitted != nil && s.from.Equal(omitted.From)
		s.shortened = idle && !s.omitted && s.to.Sub(s.from) > 3*limit
		t.segments = append(t.segments, s)
	}
	t.limitGaps()
	linear, gaps := 0.0, 0
	for _, s := range t.segments {
		switch {
		case s.shortened:
			gaps++
		case !s.omitted:
			linear += s.to.Sub(s.from).Seconds()
		}
	}
	width := limit.Seconds()
	if linear > 0 && gaps > 0 {
		width = min(width, linear*2/3/float64(gaps))
	}
	for i := range t.segments {
		s := &t.segments[i]
		s.offset, s.width = t.total, s.to.Sub(s.from).Seconds()
		switch {
		case s.shortened:
			s.width = width
		case s.omitted:
			s.width = min(s.width, max(linear, limit.Seconds()))
		}
		t.total += s.width
	}
	if t.running && t.total > 0 { // in steps, so most refreshes leave ended lines unchanged
		t.total = math.Pow(scaleStep, math.Ceil(math.Log(t.total)/math.Log(scaleStep)))
	}
}

// limitGaps keeps only the longest maxGaps gaps shortened.
func (t *traceScale) limitGaps() {
	var short []int
	for i, s := range t.segments {
		if s.shortened {
			short = append(short, i)
		}
	}
	if len(short) <= maxGaps {
		return
	}
	slices.SortFunc(short, func(a, b int) int {
		x, y := t.segments[a], t.segments[b]
		return cmp.Compare(y.to.Sub(y.from), x.to.Sub(x.from))
	})
	for _, i := range short[maxGaps:] {
		t.segments[i].shortened = false
	}
}

// position returns the position of a time, in percent.
func (t *traceScale) position(at time.Time) float64 {
	edge := 100.0
	if t.running {
		edge -= 100 * openTail
	}
	i, _ := slices.BinarySearchFunc(t.segments, at, func(s segment, at time.Time) int { return s.to.Compare(at) })
	if i == len(t.segments) || t.total == 0 {
		if at.After(t.start) {
			return edge
		}
		return 0
	}
	s := t.segments[i]
	part := 0.0
	if long := s.to.Sub(s.from).Seconds(); long > 0 {
		part = min(max(at.Sub(s.from).Seconds()/long, 0), 1)
	}
	return edge * (s.offset + part*s.width) / t.total
}

// percent formats an SVG length.
func percent(x float64) string { return strconv.FormatFloat(x, 'f', 2, 64) + "%" }

// setBars sets the bars of nodes.
func (t *traceScale) setBars(nodes []*spanNode) {
	for _, n := range nodes {
		switch {
		case n.Type == "run":
			n.Bars = t.runBars(n)
		case n.Point() && n.Type == "note":
			n.Bars = []spanBar{{Class: "note", X: percent(min(t.position(n.From), 99.6))}}
		default:
			name := n.Type
			if name == "retry" {
				name = n.Row.Kind
			}
			n.Bars = []spanBar{t.bar(n.barClass(name), n.From, n.To)}
		}
	}
}

// runBars returns the time in the queue, and each attempt of the run.
func (t *traceScale) runBars(n *spanNode) (bars []spanBar) {
	from := n.From
	if began := n.Run.StartedAt; began != nil && began.After(from) {
		bars = append(bars, t.bar("queue", from, began))
		from = *began
	}
	if n.Run.StartedAt == nil && n.To == nil {
		return []spanBar{t.bar("queue", from, nil)}
	}
	for _, l := range n.Lost {
		if l.At.After(from) && (n.To == nil || l.At.Before(*n.To)) {
			bars = append(bars, t.bar("halted", from, &l.At), t.bar("lost", l.At, &l.At))
			from = l.At
		}
	}
	return append(bars, t.bar(n.barClass("run"), from, n.To))
}

// barClass returns the class of a node's bar: a bad or halted state, or otherwise the kind of the node.
func (n *spanNode) barClass(nodeKind string) string {
	switch {
	case n.Failed() && n.Run != nil:
		return "bad-run"
	case n.Failed():
		return "bad"
	case n.Halted():
		return "halted"
	}
	return nodeKind
}

// bar returns the rectangle between two times, or to the edge.
func (t *traceScale) bar(class string, from time.Time, to *time.Time) spanBar {
	x, end := t.position(from), 100.0
	if to != nil {
		end = t.position(*to)
	}
	width := max(end-x, minBar)
	return spanBar{Class: class, X: percent(min(x, 100-width)), Width: percent(width), Open: to == nil}
}

// gaps returns the shortened periods.
func (t *traceScale) gaps() []timeGap {
	var all []timeGap
	last := -100.0
	for _, s := range t.segments {
		if !s.shortened && !s.omitted {
			continue
		}
		x, end := t.position(s.from), t.position(s.to)
		hasRoom := (x+end)/2-last >= gapLabelWidth
		if hasRoom {
			last = (x + end) / 2
		}
		all = append(all, timeGap{
			X: percent(x), Width: percent(end - x), Middle: percent((x + end) / 2), MS: s.to.Sub(s.from).Milliseconds(),
			After: s.from.Sub(t.start).Milliseconds(), LabelFits: hasRoom, Omitted: s.omitted,
		})
	}
	return all
}

// tickZooms are the factors from which on the page shows finer marks.
var tickZooms = []int{1, 4, 16}

// ticks returns the marks of the axis: round times since the start, where the scale is linear.
func (t *traceScale) ticks() []timeTick {
	all := []timeTick{{percent(0), "0", 1}}
	if t.total == 0 {
		return all
	}
	positions := []float64{0}
	for _, zoom := range tickZooms {
		step, minGap, count := roundStep(t.total/4/float64(zoom)), tickWidth/float64(zoom), 0
		for _, s := range t.segments {
			if s.shortened || s.omitted {
				continue
			}
			from, to := s.from.Sub(t.start).Seconds(), s.to.Sub(t.start).Seconds()
			for n := int64(from/step) + 1; float64(n)*step <= to && count < maxTicks*zoom; n++ {
				after := time.Duration(float64(n) * step * float64(time.Second))
				x := t.position(t.start.Add(after))
				i, _ := slices.BinarySearch(positions, x)
				isCut := x > 100-lastTickWidth/float64(zoom)
				if isCut || x-positions[i-1] < minGap || i < len(positions) && positions[i]-x < minGap {
					continue
				}
				positions = slices.Insert(positions, i, x)
				all, count = append(all, timeTick{percent(x), tickLabel(after), zoom}), count+1
			}
		}
	}
	return all
}

// tickLabel formats the time of a mark: in exact seconds where a short form would cut it. The edge of the drawing would
// cut a longer form, such as 42,500 ms.
func tickLabel(after time.Duration) string {
	if after > time.Second && after < time.Minute && after%(100*time.Millisecond) != 0 ||
		after > 10*time.Second && after < time.Minute && after%time.Second != 0 {
		return strconv.FormatFloat(after.Seconds(), 'f', -1, 64) + " s"
	}
	return human.Duration(after)
}

// roundStep rounds seconds up to a round number.
func roundStep(seconds float64) float64 {
	for _, s := range []float64{
		.001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600,
		7200, 14400, 28800, 86400,
	} {
		if s >= seconds {
			return s
		}
	}
	const day = 86400
	return float64(int64(seconds/day)+1) * day
}

// Label is the gap's length.
func (g timeGap) Label() string { return human.Millis(g.MS) }

// Place is the gap's start, relative to the trace's.
func (g timeGap) Place() string { return human.Millis(g.After) }
