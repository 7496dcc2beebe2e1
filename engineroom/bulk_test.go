package engineroom

import (
	"html"
	"net/http"
	"net/url"
	"regexp"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/testkit/rows"
)

// bulkForms returns the ids of a page's bulk forms, by action.
func bulkForms(body string) map[string]string {
	got := map[string]string{}
	for _, form := range strings.Split(body, `action="/act/v1/executions/bulk"`)[1:] {
		form, _, _ = strings.Cut(form, "</form>")
		value := func(name string) string {
			if m := regexp.MustCompile(`name="` + name + `" value="([^"]*)"`).FindStringSubmatch(form); m != nil {
				return html.UnescapeString(m[1])
			}
			return ""
		}
		got[value("action")] = strings.ReplaceAll(value("ids"), "\n", " ")
	}
	return got
}

func TestBulkActionsOnFilteredExecutions(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	first, second := rows.Execution(t, pool, "failed", "flow", "ship"), rows.Execution(t, pool, "timeout", "flow", "ship")
	retried := rows.Execution(t, pool, "failed", "flow", "ship")
	fork := rows.Execution(t, pool, "running", "flow", "ship")
	rows.Quiet(t, pool, `update agent_executions set forked_from = $1::uuid where id = $2::uuid`, retried, fork)
	rows.Execution(t, pool, "completed", "flow", "ship")
	other := rows.Execution(t, pool, "waiting", "chat", "talk")
	turn := rows.Execution(t, pool, "failed", "operate", "turn")
	child, parent := rows.Execution(t, pool, "failed", "flow", "pack"), rows.Execution(t, pool, "timeout", "flow", "order")
	rows.Quiet(t, pool, `update agent_executions set parent_id = $1::uuid where id = $2::uuid`, parent, child)
	trace := insert(t, pool, `select trace_id from agent_executions where id = $1::uuid`, first)
	for query, want := range map[string]map[string]string{
		"":                           {},
		"?flow=ship":                 {"retry": second + " " + first, "cancel": fork},
		"?flow=ship&surface=chat":    {},
		"?failed=1":                  {"retry": parent + " " + second + " " + first},
		"?flow=pack":                 {},
		"?status=timeout":            {"retry": parent + " " + second},
		"?view=waiting":              {"cancel": other},
		"?view=stuck":                {},
		"?trace_id=" + trace:         {"retry": first},
		"?range=1h&flow=!ship":       {"retry": parent, "cancel": other},
		"?flow=ship&sort=took":       {},
		"?until=2020-01-01&failed=1": {},
	} {
		got := bulkForms(wantTexts(t, server.URL+"/executions"+query))
		assert.Truef(t, len(got) == len(want) && got["retry"] == want["retry"] && got["cancel"] == want["cancel"],
			"%q offers %v, want %v", query, got, want)
	}
	wantTexts(t, server.URL+"/executions?failed=1", "Retry all 3", `name="reason" required`)
	rows.Quiet(t, pool, `
		insert into agent_executions (trace_id, surface, flow, status) select 'fl_' || n, 'flow', 'many', 'pending'
		  from generate_series(1, 201) n`)
	rows.Quiet(t, pool, `update agent_executions set error_message = 'no answer' where status in ('failed', 'timeout')`)
	body := wantTexts(t, server.URL+"/executions?flow=many", "Cancel the newest 200")
	assert.Equal(t, 200, len(strings.Fields(bulkForms(body)["cancel"])))
	links := regexp.MustCompile(`href="(/executions\?failed=1&amp;since=[^"]*)"`).FindStringSubmatch(wantTexts(t,
		server.URL+"/"))
	assert.Truef(t, links != nil && strings.Contains(wantTexts(t, server.URL+html.UnescapeString(links[1])),
		`id="execution-`),
		"the link of an hour of the overview does not list its failed executions: %q", links)
	group := bulkForms(wantTexts(t, server.URL+"/", "Retry all 3"))["retry"]
	assert.Equal(t, parent+" "+second+" "+first, group)
	trace = insert(t, pool, `select trace_id from agent_executions where id = $1::uuid`, turn)
	body = wantTexts(t, server.URL+"/executions/"+turn, "cannot be forked: say it again") +
		wantTexts(t, server.URL+"/traces/"+trace)
	assert.True(t, !strings.Contains(body, "/retry"), "the page offers a retry of a turn")
}

func TestBulkActionNamesIncompleteSearch(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	rows.Execution(t, pool, "failed", "flow", "ship") // older than the searched executions
	rows.Quiet(t, pool, `
		insert into agent_executions (trace_id, surface, flow, status) select 'fl_' || n, 'flow', 'many', 'failed'
		  from generate_series(1, $1::int) n`, maxBulkSearched-1)
	found := rows.Execution(t, pool, "failed", "flow", "ship")
	body := wantTexts(t, server.URL+"/executions?failed=1&flow=ship", "Retry the 1 found",
		"The newest 10,000 executions of each state were searched.")
	assert.Equal(t, found, bulkForms(body)["retry"])
}

func TestBulkActionShowsCounts(t *testing.T) {
	t.Parallel()
	calls, server, client := serveWithAPI(t, func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte(`{"done": 1, "refused": 1, "detail": "1 of 2 executions retried. 1 refused.", "items": []}`))
	})
	resp := post(t, client, server.URL+"/act/v1/executions/bulk", url.Values{
		"action": {"retry"}, "ids": {"a\nb"}, "reason": {"it is back"}, "back": {"/executions?failed=1"},
	}, nil)
	notice, _ := pagesAfter(t, client, server, resp)
	assert.Contains(t, notice, "1 of 2 executions retried. 1 refused.")
	assert.Equal(t, `{"action":"retry","ids":["a","b"],"reason":"it is back"}`, (*calls)[0].body)
}
