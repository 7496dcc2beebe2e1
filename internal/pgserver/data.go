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

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/textcut"
)

// prepareData makes the data directory, or checks that an existing directory fits the binaries. An upgrade is the
// owner's decision.
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
	reportOtherVersions(l, bin, config)
	config.Progress("making a PostgreSQL " + bin.Version + " data directory in " + l.root)
	if err := initdb(ctx, l, bin, config.Durable); err != nil {
		return err
	}
	if err := os.WriteFile(l.path(bootFile), []byte(bootID()), 0o600); err != nil {
		return err
	}
	return l.user.chown(l.path(bootFile))
}

// initdb fills a folder beside the final folder and renames it. So an interrupted initdb leaves no data directory.
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
	cmd.SysProcAttr = l.user.Attributes()
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("make the data directory %s: initdb: %w: %s", l.data(), err, textcut.LastLines(string(out), 8))
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

// reportOtherVersions reports data of other versions beside the empty folder for the new data.
func reportOtherVersions(l layout, bin Binaries, config Config) {
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

// rebooted reports that the machine restarted after initdb made the data directory: without fsync the data may be
// damaged.
func rebooted(l layout) bool {
	bootIDBefore, err := os.ReadFile(l.path(bootFile))
	if err != nil {
		return !errors.Is(err, os.ErrNotExist)
	}
	return string(bootIDBefore) != bootID()
}

// makeSockets makes an empty folder for the socket of a new server. A unix socket's path may have about a hundred
// bytes, and PostgreSQL reads a path with a comma as a list. A server with a long path gets a short folder below /tmp.
// A file records the folder's name for later processes.
func makeSockets(l layout) (string, error) {
	if err := removeSocketDir(l); err != nil {
		return "", err
	}
	dir := l.path(runDir)
	if err := os.RemoveAll(dir); err != nil {
		return "", err
	}
	if fits(dir) {
		if err := os.Mkdir(dir, 0o700); err != nil {
			return "", err
		}
		return dir, l.user.chown(dir)
	}
	dir, err := os.MkdirTemp(shortTemp, socketPattern)
	if err != nil {
		return "", err
	}
	record := l.path(socketsFile)
	if err := os.WriteFile(record, []byte(dir+"\n"), 0o600); err != nil {
		return "", err
	}
	return dir, errors.Join(l.user.chown(record), l.user.chown(dir))
}

func fits(dir string) bool {
	socket := filepath.Join(dir, fmt.Sprintf(".s.PGSQL.%d", port))
	return len(socket) <= socketPathMax && !strings.ContainsAny(dir, ",\"'\n") && strings.TrimSpace(dir) == dir
}

// recordedSockets returns the folder of the running server's socket.
func recordedSockets(l layout) (string, error) {
	text, err := os.ReadFile(l.path(socketsFile))
	if errors.Is(err, os.ErrNotExist) {
		return l.path(runDir), nil
	}
	return strings.TrimSpace(string(text)), err
}

// removeSocketDir removes the folder below /tmp, if the folder exists and still belongs to this user. After the machine
// cleaned /tmp, another user may have made a folder of that name.
func removeSocketDir(l layout) error {
	dir, err := recordedSockets(l)
	if err != nil || dir == l.path(runDir) {
		return err
	}
	want := os.Geteuid()
	if l.user != nil {
		want = l.user.uid
	}
	uid, err := ownerOf(dir)
	if err == nil && uid == want && filepath.Dir(dir) == shortTemp &&
		strings.HasPrefix(filepath.Base(dir), socketPattern) {
		if err := os.RemoveAll(dir); err != nil {
			return err
		}
	}
	return os.Remove(l.path(socketsFile))
}

// awaitReady returns when the server accepts connections to database. It creates a missing database. It returns
// errNoServer when ended reports that the server has ended.
func awaitReady(ctx context.Context, l layout, database string, ended func() (bool, error)) error {
	ctx, cancel := context.WithTimeoutCause(ctx, readyLimit,
		fmt.Errorf("the server does not accept connections after %s; see %s", readyLimit, l.path(logFile)))
	defer cancel()
	return poll(ctx, func() (bool, error) {
		// The record of a starting server may still change.
		if sockets, err := recordedSockets(l); err == nil {
			l.sockets = sockets
		}
		err := greet(ctx, l, database)
		if err == nil {
			return true, nil
		}
		if postgres.Code(err) != "" && !postgres.IsCode(err, "57P03", "53300") {
			return false, err
		}
		if left, goneErr := ended(); left || goneErr != nil {
			return false, errors.Join(errNoServer, goneErr)
		}
		return false, nil
	})
}

func greet(ctx context.Context, l layout, database string) error {
	conn, err := pgx.Connect(ctx, connString(l, superuser, database))
	if postgres.IsCode(err, "3D000") {
		return createDatabase(ctx, l, database)
	}
	if err != nil {
		return err
	}
	return conn.Close(ctx)
}

func createDatabase(ctx context.Context, l layout, database string) error {
	conn, err := pgx.Connect(ctx, connString(l, superuser, "postgres"))
	if err != nil {
		return err
	}
	_, err = conn.Exec(ctx, "create database "+pgx.Identifier{database}.Sanitize())
	if postgres.IsCode(err, "42P04", "23505") { // another process was faster
		err = nil
	}
	return errors.Join(err, conn.Close(ctx))
}

// tail returns the end of a text file, or the error of reading it.
func tail(path string, lines int) string {
	text, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	return textcut.LastLines(string(text), lines)
}
