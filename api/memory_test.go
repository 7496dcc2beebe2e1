package api_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/memory"
	"github.com/lanekeeper/lanekeeper/trace"
)

// withHeader returns the admin's headers and one more.
func withHeader(name, value string) http.Header {
	h := asAdmin()
	h.Set(name, value)
	return h
}

func TestConditionalMemoryWrites(t *testing.T) {
	t.Parallel()
	a := start(t)
	const path = "/v1/memory/entries/facts/a%2Fb%20c"
	put := func(value string, h http.Header) (int, http.Header, []byte) {
		w := a.raw("PUT", path, fmt.Sprintf(`{"value":%q,"reason":"told by Ana"}`, value), h)
		return w.Code, w.Header(), w.Body.Bytes()
	}
	a.checkProblem(a.raw("GET", path, "", asAdmin()), 404, "not found")
	a.checkProblem(a.raw("GET", "/v1/memory/entries/facts/%ff", "", asAdmin()), 404, "not found")
	a.checkProblem(a.raw("PUT", path, `{"value":1,"reason":"x"}`, asAdmin()), 428, "If-Match")
	status, header, _ := put("one", withHeader("If-None-Match", "*"))
	require.Truef(t, status == 200 && header.Get("ETag") == `"1"` && header.Get("X-Trace-Id") != "",
		"got %d %v", status, header)
	var e memory.Entry
	seen := a.get(path, &e).Get("ETag")
	require.Truef(t, e.Key == "a/b c" && e.Category == "facts" && seen == `"1"`, "got %+v, ETag %s", e, seen)
	status, header, _ = put("two", withHeader("If-Match", seen))
	assert.Truef(t, status == 200 && header.Get("ETag") == `"2"`, "got %d %v", status, header)
	status, header, body := put("late", withHeader("If-Match", seen))
	var p struct {
		problem
		Current memory.Entry
		Yours   string
	}
	err := json.Unmarshal(body, &p)
	assert.Truef(t, err == nil && status == 412 && p.Type == "urn:lanekeeper:problem:changed-meanwhile" &&
		string(p.Current.Value) == `"two"` && p.Current.Revision == 2 && p.Yours == "late" && header.Get("X-Trace-Id") == "",
		"got %d %s, %v", status, body, err)
	status, _, _ = put("late", withHeader("If-None-Match", "*"))
	assert.Equal(t, 412, status, "a key that must be new")
	status, _, _ = put("three", withHeader("If-Match", `W/"2"`))
	assert.Equal(t, 200, status, "a weak tag")
	status, _, _ = put("four", withHeader("If-Match", `*`))
	assert.Equal(t, 200, status, "any")
	for _, bad := range []http.Header{
		withHeader("If-Match", "2"), withHeader("If-Match", `"x"`),
		withHeader("If-Match", `"1", "2"`), withHeader("If-None-Match", `"2"`), withHeader("If-Match", ""),
	} {
		a.checkProblem(a.raw("PUT", path, `{"value":1,"reason":"x"}`, bad), 400, "If-")
	}
	a.checkProblem(a.raw("DELETE", path, `{"reason":"x"}`, asAdmin()), 428, "If-Match")
	a.checkProblem(a.raw("DELETE", path, `{"reason":"x"}`, withHeader("If-Match", `"1"`)), 412, "revision 4 is there")
	a.checkProblem(a.raw("POST", "/v1/memory/"+e.ID+"/forget", `{"reason":"x"}`, withHeader("If-Match", `"1"`)), 412,
		"revision 4 is there")
	w := a.raw("DELETE", path, `{"reason":"old"}`, withHeader("If-Match", `"4"`))
	assert.Truef(t, w.Code == 200, "got %d %s", w.Code, w.Body)
	a.checkProblem(a.raw("PUT", path, `{"value":1,"reason":"x"}`, withHeader("If-Match", "*")), 404, "not found")
	a.checkProblem(a.raw("PUT", path, `{"value":"password=hunter2hunter2","reason":"x"}`,
		withHeader("If-None-Match", "*")), 400, "secret")
	for _, value := range []string{`"\ud800"`, `1e400000`} {
		a.checkProblem(a.raw("PUT", path, `{"value":`+value+`,"reason":"x"}`, withHeader("If-None-Match", "*")), 400, "")
	}
	status, header, _ = put("anew", withHeader("If-None-Match", "*"))
	assert.Truef(t, status == 200 && header.Get("ETag") == `"5"`, "written again: %d %v", status, header)
	pgtest.Equal(t, a.pool, 5, `select count(*) from agent_activity where skill_name = 'set_memory'`)
}

func TestConcurrentConditionalWrites(t *testing.T) {
	t.Parallel()
	a := start(t)
	a.storeMemory("k", "facts")
	var group sync.WaitGroup
	var wrote, refused atomic.Int32
	for n := range 16 {
		group.Go(func() {
			switch w := a.raw("PUT", "/v1/memory/entries/facts/k", fmt.Sprintf(`{"value":%d,"reason":"x"}`, n),
				withHeader("If-Match", `"1"`)); w.Code {
			case 200:
				wrote.Add(1)
			case 412:
				refused.Add(1)
			default:
				t.Errorf("got %d %s", w.Code, w.Body)
			}
		})
	}
	group.Wait()
	assert.Truef(t, wrote.Load() == 1 && refused.Load() == 15, "%d wrote, %d were refused", wrote.Load(), refused.Load())
}

// conflict creates a conflict on a key at revision 2.
func (a *agent) conflict(key string) string {
	a.t.Helper()
	a.storeMemory(key, "facts")
	a.storeMemory(key, "facts")
	note := memory.Note{Category: "facts", Key: key, Value: "late", Revision: 1, TraceID: "hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE"}
	_, err := memory.Save(a.t.Context(), a.pool, note)
	conflict, ok := errors.AsType[*memory.ConflictError](err)
	require.True(a.t, ok, err)
	id, err := memory.StoreConflict(a.t.Context(), a.pool, note, conflict, "")
	require.NoError(a.t, err)
	return id
}

func TestMemoryConflictDecision(t *testing.T) {
	t.Parallel()
	a := start(t)
	taken, kept := a.conflict("taken"), a.conflict("kept")
	var list struct{ Items []memory.Conflict }
	a.get("/v1/memory/conflicts", &list)
	require.Truef(t, len(list.Items) == 2 && list.Items[0].ID == kept && list.Items[0].Revision == 2,
		"got %+v", list.Items)
	decide := func(id string) string { return "/v1/memory/conflicts/" + id + "/decide" }
	a.checkProblem(a.raw("POST", decide(kept), `{"decision":"both","reason":"x"}`, asAdmin()), 400, "keep")
	var c memory.Conflict
	header := a.post(decide(kept), `{"decision":"keep","reason":"ours is right"}`, &c)
	assert.Truef(t, c.Status == memory.ConflictKept && c.Revision == 2 && header.Get("ETag") == `"2"` &&
		c.DecidedReason == "ours is right", "got %+v, %v", c, header)
	a.checkProblem(a.raw("POST", decide(kept), `{"decision":"take","reason":"x"}`, asAdmin()), 409, "decided already")
	a.storeMemory("taken", "facts") // after the conflict arose
	a.checkProblem(a.raw("POST", decide(taken), `{"decision":"take","reason":"x"}`, asAdmin()), 412, "revision 3 is there")
	a.checkProblem(a.raw("POST", decide(taken), `{"decision":"take","reason":"x"}`, withHeader("If-Match", `"1"`)), 412,
		"revision 3 is there")
	w := a.raw("POST", decide(taken), `{"decision":"take","reason":"it is newer"}`, withHeader("If-Match", `"3"`))
	a.checkResponse(w, "POST", decide(taken), 200, &c)
	assert.Truef(t, c.Status == memory.ConflictTaken && c.Revision == 4 && string(c.Current) == `"late"`, "got %+v", c)
	a.checkAudit(w.Header().Get("X-Trace-Id"), pgtest.Value[string](t, a.pool, `
		select id::text from agent_activity where skill_name = 'decide_memory_conflict'
		  and input ->> 'decision' = 'take'`), "decide_memory_conflict", "it is newer")
	a.get("/v1/memory/conflicts?status=all", &list)
	assert.Truef(t, len(list.Items) == 2 && list.Items[1].Status == memory.ConflictTaken, "got %+v", list.Items)
	a.checkProblem(a.raw("POST", decide("018f0000-0000-7000-8000-000000000000"), `{"decision":"keep","reason":"x"}`,
		asAdmin()), 404, "not found")
	a.checkProblem(a.raw("POST", decide("x"), `{"decision":"keep","reason":"x"}`, asAdmin()), 400, "")
}

func TestStaleDecisionIsRejected(t *testing.T) {
	t.Parallel()
	a := start(t)
	a.objective("grow")
	seen := a.get("/v1/objectives/grow", &struct{}{}).Get("ETag")
	// a run of the objective changes no ETag
	pgtest.Exec(t, a.pool, `update agent_objectives set due_at = clock_timestamp(), last_trace_id = 'hb_1'`)
	assert.Equal(t, seen, a.get("/v1/objectives/grow", &struct{}{}).Get("ETag"))
	a.checkProblem(a.raw("POST", "/v1/objectives/grow/resume", `{"reason":"x"}`, asAdmin()), 409, "not ")
	pgtest.Exec(t, a.pool, `insert into agent_webhook_targets (name, url, secrets, events)
		values ('ops', 'https://ops.example', '{"${S}"}', '{"*"}')`)
	a.checkProblem(a.raw("POST", "/v1/webhooks/targets/ops/disable", `{"reason":"x"}`, withHeader("If-Match", `"1"`)), 400,
		"the object has no revision")
}

func TestForgetMemory(t *testing.T) {
	t.Parallel()
	a := start(t)
	a.storeMemory("a/../b", "facts")
	a.storeMemory("kept", "facts")
	id := pgtest.Value[string](t, a.pool, `select id::text from agent_memory where key = 'a/../b'`)
	a.checkProblem(a.raw("POST", "/v1/memory/"+id+"/forget", `{"reason":" "}`, asAdmin()), 400, "reason")
	var got change
	a.post("/v1/memory/"+id+"/forget", `{"reason":"it is wrong"}`, &got)
	assert.Truef(t, got.Name == "a/../b" && got.Changed, "answer is %+v", got)
	a.checkAudit(got.TraceID, got.ActivityID, "forget_memory", "it is wrong")
	entries, err := memory.List(t.Context(), a.pool, memory.Filter{})
	assert.Truef(t, err == nil && len(entries) == 1 && entries[0].Key == "kept", "left are %+v, %v", entries, err)
	text := pgtest.Value[string](t, a.pool, `select input::text from agent_activity where skill_name = 'forget_memory'`)
	assert.Truef(t, text != "" && len(text) <= 300, "the record is %s", text)
	for _, none := range []string{id, "kept", "%00", "%ff", "018f0000-0000-7000-8000-000000000000"} {
		a.checkProblem(a.raw("POST", "/v1/memory/"+none+"/forget", `{"reason":"x"}`, asAdmin()), 404, "not found")
	}
	pgtest.Equal(t, a.pool, 1, `select count(*) from agent_activity where skill_name = 'forget_memory'`)
}

// conditionalRequest is a change with an expected revision.
type conditionalRequest struct{ path, first, then, what string }

func TestIfMatchOfChanges(t *testing.T) {
	t.Parallel()
	a := start(t)
	a.objective("grow")
	a.automation("nightly")
	a.skill("look")
	for _, m := range []conditionalRequest{
		{"/v1/objectives/grow", "pause", "resume", "objective"},
		{"/v1/automations/nightly", "disable", "enable", "automation"},
		{"/v1/skills/look", "disable", "enable", "skill"},
	} {
		t.Run(m.what, func(t *testing.T) {
			seen := a.get(m.path, &struct{}{}).Get("ETag")
			act := func(action, name, tag string) (int, string) {
				w := a.raw("POST", m.path+"/"+action, `{"reason":"x"}`, withHeader(name, tag))
				return w.Code, w.Body.String()
			}
			if code, body := act(m.first, "If-Match", seen); code != 200 {
				t.Fatalf("%s with the current ETag: %d %s", m.first, code, body)
			}
			now := a.get(m.path, &struct{}{}).Get("ETag")
			require.Truef(t, now != seen && now != "", "the ETag was %s and is %s", seen, now)
			code, body := act(m.then, "If-Match", seen) // another admin with an older page
			var p struct {
				problem
				Current map[string]any
			}
			err := json.Unmarshal([]byte(body), &p)
			assert.Truef(t, err == nil && code == 412 && p.Type == "urn:lanekeeper:problem:changed-meanwhile" &&
				p.Current["name"] != nil, "%s of what was seen before: %d %s, %v", m.then, code, body, err)
			tag := fmt.Sprintf(`"%v"`, p.Current["revision"])
			if m.what == "skill" {
				tag = fmt.Sprintf(`"%v"`, p.Current["state_revision"])
			}
			still := a.get(m.path, &struct{}{}).Get("ETag")
			assert.Truef(t, still == now && tag == now, "the ETag was %s, is %s, and the rejection says %s", now, still, tag)
			pgtest.Equal(t, a.pool, 0, `select count(*) from agent_activity where skill_name = $1`, m.then+"_"+m.what)
			for _, bad := range [][2]string{
				{"If-Match", strings.Trim(now, `"`)},
				{"If-Match", `"0"`},
				{"If-Match", ""},
				{"If-None-Match", "*"},
				{"If-None-Match", now},
			} {
				code, body := act(m.then, bad[0], bad[1])
				assert.Truef(t, code == 400, "%s: %s is answered %d %s", bad[0], bad[1], code, body)
			}
			for n, tag := range []string{"W/" + now, "*", now} { // weakened by a proxy; any; the tag before those changes
				code, body := act([]string{m.then, m.first, m.then}[n], "If-Match", tag)
				assert.Equal(t, []int{200, 200, 412}[n], code, tag, body)
			}
			a.post(m.path+"/"+m.then, `{"reason":"x"}`, &struct{}{}) // no condition: the change is made
			none := m.path[:strings.LastIndexByte(m.path, '/')] + "/none/" + m.first
			a.checkProblem(a.raw("POST", none, `{"reason":"x"}`, withHeader("If-Match", `"1"`)), 404, "not found")
		})
	}
}

func TestMemoryFiltersAndSearch(t *testing.T) {
	t.Parallel()
	a := start(t)
	a.storeMemory("coffee", "habits")
	a.storeMemory("office", "places")
	for query, want := range map[string][]string{
		"": {"office", "coffee"}, "?q=coffee": {"coffee"}, "?category=places": {"office"},
		"?prefix=cof": {"coffee"}, "?q=nothing": nil,
	} {
		assert.Equal(t, "", cmp.Diff(want, a.list("/v1/memory"+query, "key", 10, nil)), query)
	}
	// A value from the command line has a trace without executions.
	op := trace.New(trace.Operate)
	_, err := memory.Save(t.Context(), a.pool, memory.Note{Key: "tea", Value: 1, TraceID: string(op)})
	require.NoError(t, err)
	for _, form := range []string{string(op), op.OTel(), strings.ToUpper(op.OTel()), op.Suffix()} {
		assert.Equal(t, "", cmp.Diff([]string{"tea"}, a.list("/v1/memory?trace_id="+form, "key", 10, nil)), form)
	}
	a.checkProblem(a.raw("GET", "/v1/memory?q=coffee&category=habits", "", asAdmin()), 400, "cannot be combined")
}
