package main

import (
	"context"
	"log/slog"
	"slices"
	"strings"
	"sync"

	"github.com/lanekeeper/lanekeeper/internal/logging"
)

// lineOf is a log line about who has a thread, with what the story needs of it.
type lineOf struct {
	message   string
	execution string // whose line it is
	other     string // the execution that holds, lends or held the lane
	count     int64  // of released locks
}

// journal keeps the log lines that tell who has which thread: "lane acquired", "lane busy", "lane inherited",
// "lane stale, clearing" and "locks released". A lane's line comes after the message that it is about is committed.
type journal struct {
	mu    sync.Mutex
	lines []lineOf
}

// beside is a logger that also writes into the journal.
func (j *journal) beside(log *slog.Logger) *slog.Logger {
	return slog.New(slog.NewMultiHandler(log.Handler(), logging.Handler(&journalist{to: j})))
}

// of lists what was written about an execution, oldest first.
func (j *journal) of(execution string, messages ...string) []lineOf {
	j.mu.Lock()
	defer j.mu.Unlock()
	var found []lineOf
	for _, l := range j.lines {
		if l.execution == execution && slices.Contains(messages, l.message) {
			found = append(found, l)
		}
	}
	return found
}

// count is how many lines there are with one of the messages.
func (j *journal) count(messages ...string) (n int) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for _, l := range j.lines {
		if slices.Contains(messages, l.message) {
			n++
		}
	}
	return n
}

// laneLines are the messages about the lane of a thread.
var laneLines = []string{"lane acquired", "lane busy", "lane inherited", "lane stale, clearing"}

const releasedLine = "locks released"

// journalist is a handler that keeps lines.
type journalist struct {
	to    *journal
	attrs []slog.Attr
}

func (h *journalist) Enabled(_ context.Context, level slog.Level) bool {
	return level >= slog.LevelInfo
}

func (h *journalist) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &journalist{h.to, slices.Concat(h.attrs, attrs)}
}

func (h *journalist) WithGroup(string) slog.Handler { return h }

func (h *journalist) Handle(_ context.Context, r slog.Record) error {
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
	l := lineOf{message: r.Message, execution: text(values, "execution_id", "owner", "to")}
	l.other = text(values, "holder", "from")
	if n, ok := values["count"]; ok && n.Kind() == slog.KindInt64 {
		l.count = n.Int64()
	}
	h.to.mu.Lock()
	defer h.to.mu.Unlock()
	h.to.lines = append(h.to.lines, l)
	return nil
}

// text is the first of some attributes that is there. An owner is an execution and the number of its claim; only the former
// is kept.
func text(values map[string]slog.Value, names ...string) string {
	for _, name := range names {
		if v, ok := values[name]; ok {
			execution, _, _ := strings.Cut(v.String(), "#")
			return execution
		}
	}
	return ""
}
