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
		Long: `Make skills, automations and objectives in the database match the YAML files in DIR, in one transaction, and show
what changes. Applying twice changes nothing the second time. What the agent learned and what an admin decided stays.
An objective that an admin has changed in the database (agent objectives add) and that a file declares otherwise is an error.
What an earlier apply declared and no file declares now is kept and listed. --prune removes it; on a terminal, apply
shows the list and asks.

With --watch, for development, it applies DIR again after each change of a file, until ^C. A mistake is shown with its file, line and
column, and the last good state stays. It never asks, and removes only with --prune.`,
		Example: "  agent apply ./workspace --dry-run\n  agent apply ./workspace --prune\n  agent apply ./workspace --watch",
		Args:    args(1, 1, "a folder"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if args[0] == "" { // a variable that is not set; to dev it means the example, which would add to everything
				return usageError("DIR is empty; name the folder of the workspace")
			}
			opts.dir = args[0]
			if opts.watch {
				return c.applyAndWatch(cmd, opts)
			}
			files, err := readWorkspace(opts.dir)
			if err != nil {
				return err
			}
			return c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
				return c.apply(cmd.Context(), s, files, opts)
			})(cmd, args)
		},
	}
	cmd.Flags().BoolVar(&opts.dry, "dry-run", false, "only show what would change")
	cmd.Flags().BoolVar(&opts.watch, "watch", false, "apply again after each change of a file, until ^C; for development")
	pruneFlag(cmd.Flags(), &opts.prune)
	return cmd
}

// applyOptions are the flags of agent apply.
type applyOptions struct {
	dir               string
	dry, prune, watch bool
}

// pruneFlag is the flag that allows removals without a question.
func pruneFlag(flags *pflag.FlagSet, into *bool) {
	flags.BoolVar(into, "prune", false, "remove what an earlier apply declared and no file declares now")
}

// apply changes the database, or only says what would change, and shows it.
func (c *cli) apply(ctx context.Context, s *session, files workspace.Workspace, opts applyOptions) error {
	diff, err := c.change(ctx, s, files, opts)
	if err != nil {
		return err
	}
	c.warn(diff)
	diff.Items = append([]workspace.Item{}, diff.Items...)
	return c.print(diff, func(w io.Writer) error { return writeDiff(w, diff, opts) })
}

// change makes the database match the files, or only plans it.
func (c *cli) change(ctx context.Context, s *session, files workspace.Workspace, opts applyOptions) (workspace.Diff, error) {
	var none workspace.Diff
	if err := c.checkTokens(files); err != nil {
		return none, err
	}
	names, err := c.goFlows(ctx, s)
	if err != nil {
		return none, err
	}
	files.GoFlows, files.Also = names, syncHeartbeats(s)
	named := c.namedDatabases(s)
	defer named.Close()
	decided, err := c.decideRemovals(ctx, s, files, opts, named)
	if err != nil {
		return none, err
	}
	put := applyFiles
	if opts.dry {
		put = workspace.Plan
	}
	diff, err := put(ctx, s.pool, files, decided)
	diff.Warnings = append(diff.Warnings, doubts(files.Agents, s.config)...)
	return diff, err
}

// namedDatabases opens the named databases of a workspace. The caller closes it.
func (c *cli) namedDatabases(s *session) *databases.Client {
	return &databases.Client{DB: s.pool, Getenv: c.getenv}
}

// warn tells what an apply could not check.
func (c *cli) warn(diff workspace.Diff) {
	for _, warning := range diff.Warnings {
		c.say("warning: %s", printable(warning))
	}
}

// writeDiff shows what an apply has changed and what it kept.
func writeDiff(w io.Writer, diff workspace.Diff, opts applyOptions) error {
	switch {
	case diff.Empty():
		declared := len(diff.Items) - diff.Count(workspace.Keep)
		fmt.Fprintf(w, "nothing to change: the database matches all %d of %s\n", declared, opts.dir)
	default:
		if err := diff.WriteText(w); err != nil {
			return err
		}
		fmt.Fprintln(w, map[bool]string{true: "nothing was changed: this was a dry run", false: "applied"}[opts.dry])
	}
	_, err := io.WriteString(w, keptText(diff, "agent apply "+opts.dir))
	return err
}

// keptText says what an apply has kept, and how to remove it; empty when it kept nothing.
func keptText(diff workspace.Diff, command string) string {
	kept := diff.Of(workspace.Keep)
	if len(kept) == 0 {
		return ""
	}
	return fmt.Sprintf("kept, though no file declares it: %s; %s --prune removes it\n", itemNames(kept), command)
}

// itemNames lists rows for a person.
func itemNames(items []workspace.Item) string {
	all := make([]string, len(items))
	for i, item := range items {
		all[i] = item.Kind + " " + item.Name
	}
	return strings.Join(all, ", ")
}

// syncHeartbeats gives the agents that are applied their heartbeats, in the same transaction.
func syncHeartbeats(s *session) func(ctx context.Context, tx pgx.Tx) error {
	return func(ctx context.Context, tx pgx.Tx) error { return heartbeat.Sync(ctx, tx, directory(s.config), false) }
}

// decideRemovals says which rows an apply may remove: all with --prune, those that a person at a terminal has seen and
// agreed to, else none.
func (c *cli) decideRemovals(
	ctx context.Context, s *session, files workspace.Workspace, opts applyOptions, named *databases.Client,
) (workspace.Options, error) {
	keep := workspace.Options{Reach: named.Reach}
	if opts.prune {
		return workspace.Options{Prune: workspace.All, Reach: named.Reach}, nil
	}
	if opts.dry || opts.watch || c.json || !terminal(c.in) || !terminal(c.err) {
		return keep, nil
	}
	planned, err := workspace.Plan(ctx, s.pool, files, workspace.Options{Prune: workspace.All, Reach: named.Reach})
	if used, ok := errors.AsType[*workspace.InUseError](err); ok {
		c.say("nothing is removed: %s", used)
		return keep, nil
	}
	if err != nil {
		return keep, err
	}
	removals := planned.Of(workspace.Remove)
	if len(removals) == 0 {
		return keep, nil
	}
	c.say("An earlier apply declared this, and no file of %s declares it now:", cmp.Or(opts.dir, "the example"))
	for _, item := range removals {
		c.say("- %s %s", item.Kind, item.Name)
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
	return workspace.Options{Prune: agreed, Reach: named.Reach}, nil
}

// confirm asks a person at the terminal. Only y or yes is a yes.
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

// checkTokens refuses endpoints whose bearer tokens are set here and too weak.
func (c *cli) checkTokens(files workspace.Workspace) error {
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

// applyFiles applies a workspace and declares the builtins: before, because an automation may call one, and after,
// because one that the workspace used to replace is back when it no longer does.
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

// doubts are warnings about agents whose models or chat keys the settings do not know. They are no errors: the process
// that serves may have other settings.
func doubts(documents []workspace.Document[agents.Definition], cfg config.Config) (warnings []string) {
	for _, d := range documents {
		for _, model := range append([]string{d.Definition.Model}, d.Definition.Fallback...) {
			if model != "" && !servable(model, cfg) {
				known := slices.Concat(models.KnownModels(), slices.Collect(maps.Keys(prices(cfg))))
				slices.Sort(known)
				warnings = append(warnings, fmt.Sprintf("%s: no price and no fact is known of model %q%s",
					d.At, model, meant(model, known)))
			}
		}
		keys := slices.Sorted(maps.Keys(cfg.ChatKeys))
		for _, key := range d.Definition.Keys {
			if len(keys) > 0 && !slices.Contains(keys, key) {
				warnings = append(warnings, fmt.Sprintf("%s: AGENT_CHAT_KEY has no chat key %q here%s",
					d.At, key, meant(key, keys)))
			}
		}
	}
	return warnings
}

// servable reports whether a model is known, or the settings name a server that may have names of its own.
func servable(model string, cfg config.Config) bool {
	if _, priced := prices(cfg).Of(model); priced || model == cfg.Model || models.FactsOf(model) != (models.Facts{}) {
		return true
	}
	server, err := url.Parse(cfg.OpenAIBaseURL)
	return err == nil && server.Host != "" && !strings.HasSuffix("."+server.Hostname(), ".api.openai.com")
}

// meant asks whether the nearest of known was meant; nothing when none is near.
func meant(name string, known []string) string {
	if near := nearest.To(name, known); near != "" {
		return fmt.Sprintf("; did you mean %q?", near)
	}
	return ""
}

// settleTime is how long a folder must be quiet before it is applied: an editor saves in several writes.
const settleTime = 100 * time.Millisecond

// applyAndWatch is agent apply --watch: it ends with code 0 at an interrupt.
func (c *cli) applyAndWatch(cmd *cobra.Command, opts applyOptions) error {
	if opts.dry {
		return usageError("--watch and --dry-run exclude each other")
	}
	watched, err := watchFolder(opts.dir)
	if err != nil {
		return err
	}
	defer watched.Close()
	if c.json {
		return usageError("--watch and --json exclude each other: --json prints one document")
	}
	err = c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
		w := &applyWatch{cli: c, session: s, opts: opts, folder: watched, to: c.out}
		w.apply(cmd.Context())
		return w.follow(cmd.Context())
	})(cmd, nil)
	if cmd.Context().Err() != nil {
		return nil
	}
	return err
}

// watchInDev follows the workspace of agent dev --watch until ctx ends. An error does not stop the server.
func (c *cli) watchInDev(ctx context.Context, s *session, opts devOptions) error {
	if !opts.watch {
		return nil
	}
	watched, err := watchFolder(opts.dir)
	if err != nil {
		return err
	}
	defer watched.Close()
	w := &applyWatch{
		cli: c, session: s, folder: watched, to: c.err,
		opts: applyOptions{dir: opts.dir, prune: opts.prune, watch: true},
	}
	w.apply(ctx) // a change during the start came before the watch
	if err := w.follow(ctx); err != nil {
		c.sayError(err)
	}
	return nil
}

// applyWatch applies a folder after each of its changes.
type applyWatch struct {
	cli     *cli
	session *session
	opts    applyOptions
	folder  *folderWatch
	to      io.Writer
	kept    string // what was last said about rows that stay
}

// follow applies the folder after each change until ctx ends or the folder is gone.
func (w *applyWatch) follow(ctx context.Context) error {
	w.cli.say("watching %s; ^C stops", w.opts.dir)
	for {
		changed, err := w.folder.changed(ctx)
		if err != nil || !changed {
			return err
		}
		w.apply(ctx)
	}
}

// apply applies the folder once and says in a line what has changed. An error is said, and changes nothing.
func (w *applyWatch) apply(ctx context.Context) {
	files, err := readWorkspace(w.opts.dir)
	var diff workspace.Diff
	if err == nil {
		diff, err = w.cli.change(ctx, w.session, files, w.opts)
	}
	if ctx.Err() != nil {
		return
	}
	if err != nil {
		w.cli.sayError(advised(err))
		w.cli.say("nothing was changed; the next change of a file tries again")
		return
	}
	w.cli.warn(diff)
	fmt.Fprintln(w.to, printable(diffLine(diff, w.opts.dir)))
	if text := keptText(diff, "agent apply "+w.opts.dir); text != w.kept {
		fmt.Fprint(w.to, text)
		w.kept = text
	}
}

// diffLine is a diff in one line.
func diffLine(diff workspace.Diff, dir string) string {
	if diff.Empty() {
		return "nothing to change: the database matches " + dir
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

// folderWatch sees changes of the YAML files of a folder and of the folders in it.
type folderWatch struct {
	*fsnotify.Watcher
	dir string
}

// watchFolder watches a folder. The caller closes it.
func watchFolder(dir string) (*folderWatch, error) {
	if info, err := os.Stat(dir); err != nil || !info.IsDir() {
		_, err := readWorkspace(dir) // it says what is wrong with the name
		return nil, err
	}
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return nil, hint(fmt.Errorf("watch %s: %w", dir, err), "raise fs.inotify.max_user_instances, or apply without --watch")
	}
	f := &folderWatch{watcher, filepath.Clean(dir)}
	if err := f.add(f.dir); err != nil {
		watcher.Close()
		return nil, hint(fmt.Errorf("watch %s: %w", dir, err), "raise fs.inotify.max_user_watches, or apply without --watch")
	}
	return f, nil
}

// add watches a folder and the folders in it, without those that are hidden.
func (f *folderWatch) add(dir string) error {
	return filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		switch {
		case errors.Is(err, fs.ErrNotExist): // removed in the meantime
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

// changed waits for a change and until the folder is quiet after it. It reports false when ctx ends first.
func (f *folderWatch) changed(ctx context.Context) (bool, error) {
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
			if f.matters(event) {
				quiet = time.After(settleTime)
			}
		case err := <-f.Errors:
			if !errors.Is(err, fsnotify.ErrEventOverflow) {
				return false, fmt.Errorf("watch %s: %w", f.dir, err)
			}
			quiet = time.After(settleTime) // changes were lost: read everything
		}
	}
}

// matters reports whether an event may change what the folder declares. It watches new folders.
func (f *folderWatch) matters(event fsnotify.Event) bool {
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
	return event.Has(fsnotify.Remove|fsnotify.Rename) && filepath.Ext(event.Name) == "" // perhaps a folder with files
}

func hiddenFile(path string) bool { return strings.HasPrefix(filepath.Base(path), ".") }
