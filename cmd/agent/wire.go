package main

import (
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
