// Package server embeds the whole agent in your program: the surfaces, HTTP API and Engine Room, and the program's own
// flows.
//
//	agent, err := server.Open(ctx, settings, log) // the settings of `agent serve`, by name
//	ship, err := lanekeeper.Register(agent.Runtime(), "ship", shipOrder)
//	go http.ListenAndServe(address, agent.Handler())
//	err = agent.Run(ctx)
//
// `agent serve` runs the same code, and also opens the port. Several programs and `agent serve` may share one database.
package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"

	"github.com/lanekeeper/lanekeeper"
	"github.com/lanekeeper/lanekeeper/builtins"
	"github.com/lanekeeper/lanekeeper/internal/app"
	"github.com/lanekeeper/lanekeeper/internal/config"
	"github.com/lanekeeper/lanekeeper/internal/logging"
	"github.com/lanekeeper/lanekeeper/migrations"
	"github.com/lanekeeper/lanekeeper/models"
)

// Agent is the agent in this process. It is safe for concurrent use.
type Agent struct {
	app       *app.App
	handler   http.Handler
	stages    app.Stages
	stopModel func() // ends the offline model
}

// Open wires an agent. settings are those of docs/settings.md, by the names of their environment variables;
// DATABASE_URL and AGENT_ADMIN_TOKEN are required, and AGENT_LISTEN is not used. Open also looks up the secrets of
// workspace files in settings. The schema must be current (lanekeeper.Migrate). log may be nil. Open starts nothing but
// the offline model, where no model is set. The caller closes the agent.
func Open(ctx context.Context, settings map[string]string, log *slog.Logger) (*Agent, error) {
	cfg, err := config.LoadServe(settings)
	if err == nil {
		err = cfg.RequireServe()
	}
	if err != nil {
		return nil, fmt.Errorf("open agent: %w", err)
	}
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	log = slog.New(logging.Handler(log.Handler()))
	database, err := app.Connect(ctx, cfg, cfg.DatabaseURL.Reveal(), true, log)
	if err != nil {
		return nil, fmt.Errorf("open agent: %w", err)
	}
	agent, err := open(ctx, app.Options{
		Config: cfg, Log: log, Database: database, Environ: settings,
		Getenv: func(name string) string { return settings[name] }, Version: "embedded",
	})
	if err != nil {
		database.Close()
		return nil, fmt.Errorf("open agent: %w", err)
	}
	return agent, nil
}

func open(ctx context.Context, o app.Options) (*Agent, error) {
	if err := migrations.Check(ctx, o.Pool); err != nil {
		if errors.Is(err, migrations.ErrOutdated) {
			err = fmt.Errorf("%w, or call lanekeeper.Migrate", err)
		}
		return nil, err
	}
	if _, err := builtins.Put(ctx, o.Pool); err != nil {
		return nil, err
	}
	model, _, stop, err := app.NewModel(ctx, o.Config, o.Log, models.Retry{})
	if err != nil {
		return nil, err
	}
	a := &Agent{stages: app.NewStages(), stopModel: stop}
	if a.app, err = app.New(o, model); err == nil {
		a.handler, err = a.app.Handler(a.stages)
	}
	if err != nil {
		stop()
		return nil, err
	}
	return a, nil
}

// Runtime registers and starts flows of the program, in the agent's engine. Register before Run.
func (a *Agent) Runtime() *lanekeeper.Runtime { return lanekeeper.Of(a.app.Pool, a.app.Engine) }

// Handler serves the API, the surfaces and the Engine Room, under / of its host. Its responses may stream without end,
// so the server needs no WriteTimeout.
func (a *Agent) Handler() http.Handler { return a.handler }

// Run works until ctx ends: heartbeats, schedules, executions, deliveries. Then streams end, /readyz answers 503,
// running steps finish within AGENT_SHUTDOWN_TIMEOUT, and other processes continue the rest. It runs once.
func (a *Agent) Run(ctx context.Context) error {
	defer context.AfterFunc(ctx, a.stages.End)()
	return a.app.Run(ctx)
}

// Close closes all connections, after Run.
func (a *Agent) Close() {
	a.stopModel()
	a.app.Close()
}
