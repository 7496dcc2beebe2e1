package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/channels"
	"github.com/lanekeeper/lanekeeper/databases"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/app"
	"github.com/lanekeeper/lanekeeper/internal/config"
	"github.com/lanekeeper/lanekeeper/internal/pgserver"
	"github.com/lanekeeper/lanekeeper/migrations"
	"github.com/lanekeeper/lanekeeper/models"
	"github.com/lanekeeper/lanekeeper/models/modelcheck"
	"github.com/lanekeeper/lanekeeper/monitor"
)

// finding is the result of one check.
type finding struct {
	Check  string `json:"check"`
	OK     bool   `json:"ok"`
	Detail string `json:"detail"`
}

func (c *cli) doctorCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "doctor",
		Short: "Check the setup and suggest fixes",
		Long:  "Check configuration, database, schema, workers and model. Exit code 1 when something needs attention.",
		Args:  positionalArgs(0, 0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			found := c.diagnose(cmd.Context())
			err := c.print(pageOf(found, ""), func(w io.Writer) {
				for _, f := range found {
					sign := "ok  "
					if !f.OK {
						sign = "BAD "
					}
					fmt.Fprintf(w, "%s %-14s %s\n", sign, f.Check, strings.ReplaceAll(f.Detail, "\n", "\n"+strings.Repeat(" ", 20)))
				}
			})
			if err != nil {
				return err
			}
			for _, f := range found {
				if !f.OK {
					return &exitError{exitFailed, nil}
				}
			}
			return nil
		},
	}
}

// diagnose runs the checks. A failed check skips those that need its result.
func (c *cli) diagnose(ctx context.Context) []finding {
	var found []finding
	add := func(check string, err error, detail string) bool {
		if err != nil {
			detail = err.Error()
		}
		found = append(found, finding{check, err == nil, detail})
		return err == nil
	}
	if err := c.loadDevDotEnv(); err != nil {
		add("configuration", err, "")
		return found
	}
	c.quietLogs()
	cfg, log, err := c.settings()
	if !add("configuration", err, "all settings are valid") {
		return found
	}
	if !cfg.DatabaseURL.IsSet() {
		binaries, err := pgserver.FindBinaries(func(name string) string { return c.environ[name] })
		add("server", err, fmt.Sprintf("PostgreSQL %s in %s", binaries.Version, binaries.Dir))
	}
	s, err := c.openSession(ctx, cfg, log)
	if add("database", err, "reachable") {
		defer s.close(ctx)
		c.diagnoseDatabase(ctx, s, add)
	}
	c.diagnoseModel(ctx, cfg, log, add)
	return found
}

func (c *cli) diagnoseDatabase(ctx context.Context, s *session, add func(string, error, string) bool) {
	var version, isolation string
	err := s.Pool.QueryRow(ctx, `select current_setting('server_version'),
		current_setting('default_transaction_isolation')`).
		Scan(&version, &isolation)
	add("PostgreSQL", err, version+", "+isolation)
	if !add("schema", migrations.Check(ctx, s.Pool), fmt.Sprintf("version %d", migrations.Version())) {
		return
	}
	add("rights", migrations.Rights(ctx, s.Pool), "owner of the tables, with write access")
	var workers, stuck int
	err = s.Pool.QueryRow(ctx, `
		select (select count(*) from agent_workers where expires_at > clock_timestamp()),
		       (select count(*) from agent_executions_stuck)`).Scan(&workers, &stuck)
	alive := fmt.Sprintf("%d alive", workers)
	if workers == 0 {
		alive = "none alive: only `agent heartbeat` runs heartbeats; start `agent serve` or `agent dev`"
	}
	add("workers", err, alive)
	if err == nil && stuck > 0 {
		err = fmt.Errorf("%d executions are stuck; check that `agent serve` runs", stuck)
	}
	add("executions", err, "none stuck")
	pause, err := executions.CurrentPause(ctx, s.Pool)
	autonomy := "not paused"
	if pause.Paused {
		autonomy = pause.String() + "; `agent resume` ends it"
	}
	add("autonomy", err, autonomy)
	judge := monitor.Monitor{Agents: app.NewDirectory(s.config), Limits: app.Limits(s.config.Limits)}
	status, err := judge.Status(ctx, s.Pool)
	add("verdict", err, status.String()) // a failing skill is nothing that is wrong with the installation
	diagnoseReplica(ctx, s, add)
	diagnoseChannels(ctx, s, add)
	c.diagnoseNamed(ctx, s, add)
	diagnoseEmbedding(ctx, s, add)
}

// diagnoseChannels reports channels that do not work.
func diagnoseChannels(ctx context.Context, s *session, add func(string, error, string) bool) {
	all, err := channels.List(ctx, s.Pool)
	var wrong []error
	maybe, failed := 0, 0
	for _, x := range all {
		switch {
		case !x.Enabled:
		case x.State == "failing":
			wrong = append(wrong, fmt.Errorf("%s is failing: %s", x.Name, printable(x.Error)))
		case x.Deaf:
			wrong = append(wrong, fmt.Errorf("%s is deaf: %s has not answered since %s; check that `agent serve` runs", x.Name,
				x.Type, formatTime(*x.SeenAt)))
		}
		maybe, failed = maybe+x.MaybeSent, failed+x.Failed
	}
	detail := fmt.Sprintf("%d, none failing", len(all))
	if maybe+failed > 0 {
		detail += fmt.Sprintf("; %d messages maybe sent and %d given up in 30 days, see `agent channels sends`", maybe, failed)
	}
	add("channels", errors.Join(err, errors.Join(wrong...)), detail)
}

// diagnoseNamed connects to each named database, as calls of sql: skills do.
func (c *cli) diagnoseNamed(ctx context.Context, s *session, add func(string, error, string) bool) {
	all, err := databases.List(ctx, s.Pool)
	if err != nil {
		add("databases", err, "")
		return
	}
	named := c.namedDatabases(s)
	defer named.Close()
	for _, d := range all {
		limited, cancel := context.WithTimeout(ctx, 15*time.Second)
		on, err := named.Reach(limited, d)
		if err == nil {
			err = on.Check(limited)
		}
		cancel()
		add("database "+d.Name, err, fmt.Sprintf("reachable by %s, access: %s", d.URLEnv, d.Access))
	}
}

func (c *cli) diagnoseModel(
	ctx context.Context, cfg config.Config, log *slog.Logger, add func(string, error, string) bool,
) {
	model, about, stop, err := app.NewModel(ctx, cfg, log, models.Retry{Attempts: 1})
	if !add("model", err, about) {
		return
	}
	defer stop()
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	answers, tools := modelcheck.Once(ctx, model, modelcheck.Target{Model: model.Model()})
	if add("model answers", failureOf(answers), "yes") {
		add("model tools", failureOf(tools), "works; `agent models check` tests more")
	}
}

// failureOf returns the error of a model check, with the setting that helps.
func failureOf(r modelcheck.Result) error {
	switch {
	case r.Status != modelcheck.Fail:
		return nil
	case r.Help == "":
		return errors.New(r.Detail)
	}
	return hint(errors.New(r.Detail), "%s", r.Help)
}
