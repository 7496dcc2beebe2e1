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
	"net/url"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/trace"
)

const userAgent = "lanekeeper"

// httpHandler calls a service. {name} in the path and the query of its URL is an argument, escaped;
// the other arguments travel as query parameters (GET, HEAD, DELETE) or as a JSON object.
type httpHandler struct {
	method  string
	url     string
	headers map[string]string
	body    any // a template in place of that object; nil for none
	inURL   []string
	inBody  []string
}

func (h httpHandler) ready(*Registry) error { return nil }

func (h httpHandler) call(ctx context.Context, r *Registry, c Call, args map[string]any) (any, error) {
	headers, secrets, err := h.resolveHeaders(r.getenv)
	if err != nil {
		return nil, err
	}
	hide := hider(secrets)
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
		return nil, httpFailure(request, hide, err)
	}
	defer func() { _ = response.Body.Close() }() // only read from: nothing is lost
	body, err := io.ReadAll(io.LimitReader(response.Body, maxResult+1))
	if err != nil {
		return nil, httpFailure(request, hide, err)
	}
	if response.StatusCode >= 300 {
		return nil, failure(ClassHTTPStatus, "%s answered %s: %s", target(request), response.Status, excerpt(hide(string(body))))
	}
	if len(body) > maxResult {
		return nil, failure(ClassTooLarge, "%s answered with more than %d bytes", target(request), maxResult)
	}
	return readAnswer(response.Header.Get("Content-Type"), body, hide)
}

func (h httpHandler) request(ctx context.Context, args map[string]any) (*http.Request, error) {
	address, err := h.fill(args)
	if err != nil {
		return nil, err
	}
	rest := make(map[string]any, len(args))
	for name, value := range args {
		if !slices.Contains(h.inURL, name) {
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
			return nil, failure(ClassHandler, "write the request: %s", err)
		}
		body = bytes.NewReader(raw)
	} else {
		query := address.Query()
		for name, value := range rest {
			query.Set(name, scalarText(value))
		}
		address.RawQuery = query.Encode()
	}
	request, err := http.NewRequestWithContext(ctx, h.method, address.String(), body)
	if err != nil {
		return nil, failure(ClassHandler, "write the request: %s", err)
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

func carriesBody(method string) bool {
	return method == http.MethodPost || method == http.MethodPut || method == http.MethodPatch
}

// httpFailure gives an error of the connection its class. The URL's query is left out: it has arguments.
func httpFailure(request *http.Request, hide func(string) string, err error) error {
	if ue, ok := errors.AsType[*url.Error](err); ok {
		err = ue.Err
	}
	if ce, ok := errors.AsType[*CallError](err); ok {
		return failure(ce.Class, "%s: %s", target(request), hide(ce.Message))
	}
	return failure(ClassNetwork, "%s: %s", target(request), hide(err.Error()))
}

func target(request *http.Request) string {
	return request.Method + " " + request.URL.Scheme + "://" + request.URL.Host + request.URL.EscapedPath()
}

func excerpt(text string) string {
	const most = 500
	return strings.ToValidUTF8(strings.Join(strings.Fields(text[:min(len(text), most)]), " "), "")
}

// readAnswer is the JSON value of a body, or its text; nil when there is none.
func readAnswer(contentType string, body []byte, hide func(string) string) (any, error) {
	if len(bytes.TrimSpace(body)) == 0 {
		return nil, nil
	}
	kind, _, _ := mime.ParseMediaType(contentType)
	isJSON := kind == "" || kind == "application/json" || strings.HasSuffix(kind, "+json")
	if isJSON || kind == "text/plain" {
		d := json.NewDecoder(bytes.NewReader(body))
		d.UseNumber()
		var value any
		if err := d.Decode(&value); err == nil && !d.More() {
			return redact.Known(value, hide), nil
		}
	}
	textual := isJSON || strings.HasPrefix(kind, "text/") || strings.HasSuffix(kind, "xml") || kind == "application/x-ndjson"
	if !textual || !utf8.Valid(body) && kind == "" {
		return nil, failure(ClassHandler, "the answer is %q, neither JSON nor text", contentType)
	}
	return hide(strings.ToValidUTF8(string(body), "\uFFFD")), nil
}

// hider blots out secrets that a service repeats.
func hider(secrets []string) func(string) string {
	pairs := make([]string, 0, 2*len(secrets))
	for _, secret := range secrets {
		pairs = append(pairs, secret, "[secret]")
	}
	return strings.NewReplacer(pairs...).Replace
}

func (h httpHandler) resolveHeaders(getenv func(string) string) (headers map[string]string, secrets []string, err error) {
	headers = make(map[string]string, len(h.headers))
	var missing []string
	for name, template := range h.headers {
		headers[name] = envReference.ReplaceAllStringFunc(template, func(reference string) string {
			variable := envReference.FindStringSubmatch(reference)[1]
			value := getenv(variable)
			if value == "" {
				missing = append(missing, variable)
				return ""
			}
			secrets = append(secrets, value)
			return value
		})
		if strings.ContainsAny(headers[name], "\r\n\x00") {
			return nil, nil, failure(ClassHandler, "header %s has a line break once its environment variables are filled in", name)
		}
	}
	if len(missing) > 0 {
		slices.Sort(missing)
		return nil, nil, Misconfigured("set the environment variable %s, which the headers of this skill refer to",
			strings.Join(slices.Compact(missing), " and "))
	}
	return headers, secrets, nil
}

// scalarText is a value as a piece of a URL.
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
