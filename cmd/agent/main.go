// Command agent runs autonomous agents on PostgreSQL: heartbeat, surfaces, and the tools to observe and control them.
// It is one binary with one database; `agent dev` needs nothing else.
//
// main starts the process; run is the program and the entry point of tests. A command prints its result to stdout and
// everything else to stderr. With --json the result is one JSON document. Exit codes: 0 done, 1 failed, 2 wrong usage
// or configuration, 3 an eval is undecided, 75 a lane is busy, 130 interrupted.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/config"
	"github.com/lanekeeper/lanekeeper/internal/heap"
	"github.com/lanekeeper/lanekeeper/internal/human"
	"github.com/lanekeeper/lanekeeper/internal/nearest"
	"github.com/lanekeeper/lanekeeper/internal/pgserver"
	"github.com/lanekeeper/lanekeeper/principals"
)

func main() {
	pgserver.GuardMain()
	heap.SetMinimumHeap()
	ctx, stop := signalContext(context.Background())
	code := run(ctx, os.Args[1:], os.Environ(), os.Stdin, os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

// run is the program, as tests call it. It returns the exit code.
func run(ctx context.Context, args, environ []string, in io.Reader, out, errw io.Writer) int {
	c := &cli{environ: config.Environ(environ), args: args, in: in, out: out, err: errw}
	return c.run(ctx)
}

func (c *cli) run(ctx context.Context) int {
	err := c.execute(ctx)
	if err == nil {
		return 0
	}
	code := exitCode(ctx, err)
	c.reportError(code, err)
	return code
}

// execute runs the command. A panic becomes an error.
func (c *cli) execute(ctx context.Context) (err error) {
	defer func() {
		if reason := recover(); reason != nil {
			err = c.panicError(ctx, reason)
		}
	}()
	root := c.root()
	root.SetArgs(c.args)
	root.SetIn(c.in)
	root.SetOut(c.out)
	root.SetErr(c.err)
	return root.ExecuteContext(ctx)
}

// root builds the command tree.
func (c *cli) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "agent",
		Short: "Run autonomous agents on PostgreSQL: lanes, traces, durable executions",
		Long: strings.TrimSpace(`
Lanekeeper runs autonomous agents on PostgreSQL.

  agent dev                 run everything: local PostgreSQL, offline model, a first heartbeat
  agent init                create a workspace: an agent, a skill on your database, an automation
  agent operate             talk to it as its admin; agent chat: as a visitor
  agent trace last          show the latest run
  agent lanes ls            list held lanes
  agent executions ls       list executions

DATABASE_URL names the database. Without it, commands use the one of agent dev in .agent in this folder.`),
		SilenceErrors: true, SilenceUsage: true,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return unknownCommand(`"`+args[0]+`"`, args[0], cmd)
			}
			return nil
		},
	}
	var version bool
	root.Flags().BoolVar(&version, "version", false, "print the version")
	root.RunE = func(cmd *cobra.Command, args []string) error {
		if version {
			return c.printVersion()
		}
		return showHelp(cmd, args)
	}
	root.PersistentFlags().BoolVar(&c.json, "json", c.environ["AGENT_OUTPUT"] == "json",
		"print the result as one JSON document")
	root.PersistentFlags().BoolVar(&c.noColor, "no-color", false, "no colours, even on a terminal")
	c.serverFlag(root)
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		c.json = c.json || slices.Contains(c.args, "--json") // flags after the error were not parsed
		return &exitError{exitUsage, helpHint(suggestFlag(err, cmd), cmd)}
	})
	root.SetHelpCommand(c.helpCommand())
	root.PersistentPreRunE = func(*cobra.Command, []string) error {
		if form := c.environ["AGENT_OUTPUT"]; form != "" && form != "json" && form != "text" {
			return usageError("AGENT_OUTPUT: unknown format %q; set text or json", form)
		}
		return nil
	}
	root.CompletionOptions.HiddenDefaultCmd = true
	root.AddCommand(c.commands()...)
	c.routeCommands(root)
	refuseUnknownShells(root)
	return root
}

// refuseUnknownShells makes an unknown shell of agent completion an error. Cobra's default is to print help.
func refuseUnknownShells(root *cobra.Command) {
	root.InitDefaultCompletionCmd()
	for _, cmd := range root.Commands() {
		if cmd.Name() != "completion" {
			continue
		}
		cmd.RunE = showHelp
		cmd.Args = func(cmd *cobra.Command, got []string) error {
			if len(got) == 0 {
				return nil
			}
			var shells []string
			for _, shell := range cmd.Commands() {
				shells = append(shells, shell.Name())
			}
			return &exitError{exitUsage, helpHint(fmt.Errorf("unknown shell %q; name one of %s", got[0],
				strings.Join(shells, ", ")), cmd)}
		}
	}
}

// positionalArgs checks the number of arguments.
func positionalArgs(least, most int, want string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, got []string) error {
		if len(got) < least || (most >= 0 && len(got) > most) {
			return &exitError{exitUsage, helpHint(fmt.Errorf("%s takes %s", cmd.CommandPath(), want), cmd)}
		}
		return nil
	}
}

// messageArg accepts one message, or none when the command reads them elsewhere.
func messageArg(cmd *cobra.Command, got []string) error {
	if len(got) == 1 && strings.TrimSpace(got[0]) == "" {
		return &exitError{exitUsage, helpHint(errors.New("the message is empty; pass a text"), cmd)}
	}
	return positionalArgs(0, 1, "at most one message; quote it")(cmd, got)
}

func helpHint(err error, cmd *cobra.Command) error {
	return hint(err, "see %s --help", cmd.CommandPath())
}

// unknownCommand returns the error of an unknown command, with the nearest name below parent.
func unknownCommand(command, word string, parent *cobra.Command) error {
	var names []string
	for _, below := range parent.Commands() {
		if !below.Hidden {
			names = append(names, below.Name())
		}
	}
	err := fmt.Errorf("there is no command %s", command)
	if near := nearest.To(word, names); near != "" {
		err = fmt.Errorf("%w; did you mean %s %s?", err, parent.CommandPath(), near)
	}
	return &exitError{exitUsage, helpHint(err, parent)}
}

// suggestFlag adds the nearest flag to the error of an unknown one, and words the error of an invalid number.
func suggestFlag(err error, cmd *cobra.Command) error {
	invalid, is := errors.AsType[*pflag.InvalidValueError](err)
	if _, number := errors.AsType[*strconv.NumError](err); is && number {
		want := map[bool]string{true: "true or false", false: "a number"}[invalid.GetFlag().Value.Type() == "bool"]
		if errors.Is(err, strconv.ErrRange) {
			want = "a number within bounds"
		}
		return fmt.Errorf("invalid argument %q for --%s: not %s", invalid.GetValue(), invalid.GetFlag().Name, want)
	}
	missing, ok := errors.AsType[*pflag.NotExistError](err)
	if !ok {
		return err
	}
	var names []string
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		if !f.Hidden {
			names = append(names, f.Name)
		}
	})
	if near := nearest.To(missing.GetSpecifiedName(), names); near != "" && len(missing.GetSpecifiedName()) > 1 {
		return fmt.Errorf("%w; did you mean --%s?", err, near)
	}
	return err
}

// helpCommand is agent help COMMAND, the same as agent COMMAND --help.
func (c *cli) helpCommand() *cobra.Command {
	return &cobra.Command{
		Use: "help [COMMAND]", Short: "Help about any command",
		RunE: func(cmd *cobra.Command, args []string) error {
			found, rest, err := cmd.Root().Find(args)
			if err != nil || len(rest) > 0 {
				word := ""
				if len(args) == 1 {
					word = args[0]
				}
				return unknownCommand(strings.Join(args, " "), word, cmd.Root())
			}
			found.InitDefaultHelpFlag()
			return found.Help()
		},
	}
}

// signalContext cancels the context at the first interrupt and exits at the second.
func signalContext(ctx context.Context) (context.Context, func()) {
	ctx, cancel := context.WithCancel(ctx)
	caught := make(chan os.Signal, 2)
	signal.Notify(caught, os.Interrupt, syscall.SIGTERM)
	done := make(chan struct{})
	go func() {
		select {
		case <-caught:
			cancel()
		case <-done:
			return
		}
		select {
		case <-caught:
			os.Exit(exitInterrupted)
		case <-done:
		}
	}()
	return ctx, func() {
		signal.Stop(caught)
		close(done)
		cancel()
	}
}

// commands lists all commands in the order of help.
func (c *cli) commands() []*cobra.Command {
	return []*cobra.Command{
		c.devCommand(),
		c.initCommand(),
		c.demoCommand(),
		c.serveCommand(),
		c.migrateCommand(),
		c.applyCommand(),
		c.agentsCommand(),
		c.modelsCommand(),
		c.heartbeatCommand(),
		c.pauseCommand(),
		c.resumeCommand(),
		c.operateCommand(),
		c.chatCommand(),
		c.threadsCommand(),
		c.traceCommand(),
		c.whyCommand(),
		c.activityCommand(),
		c.lanesCommand(),
		c.executionsCommand(),
		c.flowsCommand(),
		c.evalCommand(),
		c.requestsCommand(),
		c.documentsCommand(),
		c.skillsCommand(),
		c.selfhealCommand(),
		c.approvalsCommand(),
		c.objectivesCommand(),
		c.automationsCommand(),
		c.memoryCommand(),
		c.webhooksCommand(), c.channelsCommand(),
		c.retentionCommand(), c.principalsCommand(), c.tokensCommand(), c.sessionsCommand(),
		c.mcpCommand(),
		c.doctorCommand(),
		c.healthcheckCommand(),
		c.loginCommand(),
		c.logoutCommand(),
		c.versionCommand(),
	}
}

// group is a command that only has subcommands.
func group(use, short string, below ...*cobra.Command) *cobra.Command {
	cmd := &cobra.Command{
		Use: use, Short: short,
		Args: func(cmd *cobra.Command, got []string) error {
			if len(got) > 0 {
				return unknownCommand(cmd.CommandPath()+" "+got[0], got[0], cmd)
			}
			return nil
		},
		RunE: showHelp, Annotations: map[string]string{"group": "yes"},
	}
	cmd.AddCommand(below...)
	return cmd
}

// showHelp prints help. With --json it is a usage error, because help is no result.
func showHelp(cmd *cobra.Command, _ []string) error {
	if asked, err := cmd.Flags().GetBool("json"); err == nil && asked {
		return &exitError{exitUsage, helpHint(fmt.Errorf("%s takes a command", cmd.CommandPath()), cmd)}
	}
	return cmd.Help()
}

// withSession runs a command with an open database.
func (c *cli) withSession(
	work func(cmd *cobra.Command, args []string, s *session) error,
) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		s, err := c.session(cmd.Context())
		if err != nil {
			return err
		}
		defer s.close(cmd.Context())
		cmd.SetContext(acting(cmd.Context()))
		return work(cmd, args, s)
	}
}

// withPromptSession is withSession for changes: a wait for a lock fails after a second, as over HTTP.
func (c *cli) withPromptSession(
	work func(cmd *cobra.Command, args []string, s *session) error,
) func(*cobra.Command, []string) error {
	return c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
		prompt, err := s.prompt(cmd.Context())
		if err != nil {
			return err
		}
		defer prompt.Pool.Close()
		return work(cmd, args, prompt)
	})
}

// acting adds the actor of a command to ctx: the caller of a server, or the admin with access to the database.
func acting(ctx context.Context) context.Context {
	if principals.From(ctx) != nil {
		return ctx
	}
	return activity.WithActor(ctx, activity.Actor{Name: activity.Admin, Via: "cli"})
}

// actor is the name of the acting principal, for the audit.
func actor(ctx context.Context) string { return activity.ActorFrom(ctx).Name }

func formatTime(t time.Time) string { return t.UTC().Format("2006-01-02 15:04:05") }

func formatMillis(ms *int64) string {
	if ms == nil {
		return "…"
	}
	return human.Millis(*ms)
}
