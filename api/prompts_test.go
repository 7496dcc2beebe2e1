package api_test

import (
	"testing"

	"github.com/lanekeeper/lanekeeper/prompts"
)

func TestTheModelCallsOfATraceAreReadWithTheirPrompts(t *testing.T) {
	t.Parallel()
	a := start(t)
	const trace = "op_01J8052XG1XHJAZ95GX5TCNBAZ"
	if _, err := a.pool.Exec(t.Context(), `
		with calls as (
		  insert into agent_activity (trace_id, surface, skill_name, kind, model)
		  values ($1, 'operate', 'model_call', 'model', 'first'), ($1, 'operate', 'model_call', 'model', 'second') returning id, model),
		part as (
		  insert into agent_prompt_parts (digest, body) values (sha256('{"role":"user"}'), '{"role":"user"}'))
		insert into agent_prompts (activity_id, messages) select id, array[sha256('{"role":"user"}')] from calls where model = 'second'`,
		trace); err != nil {
		t.Fatal(err)
	}
	var got prompts.Page
	a.get("/v1/traces/"+trace+"/prompts", &got)
	if len(got.Calls) != 2 || got.Calls[0].Recorded || !got.Calls[1].Recorded || len(got.Calls[1].Messages) != 1 {
		t.Fatalf("read: %+v", got)
	}
	if part := got.Parts[got.Calls[1].Messages[0]]; string(part.Body) != `{"role":"user"}` || part.Role != "user" {
		t.Errorf("part: %+v", part)
	}
	a.get("/v1/traces/"+trace+"/prompts?activity_id="+got.Calls[1].ActivityID, &got)
	if len(got.Calls) != 1 {
		t.Errorf("of one call: %+v", got.Calls)
	}
}

func TestACallIsComparedWithTheOneBeforeItOnWhicheverPage(t *testing.T) {
	t.Parallel()
	a := start(t)
	const trace = "op_01J8052XG1XHJAZ95GX5TCNBAZ"
	if _, err := a.pool.Exec(t.Context(), `
		with calls as (
		  insert into agent_activity (id, trace_id, surface, agent, skill_name, kind)
		  select lanekeeper.agent_uuid7_floor(now() + n * interval '1 second'), $1, 'operate', case when n = 2 then 'other' else 'ops' end, 'model_call', 'model'
		    from generate_series(1, 4) n returning id)
		insert into agent_prompts (activity_id, tools, messages)
		select id, sha256('tools'), array[sha256('system'), sha256(id::text::bytea)] from calls`, trace); err != nil {
		t.Fatal(err)
	}
	var all, first, second, third prompts.Page
	a.get("/v1/traces/"+trace+"/prompts", &all)
	if len(all.Calls) != 4 || all.Calls[2].SharedParts != 2 || all.Calls[3].SharedParts != 2 {
		t.Fatalf("read: %+v", all)
	}
	a.get("/v1/traces/"+trace+"/prompts?limit=2", &first)
	if len(first.Calls) != 2 || first.Next == nil || first.Calls[0].SharedParts != 0 || first.Calls[1].SharedParts != 0 {
		t.Fatalf("first page: %+v", first)
	}
	a.get("/v1/traces/"+trace+"/prompts?limit=1&cursor="+*first.Next, &second)
	if len(second.Calls) != 1 || second.Calls[0].SharedParts != 2 {
		t.Errorf("second page: %+v", second)
	}
	a.get("/v1/traces/"+trace+"/prompts?activity_id="+all.Calls[3].ActivityID, &third)
	if len(third.Calls) != 1 || third.Calls[0].SharedParts != 2 {
		t.Errorf("of one call: %+v", third)
	}
}

func TestPromptsRefuseWhatIsNoParameter(t *testing.T) {
	t.Parallel()
	a := start(t)
	for query, says := range map[string]string{
		"activity_id=nonsense": "parameter activity_id has to be a uuid", "limit=0": "it can be 1 to 100",
		"limit=101": "it can be 1 to 100", "limit=many": "it can be 1 to 100",
	} {
		a.refused(a.raw("GET", "/v1/traces/op_01J8052XG1XHJAZ95GX5TCNBAZ/prompts?"+query, "", asAdmin()), 400, says)
	}
}
