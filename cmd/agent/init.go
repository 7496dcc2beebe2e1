package main

import (
	"bufio"
	"cmp"
	"context"
	"fmt"
	"io"
	"maps"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/internal/schedule"
)

// agent dev recognises the workspace of agent init by this folder and file.
const (
	workspaceDir = "workspace"
	agentFile    = "agent.yaml"
)

type initOptions struct {
	dir, name, purpose, database, timezone, example string
	yes                                             bool
}

func (c *cli) initCommand() *cobra.Command {
	opts := initOptions{dir: "."}
	cmd := &cobra.Command{
		Use:   "init [DIR]",
		Short: "Create a workspace: an agent, a skill on your database, an automation",
		Long: `Create DIR/workspace (default: in this folder) with a commented agent, an sql: skill on your own database, an
automation, and an eval that passes with the offline model. On a terminal it asks three questions; flags answer them,
and --yes accepts the defaults. The database URL goes into DIR/.env, never into the workspace. Existing files stay
unchanged.
--example orders creates a complete example instead, a shop's order desk with the SQL of its database (DIR/shop.sql).`,
		Example: "  agent init\n  agent init shop --name nora --purpose 'Answer questions about orders.' --database " +
			"postgres://…\n" +
			"  agent init shop --example orders --database postgres://…/shop",
		Args: positionalArgs(0, 1, "at most one folder"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 1 {
				opts.dir = args[0]
			}
			return c.initWorkspace(cmd.Context(), opts)
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&opts.name, "name", "", "the agent's name: letters, digits, _ and -; default the folder's")
	flags.StringVar(&opts.purpose, "purpose", "", "the agent's purpose, in one sentence")
	flags.StringVar(&opts.database, "database", "", "the URL of a database it may read; default the agent's own")
	flags.StringVar(&opts.timezone, "timezone", "", "its time zone, for example Europe/Madrid; default this machine's")
	flags.StringVar(&opts.example, "example", "", "create this example: orders")
	flags.BoolVar(&opts.yes, "yes", false, "accept the defaults without questions")
	return cmd
}

func (c *cli) initWorkspace(ctx context.Context, opts initOptions) error {
	if err := opts.requireEmpty(); err != nil {
		return err
	}
	var begin initFiles
	var err error
	if opts.example != "" {
		begin, err = opts.fromExample()
	} else if err = c.promptAnswers(&opts); err == nil {
		begin, err = opts.fromAnswers()
	}
	if err != nil {
		return err
	}
	if err := opts.write(begin.workspace); err != nil {
		return err
	}
	for name, text := range begin.extra {
		if err := writeNew(filepath.Join(opts.dir, name), string(text), 0o644); err != nil {
			return err
		}
	}
	missing, err := opts.writeSecrets(begin.databaseEnv)
	if err != nil {
		return err
	}
	c.printNextSteps(opts, begin, missing)
	return ctx.Err()
}

// promptAnswers asks on a terminal for the values that no flag gave.
func (c *cli) promptAnswers(o *initOptions) error {
	lines := bufio.NewReader(c.in)
	for _, q := range []initQuestion{
		{&o.name, "Name of the agent", o.folderName(), o.checkName},
		{&o.purpose, "Its purpose, in one sentence", "Answer questions about this database.", o.acceptAny},
		{&o.database, "URL of a database it may read (empty: its own)", "", o.checkDatabase},
	} {
		if *q.answer != "" {
			continue
		}
		if o.yes || !terminal(c.in) || !terminal(c.out) {
			*q.answer = q.def
			continue
		}
		if err := q.ask(lines, c.err); err != nil {
			return err
		}
	}
	return nil
}

// initQuestion is a question about an option. check validates the option.
type initQuestion struct {
	answer    *string
	text, def string
	check     func() error
}

// ask repeats the question until the answer is valid. The end of the input interrupts the command.
func (q initQuestion) ask(lines *bufio.Reader, out io.Writer) error {
	for {
		fmt.Fprint(out, q.text+defaultSuffix(q.def)+": ")
		line, err := lines.ReadString('\n')
		if err != nil && line == "" {
			fmt.Fprintln(out)
			return &exitError{exitInterrupted, nil}
		}
		*q.answer = cmp.Or(strings.TrimSpace(line), q.def)
		err = q.check()
		if err == nil {
			return nil
		}
		fmt.Fprintln(out, err)
	}
}

var agentName = regexp.MustCompile(`^[a-zA-Z][a-zA-Z0-9_-]{0,63}$`)

func (o *initOptions) checkName() error {
	if !agentName.MatchString(o.name) {
		return usageError("--name %q: a name is a letter, then letters, digits, _ and -, at most 64", o.name)
	}
	return nil
}

func (o *initOptions) acceptAny() error { return nil }

func defaultSuffix(text string) string {
	if text == "" {
		return ""
	}
	return " [" + text + "]"
}

var invalidNameChars = regexp.MustCompile(`[^a-zA-Z0-9_-]+`)

// folderName derives an agent's name from its folder's.
func (o initOptions) folderName() string {
	path, err := filepath.Abs(o.dir)
	if err != nil {
		return "assistant"
	}
	name := strings.TrimLeft(invalidNameChars.ReplaceAllString(filepath.Base(path), "-"), "-_0123456789")
	name = strings.TrimRight(name, "-_")
	if len(name) > 40 || name == "agent" {
		name = ""
	}
	return cmp.Or(strings.ToLower(name), "assistant")
}

func (o *initOptions) checkDatabase() error {
	if o.database == "" {
		return nil
	}
	u, err := url.Parse(o.database)
	if err != nil || u.Scheme != "postgres" && u.Scheme != "postgresql" {
		return usageError("--database is not a PostgreSQL URL such as postgres://user:password@host:5432/name; " +
			"encode @ as %%40 and / as %%2F in a password")
	}
	return nil
}

// localZone returns this machine's time zone, or UTC when its name is unknown.
func localZone() string {
	for _, find := range []func() string{
		func() string { return strings.TrimPrefix(os.Getenv("TZ"), ":") },
		func() string {
			text, _ := os.ReadFile("/etc/timezone")
			return strings.TrimSpace(string(text))
		},
		func() string {
			target, _ := os.Readlink("/etc/localtime")
			_, zone, _ := strings.Cut(target, "zoneinfo/")
			return zone
		},
	} {
		if zone := find(); zone != "" && zone != "Etc/UTC" {
			if _, err := schedule.Location(zone); err == nil {
				return zone
			}
		}
	}
	return "UTC"
}

// printNextSteps lists the written files and the next commands.
func (c *cli) printNextSteps(o initOptions, begin initFiles, missing string) {
	for _, name := range slices.Sorted(maps.Keys(begin.workspace)) {
		c.infof("wrote %s", filepath.Join(o.dir, workspaceDir, name))
	}
	for _, name := range slices.Sorted(maps.Keys(begin.extra)) {
		c.infof("wrote %s", filepath.Join(o.dir, name))
	}
	if missing != "" {
		c.infof(".env exists: add the line %s=… with the database URL", missing)
	}
	enter := ""
	if filepath.Clean(o.dir) != "." {
		enter = "cd " + o.dir + "\n  "
	}
	load := ""
	if o.example != "" {
		load = "psql -f shop.sql URL         # the shop's tables, once; URL is that of its database\n  "
	}
	c.infof(`
Next:
  %s%sagent dev                    # run it here; ^C stops
  agent chat %q
                               # in another terminal, in the same folder
  Change workspace/*.yaml, then: agent apply workspace`, enter, load, begin.firstQuestion)
}
