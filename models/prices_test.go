package models_test

import (
	"math"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/lanekeeper/lanekeeper/models"
)

func TestPriceIsFoundByTheLongestNameThatFits(t *testing.T) {
	t.Parallel()
	prices := models.Prices{
		"gpt-4o": {Prompt: 1}, "gpt-4o-mini": {Prompt: 2}, "gpt-4o-2024-05-13": {Prompt: 3}, "llama*": {Prompt: 4}, "llama3:70b*": {Prompt: 5},
		"meta/own": {Prompt: 6},
	}
	for model, want := range map[string]float64{
		"gpt-4o": 1, "gpt-4o-2024-08-06": 1, "gpt-4o-latest": 1, "gpt-4o@20240806": 1, "openai/gpt-4o": 1,
		"gpt-4o-mini": 2, "gpt-4o-mini-2024-07-18": 2, "gpt-4o-2024-05-13": 3, "llama3.1": 4, "llama3:70b-q4": 5, "meta/own": 6, "meta/llama2": 4,
	} {
		if got, found := prices.Of(model); !found || got.Prompt != want {
			t.Errorf("price of %s = %v (%v), want %v", model, got.Prompt, found, want)
		}
	}
	for _, model := range []string{"", "gpt-4", "gpt-4o-audio", "gpt-4o-mini-audio", "gpt-4o-5", "gpt-4o-", "GPT-4O", "xllama", "/"} {
		if got, found := prices.Of(model); found {
			t.Errorf("%s was priced at %v", model, got.Prompt)
		}
	}
}

func TestPricesThatCannotBeMeantAreRefused(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		prices models.Prices
		want   string
	}{
		"negative":     {models.Prices{"m": {Prompt: 1, Completion: -2}}, "-2"},
		"no number":    {models.Prices{"m": {Cached: math.NaN()}}, `"m"`},
		"without end":  {models.Prices{"m": {Completion: math.Inf(1)}}, "+Inf"},
		"without name": {models.Prices{" ": {Prompt: 2}}, "name"},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := models.New(models.Config{Model: "m", Prices: test.prices}); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("err = %v, want one about %s", err, test.want)
			}
		})
	}
}

func TestWithReplacesPricesAndLeavesTheOriginal(t *testing.T) {
	t.Parallel()
	base := models.DefaultPrices()
	over := base.With(models.Prices{"gpt-4o": {Prompt: 99}, "mine": {Prompt: 1}})
	if over["gpt-4o"].Prompt != 99 || over["mine"].Prompt != 1 || over["o3"] != base["o3"] {
		t.Errorf("merged = %v", over)
	}
	if diff := cmp.Diff(models.DefaultPrices(), base); diff != "" {
		t.Errorf("the original changed:\n%s", diff)
	}
}
