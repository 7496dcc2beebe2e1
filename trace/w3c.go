package trace

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"strings"
)

// SpanID is the id, 16 hex digits, of the span that shows a row: the last 8 bytes of the row's uuid, which are
// random. So whoever knows the row knows the span, in every process and at every time. What has no row is named by
// all of parts.
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

// Traceparent is the W3C header that tells another service under which span it is called: that of the activity that
// ctx is in, else of the execution. Empty when ctx has no trace. It always says sampled: what is kept is the
// receiver's choice.
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

// ParseTraceparent reads a traceparent header as W3C Trace Context says; false when it is none. It comes from outside
// and is not trusted: it becomes a link, never the id of a trace of ours.
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

// WithCaller returns a context of a request that came with a traceparent header. One that is none is not kept.
func WithCaller(ctx context.Context, traceparent string) context.Context {
	if _, ok := ParseTraceparent(traceparent); !ok {
		return ctx
	}
	return context.WithValue(ctx, callerKey{}, traceparent)
}

// Caller is the traceparent header of the request that ctx belongs to; empty when there was none. It is not trusted.
func Caller(ctx context.Context) string {
	header, _ := ctx.Value(callerKey{}).(string)
	return header
}
