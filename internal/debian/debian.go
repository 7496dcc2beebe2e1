// Package debian finds programs, and installs the Debian packages of those that are missing.
package debian

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"time"
)

const (
	installLimit = 8 * time.Minute
	installAgain = 2 * time.Second
	shownOutput  = 500 // bytes of a failed command's output
)

// Program is a program that tests need.
type Program struct {
	Package string   // of Debian
	Names   []string // file names, with or without a folder; Find returns the first that exists
	Setting string   // environment variable that names another file
}

// Find returns the path of the program. As root it installs a missing program and reports the installation to progress.
func (p Program) Find(ctx context.Context, progress func(string)) (string, error) {
	if set := os.Getenv(p.Setting); set != "" {
		return set, nil
	}
	if path := p.known(); path != "" {
		return path, nil
	}
	advice := fmt.Sprintf("install it (sudo apt-get install -y %s) or name it in %s", p.Package, p.Setting)
	apt, err := exec.LookPath("apt-get")
	if err != nil || os.Geteuid() != 0 {
		return "", fmt.Errorf("there is no %s here; %s", p.Names[0], advice)
	}
	progress("no " + p.Names[0] + " found: installing Debian's package " + p.Package + " (apt-get)")
	if err := p.install(ctx, apt); err != nil {
		return "", fmt.Errorf("install %s: %w; %s", p.Package, err, advice)
	}
	if path := p.known(); path != "" {
		return path, nil
	}
	return "", fmt.Errorf("the package %s was installed, but its program is not on the PATH; %s", p.Package, advice)
}

func (p Program) known() string {
	for _, name := range p.Names {
		if path, err := exec.LookPath(name); err == nil {
			return path
		}
	}
	return ""
}

// install retries, because apt-get cannot wait for every lock of other installations.
func (p Program) install(ctx context.Context, apt string) error {
	ctx, cancel := context.WithTimeout(ctx, installLimit)
	defer cancel()
	var last error
	for ctx.Err() == nil {
		if last = run(AptGet(ctx, apt, "install", "-y", "--no-install-recommends", p.Package)); last == nil {
			return nil
		}
		if err := run(AptGet(ctx, apt, "update")); err != nil {
			last = err
		}
		select {
		case <-ctx.Done():
		case <-time.After(installAgain):
		}
	}
	return last
}

// AptGet returns a non-interactive apt-get command that waits for other installations.
func AptGet(ctx context.Context, apt string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, apt, append([]string{"-o", "DPkg::Lock::Timeout=300"}, args...)...)
	cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive")
	return cmd
}

func run(cmd *exec.Cmd) error {
	out, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s: %w: %s", cmd, err, bytes.TrimSpace(out[max(0, len(out)-shownOutput):]))
	}
	return nil
}
