package main

import (
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strings"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/internal/config"
	"github.com/lanekeeper/lanekeeper/internal/nearest"
	"github.com/lanekeeper/lanekeeper/models"
	"github.com/lanekeeper/lanekeeper/workspace"
)

// doubts are warnings about agents whose models or chat keys the settings do not know. They are no errors: the process
// that serves may have other settings.
func doubts(documents []workspace.Document[agents.Definition], cfg config.Config) (warnings []string) {
	for _, d := range documents {
		for _, model := range append([]string{d.Definition.Model}, d.Definition.Fallback...) {
			if model != "" && !servable(model, cfg) {
				known := slices.Concat(models.KnownModels(), slices.Collect(maps.Keys(prices(cfg))))
				slices.Sort(known)
				warnings = append(warnings, fmt.Sprintf("%s: no price and no fact is known of model %q%s",
					d.At, model, meant(model, known)))
			}
		}
		keys := slices.Sorted(maps.Keys(cfg.ChatKeys))
		for _, key := range d.Definition.Keys {
			if len(keys) > 0 && !slices.Contains(keys, key) {
				warnings = append(warnings, fmt.Sprintf("%s: AGENT_CHAT_KEY has no chat key %q here%s",
					d.At, key, meant(key, keys)))
			}
		}
	}
	return warnings
}

// servable reports whether a model is known, or the settings name a server that may have names of its own.
func servable(model string, cfg config.Config) bool {
	if _, priced := prices(cfg).Of(model); priced || model == cfg.Model || models.FactsOf(model) != (models.Facts{}) {
		return true
	}
	server, err := url.Parse(cfg.OpenAIBaseURL)
	return err == nil && server.Host != "" && !strings.HasSuffix("."+server.Hostname(), ".api.openai.com")
}

// meant asks whether the nearest of known was meant; nothing when none is near.
func meant(name string, known []string) string {
	if near := nearest.To(name, known); near != "" {
		return fmt.Sprintf("; did you mean %q?", near)
	}
	return ""
}
