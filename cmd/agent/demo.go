package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/examples"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/app"
	"github.com/lanekeeper/lanekeeper/internal/config"
	"github.com/lanekeeper/lanekeeper/models"
	"github.com/lanekeeper/lanekeeper/workspace"
)

// Duration of one story minute.
const (
	demoMinute     = time.Second
	demoMinuteFast = 100 * time.Millisecond
)

// demoKey names the candidate's chat key. It has access to the story's thread.
const demoKey = "visitor"

func (c *cli) demoCommand() *cobra.Command {
	var fast bool
	cmd := &cobra.Command{
		Use:   "demo [NAME]",
		Short: "Play a conversation of several agents in one thread and check its order",
		Long: `Play a story of several agents in one thread and check the order of its events. Without NAME, or with list, it
lists the stories. It needs no setup: it runs agent dev --ephemeral with the example workspace onboarding, and plays
all external participants over HTTP: the candidate, workers, and systems that raise events. A story minute lasts about
a second. At the end it prints the thread from SQL. With DATABASE_URL it creates the database agent_demo_… on that
server and drops it at the end. --json prints JSON lines. The exit code is 1 when the story went differently.`,
		Example: "  agent demo chained",
		Args:    positionalArgs(0, 1, "at most one story"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 || args[0] == "list" {
				return c.listStories()
			}
			all := stories()
			i := slices.IndexFunc(all, func(s story) bool { return s.Name == args[0] })
			if i < 0 {
				return hint(fmt.Errorf("there is no story %q", args[0]), "see agent demo list")
			}
			minute := demoMinute
			if fast {
				minute = demoMinuteFast
			}
			return c.demo(cmd.Context(), all[i], minute)
		},
	}
	cmd.Flags().BoolVar(&fast, "fast", false, "a story minute lasts a tenth of a second")
	return cmd
}

func (c *cli) listStories() error {
	all := stories()
	return printRows(c, all, "", "there are no stories", []string{"STORY", "ABOUT"}, func(s story) []string {
		return []string{s.Name, s.About}
	})
}

// demo starts a separate runtime, plays a story in it, and removes everything again.
func (c *cli) demo(ctx context.Context, chosen story, minute time.Duration) error {
	if c.environ["AGENT_LOG_LEVEL"] == "" {
		c.environ["AGENT_LOG_LEVEL"] = "error" // the story replaces the log lines
	}
	cfg, log, err := c.settings()
	if err != nil {
		return err
	}
	logs := &logCapture{}
	s := &session{config: demoConfig(cfg), log: logs.tee(log), url: cfg.DatabaseURL.Reveal()}
	listener, err := listen(ctx, s.config)
	if err != nil {
		return err
	}
	defer listener.Close()
	drop, err := s.createDemoDatabase(ctx, c)
	if err != nil {
		return err
	}
	err = c.prepareDev(ctx, s, devOptions{ephemeral: true})
	if err == nil {
		err = c.playStory(ctx, s, listener, &storyPlayer{cli: c, story: chosen, minute: minute, logs: logs})
		s.close(ctx)
	}
	if err := errors.Join(err, drop(ctx)); err != nil || ctx.Err() == nil {
		return err
	}
	return ctx.Err()
}

// demoConfig overrides settings that would change the story.
func demoConfig(cfg config.Config) config.Config {
	cfg.Listen = "127.0.0.1:0"
	cfg.OpenAIBaseURL, cfg.OpenAIKey, cfg.Model = "", "", ""
	cfg.AdminToken = config.Secret(rand.Text())
	cfg.ChatKeys = map[string]config.Secret{demoKey: config.Secret(rand.Text())}
	cfg.LanesEnabled, cfg.Admission = true, nil
	cfg.HeartbeatCron = "0 0 1 1 *"
	cfg.DrainDelay = 0
	return cfg
}

// playStory runs the whole agent while the story lasts.
func (c *cli) playStory(ctx context.Context, s *session, listener net.Listener, player *storyPlayer) error {
	source, err := examples.Onboarding()
	if err != nil {
		return err
	}
	files, err := workspace.Load(source)
	if err != nil {
		return err
	}
	files.Reserved = executions.Reserved()
	if files.GoFlows, err = c.goFlows(ctx, s); err != nil {
		return err
	}
	if _, err := applyFiles(ctx, s.Pool, files, workspace.Options{}); err != nil {
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
	player.pool = s.Pool
	player.client = newClient("http://"+listener.Addr().String(), s.config)
	defer player.client.http.CloseIdleConnections()
	runCtx, stopRun := context.WithCancel(ctx)
	defer stopRun()
	var storyErr error
	err = a.Serve(runCtx, listener,
		func(ctx context.Context) error { return s.restartServer(ctx, c) },
		func(ctx context.Context) error {
			defer stopRun()
			playCtx, stopPlay := context.WithCancel(ctx)
			defer stopPlay()
			defer context.AfterFunc(runCtx, stopPlay)() // cancels its pending requests
			storyErr = player.play(playCtx)
			return nil
		})
	return errors.Join(storyErr, err)
}

func (s story) intro(minute time.Duration) string {
	return fmt.Sprintf("%s: %s. A minute lasts about %s.", s.Name, strings.TrimSuffix(s.About, "."), minute)
}

// createDemoDatabase creates a database on the server of DATABASE_URL and points the session to it. drop removes it.
// Without DATABASE_URL it does nothing.
func (s *session) createDemoDatabase(ctx context.Context, c *cli) (drop func(ctx context.Context) error, err error) {
	if s.url == "" {
		return func(context.Context) error { return nil }, nil
	}
	address, err := url.Parse(s.url)
	if err != nil || address.Scheme == "" {
		return nil, usageError("DATABASE_URL: agent demo needs a URL such as postgres://user:password@host:5432/name")
	}
	adminURL, name := s.url, "agent_demo_"+strings.ToLower(rand.Text()[:10])
	if err := execOnServer(ctx, adminURL, "create database "+pgx.Identifier{name}.Sanitize()); err != nil {
		return nil, hint(fmt.Errorf("create the demo database: %w", err),
			"grant createdb to the user of DATABASE_URL, or unset it to use a local PostgreSQL")
	}
	c.infof("using database %s on that server, dropped at the end", name)
	address.Path = "/" + name
	s.url = address.String()
	return func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
		defer cancel()
		if err := execOnServer(ctx, adminURL, "drop database if exists "+pgx.Identifier{name}.Sanitize()+
			" with (force)"); err != nil {
			return hint(fmt.Errorf("drop the demo's database: %w", err), "drop database %s", name)
		}
		return nil
	}, nil
}

func execOnServer(ctx context.Context, address, statement string) error {
	conn, err := pgx.Connect(ctx, address)
	if err != nil {
		return err
	}
	_, err = conn.Exec(ctx, statement, pgx.QueryExecModeSimpleProtocol)
	return errors.Join(err, conn.Close(context.WithoutCancel(ctx)))
}
