package executions_test

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

// An execution is read as pgx would read it, whatever its row has, and however the server sends it.
func TestAnExecutionIsReadAsPgxReadsIt(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	exec(t, pool, `insert into agent_executions (trace_id, surface, flow) values ('fl_x', 'flow', 'flow')`)
	exec(t, pool, `
		insert into agent_executions (trace_id, surface, flow, parent_id, thread_id, input, variables, waiting_for, waiting_key, waiting_data, waiting_step,
		  result_summary, result, error_message, cancelled_by, cancel_reason, dedupe_key, forked_from, forked_step, flow_version, wait_number, claim)
		values ('fl_y', 'chat', 'flow', lanekeeper.agent_uuid7(), 'thread ü', '{"a": [1, null, "é"]}', 'null', 'event', '', '[]', 's',
		  'sum', '"text"', '', 'me', 'so', 'key', lanekeeper.agent_uuid7(), 'step', 7, 2147483647, 9223372036854775807)`)
	exec(t, pool, `update agent_executions set status = 'running' where trace_id = 'fl_x'`)
	exec(t, pool, `update agent_executions set updated_at = 'infinity', created_at = '-infinity' where trace_id = 'fl_y'`)
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeSimpleProtocol} {
		ours, theirs, err := executions.ReadBoth(t.Context(), pool, mode)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(theirs, ours); diff != "" || len(ours) != 2 {
			t.Errorf("%s: %d read, pgx reads (-), we read (+):\n%s", mode, len(ours), diff)
		}
	}
}

// What does not fit is refused, and what is read outlives the row.
func TestARowThatDoesNotFitIsRefused(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	for name, into := range map[string]func() []any{
		"null for a text":   func() []any { return []any{new(string), nil, nil, nil} },
		"a fraction":        func() []any { return []any{nil, nil, new(int), nil} },
		"a text for a time": func() []any { return []any{nil, nil, nil, new(time.Time)} },
		"too few":           func() []any { return []any{nil} },
	} {
		rows, err := pool.Query(t.Context(), `select null::text, 7.5::float8, 7.5::float8, 'text'`)
		if err != nil {
			t.Fatal(err)
		}
		rows.Next()
		if err := executions.Scan(rows, into()...); err == nil {
			t.Errorf("%s was read", name)
		}
		rows.Close()
	}
	rows, err := pool.Query(t.Context(), `select ('{"n": ' || n || '}')::jsonb from generate_series(1, 9) n`)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	var all []json.RawMessage
	for rows.Next() {
		var one json.RawMessage
		if err := executions.Scan(rows, &one); err != nil {
			t.Fatal(err)
		}
		all = append(all, one)
	}
	if len(all) != 9 || string(all[0]) != `{"n": 1}` || string(all[8]) != `{"n": 9}` {
		t.Errorf("read %s", all)
	}
}
