package pgserver

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"time"
)

// The supported major versions.
const (
	oldestMajor = 14
	newestMajor = 18
)

// ErrNoBinaries reports that the machine has no suitable server binaries.
var ErrNoBinaries = errors.New("no PostgreSQL server binaries found")

// Binaries is a folder that holds postgres and initdb of one version.
type Binaries struct {
	Dir     string
	Major   int
	Version string // for example "15.14"
}

func (b Binaries) path(name string) string { return filepath.Join(b.Dir, name) }

// FindBinaries returns server binaries of the newest supported major version on the machine. It searches only
// $AGENT_PG_BIN if that is set. Otherwise it searches the usual folders of Debian, Red Hat, Alpine, Homebrew and
// Postgres.app, the PATH, and the bundle of an earlier start. getenv is os.Getenv in a process. Without binaries,
// FindBinaries returns ErrNoBinaries.
func FindBinaries(getenv func(string) string) (Binaries, error) {
	all, err := findAll(getenv, getenv("AGENT_PG_BIN"))
	if err != nil {
		return Binaries{}, err
	}
	return all[0], nil
}

// findAll returns one folder per supported major version, newest first. binDir, if set, excludes all others.
func findAll(getenv func(string) string, binDir string) ([]Binaries, error) {
	if binDir != "" {
		b, err := givenBinaries(binDir)
		return []Binaries{b}, err
	}
	var found []Binaries
	for _, dir := range candidates(getenv) {
		b, err := inspect(dir)
		known := func(other Binaries) bool { return other.Major == b.Major }
		if err == nil && supported(b.Major) && !slices.ContainsFunc(found, known) {
			found = append(found, b)
		}
	}
	slices.SortStableFunc(found, func(a, b Binaries) int { return b.Major - a.Major })
	if len(found) == 0 {
		return nil, ErrNoBinaries
	}
	return found, nil
}

func supported(major int) bool { return oldestMajor <= major && major <= newestMajor }

// givenBinaries reads the folder that the user named, or its subfolder bin.
func givenBinaries(dir string) (Binaries, error) {
	b, err := inspect(dir)
	if err != nil {
		inBin, binErr := inspect(filepath.Join(dir, "bin"))
		if binErr != nil {
			return Binaries{}, fmt.Errorf("AGENT_PG_BIN=%s: %w: set it to the folder that holds postgres and initdb", dir, err)
		}
		b = inBin
	}
	if !supported(b.Major) {
		return Binaries{}, fmt.Errorf("AGENT_PG_BIN=%s: PostgreSQL %s is not supported: use a version from %d to %d", dir,
			b.Version, oldestMajor, newestMajor)
	}
	return b, nil
}

// candidates returns the folders in which packages put server binaries, whether or not they exist.
func candidates(getenv func(string) string) []string {
	var dirs []string
	for _, pattern := range []string{
		"/usr/lib/postgresql/*/bin", "/usr/pgsql-*/bin", "/usr/libexec/postgresql*", "/usr/local/pgsql/bin",
		"/opt/homebrew/opt/postgresql@*/bin", "/usr/local/opt/postgresql@*/bin",
		"/home/linuxbrew/.linuxbrew/opt/postgresql@*/bin",
		"/Applications/Postgres.app/Contents/Versions/*/bin",
	} {
		matches, err := filepath.Glob(pattern)
		if err != nil {
			continue // only for a malformed pattern
		}
		dirs = append(dirs, matches...)
	}
	for _, dir := range filepath.SplitList(getenv("PATH")) {
		if real, err := filepath.EvalSymlinks(filepath.Join(dir, "postgres")); err == nil {
			dirs = append(dirs, filepath.Dir(real))
		}
	}
	if dir, err := bundleDir(getenv); err == nil {
		dirs = append(dirs, filepath.Join(dir, bundleVersion, "bin"))
	}
	return dirs
}

var versionText = regexp.MustCompile(`\(PostgreSQL\) ((\d+)[^ \n]*)`)

// inspect asks the postgres in dir for its version.
func inspect(dir string) (Binaries, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return Binaries{}, err
	}
	for _, name := range []string{"postgres", "initdb"} {
		if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
			return Binaries{}, err
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, filepath.Join(dir, "postgres"), "--version")
	cmd.Env = serverEnv()
	out, err := cmd.CombinedOutput()
	if err != nil {
		return Binaries{}, fmt.Errorf("run %s/postgres --version: %w: %s", dir, err, out)
	}
	match := versionText.FindSubmatch(out)
	if match == nil {
		return Binaries{}, fmt.Errorf("run %s/postgres --version: unexpected answer %q", dir, out)
	}
	major, err := strconv.Atoi(string(match[2]))
	return Binaries{Dir: dir, Major: major, Version: string(match[1])}, err
}

// serverEnv is the clean environment of all child processes: PG* variables of the user must not reach the server. On
// macOS the server refuses to start under a locale that makes it multithreaded.
func serverEnv() []string {
	env := []string{"LC_ALL=C", "TZ=UTC", "PATH=/usr/local/bin:/usr/bin:/bin"}
	for _, name := range []string{"LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH"} {
		if value := os.Getenv(name); value != "" {
			env = append(env, name+"="+value)
		}
	}
	return env
}

// resolve chooses the newest binaries whose version already has data, or the newest without such data. So if a newer
// PostgreSQL is installed, the data of the older one stays in use. Without binaries on the machine, resolve installs
// them.
func resolve(ctx context.Context, config Config) (Binaries, error) {
	binDir := config.BinDir
	if binDir == "" {
		binDir = os.Getenv("AGENT_PG_BIN")
	}
	all, err := findAll(os.Getenv, binDir)
	if errors.Is(err, ErrNoBinaries) && !config.NoInstall {
		if err := install(ctx, config); err != nil {
			return Binaries{}, err
		}
		all, err = findAll(os.Getenv, "")
	}
	if errors.Is(err, ErrNoBinaries) {
		return Binaries{}, fmt.Errorf("%w; %s", err, advice())
	}
	if err != nil {
		return Binaries{}, err
	}
	for _, bin := range all {
		if !config.Ephemeral && hasDataOf(config.Dir, bin.Major) {
			return bin, nil
		}
	}
	return all[0], nil
}

// HasData reports whether dir ([Config.Dir]) has the data of a supported version, or a folder closed to this user.
func HasData(dir string) bool {
	for _, base := range []string{dir, followPointer(dir)} {
		for major := oldestMajor; base != "" && major <= newestMajor; major++ {
			_, err := os.Lstat(filepath.Join(base, strconv.Itoa(major), dataDir))
			if !errors.Is(err, os.ErrNotExist) {
				return true
			}
		}
	}
	return false
}

// hasDataOf reports whether dir has data of one major version. Unlike in [HasData], a folder closed to this user has
// none.
func hasDataOf(dir string, major int) bool {
	for _, base := range []string{dir, followPointer(dir)} {
		if base != "" && exists(filepath.Join(base, strconv.Itoa(major), dataDir)) {
			return true
		}
	}
	return false
}
