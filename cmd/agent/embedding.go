package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/config"
	"github.com/lanekeeper/lanekeeper/memory"
	"github.com/lanekeeper/lanekeeper/models"
)

// newIndex makes the search of memories by meaning; nil where no embedding model is configured. Key, headers and query
// of the chat model go to its own server only.
func newIndex(cfg config.Config, log *slog.Logger) (*memory.Index, error) {
	set := models.Config{
		BaseURL: cfg.Embedding.BaseURL, APIKey: cfg.Embedding.Key.Reveal(), Model: cfg.Embedding.Model, Logger: log,
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
		return nil, &exitError{exitUsage, fmt.Errorf("AGENT_EMBEDDING_MODEL: %w", err)}
	}
	return memory.NewIndex(client, log), nil
}

// examineEmbedding says whether memories are found by meaning, and what helps where they are not.
func examineEmbedding(ctx context.Context, s *session, add func(string, error, string) bool) {
	const check = "embeddings"
	index, err := newIndex(s.config, s.log)
	if err != nil || index == nil {
		add(check, err, "off: memories are found by words alone; AGENT_EMBEDDING_MODEL turns them on")
		return
	}
	state, err := index.State(ctx, s.pool)
	if err == nil && state.Extension == "" {
		err = withoutExtension(s.config.Embedding.Model, state)
	}
	if err != nil {
		add(check, err, "")
		return
	}
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	dimensions, err := index.Check(ctx)
	if err != nil {
		err = fmt.Errorf("memories are found by words alone: %w", err)
	}
	add(check, err, fmt.Sprintf("%s, %d dimensions, pgvector %s; %d of %d memories are embedded",
		s.config.Embedding.Model, dimensions, state.Extension, state.Embedded, state.Entries))
}

// withoutExtension says how the database gets the extension vector.
func withoutExtension(model string, state memory.EmbeddingState) error {
	wrong := fmt.Sprintf("%s is set, and memories are found by words alone: the database has no extension vector (pgvector)", model)
	if state.Available {
		return hint(errors.New(wrong), "run in it as a superuser: create extension vector;")
	}
	return hint(errors.New(wrong), "install pgvector on its server (a package such as postgresql-%d-pgvector), then run in the database as a superuser: create extension vector;",
		state.Server)
}
