package pgbouncer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"time"
)

const (
	installLimit = 8 * time.Minute
	installAgain = 2 * time.Second
	advice       = "install it (sudo apt-get install -y pgbouncer) or name it in AGENT_TEST_PGBOUNCER"
)

// version is that of the program.
type version struct{ major, minor, patch int }

func (v version) String() string { return fmt.Sprintf("%d.%d.%d", v.major, v.minor, v.patch) }

func (v version) atLeast(major, minor int) bool {
	return v.major > major || v.major == major && v.minor >= minor
}

var versionText = regexp.MustCompile(`PgBouncer (\d+)\.(\d+)(?:\.(\d+))?`)

func versionOf(ctx context.Context, binary string) (v version, err error) {
	out, err := exec.CommandContext(ctx, binary, "--version").CombinedOutput()
	if err != nil {
		return v, fmt.Errorf("run %s --version: %w: %s", binary, err, out)
	}
	return readVersion(string(out))
}

func readVersion(text string) (v version, err error) {
	match := versionText.FindStringSubmatch(text)
	if match == nil {
		return v, fmt.Errorf("no version of PgBouncer in %q", text)
	}
	for i, n := range []*int{&v.major, &v.minor, &v.patch} {
		if match[i+1] == "" {
			continue
		}
		if *n, err = strconv.Atoi(match[i+1]); err != nil {
			return v, fmt.Errorf("read the version of PgBouncer: %w", err)
		}
	}
	return v, nil
}

// find is where the program is; it is installed when it is missing and can be.
func find(ctx context.Context, progress func(string)) (string, error) {
	if set := os.Getenv("AGENT_TEST_PGBOUNCER"); set != "" {
		return set, nil
	}
	if path := known(); path != "" {
		return path, nil
	}
	apt, err := exec.LookPath("apt-get")
	if err != nil || os.Geteuid() != 0 {
		return "", errors.New("there is no pgbouncer here; " + advice)
	}
	progress("no PgBouncer found: installing Debian's package pgbouncer (apt-get)")
	if err := install(ctx, apt); err != nil {
		return "", fmt.Errorf("%w; %s", err, advice)
	}
	if path := known(); path != "" {
		return path, nil
	}
	return "", errors.New("the package pgbouncer was installed, but its program is not on the PATH; " + advice)
}

// known is where the program is, or "". A user's PATH often lacks the folders for administrators.
func known() string {
	for _, name := range []string{
		"pgbouncer", "/usr/sbin/pgbouncer", "/usr/local/sbin/pgbouncer",
		"/opt/homebrew/bin/pgbouncer",
	} {
		if path, err := exec.LookPath(name); err == nil {
			return path
		}
	}
	return ""
}

// install has Debian's package installed. Other tests may be installing something else: it waits for them, and
// tries again when they held the lock that cannot be waited for.
func install(ctx context.Context, apt string) error {
	ctx, cancel := context.WithTimeout(ctx, installLimit)
	defer cancel()
	var last error
	for ctx.Err() == nil {
		if last = aptGet(ctx, apt, "install", "-y", "--no-install-recommends", "pgbouncer"); last == nil {
			return nil
		}
		if err := aptGet(ctx, apt, "update"); err != nil {
			last = err
		}
		select {
		case <-ctx.Done():
		case <-time.After(installAgain):
		}
	}
	return fmt.Errorf("install PgBouncer: %w", last)
}

func aptGet(ctx context.Context, apt string, args ...string) error {
	cmd := exec.CommandContext(ctx, apt, append([]string{"-o", "DPkg::Lock::Timeout=300"}, args...)...)
	cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive")
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("apt-get %s: %w: %s", args[0], err, lastLines(out.String(), 5))
	}
	return nil
}
