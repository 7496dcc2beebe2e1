//go:build unix

package soak_test

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/lanes"
)

// counter is the server that the skills call and that messages are posted to. It keeps what came in memory, because the
// database is away at times.
type counter struct {
	slow bool // also with messages; one whose process dies meanwhile is posted again after a minute

	mu    sync.Mutex
	calls []called
}

type called struct{ skill, key, body string }

// ServeHTTP takes its time over a call, so that processes die during some.
func (c *counter) ServeHTTP(rw http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return // the client went away
	}
	skill := strings.Trim(r.URL.Path, "/")
	key := r.Header.Get("Idempotency-Key")
	if skill == "post" {
		key = r.Header.Get("Webhook-Id")
	}
	c.mu.Lock()
	c.calls = append(c.calls, called{skill, key, string(body)})
	c.mu.Unlock()
	if c.slow || skill != "post" {
		testkit.Wait(r.Context(), 100*time.Millisecond+rand.N(400*time.Millisecond))
	}
	rw.Header().Set("Content-Type", "application/json")
	if _, err := rw.Write(body); err != nil {
		return // the client went away
	}
}

// processes are how many work at once; underWay counts on it.
const processes = 3

// flowSoak says how much there is, and how much goes wrong.
type flowSoak struct {
	executions int
	lasts      time.Duration
	restarts   int
	kill       time.Duration // on average between two
	lease      string
}

func sizeOf(t *testing.T) flowSoak {
	t.Helper()
	if os.Getenv("AGENT_SOAK") == "" {
		short := flowSoak{executions: 60, lasts: 25 * time.Second, restarts: 1, kill: 2 * time.Second, lease: "10s"}
		if testing.Short() {
			short.executions, short.lasts = 30, 12*time.Second
		}
		return short
	}
	return flowSoak{
		executions: 1000, lasts: lasts(t), restarts: max(3, int(lasts(t)/(40*time.Second))),
		kill: 1500 * time.Millisecond, lease: "10s",
	}
}

// TestFlowsOutliveEverything runs many flows while processes are killed, the database is restarted, and events come
// twice, too early and too late; and then asks whether everything is as if nothing had happened. AGENT_SOAK=5m runs
// 1,000.
func TestFlowsOutliveEverything(t *testing.T) {
	size := sizeOf(t)
	server := pgtest.Own(t)
	n := &noise{t: t, server: server}
	served := &counter{slow: os.Getenv("AGENT_SOAK") != ""}
	w := newWorldOn(t, server.URL(), flowsYAML, served.ServeHTTP)
	pgtest.Exec(w.t, w.db, notedOfFlows)
	pgtest.Exec(w.t, w.db, scenariosSQL())
	n.world, n.environ = w, w.environ("AGENT_WORKER_LEASE="+size.lease, "AGENT_WORKERS=20")
	engine, err := executions.New(w.db, executions.Options{Keeper: lanes.NewKeeper(w.db, lanes.Options{})})
	require.NoError(t, err)
	p := &people{
		world: w, noise: n, engine: engine, total: size.executions, seen: map[string]bool{},
		given: map[string]given{},
	}
	p.jobs.SetLimit(16)
	t.Cleanup(func() { _ = p.jobs.Wait() }) // none fails; they end with the test
	n.begin(processes)
	p.bear(size)
	p.settleFlows(size)
	p.keep(served)
	for _, name := range checkNames(flowChecks) {
		for i, violation := range pgtest.Column[string](t, w.db, flowChecks[name]) {
			if i == 10 {
				t.Errorf("%s: and more", name)
				break
			}
			t.Errorf("%s: %s", name, violation)
		}
	}
	p.tallyFlows()
	if t.Failed() {
		for _, a := range n.slots {
			t.Logf("agent %s:\n%s", strings.Join(a.Cmd.Args[1:], " "), worst(a))
		}
	}
}

// bear starts everything and sees to it while the noise lasts.
func (p *people) bear(size flowSoak) {
	ctx, end := context.WithTimeout(p.world.t.Context(), size.lasts)
	defer end()
	var group sync.WaitGroup
	group.Go(func() { p.keepKilling(ctx, size.kill) })
	group.Go(func() { p.keepRestarting(ctx, size.restarts, size.lasts) })
	group.Go(func() {
		for i := range size.executions {
			testkit.Wait(ctx, size.lasts*7/10/time.Duration(size.executions)) // when the time is over, the others come at once
			p.start(i)
		}
	})
	group.Go(func() {
		for testkit.Wait(ctx, 100*time.Millisecond) {
			_ = p.lookOut(ctx) // the database may be away
		}
	})
	group.Wait()
}

// settleFlows waits until everything has ended, in peace.
func (p *people) settleFlows(size flowSoak) {
	t := p.world.t
	t.Helper()
	began := time.Now()
	told := began
	limit := 4*patience + size.lasts
	quiet := func() bool {
		if err := p.lookOut(t.Context()); err != nil {
			return false
		}
		p.mu.Lock()
		begun := len(p.runs) == p.total
		p.mu.Unlock()
		left := pgtest.Column[string](t, p.db, underWay)
		if time.Since(told) > 10*time.Second {
			told = time.Now()
			t.Logf("under way after %s: %s", time.Since(began).Round(time.Second), strings.Join(left, "; "))
		}
		return begun && len(left) == 0
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("under way: %s", strings.Join(pgtest.Column[string](t, p.db, underWay), "\n"))
		}
	})
	pgtest.Eventually(t, limit, quiet, "everything that was begun ends")
	require.NoError(t, p.jobs.Wait())
	t.Logf("what was under way ended within %s", time.Since(began).Round(time.Millisecond))
	for _, a := range p.slots {
		a.Base()
		a.Stop()
	}
}

// keep writes down what only the test knows.
func (p *people) keep(served *counter) {
	for _, r := range p.runs {
		pgtest.Exec(p.world.t, p.db, `insert into soak.runs (n, flow, id) values ($1, $2, $3)`, r.n, r.flow, r.id)
	}
	for id, g := range p.given {
		pgtest.Exec(p.world.t, p.db, `insert into soak.given (id, event, key, wanted) values ($1, $2, $3, $4)`, id, g.event,
			g.key, g.wanted)
	}
	for _, c := range served.calls {
		pgtest.Exec(p.world.t, p.db, `insert into soak.calls (skill, key, body) values ($1, $2, $3)`, c.skill, c.key, c.body)
	}
}

// tallyFlows says how much there was, and fails a soak in which something did not happen at all.
func (p *people) tallyFlows() {
	t := p.world.t
	t.Helper()
	t.Logf("%6d processes killed, %d restarts of the database, %d deliveries beyond the first", p.kills, p.restarts,
		p.twice)
	if p.kills == 0 || p.restarts == 0 || p.twice == 0 {
		t.Error("nothing went wrong: the soak does not show what it is for")
	}
	for _, c := range []struct {
		what, sql string
		may       bool // be none
	}{
		{"executions, with children", `select count(*) from agent_executions`, false},
		{"actions", `select count(*) from agent_activity where kind = 'phase'`, false},
		{"claims", `select sum(claim) from agent_executions`, false},
		{"messages", `select count(*) from agent_messages`, false},
		{"events", `select count(*) from agent_events`, false},
		{"waits that timed out", `select count(*) from agent_checkpoints where output ->> 'timed_out' = 'true'`, false},
		{"calls of skills", `select count(*) from soak.calls where skill in ('look', 'pay')`, false},
		{"calls beyond the first", `select count(*) - count(distinct key) from soak.calls where skill = 'look'`, true},
		{"calls that nobody knows the outcome of", `select count(*) from agent_activity where status = 'unknown'`, true},
		{
			"executions that failed because of one",
			`select count(*) from agent_executions where status = 'failed' and flow in ('papers', 'errands')`, true,
		},
		{"posts beyond the first", `select count(*) - count(distinct key) from soak.calls where skill = 'post'`, true},
		{"messages withdrawn", `select count(*) from agent_messages where status = 'withdrawn'`, true},
	} {
		n := pgtest.Value[int](p.world.t, p.db, c.sql)
		t.Logf("%6d %s", n, c.what)
		if n == 0 && !c.may {
			t.Errorf("no %s: the soak does not show what it is for", c.what)
		}
	}
}

// scenariosSQL writes the scenarios where the checks find them.
func scenariosSQL() string {
	var sql strings.Builder
	for _, s := range scenarios {
		fmt.Fprintf(&sql, "insert into soak.flows values ('%s', '%s', %d, %d);\n", s.flow, s.ends, s.pays, s.looks)
		for i, said := range s.says {
			fmt.Fprintf(&sql, "insert into soak.says values ('%s', %d, '%s');\n", s.flow, i+1, said)
		}
		for child, n := range s.children {
			fmt.Fprintf(&sql, "insert into soak.children values ('%s', '%s', %d);\n", s.flow, child, n)
		}
	}
	return sql.String()
}
