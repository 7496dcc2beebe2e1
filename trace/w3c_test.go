package trace_test

import (
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/trace"
)

func TestSpanIDIsTheEndOfTheRowsID(t *testing.T) {
	t.Parallel()
	if got := trace.SpanID("01940f5e-7c1a-7abc-9DEF-0123456789ab"); got != "9def0123456789ab" {
		t.Errorf("SpanID = %s", got)
	}
	for _, parts := range [][]string{{"no uuid"}, {""}, {"01940f5e-7c1a-7abc-0000-000000000000"}, {"a", "b"}} {
		got := trace.SpanID(parts...)
		if len(got) != 16 || strings.Trim(got, "0123456789abcdef") != "" || strings.Trim(got, "0") == "" {
			t.Errorf("SpanID(%q) = %q", parts, got)
		}
	}
	if trace.SpanID("a", "b") == trace.SpanID("a", "c") {
		t.Error("different parts have one span id")
	}
}

func TestTraceparentNamesTheInnermostSpan(t *testing.T) {
	t.Parallel()
	const activity, execution = "01940f5e-7c1a-7abc-9def-0123456789ab", "01940f5e-7c1a-7abc-8aaa-0123456789ab"
	span := trace.Span{TraceID: good, ExecutionID: execution, ActivityID: activity}
	if got, want := trace.Traceparent(trace.With(t.Context(), span)), "00-"+good.OTel()+"-9def0123456789ab-01"; got != want {
		t.Errorf("in an activity %q, want %q", got, want)
	}
	span.ActivityID = ""
	if got, want := trace.Traceparent(trace.With(t.Context(), span)), "00-"+good.OTel()+"-8aaa0123456789ab-01"; got != want {
		t.Errorf("in an execution %q, want %q", got, want)
	}
	span.ExecutionID = ""
	if _, ok := trace.ParseTraceparent(trace.Traceparent(trace.With(t.Context(), span))); !ok {
		t.Error("a trace alone has no valid traceparent")
	}
	if got := trace.Traceparent(t.Context()); got != "" {
		t.Errorf("without a trace %q", got)
	}
}

func TestParseTraceparent(t *testing.T) {
	t.Parallel()
	const id, span = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
	for header, want := range map[string]bool{
		"00-" + id + "-" + span + "-01":                           true,
		"00-" + id + "-" + span + "-00":                           true,
		"cc-" + id + "-" + span + "-01-what.a.later.version.adds": true,
		"cc-" + id + "-" + span + "-01x":                          false,
		"00-" + id + "-" + span + "-01-more":                      false,
		"ff-" + id + "-" + span + "-01":                           false,
		"00-" + strings.ToUpper(id) + "-" + span + "-01":          false,
		"00-" + strings.Repeat("0", 32) + "-" + span + "-01":      false,
		"00-" + id + "-" + strings.Repeat("0", 16) + "-01":        false,
		"00_" + id + "-" + span + "-01":                           false,
		"":                                                        false, "00": false, "cc-" + id + "-" + span + "-01-" + strings.Repeat("a", 200): false,
	} {
		got, ok := trace.ParseTraceparent(header)
		if ok != want || ok && (got.TraceID != id || got.SpanID != span || got.Sampled != strings.Contains(header, "-01")) {
			t.Errorf("ParseTraceparent(%q) = %+v, %v, want %v", header, got, ok, want)
		}
	}
}

func FuzzParseTraceparent(f *testing.F) {
	f.Add("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")
	f.Fuzz(func(t *testing.T, header string) {
		got, ok := trace.ParseTraceparent(header)
		if ok && (len(got.TraceID) != 32 || len(got.SpanID) != 16) {
			t.Errorf("%q gives %+v", header, got)
		}
	})
}
