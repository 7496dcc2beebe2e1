//go:build unix

package randomflows_test

import (
	"fmt"
	"math/rand/v2"
	"strconv"
	"time"
)

// kind is what an op does.
type kind string

const (
	step     kind = "step"     // a Step that succeeds
	fails    kind = "fails"    // a Step that returns an error
	bounded  kind = "bounded"  // a Step that a limit of its own ends
	effect   kind = "effect"   // a StepTx that writes a row
	within   kind = "within"   // a StepTx that writes a row, and has a step and a call in it
	call     kind = "call"     // a Do that may be repeated
	once     kind = "once"     // a Do that may not
	delay    kind = "delay"    // a wait for time
	event    kind = "event"    // a wait for an event that comes
	never    kind = "never"    // a wait for one that does not
	child    kind = "child"    // a child that is waited for
	aside    kind = "aside"    // one that is not
	show     kind = "show"     // SetVariables
	now      kind = "now"      // Now
	branches kind = "branches" // several at the same time
	phase    kind = "phase"
	nest     kind = "nest" // a Step that is made of others
	scope    kind = "scope"
	loop     kind = "loop"
	lane     kind = "lane" // a lane that others want, too
)

// op is one thing that a flow does.
type op struct {
	kind   kind
	name   string // of its step
	n      int    // what it is worth
	lasts  time.Duration
	times  int  // of a loop
	joined bool // of branches: one that leaves stops the others
	parts  [][]op
	seed   uint64 // of a child
}

// names are few, so that steps share them.
var names = []string{"a", "b", "a", "a#2", "c/d", "é"}

// lanesWanted are few, too. They are a thread's, which stay with an execution that a shutdown or a pause hands back;
// others are free until it goes on.
var lanesWanted = []string{"thread:one", "thread:two", "thread:three"}

// deepest is how deep children and groups go.
const deepest = 3

// plan draws what the flow of a seed does. It has a lane once at most: each run takes anew, and gives back, the lanes
// of what is on record (executions.Lane).
func plan(seed uint64, depth int) []op {
	r := rand.New(rand.NewPCG(seed, uint64(depth)))
	ops := draw(r, depth, 3+r.IntN(6), true)
	alone := false
	for i := range ops {
		if ops[i].kind == lane && alone {
			ops[i].kind = step
		}
		alone = alone || ops[i].kind == lane
	}
	return ops
}

// draw draws so many ops. Where several are at the same time, or again and again, there are no variables, which would
// be the last one's, and no lanes, which are the execution's; and in loops no children and events, which have one
// name.
func draw(r *rand.Rand, depth, n int, top bool) []op {
	simple := []kind{step, step, step, fails, bounded, effect, within, call, once, delay, never, now}
	if top {
		simple = append(simple, show, lane)
	}
	grouped := []kind{branches, branches, phase, nest, scope, loop, event, event, child, aside}
	ops := make([]op, n)
	for i := range ops {
		k := simple[r.IntN(len(simple))]
		if depth < deepest && r.IntN(3) == 0 {
			k = grouped[r.IntN(len(grouped))]
		}
		o := op{
			kind: k, name: names[r.IntN(len(names))], n: r.IntN(1000),
			lasts: time.Duration(1+r.IntN(30)) * time.Millisecond, seed: r.Uint64(),
		}
		switch k {
		case branches:
			o.joined = r.IntN(2) == 0
			for range 2 + r.IntN(2) {
				o.parts = append(o.parts, draw(r, depth+1, 1+r.IntN(4), false))
			}
		case phase, nest, scope:
			o.parts = [][]op{draw(r, depth+1, 1+r.IntN(3), false)}
		case loop:
			o.times = 1 + r.IntN(20)
			o.parts = [][]op{drawPlain(r, 1+r.IntN(2))}
		case lane:
			o.name = lanesWanted[r.IntN(len(lanesWanted))]
			o.parts = [][]op{drawPlain(r, 1+r.IntN(2))}
		default:
		}
		ops[i] = o
	}
	return ops
}

// drawPlain draws what a loop does: what is quick, and has no name for others.
func drawPlain(r *rand.Rand, n int) []op {
	plain := []kind{step, fails, effect, call, once, delay}
	ops := make([]op, n)
	for i := range ops {
		ops[i] = op{
			kind: plain[r.IntN(len(plain))], name: names[r.IntN(len(names))], n: r.IntN(1000),
			lasts: time.Duration(1+r.IntN(5)) * time.Millisecond,
		}
	}
	return ops
}

// then is the value of a flow after one more op.
func then(value, next int) int { return (value*31 + next) % 1_000_003 }

// expected is what the model says of one execution and of all that come from it.
type expected struct {
	seed      uint64
	value     int
	variables string // what was set last; {} for nothing
	effects   int
	calls     int
	once      int
	children  int
	families  []*expected // of the children
	events    []string    // keys
}

// model is what becomes of a flow to which nothing happens.
func model(seed uint64, depth int) *expected {
	e := &expected{seed: seed, variables: "{}"}
	e.value = e.play(plan(seed, depth), depth, keyOf(seed), 0)
	return e
}

// keyOf begins the keys of the events of a flow.
func keyOf(seed uint64) string { return strconv.FormatUint(seed, 36) }

// at names a place in a flow.
func at(path string, i int) string { return path + "." + strconv.Itoa(i) }

func (e *expected) play(ops []op, depth int, path string, value int) int {
	for i, o := range ops {
		value = then(value, e.one(o, depth, at(path, i), value))
	}
	return value
}

func (e *expected) one(o op, depth int, path string, value int) int {
	switch o.kind {
	case effect:
		e.effects++
	case within:
		e.effects++
		e.calls++
	case call:
		e.calls++
	case once:
		e.once++
	case event:
		e.events = append(e.events, path)
	case show:
		e.variables = shown(value)
	case child, aside:
		e.children++
		c := model(o.seed, depth+1)
		e.families = append(e.families, c)
		if o.kind == child {
			return c.value
		}
	case branches:
		all := 0
		for b, part := range o.parts {
			all = then(all, e.play(part, depth+1, at(path, b), 0))
		}
		return all
	case phase, nest, scope, lane:
		return e.play(o.parts[0], depth+1, path, 0)
	case loop:
		all := 0
		for range o.times {
			all = e.play(o.parts[0], depth+1, path, all)
		}
		return all
	case step, fails, bounded, delay, never, now:
	}
	return o.n
}

// shown is what show sets.
func shown(value int) string { return fmt.Sprintf(`{"value": %d}`, value) }

// keys are the events of a flow and of all that come from it.
func (e *expected) keys() []string {
	keys := e.events
	for _, c := range e.families {
		keys = append(keys, c.keys()...)
	}
	return keys
}
