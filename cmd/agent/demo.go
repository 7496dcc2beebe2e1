package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/api"
	"github.com/lanekeeper/lanekeeper/examples"
	"github.com/lanekeeper/lanekeeper/internal/config"
	"github.com/lanekeeper/lanekeeper/models"
	"github.com/lanekeeper/lanekeeper/workspace"
)

// How long a minute of a story lasts.
const (
	demoMinute     = time.Second
	demoMinuteFast = 100 * time.Millisecond
)

// demoKey is the name of the candidate's chat key. The thread of a story is opened to it.
const demoKey = "visitor"

func (c *cli) demoCommand() *cobra.Command {
	var fast bool
	cmd := &cobra.Command{
		Use:   "demo [NAME]",
		Short: "Play a conversation of several agents in one thread, from outside, and check its order",
		Long: `Play a story of agents in one thread, and check that it goes as it should. Without NAME, or with list, the stories are listed.

It needs nothing: it runs what agent dev --ephemeral runs, with the example workspace onboarding, and plays everybody
outside through HTTP: the candidate, the workers, the systems that raise events. A minute of a story lasts about a
second. Then the thread is shown as SQL has it. With DATABASE_URL the demo makes a database of its own on that server,
agent_demo_…, and drops it at the end. --json prints the story as lines of JSON. Exit 1 when it went otherwise.`,
		Example: "  agent demo chained",
		Args:    args(0, 1, "at most one story"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 || args[0] == "list" {
				return c.listStories()
			}
			all := stories()
			i := slices.IndexFunc(all, func(s story) bool { return s.Name == args[0] })
			if i < 0 {
				return usageError("there is no story %q; see agent demo list", args[0])
			}
			minute := demoMinute
			if fast {
				minute = demoMinuteFast
			}
			return c.demo(cmd.Context(), all[i], minute)
		},
	}
	cmd.Flags().BoolVar(&fast, "fast", false, "a minute of the story lasts a tenth of a second")
	return cmd
}

// listStories shows what can be played.
func (c *cli) listStories() error {
	all := stories()
	return c.print(listing(all, ""), func(w io.Writer) error {
		rows := make([][]string, len(all))
		for i, s := range all {
			rows[i] = []string{s.Name, s.About}
		}
		return table(w, "there are no stories", []string{"STORY", "WHAT HAPPENS"}, rows)
	})
}

// demo makes a runtime of its own, plays a story in it, and takes everything down again.
func (c *cli) demo(ctx context.Context, play story, minute time.Duration) error {
	if c.environ["AGENT_LOG_LEVEL"] == "" {
		c.environ["AGENT_LOG_LEVEL"] = "error" // the story tells what the lines would
	}
	cfg, log, err := c.settings()
	if err != nil {
		return err
	}
	heard := &journal{}
	s := &session{config: demoConfig(cfg), log: heard.beside(log), url: cfg.DatabaseURL.Reveal()}
	listener, err := listen(ctx, s.config)
	if err != nil {
		return err
	}
	defer listener.Close()
	drop, err := s.ownDatabase(ctx, c)
	if err != nil {
		return err
	}
	err = c.prepareDev(ctx, s, devOptions{ephemeral: true})
	if err == nil {
		err = c.perform(ctx, s, listener, &stage{cli: c, story: play, minute: minute, heard: heard})
		s.close(ctx)
	}
	if err := errors.Join(err, drop(ctx)); err != nil || ctx.Err() == nil {
		return err
	}
	return ctx.Err()
}

// demoConfig is the configuration without what would make the story another one.
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

// perform runs the whole agent for as long as the story lasts.
func (c *cli) perform(ctx context.Context, s *session, listener net.Listener, st *stage) error {
	source, err := examples.Onboarding()
	if err != nil {
		return err
	}
	files, err := workspace.Load(source)
	if err != nil {
		return err
	}
	files.Reserved = api.ReservedFlows()
	if files.GoFlows, err = c.goFlows(ctx, s); err != nil {
		return err
	}
	if _, err := applyFiles(ctx, s.pool, files, workspace.Options{}); err != nil {
		return err
	}
	model, _, stop, err := newModel(ctx, s.config, s.log, models.Retry{})
	if err != nil {
		return err
	}
	defer stop()
	a, err := c.app(s, model)
	if err != nil {
		return err
	}
	st.pool = s.pool
	st.client = newClient("http://"+listener.Addr().String(), s.config)
	defer st.client.http.CloseIdleConnections()
	running, over := context.WithCancel(ctx)
	defer over()
	var played error
	err = a.serving(running, listener,
		func(ctx context.Context) error { return s.watch(ctx, c) },
		func(ctx context.Context) error {
			defer over()
			playing, enough := context.WithCancel(ctx)
			defer enough()
			defer context.AfterFunc(running, enough)() // what it asks for is not waited for
			played = st.play(playing)
			return nil
		})
	return errors.Join(played, err)
}

// intro is a story's introduction for a person.
func (s story) intro(minute time.Duration) string {
	return fmt.Sprintf("%s: %s. A minute lasts about %s.", s.Name, strings.TrimSuffix(s.About, "."), minute)
}

// ownDatabase makes a database beside the one that DATABASE_URL names, and turns the session to it: what is in that one
// stays as it is. drop removes it when the session is closed. Without DATABASE_URL there is nothing to do.
func (s *session) ownDatabase(ctx context.Context, c *cli) (drop func(ctx context.Context) error, err error) {
	if s.url == "" {
		return func(context.Context) error { return nil }, nil
	}
	address, err := url.Parse(s.url)
	if err != nil {
		return nil, usageError("DATABASE_URL: it is not a PostgreSQL URL")
	}
	given, name := s.url, "agent_demo_"+strings.ToLower(rand.Text()[:10])
	if err := administer(ctx, given, "create database "+pgx.Identifier{name}.Sanitize()); err != nil {
		return nil, hint(fmt.Errorf("make a database for the demo: %w", err),
			"let the user of DATABASE_URL create databases, or unset it: then the demo runs a PostgreSQL of its own")
	}
	c.say("playing in the database %s on that server, dropped at the end", name)
	address.Path = "/" + name
	s.url = address.String()
	return func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
		defer cancel()
		if err := administer(ctx, given, "drop database if exists "+pgx.Identifier{name}.Sanitize()+" with (force)"); err != nil {
			return hint(fmt.Errorf("drop the demo's database: %w", err), "drop database %s", name)
		}
		return nil
	}, nil
}

// administer runs one statement on a server.
func administer(ctx context.Context, address, statement string) error {
	conn, err := pgx.Connect(ctx, address)
	if err != nil {
		return err
	}
	_, err = conn.Exec(ctx, statement, pgx.QueryExecModeSimpleProtocol)
	return errors.Join(err, conn.Close(context.WithoutCancel(ctx)))
}
