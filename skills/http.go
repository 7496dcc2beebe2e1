package skills

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"slices"
	"strings"
	"sync/atomic"
	"unicode/utf8"

	"golang.org/x/text/encoding/htmlindex"

	"github.com/lanekeeper/lanekeeper/internal/exactjson"
	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/trace"
)

const userAgent = "lanekeeper"

// httpHandler calls a service. An argument replaces {name} in the path and query of the URL, escaped. The other
// arguments become query parameters (GET, HEAD, DELETE) or a JSON body.
type httpHandler struct {
	method        string
	url           string
	headers       map[string]string
	body          any // template of the body; nil for the object of the other arguments
	urlArguments  []string
	bodyArguments []string
}

func (h httpHandler) ready(*Registry) error { return nil }

// call sends the request of the skill and decodes the response. Redaction removes the values of header variables from
// its result and errors.
func (h httpHandler) call(ctx context.Context, r *Registry, c Call, args map[string]any) (any, error) {
	headers, secrets, err := h.resolveHeaders(r.getenv)
	if err != nil {
		return nil, err
	}
	redactText := redact.Secrets(secrets)
	var sent atomic.Bool
	ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{WroteHeaders: func() { sent.Store(true) }})
	request, err := h.request(ctx, args)
	if err != nil {
		return nil, err
	}
	for name, value := range headers {
		request.Header.Set(name, value)
	}
	if c.IdempotencyKey != "" {
		request.Header.Set("Idempotency-Key", c.IdempotencyKey)
	}
	response, err := r.client.Do(request)
	if err != nil {
		return nil, classifyHTTPError(request, sent.Load(), redactText, err)
	}
	defer func() { _ = response.Body.Close() }()
	body, err := io.ReadAll(io.LimitReader(response.Body, maxResultBytes+1))
	if err != nil {
		return nil, classifyHTTPError(request, true, redactText, err)
	}
	contentType := response.Header.Get("Content-Type")
	if len(body) <= maxResultBytes {
		body = toUTF8(contentType, body)
	}
	if response.StatusCode >= 300 {
		class := ClassHTTPStatus
		if h.acts() && mayHaveActed(response.StatusCode) {
			class = ClassNoAnswer
		}
		return nil, newCallError(class, "%s answered %s: %s", requestTarget(request), response.Status,
			excerpt(redactText(string(body))))
	}
	if len(body) > maxResultBytes {
		return nil, newCallError(ClassTooLarge, "%s answered with more than %d bytes", requestTarget(request), maxResultBytes)
	}
	return decodeResponse(contentType, body, redactText)
}

// request builds the request without the configured headers. Arguments that the URL does not use go into the body, or
// into the query of a method without one. A body template replaces the arguments.
func (h httpHandler) request(ctx context.Context, args map[string]any) (*http.Request, error) {
	address, err := h.fill(args)
	if err != nil {
		return nil, err
	}
	rest := make(map[string]any, len(args))
	for name, value := range args {
		if !slices.Contains(h.urlArguments, name) {
			rest[name] = value
		}
	}
	var body io.Reader
	if h.body != nil || carriesBody(h.method) {
		var payload any = rest
		if h.body != nil {
			payload, _ = fillTemplate(h.body, args)
		}
		raw, err := json.Marshal(payload)
		if err != nil {
			return nil, newCallError(ClassHandler, "write the request: %s", err)
		}
		body = bytes.NewReader(raw)
	} else {
		address.RawQuery = withArguments(address.RawQuery, rest)
	}
	request, err := http.NewRequestWithContext(ctx, h.method, address.String(), body)
	if err != nil {
		return nil, newCallError(ClassHandler, "write the request: %s", err)
	}
	request.Header.Set("User-Agent", userAgent)
	request.Header.Set("Accept", "application/json, text/*;q=0.9")
	if parent := trace.Traceparent(ctx); parent != "" {
		request.Header.Set("Traceparent", parent)
	}
	if body != nil {
		request.Header.Set("Content-Type", "application/json")
	}
	return request, nil
}

// acts reports whether the method may change something.
func (h httpHandler) acts() bool { return h.method != http.MethodGet && h.method != http.MethodHead }

// mayHaveActed reports whether a request may have taken effect although it has this status: a gateway's timeout shows
// nothing about the service behind the gateway.
func mayHaveActed(status int) bool {
	switch status {
	case http.StatusRequestTimeout, http.StatusInternalServerError, http.StatusBadGateway, http.StatusGatewayTimeout:
		return true
	}
	return false
}

func carriesBody(method string) bool {
	return method == http.MethodPost || method == http.MethodPut || method == http.MethodPatch
}

// classifyHTTPError classifies an error of the connection. Its message omits the URL's query, which contains arguments.
func classifyHTTPError(request *http.Request, sent bool, redactText func(string) string, err error) error {
	if ue, ok := errors.AsType[*url.Error](err); ok {
		err = ue.Err
	}
	if ce, ok := errors.AsType[*CallError](err); ok {
		return newCallError(ce.Class, "%s: %s", requestTarget(request), redactText(ce.Message))
	}
	class := ClassNetwork
	if sent {
		class = ClassNoAnswer
	}
	return newCallError(class, "%s: %s", requestTarget(request), redactText(err.Error()))
}

func requestTarget(request *http.Request) string {
	return request.Method + " " + request.URL.Scheme + "://" + request.URL.Host + request.URL.EscapedPath()
}

func excerpt(text string) string {
	const maxBytes = 500
	return strings.ToValidUTF8(strings.Join(strings.Fields(text[:min(len(text), maxBytes)]), " "), "")
}

// toUTF8 converts a body from the charset of its content type. It returns a body without a known charset unchanged.
func toUTF8(contentType string, body []byte) []byte {
	_, parameters, _ := mime.ParseMediaType(contentType)
	charset, err := htmlindex.Get(parameters["charset"])
	if err != nil {
		return body
	}
	if converted, err := charset.NewDecoder().Bytes(body); err == nil {
		return converted
	}
	return body
}

// decodeResponse returns the JSON value of a body, or its text. It returns nil for an empty body.
func decodeResponse(contentType string, body []byte, redactText func(string) string) (any, error) {
	if len(bytes.TrimSpace(body)) == 0 {
		return nil, nil
	}
	kind, _, _ := mime.ParseMediaType(contentType)
	isJSON := kind == "" || kind == "application/json" || strings.HasSuffix(kind, "+json")
	if isJSON || kind == "text/plain" {
		if value, err := exactjson.Decode(body); err == nil && json.Valid(body) {
			return redact.Known(value, redactText), nil
		}
	}
	textual := isJSON || strings.HasPrefix(kind, "text/") || strings.HasSuffix(kind, "xml") ||
		kind == "application/x-ndjson"
	if !textual || !utf8.Valid(body) && kind == "" {
		return nil, newCallError(ClassNoAnswer, "the answer is %q, neither JSON nor text", contentType)
	}
	return redactText(strings.ToValidUTF8(string(body), "\uFFFD")), nil
}

// resolveHeaders fills environment variables into the headers. It returns their values as secrets. A missing variable
// is an error of [NewConfigError].
func (h httpHandler) resolveHeaders(
	getenv func(string) string,
) (headers map[string]string, secrets []string, err error) {
	headers = make(map[string]string, len(h.headers))
	var missing []string
	for name, template := range h.headers {
		headers[name] = envRegexp.ReplaceAllStringFunc(template, func(reference string) string {
			variable := envRegexp.FindStringSubmatch(reference)[1]
			value := getenv(variable)
			if value == "" {
				missing = append(missing, variable)
				return ""
			}
			secrets = append(secrets, value)
			return value
		})
		if strings.ContainsAny(headers[name], "\r\n\x00") {
			return nil, nil, newCallError(ClassHandler,
				"header %s has a line break once its environment variables are filled in", name)
		}
	}
	if len(missing) > 0 {
		slices.Sort(missing)
		return nil, nil, NewConfigError("set the environment variable %s, which the headers of this skill refer to",
			strings.Join(slices.Compact(missing), " and "))
	}
	return headers, secrets, nil
}

// scalarText encodes a value for a URL.
func scalarText(value any) string {
	switch v := value.(type) {
	case nil:
		return ""
	case string:
		return v
	case json.Number:
		return v.String()
	case bool:
		return fmt.Sprint(v)
	}
	raw, err := json.Marshal(value)
	if err != nil {
		return fmt.Sprint(value)
	}
	return string(raw)
}
