package cuts_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// cutKind is the way in which a connection breaks at a message.
type cutKind int

const (
	pass   cutKind = iota // no break
	before                // the server never receives the message
	after                 // the server has executed it, and the client gets no answer
)

// String returns the name of the way.
func (w cutKind) String() string { return [...]string{"pass", "before", "after"}[w] }

// cut is a message, and the way in which the connection breaks there.
type cut struct {
	text string // the text of the message
	time int    // the occurrence of that text, from 1
	way  cutKind
}

// String describes a cut in a failure.
func (c cut) String() string { return fmt.Sprintf("%s time %d of %q", c.way, c.time, c.text) }

// countedMessage is a text and the number of its messages.
type countedMessage struct {
	text       string
	times      int
	background bool // the process sent it before the story began: background work
}

// ledger counts the messages of a process, and decides the cuts.
type ledger struct {
	mu         sync.Mutex
	cuts       []cut // cuts not made yet
	done       []cut
	order      []string
	times      map[string]int
	background map[string]bool
	closed     bool // later messages do not count
}

func newLedger(cuts []cut) *ledger {
	return &ledger{cuts: slices.Clone(cuts), times: map[string]int{}, background: map[string]bool{}}
}

// next counts a message and returns its way.
func (l *ledger) next(text string) cutKind {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return pass
	}
	if l.times[text] == 0 {
		l.order = append(l.order, text)
	}
	l.times[text]++
	i := slices.IndexFunc(l.cuts, func(c cut) bool { return c.text == text && c.time == l.times[text] })
	if i < 0 {
		return pass
	}
	c := l.cuts[i]
	l.cuts, l.done = slices.Delete(l.cuts, i, i+1), append(l.done, c)
	return c.way
}

// startStory marks the begin of the story. Earlier messages are background work.
func (l *ledger) startStory() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for text := range l.times {
		l.background[text] = true
	}
}

// close stops the count: the story is over.
func (l *ledger) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
}

// pending returns the cuts that were not made.
func (l *ledger) pending() []cut {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.cuts)
}

// messages returns the messages in the order of their first occurrence.
func (l *ledger) messages() []countedMessage {
	l.mu.Lock()
	defer l.mu.Unlock()
	list := make([]countedMessage, len(l.order))
	for i, text := range l.order {
		list[i] = countedMessage{text, l.times[text], l.background[text]}
	}
	return list
}

// transientTables are the tables without lasting state: workers, counts and progress, and the logs of claims and lanes,
// which record the fault itself.
var transientTables = []string{
	"agent_workers", "agent_migrations", "agent_schema_code", "agent_activity_counted", "agent_activity_counts",
	"agent_activity_durations", "agent_activity_uncounted",
	"agent_span_export", "agent_retention_passes", "agent_claims_lost", "agent_lane_holds", "agent_chat_requests",
	"agent_prompts", "agent_prompt_parts",
}

// volatileColumns are the columns, and the fields of JSON, that differ between runs: counters of attempts and claims,
// durations, hashes over ids or times, and sizes of prompts with times in them.
var volatileColumns = []string{
	"claim", "attempt of agent_executions", "attempt of agent_idempotency", "hinted_at", "wait_number", "wake",
	"fencing_token", "duration_ms", "spent_ns", "p50_ms", "p95_ms",
	"fingerprint", "idempotency_key", "arguments_hash", "body", "search", "spent", "tokens", "token_usage", "usage",
	"cost_usd", "next_run_at", "messages",
}

// volatileTexts replace the parts of texts that differ between runs.
var volatileTexts = []struct {
	pattern *regexp.Regexp
	word    string
}{
	{regexp.MustCompile(`\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d+)?)?(Z|[+-]\d\d(:\d\d)?)?( UTC)?`), "TIME"},
	{regexp.MustCompile(`\bday:\d{4}-\d\d-\d\d`), "day:DAY"}, // a test may run past midnight
	{regexp.MustCompile(`\b(hb|op|ch|wh|fl|au|tr)_[0-9A-Z]{26}\b`), "TRACE"},
	{regexp.MustCompile(`\b[0-9A-Z]{26}\b`), "KEY"},
	{regexp.MustCompile(`\b([0-9a-f]{64}|[0-9a-f]{32})\b`), "KEY"},
	{regexp.MustCompile(`127\.0\.0\.1:\d+`), "HOST"},
	{regexp.MustCompile(`EXECUTION([^#]*)#\d+`), "EXECUTION$1#CLAIM"},
}

var uuid = regexp.MustCompile(`[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}`)

// canonicalizer makes rows comparable. It replaces each id by the name of its object.
type canonicalizer struct {
	table string
	names map[string]string
}

// digest returns the final state without the parts that differ between runs. It has a line for each row of each table,
// and for each external effect.
func digest(w *testEnv) []string {
	w.t.Helper()
	tables := pgtest.Column[string](w.t, w.db, `
		select c.relname from pg_class c where c.relnamespace = 'public'::regnamespace and c.relkind in ('r', 'p')
		  and not c.relispartition
		 order by 1`)
	names := objectNames(w)
	var lines []string
	for _, table := range tables {
		if !slices.Contains(transientTables, table) {
			lines = append(lines, contents(w, canonicalizer{table, names})...)
		}
	}
	return append(lines, effects(w)...)
}

// objectNames maps ids to the names of their objects.
func objectNames(w *testEnv) map[string]string {
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

// contents returns the rows of a table.
func contents(w *testEnv, c canonicalizer) []string {
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

// value returns a value without the parts that differ.
func (c canonicalizer) value(v any) any {
	switch v := v.(type) {
	case map[string]any:
		kept := map[string]any{}
		for name, field := range v {
			if !slices.Contains(volatileColumns, name) && !slices.Contains(volatileColumns, name+" of "+c.table) {
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

// text returns a text without the parts that differ.
func (c canonicalizer) text(s string) string {
	s = uuid.ReplaceAllStringFunc(s, func(id string) string {
		if name, ok := c.names[id]; ok {
			return name
		}
		return "ID"
	})
	for _, w := range volatileTexts {
		s = w.pattern.ReplaceAllString(s, w.word)
	}
	return s
}

// effects returns the external effects: how often, and under how many idempotency keys.
func effects(w *testEnv) []string {
	keys, calls := map[string]map[string]bool{}, map[string]int{}
	note := func(what, key string) {
		if keys[what] == nil {
			keys[what] = map[string]bool{}
		}
		keys[what][key] = true
		calls[what]++
	}
	for _, c := range w.skills.Calls() {
		note(c.Skill+" "+c.Args, c.Key)
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

// difference returns the lines that one digest has more often than the other, with a sign in front.
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

// exception is a known reason for an end that differs from the undisturbed run, or for a retry by an external client.
type exception struct {
	name       string         // as in docs/exceptions.md
	story      string         // "" for any
	at         *regexp.Regexp // the text of the message
	way        cutKind        // pass for both
	difference *regexp.Regexp // the difference
}

// exceptions are all known exceptions. docs/exceptions.md gives the reasons.
var exceptions = []exception{
	{
		name: "A process that starts", story: "", way: pass,
		at: regexp.MustCompile(
			`^(prepare: )?(connect$|select pg_backend_pid|select current_setting|select clock_timestamp|insert into agent_schedules|` +
				`select set_agent_limits|select extract\(epoch from \(select min\(next_run_at\))`),
		difference: regexp.MustCompile(`^the process ended when it started, and was started again$`),
	},
}

// covers reports whether the exception explains a difference of a trial.
func (e exception) covers(x trial, what string) bool {
	return (e.story == "" || e.story == x.story.name) && e.difference.MatchString(what) &&
		slices.ContainsFunc(x.cuts, func(c cut) bool {
			return (e.way == pass || e.way == c.way) && e.at.MatchString(c.text)
		})
}

// The table and the document list the same exceptions.
func TestExceptionsAreDocumented(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../docs/exceptions.md")
	require.NoError(t, err)
	listed := map[string]bool{}
	for _, e := range exceptions {
		listed[e.name] = true
	}
	for _, heading := range regexp.MustCompile(`(?m)^## (.*)$`).FindAllStringSubmatch(string(text), -1) {
		if name := heading[1]; !listed[name] && name != "Notes" {
			t.Errorf("docs/exceptions.md has %q, which the table does not have", name)
		}
		delete(listed, heading[1])
	}
	for name := range listed {
		t.Errorf("docs/exceptions.md does not have %q", name)
	}
}
