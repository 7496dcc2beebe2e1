package engineroom

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/testkit/rows"
)

func TestAPartOfAPromptShowsTheFieldsOfItsMessage(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("é", maxSpanText+100)
	for name, test := range map[string]struct {
		body string
		want promptPart
	}{
		"content": {`{"role": "user", "content": "Hi"}`, promptPart{Text: "Hi"}},
		"result":  {`{"role": "tool", "name": "search", "content": "3"}`, promptPart{Name: "search", Text: "3"}},
		"image": {
			`{"role": "user", "content": [{"type": "text", "text": "See"}, {"type": "image_url", "image_url": {"url": "x"}}]}`,
			promptPart{Text: "See", Images: 1},
		},
		"call": {
			`{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "search", "arguments": "{\"q\":1}"}}]}`,
			promptPart{Calls: []promptTool{{Name: "search", Text: "{\n  \"q\": 1\n}"}}},
		},
		"refusal": {`{"role": "assistant", "refusal": "No."}`, promptPart{Text: "No."}},
		"value":   {`[1]`, promptPart{Text: "[\n  1\n]", JSON: true}},
		"long": {
			`{"role": "user", "content": "` + long + `"}`,
			promptPart{Text: strings.Repeat("é", maxSpanText) + "… (100 more characters)", TextCut: true},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var got promptPart
			budget := textBudget(maxPromptText)
			got.fill(json.RawMessage(test.body), &budget)
			assert.NoDiff(t, test.want, got)
		})
	}
}

func TestTheTextsOfAPromptAreBoundedTogether(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("x", maxSpanText)
	budget := textBudget(maxPromptText)
	var m promptPart
	calls := strings.Repeat(fmt.Sprintf(`{"id": "1", "function": {"name": "search", "arguments": %q}}, `, long), 100)
	m.fill(json.RawMessage(`{"role": "assistant", "content": "Hi", "reasoning": "`+long+`",
		"tool_calls": [`+strings.TrimSuffix(calls, ", ")+`]}`), &budget)
	size := utf8.RuneCountInString(m.Reasoning + m.Text)
	for _, c := range m.Calls {
		size += utf8.RuneCountInString(c.Text)
	}
	assert.Equal(t, 100, len(m.Calls))
	assert.Truef(t, size <= maxPromptText+100*len("… (64,000 more characters)"), "a message shows %d characters", size)
	tools := toolsOf(json.RawMessage(`[{"function": {"name": "search", "description": "It searches"}}]`), &budget)
	assert.Equal(t, "search: It searches", tools[0].Name+": "+tools[0].About)
	assert.True(t, strings.HasPrefix(tools[0].Text, "… ("), "a definition beyond the bound is shown")
}

func TestALongAnswerShowsItsSizeAndThatItIsCut(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	const trace = "op_01J8052XG1XHJAZ95GX5TCNBAZ"
	call := insert(t, pool, `
		with call as (
		  insert into agent_activity (trace_id, surface, skill_name, kind, status, output)
		  values ($1, 'operate', 'model_call', 'model', 'success', '{"role": "assistant", "content": "Yes"}') returning id),
		part as (insert into agent_prompt_parts (digest, body)
		  select sha256(b::bytea), b from unnest(array['{"role": "user", "content": "Well?"}',
		    '[{"type": "function", "function": {"name": "search"}}]']) b)
		insert into agent_prompts (activity_id, tools, messages)
		select id, sha256('[{"type": "function", "function": {"name": "search"}}]'),
		       array[sha256('{"role": "user", "content": "Well?"}')] from call returning activity_id::text`, trace)
	url := server.URL + "/traces/" + trace + "?span=" + call + "&tab=prompt"
	assert.Contains(t, wantTexts(t, url), `<p class="bubble-text">Well?</p>`, `<p class="bubble-text">Yes</p>`,
		"<summary>search")
	rows.Quiet(t, pool, `update agent_activity
		set output = jsonb_build_object('role', 'assistant', 'content', repeat('x', 70000)) where id = $1`, call)
	assert.Contains(t, wantTexts(t, url), `<span class="muted">70 kB`, "The text is cut.")
}
