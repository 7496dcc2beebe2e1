package why_test

import (
	"context"
	"encoding/json"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// fill makes the tables so large that an index is the better way, whichever plan is kept.
func (w *world) fill() {
	w.t.Helper()
	w.exec(`
		insert into agent_executions (id, trace_id, surface, flow, status, created_at)
		select lanekeeper.agent_uuid7(), 'hb_' || lpad(n::text, 26, '0'), 'heartbeat', 'beat', 'pending', clock_timestamp() from generate_series(1, 3000) n`)
	w.exec(`
		insert into agent_activity (trace_id, kind, skill_name) select 'hb_' || lpad((n / 5)::text, 26, '0'), 'call', 's' from generate_series(1, 15000) n;`)
	w.exec(`
		insert into agent_events (event, key) select 'E', n::text from generate_series(1, 3000) n`)
	w.exec(`
		insert into agent_links (cause, kind, effect) select 'trace ' || n, 'raised', 'event ' || n from generate_series(1, 3000) n`)
	w.exec(`analyze`)
}

// Every read of why goes by an index, with a condition: in a history in which all that it tells of has happened.
func TestEveryReadGoesByAnIndex(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.fill()
	s := w.newScenario(1)
	s.play(80)
	var texts []string
	conn := explained(t, w, &texts)
	for _, id := range s.traceIDs() {
		if _, err := conn.Exec(t.Context(), `select * from why($1)`, id); err != nil {
			t.Fatal(err)
		}
	}
	reads := 0
	for _, text := range texts {
		var plan struct {
			Query string `json:"Query Text"`
			Plan  node
		}
		if err := json.Unmarshal([]byte(text), &plan); err != nil {
			t.Fatalf("read plan: %v\n%s", err, text)
		}
		reads += plan.Plan.check(t, plan.Query)
	}
	if reads < 30 {
		t.Errorf("%d reads of tables were seen", reads)
	}
}

// explained is a connection on which the server explains every statement, also those in functions, to texts.
func explained(t *testing.T, w *world, texts *[]string) *pgx.Conn {
	t.Helper()
	config := w.pool.Config().ConnConfig.Copy()
	config.OnNotice = func(_ *pgconn.PgConn, n *pgconn.Notice) {
		if _, plan, is := strings.Cut(n.Message, "plan:\n"); is {
			*texts = append(*texts, plan)
		}
	}
	conn, err := pgx.ConnectConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close(context.WithoutCancel(t.Context())) })
	for _, sql := range []string{
		`load 'auto_explain'`, `set auto_explain.log_min_duration = 0`, `set auto_explain.log_nested_statements = on`, `set auto_explain.log_format = json`,
		`set auto_explain.log_level = notice`,
	} {
		if _, err := conn.Exec(t.Context(), sql); err != nil {
			t.Skipf("auto_explain cannot be used here: %s: %v", sql, err)
		}
	}
	return conn
}

// node is a step of a plan.
type node struct {
	Type      string `json:"Node Type"`
	Relation  string `json:"Relation Name"`
	Index     string `json:"Index Name"`
	Condition string `json:"Index Cond"`
	Plans     []node
}

// check looks for reads of a whole table or a whole index, and counts the reads of tables.
func (n node) check(t *testing.T, query string) (reads int) {
	t.Helper()
	if n.Relation != "" || n.Index != "" {
		reads++
	}
	switch {
	case n.Type == "Seq Scan" && strings.HasPrefix(n.Relation, "agent_"):
		t.Errorf("all of %s is read by\n%s", n.Relation, query)
	case n.Index != "" && n.Condition == "":
		t.Errorf("all of index %s is read by\n%s", n.Index, query)
	}
	for _, below := range n.Plans {
		reads += below.check(t, query)
	}
	return reads
}
