package skills

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strings"
)

type httpConfig struct {
	Method  string            `json:"method"`
	URL     string            `json:"url"`
	Headers map[string]string `json:"headers"`
	Body    any               `json:"body"`
}

var (
	argumentReference = regexp.MustCompile(`\{([a-zA-Z_][a-zA-Z0-9_-]*)\}`)
	envReference      = regexp.MustCompile(`\$\{env:([a-zA-Z_][a-zA-Z0-9_]*)\}`)
	headerName        = regexp.MustCompile("^[a-zA-Z0-9!#$%&'*+.^_`|~-]+$")
	httpMethods       = []string{"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"}
	ownHeaders        = []string{"Host", "Content-Length", "Transfer-Encoding", "Connection", "Idempotency-Key", "Upgrade", "Trailer"}
	secretHeaders     = []string{"Authorization", "Proxy-Authorization", "Cookie", "X-Api-Key", "Api-Key"}
)

// parseHTTP reads "POST https://host/path/{id}", "https://host/path", or a config with the same.
func parseHTTP(rest string, config json.RawMessage, parameters []string) (handler, []error) {
	var c httpConfig
	if err := decodeConfig(config, &c); err != nil {
		return nil, []error{err}
	}
	problems := mergeHandlerText(rest, &c)
	h := httpHandler{method: strings.ToUpper(orElse(c.Method, http.MethodGet)), url: c.URL, headers: c.Headers, body: c.Body}
	problems = append(problems, oneOf("config.method", h.method, httpMethods...)...)
	problems = append(problems, checkURL(h.url)...)
	problems = append(problems, checkHeaders(h.headers)...)
	h.inURL = references(h.url)
	h.inBody = templateReferences(h.body, nil)
	if h.body != nil && !carriesBody(h.method) && h.method != http.MethodDelete {
		problems = append(problems, fmt.Errorf("config.body: a %s request has none", h.method))
	}
	problems = append(problems, h.checkArguments(parameters)...)
	return h, problems
}

func mergeHandlerText(rest string, c *httpConfig) []error {
	if rest == "" {
		return nil
	}
	method, address, two := strings.Cut(rest, " ")
	if !two {
		method, address = "", rest
	}
	if c.URL != "" || method != "" && c.Method != "" {
		return []error{errors.New("handler: method or URL is here and in config; keep one")}
	}
	c.URL = strings.TrimSpace(address)
	if method != "" {
		c.Method = method
	}
	return nil
}

func checkURL(text string) []error {
	if text == "" {
		return []error{errors.New("config.url: is empty; write http:GET https://host/path as the handler, or set it here")}
	}
	if strings.Contains(text, "${") {
		return []error{errors.New("config.url: secrets are only taken in headers")}
	}
	// Names of arguments stand for themselves here, so that braces do not hide a bad URL.
	u, err := url.Parse(argumentReference.ReplaceAllString(text, "$1"))
	if err != nil {
		return []error{errors.New("config.url: is not a URL")}
	}
	var problems []error
	if u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		problems = append(problems, errors.New("config.url: must begin with https:// or http:// and a host"))
	}
	if u.User != nil {
		problems = append(problems, errors.New("config.url: must not hold a user or password; use a header"))
	}
	head, _, _ := strings.Cut(strings.TrimPrefix(strings.TrimPrefix(text, "https://"), "http://"), "/")
	if head, _, _ = strings.Cut(head, "?"); strings.Contains(head, "{") {
		problems = append(problems, errors.New("config.url: an argument must not choose the host"))
	}
	if u.Fragment != "" {
		problems = append(problems, errors.New("config.url: must not have a fragment"))
	}
	return problems
}

func checkHeaders(headers map[string]string) []error {
	var problems []error
	for name, value := range headers {
		canonical := http.CanonicalHeaderKey(name)
		path := "config.headers." + name
		switch {
		case !headerName.MatchString(name):
			problems = append(problems, fmt.Errorf("config.headers: %q is not a header name", name))
		case slices.Contains(ownHeaders, canonical):
			problems = append(problems, fmt.Errorf("%s: is set by the runtime", path))
		case strings.ContainsAny(value, "\r\n\x00"):
			problems = append(problems, fmt.Errorf("%s: must be one line", path))
		case strings.Contains(envReference.ReplaceAllString(value, ""), "${"):
			problems = append(problems, fmt.Errorf("%s: write a reference as ${env:NAME}", path))
		case slices.Contains(secretHeaders, canonical) && !envReference.MatchString(value):
			problems = append(problems, fmt.Errorf("%s: do not write a secret here; put it into an environment variable and refer to it as ${env:NAME}", path))
		}
	}
	slices.SortFunc(problems, func(a, b error) int { return strings.Compare(a.Error(), b.Error()) })
	return problems
}

// checkArguments wants every reference to be a parameter, and every parameter to go somewhere.
func (h httpHandler) checkArguments(parameters []string) []error {
	var problems []error
	for _, name := range h.inURL {
		if !slices.Contains(parameters, name) {
			problems = append(problems, fmt.Errorf("config.url: {%s} is not declared under parameters.properties", name))
		}
	}
	for _, name := range h.inBody {
		if !slices.Contains(parameters, name) {
			problems = append(problems, fmt.Errorf("config.body: {%s} is not declared under parameters.properties", name))
		}
	}
	if h.body == nil {
		return problems // the rest goes into the query or the body
	}
	for _, name := range parameters {
		if !slices.Contains(h.inURL, name) && !slices.Contains(h.inBody, name) {
			problems = append(problems, fmt.Errorf("parameters.properties.%s: neither config.url nor config.body uses {%s}", name, name))
		}
	}
	return problems
}

func references(text string) []string {
	var names []string
	for _, match := range argumentReference.FindAllStringSubmatch(text, -1) {
		if !slices.Contains(names, match[1]) {
			names = append(names, match[1])
		}
	}
	return names
}
