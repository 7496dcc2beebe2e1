package logging_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"maps"
	"strings"
	"testing"
	"testing/slogtest"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/logging"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/trace"
)

const id = trace.ID("hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE")

// line logs once through a new JSON logger and returns the line without its time.
func line(t *testing.T, log func(*slog.Logger)) map[string]any {
	t.Helper()
	var b bytes.Buffer
	logger, err := logging.New(&b, "json", "debug")
	require.NoError(t, err)
	log(logger)
	var out map[string]any
	require.NoError(t, json.Unmarshal(b.Bytes(), &out), b.String())
	delete(out, "time")
	return out
}

func TestLinesHaveAttributesOfRun(t *testing.T) {
	run := map[string]any{"level": "INFO", "msg": "m", "trace_id": string(id), "execution_id": "e1", "lane": "heartbeat"}
	with := func(more map[string]any) map[string]any {
		out := map[string]any{}
		for _, m := range []map[string]any{run, more} {
			maps.Copy(out, m)
		}
		return out
	}
	for name, c := range map[string]struct {
		log  func(context.Context, *slog.Logger)
		want map[string]any
	}{
		"plain": {func(ctx context.Context, l *slog.Logger) { l.InfoContext(ctx, "m") }, run},
		"own lane": {
			func(ctx context.Context, l *slog.Logger) { l.InfoContext(ctx, "m", "lane", "objective:1") },
			with(map[string]any{"lane": "objective:1"}),
		},
		"lane by with": {
			func(ctx context.Context, l *slog.Logger) { l.With("lane", "a").InfoContext(ctx, "m") },
			with(map[string]any{"lane": "a"}),
		},
		"group": {
			func(ctx context.Context, l *slog.Logger) { l.WithGroup("g").InfoContext(ctx, "m", "lane", "a") },
			with(map[string]any{"g": map[string]any{"lane": "a"}}),
		},
		"with, group, with": {
			func(ctx context.Context, l *slog.Logger) {
				l.With("a", 1).WithGroup("g").With("b", 2).WithGroup("h").InfoContext(ctx, "m", "c", 3)
			},
			with(map[string]any{"a": 1.0, "g": map[string]any{"b": 2.0, "h": map[string]any{"c": 3.0}}}),
		},
	} {
		t.Run(name, func(t *testing.T) {
			got := line(t, func(l *slog.Logger) {
				c.log(trace.With(t.Context(), trace.Span{TraceID: id, ExecutionID: "e1", Lane: "heartbeat", Agent: "agent"}), l)
			})
			assert.NoDiff(t, c.want, got)
		})
	}
}

func TestLinesOutsideRunHaveNoAttributes(t *testing.T) {
	got := line(t, func(l *slog.Logger) { l.InfoContext(t.Context(), "m") })
	assert.NoDiff(t, map[string]any{"level": "INFO", "msg": "m"}, got)
	got = line(t, func(l *slog.Logger) { l.InfoContext(trace.WithLane(t.Context(), "pipeline:a"), "m") })
	assert.NoDiff(t, map[string]any{"level": "INFO", "msg": "m", "lane": "pipeline:a"}, got)
}

// A logger derived from another must not write into its sibling.
func TestDerivedLoggersAreIndependent(t *testing.T) {
	var b bytes.Buffer
	logger, err := logging.New(&b, "text", "")
	require.NoError(t, err)
	parent := logger.With("a", 1).WithGroup("g").With("b", 2)
	_, second := parent.With("c", 3), parent.With("d", 4)
	parent.WithGroup("x")
	second.InfoContext(t.Context(), "m")
	got := b.String()
	assert.Truef(t, strings.HasSuffix(got, "msg=m a=1 g.b=2 g.d=4\n"), "got %q", got)
}

type valuer struct{}

func (valuer) LogValue() slog.Value {
	return slog.GroupValue(slog.String("password", "hunter2"), slog.Int("n", 1))
}

type nilStringer struct{ s string }

func (n *nilStringer) String() string { return n.s }

func TestLinesHideSecrets(t *testing.T) {
	var broken *nilStringer
	for name, log := range map[string]func(*slog.Logger){
		"name":    func(l *slog.Logger) { l.Info("m", "api_key", "hunter2") },
		"with":    func(l *slog.Logger) { l.With("token", "hunter2").Info("m") },
		"group":   func(l *slog.Logger) { l.Info("m", slog.Group("g", "secret", "hunter2")) },
		"grouped": func(l *slog.Logger) { l.WithGroup("g").With("secret", "hunter2").Info("m") },
		"look":    func(l *slog.Logger) { l.Info("m", "url", "postgres://u:hunter2@h/d") },
		"error":   func(l *slog.Logger) { l.Info("m", "error", errors.New("dial postgres://u:hunter2@h/d")) },
		"struct":  func(l *slog.Logger) { l.Info("m", "v", struct{ Password string }{"hunter2"}) },
		"map":     func(l *slog.Logger) { l.Info("m", "v", map[string]any{"a": map[string]any{"cookie": "hunter2"}}) },
		"bytes":   func(l *slog.Logger) { l.Info("m", "v", []byte(`{"token":"hunter2"}`)) },
		"valuer":  func(l *slog.Logger) { l.Info("m", "v", valuer{}) },
		"message": func(l *slog.Logger) { l.Info("password=hunter2") },
		"any":     func(l *slog.Logger) { l.Info("m", "secret", struct{ A string }{"hunter2"}) },
		"panics":  func(l *slog.Logger) { l.Info("m", "v", broken, "password", "hunter2") },
	} {
		t.Run(name, func(t *testing.T) {
			for _, format := range []string{"text", "json"} {
				var b bytes.Buffer
				logger, err := logging.New(&b, format, "info")
				require.NoError(t, err)
				log(logger)
				got := b.String()
				assert.Truef(t, !strings.Contains(got, "hunter2") && strings.Contains(got, "[redacted]"), "%s: %s", format, got)
			}
		})
	}
}

func TestOrdinaryValuesAreKept(t *testing.T) {
	got := line(t, func(l *slog.Logger) {
		l.Info("lane busy", "fencing_token", 7, "tokens", 12, "ok", true, "secret", "", "holder", "e1#2", "v",
			map[string]int{"a": 1})
	})
	want := map[string]any{
		"level": "INFO", "msg": "lane busy", "fencing_token": 7.0, "tokens": 12.0, "ok": true, "secret": "", "holder": "e1#2",
		"v": map[string]any{"a": 1.0},
	}
	assert.NoDiff(t, want, got)
}

func TestNewListsAllowedValues(t *testing.T) {
	for name, c := range map[string]struct{ format, level, says string }{
		"format": {"xml", "", "text, json"},
		"level":  {"", "loud", "debug, info, warn, error"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := logging.New(nil, c.format, c.level)
			assert.Truef(t, err != nil && strings.Contains(err.Error(), c.says), "New(%q, %q): %v", c.format, c.level, err)
		})
	}
}

func TestLevelIsRespected(t *testing.T) {
	var b bytes.Buffer
	logger, err := logging.New(&b, "TEXT", "WARN")
	require.NoError(t, err)
	logger.InfoContext(t.Context(), "quiet")
	logger.WarnContext(t.Context(), "loud")
	got := b.String()
	assert.Truef(t, !strings.Contains(got, "quiet") && strings.Contains(got, "loud"), "got %q", got)
}

// The wrapper keeps the contract of slog.Handler.
func TestHandlerContract(t *testing.T) {
	var b bytes.Buffer
	slogtest.Run(t, func(*testing.T) slog.Handler {
		b.Reset()
		return logging.Handler(slog.NewJSONHandler(&b, nil))
	}, func(t *testing.T) map[string]any {
		var out map[string]any
		require.NoError(t, json.Unmarshal(b.Bytes(), &out))
		return out
	})
}

func TestDurationFormat(t *testing.T) {
	got := line(t, func(l *slog.Logger) {
		l.With("age", 90*time.Minute).Info("m", "took", 1500*time.Millisecond, slog.Group("g", "wait", time.Second))
	})
	want := map[string]any{
		"level": "INFO", "msg": "m", "age": "1h30m0s", "took": "1.5s",
		"g": map[string]any{"wait": "1s"},
	}
	assert.NoDiff(t, want, got)
}
