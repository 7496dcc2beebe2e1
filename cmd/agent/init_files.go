package main

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/lanekeeper/lanekeeper/examples"
	"github.com/lanekeeper/lanekeeper/internal/schedule"
	"github.com/lanekeeper/lanekeeper/workspace"
)

// initFiles are the files that agent init writes.
type initFiles struct {
	workspace     map[string][]byte
	extra         map[string][]byte // beside the workspace
	databaseEnv   string            // the variable that has the URL of the database
	firstQuestion string            // something to ask the agent first
}

// fromExample returns the files of the order desk example.
func (o initOptions) fromExample() (initFiles, error) {
	switch {
	case o.example != "orders":
		return initFiles{}, usageError("--example: unknown example %q; use orders", o.example)
	case o.name != "" || o.purpose != "" || o.timezone != "":
		return initFiles{}, usageError("--example has its own name, purpose and time zone; change them in the workspace")
	case o.database == "":
		return initFiles{}, usageError("--example orders needs the URL of a database for the shop: --database " +
			"postgres://…/shop")
	}
	if err := checkDatabaseURL(o.database); err != nil {
		return initFiles{}, usageError("--database is %w", err)
	}
	all, err := examples.Orders()
	if err != nil {
		return initFiles{}, err
	}
	files := initFiles{
		workspace: map[string][]byte{}, extra: map[string][]byte{}, databaseEnv: "SHOP_DATABASE_URL",
		firstQuestion: "Where is order 1002 of ana@example.com?",
	}
	err = fs.WalkDir(all, ".", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || path == "README.md" {
			return err
		}
		text, err := fs.ReadFile(all, path)
		if name, within := strings.CutPrefix(path, workspaceDir+"/"); within {
			files.workspace[name] = text
		} else {
			files.extra[path] = text
		}
		return err
	})
	return files, err
}

// fromAnswers returns the files of a new workspace.
func (o *initOptions) fromAnswers() (initFiles, error) {
	o.timezone = cmp.Or(o.timezone, localZone())
	if _, err := schedule.Location(o.timezone); err != nil {
		return initFiles{}, usageError("--timezone: %w", err)
	}
	if err := checkAgentName(o.name); err != nil {
		return initFiles{}, usageError("--name %w", err)
	}
	files := initFiles{firstQuestion: "which tables are there?"}
	s := examples.Starter{Name: o.name, Purpose: o.purpose, Timezone: o.timezone}
	if o.database != "" {
		if err := checkDatabaseURL(o.database); err != nil {
			return initFiles{}, usageError("--database is %w", err)
		}
		files.databaseEnv = starterDatabaseEnv
		s.Database, s.DatabaseEnv = starterDatabase, starterDatabaseEnv
	}
	var err error
	files.workspace, err = s.Files()
	return files, err
}

// requireEmpty rejects a folder that already has a workspace.
func (o initOptions) requireEmpty() error {
	found, err := os.ReadDir(filepath.Join(o.dir, workspaceDir))
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return fmt.Errorf("read workspace: %w", err)
	case len(found) > 0:
		return usageError("%s is not empty; name another folder, or run: agent dev", filepath.Join(o.dir, workspaceDir))
	}
	return nil
}

// write creates the workspace atomically.
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
	if _, err := workspace.LoadDir(made); err != nil { // apply must accept it
		return &exitError{exitUsage, err}
	}
	target := filepath.Join(o.dir, workspaceDir)
	err = os.Remove(target) // an empty folder
	if err == nil || errors.Is(err, fs.ErrNotExist) {
		err = os.Rename(made, target)
	}
	if err != nil {
		return fmt.Errorf("make workspace: %w", err)
	}
	return nil
}

// writeExtra writes the files beside the workspace. It leaves existing files unchanged and returns their names.
func (o initOptions) writeExtra(files map[string][]byte) (kept []string, err error) {
	for name, text := range files {
		switch err := writeNew(filepath.Join(o.dir, name), string(text), 0o644); {
		case errors.Is(err, fs.ErrExist):
			kept = append(kept, name)
		case err != nil:
			return nil, err
		}
	}
	return kept, nil
}

// writeSecrets writes the database URL to .env and ignores .env and .agent in Git. For an existing .env it returns
// the name of the missing line.
func (o initOptions) writeSecrets(env string) (missing string, err error) {
	if env != "" {
		// In .env, $NAME stands for another variable.
		line := env + "=" + strings.ReplaceAll(o.database, "$", "%24") + "\n"
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

// unignored lists what the file .gitignore of a folder should have and lacks: the database and its secrets.
func unignored(dir string) (missing []string) {
	text, err := os.ReadFile(filepath.Join(dir, ".gitignore"))
	if err != nil {
		return nil
	}
	for _, name := range []string{".agent/", ".env"} {
		if !slices.ContainsFunc(strings.Split(string(text), "\n"), func(line string) bool {
			return strings.Trim(strings.TrimSpace(line), "/") == strings.Trim(name, "/")
		}) {
			missing = append(missing, name)
		}
	}
	return missing
}

// writeNew writes a file that must not exist.
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

// The named database of a new workspace, and the variable with its URL.
const (
	starterDatabase    = "app"
	starterDatabaseEnv = "APP_DATABASE_URL"
)
