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

// withoutMainCluster returns conf with create_main_cluster off. Debian's package reads it before it creates a server.
func withoutMainCluster(conf []byte) []byte {
	const off = "create_main_cluster = false"
	if mainCluster.Match(conf) {
		return mainCluster.ReplaceAll(conf, []byte(off))
	}
	return append(bytes.Clone(conf), "\n"+off+"\n"...)
}

// aptInstall installs one package. After an error it updates the package lists, which may be outdated, and tries again.
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
		_, _ = io.Copy(&all, out) // after a line that is too long for the scanner
	}()
	err := cmd.Run()
	_ = in.Close() // never fails
	<-drained
	if err != nil {
		return fmt.Errorf("%s: %w: %s", name, err, textcut.LastLines(all.String(), 5))
	}
	return nil
}

// advice returns the exact command for this machine, and alternatives without a command.
func advice() string {
	return "install PostgreSQL:\n  " + installCommand() +
		"\nor name a folder with postgres and initdb in AGENT_PG_BIN, or a running server in DATABASE_URL" +
		"\n(for example of: docker run -d -p 5432:5432 -e POSTGRES_PASSWORD=agent postgres:17," +
		" DATABASE_URL=postgres://postgres:agent@127.0.0.1:5432/postgres)"
}

// installCommand returns the command of the machine's package manager.
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
