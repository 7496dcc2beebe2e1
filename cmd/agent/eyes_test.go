package main

import (
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/principals"
	"github.com/lanekeeper/lanekeeper/skills"
)

// put stores a skill that any surface may call after an approval.
func (d *operateTest) put(name string, fourEyes bool) {
	d.t.Helper()
	_, err := skills.Put(d.t.Context(), d.pool, skills.Definition{
		Name: name, Handler: "sql:select 'gone' as done", Trust: skills.TrustApprove, Description: "acts",
		Scope: skills.ScopeBoth, Approvals: skills.Approvals{FourEyes: fourEyes},
	}, skills.SourceWorkspace)
	require.NoError(d.t, err)
}

// With four eyes, the principal of an operate turn cannot decide its approvals by the command line, HTTP or the page.
// Another principal can. Audit log, why and the approval name that principal, its token and the interface.
func TestFourEyesOnServer(t *testing.T) {
	t.Parallel()
	d := newOperateTest(t, modeltest.ToolCall("wipe", `{}`), modeltest.Text("It is over."))
	d.put("wipe", true)
	remote, _ := d.remote()
	base := strings.TrimPrefix(remote.environ[0], "AGENT_SERVER=")
	ana, anaSecret, anaToken := d.principal(remote, "ana", principals.Admin)
	bob, bobSecret, bobToken := d.principal(remote, "bob", principals.Admin)
	ana.mustFail(1, "waits for approval", "operate", "Wipe everything.")
	id := pgtest.Value[string](t, d.pool, `select id::text from agent_approvals`)
	ana.mustFail(1, "four eyes", "approvals", "approve", id)
	ana.mustFail(1, "four eyes", "approvals", "reject", id)
	page := func(secret string) string { return send(t.Context(), "GET", base+"/approvals/"+id, secret, "").body }
	got := send(t.Context(), "POST", base+"/v1/approvals/"+id, anaSecret, `{"decision":"approve"}`)
	assert.Equal(t, 403, got.status)
	assert.Contains(t, got.body, "four eyes")
	assert.Contains(t, page(anaSecret), "Another approver must decide it", "ana")
	assert.True(t, !strings.Contains(page(anaSecret), `action="/act/v1/approvals/`), "the requester has a form to decide")
	assert.Contains(t, page(bobSecret), `action="/act/v1/approvals/`+id)
	assert.Contains(t, bob.must("approvals", "show", id), "  four eyes    requesters cannot decide: ana",
		", requested by ana")
	bob.must("approvals", "approve", id, "--reason", "looked at it")
	pgtest.Equal(t, d.pool, "bob cli "+bobToken+" looked at it",
		`select concat_ws(' ', actor, via, token_id, reason) from agent_audit where act = 'decide_approval'`)
	decider := "bob via cli with token " + bobToken
	assert.Contains(t, page(bobSecret), "by "+decider)
	assert.Contains(t, bob.must("approvals", "show", id), "by "+decider)
	trace := pgtest.Value[string](t, d.pool, `select trace_id from agent_approvals`)
	assert.Contains(t, bob.must("why", trace), "by "+decider, "ana asked for it")
	checkActorIsRecorded(t, d, ana, base, anaSecret, anaToken)
}

// With four eyes, a principal cannot decide the calls of its own chat turns. A visitor is no principal: each approver
// may decide the calls of its turns, and no viewer may.
func TestFourEyesInChat(t *testing.T) {
	t.Parallel()
	d := newOperateTest(t, modeltest.ToolCall("wipe", `{}`), modeltest.Text("It is over."),
		modeltest.ToolCall("wipe", `{}`), modeltest.Text("Over again."))
	d.put("wipe", true)
	const key = "visitors-key-of-this-test"
	remote, _ := d.remote("AGENT_CHAT_KEY="+key, "AGENT_CHAT_APPROVAL_WAIT=1s")
	base := strings.TrimPrefix(remote.environ[0], "AGENT_SERVER=")
	ana, _, _ := d.principal(remote, "ana", principals.Admin)
	bob, _, _ := d.principal(remote, "bob", principals.Approver)
	vera, _, _ := d.principal(remote, "vera", principals.Viewer)
	pending := func() string {
		return pgtest.Value[string](t, d.pool, `select id::text from agent_approvals where status = 'pending'`)
	}
	answered := func(text string) {
		pgtest.Until(t, d.pool, 1, `select count(*) from agent_messages where role = 'assistant' and content = '`+text+`'`)
	}

	ana.run("chat", "Wipe everything.")
	id := pending()
	ana.mustFail(1, "four eyes", "approvals", "approve", id)
	ana.mustFail(1, "four eyes", "approvals", "reject", id)
	bob.must("approvals", "approve", id)
	answered("It is over.")

	got := send(t.Context(), "POST", base+"/v1/chat/completions", key,
		`{"model": "agent", "messages": [{"role": "user", "content": "Wipe it."}]}`)
	require.Truef(t, got.status == 200 || got.status == 503, "%d %s, %v", got.status, got.body, got.err)
	id = pending()
	vera.mustFail(1, "needs the scope approvals:decide", "approvals", "approve", id)
	ana.must("approvals", "approve", id)
	answered("Over again.")
	pgtest.Equal(t, d.pool, "ana by bob,  by ana", `
		select string_agg(array_to_string(requested_by, ' ') || ' by ' || decided_by, ', ' order by id) from agent_approvals`)
}

// checkActorIsRecorded checks that pause, resume, retention, start and cancel record principal, token and interface.
func checkActorIsRecorded(t *testing.T, d *operateTest, ana program, base, anaSecret, anaToken string) {
	t.Helper()
	ana.must("pause", "--reason", "a look")
	assert.Equal(t, 200, send(t.Context(), "POST", base+"/v1/resume", anaSecret, `{"reason":"seen"}`).status)
	ana.must("retention", "set", "activity=400d", "--reason", "longer")
	ana.must("executions", "start", "external:sum", "--thread", "maria", "--reason", "a try")
	run := pgtest.Value[string](t, d.pool, `select id::text from agent_executions where flow = 'external:sum'`)
	ana.must("executions", "cancel", run, "--reason", "no more")
	assert.Equal(t, 202, send(t.Context(), "POST", base+"/v1/events", anaSecret,
		`{"event":"EVENT_COMPLETED","key":"a","data":{}}`).status)
	ana.must("executions", "event", "EVENT_COMPLETED", "b")
	pgtest.Equal(t, d.pool, 2, `
		select count(*) from agent_events v join agent_links k on k.effect = 'event ' || v.id
		 where k.cause = 'principal ana' and k.kind = 'asked' and v.key in ('a', 'b')`)
	for act, via := range map[string]string{
		"pause_agent": "cli", "resume_agent": "http", "set_retention": "cli", "start_execution": "cli",
		"cancel_execution": "cli",
	} {
		pgtest.Equal(t, d.pool, "ana "+via+" "+anaToken,
			`select concat_ws(' ', actor, via, token_id) from agent_audit where act = '`+act+`'`)
	}
	pgtest.Exec(t, d.pool, `
		with child as (
		 insert into agent_executions (trace_id, surface, flow, thread_id, status, parent_id)
		 select trace_id, surface, 'child', thread_id, 'pending', id from agent_executions where id = $1 returning *)
		insert into agent_activity (trace_id, surface, execution_id, thread_id, kind, skill_name, status)
		select trace_id, surface, id, thread_id, 'call', 'add', 'success' from child`, run)
	pgtest.Equal(t, d.pool, "call ana", `
		select string_agg(distinct kind || ' ' || on_behalf_of, ', ') from agent_audit where act = 'add'`)
	trace := pgtest.Value[string](t, d.pool, `select trace_id from agent_executions where flow = 'external:sum'`)
	assert.Contains(t, ana.must("why", trace), "by ana via cli with token "+anaToken+": no more",
		"ana started external:sum")
	d.must("pause", "--reason", "here")
	pgtest.Equal(t, d.pool, "admin cli",
		`select concat_ws(' ', actor, via) from agent_audit where act = 'pause_agent' and reason = 'here'`)
	pgtest.Exec(t, d.pool, `select resume_agent('dba', 'in SQL')`)
	pgtest.Equal(t, d.pool, "dba sql",
		`select concat_ws(' ', actor, via) from agent_audit where act = 'resume_agent' and reason = 'in SQL'`)
}

// A principal cannot make a call that needs another one's approval.
func TestRemoteSkillsCallNeedsApprovalScope(t *testing.T) {
	t.Parallel()
	d := newOperateTest(t)
	d.put("wipe", true)
	d.put("refund", false)
	remote, _ := d.remote()
	olga, _, _ := d.principal(remote, "olga", principals.Operator)
	ana, _, _ := d.principal(remote, "ana", principals.Admin)
	olga.mustFail(1, "needs the scope approvals:decide", "skills", "call", "refund")
	assert.Contains(t, ana.must("skills", "call", "refund"), "gone")
	for _, p := range []program{olga, ana} {
		p.mustFail(1, "has four_eyes", "skills", "call", "wipe")
	}
	assert.Contains(t, remote.must("skills", "call", "wipe"), "gone")
	assert.Contains(t, d.must("skills", "call", "wipe"), "gone")
	id := pgtest.Value[string](t, d.pool, `select id::text from agent_executions where flow = 'skill_call' limit 1`)
	ana.mustFail(1, "agent skills call", "executions", "fork", id)
}

// With four eyes, a console does not ask the requester of a call to approve it. The call waits for another principal.
func TestRemoteConsoleDoesNotAskRequester(t *testing.T) {
	t.Parallel()
	d := newOperateTest(t, modeltest.ToolCall("wipe", `{}`), modeltest.Text("Still here."))
	d.put("wipe", true)
	remote, _ := d.remote()
	ana, _, _ := d.principal(remote, "ana", principals.Admin)
	remoteTest := *d
	remoteTest.environ = ana.environ
	s := remoteTest.startTerminal()
	s.waitFor(`(>) `)
	s.typeKeys("Wipe.\n")
	s.waitFor(`(You requested this call\. Another approver must decide it\.)`)
	s.waitFor(`(waiting_approval)`)
	s.waitFor(`\n(>) `)
	s.typeKeys("Are you there?\n")
	s.waitFor(`(Still here\.)`)
	assert.True(t, !strings.Contains(s.shown.String(), "approve?") && !strings.Contains(s.shown.String(), "left open"))
	pgtest.Equal(t, d.pool, "pending", `select status from agent_approvals`)
	s.typeKeys("\x04")
	assert.Equal(t, 0, s.waitExit())
}
