package api_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/approvals"
	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/memory"
	"github.com/lanekeeper/lanekeeper/objectives"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/threads"
	"github.com/lanekeeper/lanekeeper/trace"
)

// objective declares an objective.
func (a *agent) objective(name string) string {
	a.t.Helper()
	d := objectives.Definition{Name: name, Goal: "be done", Steps: []string{"one", "two"}}
	if _, err := objectives.Put(a.t.Context(), a.pool, d, objectives.SourceAdmin); err != nil {
		a.t.Fatal(err)
	}
	return name
}

// automation declares an automation.
func (a *agent) automation(name string) string {
	a.t.Helper()
	d := automations.Definition{Name: name, Cron: "0 3 * * *", Prompt: "look around"}
	if _, err := automations.Put(a.t.Context(), a.pool, d, automations.SourceWorkspace); err != nil {
		a.t.Fatal(err)
	}
	return name
}

// approval is a call of the skill drop that an execution asks leave for, and with park waits for.
func (a *agent) approval(args string, park bool) (got approvals.Approval) {
	a.t.Helper()
	d := skills.Definition{Name: "drop", Description: "drops a table", Handler: "builtin:drop", Trust: skills.TrustApprove}
	if _, err := skills.Put(a.t.Context(), a.pool, d, skills.SourceWorkspace); err != nil {
		a.t.Fatal(err)
	}
	skill, err := skills.Get(a.t.Context(), a.pool, "drop")
	if err != nil {
		a.t.Fatal(err)
	}
	flow := fmt.Sprintf("ask_%d", asked.Add(1))
	err = a.engine.Register(flow, func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
		var err error
		got, err = approvals.Ask(ctx, approvals.Request{
			Skill: skill.Name, SkillID: skill.ID, Revision: skill.Revision, Args: json.RawMessage(args), Park: park,
		})
		if err == nil && park {
			_, err = executions.Wait(ctx, "leave", executions.Approval(got.ID, time.Hour))
		}
		return executions.Result{}, err
	})
	if err != nil {
		a.t.Fatal(err)
	}
	if _, err := a.engine.RunNow(context.WithoutCancel(a.t.Context()), executions.Spec{Flow: flow, Surface: trace.Flow}); err != nil {
		a.t.Fatal(err)
	}
	return got
}

// asked numbers the flows of approval, whose names are taken once.
var asked atomic.Int64

func TestAnApprovalIsDecidedOnceAndWhoWaitsGoesOn(t *testing.T) {
	t.Parallel()
	a := start(t)
	open := a.approval(`{"table":"x"}`, true)
	if x, err := executions.Get(t.Context(), a.pool, *open.ExecutionID); err != nil || x.Status != executions.Waiting {
		t.Fatalf("execution is %+v, %v", x, err)
	}
	var seen approvals.Approval
	header := a.get("/v1/approvals/"+open.ID, &seen)
	if seen.Status != "pending" || string(seen.Arguments) != `{"table":"x"}` || header.Get("X-Trace-Id") != open.TraceID {
		t.Errorf("approval is %+v", seen)
	}
	var statuses [600]atomic.Int64
	var traceID atomic.Value
	var group sync.WaitGroup
	for i := range 20 {
		group.Go(func() {
			said := map[bool]string{true: "approve", false: "reject"}[i%2 == 0]
			w := a.raw("POST", "/v1/approvals/"+open.ID, `{"decision":"`+said+`","reason":"looked at it"}`, asAdmin())
			statuses[w.Code].Add(1)
			if w.Code == http.StatusOK {
				traceID.Store(w.Header().Get("X-Trace-Id"))
			}
		})
	}
	group.Wait()
	if statuses[200].Load() != 1 || statuses[409].Load() != 19 {
		t.Fatalf("%d decided, %d were refused", statuses[200].Load(), statuses[409].Load())
	}
	var told activity.Trace
	a.get("/v1/traces/"+traceID.Load().(string), &told)
	if told.Surface != "operate" || len(told.Activities) != 1 || told.Activities[0].SkillName != "decide_approval" {
		t.Errorf("the audit is %+v", told)
	}
	if x, err := executions.Get(t.Context(), a.pool, *open.ExecutionID); err != nil || x.Status == executions.Waiting {
		t.Errorf("who waited is %+v, %v", x, err)
	}
	late := a.raw("POST", "/v1/approvals/"+open.ID, `{"decision":"approve"}`, asAdmin())
	if p := a.refused(late, 409, "decided already"); p.TraceID != open.TraceID || late.Header().Get("X-Trace-Id") != open.TraceID {
		t.Errorf("refused under trace %q, not %q", p.TraceID, open.TraceID)
	}
}

func TestApprovalsAreFilteredAndBadDecisionsRefused(t *testing.T) {
	t.Parallel()
	a := start(t)
	first, second := a.approval(`{"n":1}`, false), a.approval(`{"n":2}`, false)
	a.post("/v1/approvals/"+first.ID, `{"decision":"reject"}`, &struct{}{})
	for query, want := range map[string][]string{
		"?status=pending": {second.ID}, "?status=rejected": {first.ID}, "?status=consumed": nil,
		"?skill=drop": {second.ID, first.ID}, "?trace_id=" + first.TraceID: {first.ID},
	} {
		if diff := cmp.Diff(want, a.list("/v1/approvals"+query, "id", 10, nil)); diff != "" {
			t.Errorf("%s: %s", query, diff)
		}
	}
	exec(t, a.pool, `update agent_approvals set expires_at = clock_timestamp() where id = @id`, postgres.Strict{"id": second.ID})
	const unknown = "018f0000-0000-7000-8000-000000000000"
	for name, test := range map[string]struct {
		id, body string
		status   int
		words    string
	}{
		"expired":     {second.ID, `{"decision":"approve"}`, 409, "expired"},
		"unknown":     {unknown, `{"decision":"approve"}`, 404, "no such approval"},
		"malformed":   {"42", `{"decision":"approve"}`, 400, "uuid"},
		"no decision": {second.ID, `{}`, 400, "approve or reject"},
		"maybe":       {second.ID, `{"decision":"maybe"}`, 400, "maybe"},
		"field":       {second.ID, `{"decision":"approve","arguments":{}}`, 400, "arguments"},
		"reason":      {second.ID, `{"decision":"approve","reason":"\u0000"}`, 400, "reason"},
	} {
		t.Run(name, func(t *testing.T) {
			a.t = t
			a.refused(a.raw("POST", "/v1/approvals/"+test.id, test.body, asAdmin()), test.status, test.words)
		})
	}
}

// raise posts an event and returns its id and what it resumed.
func (a *agent) raise(body string, header http.Header) (id string, resumed []string) {
	a.t.Helper()
	var got struct {
		ID      string `json:"event_id"`
		Resumed []string
	}
	a.expect(a.raw("POST", "/v1/events", body, header), "POST", "/v1/events", http.StatusAccepted, &got)
	return got.ID, got.Resumed
}

func TestAnEventResumesWhoWaitsAndCountsOnce(t *testing.T) {
	t.Parallel()
	a := start(t)
	err := a.engine.Register("wait", func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
		_, err := executions.Wait(ctx, "for it", executions.Event("order-7", time.Hour))
		return executions.Result{}, err
	})
	if err != nil {
		t.Fatal(err)
	}
	x, err := a.engine.RunNow(context.WithoutCancel(t.Context()), executions.Spec{Flow: "wait", Surface: trace.Flow})
	if err != nil {
		t.Fatal(err)
	}
	const body = `{"event":"EVENT_COMPLETED","key":"order-7","data":{"paid":true},"id":"e1"}`
	first, resumed := a.raise(body, asAdmin())
	if diff := cmp.Diff([]string{x.ID}, resumed); diff != "" {
		t.Error(diff)
	}
	if again, resumed := a.raise(body, asAdmin()); again != first || len(resumed) != 0 {
		t.Errorf("again: %s, %v", again, resumed)
	}
	hints := value[int](t, a.pool, `select count(*) from river.river_job where args::text like '%' || @id || '%'`,
		postgres.Strict{"id": x.ID})
	if hints == 0 {
		t.Error("no worker was told")
	}
	keyed := asAdmin()
	keyed.Set("Idempotency-Key", "k")
	bare := `{"event":"TEST_COMPLETED","key":"k"}`
	one, _ := a.raise(bare, keyed)
	exec(t, a.pool, `delete from agent_idempotency`) // as after a crash before the answer was kept
	if two, _ := a.raise(bare, keyed); two != one {
		t.Errorf("the same key raised %s and %s", one, two)
	}
	three, _ := a.raise(bare, asAdmin())
	four, _ := a.raise(bare, asAdmin())
	if three == one || three == four {
		t.Error("events without id or key are one")
	}
}

// What a visitor says is in the conversation, whichever way it came; a wait need not be about one that is kept here.
func TestAMessageThatIsRaisedIsInItsConversation(t *testing.T) {
	t.Parallel()
	a := start(t)
	if _, _, err := threads.Ensure(t.Context(), a.pool, threads.Thread{ID: "ana"}); err != nil {
		t.Fatal(err)
	}
	first, _ := a.raise(`{"event":"MESSAGE_RECEIVED","key":"ana","data":{"text":"yes","n":12345678901234567890},"id":"m1"}`, asAdmin())
	if again, _ := a.raise(`{"event":"MESSAGE_RECEIVED","key":"ana","data":{"text":"yes"},"id":"m1"}`, asAdmin()); again != first {
		t.Errorf("again: %s, not %s", again, first)
	}
	a.raise(`{"event":"MESSAGE_RECEIVED","key":"ana","data":{"photo":7}}`, asAdmin())
	a.raise(`{"event":"MESSAGE_RECEIVED","key":"elsewhere","data":{"content":"yes"}}`, asAdmin())
	said := value[string](t, a.pool, `select string_agg(concat_ws(' ', thread_id, role, status, content), '; ') from agent_messages`)
	if said != "ana user received yes" {
		t.Errorf("said: %s", said)
	}
	if data := value[string](t, a.pool, `select concat_ws(' ', data ->> 'content', data ->> 'n') from agent_events where external_id = 'm1'`); data != "yes 12345678901234567890" {
		t.Errorf("the event's data: %s", data)
	}
	if n := value[int](t, a.pool, `select count(*) from agent_events where event = 'MESSAGE_RECEIVED'`); n != 3 {
		t.Errorf("%d events", n)
	}
}

func TestOnlyEventsFromOutsideCanBeRaised(t *testing.T) {
	t.Parallel()
	a := start(t)
	for name, test := range map[string]struct{ body, words string }{
		"approval":    {`{"event":"APPROVAL_DECIDED","key":"x"}`, "APPROVAL_DECIDED"},
		"end":         {`{"event":"AGENT_COMPLETED","key":"x"}`, "AGENT_COMPLETED"},
		"time":        {`{"event":"SCHEDULE_REACHED","key":"x"}`, "SCHEDULE_REACHED"},
		"lane":        {`{"event":"LANE_FREED","key":"x"}`, "LANE_FREED"},
		"unknown":     {`{"event":"x","key":"x"}`, "event"},
		"no key":      {`{"event":"EVENT_COMPLETED"}`, "key"},
		"NUL":         {`{"event":"EVENT_COMPLETED","key":"x","data":{"a":"\u0000"}}`, ""},
		"number":      {`{"event":"EVENT_COMPLETED","key":"x","data":{"a":1e400000}}`, "numeric"},
		"not UTF-8":   {"{\"event\":\"EVENT_COMPLETED\",\"key\":\"a\xff\"}", "UTF-8"},
		"own id":      {`{"event":"EVENT_COMPLETED","key":"x","id":"completed 018f0000-0000-7000-8000-000000000000"}`, "completed"},
		"approval id": {`{"event":"EVENT_COMPLETED","key":"x","id":"approval 018f0000-0000-7000-8000-000000000000"}`, "approval"},
		"field":       {`{"event":"EVENT_COMPLETED","key":"x","trace":"y"}`, "trace"},
	} {
		t.Run(name, func(t *testing.T) {
			a.t = t
			a.refused(a.raw("POST", "/v1/events", test.body, asAdmin()), http.StatusBadRequest, test.words)
		})
	}
	if n := value[int](t, a.pool, `select count(*) from agent_events`); n != 0 {
		t.Errorf("%d events were raised", n)
	}
}

func TestAProposedObjectiveIsDecidedAndAudited(t *testing.T) {
	t.Parallel()
	a := start(t)
	for _, name := range []string{"grow", "shrink"} {
		d := objectives.Definition{Name: name, Goal: "be another size"}
		if _, err := objectives.Propose(t.Context(), a.pool, d, "agent", string(trace.New(trace.Heartbeat))); err != nil {
			t.Fatal(err)
		}
	}
	for path, status := range map[string]string{"grow/accept": "active", "shrink/reject": "rejected"} {
		name, action, _ := strings.Cut(path, "/")
		var got change
		a.post("/v1/objectives/"+path, `{"reason":"as agreed"}`, &got)
		if got.Name != name || !got.Changed {
			t.Errorf("answer is %+v", got)
		}
		a.audited(got.TraceID, got.ActivityID, action+"_objective", "as agreed")
		var o struct {
			Status  string
			Decided string `json:"decided_by"`
			Steps   []any
		}
		a.get("/v1/objectives/"+name, &o)
		if o.Status != status || o.Decided != "admin" || o.Steps == nil {
			t.Errorf("objective is %+v", o)
		}
	}
	a.refused(a.raw("POST", "/v1/objectives/grow/reject", `{"reason":"x"}`, asAdmin()), 409, "decided")
	a.refused(a.raw("POST", "/v1/objectives/none/accept", `{"reason":"x"}`, asAdmin()), 404, "not found")
	a.refused(a.raw("GET", "/v1/objectives/none", "", asAdmin()), 404, "not found")
	if n := value[int](t, a.pool, `select count(*) from agent_activity where skill_name like '%_objective'`); n != 2 {
		t.Errorf("%d audits", n)
	}
	if diff := cmp.Diff([]string{"grow"}, a.list("/v1/objectives?status=active", "name", 10, nil)); diff != "" {
		t.Error(diff)
	}
}

// A name is the proposer's, a model's: whatever is in it, the proposal can be refused.
func TestAProposalIsRefusedWhateverItsName(t *testing.T) {
	t.Parallel()
	a := start(t)
	const name = "\u202egnp.exe\u200b\u0085\x1b[31m"
	said := string(trace.New(trace.Heartbeat))
	if _, err := objectives.Propose(t.Context(), a.pool, objectives.Definition{Name: name, Goal: "hide"}, "agent", said); err != nil {
		t.Fatal(err)
	}
	d := automations.Definition{Name: name, Cron: "0 * * * *", Prompt: "look"}
	if _, err := automations.Propose(t.Context(), a.pool, d, "agent", said); err != nil {
		t.Fatal(err)
	}
	var got change
	a.post("/v1/objectives/"+escape(name)+"/reject", `{"reason":"no"}`, &got)
	a.audited(got.TraceID, got.ActivityID, "reject_objective", "no")
	a.post("/v1/automations/"+escape(name)+"/disable", `{"reason":"no"}`, &got)
	a.audited(got.TraceID, got.ActivityID, "disable_automation", "no")
	for _, missing := range []string{"a%00b", "a%FFb"} {
		a.refused(a.raw("POST", "/v1/automations/"+missing+"/disable", `{"reason":"no"}`, asAdmin()), 404, "not found")
	}
}

func TestAutomationsAreSwitchedRunAndShown(t *testing.T) {
	t.Parallel()
	a := start(t)
	a.automation("nightly")
	proposal := automations.Definition{Name: "hourly", Cron: "0 * * * *", Prompt: "look"}
	if _, err := automations.Propose(t.Context(), a.pool, proposal, "agent", string(trace.New(trace.Heartbeat))); err != nil {
		t.Fatal(err)
	}
	var got change
	for _, action := range []string{"disable", "enable"} {
		a.post("/v1/automations/nightly/"+action, `{"reason":"as agreed"}`, &got)
		a.audited(got.TraceID, got.ActivityID, action+"_automation", "as agreed")
		var row struct{ Enabled bool }
		a.get("/v1/automations/nightly", &row)
		if row.Enabled != (action == "enable") || !got.Changed {
			t.Errorf("after %s: %+v, %+v", action, row, got)
		}
	}
	a.refused(a.raw("POST", "/v1/automations/hourly/enable", `{"reason":"x"}`, asAdmin()), 409, "accept it first")
	a.refused(a.raw("POST", "/v1/automations/hourly/run", `{"reason":"x"}`, asAdmin()), 409, "accept it first")
	a.post("/v1/automations/hourly/accept", `{"reason":"useful"}`, &got)
	a.refused(a.raw("POST", "/v1/automations/hourly/accept", `{"reason":"x"}`, asAdmin()), 409, "decided")
	a.refused(a.raw("POST", "/v1/automations/none/run", `{"reason":"x"}`, asAdmin()), 404, "not found")
	var run automations.Run
	header := a.expect(a.raw("POST", "/v1/automations/nightly/run", `{"reason":"now"}`, asAdmin()),
		"POST", "/v1/automations/nightly/run", http.StatusAccepted, &run)
	if run.Status != automations.DueNow || header.Get("X-Trace-Id") != run.TraceID {
		t.Errorf("run is %+v", run)
	}
	var detail struct{ Runs []automations.Run }
	a.get("/v1/automations/nightly", &detail)
	if len(detail.Runs) != 1 || detail.Runs[0].ID != run.ID {
		t.Errorf("runs are %+v", detail.Runs)
	}
	if diff := cmp.Diff([]string{"hourly", "nightly"}, a.list("/v1/automations?enabled=true", "name", 10, nil)); diff != "" {
		t.Error(diff)
	}
}

// remember keeps an entry.
func (a *agent) remember(key, category string) string {
	a.t.Helper()
	note := memory.Note{Category: category, Key: key, Value: "what is known of " + key, TraceID: string(trace.New(trace.Heartbeat))}
	if _, err := memory.Save(a.t.Context(), a.pool, note); err != nil {
		a.t.Fatal(err)
	}
	return key
}

func TestMemoryIsFilteredAndSearched(t *testing.T) {
	t.Parallel()
	a := start(t)
	a.remember("coffee", "habits")
	a.remember("office", "places")
	for query, want := range map[string][]string{
		"": {"office", "coffee"}, "?q=coffee": {"coffee"}, "?category=places": {"office"}, "?prefix=cof": {"coffee"}, "?q=nothing": nil,
	} {
		if diff := cmp.Diff(want, a.list("/v1/memory"+query, "key", 10, nil)); diff != "" {
			t.Errorf("%s: %s", query, diff)
		}
	}
	// What an admin keeps from the command line has a trace without executions.
	op := trace.New(trace.Operate)
	if _, err := memory.Save(t.Context(), a.pool, memory.Note{Key: "tea", Value: 1, TraceID: string(op)}); err != nil {
		t.Fatal(err)
	}
	for _, form := range []string{string(op), op.OTel(), strings.ToUpper(op.OTel()), op.Suffix()} {
		if diff := cmp.Diff([]string{"tea"}, a.list("/v1/memory?trace_id="+form, "key", 10, nil)); diff != "" {
			t.Errorf("%s: %s", form, diff)
		}
	}
	a.refused(a.raw("GET", "/v1/memory?q=coffee&category=habits", "", asAdmin()), 400, "do not go together")
}

func TestAThreadIsReadPageByPage(t *testing.T) {
	t.Parallel()
	a := start(t)
	for _, id := range []string{"first", "second/with a slash"} {
		if _, _, err := threads.Ensure(t.Context(), a.pool, threads.Thread{ID: id, Channel: "chat", Owner: "website"}); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 7 {
		d := threads.Draft{ThreadID: "first", Role: threads.User, Content: fmt.Sprint(i), Channel: "chat", Status: threads.Received}
		if _, err := threads.Post(t.Context(), a.pool, d); err != nil {
			t.Fatal(err)
		}
	}
	if diff := cmp.Diff([]string{"first", "second/with a slash"}, a.list("/v1/threads?channel=chat", "id", 1, nil)); diff != "" {
		t.Error(diff)
	}
	var said []string
	path := "/v1/threads/first?limit=3"
	for path != "" {
		var got struct {
			ID       string
			Messages []threads.Message
			Next     *string `json:"next_cursor"`
		}
		a.get(path, &got)
		for _, m := range got.Messages {
			said = append(said, m.Content)
		}
		path = ""
		if got.Next != nil {
			path = "/v1/threads/first?limit=3&cursor=" + *got.Next
		}
	}
	if diff := cmp.Diff([]string{"6", "5", "4", "3", "2", "1", "0"}, said); diff != "" {
		t.Error(diff)
	}
	var other struct{ Messages []any }
	a.get("/v1/threads/second%2Fwith%20a%20slash", &other)
	if other.Messages == nil || len(other.Messages) != 0 {
		t.Errorf("messages are %v", other.Messages)
	}
	a.refused(a.raw("GET", "/v1/threads/none", "", asAdmin()), 404, "no such thread")
	a.refused(a.raw("GET", "/v1/threads/%00", "", asAdmin()), 400, "printable")
	a.refused(a.raw("GET", "/v1/threads/first?cursor=x", "", asAdmin()), 400, "cursor")
	a.refused(a.raw("GET", "/v1/threads?cursor=x", "", asAdmin()), 400, "cursor")
}
