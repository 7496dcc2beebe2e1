package pgserver

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/debian"
	"github.com/lanekeeper/lanekeeper/internal/textcut"
)

const (
	createClusterConf = "/etc/postgresql-common/createcluster.conf"
	installLimit      = 15 * time.Minute
)

// install gets server binaries through a package manager: as root through Debian's, otherwise through npm, which needs
// no rights. With neither, or if both fail, the error has the command to type.
func install(ctx context.Context, config Config) error {
	ctx, cancel := context.WithTimeout(ctx, installLimit)
	defer cancel()
	var failures []error
	if apt, err := exec.LookPath("apt-get"); err == nil && os.Geteuid() == 0 {
		err := installDebian(ctx, config, apt)
		if err == nil {
			return nil
		}
		failures = append(failures, err)
	}
	if npm, err := exec.LookPath("npm"); err == nil && bundleOf(newestMajor).fits() {
		config.Progress("no PostgreSQL found")
		base, err := bundleDir(os.Getenv)
		if err == nil {
			err = installBundle(ctx, config, npm, bundleOf(newestMajor), base)
		}
		if err == nil {
			return nil
		}
		failures = append(failures, err)
	}
	for _, err := range failures {
		config.Progress(err.Error())
	}
	return fmt.Errorf("%w; %s", errors.Join(append([]error{ErrNoBinaries}, failures...)...), advice())
}

// installDebian installs Debian's server package, without the server that the package would set up and start. It first
// installs postgresql-common and configures it to create no server. It then installs the rest and restores the
// configuration.
func installDebian(ctx context.Context, config Config, apt string) (err error) {
	config.Progress("no PostgreSQL found: installing Debian's package postgresql (apt-get)")
	if lists, globErr := filepath.Glob("/var/lib/apt/lists/*_Packages*"); globErr == nil && len(lists) == 0 {
		if err := aptGet(ctx, config, apt, "update"); err != nil {
			return err
		}
	}
	if err := aptInstall(ctx, config, apt, "postgresql-common"); err != nil {
		return err
	}
	before, err := os.ReadFile(createClusterConf)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if err := os.WriteFile(createClusterConf, withoutMainCluster(before), 0o644); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.WriteFile(createClusterConf, before, 0o644)) }()
	return aptInstall(ctx, config, apt, "postgresql")
}

var mainCluster = regexp.MustCompile(`(?m)^[ \t]*#?[ \t]*create_main_cluster\b.*$`)

func withoutMainCluster(conf []byte) []byte {
	const off = "create_main_cluster = false"
	if mainCluster.Match(conf) {
		return mainCluster.ReplaceAll(conf, []byte(off))
	}
	return append(bytes.Clone(conf), "\n"+off+"\n"...)
}

// aptInstall installs one package. If the package lists are outdated, it updates the lists and tries again.
func aptInstall(ctx context.Context, config Config, apt, name string) error {
	args := []string{"install", "-y", "--no-install-recommends", name}
	err := aptGet(ctx, config, apt, args...)
	if err == nil || ctx.Err() != nil {
		return err
	}
	if err := aptGet(ctx, config, apt, "update"); err != nil {
		return err
	}
	return aptGet(ctx, config, apt, args...)
}

func aptGet(ctx context.Context, config Config, apt string, args ...string) error {
	return runReporting(debian.AptGet(ctx, apt, args...), config.Progress, "apt-get "+args[0])
}

// runReporting runs cmd, passes its output to progress line by line, and adds the end of the output to the error.
func runReporting(cmd *exec.Cmd, progress func(string), name string) error {
	var all bytes.Buffer
	out, in := io.Pipe()
	cmd.Stdout = in
	cmd.Stderr = in
	drained := make(chan struct{})
	go func() {
		defer close(drained)
		lines := bufio.NewScanner(io.TeeReader(out, &all))
		for lines.Scan() {
			progress(name + ": " + lines.Text())
		}
		_, _ = io.Copy(io.Discard, out) // a line too long for the scanner must not block the command
	}()
	err := cmd.Run()
	_ = in.Close() // never fails
	<-drained
	if err != nil {
		return fmt.Errorf("%s: %w: %s", name, err, textcut.LastLines(all.String(), 5))
	}
	return nil
}

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

// FindBinaries returns the newest supported server binaries of the machine. It searches only $AGENT_PG_BIN if that is
// set. Otherwise it searches the usual folders of Debian, Red Hat, Alpine, Homebrew and Postgres.app, the PATH, and the
// bundle of an earlier start. getenv is os.Getenv in a process. Without binaries, FindBinaries returns ErrNoBinaries.
func FindBinaries(getenv func(string) string) (Binaries, error) {
	all, err := findAll(getenv, getenv("AGENT_PG_BIN"))
	if err != nil {
		return Binaries{}, err
	}
	return all[0], nil
}

// findAll returns one folder per version, newest first.
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

func givenBinaries(dir string) (Binaries, error) {
	b, err := inspect(dir)
	if err != nil {
		if b, err2 := inspect(filepath.Join(dir, "bin")); err2 == nil {
			return b, nil
		}
		return Binaries{}, fmt.Errorf("AGENT_PG_BIN=%s: %w: set it to the folder that holds postgres and initdb", dir, err)
	}
	if !supported(b.Major) {
		return Binaries{}, fmt.Errorf("AGENT_PG_BIN=%s: PostgreSQL %s is not supported: use a version from %d to %d", dir,
			b.Version, oldestMajor, newestMajor)
	}
	return b, nil
}

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

// resolve chooses the newest binaries whose version already has data, or the newest without such data. So another
// PostgreSQL on the machine does not hide the data. Without binaries on the machine, resolve installs them.
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
		if !config.Ephemeral && hasData(config.Dir, bin.Major) {
			return bin, nil
		}
	}
	return all[0], nil
}

func hasData(dir string, major int) bool {
	for _, base := range []string{dir, followPointer(dir)} {
		if base != "" && exists(filepath.Join(base, strconv.Itoa(major), dataDir)) {
			return true
		}
	}
	return false
}

// advice returns the exact command for this machine, and alternatives without a command.
func advice() string {
	return "install PostgreSQL:\n  " + installCommand() +
		"\nor name a folder with postgres and initdb in AGENT_PG_BIN, or a running server in DATABASE_URL" +
		"\n(for example of: docker run -d -p 5432:5432 -e POSTGRES_PASSWORD=agent postgres:17," +
		" DATABASE_URL=postgres://postgres:agent@127.0.0.1:5432/postgres)"
}

func installCommand() string {
	sudo := "sudo "
	if os.Geteuid() == 0 {
		sudo = ""
	}
	if runtime.GOOS == "darwin" {
		return "brew install postgresql@17"
	}
	for _, manager := range []struct{ program, command string }{
		{"/usr/bin/apt-get", "apt-get install -y --no-install-recommends postgresql"},
		{"/sbin/apk", "apk add postgresql postgresql-contrib"},
		{"/usr/bin/dnf", "dnf install -y postgresql-server postgresql-contrib"},
		{"/usr/bin/zypper", "zypper install -y postgresql-server postgresql-contrib"},
		{"/usr/bin/pacman", "pacman -S --noconfirm postgresql"},
	} {
		if exists(manager.program) {
			return sudo + manager.command
		}
	}
	return "(with your system's package manager: the package postgresql or postgresql-server)"
}
