package app

import (
	"encoding/json"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/mcp"
	"github.com/lanekeeper/lanekeeper/skills"
)

func TestMCPRefusesWithProblems(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	registry, err := skills.New(skills.Options{Pool: db})
	require.NoError(t, err)
	log := slog.New(slog.DiscardHandler)
	a := &App{Options: Options{Log: log, Database: Database{Pool: db}}}
	a.MCPServer = &mcp.Server{Pool: db, Skills: registry, Agent: "tester", Logger: log}
	handler := a.mcpEndpoints()[0].Handler
	ask := func(method, kind, body string) *httptest.ResponseRecorder {
		r := httptest.NewRequestWithContext(t.Context(), method, "/mcp", strings.NewReader(body))
		r.Header.Set("Content-Type", kind)
		r.Header.Set("Accept", "application/json, text/event-stream")
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, r)
		return w
	}
	for _, c := range []struct {
		method, kind, body string
		status             int
	}{
		{"POST", "application/json", `[]`, http.StatusBadRequest},
		{"POST", "text/plain", `{}`, http.StatusUnsupportedMediaType},
		{"GET", "application/json", ``, http.StatusMethodNotAllowed},
	} {
		w := ask(c.method, c.kind, c.body)
		var p problem.Problem
		require.NoError(t, json.Unmarshal(w.Body.Bytes(), &p), w.Body)
		assert.Truef(t, w.Code == c.status && p.Status == c.status && p.Detail != "" &&
			w.Header().Get("Content-Type") == problem.ContentType, "%s %s: %d %v %s",
			c.method, c.body, w.Code, w.Header(), w.Body)
	}
	w := ask("POST", "application/json", `{"jsonrpc":"2.0","id":1,"method":"tools/list"}`)
	assert.Truef(t, w.Code == http.StatusOK && strings.Contains(w.Body.String(), `"tools":[]`), "%d %s", w.Code, w.Body)
}
