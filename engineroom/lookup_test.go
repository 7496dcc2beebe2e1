package engineroom

import (
	"context"
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
)

// hostile is what somebody would write to make a page say or do something else.
const hostile = "<script>alert(1)</script>\u202egnihtemos\u0007 \"'><img src=x onerror=alert(2)>"

// put runs statements that make what a page is to show, and answers with the id that the last returns.
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
	status, body := see(t, url)
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
	if status, body := see(t, url); status != want || !strings.Contains(body, why) {
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
