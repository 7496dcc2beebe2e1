package logging

import (
	"context"
	"fmt"
	"log/slog"
	"slices"

	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/trace"
)

// Names of the attributes that come from the context.
const (
	KeyTrace     = "trace_id"
	KeyExecution = "execution_id"
	KeyLane      = "lane"
)

// valueLimit is the number of bytes of the longest value in a line.
const valueLimit = 8 << 10

// missing gives what the context knows and neither the handler nor the line has set.
func (h *handler) missing(ctx context.Context, attrs []slog.Attr) []slog.Attr {
	if ctx == nil {
		return nil
	}
	span, _ := trace.From(ctx)
	var out []slog.Attr
	for _, known := range [...]struct{ key, value string }{
		{KeyTrace, string(span.TraceID)}, {KeyExecution, span.ExecutionID}, {KeyLane, span.Lane},
	} {
		set := known.value == "" || slices.Contains(h.own, known.key) ||
			slices.ContainsFunc(attrs, func(a slog.Attr) bool { return a.Key == known.key })
		if !set {
			out = append(out, slog.String(known.key, known.value))
		}
	}
	return out
}

// names lists the attributes' names.
func names(attrs []slog.Attr) []string {
	out := make([]string, 0, len(attrs))
	for _, a := range attrs {
		out = append(out, a.Key)
	}
	return out
}

// redactAll redacts each attribute.
func redactAll(attrs []slog.Attr) []slog.Attr {
	out := make([]slog.Attr, len(attrs))
	for i, a := range attrs {
		out[i] = redactAttr(a)
	}
	return out
}

// redactAttr returns an attribute without secrets.
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

// redactValue redacts a string, an error or a structured value by its look.
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

// redactText redacts a line's text.
func redactText(s string) string { return redact.Text(s, valueLimit) }
