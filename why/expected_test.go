package why_test

import (
	"cmp"
	"slices"
	"strings"
)

// expected are the edges that why has to have of a trace, all of them and no others.
func (s *scenario) expected(traceID string) []edge {
	edges := []edge{{"trace", "trace", "", "trace " + traceID}}
	for _, f := range s.facts {
		if f.trace == traceID {
			edges = append(edges, f.edge)
		}
	}
	for _, r := range s.runs {
		if r.trace != traceID {
			continue
		}
		if r.parent != nil && r.parent.trace == traceID {
			edges = append(edges, edge{"did", "child", r.parent.ref(), r.ref()})
		} else {
			edges = append(edges, edge{"did", "run", "", r.ref()})
		}
		if r.wait != nil {
			edges = append(edges, edge{"waits", "waits", "", r.ref()})
			for _, by := range r.wait.by {
				edges = append(edges, edge{"waits", "blocked", by.ref(), r.ref()})
			}
		}
	}
	for _, l := range s.lanes {
		if h := l.holder(); h != nil && h.trace == traceID {
			edges = append(edges, edge{"lanes", map[bool]string{true: "held", false: "holds"}[l.expired], h.ref(), "lane " + l.name})
		}
	}
	for key := range s.spend {
		if key[0] == traceID {
			edges = append(edges, edge{"spend", "spend", "trace " + traceID, "model " + key[1]})
		}
	}
	edges = append(edges, s.because(traceID)...)
	edges = append(edges, s.effects(traceID)...)
	return sorted(edges)
}

func sorted(edges []edge) []edge {
	slices.SortFunc(edges, func(a, b edge) int {
		return cmp.Or(strings.Compare(a.part, b.part), strings.Compare(a.kind, b.kind), strings.Compare(a.from, b.from), strings.Compare(a.to, b.to))
	})
	return edges
}

// because are the chains of causes of the executions that nothing in the trace has begun.
func (s *scenario) because(traceID string) []edge {
	var roots []*run
	for _, r := range s.runs {
		if r.trace == traceID && (r.parent == nil || r.parent.trace != traceID) {
			roots = append(roots, r)
		}
	}
	slices.SortFunc(roots, func(a, b *run) int { return strings.Compare(a.id, b.id) })
	var edges []edge
	told := map[string]bool{}
	for _, root := range roots {
		var chain []edge
		inside := false
		for ref := root.ref(); ; {
			c, known := s.causes[ref]
			if !known || told[ref] {
				break
			}
			if inside = c.trace == traceID; inside {
				break
			}
			chain = append(chain, edge{"because", c.kind, c.from, ref})
			ref = c.from
		}
		if inside {
			continue
		}
		for _, e := range chain {
			told[e.to] = true
		}
		edges = append(edges, chain...)
	}
	return edges
}

// effects are what came of a trace beyond the facts that are its own.
func (s *scenario) effects(traceID string) []edge {
	var edges []edge
	led := func(kind, from, to string) { edges = append(edges, edge{"led to", kind, from, to}) }
	for _, e := range s.events {
		if e.trace != traceID {
			continue
		}
		from := e.ref()
		if e.end != nil {
			from = e.end.ref()
		} else {
			led("raised", e.by, e.ref())
		}
		for _, r := range e.woken {
			if r.trace != traceID {
				led("resumed", from, r.ref())
			}
		}
	}
	for _, r := range s.runs {
		if r.parent != nil && r.parent.trace == traceID && r.trace != traceID {
			led("child", r.parent.ref(), r.ref())
		}
	}
	return edges
}
