package main

import (
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/prompts"
)

func TestATraceShowsThePromptsOfItsModelCalls(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	p := on(t, db.Config().ConnString())
	const id = "op_01J8052XG1XHJAZ95GX5TCNBAZ"
	_, err := db.Exec(t.Context(), `
		with old as (
		  insert into agent_activity (trace_id, surface, agent, skill_name, kind, model) values ($1, 'operate', 'ops', 'model_call', 'model', 'old')),
		call as (
		  insert into agent_activity (trace_id, surface, agent, skill_name, kind, model, token_usage)
		  values ($1, 'operate', 'ops', 'model_call', 'model', 'gpt-4o-mini',
		          '{"prompt_tokens": 1200, "cached_tokens": 1024, "completion_tokens": 9, "total_tokens": 1209}') returning id),
		part as (
		  insert into agent_prompt_parts (digest, body)
		  select sha256(b::bytea), b from unnest(array['[{"type":"function"}]', '{"content":"You act.","role":"system"}']) b)
		insert into agent_prompts (activity_id, tools, messages, options)
		select id, sha256('[{"type":"function"}]'), array[sha256('{"content":"You act.","role":"system"}'), sha256('gone')], '{"max_tokens": 4096}' from call`, id)
	if err != nil {
		t.Fatal(err)
	}
	text := p.must("trace", id, "--prompts")
	for _, want := range []string{
		"prompt: not recorded, or no longer kept", "tokens: 1200 prompt (1024 cached, 0 cache writes), 9 completion",
		`options: {"max_tokens": 4096}`, "[tools, 21 bytes]\n[{\"type\":\"function\"}]", "[system, 38 bytes]\nYou act.", "is no longer kept]",
	} {
		contains(t, text, want)
	}
	var page prompts.Page
	p.mustJSON(&page, "trace", id, "--prompts")
	if page.TraceID != id || len(page.Calls) != 2 || len(page.Parts) != 2 {
		t.Errorf("--json: %+v", page)
	}
}
