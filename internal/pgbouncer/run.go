package pgbouncer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"

	"github.com/lanekeeper/lanekeeper/internal/child"
	"github.com/lanekeeper/lanekeeper/internal/debian"
	"github.com/lanekeeper/lanekeeper/internal/pgserver"
)

const (
	configFile = "pgbouncer.ini"
	usersFile  = "users"
	logFile    = "log"
	maxClients = 2000
)

// configure writes the pooler's files and gives them to the pooler's user.
func (p *Pooler) configure(config Config, user *pgserver.Account) error {
	files := map[string]string{
		configFile: p.settings(config),
		usersFile:  quoted(p.server.User) + " " + quoted(p.server.Password) + "\n",
		logFile:    "",
	}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(p.dir, name), []byte(text), 0o600); err != nil {
			return err
		}
	}
	return user.OwnTree(p.dir)
}

// settings is the configuration file.
func (p *Pooler) settings(config Config) string {
	size := config.PoolSize
	size = cmp.Or(size, 8)
	var b strings.Builder
	fmt.Fprintf(&b, "[databases]\n* = host=%s port=%d\n", p.server.Host, p.server.Port)
	fmt.Fprintf(&b, "[pgbouncer]\nunix_socket_dir = %s\nlisten_port = %d\nauth_type = trust\nauth_file = %s\n",
		p.dir, port, filepath.Join(p.dir, usersFile))
	fmt.Fprintf(&b, "pool_mode = transaction\ndefault_pool_size = %d\nmax_client_conn = %d\n", size, maxClients)
	if config.MaxPreparedStatements > 0 {
		fmt.Fprintf(&b, "max_prepared_statements = %d\n", config.MaxPreparedStatements)
	} else if p.SupportsPreparedStatements() {
		b.WriteString("max_prepared_statements = 0\n")
	}
	if p.server.TLSConfig != nil {
		b.WriteString("server_tls_sslmode = require\n")
	}
	// A database that a test has dropped must not block connections to others.
	b.WriteString("server_login_retry = 1\n")
	return b.String()
}

// quoted is a word of the file of users.
func quoted(word string) string { return `"` + strings.ReplaceAll(word, `"`, `""`) + `"` }

// launch starts the process.
func (p *Pooler) launch(binary string, user *pgserver.Account) error {
	log, err := os.OpenFile(filepath.Join(p.dir, logFile), os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		return err
	}
	defer log.Close()
	// the pooler lives until Stop, even after the start's context ends
	cmd := exec.Command(binary, filepath.Join(p.dir, configFile))
	cmd.Dir, cmd.Stdout, cmd.Stderr = p.dir, log, log
	cmd.Env = []string{"LC_ALL=C", "TZ=UTC", "PATH=/usr/local/bin:/usr/bin:/bin"}
	cmd.SysProcAttr = user.Attributes() // in its own group, so ^C reaches only the tests
	err = child.Start(cmd, syscall.SIGKILL, func(exitErr error) {
		p.exitErr = cmp.Or(exitErr, errors.New("exit status 0"))
		close(p.done)
	})
	if err != nil {
		return err
	}
	p.process = cmd.Process
	return nil
}

// version is the program's version.
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

// findBinary returns the path of the program; it installs a missing one if possible. A user's PATH often lacks the
// folders for administrators.
func findBinary(ctx context.Context, progress func(string)) (string, error) {
	return debian.Program{
		Package: "pgbouncer", Setting: "AGENT_TEST_PGBOUNCER",
		Names: []string{"pgbouncer", "/usr/sbin/pgbouncer", "/usr/local/sbin/pgbouncer", "/opt/homebrew/bin/pgbouncer"},
	}.Find(ctx, progress)
}
