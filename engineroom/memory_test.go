package engineroom

import (
	"net/url"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
)

// keeps remembers a text.
func keeps(t *testing.T, pool *pgxpool.Pool, category, key, value string) (id string) {
	t.Helper()
	return put(t, pool, `
		insert into agent_memory (category, key, value, trace_id) values ($1, $2, to_jsonb($3::text), 'hb_00000000000000000000000009') returning id::text`,
		category, key, value)
}

func TestMemoryIsSummedUpByCategory(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	shows(t, server.URL+"/memory", "Nothing is remembered yet")
	keeps(t, pool, "facts", "a", "one")
	keeps(t, pool, "facts", "b", "two")
	keeps(t, pool, "lessons", "c", "three")
	put(t, pool, `
		insert into agent_memory (id, category, key, value, created_at, updated_at)
		select lanekeeper.agent_uuid7(at), 'facts', 'old', '1', at, at from (select clock_timestamp() - interval '30 days' as at) x returning key`)
	put(t, pool, `
		insert into agent_memory (category, key, value, expires_at)
		values ('gone', 'x', '1', clock_timestamp() - interval '1 s') returning key`)
	for _, path := range []string{"/memory", "/"} {
		body := shows(t, server.URL+path, `3<span class="aside-text"> in facts`, `1<span class="aside-text"> in lessons`, "+2 ", "+1 ")
		if strings.Contains(body, "gone") {
			t.Errorf("%s has a category of which everything has expired", path)
		}
	}
	_, err := pool.Exec(t.Context(), `insert into agent_memory (category, key, value) select 'many', n::text, '1' from generate_series(1, 1200) n`)
	if err != nil {
		t.Fatal(err)
	}
	shows(t, server.URL+"/memory", `1,000+<span class="aside-text"> in many`, "over ")
}

func TestFiltersOfMemoryCombine(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	for _, e := range [][3]string{
		{"facts", "price_oil", "barrel"}, {"facts", "price%gas", "cubic"}, {"lessons", "price_oil", "buy"}, {"lessons", "weather", "rain barrel"},
	} {
		keeps(t, pool, e[0], e[1], "text "+e[2])
	}
	for query, want := range map[string]string{
		"": "weather price_oil price%25gas price_oil", "category=facts": "price%25gas price_oil", "prefix=price_": "price_oil price_oil",
		"prefix=price%25": "price%25gas", "q=barrel": "weather price_oil", "q=barrel&category=facts": "price_oil", "q=barrel+-rain": "price_oil",
		"q=zebra": "", "category=none": "", "prefix=x": "",
	} {
		body := shows(t, server.URL+"/memory?"+query)
		var got []string
		for _, part := range strings.Split(body, `<th scope="row"><a href="/memory/`)[1:] {
			key, _, _ := strings.Cut(part, "?")
			got = append(got, key)
		}
		if strings.Join(got, " ") != want {
			t.Errorf("%q has %q, want %q", query, got, want)
		}
	}
	turnsAway(t, server.URL+"/memory?before=x", 400, "before")
	turnsAway(t, server.URL+"/memory?q="+strings.Repeat("x", 301), 400, "q is")
}

func TestMemoryGoesOnOverPages(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	_, err := pool.Exec(t.Context(), `insert into agent_memory (category, key, value) select 'c', 'k' || n, '1' from generate_series(1, 70) n`)
	if err != nil {
		t.Fatal(err)
	}
	body := shows(t, server.URL+"/memory?category=c", "Older entries")
	_, rest, _ := strings.Cut(body, `class="pager"><a href="`)
	older, _, _ := strings.Cut(rest, `"`)
	second := shows(t, server.URL+strings.ReplaceAll(older, "&amp;", "&"), "Newest entries")
	if a, b := strings.Count(body, "data-row="), strings.Count(second, "data-row="); a != 50 || b != 20 {
		t.Errorf("the pages have %d and %d entries", a, b)
	}
}

func TestAnEntryOfMemoryIsShownWithWhoWroteIt(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	key := "a/b c?d"
	id := keeps(t, pool, "facts", key, "first "+strings.Repeat("v", 50_000))
	keeps(t, pool, "lessons", key, "second")
	put(t, pool, `
		insert into agent_activity (trace_id, skill_name, input)
		values ('hb_00000000000000000000000007', 'memory_write', jsonb_build_object('key', $1::text, 'category', 'facts')) returning id::text`, key)
	path := server.URL + "/memory/" + url.PathEscape(key)
	body := shows(t, path, "first vvv", "second", "/v1/memory/"+id+"/forget", "hb_00000000000000000000000009", "hb_00000000000000000000000007", "in all")
	if len(body) > 60_000 {
		t.Errorf("the page has %d bytes", len(body))
	}
	if body := shows(t, path+"?category=lessons", "second"); strings.Contains(body, "first vvv") {
		t.Error("the other category is there too")
	}
	turnsAway(t, server.URL+"/memory/none", 404, "nothing is remembered")
	turnsAway(t, server.URL+"/memory/%00", 404, "not found")
}

func TestHostileMemoryIsText(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	key := strings.ReplaceAll(hostile, "\u0007", "")
	keeps(t, pool, "facts"+key, key, hostile)
	harmless(t, server.URL+"/memory")
	harmless(t, server.URL+"/memory/"+url.PathEscape(key))
}

func TestMemoryIsReadByItsIndexes(t *testing.T) {
	t.Parallel()
	pool, _ := open(t)
	_, err := pool.Exec(t.Context(), `
		insert into agent_memory (category, key, value) select 'c' || n % 7, 'k' || n, to_jsonb('word' || n) from generate_series(1, 8000) n`)
	if err != nil {
		t.Fatal(err)
	}
	analyse(t, pool, "agent_memory")
	for _, path := range []string{
		"/memory", "/memory?category=c3", "/memory?prefix=k77", "/memory?q=word77", "/memory?q=word77&category=none", "/memory/k77",
	} {
		indexed(t, pool, path, "agent_memory")
	}
}
