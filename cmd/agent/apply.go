package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net/url"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/builtins"
	"github.com/lanekeeper/lanekeeper/databases"
	"github.com/lanekeeper/lanekeeper/evals"
	"github.com/lanekeeper/lanekeeper/examples"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/app"
	"github.com/lanekeeper/lanekeeper/internal/config"
	"github.com/lanekeeper/lanekeeper/internal/nearest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/models"
	"github.com/lanekeeper/lanekeeper/surfaces/heartbeat"
	"github.com/lanekeeper/lanekeeper/webhooks"
	"github.com/lanekeeper/lanekeeper/workspace"
)

func (c *cli) applyCommand() *cobra.Command {
	var opts applyOptions
	cmd := &cobra.Command{
		Use:   "apply DIR",
		Short: "Make the database match a workspace folder",
		Long: `Make the database match the YAML files in DIR in one transaction, and show the changes. A second apply
changes nothing. The agent's memory and admin decisions stay. An objective changed by an admin (agent objectives add)
and declared differently in a file is an error.
Rows of an earlier apply that no file declares any more are kept and listed. --prune removes them; on a terminal,
apply asks.

An eval with gate: refuses a change of its agent, skills, model or cases that it has not passed: run agent eval run
--candidate DIR first. --without-evals goes on, and writes --reason to the audit log.

--watch applies DIR again after each file change, until ^C. An error in a file shows line and column, and the last
good state stays. It never asks, removes only with --prune, and warns where an eval would refuse.`,
		Example: "  agent apply ./workspace --dry-run\n  agent apply ./workspace --prune\n  agent apply ./workspace --watch",
		Args:    positionalArgs(1, 1, "a folder"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if args[0] == "" { // an unset shell variable; readWorkspace would apply the example
				return usageError("DIR is empty; name the folder of the workspace")
			}
			opts.dir = args[0]
			if opts.withoutEvals != (opts.reason != "") {
				return usageError("--without-evals needs a --reason for the audit log; --reason needs --without-evals")
			}
			if opts.watch {
				if c.host != nil { // a folder of the server
					return usageError("agent apply --watch runs only on the caller's machine")
				}
				return c.applyAndWatch(cmd, opts)
			}
			files, err := readWorkspace(opts.dir, c.sentFolder())
			if err != nil {
				return err
			}
			return c.withPromptSession(func(cmd *cobra.Command, _ []string, s *session) error {
				return c.printApply(cmd.Context(), s, files, opts)
			})(cmd, args)
		},
	}
	cmd.Flags().BoolVar(&opts.dry, "dry-run", false, "only show the changes")
	cmd.Flags().BoolVar(&opts.watch, "watch", false, "apply again after each file change, until ^C; for development")
	cmd.Flags().BoolVar(&opts.withoutEvals, "without-evals", false, "apply even if evals refuse it")
	cmd.Flags().StringVar(&opts.reason, "reason", "", "with --without-evals: reason for the audit log")
	pruneFlag(cmd.Flags(), &opts.prune)
	return cmd
}

type applyOptions struct {
	dir               string
	dry, prune, watch bool
	withoutEvals      bool
	reason            string
}

// gate returns how an apply treats evals that refuse it.
func (o applyOptions) gate(s *session) *workspace.Gate {
	g := &workspace.Gate{
		Installation: app.EvalInstallation(s.config, buildVersion()), Ignore: o.withoutEvals, Reason: o.reason,
	}
	if o.watch && !o.withoutEvals {
		g.Ignore, g.Reason = true, "apply --watch"
	}
	return g
}

// gateAdvice adds the command that plays the evals which refuse an apply.
func gateAdvice(err error, opts applyOptions) error {
	refused, ok := errors.AsType[*evals.GateError](err)
	if !ok {
		return err
	}
	if opts.dir == "" {
		return hint(err, "name the folder of their workspace: agent dev DIR")
	}
	const otherwise = `agent apply with --without-evals --reason "…" goes on without`
	if len(refused.Suites()) == 0 {
		return hint(err, otherwise)
	}
	command := "agent eval run " + strings.Join(refused.Suites(), " ") + " --candidate " + opts.dir
	if opts.prune {
		command += " --prune"
	}
	return hint(err, "run %s; %s", command, otherwise)
}

// pruneFlag allows removals without a confirmation.
func pruneFlag(flags *pflag.FlagSet, into *bool) {
	flags.BoolVar(into, "prune", false, "remove rows of an earlier apply that no file declares any more")
}

// printApply applies or plans the files and prints the difference.
func (c *cli) printApply(ctx context.Context, s *session, files workspace.Workspace, opts applyOptions) error {
	diff, err := c.applyWorkspace(ctx, s, files, opts)
	if err != nil {
		return err
	}
	c.printWarnings(diff)
	diff.Items = append([]workspace.Item{}, diff.Items...)
	return c.tryPrint(diff, func(w io.Writer) error { return writeDiff(w, diff, opts) })
}

// applyWorkspace makes the database match the files, or only plans it with --dry-run.
func (c *cli) applyWorkspace(
	ctx context.Context, s *session, files workspace.Workspace, opts applyOptions,
) (workspace.Diff, error) {
	var none workspace.Diff
	if err := c.rejectWeakTokens(files); err != nil {
		return none, err
	}
	names, err := c.goFlows(ctx, s)
	if err != nil {
		return none, err
	}
	files.GoFlows, files.AfterApply = names, syncHeartbeats(s)
	named := c.namedDatabases(s)
	defer named.Close()
	if err := c.checkSentWorkspace(ctx, s, files); err != nil {
		return none, err
	}
	options, err := c.confirmRemovals(ctx, s, files, opts, named)
	if err != nil {
		return none, err
	}
	options.Gate = opts.gate(s)
	apply := applyFiles
	if opts.dry {
		apply = workspace.Plan
	}
	diff, err := apply(ctx, s.Pool, files, options)
	opts.prune = options.Prune != nil
	err = gateAdvice(err, opts)
	diff.Warnings = append(diff.Warnings, c.settingWarnings(files, s.config)...)
	return diff, err
}

// namedDatabases opens the named databases of a workspace. The caller closes the client.
func (c *cli) namedDatabases(s *session) *databases.Client {
	return &databases.Client{DB: s.Pool, Getenv: c.getenv}
}

// printWarnings prints the warnings of an apply.
func (c *cli) printWarnings(diff workspace.Diff) {
	for _, warning := range diff.Warnings {
		c.infof("warning: %s", printable(warning))
	}
}

func writeDiff(w io.Writer, diff workspace.Diff, opts applyOptions) error {
	switch {
	case diff.Empty():
		declared := len(diff.Items) - diff.Count(workspace.Keep)
		fmt.Fprintf(w, "no changes: the database matches all %d of %s\n", declared, opts.dir)
	default:
		if err := diff.WriteText(w); err != nil {
			return err
		}
		fmt.Fprintln(w, map[bool]string{true: "dry run: nothing was changed", false: "applied"}[opts.dry])
	}
	_, err := io.WriteString(w, keptText(diff, "agent apply", opts.dir))
	return err
}

// keptText lists undeclared rows that an apply kept, and the command that removes them. It names no command for the
// rows beside the example, since they are another workspace.
func keptText(diff workspace.Diff, command, dir string) string {
	kept := diff.Of(workspace.Keep)
	switch {
	case len(kept) == 0:
		return ""
	case dir == "":
		return fmt.Sprintf("kept, not part of the example: %s\n", itemNames(kept))
	}
	return fmt.Sprintf("kept, not declared in any file: %s; %s --prune removes them\n", itemNames(kept), command+" "+dir)
}

func itemNames(items []workspace.Item) string {
	all := make([]string, len(items))
	for i, item := range items {
		all[i] = item.Kind + " " + item.Name
	}
	return strings.Join(all, ", ")
}

// syncHeartbeats schedules the heartbeats of the applied agents in the same transaction.
func syncHeartbeats(s *session) func(ctx context.Context, tx pgx.Tx) error {
	return func(ctx context.Context, tx pgx.Tx) error {
		return heartbeat.Sync(ctx, tx, app.NewDirectory(s.config), false)
	}
}

// confirmRemovals selects the rows an apply may remove: all with --prune, else those a person at the terminal
// confirmed.
func (c *cli) confirmRemovals(
	ctx context.Context, s *session, files workspace.Workspace, opts applyOptions, named *databases.Client,
) (workspace.Options, error) {
	keep := workspace.Options{OpenDatabase: named.Reach}
	if opts.prune {
		return workspace.Options{Prune: workspace.PruneAll, OpenDatabase: named.Reach}, nil
	}
	if opts.dry || opts.watch || c.json || !terminal(c.in) || !terminal(c.err) {
		return keep, nil
	}
	prune := workspace.Options{Prune: workspace.PruneAll, OpenDatabase: named.Reach}
	planned, err := workspace.Plan(ctx, s.Pool, files, prune)
	if used, ok := errors.AsType[*workspace.InUseError](err); ok {
		c.infof("nothing removed: %s", used)
		return keep, nil
	}
	if err != nil {
		return keep, err
	}
	removals := planned.Of(workspace.Remove)
	if len(removals) == 0 {
		return keep, nil
	}
	c.infof("Rows of an earlier apply that no file of %s declares any more:", cmp.Or(opts.dir, "the example"))
	for _, item := range removals {
		c.infof("- %s %s", item.Kind, item.Name)
	}
	yes, err := c.confirm(ctx, fmt.Sprintf("Remove %d %s?", len(removals), plural("row", len(removals))))
	if err != nil || !yes {
		return keep, err
	}
	agreed := func(item workspace.Item) bool {
		return slices.ContainsFunc(removals, func(seen workspace.Item) bool {
			return seen.Kind == item.Kind && seen.Name == item.Name
		})
	}
	return workspace.Options{Prune: agreed, OpenDatabase: named.Reach}, nil
}

// rejectWeakTokens rejects endpoints with weak bearer tokens in this environment.
func (c *cli) rejectWeakTokens(files workspace.Workspace) error {
	var problems []error
	for _, d := range files.Webhooks {
		if err := webhooks.CheckTokens(d.Definition.Scheme, d.Definition.Secrets, c.getenv); err != nil {
			problems = append(problems, fmt.Errorf("%s: webhook %s: %w", d.At, d.Definition.Name, err))
		}
	}
	if len(problems) == 0 {
		return nil
	}
	return &exitError{exitUsage, errors.Join(problems...)}
}

// applyFiles applies a workspace and stores the builtins twice. An automation may call a builtin; a builtin that the
// workspace no longer replaces returns.
func applyFiles(
	ctx context.Context, db postgres.Beginner, files workspace.Workspace, o workspace.Options,
) (workspace.Diff, error) {
	if _, err := builtins.Put(ctx, db); err != nil {
		return workspace.Diff{}, err
	}
	diff, err := workspace.Apply(ctx, db, files, o)
	if err != nil {
		return workspace.Diff{}, err
	}
	_, err = builtins.Put(ctx, db)
	return diff, err
}

// settingWarnings reports what the settings of this process do not match. The serving process may have other settings,
// so these are no errors.
func (c *cli) settingWarnings(files workspace.Workspace, cfg config.Config) []string {
	return append(agentWarnings(files.Agents, cfg), c.unsetWarnings(files)...)
}

// unsetWarnings reports references to unset variables of the environment.
func (c *cli) unsetWarnings(files workspace.Workspace) (warnings []string) {
	check := func(at workspace.Position, fields ...any) {
		var unset []string
		for _, match := range reference.FindAllStringSubmatch(fmt.Sprint(fields...), -1) {
			if name := match[1]; name != "" && c.getenv(name) == "" && !slices.Contains(unset, name) {
				unset = append(unset, name)
			}
		}
		if len(unset) > 0 {
			warnings = append(warnings, fmt.Sprintf("%s: not set in this environment: %s; the serving process needs it", at,
				strings.Join(unset, ", ")))
		}
	}
	for _, d := range files.Skills {
		check(d.At, d.Definition.Config["headers"])
	}
	for _, d := range files.MCPServers {
		check(d.At, d.Definition.Headers, d.Definition.Env)
	}
	for _, d := range files.Webhooks {
		check(d.At, d.Definition.Secrets, d.Definition.VerifyToken)
	}
	for _, d := range files.Targets {
		check(d.At, d.Definition.URL, d.Definition.Secrets)
	}
	for _, d := range files.Channels {
		check(d.At, d.Definition.Secrets)
	}
	return warnings
}

// agentWarnings reports models and chat keys unknown to the settings, and delegates that visitors cannot reach.
func agentWarnings(documents []workspace.Document[agents.Definition], cfg config.Config) (warnings []string) {
	for _, d := range documents {
		for _, model := range append([]string{d.Definition.Model}, d.Definition.Fallback...) {
			if model != "" && !knownModel(model, cfg) {
				known := slices.Concat(models.KnownPrefixes(), slices.Collect(maps.Keys(app.Prices(cfg))))
				slices.Sort(known)
				warnings = append(warnings, fmt.Sprintf("%s: unknown model %q: no price, no facts%s",
					d.At, model, suggestion(model, known)))
			}
		}
		keys := slices.Sorted(maps.Keys(cfg.ChatKeys))
		for _, key := range d.Definition.Keys {
			if len(keys) > 0 && !slices.Contains(keys, key) {
				warnings = append(warnings, fmt.Sprintf("%s: no chat key %q in AGENT_CHAT_KEY%s", d.At, key, suggestion(key, keys)))
			}
		}
		if len(d.Definition.Delegates) > 0 && len(d.Definition.Keys) > 0 {
			warnings = append(warnings, fmt.Sprintf("%s: delegates act in an admin's session only; "+
				"visitors of %s get no tool delegate", d.At, strings.Join(d.Definition.Keys, ", ")))
		}
	}
	return warnings
}

// knownModel reports whether a model is known, or a custom server may offer it.
func knownModel(model string, cfg config.Config) bool {
	if _, priced := app.Prices(cfg).Of(model); priced || model == cfg.Model ||
		models.LookupModel(model) != (models.ModelInfo{}) {
		return true
	}
	server, err := url.Parse(cfg.OpenAIBaseURL)
	return err == nil && server.Host != "" && !strings.HasSuffix("."+server.Hostname(), ".api.openai.com")
}

// suggestion formats the nearest known name, if one is near.
func suggestion(name string, known []string) string {
	if near := nearest.To(name, known); near != "" {
		return fmt.Sprintf("; did you mean %q?", near)
	}
	return ""
}

// readWorkspace reads a folder, from its files or from those that a caller sent, or the caretaker example without one.
// It rejects builtins unknown to this binary.
func readWorkspace(dir string, sent fs.FS) (workspace.Workspace, error) {
	if dir != "" {
		var files workspace.Workspace
		var err error
		if sent != nil {
			files, err = workspace.LoadFrom(sent, dir)
		} else {
			files, err = workspace.LoadDir(dir)
		}
		if err == nil {
			err = files.CheckBuiltins(builtins.Names())
			files.Reserved = executions.Reserved()
		}
		if err != nil {
			return workspace.Workspace{}, &exitError{exitUsage, err}
		}
		return files, nil
	}
	source, err := examples.Caretaker()
	if err != nil {
		return workspace.Workspace{}, err
	}
	return workspace.Load(source)
}
