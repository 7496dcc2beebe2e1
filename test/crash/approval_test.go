package crash_test

import (
	"encoding/json"
	"net/http"
	"regexp"
	"strings"
	"sync"
	"testing"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

// turnStart matches the first statement of a message, from a visitor or an admin.
var turnStart = regexp.MustCompile(`hashtextextended\('chat |lanekeeper\.acquire_agent_lock\(`)

// sender is a visitor or an admin who requests a call that needs approval.
type sender struct {
	text string
	send func(s *testEnv, a *agent) // returns at the end of the answer or of the connection
	// resend sends the message once more, if necessary, and waits for a chat's answer.
	resend func(s *testEnv, a *agent)
}

var order = message{"th", "order", true}

// senders are a visitor and an admin.
var senders = map[string]sender{
	"a visitor": {
		text:   order.words,
		send:   func(s *testEnv, a *agent) { s.sendMessage(a, order) },
		resend: func(s *testEnv, a *agent) { s.sendUntilAnswered(a, order) },
	},
	"an admin": {
		text: "order",
		send: func(s *testEnv, a *agent) { s.sendOperate(a) },
		resend: func(s *testEnv, a *agent) {
			if pgtest.Value[int](s.t, s.db, `select count(*) from agent_messages where role = 'user'`) == 0 {
				// The first sweep releases the lane of the dead process's session, long before its lease ends.
				eventually(s.t, "the lane of the dead process is free", func() bool {
					return pgtest.Value[bool](s.t, s.db, `select not is_agent_lock_held('operate')`)
				})
				s.sendOperate(a)
			}
		},
	},
}

// sendOperate sends an admin's order in the session th, and waits for the response. The session keeps its lane.
func (s *testEnv) sendOperate(a *agent) {
	testkit.Chat(s.newRequest(a, http.MethodPost, "/v1/operate", adminToken, `{"message": "order", "session_id": "th"}`), nil)
}

// TestKillAtEveryBoundaryOfApproval runs a turn that requests an approval, waits for the decision and makes its call.
// It kills the process before and after each request of the turn. The decision comes while a process works, or while
// none does. The grant is used once, and the call is made at most once.
func TestKillAtEveryBoundaryOfApproval(t *testing.T) {
	t.Parallel()
	for name, who := range senders {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			total := countApprovalRequests(t, who)
			t.Logf("%d boundaries", total)
			atBoundaries(t, total, 4, map[string]proxyAction{"before": killBefore, "after": killAfter},
				func(t *testing.T, n int, how proxyAction) { killApproval(t, who, n, how) })
		})
	}
}

// countApprovalRequests runs the turn without faults and returns the number of its requests.
func countApprovalRequests(t *testing.T, who sender) int {
	t.Helper()
	s := newChatTestEnv(t)
	a, c := s.startUntilKilled(turnStart, -1, pass)
	s.runApprovalTurn(a, who)
	n := c.count()
	s.closeSession()
	s.checkApprovedTurn(a, who, snapshot{})
	assert.Truef(t, n >= 30, "it made %d requests; does the proxy still see them?", n)
	return n
}

// runApprovalTurn sends the sender's message and approves its call over HTTP. It returns when all executions have ended
// or the process is dead.
func (s *testEnv) runApprovalTurn(a *agent, who sender) {
	s.t.Helper()
	var asking sync.WaitGroup
	defer asking.Wait()
	asking.Go(func() { who.send(s, a) })
	if s.waitPendingApproval(a) {
		s.decideApproval(a, true) // the process may be dead: ignore the status
	}
	eventually(s.t, "it is over, or the process dead", func() bool {
		return !a.Running() || pgtest.Value[bool](s.t, s.db,
			`select count(*) = 1 and bool_and(completed_at is not null) from agent_executions`)
	})
}

// waitPendingApproval waits for a pending approval. It returns false if the process is dead.
func (s *testEnv) waitPendingApproval(a *agent) (asks bool) {
	s.t.Helper()
	eventually(s.t, "the approval is requested", func() bool {
		asks = s.pendingApproval() != ""
		return asks || !a.Running()
	})
	return asks && a.Running()
}

// pendingApproval returns the id of the pending approval, or "".
func (s *testEnv) pendingApproval() string {
	s.t.Helper()
	return pgtest.Value[string](s.t, s.db, `select coalesce((select id::text from agent_approvals
		where status = 'pending'), '')`)
}

// decideApproval decides the approval over HTTP. It returns the status of the response, or 0 without one.
func (s *testEnv) decideApproval(a *agent, approve bool) int {
	s.t.Helper()
	id := pgtest.Value[string](s.t, s.db, `select id::text from agent_approvals`)
	word := "reject"
	if approve {
		word = "approve"
	}
	response, err := http.DefaultClient.Do(s.newRequest(a, http.MethodPost, "/v1/approvals/"+id, adminToken,
		`{"decision": "`+word+`"}`))
	if err != nil {
		return 0
	}
	defer func() { _ = response.Body.Close() }()
	return response.StatusCode
}

// closeSession ends the admin's session, which would hold the lane until it is idle.
func (s *testEnv) closeSession() {
	s.t.Helper()
	pgtest.Exec(s.t, s.db, `select break_agent_lock('operate', 'the test is over') where is_agent_lock_held('operate')`)
}

func killApproval(t *testing.T, who sender, n int, action proxyAction) {
	t.Helper()
	s := newChatTestEnv(t)
	a, _ := s.startUntilKilled(turnStart, n, action)
	s.runApprovalTurn(a, who)
	before := s.killAndSnapshot(a)
	// No process works meanwhile. The steps of a sample are often even, so the parity of n would choose one way only.
	if id := s.pendingApproval(); id != "" && n/3%2 == 0 {
		assert.Equal(t, 0, s.startAgent("", "approvals", "approve", id).Exit())
	}
	b := s.startServer("")
	var asking sync.WaitGroup
	defer asking.Wait()
	asking.Go(func() { who.resend(s, b) })
	eventually(t, "the approval is requested", func() bool {
		return pgtest.Value[bool](s.t, s.db, `select exists (select from agent_approvals)`)
	})
	if s.pendingApproval() != "" {
		require.Equal(t, http.StatusOK, s.decideApproval(b, true)) // else the turn waits for days
	}
	asking.Wait()
	eventually(t, "the turn ends", func() bool {
		return pgtest.Value[bool](s.t, s.db, `select count(*) = 1 and bool_and(completed_at is not null)
			from agent_executions`)
	})
	assert.Equal(t, http.StatusConflict, s.decideApproval(b, false))
	s.closeSession()
	s.checkApprovedTurn(b, who, before)
}

// checkApprovedTurn checks a turn whose call was approved.
func (s *testEnv) checkApprovedTurn(a *agent, who sender, before snapshot) {
	s.t.Helper()
	s.checkSettled(before)
	s.checkThread(a, "th", nil, who.text)
	for what, sql := range map[string]string{
		"approvals": `select count(*) from agent_approvals`,
		"grants used": `select count(*) from agent_approvals a where status = 'consumed'
			and consumed_for like a.execution_id || ' %'`,
		"asked for approval": `select count(*) from agent_activity where skill_name = 'order' and status = 'pending_approval'`,
		"calls in the log":   `select count(*) from agent_activity where skill_name = 'order' and status <> 'pending_approval'`,
		"decisions":          `select count(*) from agent_activity where skill_name = 'decide_approval'`,
		"decisions told":     `select count(*) from agent_events where event = 'APPROVAL_DECIDED'`,
	} {
		assert.Equal(s.t, 1, pgtest.Value[int](s.t, s.db, sql), what, "want 1")
	}
	unknown := pgtest.Value[bool](s.t, s.db,
		`select status = 'unknown' from agent_activity where skill_name = 'order' and status <> 'pending_approval'`)
	assert.True(s.t, !unknown || s.modelSawResult("nobody knows whether it took effect"),
		"the model did not learn that the effect of its call is unknown")
}

// TestDenialWhileNoProcessRuns decides an approval while the process is dead. The call is never made, and the model
// learns of the denial.
func TestDenialWhileNoProcessRuns(t *testing.T) {
	t.Parallel()
	for name, who := range senders {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newChatTestEnv(t)
			a := s.startServer("", "PGAPPNAME="+victim)
			var asking sync.WaitGroup
			asking.Go(func() { who.send(s, a) })
			eventually(t, "it waits for the admin", func() bool {
				return pgtest.Value[bool](s.t, s.db,
					`select exists (select from agent_executions where status = 'waiting' and waiting_for = 'approval')`)
			})
			before := s.killAndSnapshot(a)
			asking.Wait()
			cli := s.startAgent("", "approvals", "reject", s.pendingApproval(), "--reason", "too dear", "--json")
			assert.Equal(t, 0, cli.Exit())
			b := s.startServer("")
			who.resend(s, b)
			eventually(t, "the turn ends", func() bool {
				return pgtest.Value[bool](s.t, s.db, `select bool_and(completed_at is not null) from agent_executions`)
			})
			s.checkSettled(before)
			s.checkThread(b, "th", nil, who.text)
			for _, c := range s.skills.Calls() {
				assert.Truef(t, c.Skill != "order", "the call was made: %+v", c)
			}
			assert.True(t, s.modelSawResult("too dear"), "the model did not get the reason")
			assert.Equal(t, "rejected", pgtest.Value[string](s.t, s.db, `select string_agg(status, ' ') from agent_approvals`))
		})
	}
}

// delegationWait matches the record of a turn's wait for its delegated task. By then the turn has released its lane.
var delegationWait = regexp.MustCompile(`lanekeeper\.wait_agent_execution\(`)

// TestKillBeforeDelegationWaits kills a turn that continues without its admin. The kill comes between the release of
// the lane operate and the wait for the delegated task. The next process releases the lane again before that wait.
func TestKillBeforeDelegationWaits(t *testing.T) {
	t.Parallel()
	s := newChatTestEnv(t)
	asked := newBlocker(t, 1)
	s.modelBlocker.Store(asked)
	s.model.Handle(func(_ int, req openai.ChatCompletionRequest) modeltest.Reply {
		s.modelBlocker.Load().enter()
		words, said := modeltest.Turn(req)
		switch {
		case said > 0:
			return modeltest.Text(finalReply(words))
		case words == "delegate":
			return modeltest.ToolCall("delegate", `{"task": "order"}`)
		}
		return modeltest.ToolCall("order", `{"item": 1}`)
	})
	a := s.startServer("", "PGAPPNAME="+victim)
	var asking sync.WaitGroup
	defer asking.Wait()
	asking.Go(func() {
		testkit.Chat(s.newRequest(a, http.MethodPost, "/v1/operate", adminToken, `{"message": "delegate"}`), nil)
	})
	<-asked.blocked
	a.Kill()
	asked.release()
	s.waitSessionsEnd()
	s.expireLeases()
	s.startWithFaultIn(&counter{first: delegationWait}, 1, killBefore, "serve").Exit()
	s.killAndSnapshot(a)
	s.startServer("")
	eventually(t, "the delegated task waits for the admin", func() bool {
		return pgtest.Value[bool](s.t, s.db, `select count(*) = 2 from agent_executions
			where waiting_for = 'agent' and flow = 'operate' or waiting_for = 'approval' and flow = 'delegate'`)
	})
	assert.True(t, !pgtest.Value[bool](s.t, s.db, `select is_agent_lock_held('operate')`), "the lane is held")
}

// TestKillDuringDecision kills the process that receives the decision at each of its requests. The decision is stored
// and later announced, or it is not stored and can be made again.
func TestKillDuringDecision(t *testing.T) {
	t.Parallel()
	total := killDecision(t, -1, pass)
	assert.Truef(t, total >= 3, "the command made %d requests; does the proxy still see them?", total)
	atBoundaries(t, total, 3, map[string]proxyAction{"before": killBefore, "after": killAfter},
		func(t *testing.T, n int, how proxyAction) { killDecision(t, n, how) })
}

// killDecision approves a call with a fault at request n of the command, counted from the decision. It returns the
// number of these requests.
func killDecision(t *testing.T, n int, how proxyAction) int {
	t.Helper()
	s := newChatTestEnv(t)
	first := s.startServer("", "PGAPPNAME="+victim)
	var asking sync.WaitGroup
	asking.Go(func() { s.sendMessage(first, order) })
	eventually(t, "it waits for the admin", func() bool {
		return pgtest.Value[bool](s.t, s.db, `select exists (select from agent_executions where status = 'waiting')`)
	})
	before := s.killAndSnapshot(first)
	asking.Wait()
	c := &counter{first: regexp.MustCompile(`decide_agent_approval`)}
	cli := s.startWithFaultIn(c, n, how, "approvals", "approve", s.pendingApproval(), "--json")
	cli.Exit()
	s.waitSessionsEnd()
	decided := s.pendingApproval() == ""
	known := pgtest.Value[bool](s.t, s.db, `select exists (select from agent_events where event = 'APPROVAL_DECIDED')`)
	noted := pgtest.Value[bool](s.t, s.db,
		`select exists (select from agent_activity where skill_name = 'decide_approval')`)
	assert.Equal(t, decided, known)
	assert.Equal(t, decided, noted)
	out := cli.Out.String()
	assert.Truef(t, out == "" || json.Valid([]byte(out)) && (!strings.Contains(out, "approved") || decided),
		"decided: %t, and the command says %s", decided, out)
	b := s.startServer("")
	if !decided {
		s.decideApproval(b, true)
	}
	s.sendUntilAnswered(b, order)
	s.checkApprovedTurn(b, sender{text: order.words}, before)
	return c.count()
}
