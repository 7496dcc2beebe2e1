package config

import (
	"bytes"
	"encoding/json"
	"net/url"
	"os"
	"slices"
	"strings"
	"unicode"
)

// provider validates the model server's settings. It quotes no values of headers or query.
func (k *checker) provider(p *Provider) {
	apis := []string{"auto", "chat", "responses"}
	if p.API = strings.ToLower(p.API); !slices.Contains(apis, p.API) {
		k.report("AGENT_MODEL_API", "%q is none of %s", p.API, strings.Join(apis, ", "))
	}
	if p.Effort != "" && !slices.Contains(Efforts(), p.Effort) {
		k.report("AGENT_REASONING_EFFORT", "%q is none of %s", p.Effort, strings.Join(Efforts(), ", "))
	}
	if !decodeObject(p.HeadersJSON.Reveal(), &p.Headers) {
		k.report("AGENT_MODEL_HEADERS", "it is not a JSON object of texts")
	}
	for name, value := range p.Headers {
		if !isHeader(name) || strings.ContainsFunc(value, func(r rune) bool { return r < ' ' || r > '~' }) {
			k.report("AGENT_MODEL_HEADERS", "%.60q is no header, or its value has a character that no header can carry", name)
		}
	}
	if !decodeObject(p.QueryJSON.Reveal(), &p.Query) {
		k.report("AGENT_MODEL_QUERY", "it is not a JSON object of texts")
	}
	if !decodeObject(p.ExtraJSON, &p.Extra) {
		k.report("AGENT_MODEL_EXTRA", "it is not a JSON object")
	}
	for _, name := range []string{"model", "messages", "input", "n"} {
		if _, set := p.Extra[name]; set {
			k.report("AGENT_MODEL_EXTRA", "it has the member %s", name)
		}
	}
}

// Efforts lists the values of reasoning effort.
func Efforts() []string { return []string{"none", "minimal", "low", "medium", "high", "xhigh", "max"} }

// embedding requires a server for an embedding model.
func (k *checker) embedding(c *Config) {
	k.server("AGENT_EMBEDDING_BASE_URL", c.Embedding.BaseURL)
	k.token("AGENT_EMBEDDING_KEY", c.Embedding.Key)
	if strings.ContainsFunc(c.Embedding.Model, func(r rune) bool { return !unicode.IsPrint(r) }) {
		k.report("AGENT_EMBEDDING_MODEL", "it has a character that does not print")
	} else if c.Embedding.Model != "" && c.Embedding.BaseURL == "" && c.OpenAIBaseURL == "" && !c.OpenAIKey.IsSet() {
		k.report("AGENT_EMBEDDING_MODEL", "no server is set; set AGENT_EMBEDDING_BASE_URL too")
	}
}

// server validates the URL of a model server.
func (k *checker) server(name, text string) {
	if text == "" {
		return
	}
	if u, err := url.Parse(text); err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		k.report(name, "it is not an http or https URL")
	}
}

// decodeObject decodes exactly one JSON object; empty text is an empty object.
func decodeObject(text string, out any) bool {
	if text == "" {
		return true
	}
	return json.Unmarshal([]byte(text), out) == nil && strings.HasPrefix(strings.TrimSpace(text), "{")
}

func isHeader(name string) bool {
	return name != "" && !strings.ContainsFunc(name, func(r rune) bool {
		return r <= ' ' || r > '~' || strings.ContainsRune(`()<>@,;:\"/[]?={}`, r)
	})
}

// prices reads the price table from the variable, or from the file it names.
func (k *checker) prices(c *Config) {
	const name = "AGENT_PRICES"
	text := []byte(c.PricesSource)
	if len(text) == 0 {
		return
	}
	if text[0] != '{' {
		var err error
		if text, err = os.ReadFile(c.PricesSource); err != nil {
			k.report(name, "%v", err)
			return
		}
	}
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(&c.Prices); err != nil || !json.Valid(text) {
		k.report(name, "it is not a price table (%v)", err)
		return
	}
	for model, p := range c.Prices {
		long := p.Long
		if min(p.Input, p.Cached, p.CacheWrite, p.Output) < 0 || long.Over < 0 ||
			min(long.Input, long.Cached, long.CacheWrite, long.Output) < 0 {
			k.report(name, "the price of %q is negative", model)
		}
	}
}
