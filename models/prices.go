package models

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
)

// Price is in US dollars per million tokens.
type Price struct {
	Prompt     float64
	Cached     float64 // of the prompt's tokens, those the server had read before
	CacheWrite float64 // and those that it keeps for the next time; as Prompt when it is zero
	Completion float64
	Long       Long // what holds for long prompts
}

// Long is the price of a request whose prompt is over so many tokens. Its zero value changes nothing.
type Long struct {
	Over                                   int
	Prompt, Cached, CacheWrite, Completion float64
}

// at is the price of a request with a prompt of so many tokens.
func (p Price) at(prompt int) Price {
	if p.Long.Over > 0 && prompt > p.Long.Over {
		p.Prompt, p.Cached = p.Long.Prompt, p.Long.Cached
		p.CacheWrite, p.Completion = p.Long.CacheWrite, p.Long.Completion
	}
	if p.CacheWrite == 0 {
		p.CacheWrite = p.Prompt
	}
	return p
}

// Prices maps a model's name to its price. A name stands for itself and for its dated versions
// ("gpt-4o" for "gpt-4o-2024-08-06" and "gpt-4o-latest", not for "gpt-4o-mini"); one that ends in * stands for all
// that begin so. The longest name that fits wins.
type Prices map[string]Price

// DefaultPrices is a small table of list prices of OpenAI's models, and the offline model at nothing. Prices
// change: what decides about money should be set by the operator ([Prices.With]). A model that no name fits costs
// nothing here, so that no limit of money bounds it: give it a price, or set a limit of tokens ([Client.Priced]).
func DefaultPrices() Prices {
	return Prices{
		"offline":      {},
		"gpt-4o":       {Prompt: 2.50, Cached: 1.25, Completion: 10},
		"gpt-4o-mini":  {Prompt: 0.15, Cached: 0.075, Completion: 0.60},
		"gpt-4.1":      {Prompt: 2, Cached: 0.50, Completion: 8},
		"gpt-4.1-mini": {Prompt: 0.40, Cached: 0.10, Completion: 1.60},
		"gpt-4.1-nano": {Prompt: 0.10, Cached: 0.025, Completion: 0.40},
		"gpt-5":        {Prompt: 1.25, Cached: 0.125, Completion: 10},
		"gpt-5-mini":   {Prompt: 0.25, Cached: 0.025, Completion: 2},
		"gpt-5-nano":   {Prompt: 0.05, Cached: 0.005, Completion: 0.40},
		"gpt-5.6-sol":  {Prompt: 4, Cached: 0.40, CacheWrite: 5, Completion: 20},
		"gpt-6-sol":    {Prompt: 2, Cached: 0.20, CacheWrite: 2.50, Completion: 10},
		"gpt-6-luna":   {Prompt: 0.10, Cached: 0.01, CacheWrite: 0.125, Completion: 0.50},
		"gpt-6.1-sol": {
			Prompt: 2, Cached: 0.10, CacheWrite: 2.50, Completion: 10,
			Long: Long{Over: 272_000, Prompt: 4, Cached: 0.20, CacheWrite: 5, Completion: 15},
		},
		"o3":      {Prompt: 2, Cached: 0.50, Completion: 8},
		"o4-mini": {Prompt: 1.10, Cached: 0.275, Completion: 4.40},
	}
}

// With is a new table in which the prices of over replace those of p.
func (p Prices) With(over Prices) Prices {
	merged := maps.Clone(p)
	if merged == nil {
		merged = Prices{}
	}
	maps.Copy(merged, over)
	return merged
}

// Of finds the price of a model. A name with a provider in front ("openai/gpt-4o") is looked up
// whole first, and then without.
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

// Cost is in US dollars.
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

// amounts are all that a price says in dollars.
func (p Price) amounts() []float64 {
	return []float64{
		p.Prompt, p.Cached, p.CacheWrite, p.Completion,
		p.Long.Prompt, p.Long.Cached, p.Long.CacheWrite, p.Long.Completion,
	}
}

// covers reports whether a name of the table stands for the model.
func covers(name, model string) bool {
	if prefix, open := strings.CutSuffix(name, "*"); open {
		return strings.HasPrefix(model, prefix)
	}
	rest, begins := strings.CutPrefix(model, name)
	return begins && (rest == "" || isVersion(rest))
}

// isVersion reports whether what follows a model's name is a date or a running number of three digits or more.
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
