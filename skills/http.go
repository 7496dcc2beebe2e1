package skills

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"unicode/utf8"

	"golang.org/x/text/encoding/htmlindex"

	"github.com/lanekeeper/lanekeeper/internal/exactjson"
	"github.com/lanekeeper/lanekeeper/internal/fielderr"
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

func (h httpHandler) call(ctx context.Context, r *Registry, c Call, args map[string]any) (any, error) {
	headers, secrets, err := h.resolveHeaders(r.getenv)
	if err != nil {
		return nil, err
	}
	redactText := redactSecrets(secrets)
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
		return nil, classifyHTTPError(request, redactText, err)
	}
	defer func() { _ = response.Body.Close() }()
	body, err := io.ReadAll(io.LimitReader(response.Body, maxResultBytes+1))
	if err != nil {
		return nil, classifyHTTPError(request, redactText, err)
	}
	contentType := response.Header.Get("Content-Type")
	if len(body) <= maxResultBytes {
		body = toUTF8(contentType, body)
	}
	if response.StatusCode >= 300 {
		return nil, newCallError(ClassHTTPStatus, "%s answered %s: %s", requestTarget(request), response.Status,
			excerpt(redactText(string(body))))
	}
	if len(body) > maxResultBytes {
		return nil, newCallError(ClassTooLarge, "%s answered with more than %d bytes", requestTarget(request), maxResultBytes)
	}
	return decodeResponse(contentType, body, redactText)
}

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
		query := address.Query()
		for name, value := range rest {
			query.Set(name, scalarText(value))
		}
		address.RawQuery = query.Encode()
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

func carriesBody(method string) bool {
	return method == http.MethodPost || method == http.MethodPut || method == http.MethodPatch
}

// classifyHTTPError classifies an error of the connection. Its message omits the URL's query, which contains arguments.
func classifyHTTPError(request *http.Request, redactText func(string) string, err error) error {
	if ue, ok := errors.AsType[*url.Error](err); ok {
		err = ue.Err
	}
	if ce, ok := errors.AsType[*CallError](err); ok {
		return newCallError(ce.Class, "%s: %s", requestTarget(request), redactText(ce.Message))
	}
	return newCallError(ClassNetwork, "%s: %s", requestTarget(request), redactText(err.Error()))
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
		return nil, newCallError(ClassHandler, "the answer is %q, neither JSON nor text", contentType)
	}
	return redactText(strings.ToValidUTF8(string(body), "\uFFFD")), nil
}

// redactSecrets returns a function that redacts the secrets in a text.
func redactSecrets(secrets []string) func(string) string {
	pairs := make([]string, 0, 2*len(secrets))
	for _, secret := range secrets {
		pairs = append(pairs, secret, "[secret]")
	}
	return strings.NewReplacer(pairs...).Replace
}

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

type httpConfig struct {
	Method  string            `json:"method"`
	URL     string            `json:"url"`
	Headers map[string]string `json:"headers"`
	Body    any               `json:"body"`
}

var (
	argumentRegexp   = regexp.MustCompile(`\{([a-zA-Z_][a-zA-Z0-9_-]*)\}`)
	envRegexp        = regexp.MustCompile(`\$\{env:([a-zA-Z_][a-zA-Z0-9_]*)\}`)
	headerNameRegexp = regexp.MustCompile("^[a-zA-Z0-9!#$%&'*+.^_`|~-]+$")
	httpMethods      = []string{"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"}
	runtimeHeaders   = []string{
		"Host", "Content-Length", "Transfer-Encoding", "Connection", "Idempotency-Key",
		"Upgrade", "Trailer",
	}
	secretHeaders = []string{"Authorization", "Proxy-Authorization", "Cookie", "X-Api-Key", "Api-Key"}
)

// parseHTTP reads "POST https://host/path/{id}", "https://host/path", or a config with the same.
func parseHTTP(rest string, config json.RawMessage, parameters []string) (handler, fielderr.List) {
	var c httpConfig
	if err := decodeConfig(config, &c); err != nil {
		return nil, []error{err}
	}
	methodField, urlField := "config.method", "config.url"
	if rest != "" {
		urlField = "handler"
		if c.Method == "" {
			methodField = "handler"
		}
	}
	problems := mergeHandlerText(rest, &c)
	h := httpHandler{
		method: strings.ToUpper(cmp.Or(c.Method, http.MethodGet)), url: c.URL,
		headers: c.Headers, body: c.Body,
	}
	problems = append(problems, oneOf(methodField, h.method, httpMethods...)...)
	problems = append(problems, checkURL(urlField, h.url)...)
	problems = append(problems, checkHeaders(h.headers)...)
	h.urlArguments = argumentNames(h.url)
	h.bodyArguments = templateArguments(h.body, nil)
	if h.body != nil && !carriesBody(h.method) && h.method != http.MethodDelete {
		problems.Add("config.body", "a %s request has none", h.method)
	}
	problems = append(problems, h.checkArguments(urlField, parameters)...)
	return h, problems
}

func mergeHandlerText(rest string, c *httpConfig) fielderr.List {
	if rest == "" {
		return nil
	}
	method, address, hasMethod := strings.Cut(rest, " ")
	if !hasMethod {
		method, address = "", rest
	}
	if c.URL != "" || method != "" && c.Method != "" {
		return []error{errors.New("handler: the method or URL is also in config; keep one")}
	}
	c.URL = strings.TrimSpace(address)
	if method != "" {
		c.Method = method
	}
	return nil
}

func checkURL(field, text string) fielderr.List {
	if text == "" {
		return []error{errors.New("config.url: is empty; write http:GET https://host/path as the handler, or set it here")}
	}
	if strings.Contains(text, "${") {
		return []error{fmt.Errorf("%s: secrets are only taken in headers", field)}
	}
	// A reference becomes the name of its argument here, so braces do not hide a bad URL.
	u, err := url.Parse(argumentRegexp.ReplaceAllString(text, "$1"))
	if err != nil {
		return []error{fmt.Errorf("%s: is not a URL", field)}
	}
	var problems fielderr.List
	if u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		problems.Add(field, "must begin with https:// or http:// and a host")
	}
	if u.User != nil {
		problems.Add(field, "must not hold a user or password; use a header")
	}
	head, _, _ := strings.Cut(strings.TrimPrefix(strings.TrimPrefix(text, "https://"), "http://"), "/")
	if head, _, _ = strings.Cut(head, "?"); strings.Contains(head, "{") {
		problems.Add(field, "an argument must not choose the host")
	}
	if u.Fragment != "" {
		problems.Add(field, "must not have a fragment")
	}
	return problems
}

func checkHeaders(headers map[string]string) fielderr.List {
	var problems fielderr.List
	for name, value := range headers {
		canonical := http.CanonicalHeaderKey(name)
		path := "config.headers." + name
		switch {
		case !headerNameRegexp.MatchString(name):
			problems.Add("config.headers", "%q is not a header name", name)
		case slices.Contains(runtimeHeaders, canonical):
			problems.Add(path, "is set by the runtime")
		case strings.ContainsAny(value, "\r\n\x00"):
			problems.Add(path, "must be one line")
		case strings.Contains(envRegexp.ReplaceAllString(value, ""), "${"):
			problems.Add(path, "write a reference as ${env:NAME}")
		case slices.Contains(secretHeaders, canonical) && !envRegexp.MatchString(value):
			problems.Add(path, "do not write a secret here; put it into an environment variable and refer to it as "+
				"${env:NAME}")
		}
	}
	slices.SortFunc(problems, func(a, b error) int { return strings.Compare(a.Error(), b.Error()) })
	return problems
}

// checkArguments returns the references that are not parameters, and the parameters that the request does not use.
func (h httpHandler) checkArguments(urlField string, parameters []string) fielderr.List {
	var problems fielderr.List
	for _, name := range h.urlArguments {
		if !slices.Contains(parameters, name) {
			problems.Add(urlField, "{%s} is not declared under parameters.properties", name)
		}
	}
	for _, name := range h.bodyArguments {
		if !slices.Contains(parameters, name) {
			problems.Add("config.body", "{%s} is not declared under parameters.properties", name)
		}
	}
	if h.body == nil {
		return problems // the remaining arguments go into the query or the body
	}
	for _, name := range parameters {
		if !slices.Contains(h.urlArguments, name) && !slices.Contains(h.bodyArguments, name) {
			problems.Add("parameters.properties."+name, "neither config.url nor config.body uses {%s}", name)
		}
	}
	return problems
}

func argumentNames(text string) []string {
	var names []string
	for _, match := range argumentRegexp.FindAllStringSubmatch(text, -1) {
		if !slices.Contains(names, match[1]) {
			names = append(names, match[1])
		}
	}
	return names
}

// fill puts arguments into the URL. It escapes an argument of the path, so the argument stays within a segment. It
// refuses absent and empty arguments of the path, and those of dots, such as "..". It omits the query parameter of an
// absent argument.
func (h httpHandler) fill(args map[string]any) (*url.URL, error) {
	path, query, _ := strings.Cut(h.url, "?")
	var refused error
	path = argumentRegexp.ReplaceAllStringFunc(path, func(reference string) string {
		name := strings.Trim(reference, "{}")
		text := scalarText(args[name])
		if args[name] == nil {
			refused = newCallError(ClassRefused, "argument %s is missing; the path of the URL needs it", name)
		} else if text == "" || strings.Trim(text, ".") == "" {
			refused = newCallError(ClassRefused, "argument %s: %q cannot be part of a path", name, text)
		}
		return url.PathEscape(text)
	})
	if refused != nil {
		return nil, refused
	}
	u, err := url.Parse(path)
	if err != nil {
		return nil, newCallError(ClassHandler, "fill in the URL: %s", err)
	}
	u.RawQuery = fillQuery(query, args)
	return u, nil
}

func fillQuery(query string, args map[string]any) string {
	var parts []string
	for part := range strings.SplitSeq(query, "&") {
		if part == "" {
			continue
		}
		absent := false
		part = argumentRegexp.ReplaceAllStringFunc(part, func(reference string) string {
			value, ok := args[strings.Trim(reference, "{}")]
			absent = absent || !ok || value == nil
			return url.QueryEscape(scalarText(value))
		})
		if !absent {
			parts = append(parts, part)
		}
	}
	return strings.Join(parts, "&")
}

// fillTemplate puts arguments into a body. The string {name} becomes the argument with its type. Within a longer
// string, {name} becomes the argument's text. ok is false if an argument is absent. An object or array omits such an
// entry.
func fillTemplate(template any, args map[string]any) (value any, ok bool) {
	switch t := template.(type) {
	case string:
		return fillString(t, args)
	case []any:
		items := make([]any, 0, len(t))
		for _, item := range t {
			if v, ok := fillTemplate(item, args); ok {
				items = append(items, v)
			}
		}
		return items, true
	case map[string]any:
		filled := make(map[string]any, len(t))
		for key, item := range t {
			if v, ok := fillTemplate(item, args); ok {
				filled[key] = v
			}
		}
		return filled, true
	}
	return template, true
}

func fillString(text string, args map[string]any) (any, bool) {
	if match := argumentRegexp.FindString(text); match != "" && match == text {
		value, ok := args[strings.Trim(text, "{}")]
		return value, ok
	}
	complete := true
	filled := argumentRegexp.ReplaceAllStringFunc(text, func(reference string) string {
		value, ok := args[strings.Trim(reference, "{}")]
		complete = complete && ok
		return scalarText(value)
	})
	return filled, complete
}

func templateArguments(template any, found []string) []string {
	switch t := template.(type) {
	case string:
		for _, name := range argumentNames(t) {
			if !slices.Contains(found, name) {
				found = append(found, name)
			}
		}
	case []any:
		for _, item := range t {
			found = templateArguments(item, found)
		}
	case map[string]any:
		for _, item := range t {
			found = templateArguments(item, found)
		}
	}
	return found
}
