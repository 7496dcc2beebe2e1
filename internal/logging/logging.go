// Package logging makes the program's logger.
//
// Lines written with the context of a run have its trace_id, execution_id and lane (see [trace.From]), so the code that
// logs does not repeat them. They precede the groups of a logger, so one search finds all lines of a trace. A line that
// sets one of them itself keeps its own.
//
// Messages and attributes are redacted by the rules of package redact: by the attribute's name, and by the look of the
// text. The rules reach into groups, errors, structured values and the values of a [slog.LogValuer].
//
// This applies to the loggers of [New], the handlers of [Handler] and all that derive from them. They are safe for
// concurrent use if nothing else writes to their writer.
package logging

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"

	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/trace"
)

// formats and levels list what [New] accepts, for messages.
const (
	formats = "text, json"
	levels  = "debug, info, warn, error"
)

// New returns a logger that writes lines of at least the given level to w. Empty means text and info. The error lists
// the accepted values.
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
	return nil, fmt.Errorf("log format %q: not one of %s", format, formats)
}

// Level parses the name of a level; empty means info.
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
	return 0, fmt.Errorf("log level %q: not one of %s", name, levels)
}

// Handler wraps next so that its lines name their run and are redacted.
func Handler(next slog.Handler) slog.Handler { return &handler{next: next} }

// handler keeps the groups that were added to it, because the attributes of the context must precede the first group.
type handler struct {
	next   slog.Handler
	own    []string // names of the attributes outside groups
	groups []group  // in order
}

// group is one WithGroup, with the attributes added inside it.
type group struct {
	name  string
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
	if len(h.groups) == 0 {
		return &handler{next: h.next.WithAttrs(attrs), own: append(slices.Clip(h.own), names(attrs)...)}
	}
	groups := slices.Clone(h.groups)
	last := &groups[len(groups)-1]
	last.attrs = append(slices.Clip(last.attrs), attrs...)
	return &handler{next: h.next, own: h.own, groups: groups}
}

// WithGroup returns a handler that puts what follows into a group.
func (h *handler) WithGroup(name string) slog.Handler {
	if name == "" {
		return h
	}
	return &handler{next: h.next, own: h.own, groups: append(slices.Clip(h.groups), group{name: name})}
}

// Handle writes one line.
func (h *handler) Handle(ctx context.Context, record slog.Record) error {
	attrs := make([]slog.Attr, 0, record.NumAttrs()+3)
	record.Attrs(func(a slog.Attr) bool {
		attrs = append(attrs, redactAttr(a))
		return true
	})
	for _, g := range slices.Backward(h.groups) {
		inside := append(slices.Clip(g.attrs), attrs...)
		attrs = []slog.Attr{{Key: g.name, Value: slog.GroupValue(inside...)}}
	}
	out := slog.NewRecord(record.Time, record.Level, redactText(record.Message), record.PC)
	out.AddAttrs(h.missing(ctx, attrs)...)
	out.AddAttrs(attrs...)
	return h.next.Handle(ctx, out)
}

// Names of the attributes that come from the context.
const (
	keyTrace     = "trace_id"
	keyExecution = "execution_id"
	keyLane      = "lane"
)

// valueLimit bounds a value in a line, in bytes.
const valueLimit = 8 << 10

// missing returns the attributes of the context that neither the handler nor the line sets.
func (h *handler) missing(ctx context.Context, attrs []slog.Attr) []slog.Attr {
	if ctx == nil {
		return nil
	}
	span, _ := trace.From(ctx)
	var out []slog.Attr
	for _, known := range [...]struct{ key, value string }{
		{keyTrace, string(span.TraceID)}, {keyExecution, span.ExecutionID}, {keyLane, span.Lane},
	} {
		set := known.value == "" || slices.Contains(h.own, known.key) ||
			slices.ContainsFunc(attrs, func(a slog.Attr) bool { return a.Key == known.key })
		if !set {
			out = append(out, slog.String(known.key, known.value))
		}
	}
	return out
}

func names(attrs []slog.Attr) []string {
	out := make([]string, len(attrs))
	for i, a := range attrs {
		out[i] = a.Key
	}
	return out
}

func redactAll(attrs []slog.Attr) []slog.Attr {
	out := make([]slog.Attr, len(attrs))
	for i, a := range attrs {
		out[i] = redactAttr(a)
	}
	return out
}

// redactAttr redacts an attribute.
func redactAttr(a slog.Attr) slog.Attr {
	value := a.Value.Resolve()
	switch value.Kind() {
	case slog.KindGroup:
		return slog.Attr{Key: a.Key, Value: slog.GroupValue(redactAll(value.Group())...)}
	case slog.KindDuration: // in JSON it would be a number of nanoseconds
		return slog.String(a.Key, value.Duration().String())
	case slog.KindTime:
		return slog.Attr{Key: a.Key, Value: value}
	case slog.KindString, slog.KindAny, slog.KindInt64, slog.KindUint64, slog.KindFloat64, slog.KindBool,
		slog.KindLogValuer:
	}
	if redact.Hides(a.Key, value.Any()) {
		return slog.String(a.Key, redact.Marker)
	}
	return slog.Attr{Key: a.Key, Value: redactValue(value)}
}

// redactValue redacts a string, an error or a structured value by its content.
func redactValue(value slog.Value) slog.Value {
	switch value.Kind() {
	case slog.KindString:
		return slog.StringValue(redactText(value.String()))
	case slog.KindAny:
	default:
		return value
	}
	switch v := value.Any().(type) {
	case nil:
		return value
	case error:
		return slog.StringValue(redactText(describe(v.Error)))
	case fmt.Stringer:
		return slog.StringValue(redactText(describe(v.String)))
	case []byte:
		return slog.StringValue(redactText(string(v)))
	case *slog.Source:
		return value
	}
	return slog.AnyValue(redact.JSON(value.Any(), valueLimit))
}

// describe calls a method of a value that may be a nil pointer.
func describe(method func() string) (s string) {
	defer func() {
		if p := recover(); p != nil {
			s = fmt.Sprintf("[panic: %v]", p)
		}
	}()
	return method()
}

func redactText(s string) string { return redact.Text(s, valueLimit) }
