package engineroom

import (
	"net/url"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

// insertMemory inserts a memory.
func insertMemory(t *testing.T, pool *pgxpool.Pool, category, key, value string) (id string) {
	t.Helper()
	return insert(t, pool, `
		insert into agent_memory (category, key, value, trace_id)
		  values ($1, $2, to_jsonb($3::text), 'hb_00000000000000000000000009') returning id::text`,
		category, key, value)
}

func TestMemoryTotalsByCategory(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	wantTexts(t, server.URL+"/memory", "Memory is empty")
	insertMemory(t, pool, "facts", "a", "one")
	insertMemory(t, pool, "facts", "b", "two")
	insertMemory(t, pool, "lessons", "c", "three")
	insert(t, pool, `
		insert into agent_memory (id, category, key, value, created_at, updated_at)
		select lanekeeper.agent_uuid7(at), 'facts', 'old', '1', at, at
		  from (select clock_timestamp() - interval '30 days' as at) x returning key`)
	insert(t, pool, `
		insert into agent_memory (category, key, value, expires_at)
		values ('gone', 'x', '1', clock_timestamp() - interval '1 s') returning key`)
	for _, path := range []string{"/memory", "/"} {
		body := wantTexts(t, server.URL+path, `3<span class="aside-text"> in facts`, `1<span class="aside-text"> in lessons`,
			"+2 ", "+1 ")
		assert.Truef(t, !strings.Contains(body, "gone"), "%s has a category with only expired entries", path)
	}
	pgtest.Exec(t, pool, `insert into agent_memory (category, key, value) select 'many', n::text, '1'
		from generate_series(1, 1200) n`)
	wantTexts(t, server.URL+"/memory", `1,000+<span class="aside-text"> in many`, "over ")
}

func TestMemoryFiltersCombine(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	for _, e := range [][3]string{
		{"facts", "price_oil", "barrel"},
		{"facts", "price%gas", "cubic"},
		{"lessons", "price_oil", "buy"},
		{"lessons", "weather", "rain barrel"},
	} {
		insertMemory(t, pool, e[0], e[1], "text "+e[2])
	}
	for query, want := range map[string]string{
		"": "weather price_oil price%25gas price_oil", "category=facts": "price%25gas price_oil",
		"prefix=price_":   "price_oil price_oil",
		"prefix=price%25": "price%25gas", "q=barrel": "weather price_oil", "q=barrel&category=facts": "price_oil",
		"q=barrel+-rain": "price_oil",
		"q=zebra":        "", "category=none": "", "prefix=x": "",
	} {
		body := wantTexts(t, server.URL+"/memory?"+query)
		var got []string
		for _, part := range strings.Split(body, `<th scope="row" class="what"><a href="/memory/`)[1:] {
			key, _, _ := strings.Cut(part, "?")
			got = append(got, key)
		}
		assert.Truef(t, strings.Join(got, " ") == want, "%q has %q, want %q", query, got, want)
	}
	wantError(t, server.URL+"/memory?before=x", 400, "before")
	wantError(t, server.URL+"/memory?q="+strings.Repeat("x", maxFilterBytes+1), 400, "q is")
}

func TestMemoryEntryShowsWriters(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	key := "a/b c?d"
	id := insertMemory(t, pool, "facts", key, "first "+strings.Repeat("v", 50_000))
	insertMemory(t, pool, "lessons", key, "second")
	insert(t, pool, `
		insert into agent_activity (trace_id, skill_name, input)
		values ('hb_00000000000000000000000007', 'memory_write', jsonb_build_object('key', $1::text, 'category', 'facts'))
		  returning id::text`, key)
	path := server.URL + "/memory/" + url.PathEscape(key)
	body := wantTexts(t, path, "first vvv", "second", "/v1/memory/"+id+"/forget", "hb_00000000000000000000000009",
		`<a href="/traces/hb_00000000000000000000000007?span=`, "in all")
	assert.Truef(t, len(body) <= 60_000, "the page has %d bytes", len(body))
	body = wantTexts(t, path+"?category=lessons", "second")
	assert.True(t, !strings.Contains(body, "first vvv"), "the page shows the entry of the other category")
	secret := " AIzaSyD-9tSrke72PouQMnMX-a7eZSW0jkFMBW4"
	insertMemory(t, pool, "facts", "short", strings.Repeat("x", 170)+secret)
	insert(t, pool, `
		insert into agent_memory_conflicts (category, key, value, if_revision, found_revision, trace_id)
		  values ('facts', 'short', to_jsonb($1::text), 0, 0, 'hb_1') returning id::text`, strings.Repeat("x", 3980)+secret)
	body = wantTexts(t, server.URL+"/memory", "[redacted]")
	assert.True(t, !strings.Contains(body, "AIzaSyD"), "the list shows a part of a secret")
	wantError(t, server.URL+"/memory/none", 404, "no memory has the key")
	wantError(t, server.URL+"/memory/%00", 404, "not found")
}
