//go:build unix

package pgserver

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
)

// prepareData makes the data directory, or checks that the one that is there fits the binaries. A
// directory is never upgraded: that is the owner's decision.
func prepareData(ctx context.Context, l layout, bin Binaries, config Config) error {
	if !config.Durable && rebooted(l) {
		config.Progress("the machine was restarted: making the test server's directory anew")
		if err := os.RemoveAll(l.data()); err != nil {
			return err
		}
	}
	if exists(l.data()) {
		return checkVersion(l, bin)
	}
	noticeOthers(l, bin, config)
	config.Progress("making a PostgreSQL " + bin.Version + " data directory in " + l.root)
	if err := initdb(ctx, l, bin, config.Durable); err != nil {
		return err
	}
	if err := os.WriteFile(l.path(bootFile), []byte(bootID()), 0o600); err != nil {
		return err
	}
	return l.user.own(l.path(bootFile))
}

// initdb fills a folder beside the final one and renames it, so that one that was interrupted is
// never taken for a data directory.
func initdb(ctx context.Context, l layout, bin Binaries, durable bool) error {
	unfinished := l.path(dataDir + ".new")
	if err := os.RemoveAll(unfinished); err != nil {
		return err
	}
	args := []string{"-D", unfinished, "-U", superuser, "--auth=trust", "--no-locale", "-E", "UTF8", "--no-instructions"}
	if !durable {
		args = append(args, "--no-sync")
	}
	cmd := exec.CommandContext(ctx, bin.path("initdb"), args...)
	cmd.Dir = l.root
	cmd.Env = serverEnv()
	cmd.SysProcAttr = l.user.attributes()
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("make the data directory %s: initdb: %w: %s", l.data(), err, lastLines(string(out), 8))
	}
	return os.Rename(unfinished, l.data())
}

func checkVersion(l layout, bin Binaries) error {
	major, err := dataMajor(l.data())
	if err != nil {
		return fmt.Errorf("%s is not a PostgreSQL data directory (%w): move it away", l.data(), err)
	}
	if major == bin.Major {
		return nil
	}
	return fmt.Errorf("the data in %s belongs to PostgreSQL %d, the binaries in %s are %s: install PostgreSQL %d or set "+
		"AGENT_PG_BIN to it; %s",
		l.data(), major, bin.Dir, bin.Version, major, moveRecipe(l.data(), major))
}

// noticeOthers tells about data of other versions beside the empty place we are about to fill.
func noticeOthers(l layout, bin Binaries, config Config) {
	for major := newestMajor; major >= oldestMajor; major-- {
		other := filepath.Join(filepath.Dir(l.root), strconv.Itoa(major), dataDir)
		if l.keep && major != bin.Major && exists(other) {
			config.Progress(fmt.Sprintf("data of PostgreSQL %d stays untouched in %s, this start uses version %d; %s",
				major, other, bin.Major, moveRecipe(other, major)))
		}
	}
}

func moveRecipe(data string, major int) string {
	return fmt.Sprintf("to take the data over, start it with the binaries of %d "+
		"(AGENT_PG_BIN=/usr/lib/postgresql/%d/bin agent dev), "+
		"run pg_dumpall -h SOCKETDIR -U %s > dump.sql, and load dump.sql into the new server with psql (%s)", major, major,
		superuser, data)
}

func dataMajor(data string) (int, error) {
	text, err := os.ReadFile(filepath.Join(data, "PG_VERSION"))
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(strings.TrimSpace(string(text)))
}

// rebooted reports that the data directory was made before the machine was last started: without
// fsync it may be damaged.
func rebooted(l layout) bool {
	then, err := os.ReadFile(l.path(bootFile))
	if err != nil {
		return !errors.Is(err, os.ErrNotExist)
	}
	return string(then) != bootID()
}
