package telemetry

import (
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"strings"
	"time"

	sdktrace "go.opentelemetry.io/otel/sdk/trace"
)

// Settings configure the receiver of spans, by the standard variables of OpenTelemetry. The zero value sends nothing.
type Settings struct {
	Endpoint   string // the whole URL of the POST; empty sends nothing
	Headers    map[string]string
	Timeout    time.Duration // of a request
	JSON       bool          // http/json in place of http/protobuf
	Gzip       bool
	Service    string
	Attributes map[string]string // of the resource
	Content    bool              // send messages, arguments and results too, redacted
	sampler    sdktrace.Sampler
}

// Load reads the settings. It reports all errors, one line each. Without an endpoint it ignores all other variables.
func Load(environ map[string]string) (Settings, error) {
	get := func(name string) string { return strings.TrimSpace(environ[name]) }
	lookup := func(name string) (string, string) { // of traces, or of all signals
		if traces := "OTEL_EXPORTER_OTLP_TRACES_" + name; get(traces) != "" {
			return traces, get(traces)
		}
		return "OTEL_EXPORTER_OTLP_" + name, get("OTEL_EXPORTER_OTLP_" + name)
	}
	s := Settings{Service: "lanekeeper", Timeout: 10 * time.Second}
	var errs []error
	check := func(name string, err error) {
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", name, err))
		}
	}
	name, address := lookup("ENDPOINT")
	off := strings.EqualFold(get("OTEL_SDK_DISABLED"), "true") || get("OTEL_TRACES_EXPORTER") == "none"
	if address == "" || off {
		return Settings{}, nil
	}
	var err error
	s.Endpoint, err = endpoint(address, name == "OTEL_EXPORTER_OTLP_ENDPOINT")
	check(name, err)
	if e := get("OTEL_TRACES_EXPORTER"); e != "" && e != "otlp" {
		check("OTEL_TRACES_EXPORTER", fmt.Errorf("%q is not supported; set otlp or none", e))
	}
	name, text := lookup("PROTOCOL")
	s.JSON, err = protocol(text)
	check(name, err)
	name, text = lookup("COMPRESSION")
	if s.Gzip = text == "gzip"; text != "" && text != "gzip" && text != "none" {
		check(name, fmt.Errorf("%q is not supported; set gzip or none", text))
	}
	name, text = lookup("TIMEOUT")
	s.Timeout, err = milliseconds(text, s.Timeout)
	check(name, err)
	name, text = lookup("HEADERS")
	s.Headers, err = pairs(text)
	check(name, err)
	s.Attributes, err = pairs(get("OTEL_RESOURCE_ATTRIBUTES"))
	check("OTEL_RESOURCE_ATTRIBUTES", err)
	for _, named := range []string{s.Attributes["service.name"], get("OTEL_SERVICE_NAME")} {
		if named != "" {
			s.Service = named
		}
	}
	s.sampler, err = sampler(get("OTEL_TRACES_SAMPLER"), get("OTEL_TRACES_SAMPLER_ARG"))
	check("OTEL_TRACES_SAMPLER", err)
	s.Content = strings.EqualFold(get(captureContent), "true")
	return s, errors.Join(errs...)
}

// endpoint returns the URL of the POST. The variable for all signals lacks the path for traces.
func endpoint(address string, shared bool) (string, error) {
	u, err := url.Parse(address)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return "", errors.New("not a URL of http or https; set for example http://localhost:4318")
	}
	if shared {
		return u.JoinPath("v1", "traces").String(), nil
	}
	return u.String(), nil
}

func protocol(text string) (json bool, err error) {
	switch text {
	case "", "http/protobuf":
		return false, nil
	case "http/json":
		return true, nil
	}
	return false, fmt.Errorf("%q is not supported; set http/protobuf, which receivers take at port 4318", text)
}

func milliseconds(text string, standard time.Duration) (time.Duration, error) {
	if text == "" {
		return standard, nil
	}
	n, err := strconv.Atoi(text)
	if err != nil || n <= 0 || n > 600_000 {
		return standard, fmt.Errorf("%q is not a number of milliseconds from 1 to 600000", text)
	}
	return time.Duration(n) * time.Millisecond, nil
}

// pairs reads name=value,name=value with percent-encoded values. Errors do not repeat the text, because it may be a
// secret.
func pairs(text string) (map[string]string, error) {
	values := map[string]string{}
	for pair := range strings.SplitSeq(text, ",") {
		if strings.TrimSpace(pair) == "" {
			continue
		}
		name, value, ok := strings.Cut(pair, "=")
		decoded, err := url.PathUnescape(strings.TrimSpace(value))
		if name = strings.TrimSpace(name); !ok || name == "" || err != nil {
			return nil, errors.New("not a list of name=value,name=value with percent-encoded values")
		}
		values[name] = decoded
	}
	return values, nil
}

// sampler decides by the trace id alone, so every process makes the same decision for a trace.
func sampler(name, arg string) (sdktrace.Sampler, error) {
	switch strings.TrimPrefix(name, "parentbased_") {
	case "", "always_on":
		return sdktrace.AlwaysSample(), nil
	case "always_off":
		return sdktrace.NeverSample(), nil
	case "traceidratio":
		share := 1.0
		if arg != "" {
			var err error
			if share, err = strconv.ParseFloat(arg, 64); err != nil || !(share >= 0 && share <= 1) {
				return nil, fmt.Errorf("OTEL_TRACES_SAMPLER_ARG is %q, not a number from 0 to 1", arg)
			}
		}
		return sdktrace.TraceIDRatioBased(share), nil
	}
	return nil, fmt.Errorf("%q is not supported; set always_on, always_off or traceidratio", name)
}
