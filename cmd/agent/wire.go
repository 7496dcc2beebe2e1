package main

import (
	"context"

	"github.com/lanekeeper/lanekeeper/builtins"
	"github.com/lanekeeper/lanekeeper/internal/app"
	"github.com/lanekeeper/lanekeeper/models"
)

// app wires the runtime for a command. It starts no goroutine.
func (c *cli) app(s *session, model *models.Client) (*app.App, error) {
	environ := c.environ
	if c.host != nil {
		environ = nil // the server itself exports traces
	}
	return app.New(app.Options{
		Config: s.config, Log: s.log, Database: s.Database, Environ: environ, Getenv: c.getenv, Version: buildVersion(),
	}, model)
}

// withApp runs a command that runs executions in its own process. The session that work gets waits a second for a lock,
// as in withPromptSession.
func (c *cli) withApp(ctx context.Context, work func(context.Context, *session, *app.App) error) error {
	s, err := c.session(ctx)
	if err != nil {
		return err
	}
	defer s.close(ctx)
	prompt, err := s.prompt(ctx)
	if err != nil {
		return err
	}
	defer prompt.Pool.Close()
	if _, err := builtins.Put(ctx, prompt.Pool); err != nil {
		return err
	}
	model, _, stop, err := app.NewModel(ctx, s.config, s.log, models.Retry{})
	if err != nil {
		return err
	}
	defer stop()
	a, err := c.app(s, model)
	if err != nil {
		return err
	}
	return a.RunWithLeases(ctx, func(ctx context.Context) error { return work(acting(ctx), prompt, a) })
}
