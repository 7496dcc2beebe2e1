package resourcefaults_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/fstest"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgserver"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/migrations"
	"github.com/lanekeeper/lanekeeper/workspace"
)

// fault is a database that rejects writes between begin and end, with the texts of the errors.
type fault struct {
	url        string
	begin, end func()
	message    string // in the client's error
	hint       string // in the operator's log
}

// faults are the faults that tests try one by one.
var faults = map[string]func(t *testing.T) fault{
	"full disk":            fullDisk,
	"full disk, pretended": simulatedFullDisk,
	"read-only":            readOnly,
}

// admin returns the test's own pool.
func admin(t *testing.T, url string) *pgxpool.Pool {
	t.Helper()
	pool := pgtest.Pool(t, url, postgres.Options{MaxConns: 4, ApplicationName: "faults"})
	return pool
}

// simulatedFullDisk returns a database that rejects every insert and update like a full disk.
func simulatedFullDisk(t *testing.T) fault {
	url := pgtest.URL(t)
	db := admin(t, url)
	pgtest.Exec(t, db, `
		create table faults (yes boolean not null);
		insert into faults values (false);
		create function faults() returns trigger language plpgsql as $$
		begin
		  if (select yes from public.faults) then
		    raise exception 'could not extend file "base/1/2": No space left on device' using errcode = '53100',
		    hint = 'Check free disk space.';
		  end if;
		  return null;
		end $$;
		do $$
		declare t record;
		begin
		  for t in select c.oid::regclass as name from pg_class c where c.relkind in ('r', 'p') and not c.relispartition
		              and c.relnamespace in ('public'::regnamespace, 'river'::regnamespace) and c.relname <> 'faults'
		  loop
		    execute format('create trigger faults before insert or update on %s for each statement execute function public.faults()', t.name);
		  end loop;
		end $$`)
	set := func(yes bool) func() { return func() { pgtest.Exec(t, db, `update faults set yes = $1`, yes) } }
	return fault{url, set(true), set(false), "disk is full", "free space on it"}
}

// ownServer returns the test's own PostgreSQL.
func ownServer(t *testing.T) *pgserver.Server {
	t.Helper()
	own, err := pgserver.Start(t.Context(), pgserver.Config{Ephemeral: true})
	require.NoError(t, err)
	t.Cleanup(func() {
		assert.NoError(t, own.Stop(context.WithoutCancel(t.Context())))
	})
	return own
}

func migrate(t *testing.T, url string) {
	t.Helper()
	_, err := migrations.Up(t.Context(), admin(t, url))
	require.NoError(t, err)
}

// readOnly returns a server that its administrator, or a failover, made read-only.
func readOnly(t *testing.T) fault {
	own := ownServer(t)
	migrate(t, own.URL())
	db := admin(t, own.URL())
	set := func(to string) func() {
		return func() {
			pgtest.Exec(t, db, `alter system set default_transaction_read_only = `+to)
			pgtest.Exec(t, db, `select pg_reload_conf()`)
			eventually(t, "the server is read-only: "+to, func() bool {
				return pgtest.Value[string](t, db, `select current_setting('transaction_read_only')`) == to
			})
		}
	}
	return fault{own.URL(), set("on"), set("off"), "read-only", "primary"}
}

// fullDisk returns a database on a small file system that begin fills to the last byte. If none can be mounted, the
// fault is simulated.
func fullDisk(t *testing.T) fault {
	disk, ok := mount(t, "128m")
	if !ok {
		t.Log("no file system can be mounted here: the full disk is pretended")
		return simulatedFullDisk(t)
	}
	own := ownServer(t) // stops before the unmount of its disk
	space := filepath.Join(disk, "space")
	require.NoError(t, os.Mkdir(space, 0o700))
	copyOwner(t, own.Dir(), space)
	db := admin(t, own.URL())
	pgtest.Exec(t, db, `create tablespace small location '`+space+`'`)
	pgtest.Exec(t, db, `create database agent tablespace small template template0`)
	url := strings.Replace(own.URL(), "/postgres?", "/agent?", 1)
	migrate(t, url)
	ballast := filepath.Join(disk, "ballast")
	return fault{
		url: url, begin: func() { fill(t, ballast) },
		end: func() {
			require.NoError(t, os.Remove(ballast))
		},
		message: "disk is full", hint: "free space on it",
	}
}

// copyOwner gives a file the owner of another file.
func copyOwner(t *testing.T, like, path string) {
	t.Helper()
	info, err := os.Stat(like)
	require.NoError(t, err)
	if owner, ok := info.Sys().(*syscall.Stat_t); ok {
		require.NoError(t, os.Lchown(path, int(owner.Uid), int(owner.Gid)))
	}
}

// fill writes a file until the file system is full.
func fill(t *testing.T, path string) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	require.NoError(t, err)
	defer f.Close()
	for size := 1 << 20; size > 0; {
		if _, err := f.Write(make([]byte, size)); errors.Is(err, syscall.ENOSPC) {
			size /= 2
		} else if err != nil {
			t.Fatal(err)
		}
	}
}

// declared is the workspace of the processes: an endpoint that starts a flow for each delivery.
const declared = `
kind: flow
name: wide
actions:
  - actionType: set
    parameters: {variables: {seen: "{{input.n}}"}}
---
kind: webhook
name: hook
scheme: bearer
secrets: ["${HOOK_SECRET}"]
id: header.x-id
actions:
  - event: EVENT_COMPLETED
    key: "{body.key}"
`

// apply writes the workspace into a database.
func apply(t *testing.T, url string) {
	t.Helper()
	files, err := workspace.Load(fstest.MapFS{"all.yaml": {Data: []byte(declared)}})
	require.NoError(t, err, fmt.Errorf("the workspace of the test: %w", err))
	_, err = workspace.Apply(t.Context(), admin(t, url), files, workspace.Options{})
	require.NoError(t, err)
}
