package why_test

import (
	"context"
	"encoding/json"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/enginetest"
	"github.com/lanekeeper/lanekeeper/internal/leaks"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/trace"
	"github.com/lanekeeper/lanekeeper/why"
)

func TestMain(m *testing.M) { pgtest.Main(leaks.Tests{M: m}) }

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

// value returns the first value of a statement, or the zero value for null and for no row.
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

// The test records the truth itself. It reads none of it from the data of why().

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

// wait is a wait that has not ended. by are the former holders of its lane, one for each hold.
type wait struct {
	kind, key, step string
	by              []*run
}

// cause is the target of a reference; trace is the trace of from, if it has one.
type cause struct{ kind, from, trace string }

// event is a raised event.
type event struct {
	id, name, key string
	trace         string // the sending execution; empty from outside
	by            string // a reference
	end           *run   // set if it is the completion of this execution
	taken         bool
	woken         []*run
}

func (e *event) ref() string { return "event " + e.id }

// edge is a row that why must have.
type edge struct{ part, kind, from, to string }

// tied is an edge with its trace.
type tied struct {
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
	id, trace string // the source of the event or request; empty: none
	ended     bool   // its last attempt failed, and may be repeated
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
		world: w, rng: rand.New(rand.NewPCG(seed, 4711)), causes: map[string]cause{}, spend: map[[2]string]*model{},
		asked:   map[string]*run{},
		answers: map[string]*event{},
	}
	for range 3 {
		s.keys = append(s.keys, w.name("key"))
	}
	s.lanes = []*lane{{name: "objective:" + w.name("o")}, {name: w.name("lane")}}
	return s
}

// name returns a unique name.
func (w *world) name(what string) string {
	w.n++
	return what + string(trace.New(trace.Flow)[25:]) + string(rune('a'+w.n%26))
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
	s.facts = append(s.facts, tied{traceID, edge{part, kind, from, to}})
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

func TestWriteAnswer(t *testing.T) {
	t.Parallel()
	at := time.Date(2026, 11, 22, 9, 30, 0, 0, time.UTC)
	later := at.AddDate(0, 0, 1)
	const here, there = "fl_01JD3V7K8ZQ6W2M5T9X4C1B0AE", "wh_01JD3V7K8ZQ6W2M5T9X4C1B0AF"
	answer := why.Answer{TraceID: here, OTelTraceID: trace.ID(here).OTel(), Reasons: []why.Reason{
		{Part: why.Head, At: &at, What: "automation completed after 3.0 s", ToRef: "trace " + here, TraceID: here},
		{
			Part: why.Because, At: &at, Kind: "webhook", What: "delivery 7 came to endpoint shop", FromRef: "delivery a",
			ToRef: "execution w", TraceID: here,
		},
		{
			Part: why.Because, At: &at, Kind: "raised", What: "webhook raised event ORDER 7", FromRef: "execution w",
			ToRef: "event e", TraceID: there,
		},
		{Part: why.Did, At: &at, Kind: "run", What: "automation completed", ToRef: "execution x", TraceID: here},
		{
			Part: why.Did, At: &later, Kind: "child", What: "child failed:\x1b[2J two\nlines", FromRef: "execution x",
			ToRef: "execution y", TraceID: here,
		},
		{
			Part: why.Trouble, At: &at, Kind: "stale", What: "a write was refused", FromRef: "execution x",
			ToRef: "step s", TraceID: here,
		},
		{Part: why.Spend, Kind: "more", What: "… and more than 10,000 actions, which were not read", TraceID: here},
	}}
	var out strings.Builder
	require.NoError(t, why.Write(&out, answer, false))
	want := here + `  automation completed after 3.0 s
019347b3cd1fb9b82a1749e91815814e  2026-11-22 09:30:00 UTC

Causes
  09:30:00  delivery 7 came to endpoint shop
  09:30:00  └─ webhook raised event ORDER 7  ` + there + `

Executions
  09:30:00  automation completed
  2026-11-23 09:30:00  └─ child failed:` + "\uFFFD" + `[2J two lines

Problems
  09:30:00  ✗ a write was refused

Cost
            … and more than 10,000 actions, which were not read
`
	assert.NoDiff(t, want, out.String())
}

func TestUnknownTraceIsReported(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	_, err := why.Of(t.Context(), w.pool, "nonsense")
	assert.ErrorIs(t, err, trace.ErrInvalid, "of nonsense")
	_, err = why.Of(t.Context(), w.pool, string(trace.New(trace.Chat)))
	assert.ErrorIs(t, err, activity.ErrNotFound, "of a trace that is not there")
	for _, sql := range []string{
		`select count(*) from why(null)`, `select count(*) from why('')`,
		`select count(*) from why('hb_', -1)`,
	} {
		assert.Equal(t, 0, value[int64](w, sql), sql)
	}
}

func TestAShutdownIsExplained(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	engine := enginetest.New(t, w.pool, func(o *executions.Options) { o.StopTimeout = time.Millisecond })
	held := make(chan struct{})
	enginetest.Register(t, engine, "order", func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
		if _, err := executions.Lane(ctx, "orders"); err != nil {
			return executions.Result{}, err
		}
		close(held)
		<-ctx.Done()
		return executions.Result{}, context.Cause(ctx)
	})
	r := w.newScenario(1).start(executions.Spec{Flow: "order", Surface: trace.Flow}, nil, cause{})
	stop := enginetest.Run(t, engine.Run)
	testkit.Receive(t, held)
	stop()
	answer, err := why.Of(t.Context(), w.pool, r.trace)
	require.NoError(t, err)
	var texts strings.Builder
	for _, reason := range answer.Reasons {
		if reason.Kind == "held" || reason.Kind == "lost" {
			texts.WriteString(reason.What + "\n")
		}
	}
	assert.Contains(t, texts.String(), "order held lane orders for ", ", until its process handed the execution back\n",
		" under claim 1, which handed it back: it shut down, was paused or lacks the flow; it is ready to continue\n")
}

// Tokens of a model without a price cost an unknown amount, not nothing.
func TestSpendOfUnpricedModel(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.exec(`
		insert into agent_activity (trace_id, kind, skill_name, model, cost_usd, token_usage)
		values ('hb_1', 'model', 'model', 'priced', 0.000179, '{"prompt_tokens": 900, "completion_tokens": 8, "total_tokens": 908}'),
		       ('hb_1', 'model', 'model', 'unpriced', 0, '{"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}'),
		       ('hb_1', 'model', 'model', 'refused', 0, '{}')`)
	assert.Equal(t, "priced: 1 call, 908 tokens, $0.000179\nrefused: 1 call, 0 tokens\nunpriced: 1 call, 3 tokens, no price",
		value[string](w, `select string_agg(r.what, e'\n' order by r.what) from why('hb_1') r where r.part = 'spend'`))
}

// why hides secrets in the texts of others, and cuts lists, with the number of omitted rows.
func TestLargeTraceIsBoundedAndRedacted(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.newScenario(1)
	root := s.start(executions.Spec{Flow: "onboarding", Surface: trace.Flow}, nil, cause{})
	w.exec(`
		insert into agent_executions (trace_id, surface, flow, parent_id, error_message)
		select $1, 'flow', 'child', $2, null from generate_series(1, 4911)`, root.trace, root.id)
	s.claimed(root)
	w.exec(`update agent_executions set status = 'failed', error_message = 'GET /?api_key=hunter2hunter2 failed'
		where id = $1`, root.id)
	w.exec(`insert into agent_activity (trace_id, kind, skill_name, model, cost_usd) select $1, 'model', 'model', 'small',
		0.01 from generate_series(1, 10001)`, root.trace)
	answer, err := why.Of(t.Context(), w.pool, root.trace)
	require.NoError(t, err)
	did := answer.Of(why.Did)
	got := did[len(did)-1]
	assert.Truef(t, len(did) == why.MaxRows+1 && got.Kind == why.More && got.What == "… and 4,812 more executions",
		"%d rows, the last is %+v", len(did), got)
	spent := answer.Of(why.Spend)
	if got := spent[len(spent)-1]; got.Kind != why.More || !strings.Contains(got.What, "more than 10,000 actions") {
		t.Errorf("the spend ends with %+v", got)
	}
	for _, r := range answer.Reasons {
		assert.Truef(t, !strings.Contains(r.What+string(r.Detail), "hunter2"), "a secret is shown: %+v", r)
	}
}

// crowd has two executions of other traces wait for one event. A third execution sends it, through one of a worker's
// interfaces.
func (s *scenario) crowd() bool {
	by := s.some(working)
	if by == nil {
		return false
	}
	e := &event{name: "EVENT_COMPLETED", key: s.name("crowd"), by: by.ref(), trace: by.trace}
	var waiting []*run
	for range 2 {
		r := s.start(executions.Spec{Flow: "waits", Surface: trace.Flow}, nil, cause{"outside", "outside", ""})
		s.claimed(r)
		s.want(r, s.park(r, "event", e.key), true)
		waiting = append(waiting, r)
	}
	if s.rng.IntN(2) == 0 {
		e.id = value[string](s.world, `
			with by as materialized (select set_config('lanekeeper.raised_by', $2, true) as raiser)
			select event_id::text from by cross
			  join lateral lanekeeper.deliver_agent_event('EVENT_COMPLETED', case when by.raiser is not null
			    then $1 end)`, e.key, e.by)
	} else {
		ctx := trace.With(s.ctx(), trace.Span{TraceID: trace.ID(by.trace), ExecutionID: by.id})
		s.tx(func(tx pgx.Tx) error {
			got, err := s.engine.Deliver(ctx, postgres.Beginner(tx), e.name, e.key, nil, "")
			e.id = got.EventID
			return err
		})
	}
	s.events = append(s.events, e)
	s.causes[e.ref()] = cause{"raised", e.by, e.trace}
	for _, r := range waiting {
		s.resumed(r, e, "waited", e.ref())
	}
	s.started(e)
	return true
}

// fill enlarges the tables until every plan prefers an index.
func (w *world) fill() {
	w.t.Helper()
	w.exec(`
		insert into agent_executions (id, trace_id, surface, flow, status, created_at)
		select lanekeeper.agent_uuid7(), 'hb_' || lpad(n::text, 26, '0'), 'heartbeat', 'beat', 'pending', clock_timestamp()
		  from generate_series(1, 3000) n`)
	w.exec(`
		insert into agent_activity (trace_id, kind, skill_name) select 'hb_' || lpad((n / 5)::text, 26, '0'), 'call', 's'
		  from generate_series(1, 15000) n;`)
	w.exec(`
		insert into agent_events (event, key) select 'E', n::text from generate_series(1, 3000) n`)
	w.exec(`
		insert into agent_links (cause, kind, effect) select 'trace ' || n, 'raised', 'event ' || n
		  from generate_series(1, 3000) n`)
	w.exec(`analyze`)
}

// Every read of why uses an index with a condition, in a history with every kind of row.
func TestReadsUseIndexes(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.fill()
	s := w.newScenario(1)
	s.play(80)
	var texts []string
	conn := explained(t, w, &texts)
	for _, id := range s.traceIDs() {
		pgtest.Exec(t, conn, `select * from why($1)`, id)
	}
	reads := 0
	for _, text := range texts {
		var plan struct {
			Query string `json:"Query Text"`
			Plan  node
		}
		err := json.Unmarshal([]byte(text), &plan)
		require.Truef(t, err == nil, "read plan: %v\n%s", err, text)
		reads += plan.Plan.check(t, plan.Query)
	}
	assert.Truef(t, reads >= 30, "%d reads of tables were seen", reads)
}

// explained returns a connection on which the server explains every statement into texts, also those in functions.
func explained(t *testing.T, w *world, texts *[]string) *pgx.Conn {
	t.Helper()
	config := w.pool.Config().ConnConfig.Copy()
	config.OnNotice = func(_ *pgconn.PgConn, n *pgconn.Notice) {
		if _, plan, is := strings.Cut(n.Message, "plan:\n"); is {
			*texts = append(*texts, plan)
		}
	}
	conn, err := pgx.ConnectConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(func() { conn.Close(context.WithoutCancel(t.Context())) })
	for _, sql := range []string{
		`load 'auto_explain'`, `set auto_explain.log_min_duration = 0`, `set auto_explain.log_nested_statements = on`,
		`set auto_explain.log_format = json`,
		`set auto_explain.log_level = notice`,
	} {
		if _, err := conn.Exec(t.Context(), sql); err != nil {
			t.Skipf("auto_explain cannot be used here: %s: %v", sql, err)
		}
	}
	return conn
}

// node is a step of a plan.
type node struct {
	Type      string `json:"Node Type"`
	Relation  string `json:"Relation Name"`
	Index     string `json:"Index Name"`
	Condition string `json:"Index Cond"`
	Plans     []node
}

// check reports reads of a whole table or a whole index, and counts the reads of tables.
func (n node) check(t *testing.T, query string) (reads int) {
	t.Helper()
	if n.Relation != "" || n.Index != "" {
		reads++
	}
	switch {
	case n.Type == "Seq Scan" && strings.HasPrefix(n.Relation, "agent_"):
		t.Errorf("all of %s is read by\n%s", n.Relation, query)
	case n.Index != "" && n.Condition == "":
		t.Errorf("all of index %s is read by\n%s", n.Index, query)
	}
	for _, below := range n.Plans {
		reads += below.check(t, query)
	}
	return reads
}
