package main

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/url"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/app"
	"github.com/lanekeeper/lanekeeper/internal/config"
	"github.com/lanekeeper/lanekeeper/migrations"
	"github.com/lanekeeper/lanekeeper/models"
	"github.com/lanekeeper/lanekeeper/surfaces/heartbeat"
	"github.com/lanekeeper/lanekeeper/workspace"
)

type devOptions struct {
	ephemeral bool
	prune     bool
	watch     bool
	dir       string
}

func (c *cli) devCommand() *cobra.Command {
	var opts devOptions
	cmd := &cobra.Command{
		Use:   "dev [WORKSPACE]",
		Short: "Run everything locally: PostgreSQL, example workspace, a first heartbeat, HTTP",
		Long: `Run everything on this machine without setup.

Without DATABASE_URL it runs a local PostgreSQL with its data in .agent in this folder; --ephemeral keeps no data.
Without OPENAI_API_KEY and OPENAI_BASE_URL it uses a built-in offline model. It migrates, applies WORKSPACE, runs and
prints a first heartbeat, and serves until ^C. WORKSPACE is a folder of YAML files; the default is the folder workspace
of agent init, else the caretaker example, unless DATABASE_URL has another workspace. Rows of another WORKSPACE are
removed only with --prune or after a confirmation. Settings also come from .env; it prints which. It reads no program's
path from .env, and no URL for a key of the environment. --watch applies WORKSPACE again after each file change.`,
		Args: positionalArgs(0, 1, "at most one folder"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 1 {
				opts.dir = args[0]
			} else if workspace.HasFiles(workspaceDir) { // agent init writes it
				opts.dir = workspaceDir
			}
			if opts.watch && opts.dir == "" {
				return usageError("--watch needs a WORKSPACE; agent init creates one")
			}
			return c.dev(cmd.Context(), opts)
		},
	}
	cmd.Flags().BoolVar(&opts.ephemeral, "ephemeral", false, "use a new database and remove it at the end")
	cmd.Flags().BoolVar(&opts.watch, "watch", false, "apply WORKSPACE again after each file change")
	pruneFlag(cmd.Flags(), &opts.prune)
	return cmd
}

// dev runs everything in this process until ctx ends. It reads the workspace and opens the port before it creates the
// database.
func (c *cli) dev(ctx context.Context, opts devOptions) error {
	file, err := c.loadDotEnv()
	if err != nil {
		return err
	}
	if c.environ["AGENT_LOG_LEVEL"] == "" {
		c.environ["AGENT_LOG_LEVEL"] = "warn" // log lines would hide the printed heartbeat
	}
	cfg, log, err := c.settings()
	if err != nil {
		return err
	}
	if err := cfg.RequireDev(); err != nil {
		return &exitError{exitUsage, err}
	}
	c.reportDotEnv(file)
	files, err := readWorkspace(opts.dir, nil)
	if err != nil {
		return err
	}
	listener, err := listen(ctx, cfg)
	if err != nil {
		return err
	}
	defer listener.Close()
	s := &session{config: cfg, log: log, url: cfg.DatabaseURL.Reveal(), serving: true}
	if err := c.prepareDev(ctx, s, opts); err != nil {
		return err
	}
	defer s.close(ctx)
	return c.runDev(ctx, s, files, listener, opts)
}

// reportDotEnv prints the names that .env sets.
func (c *cli) reportDotEnv(file config.DotEnv) {
	if len(file.Set) > 0 {
		c.infof(".env sets %s", strings.Join(file.Set, ", "))
	}
	if len(file.Ignored) > 0 {
		c.infof(".env cannot set %s; set them in the environment", strings.Join(file.Ignored, ", "))
	}
}

// prepareDev opens the database and migrates it.
func (c *cli) prepareDev(ctx context.Context, s *session, opts devOptions) error {
	if s.url == "" {
		if err := s.startServer(ctx, c, true, opts.ephemeral); err != nil {
			return err
		}
	}
	if err := s.connect(ctx); err != nil {
		return err
	}
	if _, err := s.migrate(ctx, c); err != nil {
		s.close(ctx)
		if s.server != nil && (errors.Is(err, migrations.ErrChanged) || errors.Is(err, migrations.ErrNewer)) {
			return hint(err, "or remove %s to start over; --ephemeral uses a new database for one run", s.server.Dir())
		}
		return err
	}
	return nil
}

// runDev applies the workspace and runs until ctx ends.
func (c *cli) runDev(
	ctx context.Context, s *session, files workspace.Workspace, listener net.Listener, opts devOptions,
) error {
	if err := c.rejectWeakTokens(files); err != nil {
		return err
	}
	names, err := c.goFlows(ctx, s)
	if err != nil {
		return err
	}
	files.GoFlows, files.AfterApply = names, syncHeartbeats(s)
	named := c.namedDatabases(s)
	defer named.Close()
	if opts.dir == "" && s.server == nil {
		if err := rejectOtherWorkspace(ctx, s, files); err != nil {
			return err
		}
	}
	apply := applyOptions{dir: opts.dir, prune: opts.prune}
	decided, err := c.confirmRemovals(ctx, s, files, apply, named)
	if err != nil {
		return err
	}
	apply.watch, apply.prune = opts.watch, decided.Prune != nil
	decided.Gate = apply.gate(s)
	diff, err := applyFiles(ctx, s.Pool, files, decided)
	if err != nil {
		return gateAdvice(err, apply)
	}
	diff.Warnings = append(diff.Warnings, c.settingWarnings(files, s.config)...)
	if err := c.reportApplied(diff, opts); err != nil {
		return err
	}
	model, about, stop, err := app.NewModel(ctx, s.config, s.log, models.Retry{})
	if err != nil {
		return err
	}
	defer stop()
	if !s.config.AdminToken.IsSet() {
		s.config.AdminToken = config.Secret(rand.Text())
	}
	if len(s.config.ChatKeys) == 0 {
		s.config.ChatKeys = map[string]config.Secret{"visitor": config.Secret(rand.Text())}
	}
	a, err := c.app(s, model)
	if err != nil {
		return err
	}
	a.Commands = newCommandHost(c, s)
	err = a.Serve(ctx, listener,
		func(ctx context.Context) error { return s.restartServer(ctx, c) },
		func(ctx context.Context) error {
			if err := c.firstHeartbeat(ctx, s, a); err != nil {
				return err
			}
			all, err := a.Loop.Agents.List(ctx, s.Pool)
			if err != nil {
				return err
			}
			c.printWelcome(s, listener, about, all, opts)
			return c.watchDev(ctx, s, opts)
		})
	if err == nil {
		c.infof("stopped")
	}
	return err
}

// rejectOtherWorkspace rejects a database with rows of a workspace other than the example.
func rejectOtherWorkspace(ctx context.Context, s *session, example workspace.Workspace) error {
	planned, err := workspace.Plan(ctx, s.Pool, example, workspace.Options{})
	if others := planned.Of(workspace.Keep); len(others) > 0 {
		return &exitError{exitUsage, hint(fmt.Errorf("the database of DATABASE_URL has another workspace (%s)",
			truncate(itemNames(others), 200)),
			"name its folder: agent dev DIR; without DATABASE_URL the example has its own database")}
	}
	return err
}

// reportApplied prints the applied changes; one line when everything is new.
func (c *cli) reportApplied(diff workspace.Diff, opts devOptions) error {
	c.printWarnings(diff)
	defer func() { fmt.Fprint(c.err, keptText(diff, "agent dev", opts.dir)) }()
	if diff.Empty() {
		return nil
	}
	created := diff.Of(workspace.Create)
	if len(created)+diff.Count(workspace.Keep) < len(diff.Items) {
		return diff.WriteText(c.err)
	}
	var kinds, parts []string
	counts := make(map[string]int)
	for _, item := range created {
		if counts[item.Kind]++; counts[item.Kind] == 1 {
			kinds = append(kinds, item.Kind)
		}
	}
	for _, kind := range kinds {
		parts = append(parts, fmt.Sprintf("%d %s", counts[kind], plural(kind, counts[kind])))
	}
	c.infof("applied %s: %s", cmp.Or(opts.dir, "the caretaker example"), strings.Join(parts, ", "))
	return nil
}

// firstHeartbeat runs and prints one heartbeat. A failed heartbeat does not end dev.
func (c *cli) firstHeartbeat(ctx context.Context, s *session, a *app.App) error {
	c.infof("running a heartbeat …")
	acting, err := a.Loop.Agents.Default(ctx, s.Pool)
	if err != nil {
		return err
	}
	x, err := a.Engine.RunSync(ctx, heartbeat.SpecOf(acting))
	if held, paused := errors.AsType[*executions.PausedError](err); paused {
		return c.skipHeartbeat(ctx, s, acting.Name, held.Pause)
	}
	if err != nil || ctx.Err() != nil {
		return err
	}
	x = x.Redacted(ctx)
	story, err := activity.TraceOf(ctx, s.Pool, x.TraceID)
	if err != nil {
		return err
	}
	if x.ErrorMessage != nil {
		c.infof("the heartbeat %s: %s", x.Status, printable(*x.ErrorMessage))
	}
	return c.tryPrint(story, func(w io.Writer) error { return c.writeHeartbeat(w, story, x) })
}

// printWelcome prints the addresses and credentials of the running agent.
func (c *cli) printWelcome(s *session, listener net.Listener, about string, all []agents.Agent, opts devOptions) {
	base := "http://" + listener.Addr().String()
	acting := all[0] // the default agent
	kept, asClient := "DATABASE_URL", ""
	if s.server != nil {
		asClient = fmt.Sprintf("\n  SQL client   psql '%s'", clientURL(s.url))
		kept = s.server.Dir() + " (kept; --ephemeral uses a new one)"
		if opts.ephemeral {
			kept = "a temporary folder, removed at the end"
		}
	}
	c.infof(`
  Engine Room  %s/login#token=%s
  API          %[1]s/v1 (readiness: %[1]s/readyz)
  admin token  %[2]s
  chat         %[1]s/chat#key=%[3]s
  database     %s%s
  data in      %s
  model        %s
  heartbeat    %s (%s)

  In another terminal, in this folder:  agent operate · agent trace last · agent skills ls · agent lanes ls · `+
		`agent executions ls`,
		base, s.config.AdminToken.Reveal(), browserKey(s.config, all), s.displayURL(), asClient, kept, about,
		acting.Heartbeat.Cron, acting.Timezone)
	if opts.dir == "" {
		c.infof("  broken_on_purpose always fails: run agent heartbeat until self-heal disables it.")
	}
	c.infof("  ^C stops")
}

// clientURL returns the address under which the owner of the local database acts as the role of other programs.
func clientURL(address string) string {
	u, err := url.Parse(address)
	if err != nil {
		return address
	}
	q := u.Query()
	q.Set("options", "-crole="+migrations.ClientRole)
	u.RawQuery = q.Encode()
	return u.String()
}

// browserKey returns a chat key for the local browser, preferably one for browsers that reaches the default agent.
func browserKey(cfg config.Config, all []agents.Agent) string {
	names := slices.Sorted(slices.Values(cfg.Chat.BrowserKeys))
	if len(names) == 0 {
		names = slices.Sorted(maps.Keys(cfg.ChatKeys))
	}
	i := slices.IndexFunc(names, func(name string) bool {
		return slices.ContainsFunc(agents.ReachedBy(all, name), func(a agents.Agent) bool { return a.Default })
	})
	return cfg.ChatKeys[names[max(i, 0)]].Reveal()
}
