//go:build unix

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
	"time"
)

const (
	createClusterConf = "/etc/postgresql-common/createcluster.conf"
	installLimit      = 15 * time.Minute
)

// install gets server binaries through a package manager: Debian's as root, else npm, which needs no
// rights. With neither, or when they fail, the error says what to type.
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

// installDebian installs Debian's server package, without the server that it would set up and start:
// postgresql-common first, told not to, then the rest; its configuration is put back afterwards.
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

// aptInstall installs one package; when the package lists are too old for the archive it renews them
// and tries again.
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
	cmd := exec.CommandContext(ctx, apt, append([]string{"-o", "DPkg::Lock::Timeout=120"}, args...)...)
	cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive")
	return runTelling(cmd, config.Progress, "apt-get "+args[0])
}

// runTelling runs cmd, hands its output to progress line by line, and puts the end of it into the error.
func runTelling(cmd *exec.Cmd, progress func(string), name string) error {
	var all bytes.Buffer
	out, in := io.Pipe()
	cmd.Stdout = in
	cmd.Stderr = in
	told := make(chan struct{})
	go func() {
		defer close(told)
		lines := bufio.NewScanner(io.TeeReader(out, &all))
		for lines.Scan() {
			progress(name + ": " + lines.Text())
		}
		_, _ = io.Copy(io.Discard, out) // a line too long for the scanner must not block the command
	}()
	err := cmd.Run()
	_ = in.Close() // never fails
	<-told
	if err != nil {
		return fmt.Errorf("%s: %w: %s", name, err, lastLines(all.String(), 5))
	}
	return nil
}
