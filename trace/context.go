package trace

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"strings"
)

// Span locates the code of a context within a trace. It is a small value: change a copy and put that into a derived
// context.
type Span struct {
	TraceID     ID
	ExecutionID string  // the durable run
	ActivityID  string  // parent of the next activity; empty at the top
	CauseID     string  // the model call that requested the next activity; empty for none
	ThreadID    string  // the conversation; empty for none
	Lane        string  // the held lane; empty for none
	Surface     Surface // start of the trace
	Agent       string  // the acting agent
}

type spanKey struct{}

// With returns a context with span.
func With(ctx context.Context, span Span) context.Context {
	return context.WithValue(ctx, spanKey{}, span)
}

// As returns ctx with another acting agent. It returns ctx itself if agent is empty or ctx has no trace.
func As(ctx context.Context, agent string) context.Context {
	span, ok := From(ctx)
	if agent == "" || !ok {
		return ctx
	}
	span.Agent = agent
	return With(ctx, span)
}

// From returns the span of ctx, and whether it has a trace id. A span without one (of a job's lane) is returned too.
func From(ctx context.Context) (Span, bool) {
	span, _ := ctx.Value(spanKey{}).(Span)
	return span, span.TraceID != ""
}

// IDFrom returns the trace id of ctx; empty for none.
func IDFrom(ctx context.Context) ID {
	span, _ := From(ctx)
	return span.TraceID
}

// WithActivity returns a context whose further activities are children of the given one.
func WithActivity(ctx context.Context, activityID string) context.Context {
	span, _ := From(ctx)
	span.ActivityID, span.CauseID = activityID, ""
	return With(ctx, span)
}

// WithCause returns a context whose further activities were requested by the given model call.
func WithCause(ctx context.Context, activityID string) context.Context {
	span, _ := From(ctx)
	span.CauseID = activityID
	return With(ctx, span)
}

// WithLane returns a context whose work holds the given lane.
func WithLane(ctx context.Context, lane string) context.Context {
	span, _ := From(ctx)
	span.Lane = lane
	return With(ctx, span)
}

// SpanID is the id, 16 hex digits, of the span that shows a row: the last 8 bytes of the row's uuid, which are random.
// So every process derives the same span from the row, at any time. Without a row, SpanID is derived from all of parts.
func SpanID(parts ...string) string {
	if len(parts) == 1 {
		digits := strings.ReplaceAll(parts[0], "-", "")
		if raw, err := hex.DecodeString(digits); err == nil && len(raw) == 16 && strings.Trim(digits[16:], "0") != "" {
			return strings.ToLower(digits[16:])
		}
	}
	sum := sha256.Sum256([]byte(strings.Join(parts, "\n")))
	if sum[0] == 0 {
		sum[0] = 1 // an id of zeros is none
	}
	return hex.EncodeToString(sum[:8])
}

// Traceparent is the W3C header that names the calling span for another service: the span of the activity of ctx, else
// of the execution, else a span of the trace. It is empty when ctx has no trace. It always says sampled, because the
// receiver chooses the traces to keep.
func Traceparent(ctx context.Context) string {
	span, _ := From(ctx)
	hexID := span.TraceID.OTel()
	if hexID == "" {
		return ""
	}
	id := SpanID(string(span.TraceID))
	switch {
	case span.ActivityID != "":
		id = SpanID(span.ActivityID)
	case span.ExecutionID != "":
		id = SpanID(span.ExecutionID)
	}
	return "00-" + hexID + "-" + id + "-01"
}

// Remote is the span of another system that a traceparent header names.
type Remote struct {
	TraceID, SpanID string // hex digits, lower case
	Sampled         bool
}

// ParseTraceparent reads a traceparent header as W3C Trace Context says; false for an invalid header. The header is
// external and not trusted: it becomes a link, never the id of our own trace.
func ParseTraceparent(header string) (Remote, bool) {
	const length = 55 // 00-<32>-<16>-<2>
	if len(header) < length || len(header) > 200 || len(header) > length && (header[:2] == "00" || header[length] != '-') {
		return Remote{}, false
	}
	version, id, span, flags := header[:2], header[3:35], header[36:52], header[53:55]
	if header[2] != '-' || header[35] != '-' || header[52] != '-' || version == "ff" {
		return Remote{}, false
	}
	for _, part := range []string{version, id, span, flags} {
		if strings.Trim(part, "0123456789abcdef") != "" {
			return Remote{}, false
		}
	}
	if strings.Trim(id, "0") == "" || strings.Trim(span, "0") == "" {
		return Remote{}, false
	}
	bits, _ := hex.DecodeString(flags) // two hex digits: cannot fail
	return Remote{TraceID: id, SpanID: span, Sampled: bits[0]&1 == 1}, true
}

type callerKey struct{}

// WithCaller returns a context of a request that came with a traceparent header. It drops an invalid header.
func WithCaller(ctx context.Context, traceparent string) context.Context {
	if _, ok := ParseTraceparent(traceparent); !ok {
		return ctx
	}
	return context.WithValue(ctx, callerKey{}, traceparent)
}

// Caller is the traceparent header of the request that ctx belongs to; empty without a header. The header is not
// trusted.
func Caller(ctx context.Context) string {
	header, _ := ctx.Value(callerKey{}).(string)
	return header
}
