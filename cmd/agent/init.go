package main

import (
	"bufio"
	"cmp"
	"context"
	"errors"
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

// workspaceDir is the folder in which agent dev finds a workspace of agent init.
const workspaceDir = "workspace"

type initOptions struct {
	dir      string
	name     string
	purpose  string
	database string // its URL
	timezone string
	example  string
	yes      bool
}

func (c *cli) initCommand() *cobra.Command {
	opts := initOptions{dir: "."}
	cmd := &cobra.Command{
		Use:   "init [DIR]",
		Short: "Create a workspace: an agent, a skill on your database, an automation",
		Long: `Create DIR/workspace (default: in this folder) with a commented agent, an sql: skill on your own database, an
automation, and an eval that passes with the offline model. On a terminal it asks three questions; flags answer them,
and --yes accepts the defaults. The database URL goes into a new DIR/.env, not into the workspace. Existing files stay
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

// initWorkspace asks its questions before it writes anything. The folder of the workspace appears as a whole.
func (c *cli) initWorkspace(ctx context.Context, opts initOptions) error {
	if err := opts.requireEmpty(); err != nil {
		return err
	}
	files, err := c.chooseFiles(ctx, &opts)
	if err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := opts.write(files.workspace); err != nil {
		return err
	}
	kept, err := opts.writeExtra(files.extra)
	if err != nil {
		return err
	}
	missing, err := opts.writeSecrets(files.databaseEnv)
	if err != nil {
		return err
	}
	c.printNextSteps(opts, files, kept, missing)
	return nil
}

func (c *cli) chooseFiles(ctx context.Context, o *initOptions) (initFiles, error) {
	if o.example != "" {
		return o.fromExample()
	}
	if err := c.promptAnswers(ctx, o); err != nil {
		return initFiles{}, err
	}
	return o.fromAnswers()
}

// promptAnswers asks on a terminal for the values that no flag gave. Elsewhere, and with --yes, it takes the defaults.
func (c *cli) promptAnswers(ctx context.Context, o *initOptions) error {
	lines := bufio.NewReader(c.in)
	for _, q := range []initQuestion{
		{&o.name, "Name of the agent", o.folderName(), checkAgentName},
		{&o.purpose, "Its purpose, in one sentence", "Answer questions about this database.", nil},
		{&o.database, "URL of a database it may read (empty: its own)", "", checkDatabaseURL},
	} {
		if *q.answer != "" {
			continue
		}
		if o.yes || !terminal(c.in) || !terminal(c.err) {
			*q.answer = q.defaultValue
			continue
		}
		if err := q.ask(ctx, lines, c.err); err != nil {
			return err
		}
	}
	return nil
}

// initQuestion is a question about an option. check may be nil.
type initQuestion struct {
	answer               *string
	prompt, defaultValue string
	check                func(answer string) error
}

// ask repeats the question until the answer is valid. After an interrupt, and at the end of the input, it returns
// exitInterrupted.
func (q initQuestion) ask(ctx context.Context, lines *bufio.Reader, out io.Writer) error {
	for {
		fmt.Fprint(out, q.prompt+defaultSuffix(q.defaultValue)+": ")
		line, ok := readAnswer(ctx, lines)
		if !ok {
			fmt.Fprintln(out)
			return &exitError{exitInterrupted, nil}
		}
		*q.answer = cmp.Or(strings.TrimSpace(line), q.defaultValue)
		if *q.answer == "" || q.check == nil {
			return nil
		}
		err := q.check(*q.answer)
		if err == nil {
			return nil
		}
		fmt.Fprintln(out, err)
	}
}

// readAnswer reads a line until ctx ends. ok is false after ctx has ended, and at the end of the input.
func readAnswer(ctx context.Context, lines *bufio.Reader) (line string, ok bool) {
	answered := make(chan string, 1)
	go func() { // a read cannot be interrupted; it ends with the process
		defer close(answered)
		if line, err := lines.ReadString('\n'); err == nil || line != "" {
			answered <- line
		}
	}()
	select {
	case <-ctx.Done():
		return "", false
	case line, ok = <-answered:
		return line, ok
	}
}

var agentName = regexp.MustCompile(`^[a-zA-Z][a-zA-Z0-9_-]{0,63}$`)

func checkAgentName(name string) error {
	if !agentName.MatchString(name) {
		return fmt.Errorf("%q: a name is a letter, then letters, digits, _ and -, at most 64", name)
	}
	return nil
}

func checkDatabaseURL(text string) error {
	u, err := url.Parse(text)
	if err != nil || u.Scheme != "postgres" && u.Scheme != "postgresql" {
		return errors.New("not a PostgreSQL URL such as postgres://user:password@host:5432/name; " +
			"encode @ as %40 and / as %2F in a password")
	}
	return nil
}

func defaultSuffix(text string) string {
	if text == "" {
		return ""
	}
	return " [" + text + "]"
}

var invalidNameChars = regexp.MustCompile(`[^a-zA-Z0-9_-]+`)

// folderName derives an agent's name from its folder's. A long name, and the default of AGENT_NAME, become assistant.
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

// localZone returns this machine's time zone, or UTC. It skips Etc/UTC, the long name of UTC.
func localZone() string {
	for _, lookup := range []func() string{
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
		if zone := lookup(); zone != "" && zone != "Etc/UTC" {
			if _, err := schedule.Location(zone); err == nil {
				return zone
			}
		}
	}
	return "UTC"
}

// printNextSteps lists the files of the workspace and of the example, and the next commands. kept are files that
// existed. missing is the variable that an existing .env lacks.
func (c *cli) printNextSteps(o initOptions, files initFiles, kept []string, missing string) {
	for _, name := range slices.Sorted(maps.Keys(files.workspace)) {
		c.infof("wrote %s", filepath.Join(o.dir, workspaceDir, name))
	}
	for _, name := range slices.Sorted(maps.Keys(files.extra)) {
		if slices.Contains(kept, name) {
			c.infof("%s exists and stays unchanged", filepath.Join(o.dir, name))
			continue
		}
		c.infof("wrote %s", filepath.Join(o.dir, name))
	}
	for _, line := range unignored(o.dir) {
		c.infof(".gitignore exists: add the line %s", line)
	}
	if missing != "" {
		c.infof(".env exists: add the line %s=… with the database URL", missing)
	}
	cdCommand := ""
	if filepath.Clean(o.dir) != "." {
		cdCommand = "cd " + shellWord(o.dir) + "\n  "
	}
	loadCommand := ""
	if o.example != "" {
		loadCommand = "psql -f shop.sql URL         # the shop's tables, once; URL is that of its database\n  "
	}
	c.infof(`
Next:
  %s%sagent dev                    # run it here; ^C stops
  agent chat %q
                               # in another terminal, in the same folder
  Change workspace/*.yaml, then: agent apply workspace`, cdCommand, loadCommand, files.firstQuestion)
}

var plainShellWord = regexp.MustCompile(`^[a-zA-Z0-9_./~+:@%-]+$`)

// shellWord quotes a text that a shell would split or expand.
func shellWord(text string) string {
	if plainShellWord.MatchString(text) {
		return text
	}
	return "'" + strings.ReplaceAll(text, "'", `'\''`) + "'"
}
