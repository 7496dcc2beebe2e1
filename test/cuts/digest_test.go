package cuts_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// passing are the tables of which nothing lasts: who works, what was counted, how far something has come; and the
// diary of claims and lanes, which tells of the disturbance itself.
var passing = []string{
	"agent_workers", "agent_migrations", "agent_schema_code", "agent_activity_counted", "agent_activity_counts",
	"agent_activity_durations", "agent_activity_uncounted",
	"agent_span_export", "agent_retention_passes", "agent_claims_lost", "agent_lane_holds", "agent_chat_requests",
	"agent_prompts", "agent_prompt_parts",
}

// differs are the columns, and the fields of JSON, that differ from run to run: counters of attempts and claims, how
// long something took, hashes of what has ids or times in it, and sizes of prompts with times in them.
var differs = []string{
	"claim", "attempt of agent_executions", "attempt of agent_idempotency", "hinted_at", "wait_number", "wake",
	"fencing_token", "duration_ms", "spent_ns", "p50_ms", "p95_ms",
	"fingerprint", "idempotency_key", "arguments_hash", "body", "search", "spent", "tokens", "token_usage", "usage",
	"cost_usd", "next_run_at", "messages",
}

// words that stand for what differs from run to run in texts.
var words = []struct {
	pattern *regexp.Regexp
	word    string
}{
	{regexp.MustCompile(`\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d+)?)?(Z|[+-]\d\d(:\d\d)?)?( UTC)?`), "TIME"},
	{regexp.MustCompile(`\bday:\d{4}-\d\d-\d\d`), "day:DAY"}, // a test may cross midnight
	{regexp.MustCompile(`\b(hb|op|ch|wh|fl|au|tr)_[0-9A-Z]{26}\b`), "TRACE"},
	{regexp.MustCompile(`\b[0-9A-Z]{26}\b`), "KEY"},
	{regexp.MustCompile(`\b([0-9a-f]{64}|[0-9a-f]{32})\b`), "KEY"},
	{regexp.MustCompile(`127\.0\.0\.1:\d+`), "HOST"},
	{regexp.MustCompile(`EXECUTION([^#]*)#\d+`), "EXECUTION$1#CLAIM"},
}

var uuid = regexp.MustCompile(`[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}`)

// canon makes rows comparable: an id becomes what it is the id of.
type canon struct {
	table string
	names map[string]string
}

// digest is the state of the world without what differs from run to run. Each row of each table is a line, and each
// thing that went out to the world.
func digest(w *world) []string {
	w.t.Helper()
	tables := pgtest.Column[string](w.t, w.db, `
		select c.relname from pg_class c where c.relnamespace = 'public'::regnamespace and c.relkind in ('r', 'p')
		  and not c.relispartition
		 order by 1`)
	names := named(w)
	var lines []string
	for _, table := range tables {
		if !slices.Contains(passing, table) {
			lines = append(lines, contents(w, canon{table, names})...)
		}
	}
	return append(lines, effects(w)...)
}

// named says of ids what they are of.
func named(w *world) map[string]string {
	w.t.Helper()
	rows, err := w.db.Query(w.t.Context(), `
		select id::text, 'EXECUTION ' || flow from agent_executions
		union all select id::text, 'ACTIVITY ' || kind || ' ' || skill_name from agent_activity
		union all select id::text, 'SKILL ' || name from agent_skills`)
	require.NoError(w.t, err)
	names := map[string]string{}
	var id, name string
	_, err = pgx.ForEachRow(rows, []any{&id, &name}, func() error { names[id] = name; return nil })
	require.NoError(w.t, err)
	return names
}

// contents are the rows of a table.
func contents(w *world, c canon) []string {
	w.t.Helper()
	found := pgtest.Column[map[string]any](w.t, w.db, `select to_jsonb(t) from `+pgx.Identifier{c.table}.Sanitize()+` t`)
	lines := make([]string, len(found))
	for i, row := range found {
		text, err := json.Marshal(c.value(row))
		require.NoError(w.t, err)
		lines[i] = c.table + " " + string(text)
	}
	slices.Sort(lines)
	return lines
}

// value is a value of a row without what differs.
func (c canon) value(v any) any {
	switch v := v.(type) {
	case map[string]any:
		kept := map[string]any{}
		for name, field := range v {
			if !slices.Contains(differs, name) && !slices.Contains(differs, name+" of "+c.table) {
				kept[c.text(name)] = c.value(field)
			}
		}
		return kept
	case []any:
		kept := make([]any, len(v))
		for i, element := range v {
			kept[i] = c.value(element)
		}
		return kept
	case string:
		return c.text(v)
	}
	return v
}

// text is a text without what differs.
func (c canon) text(s string) string {
	s = uuid.ReplaceAllStringFunc(s, func(id string) string {
		if name, ok := c.names[id]; ok {
			return name
		}
		return "ID"
	})
	for _, w := range words {
		s = w.pattern.ReplaceAllString(s, w.word)
	}
	return s
}

// effects are what went out to the world: how often, and under how many idempotency keys.
func effects(w *world) []string {
	keys, calls := map[string]map[string]bool{}, map[string]int{}
	note := func(what, key string) {
		if keys[what] == nil {
			keys[what] = map[string]bool{}
		}
		keys[what][key] = true
		calls[what]++
	}
	for _, c := range w.calls() {
		note(c.skill+" "+c.args, c.key)
	}
	for _, r := range w.model.Requests() {
		note("the model", r.IdempotencyKey())
	}
	var lines []string
	for _, what := range slices.Sorted(maps.Keys(calls)) {
		lines = append(lines, fmt.Sprintf("effect: %s: %d calls under %d keys", strings.Join(strings.Fields(what), " "),
			calls[what], len(keys[what])))
	}
	return lines
}

// difference is which lines one digest has more often than the other, with a sign in front.
func difference(want, got []string) []string {
	count := map[string]int{}
	for _, line := range got {
		count[line]++
	}
	for _, line := range want {
		count[line]--
	}
	var lines []string
	for _, line := range slices.Sorted(maps.Keys(count)) {
		switch n := count[line]; {
		case n > 0:
			lines = append(lines, fmt.Sprintf("%d more: %s", n, line))
		case n < 0:
			lines = append(lines, fmt.Sprintf("%d missing: %s", -n, line))
		}
	}
	return lines
}
