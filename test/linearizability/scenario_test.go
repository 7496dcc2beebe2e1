package linearizability_test

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgproxy"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

var (
	rounds = flag.Int("laneproof.rounds", envInt("AGENT_PROVE_ROUNDS", 1), "rounds of histories; make prove asks for many")
	seed   = flag.Uint64("laneproof.seed", 0, "seed of what processes do; 0 takes one from the clock")
)

func envInt(name string, fallback int) int {
	if n, err := strconv.Atoi(os.Getenv(name)); err == nil {
		return n
	}
	return fallback
}

// server is the test's own PostgreSQL. It may crash.
type server struct {
	*pgtest.OwnServer

	t     testing.TB
	admin *pgxpool.Pool
}

func newServer(t testing.TB) *server {
	t.Helper()
	s := &server{OwnServer: pgtest.Own(t), t: t}
	s.admin = pgtest.Pool(t, s.URL(), postgres.Options{ApplicationName: "lanetest admin"})
	pgtest.Exec(s.t, s.admin, writesTable)
	return s
}

// count returns the number from a query. It retries while the server recovers.
func (s *server) count(sql string, args ...any) (n int) {
	s.t.Helper()
	deadline := time.Now().Add(waitTimeout)
	for {
		err := s.admin.QueryRow(s.t.Context(), sql, args...).Scan(&n)
		if err == nil {
			return n
		}
		require.Truef(s.t, !time.Now().After(deadline) && testkit.Wait(s.t.Context(), 20*time.Millisecond),
			"%s: %v", sql, err)
	}
}

// scenario is a group of processes that compete for lanes while faults happen.
type scenario struct {
	t           testing.TB
	server      *server
	proxy       *proxy
	dir         string
	lanes       []string
	familyLanes []string // one lane for each family

	round int
	seed  uint64
	rand  *rand.Rand

	mu        sync.Mutex
	processes []*process
	histories []string
	group     sync.WaitGroup // paused processes that continue later
	faults    map[string]int
}

// skews are the offsets of the processes' clocks in seconds.
var skews = []int64{0, 3600, -3600, 86_400 * 400}

func newScenario(t testing.TB, s *server, seed uint64, round int) *scenario {
	t.Helper()
	c := &scenario{
		t: t, server: s, proxy: newProxy(t, s.URL()), dir: t.TempDir(),
		round: round, seed: seed + uint64(round),
		rand: rand.New(rand.NewPCG(seed, uint64(round))), faults: map[string]int{}, // not a secret
	}
	for n := range 5 {
		c.lanes = append(c.lanes, fmt.Sprintf("r%d:lane%d", round, n))
	}
	for n := range 6 {
		c.familyLanes = append(c.familyLanes, fmt.Sprintf("objective:r%df%d", round, n))
	}
	c.lanes = append(c.lanes, c.familyLanes...)
	return c
}

// launch starts one more process.
func (c *scenario) launch(role string) {
	c.t.Helper()
	n := len(c.histories)
	name := fmt.Sprintf("r%d.%s%d", c.round, role, n)
	p := processConfig{
		Role: role, Name: name, URL: c.proxy.URL("lanetest"), History: historyPath(c.dir, name), Lanes: c.lanes, Clients: 3,
		Seed: c.seed<<8 + uint64(n), Skew: skews[n%len(skews)],
	}
	if role == "family" {
		p.Own = c.familyLanes[0]
		c.familyLanes = c.familyLanes[1:]
	}
	c.histories = append(c.histories, p.History)
	a := start(c.t, p)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.processes = append(c.processes, a)
}

// takeRandom removes a random process from the list and returns it.
func (c *scenario) takeRandom() *process {
	c.mu.Lock()
	defer c.mu.Unlock()
	i := c.rand.IntN(len(c.processes))
	a := c.processes[i]
	c.processes = append(c.processes[:i], c.processes[i+1:]...)
	return a
}

// waitOperations waits until the processes have done that many more operations.
func (c *scenario) waitOperations(more int64) {
	c.t.Helper()
	size := func() (all int64) {
		for _, path := range c.histories {
			if info, err := os.Stat(path); err == nil {
				all += info.Size()
			}
		}
		return all
	}
	const each = 400 // the length of about two lines
	for want, deadline := size()+more*each, time.Now().Add(waitTimeout); size() < want; {
		require.Truef(c.t, !time.Now().After(deadline) && testkit.Wait(c.t.Context(), 5*time.Millisecond),
			"the processes did not do %d operations within %s", more, waitTimeout)
	}
}

// kill ends a process with SIGKILL and starts another.
func (c *scenario) kill() {
	a := c.takeRandom()
	a.kill()
	c.faults["kill -9"]++
	c.launch(a.config.Role)
}

// pause stops a process for longer than any lease. The others continue.
func (c *scenario) pause() {
	a := c.takeRandom()
	a.signal(c.t, syscall.SIGSTOP)
	c.faults["SIGSTOP past the TTL"]++
	c.group.Go(func() {
		testkit.Wait(c.t.Context(), 2300*time.Millisecond)
		a.signal(c.t, syscall.SIGCONT)
		c.mu.Lock()
		defer c.mu.Unlock()
		c.processes = append(c.processes, a)
	})
}

// terminate ends some sessions with pg_terminate_backend.
func (c *scenario) terminate() {
	n := c.server.count(`select count(pg_terminate_backend(pid)) from (
		select pid from pg_stat_activity where application_name = 'lanetest' and pid <> pg_backend_pid()
		 order by (state <> 'idle') desc, random() limit 3) t`)
	c.faults["pg_terminate_backend"] += n
}

// cut breaks the connection of the next request about lanes.
func (c *scenario) cut(where pgproxy.Verdict) {
	p := c.proxy
	before := p.done[where].Load()
	p.next.Store(int32(where))
	for deadline := time.Now().Add(waitTimeout); p.done[where].Load() == before; {
		require.Truef(c.t, !time.Now().After(deadline) && testkit.Wait(c.t.Context(), 2*time.Millisecond),
			"no request about lanes within %s", waitTimeout)
	}
	c.faults[[...]string{"", "cut, unseen", "cut, before the commit", "cut, after the commit"}[where]]++
}

// crash crashes the server, and records that.
func (c *scenario) crash() {
	history, err := newHistory(historyPath(c.dir, "harness"), "harness")
	require.NoError(c.t, err)
	c.histories = append(c.histories, history.file.Name())
	var ops []*op
	for _, lane := range c.lanes {
		ops = append(ops, history.call(&op{Kind: kindCrash, Lane: lane}))
	}
	c.server.Crash()
	for _, o := range ops {
		history.done(o, nil)
	}
	c.faults["crash of the server"]++
}

// play runs the scenario: all kinds of faults, in random order.
func (c *scenario) play() map[string][]*op {
	c.t.Helper()
	for range 2 {
		c.launch("sql")
		c.launch("lanes")
		c.launch("family")
	}
	c.waitOperations(100)
	acts := []func(){c.kill, c.kill, c.pause, c.pause, c.terminate, c.terminate, c.crash}
	for where := pgproxy.Refuse; where <= pgproxy.LoseAnswer; where++ {
		for range 4 {
			acts = append(acts, func() { c.cut(where) })
		}
	}
	c.rand.Shuffle(len(acts), func(i, j int) { acts[i], acts[j] = acts[j], acts[i] })
	for _, act := range acts {
		act()
		c.waitOperations(60)
	}
	c.group.Wait()
	c.waitOperations(100)
	for len(c.processes) > 0 {
		c.takeRandom().stop(c.t)
	}
	byLane, err := read(c.histories)
	require.NoError(c.t, err)
	return byLane
}

// countOperations counts the kinds of operations in a history.
func countOperations(byLane map[string][]*op, into map[string]int) {
	for _, ops := range byLane {
		for _, o := range ops {
			name := string(o.Kind) + " "
			switch {
			case o.Return == 0:
				name += "unheard"
			case o.OK:
				name += "yes"
			default:
				name += "no"
			}
			into[name]++
			if o.Heir != "" {
				into["hand-over"]++
			}
			if o.OK && o.Lender != "" {
				into["loan yes"]++
			}
		}
	}
}

// requiredCounts lists what a history must contain to prove anything.
var requiredCounts = []string{
	"acquire yes", "acquire no", "acquire unheard", "try yes", "try no", "await yes", "await no", "renew yes", "renew no",
	"release yes", "release no", "hand-over", "break yes", "write yes", "write no",
	"take yes", "loan yes", "claim yes", "park yes", "resume yes", "finish yes",
}

func TestLanesAreLinearizable(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	if *seed == 0 {
		*seed = uint64(time.Now().UnixNano())
	}
	t.Logf("seed %d", *seed)
	counts, faults := map[string]int{}, map[string]int{}
	all := 0
	for round := 0; round < *rounds || len(missingCounts(counts)) > 0; round++ {
		if round > *rounds+5 {
			t.Fatalf("%d rounds had none of %q: they prove nothing about it", round, missingCounts(counts))
		}
		c := newScenario(t, s, *seed, round)
		began := time.Now()
		history := c.play()
		recorded := time.Since(began)
		n := checkAll(t, history)
		all += n
		countOperations(history, counts)
		for name, k := range c.faults {
			faults[name] += k
		}
		c.checkWrites()
		t.Logf("round %d: %d operations on %d lanes recorded in %s, checked in %s", round, n, len(history),
			recorded.Round(time.Millisecond), (time.Since(began) - recorded).Round(time.Millisecond))
		if t.Failed() {
			return
		}
	}
	t.Logf("%d operations %v, faults %v", all, counts, faults)
}

// checkWrites checks the rows of the fenced writes.
func (c *scenario) checkWrites() {
	c.t.Helper()
	n := c.server.count(decreasingTokenWrites)
	assert.Truef(c.t, n == 0, "round %d: %d fenced writes under a token after one under a larger", c.round, n)
	n = c.server.count(sharedTokens)
	assert.Truef(c.t, n == 0, "round %d: more than one owner wrote under each of %d tokens", c.round, n)
}

func missingCounts(counts map[string]int) (all []string) {
	for _, name := range requiredCounts {
		if counts[name] == 0 {
			all = append(all, name)
		}
	}
	return all
}
