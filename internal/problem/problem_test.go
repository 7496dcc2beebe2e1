package problem_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/memory"
	"github.com/lanekeeper/lanekeeper/skills"
)

type writer func(http.ResponseWriter, *http.Request, error, string, *slog.Logger)

// write writes err as a response. It returns the response and the log.
func write(t *testing.T, with writer, err error, traceID string) (*httptest.ResponseRecorder, string) {
	t.Helper()
	var log bytes.Buffer
	w := httptest.NewRecorder()
	with(w, httptest.NewRequestWithContext(t.Context(), "GET", "/v1/x", nil), err, traceID,
		slog.New(slog.NewTextHandler(&log, nil)))
	return w, log.String()
}

func TestStatusOfErrors(t *testing.T) {
	for name, test := range map[string]struct {
		err    error
		status int
		kind   string
	}{
		"own": {
			fmt.Errorf("do it: %w", problem.New(418, "short and stout").Kind("teapot", "Teapot")), 418,
			"urn:lanekeeper:problem:teapot",
		},
		"blocked lane": {
			fmt.Errorf("break: %w", &lanes.BlockedError{Reason: "lane 'x' is in use by pid 1"}), 409,
			"urn:lanekeeper:problem:lane-in-use",
		},
		"busy lane": {
			fmt.Errorf("acquire: %w", &lanes.BusyError{Lane: "operate", Holder: "op_1"}), 409,
			"urn:lanekeeper:problem:lane-busy",
		},
		"cursor":       {activity.ErrCursor, 400, "urn:lanekeeper:problem:bad-parameter"},
		"bad lane":     {lanes.ErrInvalid, 400, "urn:lanekeeper:problem:malformed-id"},
		"no execution": {executions.ErrNotFound, 404, "about:blank"},
		"no agent":     {agents.ErrNotFound, 404, "about:blank"},
		"no skill":     {skills.ErrNotFound, 404, "about:blank"},
		"lost update": {
			fmt.Errorf("save: %w", &memory.ConflictError{Key: "k", Yours: json.RawMessage("1"), Theirs: &memory.Entry{}}), 412,
			"urn:lanekeeper:problem:changed-meanwhile",
		},
		"client gone":   {context.Canceled, 503, "about:blank"},
		"shutting down": {executions.ErrDraining, 503, "urn:lanekeeper:problem:draining"},
		"locked":        {&pgconn.PgError{Code: "55P03"}, 503, "urn:lanekeeper:problem:locked"},
		"too slow":      {context.DeadlineExceeded, 503, "urn:lanekeeper:problem:database-away"},
		"pooler": {
			&pgconn.PgError{Code: "08P01", Message: "server login has been failing"}, 503,
			"urn:lanekeeper:problem:database-away",
		},
		"broken":        {fmt.Errorf("roll back: %w", pgconn.ErrConnClosed), 503, "urn:lanekeeper:problem:database-away"},
		"anything else": {errors.New("relation agent_x at 10.0.0.7"), 500, "about:blank"},
	} {
		t.Run(name, func(t *testing.T) {
			w, _ := write(t, problem.Write, test.err, "")
			var p problem.Problem
			require.NoError(t, json.Unmarshal(w.Body.Bytes(), &p))
			assert.Truef(t, w.Code == test.status && p.Status == test.status && p.Type == test.kind && p.Title != "" &&
				p.Detail != "", "answer is %d %+v", w.Code, p)
			assert.Truef(t, w.Header().Get("Content-Type") == problem.ContentType &&
				w.Header().Get("Cache-Control") == "no-store", "header is %v", w.Header())
			assert.Equal(t, test.status == 503, w.Header().Get("Retry-After") != "")
		})
	}
}

func TestTraceAndHolderAreInProblem(t *testing.T) {
	w, log := write(t, problem.Write, problem.New(409, "held").WithHolder("op_1/7"), "op_2")
	want := `{"type":"about:blank","title":"Conflict","status":409,"detail":"held","trace_id":"op_2","holder":"op_1/7"}` +
		"\n"
	assert.NoDiff(t, want, w.Body.String())
	assert.Truef(t, w.Header().Get("X-Trace-Id") == "op_2" && log == "", "header %v, log %q", w.Header(), log)
	w, _ = write(t, problem.Write, problem.New(409, "held").WithTrace("op_1"), "op_2")
	assert.Equal(t, "op_1", w.Header().Get("X-Trace-Id"))
}

func TestCauseIsOnlyInLog(t *testing.T) {
	for name, with := range map[string]writer{"problem": problem.Write, "OpenAI's format": problem.WriteOpenAI} {
		t.Run(name, func(t *testing.T) {
			w, log := write(t, with, errors.New("relation agent_x at 10.0.0.7"), "op_1")
			assert.Truef(t, !strings.Contains(w.Body.String(), "agent_x") && strings.Contains(log, "agent_x") &&
				strings.Contains(log, "op_1"), "told %s, logged %s", w.Body, log)
		})
	}
}

func TestOpenAIFormat(t *testing.T) {
	for name, test := range map[string]struct {
		err        error
		kind, code string
	}{
		"key":     {problem.New(401, "no"), "invalid_request_error", "invalid_api_key"},
		"rate":    {problem.New(429, "slow down"), "rate_limit_error", "rate_limit_exceeded"},
		"named":   {problem.New(404, "no model").Kind("model-not-found", "x"), "invalid_request_error", "model_not_found"},
		"size":    {problem.New(413, "large"), "invalid_request_error", "request_entity_too_large"},
		"failure": {errors.New("x"), "server_error", "server_error"},
	} {
		t.Run(name, func(t *testing.T) {
			w, _ := write(t, problem.WriteOpenAI, test.err, "ch_1")
			var got struct {
				Error map[string]any
			}
			require.NoError(t, json.Unmarshal(w.Body.Bytes(), &got))
			want := map[string]any{"message": got.Error["message"], "type": test.kind, "param": nil, "code": test.code}
			diff := cmp.Diff(want, got.Error)
			assert.True(t, diff == "" && got.Error["message"] != "", diff)
			assert.Truef(t, w.Header().Get("X-Request-Id") == "ch_1" && w.Header().Get("Content-Type") == "application/json",
				"header is %v", w.Header())
		})
	}
}
