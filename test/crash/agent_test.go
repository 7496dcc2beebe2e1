package crash_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/proctest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

// waitTimeout bounds every wait of a test, for busy machines. It is more than twice the time for which the server lets
// a stopped process keep a transaction open.
const waitTimeout = 150 * time.Second

// agent is a running process of the program.
type agent struct {
	*proctest.Process

	t testing.TB
}

// launch starts the program in a folder, with exactly the given environment.
func launch(t testing.TB, dir string, environ []string, args ...string) *agent {
	t.Helper()
	command := append([]string{program}, args...)
	return &agent{proctest.Start(t, waitTimeout, dir, proctest.Environ(environ...), command...), t}
}

// eventually polls a condition.
func eventually(t testing.TB, what string, condition func() bool) {
	t.Helper()
	pgtest.EventuallyWithin(t, waitTimeout, condition, what)
}

var listens = regexp.MustCompile(`listen=http://(\S+)`)

// address returns the address on which a process serves.
func (a *agent) address() string {
	a.t.Helper()
	found := listens.FindStringSubmatch(a.Err.String())
	require.True(a.t, found != nil, "the process does not say where it listens")
	return found[1]
}

// acceptsConnections reports whether the process accepts connections.
func (a *agent) acceptsConnections() bool {
	a.t.Helper()
	conn, err := (&net.Dialer{}).DialContext(a.t.Context(), "tcp", a.address())
	if err != nil {
		return false
	}
	conn.Close()
	return true
}

// pid returns the process id as text.
func (a *agent) pid() string { return strconv.Itoa(a.Cmd.Process.Pid) }

// decode reads the JSON document that a process printed.
func (a *agent) decode(into any) {
	a.t.Helper()
	require.NoError(a.t, json.Unmarshal([]byte(a.Out.String()), into), "in", a.Out.String())
}

// TestKilledDevLeavesNoServer: kill -9 of `agent dev` ends its PostgreSQL within seconds, and the next start finds the
// data.
func TestKilledDevLeavesNoServer(t *testing.T) {
	t.Parallel()
	dir := pgtest.OpenDir(t)
	environ := []string{"AGENT_LISTEN=127.0.0.1:0", "AGENT_HEARTBEAT_CRON=" + never}
	const greeting = "^C stops"

	first := launch(t, dir, environ, "dev")
	first.AwaitOutput(greeting)
	pid := pgtest.Postmaster(t, filepath.Join(dir, ".agent", "pg", "*"))
	first.Kill()
	pgtest.Eventually(t, func() bool { return errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) },
		"the server goes with its process")

	began := time.Now()
	second := launch(t, dir, environ, "dev")
	second.AwaitOutput(greeting)
	t.Logf("the second start, with its heartbeat, took %s", time.Since(began).Round(time.Millisecond))
	list := launch(t, dir, environ, "executions", "ls", "--json")
	require.Equal(t, 0, list.Exit())
	var got struct {
		Items []struct{ Flow, Status string }
	}
	list.decode(&got)
	beats := 0
	for _, x := range got.Items {
		if x.Flow == "heartbeat" && x.Status == "completed" {
			beats++
		}
	}
	assert.Equal(t, 2, beats, got.Items)
	second.Signal(syscall.SIGTERM)
	assert.Equal(t, 0, second.Exit())
	files, err := filepath.Glob(filepath.Join(dir, ".agent", "pg", "*", "data", "postmaster.pid"))
	assert.Truef(t, err == nil && len(files) == 0, "after an orderly stop there is %v (%v)", files, err)
}

// chatStart matches the first statement of a chat message.
var chatStart = regexp.MustCompile(`hashtextextended\('chat `)

// TestKillAtEveryBoundaryOfChatAnswer kills the process with the visitor's connection before each of its requests, and
// after each took effect. If the message was stored, another process finishes the answer. If not, the visitor's client
// sends it again.
func TestKillAtEveryBoundaryOfChatAnswer(t *testing.T) {
	t.Parallel()
	for name, stream := range map[string]bool{"streamed": true, "whole": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			total := countChatRequests(t, stream)
			t.Logf("%d boundaries", total)
			atBoundaries(t, total, 5, map[string]proxyAction{"before": killBefore, "after": killAfter},
				func(t *testing.T, n int, how proxyAction) { killChat(t, n, how, stream) })
		})
	}
}

// countChatRequests answers a message without faults and returns the number of its requests.
func countChatRequests(t *testing.T, stream bool) int {
	t.Helper()
	s := newChatTestEnv(t)
	a, c := s.startUntilKilled(chatStart, -1, pass)
	got := s.sendMessage(a, message{"th", "weather", stream})
	n := c.count()
	require.Truef(t, got.Complete && got.Status == 200, "the answer is %+v", got)
	s.checkThread(a, "th", map[string]testkit.Answer{"weather": got}, "weather")
	s.checkSettled(snapshot{})
	assert.Truef(t, n >= 20, "an answer made %d requests; does the proxy still see them?", n)
	return n
}

func killChat(t *testing.T, n int, action proxyAction, stream bool) {
	t.Helper()
	s := newChatTestEnv(t)
	m := message{"th", "weather", stream}
	a, _ := s.startUntilKilled(chatStart, n, action)
	first := s.sendMessage(a, m)
	before := s.killAndSnapshot(a)
	stored := pgtest.Value[int](s.t, s.db, `select count(*) from agent_messages where role = 'user'`)
	assert.True(t, stored != 0 || first.ID == "" &&
		pgtest.Value[int](s.t, s.db, `select count(*) from agent_executions`) <= 0, "a turn without its message")
	b := s.startServer("")
	got := s.sendUntilAnswered(b, m)
	s.checkThread(b, "th", map[string]testkit.Answer{m.words: got}, m.words)
	assert.Truef(t, !first.Complete || first.Text == got.Text, "the client got %q, then %q", first.Text, got.Text)
	if id := first.ID; id != "" { // the client knows which answer to attach to
		if again := s.attachAnswer(b, id, "?stream=true"); again.ID != got.ID || again.Text != got.Text || !again.Complete {
			t.Errorf("attached again: %+v, want %+v", again, got)
		}
	}
	assert.Equal(t, 1, strings.Count(got.Text, finalReply(m.words)), got.Text)
	s.checkSettled(before)
}

// evalsYAML has a skill. No test calls its address.
const evalsYAML = `
kind: skill
name: check_order
description: Looks an order up.
scope: external
parameters: {type: object, required: [order], properties: {order: {type: integer}}}
handler: "http:GET %s/order"
`

// callsPerTrial is the number of a trial's model calls.
const callsPerTrial = 2

// newSuite returns a suite of some cases, each with one call of a skill.
func newSuite(cases, trials int) string {
	var b strings.Builder
	fmt.Fprintf(&b, "---\nkind: eval\nname: load\ntrials: %d\ncases:\n", trials)
	for n := range cases {
		fmt.Fprintf(&b, `  - name: order %[1]d
    messages: [{user: "order %[1]d?"}]
    skills: {check_order: [{when: {order: %[1]d}, returns: {due: false}}]}
    expect: [{called: {skill: check_order, args: {order: %[1]d}, times: 1}}, {answer: {contains: not due}}]
`, n)
	}
	return b.String()
}

// orderModel answers in 200 ms: a call of the skill, then words.
func orderModel(_ int, req openai.ChatCompletionRequest) modeltest.Reply {
	last := req.Messages[len(req.Messages)-1]
	if last.Role == openai.ChatMessageRoleTool {
		return modeltest.Text("It is not due.").WithUsage(100, 10, 0).Slowly(200 * time.Millisecond)
	}
	_, order, _ := strings.Cut(last.Content, "order ")
	return modeltest.ToolCall("check_order", `{"order":`+strings.TrimSuffix(order, "?")+`}`).WithUsage(100, 10, 0).
		Slowly(200 * time.Millisecond)
}

// TestKilledEvalResumesWithoutPayingTwice plays a suite with a model that answers in 200 ms, kills the process in the
// middle, and resumes it. The long form has 100 cases in 5 trials, and first plays them within a minute.
func TestKilledEvalResumesWithoutPayingTwice(t *testing.T) {
	t.Parallel()
	cases, trials, concurrent := 6, 2, 3
	long := os.Getenv("AGENT_EVALS") != ""
	if long {
		cases, trials, concurrent = 100, 5, 8
	}
	s := newIdleTestEnv(t, pgtest.URL(t), evalsYAML+newSuite(cases, trials))
	run := func(args ...string) *proctest.Process {
		command := append([]string{program, "eval", "run"}, args...)
		return proctest.Start(t, 2*time.Minute, s.dir, s.environ("", "AGENT_WORKER_LEASE=6s"), command...)
	}
	ends := func(p *proctest.Process) {
		t.Helper()
		select {
		case <-p.Ended():
		case <-time.After(2 * time.Minute):
			t.Fatal("the run does not end")
		}
		require.Equal(t, 0, p.Exit())
	}
	s.model.Handle(orderModel)
	made := func() int { return len(s.model.Requests()) }
	wanted := cases * trials * callsPerTrial
	if long {
		began := time.Now()
		ends(run("--concurrency", fmt.Sprint(concurrent)))
		t.Logf("%d cases in %d trials took %s", cases, trials, time.Since(began).Round(100*time.Millisecond))
		if took := time.Since(began); took > time.Minute || made() != wanted {
			t.Errorf("it took %s, with %d model calls, want at most a minute, and %d", took, made(), wanted)
		}
	}
	before := made()
	first := run("--concurrency", fmt.Sprint(concurrent))
	eventually(t, "half of the answers came", func() bool { return made()-before >= wanted/2 })
	first.Kill()
	id := pgtest.Value[string](t, s.db, `select id::text from agent_eval_runs where status = 'running'`)
	ends(run("--resume", id, "--concurrency", fmt.Sprint(concurrent)))
	pgtest.Equal(t, s.db, cases*trials, `select count(*)::int from agent_eval_trials where run_id = $1 and verdict = 'pass'`, id)
	// A request may be sent again, under its key, only if the killed process had not recorded it.
	if extra := made() - before - wanted; extra > concurrent {
		t.Errorf("%d model calls were made twice, with %d in flight at the kill", extra, concurrent)
	}
	pgtest.Equal(t, s.db, 0, `
		select count(*)::int from (select from agent_activity where kind = 'model' and status = 'success'
		   group by execution_id, step having count(*) > 1) twice`)
	pgtest.Equal(t, s.db, 0, `select count(*)::int from agent_budget_reservations`)
	keys := map[string]bool{}
	for _, r := range s.model.Requests()[before:] {
		keys[r.IdempotencyKey()] = true
	}
	assert.Equal(t, wanted, len(keys))
}

// TestEvalRunResumesOnAnotherServer starts a run like the page, kills the server that plays it, and starts another
// server.
func TestEvalRunResumesOnAnotherServer(t *testing.T) {
	t.Parallel()
	const cases, trials = 4, 2
	s := newIdleTestEnv(t, pgtest.URL(t), evalsYAML+newSuite(cases, trials))
	s.model.Handle(orderModel)
	first := s.startServer("", "AGENT_WORKER_LEASE=6s")
	answer, err := testkit.Do(t.Context(), http.DefaultClient, http.MethodPost, "http://"+first.address()+"/v1/evals/runs",
		`{"suite": "load"}`, testkit.Bearer(adminToken))
	require.NoError(t, err)
	assert.Equal(t, http.StatusCreated, answer.Status)
	eventually(t, "some answers came", func() bool { return len(s.model.Requests()) >= cases })
	first.Kill()
	s.startServer("", "AGENT_WORKER_LEASE=6s")
	eventually(t, "the run ends", func() bool {
		return pgtest.Value[string](t, s.db, `select status from agent_eval_runs`) != "running"
	})
	pgtest.Equal(t, s.db, cases*trials, `select count(*)::int from agent_eval_trials where verdict = 'pass'`)
	pgtest.Equal(t, s.db, 0, `
		select count(*)::int from (select from agent_activity where kind = 'model' and status = 'success'
		   group by execution_id, step having count(*) > 1) twice`)
	keys := map[string]bool{}
	for _, r := range s.model.Requests() {
		keys[r.IdempotencyKey()] = true
	}
	assert.Equal(t, cases*trials*callsPerTrial, len(keys))
}
