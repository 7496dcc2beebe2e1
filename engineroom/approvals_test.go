package engineroom

import (
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// insertApproval inserts an approval of the skill drop that expires after some hours.
func insertApproval(t *testing.T, pool *pgxpool.Pool, status, arguments string, hours float64) string {
	t.Helper()
	return insert(t, pool, `
		with s as (insert into agent_skills (name, handler, trust, tool_definition)
		  values ('drop', 'builtin:drop', 'approve', '{}') on conflict (name) do nothing)
		insert into agent_approvals (trace_id, skill_name, skill_revision, arguments, arguments_hash, status, decided_by,
		  reason, decided_at, consumed_at, expires_at)
		values ('op_00000000000000000000000001', 'drop', 1, @arguments::jsonb, md5(gen_random_uuid()::text), @status,
		        case when @status in ('pending', 'expired') then '' else 'the admin' end,
		        case when @status in ('pending', 'expired') then '' else 'looks right' end,
		        case when @status not in ('pending', 'expired') then clock_timestamp() end,
		        case when @status = 'consumed' then clock_timestamp() end,
		          clock_timestamp() + make_interval(secs => @hours * 3600))
		returning id::text`, postgres.Strict{"status": status, "arguments": arguments, "hours": hours})
}

func TestApprovalTabsByState(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	wantTexts(t, server.URL+"/approvals", "No approval is requested")
	ids := map[string]string{
		"pending":  insertApproval(t, pool, "pending", `{"n": 1}`, 5),
		"overdue":  insertApproval(t, pool, "pending", `{"n": 2}`, -1),
		"approved": insertApproval(t, pool, "approved", `{"n": 3}`, 5),
		"rejected": insertApproval(t, pool, "rejected", `{"n": 4}`, -9),
		"consumed": insertApproval(t, pool, "consumed", `{"n": 5}`, -9),
		"unused":   insertApproval(t, pool, "approved", `{"n": 6}`, -1),
		"void":     insertApproval(t, pool, "expired", `{"n": 7}`, 5),
	}
	for tab, want := range map[string]string{
		"": "pending", "?status=pending": "pending", "?status=decided": "approved rejected consumed",
		"?status=expired": "overdue unused void",
	} {
		body := wantTexts(t, server.URL+"/approvals"+tab)
		for name, id := range ids {
			shown := strings.Contains(body, `id="approval-`+id)
			assert.Truef(t, shown == strings.Contains(" "+want+" ", " "+name+" "), "%q has the %s one: %v", tab, name, shown)
		}
	}
	wantError(t, server.URL+"/approvals?status=maybe", 400, "it can be pending, decided")
	wantError(t, server.URL+"/approvals?before=yesterday", 400, "no place in this list")
}

func TestApprovalShowsExactArguments(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	first := insertApproval(t, pool, "consumed", `{"table": "a", "password": "hunter22", "n": 9007199254740993}`, 5)
	wantTexts(t, server.URL+"/approvals/"+first, "hunter22", "9007199254740993",
		"No call of this skill was approved before",
		"by the admin", "looks right")
	insertApproval(t, pool, "rejected", `{"table": "never"}`, 5)
	second := insertApproval(t, pool, "pending", `{"table": "b", "password": "hunter22", "n": 9007199254740993}`, 5)
	body := wantTexts(t, server.URL+"/approvals/"+second, `/approvals/`+first,
		`<del>− `+"  &#34;table&#34;: &#34;a&#34;</del>", `<ins>&#43; `+"  &#34;table&#34;: &#34;b&#34;</ins>",
		`action="/act/v1/approvals/`+second+`"`, `name="decision" value="approve"`, `name="decision" value="reject"`)
	assert.True(t, !strings.Contains(body, "never"), "the page compares the call with a denied call")
	wantError(t, server.URL+"/approvals/01890000-0000-7000-8000-000000000000", 404, "there is no approval")
	wantError(t, server.URL+"/approvals/nonsense", 404, "there is no approval")
}

func TestDecidedApprovalHasNoActions(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	for _, id := range []string{
		insertApproval(t, pool, "rejected", `{}`, 5),
		insertApproval(t, pool, "pending", `{}`, -1),
	} {
		body := wantTexts(t, server.URL+"/approvals/"+id)
		assert.Truef(t, !strings.Contains(body, "/act/"), "the page offers a second decision:\n%s", body)
	}
	pending := insertApproval(t, pool, "pending", `{}`, 5)
	insert(t, pool, `update agent_skills set revision = 2 returning name`)
	body := wantTexts(t, server.URL+"/approvals/"+pending, "it is at revision 2 now",
		"the skill drop was changed: revision 1 is now 2")
	assert.Truef(t, !strings.Contains(body, "/act/"),
		"an approval of a skill that has changed can still be decided:\n%s", body)
}

func TestTruncatedArgumentsCannotBeApproved(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	id := insertApproval(t, pool, "pending", `{"text": "`+strings.Repeat("a", maxArguments)+`"}`, 5)
	wantTexts(t, server.URL+"/approvals", "Read them whole")
	body := wantTexts(t, server.URL+"/approvals/"+id, "Only the beginning", "cannot be approved here", `value="reject"`)
	assert.Truef(t, !strings.Contains(body, `value="approve"`) && len(body) <= 100_000,
		"the page has %d bytes, or offers an approval of arguments that it does not show", len(body))
}

func TestApprovalShowsOutcome(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	x := insert(t, pool, `insert into agent_executions (trace_id, surface, flow, status, result_summary)
		values ('op_00000000000000000000000001', 'operate', 'turn', 'pending', 'dropped it with password=hunter22')
		returning id::text`)
	id := insert(t, pool, `insert into agent_approvals (trace_id, skill_name, skill_revision, arguments, arguments_hash,
		  status, decided_by, decided_at, consumed_at, expires_at, execution_id)
		select trace_id, skill_name, skill_revision, arguments, md5('x'), status, decided_by, decided_at, consumed_at,
		       expires_at, $2::uuid from agent_approvals where id = $1::uuid returning id::text`,
		insertApproval(t, pool, "consumed", `{}`, 5), x)
	insert(t, pool, `
		with a as (insert into agent_activity (trace_id, execution_id, step, skill_name, status, output, duration_ms)
		           values ('op_00000000000000000000000001', $2::uuid, 'call 1/drop', 'drop', 'success', '{"rows": 17}', 40))
		update agent_approvals set consumed_for = $2::text || ' call 1/drop' where id = $1::uuid returning id::text`, id, x)
	body := wantTexts(t, server.URL+"/approvals/"+id, "was used", "/executions/"+x, "rows", "17", "40 ms", "dropped it")
	assert.True(t, !strings.Contains(body, "hunter22"), "the page shows a secret of the result")
	insert(t, pool, `update agent_activity set step = 'follow_through/call 1/drop' where skill_name = 'drop' returning id::text`)
	wantTexts(t, server.URL+"/approvals/"+id, "was used", "17", "40 ms") // a heartbeat's step is within a phase
}
