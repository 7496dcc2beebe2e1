package why_test

import (
	"context"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/trace"
)

// world is a database on which scenarios are played, one after the other, by the functions and packages of the product, with no process at
// work but the test.
type world struct {
	t      *testing.T
	pool   *pgxpool.Pool
	engine *executions.Engine
	n      int // of names
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{t: t, pool: pgtest.DB(t)}
	var err error
	if w.engine, err = executions.New(w.pool, executions.Options{Keeper: lanes.NewKeeper(w.pool, lanes.Options{})}); err != nil {
		t.Fatal(err)
	}
	if _, err := skills.Put(t.Context(), w.pool, skills.Definition{Name: "pay", Handler: "builtin:pay"}, skills.SourceWorkspace); err != nil {
		t.Fatal(err)
	}
	w.exec(`insert into agent_webhook_targets (name, url, secrets, events) values ('ops', 'https://ops.example', '{"${S}"}', '{"order.placed", "execution.failed"}')`)
	w.exec(`insert into agent_threads (id, channel) values ('talk', 'chat')`)
	return w
}

func (w *world) ctx() context.Context { return w.t.Context() }

func (w *world) exec(sql string, args ...any) {
	w.t.Helper()
	if _, err := w.pool.Exec(w.ctx(), sql, args...); err != nil {
		w.t.Fatalf("%s: %v", sql, err)
	}
}

// value is the one value that a statement answers with; the zero value for null and for no row.
func value[T any](w *world, sql string, args ...any) T {
	w.t.Helper()
	var v *T
	rows, err := w.pool.Query(w.ctx(), sql, args...)
	if err != nil {
		w.t.Fatalf("%s: %v", sql, err)
	}
	defer rows.Close()
	if rows.Next() {
		if err := rows.Scan(&v); err != nil {
			w.t.Fatalf("%s: %v", sql, err)
		}
	}
	rows.Close()
	if err := rows.Err(); err != nil {
		w.t.Fatalf("%s: %v", sql, err)
	}
	if v == nil {
		var zero T
		return zero
	}
	return *v
}

// The truth, as the test keeps it: nothing of it is read from what why() reads.

// run is an execution.
type run struct {
	id, trace, flow, surface string
	parent                   *run
	inherits                 bool
	over                     bool
	claimed                  bool
	claim                    int64
	worker                   string
	spent                    int // claims lost since the last checkpoint
	steps                    int
	old                      []int64  // claims that are over
	open                     []string // steps whose calls are under way
	wait                     *wait
}

func (r *run) ref() string { return "execution " + r.id }

// wait is one that goes on. by are those who had the lane that it is for, one for each time.
type wait struct {
	kind, key, step string
	by              []*run
}

// cause is what stands behind a reference; trace is that of from, where it has one.
type cause struct{ kind, from, trace string }

// event is one that was raised.
type event struct {
	id, name, key string
	trace         string // whose it is; empty from outside
	by            string // a reference
	end           *run   // it is the end of this execution
	taken         bool
	woken         []*run
}

func (e *event) ref() string { return "event " + e.id }

// edge is a row that why has to have.
type edge struct{ part, kind, from, to string }

// tied is an edge that belongs to a trace.
type tied struct {
	trace string
	edge
}

// lane has those who have it: who lent it first, who has it now last.
type lane struct {
	name    string
	stack   []*run
	expired bool
}

func (l *lane) holder() *run {
	if len(l.stack) == 0 {
		return nil
	}
	return l.stack[len(l.stack)-1]
}

// model is what was spent on a model in a trace.
type model struct {
	calls, tokens int64
	micros        int64
}

// automation listens for an event.
type automation struct {
	name, id, event string
}

// job is a run of an automation.
type job struct {
	id, trace string // whose event or request it is; empty: nobody's
	ended     bool   // its last attempt failed, and can be tried again
	taken     bool
	attempt   int
	byEvent   bool
}

func (j *job) ref() string { return "run " + j.id }

// leave is an approval.
type leave struct {
	id      string
	asker   *run
	parked  bool
	decided bool
	used    bool
}

// scenario is a random piece of history.
type scenario struct {
	*world
	rng     *rand.Rand
	keys    []string // of events
	runs    []*run
	lanes   []*lane
	events  []*event
	autos   []*automation
	jobs    []*job
	leaves  []*leave
	asked   map[string]*run // requests to people
	answers map[string]*event
	causes  map[string]cause
	facts   []tied
	spend   map[[2]string]*model
	traces  []string // without executions
	log     []string
}

func (w *world) newScenario(seed uint64) *scenario {
	s := &scenario{
		world: w, rng: rand.New(rand.NewPCG(seed, 4711)), causes: map[string]cause{}, spend: map[[2]string]*model{}, asked: map[string]*run{},
		answers: map[string]*event{},
	}
	for range 3 {
		s.keys = append(s.keys, w.name("key"))
	}
	s.lanes = []*lane{{name: "objective:" + w.name("o")}, {name: w.name("lane")}}
	return s
}

// name is a name that nothing else has.
func (w *world) name(what string) string {
	w.n++
	return what + string(trace.New(trace.Flow)[25:]) + string(rune('a'+w.n%26))
}

func pick[T any](s *scenario, from []T) T { return from[s.rng.IntN(len(from))] }

// some is an execution that fits, by chance; nil when none does.
func (s *scenario) some(fits func(r *run) bool) *run {
	var all []*run
	for _, r := range s.runs {
		if fits(r) {
			all = append(all, r)
		}
	}
	if len(all) == 0 {
		return nil
	}
	return pick(s, all)
}

func working(r *run) bool { return r.claimed }

// fact notes an edge that a trace has to have.
func (s *scenario) fact(traceID, part, kind, from, to string) {
	s.facts = append(s.facts, tied{traceID, edge{part, kind, from, to}})
}

func (s *scenario) add(r *run, c cause) *run {
	s.runs = append(s.runs, r)
	s.causes[r.ref()] = c
	return r
}

// traceIDs are all traces of the scenario.
func (s *scenario) traceIDs() []string {
	ids := slices.Clone(s.traces)
	for _, r := range s.runs {
		if !slices.Contains(ids, r.trace) {
			ids = append(ids, r.trace)
		}
	}
	return ids
}
