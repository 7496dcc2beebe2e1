package config

import (
	"bytes"
	"encoding/json"
	"slices"
	"strings"
)

// Efforts are the words for how much a model that reasons thinks.
func Efforts() []string { return []string{"none", "minimal", "low", "medium", "high", "xhigh", "max"} }

// provider checks how the model's server is spoken to. Values of headers and of the query are never quoted.
func (k *checker) provider(p *Provider) {
	apis := []string{"auto", "chat", "responses"}
	if p.API = strings.ToLower(p.API); !slices.Contains(apis, p.API) {
		k.refuse("AGENT_MODEL_API", "%q is none of %s", p.API, strings.Join(apis, ", "))
	}
	if p.Effort != "" && !slices.Contains(Efforts(), p.Effort) {
		k.refuse("AGENT_REASONING_EFFORT", "%q is none of %s", p.Effort, strings.Join(Efforts(), ", "))
	}
	if !object(p.HeadersJSON.Reveal(), &p.Headers) {
		k.refuse("AGENT_MODEL_HEADERS", "it is not a JSON object of texts")
	}
	for name, value := range p.Headers {
		if !isHeader(name) || strings.ContainsFunc(value, func(r rune) bool { return r < ' ' || r > '~' }) {
			k.refuse("AGENT_MODEL_HEADERS",
				"%.60q is no header, or its value has a character that no header can carry", name)
		}
	}
	if !object(p.QueryJSON.Reveal(), &p.Query) {
		k.refuse("AGENT_MODEL_QUERY", "it is not a JSON object of texts")
	}
	if !object(p.ExtraJSON, &p.Extra) {
		k.refuse("AGENT_MODEL_EXTRA", "it is not a JSON object")
	}
}

// object reads a JSON object and nothing after it; no text is an empty one.
func object(text string, into any) bool {
	if text == "" {
		return true
	}
	d := json.NewDecoder(bytes.NewReader([]byte(text)))
	return d.Decode(into) == nil && !d.More() && strings.HasPrefix(strings.TrimSpace(text), "{")
}

// isHeader reports whether a text can be the name of an HTTP header.
func isHeader(name string) bool {
	return name != "" && !strings.ContainsFunc(name, func(r rune) bool {
		return r <= ' ' || r > '~' || strings.ContainsRune(`()<>@,;:\"/[]?={}`, r)
	})
}
