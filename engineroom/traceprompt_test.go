package engineroom

import (
	"strings"
	"testing"
)

func TestAModelCallShowsItsPrompt(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	const trace = "op_01J8052XG1XHJAZ95GX5TCNBAZ"
	call := put(t, pool, `
		insert into agent_activity (trace_id, surface, skill_name, kind, status, token_usage)
		values ($1, 'operate', 'model_call', 'model', 'success', '{"prompt_tokens": 1200, "cached_tokens": 1000, "cache_write_tokens": 50, "total_tokens": 1210}')
		returning id::text`, trace)
	wants(t, shows(t, server.URL+"/traces/"+trace+"?row="+call), "was not recorded, or is no longer kept", "1,000 cached", "50 cache writes")
	put(t, pool, `
		with part as (
		  insert into agent_prompt_parts (digest, body) select sha256(b::bytea), b
		    from unnest(array['[{"type": "function"}]', '{"role": "user", "content": "Is <b>it</b> so?"}', repeat('é<b>', 100000)]) b returning digest)
		insert into agent_prompts (activity_id, tools, messages)
		select $1::text::uuid, sha256('[{"type": "function"}]'),
		       array[sha256('{"role": "user", "content": "Is <b>it</b> so?"}'), sha256(repeat('é<b>', 100000)::bytea), sha256('gone')]
		returning activity_id::text`, call)
	body := shows(t, server.URL+"/traces/"+trace+"?row="+call)
	wants(t, body, "tools", "Is &lt;b&gt;it&lt;/b&gt; so?", "A part that is no longer kept", "of 4 parts")
	if len(body) > 300_000 || strings.Contains(body, "é<b>") {
		t.Errorf("the page has %d bytes", len(body))
	}
}
