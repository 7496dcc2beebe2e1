package engineroom

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit/rows"
	"github.com/lanekeeper/lanekeeper/principals"
)

// getAs returns a page as a caller of a role gets it, whose token has the scopes.
func getAs(t *testing.T, room *Room, path string, role principals.Role, scopes ...string) string {
	t.Helper()
	caller := &principals.Caller{Principal: principals.Principal{Name: "ana", Role: role}, Scopes: scopes}
	r := httptest.NewRequestWithContext(principals.WithCaller(t.Context(), caller, "token"), http.MethodGet, path, nil)
	w := httptest.NewRecorder()
	muxOf(room).ServeHTTP(w, r)
	require.Equal(t, http.StatusOK, w.Code)
	return w.Body.String()
}

// A flow without a thread asks and writes in one. The question and the message are texts of that thread.
func TestTextsInThreadsNeedThreadsRead(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	room := newRoom(t, Options{Pool: pool})
	id := rows.Execution(t, pool, "waiting", "flow", "onboarding")
	rows.Quiet(t, pool, `insert into agent_threads (id, channel, owner) values ('maria', 'chat', 'key1')`)
	rows.Quiet(t, pool, `insert into agent_requests (kind, execution_id, trace_id, thread_id, title, items)
		values ('document', $1, 'fl_1', 'maria', 'Proof of your illness', '{INE}')`, id)
	rows.Quiet(t, pool, `insert into agent_messages (thread_id, seq, turn, role, content, status, execution_id)
		values ('maria', 1, 1, 'assistant', 'We are sorry to hear that', 'sent', $1)`, id)
	for _, c := range []struct{ path, text string }{
		{"/executions/" + id, "Proof of your illness"},
		{"/executions/" + id, "We are sorry to hear that"},
		{"/", "Proof of your illness"},
	} {
		for role, reads := range map[principals.Role]bool{principals.Viewer: false, principals.Approver: true} {
			body := getAs(t, room, c.path, role, principals.All)
			assert.Equal(t, reads, strings.Contains(body, c.text), c.path, role)
		}
	}
	assert.Contains(t, getAs(t, room, "/executions/"+id, principals.Viewer, principals.All), activity.HiddenText)
}

// An approved call may return a text: the answer to a delegated task, or a memory entry.
func TestResultsOfApprovedCallsNeedThreadsRead(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	room := newRoom(t, Options{Pool: pool})
	x := rows.Execution(t, pool, "completed", "flow", "onboarding")
	for skill, isText := range map[string]bool{"delegate": true, "count_rows": false} {
		id := insert(t, pool, `
			with a as (insert into agent_activity (trace_id, execution_id, step, kind, skill_name, status, output)
			           values ('op_1', $1::text::uuid, 'call 1/' || $2, 'call', $2, 'success', '{"answer": "PURPLE"}'))
			insert into agent_approvals (trace_id, execution_id, skill_name, skill_revision, arguments, arguments_hash, status,
			  consumed_for, expires_at)
			values ('op_1', $1::text::uuid, $2, 1, '{}', 'x', 'consumed', $1 || ' call 1/' || $2, now() + interval '1 hour')
			returning id::text`, x, skill)
		part := getAs(t, room, "/approvals/"+id, principals.Admin, string(principals.ApprovalsRead))
		assert.Equal(t, !isText, strings.Contains(part, "PURPLE"), skill)
		assert.Contains(t, getAs(t, room, "/approvals/"+id, principals.Admin, principals.All), "PURPLE")
	}
}

// A heartbeat has no thread, but its checkpoints hold the memory and the answers of the model.
func TestCheckpointsNeedThreadsRead(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	room := newRoom(t, Options{Pool: pool})
	x := rows.Execution(t, pool, "completed", "heartbeat", "heartbeat")
	rows.Quiet(t, pool, `insert into agent_checkpoints (execution_id, step, claim, output)
		values ($1, 'reflect', 1, '{"memories": [{"key": "k", "value": "PURPLE"}]}')`, x)
	for _, path := range []string{"/executions/" + x, "/executions/" + x + "?tab=checkpoint"} {
		part := getAs(t, room, path, principals.Admin, string(principals.RunsRead))
		assert.Contains(t, part, activity.HiddenText)
		assert.Truef(t, !strings.Contains(part, "PURPLE"), "%s shows %s", path, part)
		assert.Contains(t, getAs(t, room, path, principals.Admin, principals.All), "PURPLE")
	}
}

// A webhook about the end of a chat has the answer.
func TestPayloadsOfChatsNeedThreadsRead(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	room := newRoom(t, Options{Pool: pool})
	rows.Quiet(t, pool, `insert into agent_webhook_targets (name, url, secrets, events)
		values ('crm', 'https://x.example', '{x}', '{*}')`)
	id := insert(t, pool, `insert into agent_webhook_outbox (target_id, event, payload, trace_id)
		select t.id, 'execution.completed', $1::jsonb, 'ch_1' from agent_webhook_targets t returning id::text`,
		`{"data": {"flow": "chat", "result_summary": "We are sorry to hear that"}}`)
	for role, reads := range map[principals.Role]bool{principals.Viewer: false, principals.Approver: true} {
		body := getAs(t, room, "/outgoing/"+id, role, principals.All)
		assert.Equal(t, reads, strings.Contains(body, "We are sorry to hear that"), role)
		assert.Contains(t, body, "&#34;flow&#34;: &#34;chat&#34;")
	}
}

// A token reads on the overview and in a search only what its scopes let it open.
func TestScopesBoundOverviewAndSearch(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	room := newRoom(t, Options{Pool: pool})
	id := rows.Execution(t, pool, "completed", "flow", "payday")
	rows.Quiet(t, pool, `update agent_executions set result_summary = 'payday of 12 people' where id = $1`, id)
	rows.Quiet(t, pool, `insert into agent_approvals (trace_id, skill_name, skill_revision, arguments, arguments_hash,
		expires_at) values ('op_1', 'payday', 1, '{"iban": "DE02120300000000202051"}', 'x', now() + interval '1 hour')`)
	rows.Quiet(t, pool, `insert into agent_memory_conflicts (category, key, value, trace_id, if_revision, found_revision)
		values ('salaries', 'payday of Ana', '1', 'op_1', 1, 0)`)
	for _, c := range []struct {
		path, text string
		scope      principals.Scope
	}{
		{"/", "DE02120300000000202051", principals.ApprovalsRead},
		{"/", "payday of Ana", principals.ThreadsRead},
		{"/find?q=payday", "DE02120300000000202051", principals.ApprovalsRead},
		{"/find", "DE02120300000000202051", principals.ApprovalsRead},
		{"/find/results?q=payday", "DE02120300000000202051", principals.ApprovalsRead},
		{"/find?q=payday", "payday of 12 people", principals.RunsRead},
		{"/find", "payday of 12 people", principals.RunsRead},
	} {
		page := principals.RunsRead
		if strings.HasPrefix(c.path, "/find") {
			page = principals.ThreadsRead
		}
		full := getAs(t, room, c.path, principals.Admin, string(page), string(c.scope))
		assert.Equal(t, true, strings.Contains(full, c.text), c.path, c.text)
		part := getAs(t, room, c.path, principals.Admin, string(page))
		assert.Equal(t, false, strings.Contains(part, c.text), c.path, c.text)
	}
	assert.Contains(t, getAs(t, room, "/", principals.Admin, string(principals.RunsRead)), "Approval requested")
}

func TestExpiredTokenIsNamed(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	_, err := principals.Create(t.Context(), pool, principals.CreateParams{
		Name: "ci", Kind: principals.Service, Role: principals.Viewer,
	})
	require.NoError(t, err)
	for _, ttl := range []time.Duration{time.Hour, time.Nanosecond} {
		_, _, err := principals.CreateToken(t.Context(), pool, principals.TokenParams{
			Principal: "ci", Scopes: []string{"*"}, TTL: ttl,
		})
		require.NoError(t, err)
	}
	body := wantTexts(t, server.URL+"/principals/ci")
	assert.Equal(t, 1, strings.Count(body, `<td data-label="State">expired</td>`), "expired tokens")
	assert.Equal(t, 1, strings.Count(body, `/revoke"`), "tokens to revoke")
	assert.True(t, !strings.Contains(body, ">due<"), "the page says that an expired token is due")
}
