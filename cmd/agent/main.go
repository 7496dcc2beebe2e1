// Command agent runs autonomous agents on PostgreSQL: heartbeat, surfaces, and the tools to observe and control them.
// It is one binary with one database; `agent dev` starts both.
//
// main starts the process; run is the program and the entry point of tests. A command prints its result to stdout and
// everything else to stderr. With --json each result is a JSON document. Exit codes: 0 done, 1 failed, 2 wrong usage or
// configuration, 3 an eval is undecided, 75 a lane is busy, 130 interrupted, 141 the output of agent operate was
// closed. `agent lanes run` returns the code of its command.
package main

import (
	"context"
	"io"
	"io/fs"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/internal/config"
	"github.com/lanekeeper/lanekeeper/internal/heap"
	"github.com/lanekeeper/lanekeeper/internal/pgserver"
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

// cli holds the environment, streams and global flags of a command.
type cli struct {
	environ map[string]string
	// references are the values of .env for ${NAME} in a workspace.
	references map[string]string
	args       []string
	in         io.Reader
	out        io.Writer
	err        io.Writer
	json       bool
	noColor    bool
	talks      bool         // the command is a conversation, which log lines would interrupt
	server     string       // of --server; empty for commands on this machine
	host       *commandHost // of a command that a caller sent to this server
	sent       commandRequest
	folder     fs.FS // of sent; may be nil
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

// signalContext cancels the context at the first SIGINT, SIGTERM or SIGHUP, and exits at the second.
func signalContext(ctx context.Context) (context.Context, func()) {
	ctx, cancel := context.WithCancel(ctx)
	caught := make(chan os.Signal, 2)
	signal.Notify(caught, os.Interrupt, syscall.SIGTERM)
	if !signal.Ignored(syscall.SIGHUP) { // nohup ignores it
		signal.Notify(caught, syscall.SIGHUP)
	}
	done := make(chan struct{})
	go func() {
		if awaitSecondSignal(caught, done, cancel) {
			os.Exit(exitInterrupted)
		}
	}()
	return ctx, func() {
		signal.Stop(caught)
		close(done)
		cancel()
	}
}

// awaitSecondSignal calls cancel at the first signal. It returns true at the second, and false after done. It ignores
// signals within 100 ms of the first: timeout(1) signals a process and then its group.
func awaitSecondSignal(caught <-chan os.Signal, done <-chan struct{}, cancel func()) bool {
	var first time.Time
	for {
		select {
		case <-done:
			return false
		case <-caught:
		}
		switch {
		case first.IsZero():
			first = time.Now()
			cancel()
		case time.Since(first) > 100*time.Millisecond:
			return true
		}
	}
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
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return unknownCommand(cmd.CommandPath()+" "+args[0], args[0], cmd)
			}
			return nil
		},
		RunE: showHelp, Annotations: map[string]string{"group": "yes"},
	}
	cmd.AddCommand(below...)
	return cmd
}
