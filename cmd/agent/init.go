package main

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/examples"
	"github.com/lanekeeper/lanekeeper/internal/schedule"
	"github.com/lanekeeper/lanekeeper/workspace"
)

// The folder of the workspace that agent init makes, and the file by which agent dev knows it.
const (
	workspaceDir = "workspace"
	agentFile    = "agent.yaml"
)

// The database of a new workspace that has one: what skills call it, and the variable that has its URL.
const (
	starterDatabase    = "app"
	starterDatabaseEnv = "APP_DATABASE_URL"
)

// initOptions are the flags of agent init.
type initOptions struct {
	dir, name, purpose, database, timezone, example string
	yes                                             bool
}

func (c *cli) initCommand() *cobra.Command {
	opts := initOptions{dir: "."}
	cmd := &cobra.Command{
		Use:   "init [DIR]",
		Short: "Begin a workspace: an agent, a skill on your database, an automation",
		Long: `Begin a workspace in DIR (this folder when left out): DIR/workspace with one agent, one sql: skill on your own database and
one automation, each with comments. It asks three questions on a terminal; flags answer them, and --yes takes the defaults.

A database URL goes into DIR/.env, which agent dev reads, and never into the workspace. Nothing is overwritten.

--example orders begins with a whole example instead, a shop's order desk, and the SQL of its database (DIR/shop.sql).`,
		Example: "  agent init\n  agent init shop --name nora --purpose 'Answer questions about orders.' --database postgres://…\n" +
			"  agent init shop --example orders --database postgres://…/shop",
		Args: args(0, 1, "at most one folder"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 1 {
				opts.dir = args[0]
			}
			return c.initWorkspace(cmd.Context(), opts)
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&opts.name, "name", "", "the agent's name: letters, digits, _ and -; default the folder's")
	flags.StringVar(&opts.purpose, "purpose", "", "what the agent is for, in one sentence")
	flags.StringVar(&opts.database, "database", "", "the URL of the database that it may read; default the agent's own")
	flags.StringVar(&opts.timezone, "timezone", "", "its time zone, for example Europe/Madrid; default this machine's")
	flags.StringVar(&opts.example, "example", "", "begin with this example: orders")
	flags.BoolVar(&opts.yes, "yes", false, "ask nothing, and take the defaults")
	return cmd
}

// initWorkspace writes the workspace.
func (c *cli) initWorkspace(ctx context.Context, opts initOptions) error {
	if err := opts.free(); err != nil {
		return err
	}
	var begin contents
	var err error
	if opts.example != "" {
		begin, err = opts.fromExample()
	} else if err = c.ask(&opts); err == nil {
		begin, err = opts.fromAnswers()
	}
	if err != nil {
		return err
	}
	if err := opts.write(begin.workspace); err != nil {
		return err
	}
	for name, text := range begin.beside {
		if err := writeNew(filepath.Join(opts.dir, name), string(text), 0o644); err != nil {
			return err
		}
	}
	kept, err := opts.secrets(begin.env)
	if err != nil {
		return err
	}
	c.saySteps(opts, begin, kept)
	return ctx.Err()
}

// contents are the files that agent init writes.
type contents struct {
	workspace map[string][]byte
	beside    map[string][]byte // beside the workspace
	env       string            // the variable that has the URL of the database
	ask       string            // something to ask the agent first
}

// fromExample is the order desk.
func (o initOptions) fromExample() (contents, error) {
	switch {
	case o.example != "orders":
		return contents{}, usageError("--example: there is no %q; there is: orders", o.example)
	case o.name != "" || o.purpose != "" || o.timezone != "":
		return contents{}, usageError("--example has a name, a purpose and a time zone of its own; change them in the workspace")
	case o.database == "":
		return contents{}, usageError("--example orders needs the URL of a database for the shop: --database postgres://…/shop")
	}
	if err := o.checkDatabase(); err != nil {
		return contents{}, err
	}
	all, err := examples.Orders()
	if err != nil {
		return contents{}, err
	}
	begin := contents{
		workspace: map[string][]byte{}, beside: map[string][]byte{}, env: "SHOP_DATABASE_URL",
		ask: "Where is order 1002 of ana@example.com?",
	}
	err = fs.WalkDir(all, ".", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || path == "README.md" {
			return err
		}
		text, err := fs.ReadFile(all, path)
		if name, within := strings.CutPrefix(path, workspaceDir+"/"); within {
			begin.workspace[name] = text
		} else {
			begin.beside[path] = text
		}
		return err
	})
	return begin, err
}

// free refuses a folder that has a workspace already.
func (o initOptions) free() error {
	found, err := os.ReadDir(filepath.Join(o.dir, workspaceDir))
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return fmt.Errorf("look for a workspace: %w", err)
	case len(found) > 0:
		return usageError("%s is not empty; name another folder, or go on with: agent dev", filepath.Join(o.dir, workspaceDir))
	}
	return nil
}

// ask asks on a terminal for what no flag says.
func (c *cli) ask(o *initOptions) error {
	lines := bufio.NewReader(c.in)
	for _, q := range []struct {
		into                *string
		question, otherwise string
		wrong               func() error
	}{
		{&o.name, "Name of the agent", o.folderName(), o.checkName},
		{&o.purpose, "What is it for, in one sentence", "Answer questions about this database.", o.nothingWrong},
		{&o.database, "URL of a database that it may read (empty: its own)", "", o.checkDatabase},
	} {
		if *q.into != "" {
			continue
		}
		if o.yes || !terminal(c.in) || !terminal(c.out) {
			*q.into = q.otherwise
			continue
		}
		for again := true; again; {
			fmt.Fprint(c.err, q.question+orDefault(q.otherwise)+": ")
			line, err := lines.ReadString('\n')
			if err != nil && line == "" {
				fmt.Fprintln(c.err)
				return &exitError{exitInterrupted, nil}
			}
			*q.into = cmp.Or(strings.TrimSpace(line), q.otherwise)
			if err := q.wrong(); err != nil {
				fmt.Fprintln(c.err, err)
				continue
			}
			again = false
		}
	}
	return nil
}

var nameOfAgent = regexp.MustCompile(`^[a-zA-Z][a-zA-Z0-9_-]{0,63}$`)

// checkName refuses what is no name of an agent.
func (o *initOptions) checkName() error {
	if !nameOfAgent.MatchString(o.name) {
		return usageError("--name %q: a name is a letter, then letters, digits, _ and -, at most 64", o.name)
	}
	return nil
}

func (o *initOptions) nothingWrong() error { return nil }

func orDefault(text string) string {
	if text == "" {
		return ""
	}
	return " [" + text + "]"
}

var notInName = regexp.MustCompile(`[^a-zA-Z0-9_-]+`)

// folderName is a name for the agent made of its folder's.
func (o initOptions) folderName() string {
	path, err := filepath.Abs(o.dir)
	if err != nil {
		return "assistant"
	}
	name := strings.TrimLeft(notInName.ReplaceAllString(filepath.Base(path), "-"), "-_0123456789")
	name = strings.TrimRight(name, "-_")
	if len(name) > 40 || name == "agent" {
		name = ""
	}
	return cmp.Or(strings.ToLower(name), "assistant")
}

// fromAnswers is a workspace of what was given.
func (o *initOptions) fromAnswers() (contents, error) {
	o.timezone = cmp.Or(o.timezone, localZone())
	if _, err := schedule.Location(o.timezone); err != nil {
		return contents{}, usageError("--timezone: %w", err)
	}
	if err := o.checkName(); err != nil {
		return contents{}, err
	}
	begin := contents{ask: "which tables are there?"}
	s := examples.Starter{Name: o.name, Purpose: o.purpose, Timezone: o.timezone}
	if o.database != "" {
		if err := o.checkDatabase(); err != nil {
			return contents{}, err
		}
		begin.env = starterDatabaseEnv
		s.Database, s.DatabaseEnv = starterDatabase, starterDatabaseEnv
	}
	var err error
	begin.workspace, err = s.Files()
	return begin, err
}

// checkDatabase refuses what is no URL.
func (o *initOptions) checkDatabase() error {
	if o.database == "" {
		return nil
	}
	u, err := url.Parse(o.database)
	if err != nil || u.Scheme != "postgres" && u.Scheme != "postgresql" {
		return usageError("--database is no URL of PostgreSQL, such as postgres://user:password@host:5432/name; " +
			"in a password, write @ as %%40 and / as %%2F")
	}
	return nil
}

// localZone is this machine's time zone, or UTC where its name is not known.
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

// write puts the files into the workspace, all or none.
func (o initOptions) write(files map[string][]byte) error {
	if err := os.MkdirAll(o.dir, 0o755); err != nil {
		return fmt.Errorf("make %s: %w", o.dir, err)
	}
	made, err := os.MkdirTemp(o.dir, ".workspace-")
	if err != nil {
		return fmt.Errorf("make workspace: %w", err)
	}
	defer os.RemoveAll(made)
	if err := os.Chmod(made, 0o755); err != nil {
		return fmt.Errorf("make workspace: %w", err)
	}
	for name, text := range files {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(made, name)), 0o755); err != nil {
			return fmt.Errorf("make workspace: %w", err)
		}
		if err := os.WriteFile(filepath.Join(made, name), text, 0o644); err != nil {
			return fmt.Errorf("write %s: %w", name, err)
		}
	}
	if _, err := workspace.LoadDir(made); err != nil { // nothing is left that apply would refuse
		return &exitError{exitUsage, err}
	}
	if err := os.Rename(made, filepath.Join(o.dir, workspaceDir)); err != nil {
		return fmt.Errorf("make workspace: %w", err)
	}
	return nil
}

// secrets keeps the database's URL in .env, and that and the data of agent dev out of Git. Where there is an .env
// already, it returns the name of the line that a person adds.
func (o initOptions) secrets(env string) (missing string, err error) {
	if env != "" {
		line := env + "=" + o.database + "\n"
		switch err := writeNew(filepath.Join(o.dir, ".env"), line, 0o600); {
		case errors.Is(err, fs.ErrExist):
			missing = env
		case err != nil:
			return "", err
		}
	}
	err = writeNew(filepath.Join(o.dir, ".gitignore"), ".agent/\n.env\n", 0o644)
	if errors.Is(err, fs.ErrExist) {
		err = nil
	}
	return missing, err
}

// writeNew writes a file that is not there yet.
func writeNew(name, text string, mode fs.FileMode) error {
	file, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
	if err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	_, err = file.WriteString(text)
	if err := errors.Join(err, file.Close()); err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	return nil
}

// saySteps tells what was made, and what comes next.
func (c *cli) saySteps(o initOptions, begin contents, missing string) {
	for _, name := range slices.Sorted(maps.Keys(begin.workspace)) {
		c.say("wrote %s", filepath.Join(o.dir, workspaceDir, name))
	}
	for _, name := range slices.Sorted(maps.Keys(begin.beside)) {
		c.say("wrote %s", filepath.Join(o.dir, name))
	}
	if missing != "" {
		c.say("there is an .env already: add the line %s=… with the URL of the database", missing)
	}
	enter := ""
	if filepath.Clean(o.dir) != "." {
		enter = "cd " + o.dir + "\n  "
	}
	load := ""
	if o.example != "" {
		load = "psql -f shop.sql URL      # the shop's tables, once; URL is that of its database\n  "
	}
	c.say(`
Next:
  %s%sagent dev                    # run it here; ^C stops
  agent chat %q
                               # in another terminal, in the same folder
  Change workspace/*.yaml, then: agent apply workspace`, enter, load, begin.ask)
}
