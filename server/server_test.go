package server_test

import (
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/server"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

const token = "an-admin-token-of-this-test"

// settings returns the settings of an agent on a database.
func settings(url string) map[string]string {
	return map[string]string{"DATABASE_URL": url, "AGENT_ADMIN_TOKEN": token, "AGENT_DRAIN_DELAY": "0s"}
}

// call sends an admin's request, and returns status and body.
func call(t *testing.T, method, url, body string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, strings.NewReader(body))
	require.NoError(t, err)
	req.Header.Set("Authorization", "Bearer "+token)
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	require.NoError(t, err)
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return resp.StatusCode, string(text)
}

func TestAgentServesProgramFlows(t *testing.T) {
	var log testkit.Log
	agent, err := server.Open(t.Context(), settings(pgtest.URL(t)), slog.New(slog.NewTextHandler(&log, nil)))
	require.NoError(t, err)
	defer agent.Close()
	ship, err := lanekeeper.Register(agent.Runtime(), "ship", func(ctx context.Context, order string) (string, error) {
		return lanekeeper.Step(ctx, "pack", func(context.Context) (string, error) { return order + " is packed", nil })
	})
	require.NoError(t, err)
	web := httptest.NewServer(agent.Handler())
	defer web.Close()
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- agent.Run(ctx) }()
	pgtest.Eventually(t, func() bool {
		status, _ := call(t, "GET", web.URL+"/readyz", "")
		return status == http.StatusOK
	}, "the agent is not ready")

	status, body := call(t, "POST", web.URL+"/v1/executions", `{"flow": "ship", "input": "order 7"}`)
	var started struct {
		ID      string `json:"id"`
		TraceID string `json:"trace_id"`
	}
	err = json.Unmarshal([]byte(body), &started)
	require.Truef(t, status == http.StatusCreated && err == nil, "%d %s, %v", status, body, err)
	got, err := ship.Handle(started.ID).Wait(t.Context())
	assert.Truef(t, err == nil && got == "order 7 is packed", "%q, %v", got, err)
	for path, want := range map[string]string{
		"/": "<title>Overview", "/chat": "<html",
		"/v1/traces/" + started.TraceID: `"pack"`, "/traces/" + started.TraceID: "pack",
	} {
		status, body := call(t, "GET", web.URL+path, "")
		assert.Truef(t, status == http.StatusOK && strings.Contains(body, want), "%s: %d, without %s", path, status, want)
	}
	stop()
	assert.NoError(t, <-ended)
	assert.Truef(t, strings.Contains(log.String(), "trace_id="+started.TraceID), "no line names the run")
	status, _ = call(t, "GET", web.URL+"/readyz", "")
	assert.Equal(t, http.StatusServiceUnavailable, status, "after its end /readyz")
}

func TestInvalidSettingsAreNamed(t *testing.T) {
	url := pgtest.EmptyURL(t)
	for want, wrong := range map[string]map[string]string{
		"DATABASE_URL":       {"AGENT_ADMIN_TOKEN": token},
		"AGENT_ADMIN_TOKEN":  {"DATABASE_URL": url},
		"AGENT_WORKERS":      {"DATABASE_URL": url, "AGENT_ADMIN_TOKEN": token, "AGENT_WORKERS": "many"},
		"lanekeeper.Migrate": settings(url),
	} {
		agent, err := server.Open(t.Context(), wrong, nil)
		if err == nil {
			agent.Close()
		}
		assert.ErrorContains(t, err, want)
	}
}
