package api_test

import (
	"testing"

	"github.com/lanekeeper/lanekeeper/prompts"
)

func TestTheModelCallsOfATraceAreReadWithTheirPrompts(t *testing.T) {
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
