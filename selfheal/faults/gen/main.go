// Command gen writes the labelled set of fault traces, the same bytes each time. It knows causes and no rule: it
// imports nothing of this module. Each cause decides whether the skill is at fault when it makes a trace. The label
// follows from that decision alone. See README.md beside the set.
package main

import (
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"strings"
)

// seeds is the number of traces of each shape. Odd seeds are held out.
const seeds = 30

// detectWithin is the number of calls within which the rule must disable a faulty skill. One run of the loop makes as
// many calls with default settings.
const detectWithin = 25

func main() {
	if err := write(os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func write(w io.Writer) error {
	lines := json.NewEncoder(w)
	for i, s := range shapes {
		for seed := range uint64(seeds) {
			m := &maker{Rand: rand.New(rand.NewPCG(seed, uint64(i)+1))} //nolint:gosec // data of tests
			m.trace = trace{Name: fmt.Sprintf("%s-%02d", s.name, seed), Shape: s.name, Seed: seed, HeldOut: seed%2 == 1}
			m.world()
			s.make(m)
			if m.Out {
				m.By = m.deadline()
			}
			m.render()
			if err := lines.Encode(m.trace); err != nil {
				return err
			}
		}
	}
	return nil
}

// trace is a line of the set.
type trace struct {
	Name    string `json:"name"`
	Shape   string `json:"shape"`
	Seed    uint64 `json:"seed"`
	HeldOut bool   `json:"held_out"`
	Out     bool   `json:"out"`
	From    int    `json:"from,omitempty"`
	By      int    `json:"by,omitempty"`
	Why     string `json:"why"`
	Skill   string `json:"skill"`
	Caller  string `json:"caller"`
	Result  string `json:"result"`
	Gap     string `json:"gap"`
	Latency string `json:"latency"`
}

// Letters of results. The README has the class of each.
const (
	success  = '.'
	timeout  = 't'
	status   = 'h'
	network  = 'n'
	sql      = 's'
	rejected = 'i'
)

// call is one call of the skill s or of others, which are digits.
type call struct {
	skill, caller, result byte
	gap, latency          int
}

// maker makes one trace.
type maker struct {
	*rand.Rand
	trace
	calls   []call
	base    float64 // share of failures of a healthy skill
	gap     float64 // mean minutes between calls
	callers int
	others  int
	share   float64 // of calls of other skills
	latency int
	caller  byte // of the session
	session int  // calls left of it
	fixed   int  // number of the call from which the fault is certain; 0 for From
}

// between returns a number from low to high.
func (m *maker) between(low, high int) int { return low + m.IntN(high-low+1) }

func (m *maker) fraction(low, high float64) float64 { return low + (high-low)*m.Float64() }

func (m *maker) any(classes string) byte { return classes[m.IntN(len(classes))] }

// world chooses the values that do not depend on the shape.
func (m *maker) world() {
	m.base, m.gap = m.fraction(0, 0.08), m.fraction(1, 25)
	m.callers, m.others, m.share = m.between(4, 12), m.between(2, 4), m.fraction(0.3, 0.5)
	m.latency = m.between(2, 5)
}

// nextCaller returns the caller of the next call. A caller makes some calls in a row.
func (m *maker) nextCaller() byte {
	if m.session == 0 {
		m.caller, m.session = byte('a'+m.IntN(m.callers)), m.between(1, 4)
	}
	m.session--
	return m.caller
}

// addOwn adds a call of the skill, perhaps after calls of others. It fails with the class, unless that is 0.
func (m *maker) addOwn(class byte, caller byte) {
	for m.Float64() < m.share {
		m.addOther(0)
	}
	m.add('s', class, caller)
}

// addOther adds a call of another skill.
func (m *maker) addOther(class byte) {
	if class == 0 && m.Float64() < m.base/2 {
		class = m.any("tnh")
	}
	m.add(byte('1'+m.IntN(m.others)), class, byte('a'+m.IntN(m.callers)))
}

func (m *maker) add(skill, class, caller byte) {
	c := call{skill: skill, caller: caller, result: success, gap: min(int(m.ExpFloat64()*m.gap), 61)}
	c.latency = m.latency + m.IntN(2)
	if class != 0 {
		c.result = class
	}
	if class == timeout {
		c.latency = 11
	}
	m.calls = append(m.calls, c)
}

// chance adds a call of the skill that fails with probability q.
func (m *maker) chance(q float64, classes string) {
	var class byte
	if m.Float64() < q {
		class = m.any(classes)
	}
	m.addOwn(class, m.nextCaller())
}

// healthy adds n calls of a skill without a fault.
func (m *maker) healthy(n int) {
	for range n {
		m.chance(m.base, "tnh")
	}
}

// begin labels the trace: the skill is at fault from its next call on.
func (m *maker) begin(format string, args ...any) {
	m.Out, m.From = true, len(m.calls)+1
	m.Why = fmt.Sprintf(format, args...)
}

// deadline returns the number of the call by which the rule must disable the skill.
func (m *maker) deadline() int {
	left := detectWithin
	for i := max(m.From, m.fixed) - 1; i < len(m.calls); i++ {
		if m.calls[i].skill == 's' {
			if left--; left == 0 {
				return i + 1
			}
		}
	}
	panic(m.Name + " is too short for its deadline")
}

func (m *maker) render() {
	const digits = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
	var skill, caller, result, gap, latency strings.Builder
	for _, c := range m.calls {
		skill.WriteByte(c.skill)
		caller.WriteByte(c.caller)
		result.WriteByte(c.result)
		gap.WriteByte(digits[c.gap])
		latency.WriteByte(digits[c.latency])
	}
	m.Skill, m.Caller, m.Result, m.Gap, m.Latency = skill.String(), caller.String(), result.String(), gap.String(),
		latency.String()
}

// shapes are the causes of failures, in the order of the set.
var shapes = []struct {
	name string
	make func(m *maker)
}{
	{"alternating", alternating},
	{"slow_death", slowDeath},
	{"model_mistakes", modelMistakes},
	{"provider_outage", providerOutage},
	{"schema_change", schemaChange},
	{"flapping", flapping},
	{"one_bad_caller", oneBadCaller},
	{"healthy", healthy},
}

// alternating: some of several servers behind the skill are broken.
func alternating(m *maker) {
	m.healthy(m.between(0, 40))
	pattern := []string{"fs", "ffs", "fsffs", "ffsfs"}[m.IntN(4)]
	m.begin("%d of every %d calls fail, whoever makes them", strings.Count(pattern, "f"), len(pattern))
	class := m.any("tnh")
	for i := range m.between(32, 45) {
		q := m.base
		if pattern[i%len(pattern)] == 'f' {
			q = 1
		}
		m.chance(q, string(class))
	}
}

// slowDeath: calls take longer over time, and more of them time out.
func slowDeath(m *maker) {
	m.healthy(m.between(5, 40))
	grow, low := m.between(25, 60), m.latency
	m.Out = true
	for i := range grow {
		q := m.base + (1-m.base)*float64(i)/float64(grow)
		m.latency = low + (10-low)*i/grow
		if q >= 0.25 && m.From == 0 {
			m.begin("timeouts grow from none to all calls within %d calls", grow)
		}
		if q >= 0.5 && m.fixed == 0 {
			m.fixed = len(m.calls) + 1
		}
		m.chance(q, "t")
	}
	for range detectWithin + 3 {
		m.chance(0.97, "t")
	}
}

// modelMistakes: the model calls with invalid arguments, several times in one turn. Either the schema or the service
// rejects the arguments.
func modelMistakes(m *maker) {
	class, who := byte(rejected), "the schema rejects"
	if m.IntN(2) == 0 {
		class, who = status, "the service rejects"
	}
	m.Why = "the model's arguments are wrong, which " + who + "; other calls succeed"
	for range m.between(3, 6) {
		m.healthy(m.between(6, 18))
		m.session = 0
		caller := m.nextCaller()
		m.session = 0
		for range m.between(2, 6) {
			m.addOwn(class, caller)
		}
	}
	m.healthy(m.between(6, 18))
}

// providerOutage: for a while, no service behind any skill answers.
func providerOutage(m *maker) {
	m.Why = "every skill fails for a while and then works again"
	for range m.between(1, 2) {
		m.healthy(m.between(15, 35))
		class := m.any("tnh")
		for range m.between(6, 30) {
			var failed byte
			if m.Float64() < 0.97 {
				failed = class
			}
			if m.Float64() < 0.55 {
				m.addOther(failed)
			} else {
				m.add('s', failed, m.nextCaller())
			}
		}
	}
	m.healthy(m.between(15, 30))
}

// schemaChange: the service behind the skill changes, and no call works any more.
func schemaChange(m *maker) {
	m.healthy(m.between(0, 60))
	m.begin("from here on every call fails, whoever makes it")
	class := m.any("hs")
	for range m.between(28, 40) {
		m.chance(0.98, string(class))
	}
}

// flapping: the service behind the skill goes down and up repeatedly. One trace of four has one short restart instead,
// which is no reason to disable the skill.
func flapping(m *maker) {
	m.healthy(m.between(5, 40))
	if m.Seed/2%4 == 3 { // as often among the held-out
		m.Why = "one short restart; it works before and after"
		m.gap, m.session = 0.5, 0
		for range m.between(2, 5) {
			m.addOwn(m.any("nh"), byte('a'+m.IntN(m.callers)))
		}
		m.gap = m.fraction(1, 25)
		m.healthy(m.between(25, 60))
		return
	}
	m.begin("it goes down and up again and again, and fails about half of its calls")
	class := m.any("tn")
	for n := 0; n < detectWithin+8; {
		down, up := m.between(2, 6), m.between(2, 4)
		for range down {
			m.chance(0.95, string(class))
		}
		m.healthy(up)
		n += down + up
	}
}

// oneBadCaller: one caller repeats a request that cannot succeed.
func oneBadCaller(m *maker) {
	m.healthy(m.between(5, 30))
	bad := byte('a' + m.callers)
	m.Why = "the calls of " + string(bad) + " fail; those of the others succeed"
	class, share := m.any("hst"), m.fraction(0.08, 0.35)
	for n := m.between(50, 80); n > 0; n-- {
		if m.Float64() > share {
			m.healthy(1)
			continue
		}
		for range m.between(1, 5) {
			m.addOwn(class, bad)
			n--
		}
	}
}

// healthy: some failures by chance, more in some traces than in others.
func healthy(m *maker) {
	m.base = m.fraction(0, 0.2)
	m.Why = "failures by chance alone"
	m.healthy(m.between(70, 110))
}
