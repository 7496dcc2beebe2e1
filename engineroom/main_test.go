package engineroom

import (
	"context"
	"fmt"
	"html/template"
	"math"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/browser"
	"github.com/lanekeeper/lanekeeper/internal/leaks"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

func TestMain(m *testing.M) { pgtest.Main(leaks.Tests{M: browser.Tests{M: m}}) }

// open serves the room on a database of its own. Nobody is asked to log in.
func open(t *testing.T) (*pgxpool.Pool, *httptest.Server) {
	t.Helper()
	pool := pgtest.DB(t)
	room, err := New(Options{Pool: pool, Agent: "agent"})
	if err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	for _, r := range room.Routes() {
		mux.Handle(r.Method+" "+r.Path, r.Handler)
	}
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	return pool, server
}

// What somebody wrote straight into the tables, past every check of the packages, takes no part of a page away: times
// without end, counts that are none, texts of a megabyte in fields that are short.
func TestRowsThatNobodyChecked(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	const trace = "op_01J8052XG1XHJAZ95GX5TCNBAZ"
	const run = "01a20055-1dbc-7d0e-8014-41a4f664fe0a"
	for _, sql := range []string{
		`alter table agent_executions disable trigger user`, `alter domain agent_wait_kind drop constraint agent_wait_kind_check`,
	} {
		if _, err := pool.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	const unknown = "01a20055-1dbc-7d0e-8014-41a4f664fe0b"
	put(t, pool, `
		insert into agent_threads (id, channel, next_seq, created_at, updated_at)
		values ('odd', repeat('é<b>', 100000), 9, 'infinity', '-infinity') returning id`)
	put(t, pool, `
		insert into agent_messages (thread_id, seq, turn, role, content, channel, status, execution_id, trace_id, created_at, sent_at)
		values ('odd', 1, 1, 'user', 'hello', repeat('é<b>', 100000), 'failed', $1::text::uuid, repeat('é<b>', 100000), 'infinity', '-infinity')
		returning id::text`, run)
	put(t, pool, `
		insert into agent_executions (id, trace_id, surface, flow, status, waiting_for, waiting_key, waiting_until, waiting_step, thread_id,
		       created_at, started_at, updated_at)
		values ($1::text::uuid, $2, 'operate', 'operate', 'waiting', 'response', 'odd', null, 's', 'odd', '-infinity', '4713-01-01 BC', 'infinity')
		returning id::text`, run, trace)
	put(t, pool, `
		insert into agent_executions (id, trace_id, surface, flow, status, waiting_for, waiting_until)
		values ($1::text::uuid, $2, 'operate', 'odd', 'waiting', 'godot', 'infinity') returning id::text`, unknown, trace)
	put(t, pool, `
		insert into agent_executions (trace_id, surface, flow, status, created_at, started_at, completed_at)
		values ($1, 'operate', 'odd', 'completed', '-infinity', '-infinity', '294276-12-31') returning id::text`, trace)
	for _, usage := range []string{
		`"x"`, `[]`, `{"prompt_tokens": "abc", "total_tokens": 1e30, "completion_tokens": -5}`, `{"total_tokens": 1.5, "prompt_tokens": {}}`,
	} {
		put(t, pool, `
			insert into agent_activity (trace_id, execution_id, surface, skill_name, kind, status, token_usage, cost_usd, duration_ms,
			       thread_id, created_at, finished_at)
			values ($1, $2::text::uuid, 'operate', 'model_call', 'model', 'error', $3::text::jsonb, 'NaN', -5, repeat('é<b>', 100000), 'infinity',
			       '-infinity') returning id::text`, trace, run, usage)
	}
	put(t, pool, `
		insert into agent_automations (name, trigger, cron, prompt, enabled, disabled_by, paused_for, timezone, source, next_run_at)
		values ('odd', 'cron', '* * * * *', 'p', false, 'admin', repeat('é<b>', 100000), repeat('é<b>', 100000), repeat('é<b>', 100000), 'infinity')
		returning id::text`)
	put(t, pool, `
		insert into agent_automation_runs (automation_id, cause, scheduled_for, status, trace_id)
		select id, 'cron', '-infinity', 'dead', repeat('é<b>', 100000) from agent_automations returning id::text`)
	put(t, pool, `
		insert into agent_webhook_targets (name, url, secrets, events)
		values ('odd', 'https://user:hunter2hunter2@ops.example/?token=hunter2hunter2', '{"s"}', '{null,"*"}') returning id::text`)
	quiet(t, pool, `
		insert into agent_agents (name, version, digest, definition, is_default, source, created_at)
		select 'odd', 1, 'x', jsonb_build_object('name', w.text, 'model', w.text, 'memory', w.text, 'description', w.text, 'instructions', w.text,
		       'greeting', w.text, 'timezone', w.text, 'effort', w.text, 'skills', array[w.text], 'keys', array[w.text], 'pinned', array[w.text],
		       'delegates', array[w.text], 'languages', array[w.text], 'fallback', array[w.text], 'heartbeat', jsonb_build_object('cron', w.text, 'prompt', w.text)),
		       true, w.text, 'infinity'
		  from (select repeat('é<b>', 100000) as text) w where $1 <> ''`, "odd")
	for _, path := range []string{
		"/", "/agents", "/agents/odd", "/activity", "/traces", "/traces/" + trace, "/traces/" + trace + "?view=tree", "/traces/" + trace + "?view=table",
		"/executions", "/executions?view=waiting", "/executions?view=stuck", "/executions/" + run, "/executions/" + unknown, "/threads", "/threads/odd",
		"/operate?session=odd", "/automations", "/automations/odd", "/spend", "/spend?by=purpose", "/audit", "/skills", "/deliveries",
	} {
		body := shows(t, server.URL+path)
		if len(body) > 300_000 {
			t.Errorf("%s has %d bytes", path, len(body))
		}
		if strings.Contains(body, "hunter2") {
			t.Errorf("%s shows the password of an address", path)
		}
	}
}

// The least number has no counterpart: it is written, where negating it would never end.
func TestEveryNumberIsWritten(t *testing.T) {
	t.Parallel()
	for n, want := range map[int64]string{
		0: "0", 999: "999", 1000: "1,000", -1: "-1", -999: "-999", -123456: "-123,456",
		math.MaxInt64: "9,223,372,036,854,775,807", math.MinInt64: "-9,223,372,036,854,775,808",
	} {
		if got := thousands(n); got != want {
			t.Errorf("thousands(%d) = %q, want %q", n, got, want)
		}
	}
}

// What is in an address and cannot be in the tables is refused, not asked for.
func TestAddressesThatNothingHas(t *testing.T) {
	t.Parallel()
	_, server := open(t)
	for _, list := range []string{"traces", "executions", "threads", "approvals", "skills", "automations", "objectives", "memory", "deliveries", "outgoing", "agents"} {
		for _, id := range []string{"%00", "a%00b", "%ff%fe"} {
			for _, prefix := range []string{"/", "/live/"} {
				path := prefix + list + "/" + id
				if status, _ := testkit.Get(t, server.URL+path); status != http.StatusNotFound && status != http.StatusBadRequest {
					t.Errorf("%s: status %d, want 404 or 400", path, status)
				}
			}
		}
	}
	turnsAway(t, server.URL+"/activity?cursor="+strings.Repeat("A", 43), http.StatusBadRequest, "take it from the page before")
}

// hostile is what somebody would write to make a page say or do something else.
const hostile = "<script>alert(1)</script>\u202egnihtemos\u0007 \"'><img src=x onerror=alert(2)>"

// store runs statements that make what a page is to show, and answers with the id that the last returns.
func put(t *testing.T, pool *pgxpool.Pool, sql string, args ...any) (id string) {
	t.Helper()
	if err := pool.QueryRow(t.Context(), sql, args...).Scan(&id); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return id
}

// shows expects a page with texts in it.
func shows(t *testing.T, url string, texts ...string) string {
	t.Helper()
	status, body := testkit.Get(t, url)
	if status != 200 {
		t.Fatalf("%s: status %d\n%s", url, status, body)
	}
	for _, text := range texts {
		if !strings.Contains(body, text) {
			t.Errorf("%s does not say %q:\n%s", url, text, body)
		}
	}
	if strings.Contains(body, "This could not be read") {
		t.Errorf("%s has trouble:\n%s", url, body)
	}
	return body
}

// harmless expects that nothing of hostile is anything but text in a page.
func harmless(t *testing.T, url string) {
	t.Helper()
	body := shows(t, url, "&lt;script&gt;alert(1)")
	for _, bad := range []string{"<script>alert", "<img src=x", "\u202e", "\u0007"} {
		if strings.Contains(body, bad) {
			t.Errorf("%s has %q in it", url, bad)
		}
	}
	if len(body) > 400_000 {
		t.Errorf("%s has %d bytes", url, len(body))
	}
}

// turnsAway expects an address to be refused.
func turnsAway(t *testing.T, url string, want int, why string) {
	t.Helper()
	if status, body := testkit.Get(t, url); status != want || !strings.Contains(body, why) {
		t.Errorf("%s: status %d, want %d because of %q:\n%s", url, status, want, why, body)
	}
}

// asking notes every query of the connections that it traces.
type asking struct {
	mu  sync.Mutex
	all []pgx.TraceQueryStartData
}

func (a *asking) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.all = append(a.all, data)
	return ctx
}

func (*asking) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// analyse tells the planner how large tables are.
func analyse(t *testing.T, pool *pgxpool.Pool, tables ...string) {
	t.Helper()
	for _, table := range tables {
		if _, err := pool.Exec(t.Context(), "analyze "+pgx.Identifier{table}.Sanitize()); err != nil {
			t.Fatal(err)
		}
	}
}

// mostRead is how many rows a step of a plan may read, or pass over, for a page of a large table.
const mostRead = 1500

var (
	passedOver = regexp.MustCompile(`Rows Removed by (?:Join )?Filter: (\d+)`)
	wasRead    = regexp.MustCompile(`\(actual rows=(\d+)`)
)

// indexed opens a page and expects that none of its queries reads one of the tables whole.
func indexed(t *testing.T, pool *pgxpool.Pool, path string, tables ...string) {
	t.Helper()
	planned(t, pool, path, regexp.MustCompile(`Seq Scan on (`+strings.Join(tables, "|")+`)\b`), math.MaxInt)
}

// bounded is indexed, and expects that no step of a plan reads or passes over more than a page could need.
func bounded(t *testing.T, pool *pgxpool.Pool, path string, tables ...string) {
	t.Helper()
	planned(t, pool, path, regexp.MustCompile(`Seq Scan on (`+strings.Join(tables, "|")+`)\b`), mostRead)
}

func planned(t *testing.T, pool *pgxpool.Pool, path string, scanned *regexp.Regexp, most int) {
	t.Helper()
	config, notes := pool.Config(), &asking{}
	config.ConnConfig.Tracer = notes
	traced, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	defer traced.Close()
	room, err := New(Options{Pool: traced})
	if err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	for _, r := range room.Routes() {
		mux.Handle(r.Method+" "+r.Path, r.Handler)
	}
	w := httptest.NewRecorder()
	mux.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, path, http.NoBody))
	if w.Code != http.StatusOK || strings.Contains(w.Body.String(), "This could not be read") {
		t.Fatalf("%s: status %d\n%s", path, w.Code, w.Body)
	}
	looked := 0
	for _, q := range notes.all {
		if !regexp.MustCompile(`^\s*(select|with)\s`).MatchString(q.SQL) {
			continue
		}
		looked++
		rows, err := pool.Query(t.Context(), "explain (analyze, timing off, summary off) "+q.SQL, q.Args...)
		if err != nil {
			t.Fatalf("explain %s: %v", q.SQL, err)
		}
		lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			t.Fatalf("explain %s: %v", q.SQL, err)
		}
		plan := strings.Join(lines, "\n")
		much := scanned.MatchString(plan)
		for _, found := range append(passedOver.FindAllStringSubmatch(plan, -1), wasRead.FindAllStringSubmatch(plan, -1)...) {
			n, err := strconv.Atoi(found[1])
			much = much || err != nil || n > most
		}
		if much {
			t.Errorf("%s reads too much:\n%s\n%s", path, q.SQL, plan)
		}
	}
	if looked == 0 {
		t.Errorf("%s asked nothing", path)
	}
}

type namedState string

func TestAStateIsAShapeAndAWord(t *testing.T) {
	t.Parallel()
	parsed := template.Must(parseTemplates())
	failed := "failed"
	for name, test := range map[string]struct {
		state any
		want  string
	}{
		"text":       {"pending_approval", `<span class="status status-pending-approval tone-warn"><span aria-hidden="true">◷</span>pending approval</span>`},
		"named type": {namedState("error"), `<span class="status status-error tone-bad"><span aria-hidden="true">✕</span>error</span>`},
		"pointer":    {&failed, `<span class="status status-failed tone-bad"><span aria-hidden="true">✕</span>failed</span>`},
		"not known":  {`"><b>`, `<span class="status status----b- "><span aria-hidden="true">·</span>&#34;&gt;&lt;b&gt;</span>`},
		"none":       {(*string)(nil), `<span class="status status- "><span aria-hidden="true">·</span></span>`},
	} {
		var b strings.Builder
		if err := parsed.ExecuteTemplate(&b, "status", test.state); err != nil {
			t.Fatal(err)
		}
		if b.String() != test.want {
			t.Errorf("%s: got %s", name, b.String())
		}
	}
}

// colours are the custom properties of the style sheet that are pairs: light, dark.
func colours(t *testing.T) map[string][2]string {
	t.Helper()
	sheet, err := assetFiles.ReadFile("assets/room.css")
	if err != nil {
		t.Fatal(err)
	}
	pairs := map[string][2]string{}
	for _, m := range regexp.MustCompile(`--([\w-]+): light-dark\((#\w{6}), (#\w{6})\);`).FindAllStringSubmatch(string(sheet), -1) {
		pairs[m[1]] = [2]string{m[2], m[3]}
	}
	return pairs
}

// luminance is the relative luminance of WCAG 2.2.
func luminance(t *testing.T, colour string) float64 {
	t.Helper()
	rgb, err := strconv.ParseUint(colour[1:], 16, 32)
	if err != nil {
		t.Fatal(err)
	}
	sum := 0.0
	for i, weight := range []float64{0.2126, 0.7152, 0.0722} {
		c := float64(rgb>>(16-8*i)&255) / 255
		if c <= 0.04045 {
			c /= 12.92
		} else {
			c = math.Pow((c+0.055)/1.055, 2.4)
		}
		sum += weight * c
	}
	return sum
}

func TestColoursHaveContrastInBothThemes(t *testing.T) {
	t.Parallel()
	pairs := colours(t)
	measure := func(fore, back string, least float64) {
		for i, theme := range []string{"light", "dark"} {
			a, b := luminance(t, pairs[fore][i]), luminance(t, pairs[back][i])
			if ratio := (max(a, b) + 0.05) / (min(a, b) + 0.05); ratio < least {
				t.Errorf("--%s on --%s is %.2f:1 in the %s theme, want %s:1", fore, back, ratio, theme, fmt.Sprint(least))
			}
		}
	}
	for _, back := range []string{"bg", "card", "raised"} {
		for _, fore := range []string{"fg", "muted", "accent", "good", "bad", "warn", "info"} {
			measure(fore, back, 4.5)
		}
		for _, fore := range []string{"edge", "k-model", "k-call", "k-wait", "k-lane", "k-retry", "k-phase"} {
			measure(fore, back, 3)
		}
	}
	for _, tone := range []string{"good", "bad", "warn", "info", "accent"} {
		measure(tone, tone+"-soft", 4.5)
	}
	measure("on-accent", "accent", 4.5)
}
