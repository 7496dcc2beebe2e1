package skills

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/lanekeeper/lanekeeper/internal/fielderr"
)

type httpConfig struct {
	Method  string            `json:"method"`
	URL     string            `json:"url"`
	Headers map[string]string `json:"headers"`
	Body    any               `json:"body"`
}

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

// pathArguments lists the arguments in the path of an http skill's URL, which is in the handler or in config.
func pathArguments(d Definition) []string {
	address, isHTTP := strings.CutPrefix(strings.TrimSpace(d.Handler), "http:")
	if inConfig, _ := d.Config["url"].(string); inConfig != "" {
		address = inConfig
	}
	if path, _, _ := strings.Cut(address, "?"); isHTTP {
		return argumentNames(path)
	}
	return nil
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
