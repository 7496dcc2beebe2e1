package app

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"net/url"
	"slices"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/internal/config"
	"github.com/lanekeeper/lanekeeper/memory"
	"github.com/lanekeeper/lanekeeper/models"
	"github.com/lanekeeper/lanekeeper/models/offline"
)

// NewModel returns the client of the configured model. Without one it starts the offline model on the loopback
// interface; stop ends it. The end of ctx does not, because turns go on while a process drains.
func NewModel(
	ctx context.Context, cfg config.Config, log *slog.Logger, retry models.Retry,
) (client *models.Client, about string, stop func(), err error) {
	set := models.Config{
		BaseURL: cfg.OpenAIBaseURL, APIKey: cfg.OpenAIKey.Reveal(), Model: cfg.Model, Prices: Prices(cfg),
		Logger: log, Retry: retry,
		ReasoningEffort: cfg.Provider.Effort, API: models.API(cfg.Provider.API), Headers: cfg.Provider.Headers,
		Query: query(cfg.Provider.Query), Extra: cfg.Provider.Extra,
	}
	stop = func() {}
	about = "at " + cfg.OpenAIBaseURL
	switch {
	case isOffline(cfg):
		set.BaseURL, stop, err = offline.Start(context.WithoutCancel(ctx))
		if err != nil {
			return nil, "", nil, fmt.Errorf("start the offline model: %w", err)
		}
		if cfg.Model != "" && cfg.Model != offline.Model {
			log.WarnContext(ctx, "AGENT_MODEL is ignored, using the offline model; set OPENAI_API_KEY or OPENAI_BASE_URL",
				"model", cfg.Model)
		}
		set.Model, about = offline.Model, "rule-based, built in (set OPENAI_API_KEY or OPENAI_BASE_URL, and AGENT_MODEL, "+
			"for a real one)"
	case cfg.OpenAIBaseURL == "":
		about = "OpenAI"
	}
	if set.Model == "" {
		set.Model = DefaultModel
		log.WarnContext(ctx, "AGENT_MODEL is not set, using the default; set it to a model of your provider", "model",
			set.Model)
	}
	client, err = models.New(set)
	if err != nil {
		stop()
		return nil, "", nil, &config.Error{Problems: []string{err.Error()}}
	}
	return client, fmt.Sprintf("%s, %s", set.Model, about), stop, nil
}

// isOffline reports that no model is configured.
func isOffline(cfg config.Config) bool { return cfg.OpenAIBaseURL == "" && !cfg.OpenAIKey.IsSet() }

// DefaultModel is used when AGENT_MODEL is not set.
const DefaultModel = "gpt-4o-mini"

func query(values map[string]string) url.Values {
	q := url.Values{}
	for name, value := range values {
		q.Set(name, value)
	}
	return q
}

// Prices returns the built-in price table with the overrides of AGENT_PRICES.
func Prices(cfg config.Config) models.Prices {
	prices := models.Prices{}
	for model, p := range cfg.Prices {
		prices[model] = models.Price{
			Prompt: p.Input, Cached: cmp.Or(p.Cached, p.Input), CacheWrite: p.CacheWrite, Completion: p.Output,
			Long: models.Long{
				Over: p.Long.Over, Prompt: p.Long.Input, Cached: cmp.Or(p.Long.Cached, p.Long.Input), CacheWrite: p.Long.CacheWrite,
				Completion: p.Long.Output,
			},
		}
	}
	return models.DefaultPrices().With(prices)
}

// PriceOf names the source of a model's price.
func PriceOf(cfg config.Config, model string) string {
	list, date := models.ListPrices()
	price, priced := Prices(cfg).Of(model)
	listed, isListed := list.Of(model)
	switch {
	case !priced:
		return "no price"
	case isListed && listed == price:
		return "list price of " + date + ": " + price.String()
	}
	return "AGENT_PRICES: " + price.String()
}

// FreeAnswers lists the agents' models whose price has an input but no output. The offline model's answers are free.
func FreeAnswers(cfg config.Config, list []agents.Agent) (names []string) {
	if isOffline(cfg) {
		return nil
	}
	prices := Prices(cfg)
	for _, a := range list {
		for _, model := range append([]string{cmp.Or(a.Model, DefaultModel)}, a.Fallback...) {
			if p, _ := prices.Of(model); p.Prompt > 0 && p.Completion == 0 {
				names = append(names, model)
			}
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// NewIndex returns the embedding index, or nil without an embedding model. The chat model's key, headers and query go
// only to its own server.
func NewIndex(cfg config.Config, log *slog.Logger) (*memory.Index, error) {
	set := models.Config{
		BaseURL: cfg.Embedding.BaseURL, APIKey: cfg.Embedding.Key.Reveal(), Model: cfg.Embedding.Model, Logger: log,
		Settings: models.Settings{
			BaseURL: "AGENT_EMBEDDING_BASE_URL", APIKey: "AGENT_EMBEDDING_KEY", Model: "AGENT_EMBEDDING_MODEL",
		},
	}
	switch {
	case set.Model == "":
		return nil, nil
	case set.BaseURL == "":
		set.BaseURL = cfg.OpenAIBaseURL
		set.APIKey = cmp.Or(set.APIKey, cfg.OpenAIKey.Reveal())
		set.Headers, set.Query = cfg.Provider.Headers, query(cfg.Provider.Query)
	}
	client, err := models.New(set)
	if err != nil {
		return nil, settingError("embeddings: %s", err)
	}
	return memory.NewIndex(client, log), nil
}
