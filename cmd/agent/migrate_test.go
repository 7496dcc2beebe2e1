package main

import (
	"context"
	"net/url"
	"regexp"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/pgserver"
	"github.com/lanekeeper/lanekeeper/migrations"
)

// A user without CREATEROLE gets the statement for a superuser. After it, the next migration grants the contract.
// Roles belong to the cluster, so the test has one of its own.
func TestMigratePrintsTheStatementForTheMissingRole(t *testing.T) {
	t.Parallel()
	server, err := pgserver.Start(t.Context(), pgserver.Config{Ephemeral: true, Database: "agent", Owner: "owner"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := server.Stop(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	})
	p := on(t, server.URL())
	statement := regexp.MustCompile(`let a superuser run this, then run agent migrate again:\n  (create role .*;)\n`)
	var found []string
	for range 2 { // it is printed until it was followed
		got := p.run("migrate")
		if found = statement.FindStringSubmatch(got.err); got.code != 0 || found == nil {
			t.Fatalf("agent migrate as a user without CREATEROLE: exit %d, stderr: %s", got.code, got.err)
		}
	}
	superuser, err := url.Parse(server.URL())
	if err != nil {
		t.Fatal(err)
	}
	superuser.User = url.User("postgres")
	db := connect(t, superuser.String())
	mustExec(t, db, found[1])
	if got := p.run("migrate"); got.code != 0 || got.err != "" {
		t.Fatalf("agent migrate with the role: exit %d, stderr: %s", got.code, got.err)
	}
	mustExec(t, db, `create role importer login; grant `+migrations.ClientRole+` to importer`)
	superuser.User = url.User("importer")
	importer := connect(t, superuser.String())
	mustExec(t, importer, `select try_acquire_agent_lock('shelf', 'importer', 30); select * from agent_locks_live`)
	if _, err := importer.Exec(t.Context(), `select from agent_locks`); err == nil {
		t.Error("the role reads a table")
	}
}

// mustExec runs statements without arguments.
func mustExec(t *testing.T, db *pgxpool.Pool, statements string) {
	t.Helper()
	if _, err := db.Exec(t.Context(), statements); err != nil {
		t.Fatalf("%s: %v", statements, err)
	}
}
