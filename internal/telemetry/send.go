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
	ended    *ended
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
	out := &sender{receiver: otlptracehttp.NewUnstarted(options...), ended: &ended{}}
	out.provider = sdktrace.NewTracerProvider(
		sdktrace.WithIDGenerator(given{}), sdktrace.WithSampler(s.sampler), sdktrace.WithSpanProcessor(out.ended),
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
	for _, one := range spans {
		s.make(ctx, one)
	}
	made := s.ended.take()
	if len(made) == 0 {
		return 0, nil
	}
	return len(made), s.receiver.ExportSpans(ctx, made)
}

// make begins and ends one span, which adds it to the ended spans.
func (s *sender) make(ctx context.Context, one span) {
	ids := ids{traceID(one.trace.OTel()), spanID(one.id)}
	ctx = context.WithValue(ctx, idsKey{}, ids)
	if one.parent != "" {
		ctx = oteltrace.ContextWithSpanContext(ctx, oteltrace.NewSpanContext(oteltrace.SpanContextConfig{
			TraceID: ids.trace, SpanID: spanID(one.parent), TraceFlags: oteltrace.FlagsSampled,
		}))
	}
	_, made := s.tracer.Start(ctx, one.name, oteltrace.WithTimestamp(one.start), oteltrace.WithSpanKind(one.kind),
		oteltrace.WithAttributes(one.attributes...), oteltrace.WithLinks(links(one.links)...))
	if one.failed {
		made.SetStatus(codes.Error, one.message)
	}
	made.End(oteltrace.WithTimestamp(one.end))
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

// given returns the given ids, which follow from the rows.
type given struct{}

// NewIDs returns the ids of a root.
func (given) NewIDs(ctx context.Context) (oteltrace.TraceID, oteltrace.SpanID) {
	got, _ := ctx.Value(idsKey{}).(ids)
	return got.trace, got.span
}

// NewSpanID serves spans without a given id.
func (given) NewSpanID(ctx context.Context, _ oteltrace.TraceID) oteltrace.SpanID {
	got, _ := ctx.Value(idsKey{}).(ids)
	return got.span
}

// ended collects the spans of one pass. Only the goroutine of the pass uses it.
type ended struct{ spans []sdktrace.ReadOnlySpan }

func (e *ended) OnStart(context.Context, sdktrace.ReadWriteSpan) {}
func (e *ended) OnEnd(s sdktrace.ReadOnlySpan)                   { e.spans = append(e.spans, s) }
func (e *ended) Shutdown(context.Context) error                  { return nil }
func (e *ended) ForceFlush(context.Context) error                { return nil }

func (e *ended) take() []sdktrace.ReadOnlySpan {
	spans := e.spans
	e.spans = nil
	return spans
}
