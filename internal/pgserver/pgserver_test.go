package pgserver_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgserver"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

func TestDataIsKeptBetweenStarts(t *testing.T) {
	t.Parallel()
	config := pgserver.Config{Dir: sharedTempDir(t), Durable: true, Database: "agent"}
	first := start(t, config)
	query(t, first.URL(), "create table kept as select 'yes'::text as answer")
	stop(t, first)
	left := servers(t, config.Dir)
	assert.Truef(t, len(left) == 0, "Stop of the last user left processes %v", left)
	began := time.Now()
	second := start(t, config)
	t.Logf("second start took %s", time.Since(began))
	assert.Equal(t, "yesagent", query(t, second.URL(), "select answer || current_database() from kept"))
	assert.Equal(t, "on on ", query(t, second.URL(), "select string_agg(setting, ' ' order by name) from pg_settings "+
		"where name in ('fsync', 'listen_addresses', 'full_page_writes')"))
}

func TestServerLivesAsLongAsItsLastUser(t *testing.T) {
	t.Parallel()
	config := pgserver.Config{Dir: sharedTempDir(t)}
	owner := start(t, config)
	joined := start(t, config)
	if owner.Adopted() || !joined.Adopted() {
		t.Fatalf("adopted: first %t, second %t", owner.Adopted(), joined.Adopted())
	}
	stop(t, owner)
	assert.Equal(t, "alive", query(t, joined.URL(), "select 'alive'"))
	select {
	case <-joined.Done():
		t.Error("Done of the second user is closed, the server is there")
	default:
	}
	stop(t, joined)
	left := servers(t, config.Dir)
	assert.Truef(t, len(left) == 0, "the last user left, processes %v did not", left)
}

func TestParallelStartsShareOneServer(t *testing.T) {
	t.Parallel()
	config := pgserver.Config{Dir: sharedTempDir(t)}
	users := make([]*userProcess, 6)
	for i := range users {
		users[i] = launchUser(t, self(t), nil, config)
	}
	owners := 0
	for _, u := range users {
		u.mustHear()
		if !u.Adopted {
			owners++
		}
		assert.Equal(t, "here", query(t, u.URL, "select 'here'"))
	}
	n := len(servers(t, config.Dir))
	assert.Truef(t, owners == 1 && n == 1, "%d starters have an own server and %d servers run, want 1 and 1", owners, n)
	for _, u := range users {
		u.stop()
	}
}

func TestKillOfLastUserLeavesNoServer(t *testing.T) {
	t.Parallel()
	config := pgserver.Config{Dir: sharedTempDir(t), Durable: true}
	u := launchUser(t, self(t), nil, config)
	u.mustHear()
	query(t, u.URL, "create table kept as select 'yes'::text as answer")
	u.kill()
	pgtest.Eventually(t, func() bool { return len(servers(t, config.Dir)) == 0 }, "the server is gone")
	assert.Equal(t, "yes", query(t, start(t, config).URL(), "select answer from kept"))
}

func TestKillOfOneUserKeepsServer(t *testing.T) {
	t.Parallel()
	config := pgserver.Config{Dir: sharedTempDir(t)}
	u := launchUser(t, self(t), nil, config)
	u.mustHear()
	joined := start(t, config)
	u.kill()
	if got := query(t, joined.URL(), "select 'alive'"); got != "alive" || !joined.Adopted() {
		t.Errorf("after kill -9 of the owner: %q, adopted %t", got, joined.Adopted())
	}
}

// TestKillOfGuard kills all processes except the server, or the server too.
func TestKillOfGuard(t *testing.T) {
	t.Parallel()
	for name, alsoServer := range map[string]bool{"server notices": false, "server killed too": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			config := pgserver.Config{Dir: sharedTempDir(t), Durable: true}
			u := launchUser(t, self(t), nil, config)
			u.mustHear()
			query(t, u.URL, "create table kept as select 'yes'::text as answer")
			pid := servers(t, config.Dir)[0]
			guard := parentOf(t, pid)
			u.kill()
			if alsoServer {
				_ = syscall.Kill(pid, syscall.SIGKILL) // it may have ended already
			}
			_ = syscall.Kill(guard, syscall.SIGKILL)
			again := start(t, config)
			if got := query(t, again.URL(), "select answer from kept"); got != "yes" || again.Adopted() {
				t.Errorf("after the restart the table has %q, adopted %t", got, again.Adopted())
			}
		})
	}
}

func TestKillOfGuardAloneEndsServer(t *testing.T) {
	t.Parallel()
	config := pgserver.Config{Dir: sharedTempDir(t)}
	s := start(t, config)
	pid := servers(t, config.Dir)[0]
	signalTo(t, parentOf(t, pid), syscall.SIGKILL)
	pgtest.Eventually(t, func() bool { return len(servers(t, config.Dir)) == 0 }, "the server ends with its guard")
	<-s.Done()
}

func TestDoneClosesForEveryUser(t *testing.T) {
	t.Parallel()
	config := pgserver.Config{Dir: sharedTempDir(t), Durable: true}
	owner, joined := start(t, config), start(t, config)
	signalTo(t, servers(t, config.Dir)[0], syscall.SIGKILL)
	for name, s := range map[string]*pgserver.Server{"owner": owner, "joined": joined} {
		select {
		case <-s.Done():
		case <-time.After(90 * time.Second):
			t.Fatalf("%s does not notice that the server is gone", name)
		}
	}
	again := start(t, config)
	if got := query(t, again.URL(), "select 'back'"); got != "back" || again.Adopted() {
		t.Errorf("after the takeover: %q, adopted %t", got, again.Adopted())
	}
}

func TestTerminalSignalsDoNotReachServer(t *testing.T) {
	t.Parallel()
	config := pgserver.Config{Dir: sharedTempDir(t)}
	start(t, config)
	pid := servers(t, config.Dir)[0]
	mine, its := statOf(t, os.Getpid()), statOf(t, pid)
	assert.Truef(t, mine[3] != its[3] && mine[2] != its[2],
		"session and group of the server are %s and %s, the same as this process's", its[3], its[2])
}

func TestStalePidFileIsRemoved(t *testing.T) {
	t.Parallel()
	config := pgserver.Config{Dir: sharedTempDir(t), Durable: true}
	first := start(t, config)
	data := filepath.Join(first.Dir(), "data")
	file := filepath.Join(data, "postmaster.pid")
	running, err := os.ReadFile(file)
	require.NoError(t, err)
	stop(t, first)
	_, rest, _ := strings.Cut(string(running), "\n")
	alive := sleeper(t, first.Dir(), "sleep", "60")
	zombie := sleeper(t, first.Dir(), "true")
	pgtest.Eventually(t, func() bool { return statOf(t, zombie)[0] == "Z" }, "the child is a zombie")
	for _, content := range []string{
		"", "nonsense\n",
		fmt.Sprintf("%d\n%s", alive, rest),
		fmt.Sprintf("%d\n%s", zombie, rest),
		fmt.Sprintf("%d\n%s", 1<<22-3, rest),
	} {
		testkit.WriteFile(t, file, content)
		uid, gid := owner(t, data)
		require.NoError(t, os.Chown(file, int(uid), int(gid)))
		s, err := pgserver.Start(t.Context(), config)
		if err != nil {
			t.Errorf("with postmaster.pid %q: %v", content, err)
			continue
		}
		stop(t, s)
	}
	assert.Equal(t, "S", statOf(t, alive)[0])
}

// sleeper starts a process as the owner of dir. It waits for the process at the end of the test.
func sleeper(t *testing.T, dir string, command ...string) int {
	t.Helper()
	cmd := exec.Command(command[0], command[1:]...)
	cmd.Dir = "/"
	if os.Geteuid() == 0 {
		uid, gid := owner(t, dir)
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: gid}}
	}
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		err := cmd.Process.Kill()
		assert.True(t, err == nil || errors.Is(err, os.ErrProcessDone), err)
		_ = cmd.Wait() // killed
	})
	return cmd.Process.Pid
}

func owner(t *testing.T, path string) (uid, gid uint32) {
	t.Helper()
	info, err := os.Lstat(path)
	require.NoError(t, err)
	stat := info.Sys().(*syscall.Stat_t)
	return stat.Uid, stat.Gid
}

func TestLongPath(t *testing.T) {
	t.Parallel()
	base := sharedTempDir(t)
	dir := filepath.Join(base, strings.Repeat("a-long-name/", 15), "with, comma and space")
	s := start(t, pgserver.Config{Dir: dir})
	joined := start(t, pgserver.Config{Dir: dir})
	sockets := query(t, joined.URL(), "select current_setting('unix_socket_directories')")
	assert.Truef(t, !strings.HasPrefix(sockets, base) && len(sockets) <= 60, "the socket is in %s", sockets)
	stop(t, s)
	stop(t, joined)
	_, err := os.Lstat(sockets)
	assert.ErrorIs(t, err, os.ErrNotExist, sockets, "is still there after the stop")
	again := start(t, pgserver.Config{Dir: dir})
	assert.Equal(t, "works", query(t, again.URL(), "select 'works'"))
}

func TestSpecialCharactersInPath(t *testing.T) {
	t.Parallel()
	s := start(t, pgserver.Config{Dir: filepath.Join(sharedTempDir(t), "a +%20ü&?#=b")})
	sockets := query(t, s.URL(), "select current_setting('unix_socket_directories')")
	if !strings.HasPrefix(sockets, s.Dir()) {
		t.Errorf("the socket is in %s; this test needs it in %s", sockets, s.Dir())
	}
}

func TestEphemeralLeavesNothing(t *testing.T) {
	t.Parallel()
	s := start(t, pgserver.Config{Ephemeral: true})
	query(t, s.URL(), "select 1::text")
	stop(t, s)
	if _, err := os.Lstat(s.Dir()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s is still there after the stop: %v", s.Dir(), err)
	}
	u := launchUser(t, self(t), nil, pgserver.Config{Ephemeral: true})
	u.mustHear()
	u.kill()
	pgtest.Eventually(t, func() bool {
		_, err := os.Lstat(u.Dir)
		return errors.Is(err, os.ErrNotExist)
	}, u.Dir+" is removed after kill -9")
}

func TestDataOfOtherVersionIsUsed(t *testing.T) {
	t.Parallel()
	config := pgserver.Config{Dir: sharedTempDir(t), Durable: true}
	s := start(t, config)
	stop(t, s)
	version := filepath.Join(s.Dir(), "data", "PG_VERSION")
	testkit.WriteFile(t, version, "13\n")
	_, err := pgserver.Start(t.Context(), config)
	assert.Truef(t, err != nil && strings.Contains(err.Error(), "PostgreSQL 13") &&
		strings.Contains(err.Error(), "pg_dumpall"), "data of version 13: error %v", err)
}

func TestDataOfAnotherVersionIsKept(t *testing.T) {
	t.Parallel()
	dir := sharedTempDir(t)
	bin, err := pgserver.FindBinaries(os.Getenv)
	require.NoError(t, err)
	other := 14
	if bin.Major == other {
		other = 16
	}
	beside := filepath.Join(dir, strconv.Itoa(other), "data")
	require.NoError(t, os.MkdirAll(beside, 0o700))
	var messages []string
	config := pgserver.Config{Dir: dir, BinDir: bin.Dir, Progress: func(line string) { messages = append(messages, line) }}
	s := start(t, config)
	assert.Equal(t, strconv.Itoa(
		bin.Major), query(t, s.URL(), "select split_part(current_setting('server_version'), '.', 1)"))
	assert.Truef(t, strings.Contains(strings.Join(messages, "\n"), beside),
		"the other version's data is not mentioned in %q", messages)
}

func TestMissingGuardMainIsReported(t *testing.T) {
	t.Parallel()
	u := launchUser(t, copyBinary(t, noGuardBinary), nil, pgserver.Config{Dir: sharedTempDir(t)})
	if u.readReport(); !strings.Contains(u.Err, "GuardMain") {
		t.Errorf("error %q does not name GuardMain", u.Err)
	}
}

// nobody returns an unprivileged user, for tests that run as root.
func nobody(t *testing.T) *syscall.Credential {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root, to become another user")
	}
	u, err := user.Lookup("nobody")
	if err != nil {
		t.Skipf("needs the user nobody: %v", err)
	}
	uid, err := strconv.ParseUint(u.Uid, 10, 32)
	require.NoError(t, err)
	gid, err := strconv.ParseUint(u.Gid, 10, 32)
	require.NoError(t, err)
	return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}
}

func TestNormalUserThenRoot(t *testing.T) {
	t.Parallel()
	credential := nobody(t)
	dir := sharedTempDir(t)
	require.NoError(t, os.Chown(dir, int(credential.Uid), int(credential.Gid)))
	binary := copyBinary(t, "user")
	config := pgserver.Config{Dir: filepath.Join(dir, ".agent", "pg"), Durable: true}
	for range 2 {
		u := launchUser(t, binary, credential, config)
		u.mustHear()
		query(t, u.URL, "create table if not exists kept (answer text)")
		u.stop()
	}
	asRoot := start(t, config)
	query(t, asRoot.URL(), "insert into kept values ('root was here')")
	uid, _ := owner(t, fmt.Sprintf("/proc/%d", servers(t, dir)[0]))
	assert.Equal(t, credential.Uid, uid, "root's server runs as uid", "the data belongs to")
	stop(t, asRoot)
	again := launchUser(t, binary, credential, config)
	again.mustHear()
	again.stop()
}

func TestNormalUserCannotUseDataOfRoot(t *testing.T) {
	t.Parallel()
	credential := nobody(t)
	config := pgserver.Config{Dir: sharedTempDir(t)}
	stop(t, start(t, config))
	u := launchUser(t, copyBinary(t, "user"), credential, config)
	if u.readReport(); !strings.Contains(u.Err, "another user") {
		t.Errorf("error %q does not say whose the data is", u.Err)
	}
}

func TestRootInClosedFolderUsesFallback(t *testing.T) {
	t.Parallel()
	nobody(t)
	closed := filepath.Join(sharedTempDir(t), "closed")
	require.NoError(t, os.Mkdir(closed, 0o700))
	link := filepath.Join(sharedTempDir(t), "link") // the link looks accessible
	require.NoError(t, os.Symlink(closed, link))
	var messages []string
	config := pgserver.Config{
		Dir: filepath.Join(link, "project", ".agent", "pg"), Durable: true,
		Progress: func(line string) { messages = append(messages, line) },
	}
	first := start(t, config)
	base := filepath.Dir(first.Dir())
	t.Cleanup(func() {
		assert.NoError(t, os.RemoveAll(base))
	})
	query(t, first.URL(), "create table kept as select 'yes'::text as answer")
	stop(t, first)
	pointer, err := os.ReadFile(filepath.Join(config.Dir, "LOCATION"))
	require.NoError(t, err)
	assert.Truef(t, strings.TrimSpace(string(pointer)) == base && strings.HasPrefix(filepath.Base(base), "project-"),
		"LOCATION says %q, the files are in %s", pointer, base)
	assert.Truef(t, strings.Contains(strings.Join(messages, "\n"), base), "no line names %s: %q", base, messages)
	if err := os.Chmod(closed, 0o755); err != nil { // open now: the data must not look lost
		t.Fatal(err)
	}
	assert.Equal(t, "yes", query(t, start(t, config).URL(), "select answer from kept"))
}

// Objects created by the superuser under an earlier version change their owner, too.
func TestOwnerIsNoSuperuser(t *testing.T) {
	config := pgserver.Config{Dir: sharedTempDir(t), Database: "agent"}
	s := start(t, config)
	run := func(url, sql string) {
		t.Helper()
		conn, err := pgx.Connect(t.Context(), url)
		require.NoError(t, err)
		defer func() { _ = conn.Close(context.WithoutCancel(t.Context())) }()
		_, err = conn.Exec(t.Context(), sql)
		assert.NoError(t, err)
	}
	run(s.URL(), `create schema other; create table other.things (id bigserial primary key, n int generated always
		as identity); create view seen as select 1 as one;
		create sequence free; create type mood as enum ('fine'); create domain few
		  as int; create function f(int) returns int language sql as 'select 1';
		create procedure p() language sql as 'select 1'; create materialized view kept as select 1 as one;
		create table parts (at int) partition by range (at); create table parts_1 partition of parts for values
		  from (1) to (2)`)
	config.Owner = "agent"
	for range 2 { // the second call has nothing to do
		owned := start(t, config)
		run(owned.URL(), `do $$ begin
			if current_user <> 'agent' or (select rolsuper or rolcreaterole or rolcreatedb from pg_roles where rolname = current_user) then
				raise exception '% may too much', current_user;
			end if;
			if exists (select from pg_class where relowner <> 'agent'::regrole and relnamespace in ('public'::regnamespace, 'other'::regnamespace)) then
				raise exception 'another owns a relation';
			end if;
		end $$;
		create schema if not exists mine; drop view if exists seen; drop procedure if exists p(); drop function if exists f(int); drop type if exists mood; drop domain if exists few;
		drop materialized view if exists kept; drop table if exists other.things; drop sequence if exists free`)
	}
	fresh := start(t, pgserver.Config{Ephemeral: true, Database: "agent", Owner: "agent"})
	run(fresh.URL(), `create table mine (n int)`)
}
