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
