package engineroom

import (
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// asked is an approval of the skill drop that expires in some hours.
func asked(t *testing.T, pool *pgxpool.Pool, status, arguments string, hours float64) string {
	t.Helper()
	return put(t, pool, `
		with s as (insert into agent_skills (name, handler, trust, tool_definition) values ('drop', 'builtin:drop', 'approve', '{}') on conflict (name) do nothing)
		insert into agent_approvals (trace_id, skill_name, skill_revision, arguments, arguments_hash, status, decided_by, reason,
		       decided_at, consumed_at, expires_at)
		values ('op_00000000000000000000000001', 'drop', 1, @arguments::jsonb, md5(gen_random_uuid()::text), @status,
		        case when @status in ('pending', 'expired') then '' else 'the admin' end,
		        case when @status in ('pending', 'expired') then '' else 'looks right' end,
		        case when @status not in ('pending', 'expired') then clock_timestamp() end,
		        case when @status = 'consumed' then clock_timestamp() end, clock_timestamp() + make_interval(secs => @hours * 3600))
		returning id::text`, postgres.Strict{"status": status, "arguments": arguments, "hours": hours})
}

func TestApprovalsAreInTheTabOfTheirState(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	shows(t, server.URL+"/approvals", "Nothing needs your leave")
	ids := map[string]string{
		"pending": asked(t, pool, "pending", `{"n": 1}`, 5), "overdue": asked(t, pool, "pending", `{"n": 2}`, -1),
		"approved": asked(t, pool, "approved", `{"n": 3}`, 5), "rejected": asked(t, pool, "rejected", `{"n": 4}`, -9),
		"consumed": asked(t, pool, "consumed", `{"n": 5}`, -9), "unused": asked(t, pool, "approved", `{"n": 6}`, -1),
		"void": asked(t, pool, "expired", `{"n": 7}`, 5),
	}
	for tab, want := range map[string]string{
		"": "pending", "?status=pending": "pending", "?status=decided": "approved rejected consumed", "?status=expired": "overdue unused void",
	} {
		body := shows(t, server.URL+"/approvals"+tab)
		for name, id := range ids {
			if has := strings.Contains(body, `id="approval-`+id); has != strings.Contains(" "+want+" ", " "+name+" ") {
				t.Errorf("%q has the %s one: %v", tab, name, has)
			}
		}
	}
	turnsAway(t, server.URL+"/approvals?status=maybe", 400, "it can be pending, decided")
	turnsAway(t, server.URL+"/approvals?before=yesterday", 400, "no place in this list")
}

func TestApprovalsGoOnOverPages(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	for n := range mostApprovals + 2 {
		asked(t, pool, []string{"approved", "rejected"}[n%2], fmt.Sprintf(`{"n": %d}`, n), 5)
	}
	first := shows(t, server.URL+"/approvals?status=decided", "Older approvals")
	_, link, _ := strings.Cut(first, `<p class="pager"><a href="`)
	link, _, _ = strings.Cut(link, `"`)
	second := shows(t, server.URL+strings.ReplaceAll(link, "&amp;", "&"))
	if n, m := strings.Count(first, `id="approval-`), strings.Count(second, `id="approval-`); n != mostApprovals || m != 2 {
		t.Errorf("the pages have %d and %d approvals", n, m)
	}
	if strings.Contains(second, "Older approvals") {
		t.Error("the last page leads on")
	}
}

func TestAnApprovalShowsExactlyWhatIsApproved(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	first := asked(t, pool, "consumed", `{"table": "a", "password": "hunter22", "n": 9007199254740993}`, 5)
	shows(t, server.URL+"/approvals/"+first, "hunter22", "9007199254740993", "Nothing of this skill was approved before", "by the admin", "looks right")
	asked(t, pool, "rejected", `{"table": "never"}`, 5)
	second := asked(t, pool, "pending", `{"table": "b", "password": "hunter22", "n": 9007199254740993}`, 5)
	body := shows(t, server.URL+"/approvals/"+second, `/approvals/`+first,
		`<del>− `+"  &#34;table&#34;: &#34;a&#34;</del>", `<ins>&#43; `+"  &#34;table&#34;: &#34;b&#34;</ins>",
		`action="/act/v1/approvals/`+second+`"`, `name="decision" value="approve"`, `name="decision" value="reject"`)
	if strings.Contains(body, "never") {
		t.Error("it is compared with what was denied")
	}
	turnsAway(t, server.URL+"/approvals/01890000-0000-7000-8000-000000000000", 404, "there is no approval")
	turnsAway(t, server.URL+"/approvals/nonsense", 404, "there is no approval")
}

func TestWhatIsDecidedOrVoidHasNoLevers(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	for _, id := range []string{asked(t, pool, "rejected", `{}`, 5), asked(t, pool, "pending", `{}`, -1)} {
		if body := shows(t, server.URL+"/approvals/"+id); strings.Contains(body, "/act/") {
			t.Errorf("it can be decided again:\n%s", body)
		}
	}
	pending := asked(t, pool, "pending", `{}`, 5)
	put(t, pool, `update agent_skills set revision = 2 returning name`)
	body := shows(t, server.URL+"/approvals/"+pending, "it is at revision 2 now", "the skill drop was changed: revision 1 is now 2")
	if strings.Contains(body, "/act/") {
		t.Errorf("an approval of a skill that has changed can still be decided:\n%s", body)
	}
}

func TestWhatIsNotShownWholeCannotBeApproved(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	id := asked(t, pool, "pending", `{"text": "`+strings.Repeat("a", mostArguments)+`"}`, 5)
	shows(t, server.URL+"/approvals", "too long for a list")
	body := shows(t, server.URL+"/approvals/"+id, "Only the beginning", "cannot be approved here", `value="reject"`)
	if strings.Contains(body, `value="approve"`) || len(body) > 100_000 {
		t.Errorf("the page has %d bytes, or takes leave for what it does not show", len(body))
	}
}

func TestWhatHappenedAfterADecisionIsTold(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	x := put(t, pool, `insert into agent_executions (trace_id, surface, flow, status, result_summary)
		values ('op_00000000000000000000000001', 'operate', 'turn', 'pending', 'dropped it') returning id::text`)
	id := asked(t, pool, "consumed", `{}`, 5)
	put(t, pool, `
		with a as (insert into agent_activity (trace_id, execution_id, step, skill_name, status, output, duration_ms)
		           values ('op_00000000000000000000000001', $2::uuid, 'call 1/drop', 'drop', 'success', '{"rows": 17}', 40))
		update agent_approvals set consumed_for = $2::text || ' call 1/drop' where id = $1::uuid returning id::text`, id, x)
	shows(t, server.URL+"/approvals/"+id, "was used", "/executions/"+x, "rows", "17", "40 ms")
}

func TestHostileApprovalsAreText(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	id := put(t, pool, `
		insert into agent_approvals (trace_id, skill_name, skill_revision, arguments, arguments_hash, status, decided_by, reason, decided_at, expires_at)
		values ($1::text, $1, 1, jsonb_build_object($1, $1), $1, 'rejected', $1, $1 || repeat('x', 1000000), now(), now() + interval '1 day')
		returning id::text`, strings.ReplaceAll(hostile, "\u0007", ""))
	harmless(t, server.URL+"/approvals?status=decided")
	harmless(t, server.URL+"/approvals/"+id)
}

func TestApprovalsAreFoundByAnIndex(t *testing.T) {
	t.Parallel()
	pool, _ := open(t)
	put(t, pool, `
		with a as (
		  insert into agent_approvals (id, trace_id, skill_name, skill_revision, arguments, arguments_hash, status, decided_at, parked, execution_id, step, expires_at)
		  select lanekeeper.agent_uuid7(clock_timestamp() - n * interval '1 minute'), 'op_' || n, 'skill_' || n % 50, 1, '{}', n::text,
		         (array['pending', 'approved', 'rejected', 'consumed', 'expired'])[1 + n % 5], case when n % 5 between 1 and 3 then now() end,
		         true, gen_random_uuid(), 's', now() + interval '7 days' - n * interval '1 minute'
		    from generate_series(1, 20000) n)
		select 'ok'`)
	id := asked(t, pool, "pending", `{}`, 5)
	analyse(t, pool, "agent_approvals", "agent_skills")
	last := "2026-01-01T00:00:00Z_01890000-0000-7000-8000-000000000000"
	for _, path := range []string{
		"/approvals", "/approvals?status=decided", "/approvals?status=expired", "/approvals?status=expired&before=" + last, "/approvals/" + id,
	} {
		bounded(t, pool, path, "agent_approvals")
	}
}
