//go:build unix

package pgserver

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
)

// resolve chooses the binaries: of several versions the newest that has data already, so that
// installing another PostgreSQL does not hide the data, else the newest; with none on the machine it
// gets them.
func resolve(ctx context.Context, config Config) (Binaries, error) {
	given := config.BinDir
	if given == "" {
		given = os.Getenv("AGENT_PG_BIN")
	}
	all, err := findAll(os.Getenv, given)
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

// advice is the exact command for this machine, and the ways without one.
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
