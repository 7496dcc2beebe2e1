package telemetry

import (
	"context"
	"crypto/rand"
	"fmt"
	"os"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	oteltrace "go.opentelemetry.io/otel/trace"

	"github.com/lanekeeper/lanekeeper/trace"
)

// sender converts spans to those of the OpenTelemetry SDK. The SDK samples and bounds the spans and speaks the
// protocol.
type sender struct {
	receiver sdktrace.SpanExporter
	provider *sdktrace.TracerProvider
	tracer   oteltrace.Tracer
	ended    *spanCollector
}

// newSender makes a sender. It opens no connection yet.
func newSender(s Settings, version string) *sender {
	options := []otlptracehttp.Option{
		otlptracehttp.WithEndpointURL(s.Endpoint), otlptracehttp.WithTimeout(s.Timeout), otlptracehttp.WithHeaders(s.Headers),
		// no retry: the position stays, and the next pass sends the batch again
		otlptracehttp.WithRetry(otlptracehttp.RetryConfig{Enabled: false}),
		otlptracehttp.WithCompression(otlptracehttp.NoCompression),
	}
	if s.Gzip {
		options = append(options, otlptracehttp.WithCompression(otlptracehttp.GzipCompression))
	}
	if s.JSON {
		options = append(options, otlptracehttp.WithEncoding(otlptracehttp.EncodingJSON))
	}
	out := &sender{receiver: otlptracehttp.NewUnstarted(options...), ended: &spanCollector{}}
	out.provider = sdktrace.NewTracerProvider(
		sdktrace.WithIDGenerator(fixedIDs{}), sdktrace.WithSampler(s.sampler), sdktrace.WithSpanProcessor(out.ended),
		sdktrace.WithResource(s.resource(version)), sdktrace.WithRawSpanLimits(sdktrace.SpanLimits{
			AttributeValueLengthLimit: -1, AttributeCountLimit: 128, EventCountLimit: 128, LinkCountLimit: 128,
			AttributePerEventCountLimit: 128, AttributePerLinkCountLimit: 128,
		}))
	out.tracer = out.provider.Tracer("github.com/lanekeeper/lanekeeper", oteltrace.WithInstrumentationVersion(version))
	return out
}

// resource describes the sending process. Any process on the database may send, not only the process that did the work.
func (s Settings) resource(version string) *resource.Resource {
	host, _ := os.Hostname() // without a host name, the random part of the id is unique
	about := []attribute.KeyValue{
		attribute.String("service.version", version),
		attribute.String("service.instance.id", fmt.Sprintf("%s-%d-%s", host, os.Getpid(), rand.Text()[:8])),
		attribute.String("telemetry.sdk.name", "opentelemetry"), attribute.String("telemetry.sdk.language", "go"),
	}
	for name, value := range s.Attributes {
		about = append(about, attribute.String(name, value)) // the last of a name counts
	}
	return resource.NewSchemaless(append(about, attribute.String("service.name", s.Service))...)
}

// send sends spans. It returns the number of spans after sampling, once the receiver has accepted them.
func (s *sender) send(ctx context.Context, spans []span) (int, error) {
	for _, sp := range spans {
		s.convert(ctx, sp)
	}
	ended := s.ended.drain()
	if len(ended) == 0 {
		return 0, nil
	}
	return len(ended), s.receiver.ExportSpans(ctx, ended)
}

// convert starts and ends one span of the SDK, so the span processor collects it.
func (s *sender) convert(ctx context.Context, sp span) {
	ids := ids{traceID(sp.trace.OTel()), spanID(sp.id)}
	ctx = context.WithValue(ctx, idsKey{}, ids)
	if sp.parent != "" {
		ctx = oteltrace.ContextWithSpanContext(ctx, oteltrace.NewSpanContext(oteltrace.SpanContextConfig{
			TraceID: ids.trace, SpanID: spanID(sp.parent), TraceFlags: oteltrace.FlagsSampled,
		}))
	}
	_, otelSpan := s.tracer.Start(ctx, sp.name, oteltrace.WithTimestamp(sp.start), oteltrace.WithSpanKind(sp.kind),
		oteltrace.WithAttributes(sp.attributes...), oteltrace.WithLinks(links(sp.links)...))
	if sp.failed {
		otelSpan.SetStatus(codes.Error, sp.message)
	}
	otelSpan.End(oteltrace.WithTimestamp(sp.end))
}

func links(all []trace.Remote) []oteltrace.Link {
	list := make([]oteltrace.Link, len(all))
	for i, r := range all {
		var flags oteltrace.TraceFlags
		list[i].SpanContext = oteltrace.NewSpanContext(oteltrace.SpanContextConfig{
			TraceID: traceID(r.TraceID), SpanID: spanID(r.SpanID), TraceFlags: flags.WithSampled(r.Sampled), Remote: true,
		})
	}
	return list
}

// ids are the ids of the next span.
type ids struct {
	trace oteltrace.TraceID
	span  oteltrace.SpanID
}

type idsKey struct{}

// fixedIDs is an IDGenerator that returns the ids in the context. They are derived from the rows.
type fixedIDs struct{}

// NewIDs returns the ids of a root.
func (fixedIDs) NewIDs(ctx context.Context) (oteltrace.TraceID, oteltrace.SpanID) {
	v, _ := ctx.Value(idsKey{}).(ids)
	return v.trace, v.span
}

// NewSpanID returns the id of a span with a parent.
func (fixedIDs) NewSpanID(ctx context.Context, _ oteltrace.TraceID) oteltrace.SpanID {
	v, _ := ctx.Value(idsKey{}).(ids)
	return v.span
}

// spanCollector collects the spans of one pass. Only the goroutine of the pass uses it.
type spanCollector struct{ spans []sdktrace.ReadOnlySpan }

func (e *spanCollector) OnStart(context.Context, sdktrace.ReadWriteSpan) {}
func (e *spanCollector) OnEnd(s sdktrace.ReadOnlySpan)                   { e.spans = append(e.spans, s) }
func (e *spanCollector) Shutdown(context.Context) error                  { return nil }
func (e *spanCollector) ForceFlush(context.Context) error                { return nil }

func (e *spanCollector) drain() []sdktrace.ReadOnlySpan {
	spans := e.spans
	e.spans = nil
	return spans
}
