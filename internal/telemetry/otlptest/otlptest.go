// Package otlptest is a receiver of traces for tests: OTLP over HTTP in protobuf, as collectors take it.
//
// It keeps every span that it has acknowledged, refuses what is not as the protocol says, and can be told to fail.
// [Check] says whether spans are a complete and well-formed trace.
package otlptest

import (
	"compress/gzip"
	"encoding/hex"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"testing"
	"time"

	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	common "go.opentelemetry.io/proto/otlp/common/v1"
	wire "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/proto"
)

// Span is a span as it was received.
type Span struct {
	TraceID, ID, Parent string // hex digits; Parent is empty at a root
	Name                string
	Kind                string // of the protocol: SPAN_KIND_INTERNAL, …
	Start, End          time.Time
	Attributes          map[string]any // string, int64, float64 or bool
	Resource            map[string]any
	Links               []string // traceid-spanid
	Failed              bool
	Message             string
}

// Server is the receiver.
type Server struct {
	tb   testing.TB
	http *httptest.Server

	mu       sync.Mutex
	spans    []Span
	requests []http.Header
	fail     func(n int) int // the status of request n, 0 to take it
}

// New starts a receiver, which ends with the test.
func New(tb testing.TB) *Server {
	tb.Helper()
	s := &Server{tb: tb}
	s.http = httptest.NewServer(http.HandlerFunc(s.receive))
	tb.Cleanup(func() {
		s.http.CloseClientConnections()
		s.http.Close()
	})
	return s
}

// URL is what OTEL_EXPORTER_OTLP_ENDPOINT takes.
func (s *Server) URL() string { return s.http.URL }

// Fail has the receiver answer request n, counted from 0, with a status, or take it where that is 0.
func (s *Server) Fail(with func(n int) int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fail = with
}

// Requests are the headers of all requests, also of those that were failed.
func (s *Server) Requests() []http.Header {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.requests)
}

// Trace is what was received of a trace, or of all when id is empty, in the order of the starts.
func (s *Server) Trace(id string) []Span {
	s.mu.Lock()
	defer s.mu.Unlock()
	var spans []Span
	for _, one := range s.spans {
		if id == "" || one.TraceID == id {
			spans = append(spans, one)
		}
	}
	slices.SortStableFunc(spans, func(a, b Span) int { return a.Start.Compare(b.Start) })
	return spans
}

func (s *Server) receive(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := len(s.requests)
	s.requests = append(s.requests, r.Header.Clone())
	if s.fail != nil {
		if status := s.fail(n); status != 0 {
			w.WriteHeader(status)
			return
		}
	}
	if r.Method != http.MethodPost || r.URL.Path != "/v1/traces" ||
		r.Header.Get("Content-Type") != "application/x-protobuf" {
		s.tb.Errorf("the receiver got %s %s with %s", r.Method, r.URL.Path, r.Header.Get("Content-Type"))
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	var body io.Reader = r.Body
	if r.Header.Get("Content-Encoding") == "gzip" {
		unpacked, err := gzip.NewReader(r.Body)
		if err != nil {
			w.WriteHeader(http.StatusBadRequest)
			return
		}
		body = unpacked
	}
	raw, err := io.ReadAll(body)
	if err != nil {
		return // the client was killed
	}
	var request collector.ExportTraceServiceRequest
	if err := proto.Unmarshal(raw, &request); err != nil {
		s.tb.Errorf("the receiver got no request of the protocol: %v", err)
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	for _, group := range request.GetResourceSpans() {
		for _, scope := range group.GetScopeSpans() {
			for _, one := range scope.GetSpans() {
				s.spans = append(s.spans, received(one, attributes(group.GetResource().GetAttributes())))
			}
		}
	}
	answer, _ := proto.Marshal(&collector.ExportTraceServiceResponse{}) // an empty message: cannot fail
	w.Header().Set("Content-Type", "application/x-protobuf")
	_, _ = w.Write(answer)
}

func received(one *wire.Span, resource map[string]any) Span {
	got := Span{
		TraceID: hex.EncodeToString(one.GetTraceId()), ID: hex.EncodeToString(one.GetSpanId()),
		Parent: hex.EncodeToString(one.GetParentSpanId()),
		Name:   one.GetName(), Kind: one.GetKind().String(), Start: time.Unix(0, int64(one.GetStartTimeUnixNano())).UTC(),
		End: time.Unix(0, int64(one.GetEndTimeUnixNano())).UTC(), Attributes: attributes(one.GetAttributes()),
		Resource: resource,
		Failed:   one.GetStatus().GetCode() == wire.Status_STATUS_CODE_ERROR, Message: one.GetStatus().GetMessage(),
	}
	for _, l := range one.GetLinks() {
		got.Links = append(got.Links, hex.EncodeToString(l.GetTraceId())+"-"+hex.EncodeToString(l.GetSpanId()))
	}
	return got
}

func attributes(list []*common.KeyValue) map[string]any {
	got := map[string]any{}
	for _, kv := range list {
		switch v := kv.GetValue().GetValue().(type) {
		case *common.AnyValue_StringValue:
			got[kv.GetKey()] = v.StringValue
		case *common.AnyValue_IntValue:
			got[kv.GetKey()] = v.IntValue
		case *common.AnyValue_DoubleValue:
			got[kv.GetKey()] = v.DoubleValue
		case *common.AnyValue_BoolValue:
			got[kv.GetKey()] = v.BoolValue
		default:
			got[kv.GetKey()] = fmt.Sprint(v)
		}
	}
	return got
}

// Check says what is wrong with the spans of one trace as a whole; nothing when it is complete and well formed: one
// root, every parent there and no id twice, and no span that begins before its parent, or ends before it begins or
// after its parent (but for a child that nobody waited for).
func Check(spans []Span) []string {
	var wrong []string
	byID := map[string]Span{}
	roots := 0
	for _, s := range spans {
		if _, twice := byID[s.ID]; twice {
			wrong = append(wrong, fmt.Sprintf("span %s (%s) came twice", s.ID, s.Name))
		}
		byID[s.ID] = s
		if s.Parent == "" {
			roots++
		}
	}
	if roots != 1 {
		wrong = append(wrong, fmt.Sprintf("there are %d roots", roots))
	}
	for _, s := range spans {
		if s.End.Before(s.Start) {
			wrong = append(wrong, fmt.Sprintf("%s ends before it begins", s.Name))
		}
		above, ok := byID[s.Parent]
		switch {
		case s.Parent == "":
		case !ok:
			wrong = append(wrong, fmt.Sprintf("%s has the parent %s, which is not there", s.Name, s.Parent))
		case s.Start.Before(above.Start), s.End.After(above.End) && s.Attributes["agent.detached"] != true:
			wrong = append(wrong, fmt.Sprintf("%s (%s to %s) is not within %s (%s to %s)", s.Name, s.Start, s.End, above.Name,
				above.Start, above.End))
		}
	}
	return wrong
}
