// Package logging makes the program's logger.
//
// Every line written inside a run says which run: trace_id, execution_id and lane come from the
// context (see [trace.From]), so the code that logs does not repeat them. They stand at the top
// of the line also when the logger has groups, so that one search finds all lines of a trace.
// A line that sets one of them itself keeps its own.
//
// No line shows a secret: attributes under a secret's name and attributes and messages that look
// like one are redacted as stored values are (see package redact), also inside groups, errors
// and structured values. What a [slog.LogValuer] gives is looked at too.
//
// This holds for every logger that [New] makes and for every handler that [Handler] wraps, and for
// what is derived from them. Both are safe for concurrent use, as far as their writer is written to
// by them alone.
package logging

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"
)

// Formats and levels that [New] knows, as a message lists them.
const (
	Formats = "text, json"
	Levels  = "debug, info, warn, error"
)

// New makes a logger that writes lines of the given format and at least the given level to w.
// Empty means text and info. The error lists what is allowed.
func New(w io.Writer, format, level string) (*slog.Logger, error) {
	threshold, err := Level(level)
	if err != nil {
		return nil, err
	}
	options := &slog.HandlerOptions{Level: threshold}
	switch strings.ToLower(format) {
	case "", "text":
		return slog.New(Handler(slog.NewTextHandler(w, options))), nil
	case "json":
		return slog.New(Handler(slog.NewJSONHandler(w, options))), nil
	}
	return nil, fmt.Errorf("log format %q: not one of %s", format, Formats)
}

// Level reads the name of a level; empty means info.
func Level(name string) (slog.Level, error) {
	switch strings.ToLower(name) {
	case "debug":
		return slog.LevelDebug, nil
	case "", "info":
		return slog.LevelInfo, nil
	case "warn", "warning":
		return slog.LevelWarn, nil
	case "error":
		return slog.LevelError, nil
	}
	return 0, fmt.Errorf("log level %q: not one of %s", name, Levels)
}

// Handler wraps next so that its lines say which run they belong to and show no secret.
func Handler(next slog.Handler) slog.Handler { return &handler{next: next} }

// handler keeps the attributes and groups that were added to it, because what comes from the
// context must stand before the first group.
type handler struct {
	next  slog.Handler
	own   []string // which of the context's names the program has set, outside of groups
	outer []layer  // what was added after the first WithGroup, in order
}

// layer is one WithGroup, with the attributes added inside it.
type layer struct {
	group string
	attrs []slog.Attr
}

// Enabled asks the wrapped handler.
func (h *handler) Enabled(ctx context.Context, level slog.Level) bool {
	return h.next.Enabled(ctx, level)
}

// WithAttrs returns a handler that adds attrs to each line.
func (h *handler) WithAttrs(attrs []slog.Attr) slog.Handler {
	if len(attrs) == 0 {
		return h
	}
	attrs = redactAll(attrs)
	if len(h.outer) == 0 {
		return &handler{next: h.next.WithAttrs(attrs), own: append(slices.Clip(h.own), names(attrs)...)}
	}
	outer := append(h.outer[:0:0], h.outer...)
	last := &outer[len(outer)-1]
	last.attrs = append(slices.Clip(last.attrs), attrs...)
	return &handler{next: h.next, own: h.own, outer: outer}
}

// WithGroup returns a handler that puts what follows into a group.
func (h *handler) WithGroup(name string) slog.Handler {
	if name == "" {
		return h
	}
	return &handler{next: h.next, own: h.own, outer: append(slices.Clip(h.outer), layer{group: name})}
}

// Handle writes one line.
func (h *handler) Handle(ctx context.Context, record slog.Record) error {
	attrs := make([]slog.Attr, 0, record.NumAttrs()+3)
	record.Attrs(func(a slog.Attr) bool {
		attrs = append(attrs, redactAttr(a))
		return true
	})
	for _, l := range slices.Backward(h.outer) {
		inside := append(slices.Clip(l.attrs), attrs...)
		attrs = []slog.Attr{{Key: l.group, Value: slog.GroupValue(inside...)}}
	}
	out := slog.NewRecord(record.Time, record.Level, redactText(record.Message), record.PC)
	out.AddAttrs(h.missing(ctx, attrs)...)
	out.AddAttrs(attrs...)
	return h.next.Handle(ctx, out)
}
