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
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/fsnotify/fsnotify"
	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/builtins"
	"github.com/lanekeeper/lanekeeper/databases"
	"github.com/lanekeeper/lanekeeper/evals"
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

--watch applies DIR again after each file change, until ^C. An error shows file, line and column, and the last good
state stays. It never asks, removes only with --prune, and warns where an eval would refuse.`,
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
	refused, is := errors.AsType[*evals.GateError](err)
	if !is {
		return err
	}
	const otherwise = `agent apply with --without-evals --reason "…" goes on without`
	if len(refused.Suites()) == 0 {
		return hint(err, otherwise)
	}
	command := "agent eval run " + strings.Join(refused.Suites(), " ") + " --candidate " + cmp.Or(opts.dir, ".")
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
	diff.Warnings = append(diff.Warnings, agentWarnings(files.Agents, s.config)...)
	return diff, err
}

// namedDatabases opens the named databases of a workspace. The caller closes the client.
func (c *cli) namedDatabases(s *session) *databases.Client {
	return &databases.Client{DB: s.Pool, Getenv: c.getenv}
}

// printWarnings prints the checks that an apply could not make.
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
	_, err := io.WriteString(w, keptText(diff, "agent apply "+opts.dir))
	return err
}

// keptText lists undeclared rows that an apply kept, and the command that removes them.
func keptText(diff workspace.Diff, command string) string {
	kept := diff.Of(workspace.Keep)
	if len(kept) == 0 {
		return ""
	}
	return fmt.Sprintf("kept, not declared in any file: %s; %s --prune removes them\n", itemNames(kept), command)
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

// confirm asks a yes/no question on the terminal. Only y and yes confirm.
func (c *cli) confirm(ctx context.Context, question string) (yes bool, err error) {
	fmt.Fprintf(c.err, "%s [y/N] ", question)
	answered := make(chan string, 1)
	go func() { answered <- readLine(c.in) }() // a read cannot be interrupted; it ends with the process
	select {
	case <-ctx.Done():
		return false, &exitError{exitInterrupted, nil}
	case line := <-answered:
		answer := strings.ToLower(strings.TrimSpace(line))
		return answer == "y" || answer == "yes", nil
	}
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

// agentWarnings reports models and chat keys unknown to the settings, and delegates that visitors cannot reach. The
// serving process may have other settings, so they are no errors.
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

// quietPeriod debounces changes: an editor saves in several writes.
const quietPeriod = 100 * time.Millisecond

// applyAndWatch runs agent apply --watch. An interrupt ends it with exit code 0.
func (c *cli) applyAndWatch(cmd *cobra.Command, opts applyOptions) error {
	if opts.dry {
		return usageError("--watch and --dry-run exclude each other")
	}
	watched, err := watchDir(opts.dir)
	if err != nil {
		return err
	}
	defer watched.Close()
	if c.json {
		return usageError("--watch and --json exclude each other: --json prints one document")
	}
	err = c.withPromptSession(func(cmd *cobra.Command, _ []string, s *session) error {
		w := &workspaceWatcher{cli: c, session: s, opts: opts, dir: watched, out: c.out}
		w.apply(cmd.Context())
		return w.run(cmd.Context())
	})(cmd, nil)
	if cmd.Context().Err() != nil {
		return nil
	}
	return err
}

// watchDev watches the workspace of agent dev --watch until ctx ends. An error does not stop the server.
func (c *cli) watchDev(ctx context.Context, s *session, opts devOptions) error {
	if !opts.watch {
		return nil
	}
	watched, err := watchDir(opts.dir)
	if err != nil {
		return err
	}
	defer watched.Close()
	prompt, err := s.prompt(ctx)
	if err != nil {
		return err
	}
	defer prompt.Pool.Close()
	w := &workspaceWatcher{
		cli: c, session: prompt, dir: watched, out: c.err,
		opts: applyOptions{dir: opts.dir, prune: opts.prune, watch: true},
	}
	w.apply(ctx) // catches changes made during the start
	if err := w.run(ctx); err != nil {
		c.printError(err)
	}
	return nil
}

// workspaceWatcher applies a folder after each change.
type workspaceWatcher struct {
	cli      *cli
	session  *session
	opts     applyOptions
	dir      *dirWatcher
	out      io.Writer
	lastKept string // the last printed list of kept rows
}

// run applies the folder after each change, until ctx ends or the folder is gone.
func (w *workspaceWatcher) run(ctx context.Context) error {
	w.cli.infof("watching %s; ^C stops", w.opts.dir)
	for {
		changed, err := w.dir.waitForChange(ctx)
		if err != nil || !changed {
			return err
		}
		w.apply(ctx)
	}
}

// apply applies the folder once and prints the changes in one line. An error is printed and changes nothing.
func (w *workspaceWatcher) apply(ctx context.Context) {
	files, err := readWorkspace(w.opts.dir, nil)
	var diff workspace.Diff
	if err == nil {
		diff, err = w.cli.applyWorkspace(ctx, w.session, files, w.opts)
	}
	if ctx.Err() != nil {
		return
	}
	if err != nil {
		w.cli.printError(withAdvice(err))
		w.cli.infof("nothing was changed; the next file change retries")
		return
	}
	w.cli.printWarnings(diff)
	fmt.Fprintln(w.out, printable(diffLine(diff, w.opts.dir)))
	if text := keptText(diff, "agent apply "+w.opts.dir); text != w.lastKept {
		fmt.Fprint(w.out, text)
		w.lastKept = text
	}
}

func diffLine(diff workspace.Diff, dir string) string {
	if diff.Empty() {
		return "no changes: the database matches " + dir
	}
	marks := map[workspace.Action]string{workspace.Create: "+", workspace.Update: "~", workspace.Remove: "-"}
	var parts []string
	for _, item := range diff.Items {
		mark, changed := marks[item.Action]
		if !changed {
			continue
		}
		part := mark + " " + item.Kind + " " + item.Name
		if len(item.Changes) > 0 {
			fields := make([]string, len(item.Changes))
			for i, change := range item.Changes {
				fields[i] = change.Field
			}
			part += " (" + strings.Join(fields, ", ") + ")"
		}
		parts = append(parts, part)
	}
	return "applied: " + strings.Join(parts, ", ")
}

// dirWatcher reports changes of YAML files in a folder and its subfolders.
type dirWatcher struct {
	*fsnotify.Watcher
	dir string
}

// watchDir watches a folder. The caller closes the watcher.
func watchDir(dir string) (*dirWatcher, error) {
	if info, err := os.Stat(dir); err != nil || !info.IsDir() {
		_, err := readWorkspace(dir, nil) // returns the precise error
		return nil, err
	}
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return nil, hint(fmt.Errorf("watch %s: %w", dir, err),
			"raise fs.inotify.max_user_instances, or apply without --watch")
	}
	f := &dirWatcher{watcher, filepath.Clean(dir)}
	if err := f.add(f.dir); err != nil {
		watcher.Close()
		return nil, hint(fmt.Errorf("watch %s: %w", dir, err), "raise fs.inotify.max_user_watches, or apply without --watch")
	}
	return f, nil
}

// add watches a folder and its subfolders, except hidden ones.
func (f *dirWatcher) add(dir string) error {
	return filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		switch {
		case errors.Is(err, fs.ErrNotExist): // removed meanwhile
			return nil
		case err != nil:
			return err
		case !entry.IsDir():
			return nil
		case hiddenFile(path) && path != f.dir:
			return fs.SkipDir
		}
		if err := f.Add(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		return nil
	})
}

// waitForChange blocks until the folder changed and is quiet again. It returns false when ctx ends first.
func (f *dirWatcher) waitForChange(ctx context.Context) (bool, error) {
	var quiet <-chan time.Time
	for {
		select {
		case <-ctx.Done():
			return false, nil
		case <-quiet:
			return true, nil
		case event := <-f.Events:
			if event.Name == f.dir && event.Has(fsnotify.Remove|fsnotify.Rename) {
				return false, fmt.Errorf("watch %s: the folder was removed or renamed", f.dir)
			}
			if f.relevant(event) {
				quiet = time.After(quietPeriod)
			}
		case err := <-f.Errors:
			if !errors.Is(err, fsnotify.ErrEventOverflow) {
				return false, fmt.Errorf("watch %s: %w", f.dir, err)
			}
			quiet = time.After(quietPeriod) // events were lost: apply everything
		}
	}
}

// relevant reports whether an event may change a declaration. It also watches new folders.
func (f *dirWatcher) relevant(event fsnotify.Event) bool {
	if event.Op == fsnotify.Chmod || hiddenFile(event.Name) {
		return false
	}
	switch filepath.Ext(event.Name) {
	case ".yaml", ".yml":
		return true
	}
	if event.Has(fsnotify.Create) {
		info, err := os.Lstat(event.Name)
		if err != nil || !info.IsDir() {
			return false
		}
		return f.add(event.Name) == nil
	}
	return event.Has(fsnotify.Remove|fsnotify.Rename) && filepath.Ext(event.Name) == "" // maybe a folder
}

func hiddenFile(path string) bool { return strings.HasPrefix(filepath.Base(path), ".") }
