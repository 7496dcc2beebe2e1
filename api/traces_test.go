package api_test

import (
	"net/http"
	"testing"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/prompts"
	"github.com/lanekeeper/lanekeeper/trace"
	"github.com/lanekeeper/lanekeeper/why"
)

// TestCallerTraceLink links a trace to the traceparent of a start or an event. An invalid traceparent is ignored.
func TestCallerTraceLink(t *testing.T) {
	t.Parallel()
	const first, second = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
		"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
	a := runningAgent(t)
	from := func(parent string) http.Header {
		h := asAdmin()
		h.Set("Traceparent", parent)
		return h
	}
	links := func(id string) (all string) {
		err := a.pool.QueryRow(t.Context(), `select coalesce(string_agg(traceparent, ' ' order by created_at), '')
			from agent_trace_links where trace_id = $1`, id).Scan(&all)
		require.NoError(t, err)
		return all
	}
	var x startedExecution
	a.checkResponse(a.raw("POST", "/v1/executions", `{"flow":"external"}`, from(first)), "POST", "/v1/executions",
		http.StatusCreated, &x)
	if got := links(x.TraceID); got != first || trace.ID(x.TraceID).OTel() == first[3:35] {
		t.Errorf("trace %s is linked to %q, want %q", x.TraceID, got, first)
	}
	var lock lockAnswer
	a.request("POST", "/v1/executions/"+x.ID+"/lock", `{"owner":"me"}`, http.StatusOK, &lock)
	a.request("DELETE", "/v1/executions/"+x.ID+"/lock/"+lock.LockID,
		`{"status":"waiting","waiting_for":"event","waiting_key":"k1"}`, http.StatusOK, new(any))
	var got executions.Delivered
	a.checkResponse(a.raw("POST", "/v1/events", `{"event":"EVENT_COMPLETED","key":"k1"}`, from(second)), "POST",
		"/v1/events", http.StatusAccepted, &got)
	if len(got.Resumed) != 1 || links(x.TraceID) != first+" "+second {
		t.Errorf("woken are %v; the trace is linked to %q", got.Resumed, links(x.TraceID))
	}
	var y startedExecution
	a.checkResponse(a.raw("POST", "/v1/executions", `{"flow":"external"}`, from("00-rubbish")), "POST", "/v1/executions",
		http.StatusCreated, &y)
	assert.Equal(t, "", links(y.TraceID))
}

func TestWhyByTraceIDForms(t *testing.T) {
	t.Parallel()
	a := start(t)
	id := trace.New(trace.Flow)
	begun := a.start("order", id)
	for _, form := range []string{string(id), id.OTel(), id.Suffix()} {
		var got why.Answer
		header := a.get("/v1/traces/"+form+"/why", &got)
		assert.Truef(t, got.TraceID == string(id) && got.OTelTraceID == id.OTel() && header.Get("X-Trace-Id") == string(id),
			"by %s the trace is %s, %s, %s", form, got.TraceID, got.OTelTraceID, header.Get("X-Trace-Id"))
		cause := got.Of(why.Because)
		assert.Truef(t, len(cause) == 1 && cause[0].FromRef == "outside" && cause[0].ToRef == "execution "+begun.ID,
			"by %s the cause is %+v", form, cause)
	}
	a.checkProblem(a.raw("GET", "/v1/traces/"+string(trace.New(trace.Chat))+"/why", "", asAdmin()),
		http.StatusNotFound, "")
	a.checkProblem(a.raw("GET", "/v1/traces/nonsense/why", "", asAdmin()), http.StatusBadRequest, "not a trace id")
}

func TestPromptsOfTrace(t *testing.T) {
	t.Parallel()
	a := start(t)
	const trace = "op_01J8052XG1XHJAZ95GX5TCNBAZ"
	pgtest.Exec(t, a.pool, `
		with calls as (
		  insert into agent_activity (trace_id, surface, skill_name, kind, model)
		  values ($1, 'operate', 'model_call', 'model', 'first'), ($1, 'operate', 'model_call', 'model', 'second')
		    returning id, model),
		part as (
		  insert into agent_prompt_parts (digest, body) values (sha256('{"role":"user"}'), '{"role":"user"}'))
		insert into agent_prompts (activity_id, messages) select id, array[sha256('{"role":"user"}')] from calls
		  where model = 'second'`,
		trace)
	var got prompts.Page
	a.get("/v1/traces/"+trace+"/prompts", &got)
	require.Truef(t, len(got.Calls) == 2 && !got.Calls[0].Recorded && got.Calls[1].Recorded &&
		len(got.Calls[1].Messages) == 1, "read: %+v", got)
	part := got.Parts[got.Calls[1].Messages[0]]
	assert.Truef(t, string(part.Body) == `{"role":"user"}` && part.Role == "user", "part: %+v", part)
	a.get("/v1/traces/"+trace+"/prompts?activity_id="+got.Calls[1].ActivityID, &got)
	assert.Equal(t, 1, len(got.Calls), got.Calls)
}

func TestPromptDiffAcrossPages(t *testing.T) {
	t.Parallel()
	a := start(t)
	const trace = "op_01J8052XG1XHJAZ95GX5TCNBAZ"
	pgtest.Exec(t, a.pool, `
		with calls as (
		  insert into agent_activity (id, trace_id, surface, agent, skill_name, kind)
		  select lanekeeper.agent_uuid7_floor(now() + n * interval '1 second'), $1, 'operate', case when n = 2 then 'other'
		    else 'ops' end, 'model_call', 'model'
		    from generate_series(1, 4) n returning id)
		insert into agent_prompts (activity_id, tools, messages)
		select id, sha256('tools'), array[sha256('system'), sha256(id::text::bytea)] from calls`, trace)
	var all, first, second, third prompts.Page
	a.get("/v1/traces/"+trace+"/prompts", &all)
	require.Truef(t, len(all.Calls) == 4 && all.Calls[2].SharedParts == 2 && all.Calls[3].SharedParts == 2,
		"read: %+v", all)
	a.get("/v1/traces/"+trace+"/prompts?limit=2", &first)
	require.Truef(t, len(first.Calls) == 2 && first.Next != nil && first.Calls[0].SharedParts == 0 &&
		first.Calls[1].SharedParts == 0, "first page: %+v", first)
	a.get("/v1/traces/"+trace+"/prompts?limit=1&cursor="+*first.Next, &second)
	assert.Truef(t, len(second.Calls) == 1 && second.Calls[0].SharedParts == 2, "second page: %+v", second)
	a.get("/v1/traces/"+trace+"/prompts?activity_id="+all.Calls[3].ActivityID, &third)
	assert.Truef(t, len(third.Calls) == 1 && third.Calls[0].SharedParts == 2, "of one call: %+v", third)
}

func TestInvalidPromptParameters(t *testing.T) {
	t.Parallel()
	a := start(t)
	for query, want := range map[string]string{
		"activity_id=nonsense": "parameter activity_id must be a uuid", "limit=0": "use 1 to 100",
		"limit=101": "use 1 to 100", "limit=many": "use 1 to 100",
	} {
		a.checkProblem(a.raw("GET", "/v1/traces/op_01J8052XG1XHJAZ95GX5TCNBAZ/prompts?"+query, "", asAdmin()), 400, want)
	}
}

func TestTraceIDForms(t *testing.T) {
	t.Parallel()
	a := start(t)
	id := trace.New(trace.Webhook)
	a.start("deliver", id)
	for _, skill := range []string{"first", "second"} {
		a.recordActivity(activity.Entry{TraceID: string(id), Surface: "webhook", Skill: skill}, activity.Success)
	}
	for name, form := range map[string]string{"prefixed": string(id), "hex": id.OTel(), "ulid": id.Suffix()} {
		t.Run(name, func(t *testing.T) {
			a.t = t
			var got activity.Trace
			header := a.get("/v1/traces/"+form, &got)
			assert.Truef(t, got.TraceID == string(id) && got.OTelTraceID == id.OTel() && got.Surface == "webhook" &&
				got.Status == "pending", "trace is %+v", got)
			assert.Truef(t, len(got.Activities) == 2 && got.Activities[0].SkillName == "first" &&
				got.Activities[1].ConversationID == string(id), "activities are %+v", got.Activities)
			assert.Equal(t, string(id), header.Get("X-Trace-Id"))
		})
	}
}

// Rows that were imported keep the ids of their agent.
func TestImportedTrace(t *testing.T) {
	t.Parallel()
	a := start(t)
	const id = "hb_m3k9f2_a7x2p1"
	a.recordActivity(activity.Entry{TraceID: id, Surface: "heartbeat", Skill: "advance_plan"}, activity.Success)
	var got activity.Trace
	header := a.get("/v1/traces/"+id, &got)
	assert.Truef(t, got.TraceID == id && got.OTelTraceID == "" && got.Surface == "heartbeat" &&
		got.Status == "completed" && len(got.Activities) == 1, "trace is %+v", got)
	assert.Equal(t, id, header.Get("X-Trace-Id"))
	var rows struct{ Items []activity.Row }
	a.get("/v1/activity?trace_id="+id, &rows)
	assert.Equal(t, 1, len(rows.Items))
	a.get("/v1/traces/"+id+"/why", &struct{}{})
}

func TestTraceWithoutActivities(t *testing.T) {
	t.Parallel()
	a := start(t)
	id := trace.New(trace.Flow)
	a.start("beat", id)
	var got map[string]any
	a.get("/v1/traces/"+string(id), &got)
	list, ok := got["activities"].([]any)
	assert.Truef(t, ok && len(list) == 0, "activities are %v", got["activities"])
}
