package main

import (
	"context"
	"log/slog"
	"slices"
	"strings"
	"sync"

	"github.com/lanekeeper/lanekeeper/internal/logging"
)

// logCapture stores the log lines about lanes of threads. A lane's line follows the commit of its message.
type logCapture struct {
	mu    sync.Mutex
	lines []laneLine
}

// laneLine is a log line about the lane of a thread.
type laneLine struct {
	message   string
	execution string // the execution of the line
	other     string // the execution that holds, lends or held the lane
	count     int64  // of released locks
}

// laneLines are the log messages about the lane of a thread.
var laneLines = []string{"lane acquired", "lane busy", "lane inherited", "lane stale, clearing"}

const releasedLine = "locks released"

// tee returns a logger that also writes into the capture.
func (j *logCapture) tee(log *slog.Logger) *slog.Logger {
	return slog.New(slog.NewMultiHandler(log.Handler(), logging.Handler(&captureHandler{capture: j})))
}

// matching lists the captured lines of an execution, oldest first.
func (j *logCapture) matching(execution string, messages ...string) []laneLine {
	j.mu.Lock()
	defer j.mu.Unlock()
	var found []laneLine
	for _, l := range j.lines {
		if l.execution == execution && slices.Contains(messages, l.message) {
			found = append(found, l)
		}
	}
	return found
}

func (j *logCapture) count(messages ...string) (n int) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for _, l := range j.lines {
		if slices.Contains(messages, l.message) {
			n++
		}
	}
	return n
}

// captureHandler is the slog handler of a logCapture.
type captureHandler struct {
	capture *logCapture
	attrs   []slog.Attr
}

func (h *captureHandler) Enabled(_ context.Context, level slog.Level) bool {
	return level >= slog.LevelInfo
}

func (h *captureHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &captureHandler{h.capture, slices.Concat(h.attrs, attrs)}
}

func (h *captureHandler) WithGroup(string) slog.Handler { return h }

func (h *captureHandler) Handle(_ context.Context, r slog.Record) error {
	if r.Message != releasedLine && !slices.Contains(laneLines, r.Message) {
		return nil
	}
	values := map[string]slog.Value{}
	keep := func(a slog.Attr) bool {
		values[a.Key] = a.Value.Resolve()
		return true
	}
	for _, a := range h.attrs {
		keep(a)
	}
	r.Attrs(keep)
	if lane, ok := values["lane"]; r.Message != releasedLine && (!ok || !strings.HasPrefix(lane.String(), "thread:")) {
		return nil
	}
	l := laneLine{message: r.Message, execution: firstAttr(values, "execution_id", "owner", "to")}
	l.other = firstAttr(values, "holder", "from")
	if n, ok := values["count"]; ok && n.Kind() == slog.KindInt64 {
		l.count = n.Int64()
	}
	h.capture.mu.Lock()
	defer h.capture.mu.Unlock()
	h.capture.lines = append(h.capture.lines, l)
	return nil
}

// firstAttr returns the first attribute present. An owner is an execution and its claim number; the number is cut
// off.
func firstAttr(values map[string]slog.Value, names ...string) string {
	for _, name := range names {
		if v, ok := values[name]; ok {
			execution, _, _ := strings.Cut(v.String(), "#")
			return execution
		}
	}
	return ""
}
