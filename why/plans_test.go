package why_test

import (
	"context"
	"encoding/json"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// fill enlarges the tables, so that plans prefer an index.
func (w *world) fill() {
	w.t.Helper()
	w.exec(`
		insert into agent_executions (id, trace_id, surface, flow, status, created_at)
		select lanekeeper.agent_uuid7(), 'hb_' || lpad(n::text, 26, '0'), 'heartbeat', 'beat', 'pending', clock_timestamp()
		  from generate_series(1, 3000) n`)
	w.exec(`
		insert into agent_activity (trace_id, kind, skill_name) select 'hb_' || lpad((n / 5)::text, 26, '0'), 'call', 's'
		  from generate_series(1, 15000) n;`)
	w.exec(`
		insert into agent_events (event, key) select 'E', n::text from generate_series(1, 3000) n`)
	w.exec(`
		insert into agent_links (cause, kind, effect) select 'trace ' || n, 'raised', 'event ' || n
		  from generate_series(1, 3000) n`)
	w.exec(`analyze`)
}

// Every read of why uses an index with a condition, in a random history.
func TestReadsUseIndexes(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.fill()
	s := w.newScenario(1)
	s.play(80)
	var texts []string
	conn := explained(t, w, &texts)
	for _, id := range s.traceIDs() {
		pgtest.Exec(t, conn, `select * from why($1)`, id)
	}
	reads := 0
	for _, text := range texts {
		var plan struct {
			Query string `json:"Query Text"`
			Plan  node
		}
		err := json.Unmarshal([]byte(text), &plan)
		require.Truef(t, err == nil, "read plan: %v\n%s", err, text)
		reads += plan.Plan.check(t, plan.Query)
	}
	assert.Truef(t, reads >= 30, "only %d nodes read a table or an index", reads)
}

// explained returns a connection on which the server explains every statement into texts, also those in functions.
func explained(t *testing.T, w *world, texts *[]string) *pgx.Conn {
	t.Helper()
	config := w.pool.Config().ConnConfig.Copy()
	config.OnNotice = func(_ *pgconn.PgConn, n *pgconn.Notice) {
		if _, plan, is := strings.Cut(n.Message, "plan:\n"); is {
			*texts = append(*texts, plan)
		}
	}
	conn, err := pgx.ConnectConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(func() { conn.Close(context.WithoutCancel(t.Context())) })
	for _, sql := range []string{
		`load 'auto_explain'`, `set auto_explain.log_min_duration = 0`, `set auto_explain.log_nested_statements = on`,
		`set auto_explain.log_format = json`,
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

// check reports reads of a whole table or a whole index, and counts the nodes that read one.
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
