package telemetry_test

import (
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/telemetry"
)

func TestLoad(t *testing.T) {
	const endpoint = "OTEL_EXPORTER_OTLP_ENDPOINT"
	standard := telemetry.Settings{
		Endpoint: "http://c:4318/v1/traces", Headers: map[string]string{}, Timeout: 10 * time.Second, Service: "lanekeeper",
		Attributes: map[string]string{},
	}
	with := func(change func(*telemetry.Settings)) telemetry.Settings {
		s := standard
		change(&s)
		return s
	}
	for name, c := range map[string]struct {
		environ map[string]string
		want    telemetry.Settings
		wrong   []string // variables that the error names
	}{
		"nothing": {nil, telemetry.Settings{}, nil},
		"disabled": {
			map[string]string{endpoint: "http://c:4318", "OTEL_SDK_DISABLED": "TRUE"},
			telemetry.Settings{},
			nil,
		},
		"no exporter": {
			map[string]string{endpoint: "http://c:4318", "OTEL_TRACES_EXPORTER": "none"},
			telemetry.Settings{},
			nil,
		},
		"off, so not read":    {map[string]string{"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, telemetry.Settings{}, nil},
		"endpoint":            {map[string]string{endpoint: "http://c:4318"}, standard, nil},
		"endpoint with slash": {map[string]string{endpoint: "http://c:4318/"}, standard, nil},
		"of traces": {
			map[string]string{endpoint: "http://other", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "https://c/in?x=1"},
			with(func(s *telemetry.Settings) { s.Endpoint = "https://c/in?x=1" }), nil,
		},
		"all": {
			map[string]string{
				endpoint: "http://c:4318", "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20x, a = b",
				"OTEL_EXPORTER_OTLP_TIMEOUT":     "2500",
				"OTEL_EXPORTER_OTLP_COMPRESSION": "gzip", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/json",
				"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
				"OTEL_RESOURCE_ATTRIBUTES":    "service.name=a,deployment.environment=prod", "OTEL_SERVICE_NAME": "b",
				"OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT": "true",
			},
			with(func(s *telemetry.Settings) {
				s.Headers = map[string]string{"authorization": "Bearer x", "a": "b"}
				s.Timeout, s.Gzip, s.JSON, s.Service, s.Content = 2500*time.Millisecond, true, true, "b", true
				s.Attributes = map[string]string{"service.name": "a", "deployment.environment": "prod"}
			}), nil,
		},
		"all wrong": {
			map[string]string{
				endpoint: "c:4318", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_EXPORTER_OTLP_HEADERS": "secret",
				"OTEL_EXPORTER_OTLP_TIMEOUT":     "10s",
				"OTEL_EXPORTER_OTLP_COMPRESSION": "zstd", "OTEL_TRACES_SAMPLER": "jaeger_remote", "OTEL_TRACES_EXPORTER": "zipkin",
				"OTEL_RESOURCE_ATTRIBUTES": "a=%zz",
			},
			telemetry.Settings{},
			[]string{
				endpoint, "OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_COMPRESSION",
				"OTEL_EXPORTER_OTLP_TIMEOUT", "OTEL_EXPORTER_OTLP_HEADERS", "OTEL_RESOURCE_ATTRIBUTES", "OTEL_TRACES_SAMPLER",
			},
		},
		"ratio": {
			map[string]string{endpoint: "http://c:4318", "OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "2"},
			telemetry.Settings{},
			[]string{"OTEL_TRACES_SAMPLER"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := telemetry.Load(c.environ)
			if err != nil {
				var named []string
				for line := range strings.SplitSeq(err.Error(), "\n") {
					variable, _, _ := strings.Cut(line, ":")
					named = append(named, variable)
				}
				diff := cmp.Diff(c.wrong, named)
				assert.Truef(t, diff == "" && !strings.Contains(err.Error(), "secret"), "the error is\n%v\n%s", err, diff)
				return
			}
			diff := cmp.Diff(c.want, got, cmpopts.IgnoreUnexported(telemetry.Settings{}))
			assert.Truef(t, diff == "" && c.wrong == nil, "(-want +got):\n%s", diff)
		})
	}
}

func TestTheVariablesAreDocumented(t *testing.T) {
	source, err := os.ReadFile("settings.go")
	require.NoError(t, err)
	page, err := os.ReadFile("../../docs/settings.md")
	require.NoError(t, err)
	names := regexp.MustCompile(`(get|either)\("?(\w+)"?\)`).FindAllStringSubmatch(string(source), -1)
	assert.Truef(t, len(names) >= 13, "the source has only the variables %q", names)
	for _, name := range names {
		variable := name[2]
		switch {
		case name[1] == "either":
			variable = "OTEL_EXPORTER_OTLP_" + variable
		case variable == "captureContent":
			variable = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
		case variable == "own":
			variable = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
		}
		assert.Contains(t, string(page), "| `"+variable+"` |")
	}
}
