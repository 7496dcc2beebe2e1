//go:build unix

package crash_test

import (
	"fmt"
	"net/http"
	"os"
	"strings"
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

// evalsYAML has a skill. Its address is never called.
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

// suiteOf is a suite of some cases, each with one call of a skill.
func suiteOf(cases, trials int) string {
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

// TestAnEvalThatIsKilledGoesOnAndPaysNoAnswerTwice plays a suite with a model that answers in 200 ms, kills the process
// in the middle, and goes on. Its long form has 100 cases in 5 trials, and plays them within a minute first.
func TestAnEvalThatIsKilledGoesOnAndPaysNoAnswerTwice(t *testing.T) {
	t.Parallel()
	cases, trials, concurrent := 6, 2, 3
	long := os.Getenv("AGENT_EVALS") != ""
	if long {
		cases, trials, concurrent = 100, 5, 8
	}
	s := newStage(t, pgtest.URL(t), evalsYAML+suiteOf(cases, trials))
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
	// Only requests that the killed process had not recorded may be sent again, under their keys.
	if extra := made() - before - wanted; extra > concurrent {
		t.Errorf("%d model calls were made twice, with %d under way at the kill", extra, concurrent)
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

// TestARunOfAServerThatIsKilledGoesOnInAnother starts a run as the page does, kills the server that plays it, and
// starts another one.
func TestARunOfAServerThatIsKilledGoesOnInAnother(t *testing.T) {
	t.Parallel()
	const cases, trials = 4, 2
	s := newStage(t, pgtest.URL(t), evalsYAML+suiteOf(cases, trials))
	s.model.Handle(orderModel)
	first := s.serve("", "AGENT_WORKER_LEASE=6s")
	answer, err := testkit.Do(t.Context(), http.DefaultClient, http.MethodPost, "http://"+first.address()+"/v1/evals/runs",
		`{"suite": "load"}`, testkit.Bearer(adminToken))
	require.NoError(t, err)
	assert.Equal(t, http.StatusCreated, answer.Status)
	eventually(t, "some answers came", func() bool { return len(s.model.Requests()) >= cases })
	first.Kill()
	s.serve("", "AGENT_WORKER_LEASE=6s")
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
