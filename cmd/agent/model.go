package main

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"net/url"

	"github.com/lanekeeper/lanekeeper/internal/config"
	"github.com/lanekeeper/lanekeeper/models"
	"github.com/lanekeeper/lanekeeper/models/offline"
)

// newModel makes the client of the configured model. Where none is configured, it starts the offline
// one, a server on the loopback interface that speaks the same protocol; stop ends it.
func newModel(ctx context.Context, cfg config.Config, log *slog.Logger, retry models.Retry) (client *models.Client, about string, stop func(), err error) {
	set := models.Config{
		BaseURL: cfg.OpenAIBaseURL, APIKey: cfg.OpenAIKey.Reveal(), Model: cfg.Model, Prices: prices(cfg), Logger: log, Retry: retry,
		ReasoningEffort: cfg.Provider.Effort, API: models.API(cfg.Provider.API), Headers: cfg.Provider.Headers,
		Query: query(cfg.Provider.Query), Extra: cfg.Provider.Extra,
	}
	stop = func() {}
	about = "at " + cfg.OpenAIBaseURL
	switch {
	case cfg.OpenAIBaseURL == "" && !cfg.OpenAIKey.IsSet():
		set.BaseURL, stop, err = offline.Start(ctx)
		if err != nil {
			return nil, "", nil, fmt.Errorf("start the offline model: %w", err)
		}
		set.Model, about = offline.Model, "rule-based, built in (set OPENAI_API_KEY or OPENAI_BASE_URL, and AGENT_MODEL, for a real one)"
	case cfg.OpenAIBaseURL == "":
		about = "OpenAI"
	}
	if set.Model == "" {
		set.Model = assumedModel
		log.WarnContext(ctx, "AGENT_MODEL is not set, a model is assumed; set it to one of your provider's", "model", set.Model)
	}
	client, err = models.New(set)
	if err != nil {
		stop()
		return nil, "", nil, &exitError{exitUsage, err}
	}
	return client, fmt.Sprintf("%s, %s", set.Model, about), stop, nil
}

// assumedModel is asked where AGENT_MODEL names none.
const assumedModel = "gpt-4o-mini"

// query is parameters in the form of a URL's.
func query(values map[string]string) url.Values {
	q := url.Values{}
	for name, value := range values {
		q.Set(name, value)
	}
	return q
}

// prices is the price table: the built-in one, and what AGENT_PRICES says instead.
func prices(cfg config.Config) models.Prices {
	own := models.Prices{}
	for model, p := range cfg.Prices {
		own[model] = models.Price{
			Prompt: p.Input, Cached: cmp.Or(p.Cached, p.Input), CacheWrite: p.CacheWrite, Completion: p.Output,
			Long: models.Long{
				Over: p.Long.Over, Prompt: p.Long.Input, Cached: cmp.Or(p.Long.Cached, p.Long.Input), CacheWrite: p.Long.CacheWrite,
				Completion: p.Long.Output,
			},
		}
	}
	return models.DefaultPrices().With(own)
}
