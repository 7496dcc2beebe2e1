package api_test

import (
	"encoding/csv"
	"net/http"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/trace"
)

// table reads a listing as CSV. A row has its cells by column name.
func (a *agent) table(path, accept string) (rows []map[string]string) {
	a.t.Helper()
	header := asAdmin()
	if accept != "" {
		header.Set("Accept", accept)
	}
	w := a.raw("GET", path, "", header)
	require.Truef(a.t, w.Code == http.StatusOK && strings.HasPrefix(w.Header().Get("Content-Type"), "text/csv"),
		"%s: %d %s %s", path, w.Code, w.Header().Get("Content-Type"), w.Body)
	all, err := csv.NewReader(w.Body).ReadAll()
	require.NoError(a.t, err)
	for _, cells := range all[1:] {
		row := map[string]string{}
		for i, name := range all[0] {
			row[name] = cells[i]
		}
		rows = append(rows, row)
	}
	return rows
}

func TestListingsAsCSV(t *testing.T) {
	t.Parallel()
	a := start(t)
	for _, flow := range []string{"first", "second", "third"} {
		a.start(flow, trace.New(trace.Flow))
	}
	const evil = "=HYPERLINK(\"http://x\",\"y\")"
	pgtest.Exec(t, a.pool, `update agent_executions set
		error_message = case flow when 'first' then $1 when 'second' then ' =1' else ' +1' end,
		input = '{"password": "hunter2-Zq81xLm0Kk77"}'`, evil)
	a.recordActivity(activity.Entry{TraceID: string(trace.New(trace.Chat)), Skill: "@look, \"here\"\nand there"},
		activity.Success)
	for _, path := range []string{"/v1/executions?format=csv", "/v1/executions?format=csv&status=pending,failed"} {
		rows := a.table(path, "")
		assert.Truef(t, len(rows) == 3 && rows[0]["flow"] == "third" && rows[2]["error_message"] == "'"+evil &&
			rows[1]["error_message"] == "' =1" && rows[0]["error_message"] == "' +1" && rows[0]["priority"] == "2", "%s: %v",
			path, rows)
		for _, name := range []string{"input", "result", "variables"} {
			_, has := rows[0][name]
			assert.Truef(t, !has, "%s has the column %s", path, name)
		}
	}
	assert.Equal(t, 2, len(a.table("/v1/executions?limit=2", "text/csv")))
	assert.Equal(t, 0, len(a.table("/v1/executions?format=csv&status=failed,timeout", "")))
	audit := a.table("/v1/activity/audit?format=csv", "")
	assert.Equal(t, "'@look, \"here\"\nand there", audit[0]["act"])
	assert.Equal(t, 0, len(a.table("/v1/activity/spend?by=purpose", "text/csv;q=0.9")))
	for path, accept := range map[string]string{
		"/v1/executions": "application/json, text/csv", "/v1/executions?format=json": "text/csv", "/v1/skills": "text/csv",
	} {
		header := asAdmin()
		header.Set("Accept", accept)
		if w := a.raw("GET", path, "", header); w.Header().Get("Content-Type") != "application/json" {
			t.Errorf("%s for %s: %s", path, accept, w.Header().Get("Content-Type"))
		}
	}
	for _, path := range []string{
		"/v1/executions?format=xml", "/v1/executions?status=failed,lost", "/v1/skills?format=csv",
	} {
		assert.Equal(t, http.StatusBadRequest, a.raw("GET", path, "", asAdmin()).Code, path)
	}
}

func TestCSVRowLimit(t *testing.T) {
	t.Parallel()
	a := start(t)
	pgtest.Exec(t, a.pool, `set session_replication_role = replica;
		insert into agent_executions (trace_id, surface, flow, status)
		select 'fl_' || n, 'flow', 'many', 'pending'
		  from generate_series(1, 10001) n`)
	assert.Equal(t, 10_000, len(a.table("/v1/executions?format=csv", "")))
	link := a.raw("GET", "/v1/executions?format=csv", "", asAdmin()).Header().Get("Link")
	next, isNext := strings.CutSuffix(strings.TrimPrefix(link, "<"), `>; rel="next"`)
	require.True(t, isNext, link)
	assert.Equal(t, 1, len(a.table(next, "")), next)
	assert.Equal(t, "", a.raw("GET", next, "", asAdmin()).Header().Get("Link"))
}
