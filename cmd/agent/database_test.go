package main

import (
	"context"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/config"
	"github.com/lanekeeper/lanekeeper/internal/logging"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/trace"
)

// What a stopped process has locked in the middle of a step keeps others from its executions no longer than its lease does.
func TestATransactionIsLeftAloneForALease(t *testing.T) {
	t.Parallel()
	log, err := logging.New(io.Discard, "text", "error")
	if err != nil {
		t.Fatal(err)
	}
	url := pgtest.EmptyURL(t)
	for lease, want := range map[time.Duration]string{
		time.Second: "5s", 6 * time.Second: "6s", 30 * time.Second: "30s", 10 * time.Minute: "1min",
	} {
		s := &session{config: config.Config{Workers: 1, WorkerLease: lease}, log: log, url: url}
		if err := s.connect(t.Context()); err != nil {
			t.Fatal(err)
		}
		var got string
		err := s.pool.QueryRow(t.Context(), `show idle_in_transaction_session_timeout`).Scan(&got)
		s.close(t.Context())
		if err != nil || got != want {
			t.Errorf("with a lease of %s the server ends it after %q (%v), want %s", lease, got, err, want)
		}
	}
}

// Programs that read JSON find what to do in one place, also when the database cannot be opened.
func TestADatabaseThatCannotBeOpenedSaysWhatToDoInItsField(t *testing.T) {
	t.Parallel()
	const gone = "postgres://user@127.0.0.1:1/none"
	var got struct {
		Error struct{ Message, Hint string }
	}
	if err := oneDocument(bare(t, "DATABASE_URL="+gone).run("executions", "ls", "--json").err, &got); err != nil {
		t.Fatal(err)
	}
	if hint := got.Error.Hint; !strings.HasPrefix(hint, "check host and port") || strings.Contains(got.Error.Message, hint) ||
		!strings.HasSuffix(got.Error.Message, "cannot reach the server (connection refused)") {
		t.Errorf("got %+v", got.Error)
	}
	text := bare(t, "DATABASE_URL="+gone).run("executions", "ls").err
	if want := "agent: " + got.Error.Message + ": " + got.Error.Hint + "\n"; text != want {
		t.Errorf("in text %q, want %q", text, want)
	}
}

// A server without a free connection is advised about once.
func TestAFullServerIsAdvisedAboutOnce(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	db := connect(t, url)
	role := "crowd_" + strings.ToLower(trace.New(trace.Flow).Suffix())
	if _, err := db.Exec(t.Context(), `create role `+role+` login connection limit 0`); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if _, err := db.Exec(context.Background(), `drop role `+role); err != nil {
			t.Error(err)
		}
	})
	at := db.Config().ConnConfig
	full := fmt.Sprintf("postgres://%s@/%s?host=%s&port=%d", role, at.Database, at.Host, at.Port)
	if got := bare(t, "DATABASE_URL="+full).run("executions", "ls"); strings.Count(got.err, "max_connections") != 1 {
		t.Errorf("got %+v", got)
	}
}
