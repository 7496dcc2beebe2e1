package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/fsnotify/fsnotify"
	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/workspace"
)

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

// watchDev watches the workspace of agent dev --watch until ctx ends. A failed apply does not stop
// the server.
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

// run applies the folder after each change, until ctx ends, the folder is gone or the watch fails.
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
	read := newNamingFS(w.opts.dir)
	files, err := readWorkspace(w.opts.dir, read)
	w.dir.loaded = read.names
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
	if text := keptText(diff, "agent apply", w.opts.dir); text != w.lastKept {
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

// dirWatcher reports changes of YAML files in a folder and its subfolders, and of the other files that loading reads.
type dirWatcher struct {
	*fsnotify.Watcher
	dir    string
	loaded map[string]bool // what the last load opened, by its path in dir
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
	f := &dirWatcher{Watcher: watcher}
	if f.dir, err = filepath.EvalSymlinks(dir); err == nil { // WalkDir does not follow a link
		err = f.add(f.dir)
	}
	if err != nil {
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

// quietPeriod debounces changes: an editor saves in several writes.
const quietPeriod = 100 * time.Millisecond

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
		if info, err := os.Lstat(event.Name); err == nil && info.IsDir() {
			return f.add(event.Name) == nil
		}
	}
	if name, err := filepath.Rel(f.dir, event.Name); err == nil && f.loaded[filepath.ToSlash(name)] {
		return true
	}
	return event.Has(fsnotify.Remove|fsnotify.Rename) && filepath.Ext(event.Name) == "" // maybe a folder
}

func hiddenFile(path string) bool { return strings.HasPrefix(filepath.Base(path), ".") }
