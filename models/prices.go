package models

import (
	"cmp"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"sync"
)

// Price is in US dollars per million tokens.
type Price struct {
	Prompt     float64
	Cached     float64 // prompt tokens that the server read from its cache
	CacheWrite float64 // prompt tokens that the server wrote to its cache; zero means Prompt
	Completion float64
	Long       Long // price of long prompts
}

// Long is the price of a request with a prompt above a number of tokens. The zero value has no effect.
type Long struct {
	Over                                   int
	Prompt, Cached, CacheWrite, Completion float64
}

// String formats a price for people.
func (p Price) String() string { return fmt.Sprintf("$%g in, $%g out", p.Prompt, p.Completion) }

// at returns the price for a prompt of a given length.
func (p Price) at(prompt int) Price {
	if p.Long.Over > 0 && prompt > p.Long.Over {
		p.Prompt, p.Cached = p.Long.Prompt, p.Long.Cached
		p.CacheWrite, p.Completion = p.Long.CacheWrite, p.Long.Completion
	}
	p.CacheWrite = cmp.Or(p.CacheWrite, p.Prompt)
	return p
}

// Prices maps model names to prices. A name covers itself and its dated versions ("gpt-4o" covers "gpt-4o-2024-08-06"
// and "gpt-4o-latest", but not "gpt-4o-mini"). A name that ends in * covers its prefix. The longest match wins.
type Prices map[string]Price

// listPrices are the list prices of well-known models, with their date.
//
//go:embed prices.json
var listPrices []byte

// ListPrices returns the list prices of well-known models and their date. Prices change: an operator with a money limit
// should set them ([Prices.With]). A model without a price costs nothing here, so no money limit bounds it. Set its
// price, or a token limit ([Client.Priced]).
var ListPrices = sync.OnceValues(func() (Prices, string) {
	type amounts struct {
		Input, Cached, Output float64
		CacheWrite            float64 `json:"cache_write"`
	}
	var file struct {
		Date   string
		Prices map[string]struct {
			amounts
			Long struct {
				Over int
				amounts
			}
		}
	}
	if err := json.Unmarshal(listPrices, &file); err != nil {
		panic("models: prices.json: " + err.Error()) // the file is part of the binary, and tested
	}
	list := Prices{}
	for model, p := range file.Prices {
		list[model] = Price{
			Prompt: p.Input, Cached: cmp.Or(p.Cached, p.Input), CacheWrite: p.CacheWrite, Completion: p.Output,
			Long: Long{
				Over: p.Long.Over, Prompt: p.Long.Input, Cached: cmp.Or(p.Long.Cached, p.Long.Input),
				CacheWrite: p.Long.CacheWrite, Completion: p.Long.Output,
			},
		}
	}
	return list, file.Date
})

// DefaultPrices are the list prices, with the offline model at zero.
func DefaultPrices() Prices {
	list, _ := ListPrices()
	return maps.Clone(list)
}

// With returns a table in which over overrides p.
func (p Prices) With(over Prices) Prices {
	merged := maps.Clone(p)
	if merged == nil {
		merged = Prices{}
	}
	maps.Copy(merged, over)
	return merged
}

// Of finds the price of a model. For a name with a provider ("openai/gpt-4o"), Of looks up the whole name first, then
// the name without the provider.
func (p Prices) Of(model string) (Price, bool) {
	best, found := "", false
	for name := range p {
		if covers(name, model) && (!found || len(name) > len(best)) {
			best, found = name, true
		}
	}
	if _, bare, prefixed := strings.Cut(model, "/"); !found && prefixed {
		return p.Of(bare)
	}
	return p[best], found
}

// Cost returns US dollars.
func (p Price) Cost(u Usage) float64 {
	p = p.at(u.PromptTokens)
	fresh := float64(u.PromptTokens - u.CachedTokens - u.CacheWriteTokens)
	return (fresh*p.Prompt + float64(u.CachedTokens)*p.Cached + float64(u.CacheWriteTokens)*p.CacheWrite +
		float64(u.CompletionTokens)*p.Completion) / 1e6
}

func (p Prices) check() error {
	for _, model := range slices.Sorted(maps.Keys(p)) {
		if strings.TrimSpace(model) == "" {
			return errors.New("a price has no model's name")
		}
		for _, usd := range p[model].amounts() {
			if !(usd >= 0) || math.IsInf(usd, 1) {
				return fmt.Errorf("the price of %q is %v: give dollars per million tokens, 0 or more", model, usd)
			}
		}
	}
	return nil
}

// amounts lists all dollar amounts of a price.
func (p Price) amounts() []float64 {
	return []float64{
		p.Prompt, p.Cached, p.CacheWrite, p.Completion,
		p.Long.Prompt, p.Long.Cached, p.Long.CacheWrite, p.Long.Completion,
	}
}

// covers reports whether a name of the table covers the model.
func covers(name, model string) bool {
	if prefix, wildcard := strings.CutSuffix(name, "*"); wildcard {
		return strings.HasPrefix(model, prefix)
	}
	rest, ok := strings.CutPrefix(model, name)
	return ok && (rest == "" || isVersion(rest))
}

// isVersion reports whether a suffix, with its separator, is "latest", a date, or a number of at least three digits.
func isVersion(rest string) bool {
	if rest[0] != '-' && rest[0] != '@' {
		return false
	}
	rest = rest[1:]
	if rest == "latest" {
		return true
	}
	digits := strings.ReplaceAll(rest, "-", "")
	return len(digits) >= 3 && strings.Trim(digits, "0123456789") == ""
}
