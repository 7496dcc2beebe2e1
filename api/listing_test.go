package api_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/flows"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/trace"
)

// list reads all pages of a listing and returns one field of each item. It calls between after every page.
func (a *agent) list(path, field string, limit int, between func()) (values []string) {
	a.t.Helper()
	cursor := ""
	for {
		var got struct {
			Items []map[string]any `json:"items"`
			Next  *string          `json:"next_cursor"`
		}
		separator := "?"
		if strings.Contains(path, "?") {
			separator = "&"
		}
		page := fmt.Sprintf("%s%slimit=%d", path, separator, limit)
		if cursor != "" {
			page += "&cursor=" + url.QueryEscape(cursor)
		}
		a.get(page, &got)
		require.Truef(a.t, len(got.Items) <= limit && (got.Next == nil || len(got.Items) == limit) &&
			(len(got.Items) > 0 || cursor == ""), "a page of %d has %d rows, next %v", limit, len(got.Items), got.Next)
		for _, item := range got.Items {
			values = append(values, item[field].(string))
		}
		if got.Next == nil {
			return values
		}
		cursor = *got.Next
		if between != nil {
			between()
		}
	}
}

// listing is a route that lists rows by id.
type listing struct {
	path, field string             // field identifies a row
	add         func(n int) string // adds the nth row and returns its field
}

func (a *agent) listings() map[string]listing {
	return map[string]listing{
		"traces": {
			"/v1/traces", "trace_id",
			func(int) string { return a.start("beat", trace.New(trace.Heartbeat)).TraceID },
		},
		"executions": {"/v1/executions", "id", func(int) string { return a.start("beat", trace.New(trace.Flow)).ID }},
		"activity": {"/v1/activity", "id", func(int) string {
			return a.recordActivity(activity.Entry{TraceID: string(trace.New(trace.Chat)), Skill: "look"}, activity.Success)
		}},
		"skills": {"/v1/skills", "name", func(n int) string {
			name := fmt.Sprintf("skill_%d", n)
			a.skill(name)
			return name
		}},
		"objectives": {"/v1/objectives", "name", func(n int) string { return a.objective(fmt.Sprintf("objective_%d", n)) }},
		"automations": {"/v1/automations", "name", func(n int) string {
			return a.automation(fmt.Sprintf("automation_%d", n))
		}},
		"approvals": {"/v1/approvals", "id", func(n int) string { return a.approval(fmt.Sprintf(`{"n":%d}`, n), false).ID }},
		"deliveries": {"/v1/webhooks/deliveries", "delivery_id", func(n int) string {
			return a.delivery(fmt.Sprintf("delivery_%d", n))
		}},
		"memory": {"/v1/memory", "key", func(n int) string { return a.storeMemory(fmt.Sprintf("key_%d", n), "general") }},
		"lanes": {"/v1/lanes", "lane", func(n int) string {
			lane := fmt.Sprintf("lane:%03d", (n*37)%101)
			a.holdLane(lane, "somebody")
			return lane
		}},
	}
}

func TestPagesAreStableUnderInserts(t *testing.T) {
	t.Parallel()
	for name := range (&agent{}).listings() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := start(t)
			kind := a.listings()[name]
			var want []string
			n := 0
			for ; n < 12; n++ {
				want = append(want, kind.add(n))
			}
			slices.Reverse(want)
			assert.NoDiff(t, want, a.list(kind.path, kind.field, 12, nil))
			got := a.list(kind.path, kind.field, 5, func() {
				for range 3 {
					kind.add(n)
					n++
				}
			})
			assert.NoDiff(t, want, got)
		})
	}
}

func TestPagesAreCompleteUnderWriters(t *testing.T) {
	t.Parallel()
	a := start(t)
	var want []string
	for range 20 {
		want = append(want, a.start("beat", trace.New(trace.Flow)).ID)
	}
	slices.Reverse(want)
	var writers errgroup.Group
	for range 3 {
		writers.Go(func() error {
			for range 40 {
				_, _, err := a.engine.Start(t.Context(), a.pool, executions.Spec{Flow: "beat", Surface: trace.Flow})
				if err != nil {
					return err
				}
			}
			return nil
		})
	}
	got := a.list("/v1/executions", "id", 3, nil)
	require.NoError(t, writers.Wait())
	assert.Truef(t, slices.IsSortedFunc(got, func(x, y string) int { return strings.Compare(y, x) }),
		"not newest first: %v", got)
	assert.Truef(t, len(slices.Compact(slices.Clone(got))) == len(got) && len(got) >= 20 &&
		slices.Equal(got[len(got)-20:], want), "got %v, want the last 20 to be %v", got, want)
}

func TestLongestPageHasNextCursor(t *testing.T) {
	t.Parallel()
	a := start(t)
	pgtest.Exec(t, a.pool, `
		insert into agent_executions (trace_id, surface, flow) select lanekeeper.agent_trace_id('fl'), 'flow', 'beat'
		  from generate_series(1, 500)`)
	assert.Equal(t, 500, len(a.list("/v1/executions", "id", 500, nil)), "executions")
	pgtest.Exec(t, a.pool, `insert into agent_executions (trace_id, surface, flow)
		values (lanekeeper.agent_trace_id('fl'), 'flow', 'beat')`)
	assert.Equal(t, 501, len(a.list("/v1/executions", "id", 500, nil)), "executions")
}

func TestListingFilters(t *testing.T) {
	t.Parallel()
	a := start(t)
	beat, chat := trace.New(trace.Heartbeat), trace.New(trace.Chat)
	first := a.start("beat", beat)
	second := a.start("answer", chat)
	a.fail(second)
	look := a.recordActivity(activity.Entry{
		TraceID: string(beat), Surface: "heartbeat", Skill: "look", Lane: "heartbeat",
		Agent: "warden",
	}, activity.Success)
	say := a.recordActivity(activity.Entry{TraceID: string(chat), Surface: "chat", Skill: "say"}, activity.Error)
	a.skill("look")
	a.skill("say")
	a.post("/v1/skills/say/disable", `{"reason":"too loud"}`, &struct{}{})
	audit := pgtest.Value[string](t, a.pool, `select id::text from agent_activity where skill_name = 'disable_skill'`)
	a.delivery("msg_1")
	for path, test := range map[string]struct {
		field string
		want  []string
	}{
		"/v1/traces?surface=chat":                                  {"trace_id", []string{string(chat)}},
		"/v1/traces?status=pending":                                {"trace_id", []string{string(beat)}},
		"/v1/traces?since=2999-01-01T00:00:00Z":                    {"trace_id", nil},
		"/v1/executions?status=failed":                             {"id", []string{second.ID}},
		"/v1/executions?surface=heartbeat":                         {"id", []string{first.ID}},
		"/v1/executions?since=1999-01-01T00:00:00Z&flow=answer":    {"id", []string{second.ID}},
		"/v1/executions?since=2999-01-01T00:00:00Z":                {"id", nil},
		"/v1/executions?until=1950-01-01T00:00:00Z":                {"id", nil},
		"/v1/executions?until=2999-01-01T00:00:00Z&status=failed":  {"id", []string{second.ID}},
		"/v1/executions?flow=answer":                               {"id", []string{second.ID}},
		"/v1/executions?trace_id=" + string(beat):                  {"id", []string{first.ID}},
		"/v1/executions?trace_id=" + chat.OTel():                   {"id", []string{second.ID}},
		"/v1/executions?trace_id=" + chat.Suffix():                 {"id", []string{second.ID}},
		"/v1/executions?trace_id=" + strings.ToLower(string(beat)): {"id", []string{first.ID}},
		"/v1/executions?trace_id=" + trace.New(trace.Chat).OTel():  {"id", nil},
		"/v1/activity?surface=chat":                                {"id", []string{say}},
		"/v1/activity?status=error":                                {"id", []string{say}},
		"/v1/activity?skill=look":                                  {"id", []string{look}},
		"/v1/activity?lane=heartbeat":                              {"id", []string{look}},
		"/v1/activity?agent=warden":                                {"id", []string{look}},
		"/v1/activity?trace_id=" + beat.OTel():                     {"id", []string{look}},
		"/v1/activity?agent=admin&surface=operate":                 {"id", []string{audit}},
		"/v1/activity?until=2020-01-01T00:00:00Z":                  {"id", nil},
		"/v1/activity?since=2020-01-01T00:00:00%2B02:00":           {"id", []string{audit, say, look}},
		"/v1/skills?enabled=true":                                  {"name", []string{"look"}},
		"/v1/skills?enabled=false":                                 {"name", []string{"say"}},
		"/v1/skills?disabled_by=root":                              {"name", []string{"say"}},
		"/v1/skills?scope=external":                                {"name", nil},
		"/v1/skills?source=workspace":                              {"name", []string{"say", "look"}},
		"/v1/webhooks/deliveries?endpoint=orders&status=received":  {"delivery_id", []string{"msg_1"}},
		"/v1/webhooks/deliveries?endpoint=invoices":                {"delivery_id", nil},
		"/v1/webhooks/deliveries?status=dead":                      {"delivery_id", nil},
	} {
		t.Run(path, func(t *testing.T) {
			a.t = t
			assert.NoDiff(t, test.want, a.list(path, test.field, 10, nil))
		})
	}
}

func TestForeignCursorIsRejected(t *testing.T) {
	t.Parallel()
	a := start(t)
	for range 2 {
		a.start("beat", trace.New(trace.Flow))
	}
	var got struct {
		Next string `json:"next_cursor"`
	}
	a.get("/v1/executions?limit=1", &got)
	for _, path := range []string{"/v1/traces", "/v1/activity", "/v1/lanes", "/v1/skills", "/v1/webhooks/deliveries"} {
		a.checkProblem(a.raw("GET", path+"?cursor="+got.Next, "", asAdmin()), 400, "cursor")
	}
	a.get("/v1/traces?limit=1", &got)
	for _, path := range []string{
		"/v1/activity", "/v1/activity/audit", "/v1/activity/spend", "/v1/activity/slowest", "/v1/activity/failing",
		"/v1/traces/fl_01J8052XG1XHJAZ95GX5TCNBAZ/prompts",
	} {
		a.checkProblem(a.raw("GET", path+"?cursor="+got.Next, "", asAdmin()), 400, "cursor")
	}
}

func TestGetDelivery(t *testing.T) {
	t.Parallel()
	a := start(t)
	a.delivery("msg_1")
	id := pgtest.Value[string](t, a.pool, `select id::text from agent_webhook_deliveries`)
	w := a.raw("GET", "/v1/webhooks/deliveries/"+id, "", asAdmin())
	assert.Truef(t, w.Code == http.StatusOK && w.Header().Get("X-Trace-Id") == "wh_2" &&
		strings.Contains(w.Body.String(), `"other_bodies":[]`), "%d %s", w.Code, w.Body)
	a.checkProblem(a.raw("GET", "/v1/webhooks/deliveries/msg_1", "", asAdmin()), 400, "not the id (uuid) of a delivery")
	a.checkProblem(a.raw("GET", "/v1/webhooks/deliveries/0198c0de-0000-7000-8000-000000000000", "", asAdmin()), 404, "0198c0de")
}

type listed struct {
	Items      []map[string]any `json:"items"`
	NextCursor *string          `json:"next_cursor"`
}

func TestListFlows(t *testing.T) {
	t.Parallel()
	a := start(t)
	for _, name := range []string{"c", "a", "b"} {
		for range 2 {
			d := flows.Definition{
				Name: name, Description: fmt.Sprint(len(name)),
				Actions: []any{map[string]any{"actionType": "end"}},
			}
			_, err := flows.Put(t.Context(), a.pool, d)
			require.NoError(t, err)
		}
	}
	assert.Equal(t, "a b c", strings.Join(a.list("/v1/flows", "name", 2, nil), " "))
	var one flows.Flow
	w := a.raw("GET", "/v1/flows/b", "", asAdmin())
	assert.Truef(t, json.Unmarshal(w.Body.Bytes(), &one) == nil && one.Name == "b" && one.Version == 1 &&
		one.Current && len(one.Definition.Actions) == 1, "%d %s", w.Code, w.Body)
	a.checkProblem(a.raw("GET", "/v1/flows/nobody", "", asAdmin()), http.StatusNotFound, `no flow "nobody"`)
	var schema map[string]any
	w = a.raw("GET", "/v1/schemas/flow", "", asAdmin())
	assert.Truef(t, json.Unmarshal(w.Body.Bytes(), &schema) == nil && schema["$schema"] != nil,
		"%d %.200s", w.Code, w.Body)
}

func TestListRequests(t *testing.T) {
	t.Parallel()
	a := start(t)
	pgtest.Exec(t, a.pool, `
		with x as (
		  insert into agent_executions (trace_id, surface, flow) values ('fl_01JD3V7K8ZQ6W2M5T9X4C1B0AE', 'flow', 'a')
		    returning id, trace_id)
		insert into agent_requests (kind, execution_id, trace_id, thread_id, title, items)
		select k, x.id, x.trace_id, 'maria', k, case k when 'document' then '{INE,CURP}'::text[] else '{}' end
		  from x cross join unnest(array['document', 'test']) k`)
	var page listed
	w := a.raw("GET", "/v1/requests?kind=document&status=pending&thread_id=maria", "", asAdmin())
	err := json.Unmarshal(w.Body.Bytes(), &page)
	require.Truef(t, err == nil && len(page.Items) == 1 && fmt.Sprint(page.Items[0]["items"]) == "[INE CURP]",
		"%d %s", w.Code, w.Body)
	id := fmt.Sprint(page.Items[0]["id"])
	one := a.raw("GET", "/v1/requests/"+id, "", asAdmin())
	assert.Truef(t, one.Code == http.StatusOK && one.Header().Get("X-Trace-Id") == "fl_01JD3V7K8ZQ6W2M5T9X4C1B0AE",
		"%d %s", one.Code, one.Body)
	for path, c := range map[string]struct {
		status int
		words  string
	}{
		"/v1/requests/nonsense":                             {http.StatusBadRequest, "not the id (uuid) of a request"},
		"/v1/requests/0198c0de-0000-7000-8000-000000000000": {http.StatusNotFound, "no request "},
		"/v1/requests?kind=favour":                          {http.StatusBadRequest, "document"},
		"/v1/requests?execution_id=zz":                      {http.StatusBadRequest, "uuid"},
	} {
		a.checkProblem(a.raw("GET", path, "", asAdmin()), c.status, c.words)
	}
}
