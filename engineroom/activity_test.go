package engineroom

import (
	"html"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit/rows"
)

// insertActivities inserts n rows of the activity log, named by their number.
func insertActivities(t *testing.T, pool *pgxpool.Pool, n int) {
	t.Helper()
	pgtest.Exec(t, pool, strings.ReplaceAll(insertActivitiesSQL, "20000", strconv.Itoa(n)))
}

// insertActivitiesSQL inserts 20,000 rows of the activity log.
const insertActivitiesSQL = `
	insert into agent_activity (id, trace_id, skill_name, purpose, status, surface, agent, lane, error_class,
	  error_message, created_at)
	select lanekeeper.agent_uuid7(at), 'hb_' || lpad(n::text, 26, '0'), case n % 2 when 0 then 'even' else 'odd' end,
	       'number ' || n || '.', case n % 3 when 0 then 'error' else 'success' end,
	       case n % 5 when 0 then 'chat' else 'heartbeat' end, 'agent_' || n % 7, 'lane_' || n % 11,
	       case n % 3 when 0 then 'timeout_class' else '' end, case n % 3
	         when 0 then 'too slow' end, at
	  from (select n, clock_timestamp() - make_interval(secs => 3 * (20000 - n)) as at from generate_series(1, 20000) n) x`

func TestActivityFiltersCombine(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	insertActivities(t, pool, 120)
	rows.Quiet(t, pool, `
		insert into agent_locks (lane, locked_by, fencing_token, expires_at) values ('lane_1', '', 1, now())`)
	for query, want := range map[string]string{
		"/?surface=chat&status=error":                             "120 105 90 75 60 45 30 15",
		"/activity?surface=chat&status=error&skill=even":          "120 90 60 30",
		"/activity?lane=lane_1&agent=agent_1":                     "78 1",
		"/activity?lane=LANE_1&agent=gent_1":                      "120 78 43 1",
		"/activity?skill=VE&lane=ane_5":                           "104 82 60 38 16",
		"/activity?trace=hb_00000000000000000000000042":           "42",
		"/activity?trace=00000000000000000000000042&status=error": "42",
		"/activity?skill=none":                                    "",
		"/activity?since=2999-01-01":                              "",
		"/activity?until=2000-01-01T00:00":                        "",
	} {
		body := wantTexts(t, server.URL+query)
		var got []string
		for _, m := range regexp.MustCompile(`number (\d+)\.`).FindAllStringSubmatch(body, -1) {
			got = append(got, m[1])
		}
		assert.Truef(t, strings.Join(got, " ") == want, "%s has %v, want %s", query, got, want)
	}
	wantTexts(t, server.URL+"/?status=error", "timeout_class", "too slow", `role="log"`, `<option value="error" selected>`)
}

func TestActivityRowExpands(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	id := insert(t, pool, `
		insert into agent_activity (trace_id, skill_name, input, output, error_message, step, idempotency_key, token_usage)
		values ('hb_00000000000000000000000001', 'look', jsonb_build_object('text', $1::text), to_jsonb(repeat('z', 1000000)),
		  $1, $1, $1, '{"prompt_tokens": 1200, "completion_tokens": 34}') returning id::text`, hostile)
	folded := wantTexts(t, server.URL+"/activity", `aria-expanded="false"`, "row="+id)
	assert.True(t, !strings.Contains(folded, "zzzz") && !strings.Contains(folded, "1,200 prompt"),
		"a folded row contains the omitted text")
	wantTexts(t, server.URL+"/activity?row="+id, `aria-expanded="true"`, "1,200 prompt, 34 completion", "zzzz", "in all")
	wantEscaped(t, server.URL+"/activity?row="+id)
	wantTexts(t, server.URL+"/activity?row=018f0000-0000-7000-8000-000000000000", "look")
}

func TestOverviewFiltersAreChecked(t *testing.T) {
	t.Parallel()
	_, server := openRoom(t)
	for query, why := range map[string]string{
		"surface=none": "surface", "status=fine": "status", "skill=" + strings.Repeat("x", maxFilterBytes+1): "skill",
		"since=yesterday": "since", "until=1": "until", "row=1": "row",
	} {
		wantError(t, server.URL+"/activity?"+query, 400, why)
	}
	wantError(t, server.URL+"/?surface=none", 400, "surface")
	wantError(t, server.URL+"/activity?cursor=x", 400, "page")
}

// The list of activities shows only the newest rows. A link to an older row leads to its trace.
func TestLinkToActivityOpensIt(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	insertActivities(t, pool, 60)
	first := pgtest.Value[string](t, pool, `select id::text from agent_activity order by id limit 1`)
	last := pgtest.Value[string](t, pool, `
		update agent_activity set cause_id = $1::uuid, trace_id = 'hb_00000000000000000000000001'
		 where id = (select max(id::text)::uuid from agent_activity) returning id::text`, first)
	for page, from := range map[string]string{"/find?q=" + first: "", "/audit": `<tr id="row-` + last} {
		_, body, _ := strings.Cut(wantTexts(t, server.URL+page), from)
		link := regexp.MustCompile(`href="([^"]*` + first + `[^"]*)"`).FindStringSubmatch(body)
		require.Truef(t, link != nil, "%s has no link to the activity:\n%s", page, body)
		_, panel, _ := strings.Cut(wantTexts(t, server.URL+html.UnescapeString(link[1])), `<section id="panel"`)
		assert.Contains(t, panel, "number 1.")
	}
}
