package why_test

import (
	"context"
	"math/rand/v2"
	"slices"
	"strconv"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/leaks"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/skills"
)

func TestMain(m *testing.M) { pgtest.Main(leaks.Tests{M: m}) }

// The tests of why() play random history and compare its rows with a model. The model has what the test itself did, and
// reads nothing that why() reads. answers_test.go and waits_test.go have the operations, and the expected rows.

// world is a database for scenarios. They run one after the other, with the functions and packages of the product. The
// test is the only process.
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
	w.engine, err = executions.New(w.pool, executions.Options{Keeper: lanes.NewKeeper(w.pool, lanes.Options{})})
	require.NoError(t, err)
	_, err = skills.Put(t.Context(), w.pool, skills.Definition{Name: "pay", Handler: "builtin:pay"},
		skills.SourceWorkspace)
	require.NoError(t, err)
	w.exec(`insert into agent_webhook_targets (name, url, secrets, events)
		values ('ops', 'https://ops.example', '{"${S}"}', '{"order.placed", "execution.failed"}')`)
	w.exec(`insert into agent_threads (id, channel) values ('talk', 'chat')`)
	return w
}

func (w *world) ctx() context.Context { return w.t.Context() }

func (w *world) exec(sql string, args ...any) {
	w.t.Helper()
	pgtest.Exec(w.t, w.pool, sql, args...)
}

// value returns the first value of a statement that is not null, or the zero value.
func value[T any](w *world, sql string, args ...any) T {
	w.t.Helper()
	for _, v := range pgtest.Column[*T](w.t, w.pool, sql, args...) {
		if v != nil {
			return *v
		}
	}
	var zero T
	return zero
}

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
	old                      []int64  // claims that have ended
	open                     []string // steps with calls in flight
	wait                     *wait
}

func (r *run) ref() string { return "execution " + r.id }

// wait is a wait that has not ended.
type wait struct {
	kind, key, step string
	by              []*run // the former holders of the lane that it waits for, one for each hold
}

// cause is what caused an object of the history.
type cause struct {
	kind, from string // from is a reference, such as "event ID"
	trace      string // the trace of from; "" if it has none or the model does not need it
}

// event is a raised event.
type event struct {
	id, name, key string
	trace         string // of the sender; empty from outside
	by            string // a reference
	end           *run   // set if it is the completion of this execution
	taken         bool
	woken         []*run
}

func (e *event) ref() string { return "event " + e.id }

// edge is a row that why must have.
type edge struct{ part, kind, from, to string }

// fact is an edge with its trace.
type fact struct {
	trace string
	edge
}

// lane has the chain of its owners: the first lender first, the present holder last.
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

// model is the spend of a model in a trace.
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
	id      string
	trace   string // of the event or the admin that caused it; empty for none
	ended   bool   // its last attempt failed, and may be repeated
	taken   bool
	attempt int
	byEvent bool
}

func (j *job) ref() string { return "run " + j.id }

// approval is an approval that a run requested.
type approval struct {
	id      string
	asker   *run
	parked  bool
	decided bool
	used    bool
}

// scenario is a random piece of history.
type scenario struct {
	*world
	rng       *rand.Rand
	keys      []string // of events
	runs      []*run
	lanes     []*lane
	events    []*event
	autos     []*automation
	jobs      []*job
	approvals []*approval
	asked     map[string]*run // requests to people
	causes    map[string]cause
	facts     []fact
	spend     map[[2]string]*model
	traces    []string // without executions
	log       []string
}

func (w *world) newScenario(seed uint64) *scenario {
	s := &scenario{
		world: w, rng: rand.New(rand.NewPCG(seed, 4711)), causes: map[string]cause{}, spend: map[[2]string]*model{},
		asked: map[string]*run{},
	}
	for range 3 {
		s.keys = append(s.keys, w.name("key"))
	}
	s.lanes = []*lane{{name: "objective:" + w.name("o")}, {name: w.name("lane")}}
	return s
}

// name returns a name of its own for an object of the world.
func (w *world) name(what string) string {
	w.n++
	return what + strconv.Itoa(w.n)
}

func pick[T any](s *scenario, from []T) T { return from[s.rng.IntN(len(from))] }

// some returns a random suitable execution, or nil.
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

// fact records an edge that a trace must have.
func (s *scenario) fact(traceID, part, kind, from, to string) {
	s.facts = append(s.facts, fact{traceID, edge{part, kind, from, to}})
}

func (s *scenario) add(r *run, c cause) *run {
	s.runs = append(s.runs, r)
	s.causes[r.ref()] = c
	return r
}

func (s *scenario) traceIDs() []string {
	ids := slices.Clone(s.traces)
	for _, r := range s.runs {
		if !slices.Contains(ids, r.trace) {
			ids = append(ids, r.trace)
		}
	}
	return ids
}
