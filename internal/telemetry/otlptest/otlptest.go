// Package otlptest receives traces in tests: OTLP over HTTP in protobuf, as a collector does.
//
// It stores every acknowledged span, fails the test for a request that violates the protocol, and can return errors.
// [Check] reports whether spans form a complete trace.
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

// Span is a span as the receiver got it.
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
	fail     func(n int) int // the status of request n; 0 to accept it
}

// New starts a receiver. The end of the test stops it.
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

// URL returns the value for OTEL_EXPORTER_OTLP_ENDPOINT.
func (s *Server) URL() string { return s.http.URL }

// Fail sets the status of the answer to request n, counted from 0. Status 0 accepts the request.
func (s *Server) Fail(with func(n int) int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fail = with
}

// Requests returns the headers of all requests, including failed ones.
func (s *Server) Requests() []http.Header {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.requests)
}

// Trace returns the spans of a trace, or of all traces if id is empty, by start.
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

func received(span *wire.Span, resource map[string]any) Span {
	out := Span{
		TraceID: hex.EncodeToString(span.GetTraceId()), ID: hex.EncodeToString(span.GetSpanId()),
		Parent: hex.EncodeToString(span.GetParentSpanId()),
		Name:   span.GetName(), Kind: span.GetKind().String(), Start: time.Unix(0, int64(span.GetStartTimeUnixNano())).UTC(),
		End: time.Unix(0, int64(span.GetEndTimeUnixNano())).UTC(), Attributes: attributes(span.GetAttributes()),
		Resource: resource,
		Failed:   span.GetStatus().GetCode() == wire.Status_STATUS_CODE_ERROR, Message: span.GetStatus().GetMessage(),
	}
	for _, l := range span.GetLinks() {
		out.Links = append(out.Links, hex.EncodeToString(l.GetTraceId())+"-"+hex.EncodeToString(l.GetSpanId()))
	}
	return out
}

func attributes(list []*common.KeyValue) map[string]any {
	values := map[string]any{}
	for _, kv := range list {
		switch v := kv.GetValue().GetValue().(type) {
		case *common.AnyValue_StringValue:
			values[kv.GetKey()] = v.StringValue
		case *common.AnyValue_IntValue:
			values[kv.GetKey()] = v.IntValue
		case *common.AnyValue_DoubleValue:
			values[kv.GetKey()] = v.DoubleValue
		case *common.AnyValue_BoolValue:
			values[kv.GetKey()] = v.BoolValue
		default:
			values[kv.GetKey()] = fmt.Sprint(v)
		}
	}
	return values
}

// Check returns the faults of one trace's spans; none for a complete trace. A complete trace has one root, unique ids,
// and the parent of each span. A span ends after it begins. It lies within its parent, unless it is a detached child.
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
