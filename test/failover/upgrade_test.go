package failover_test

import (
	"compress/gzip"
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/migrations"
)

// expansion plays the migrations of a later release. It changes the tables of every statement of the processes.
var expansion = map[string]string{
	"9001_more.sql": `
		alter table agent_executions add column more int not null default 1, add column maybe text;
		alter table agent_checkpoints add column more int not null default 1;
		alter table agent_messages add column more int not null default 1;
		alter table agent_activity add column more int not null default 1;
		alter table agent_locks add column more int not null default 1;
		create table agent_later (id int primary key, execution_id uuid references agent_executions on delete cascade)`,
	"9002_index.sql": "-- outside a transaction\ncreate index concurrently if not exists agent_executions_more on " +
		"agent_executions (more, id);\n",
}

// TestNewerVersionMigratesWhileProcessesServe migrates while executions run and wait: none is lost, none stops. Then
// the processes stop, and cannot start again.
func TestNewerVersionMigratesWhileProcessesServe(t *testing.T) {
	t.Parallel()
	newer := t.TempDir()
	require.NoError(t, os.CopyFS(newer, os.DirFS("../../migrations")))
	for name, text := range expansion {
		require.NoError(t, os.WriteFile(filepath.Join(newer, "changes", name), []byte(text), 0o600))
	}
	w := newTestEnv(t, pgtest.URL(t), "30s")
	w.serve(2)
	l := w.startLoad()
	l.waitCallsBlocked()
	_, err := migrations.UpWith(t.Context(), w.db, os.DirFS(newer))
	require.NoError(t, err)
	w.releaseCalls()
	for i, base := range w.baseURLs {
		if got := probe(t, base+"/readyz"); got.status != http.StatusOK ||
			!strings.Contains(got.Checks["schema"].Detail, "newer than this process") {
			t.Errorf("process %d says %d, %+v", i, got.status, got.Checks)
		}
	}
	l.checkRecovery()
	again := launch(t, w.dir, w.environ(), "serve")
	if code := again.Exit(); code != 2 || !strings.Contains(again.Err.String(),
		"migrated by a newer version of agent; use that version or newer") {
		t.Errorf("agent serve on a newer schema: exit code %d: %s", code, again.Err.String())
	}
	l.stopAndCheck()
}

// TestWaitsOfEarlierVersionFinish upgrades data of schema version 118 with the program, and serves it. The data comes
// from killed processes of a release: one execution ran, and others waited for every kind of event.
func TestWaitsOfEarlierVersionFinish(t *testing.T) {
	t.Parallel()
	to := pgtest.EmptyURL(t)
	packed, err := os.Open("../../migrations/testdata/0118.sql.gz")
	require.NoError(t, err)
	defer packed.Close()
	unpacked, err := gzip.NewReader(packed)
	require.NoError(t, err)
	data, err := io.ReadAll(unpacked)
	require.NoError(t, err)
	answers := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) {
		rw.WriteHeader(http.StatusNoContent)
	}))
	t.Cleanup(answers.Close) // the skill with the interrupted call
	here := strings.ReplaceAll(string(data), "127.0.0.1:31779", answers.Listener.Addr().String())
	conn, err := pgx.Connect(t.Context(), to) // its own connection: a dump changes session settings
	require.NoError(t, err)
	defer func() { _ = conn.Close(context.WithoutCancel(t.Context())) }()
	pgtest.Exec(t, conn, here, pgx.QueryExecModeSimpleProtocol)
	a := launch(t, t.TempDir(), []string{"DATABASE_URL=" + to}, "migrate")
	require.Truef(t, a.Exit() == 0, "agent migrate: %s", a.Err.Tail(30))
	finishWaits(t, newTestEnv(t, to, "30s"))
}

// finishWaits sends what the executions wait for, and waits until everything has ended.
func finishWaits(t *testing.T, w *testEnv) {
	t.Helper()
	// The dump is old, so the test moves the deadlines into the future and ends the workers.
	pgtest.Exec(w.t, w.db, `update agent_executions set waiting_until = clock_timestamp() + interval '1 day'
		where status = 'waiting'`)
	pgtest.Exec(w.t, w.db, `update agent_executions set waiting_until = clock_timestamp() where status = 'waiting'
		and waiting_for = 'delay'`)
	pgtest.Exec(w.t, w.db, `update agent_workers set expires_at = clock_timestamp() - interval '1 second'`)
	waited := pgtest.Value[int](w.t, w.db, `select count(*) from agent_executions where status = 'waiting'`)
	running := pgtest.Value[int](w.t, w.db, `select count(*) from agent_executions where status = 'running'`)
	assert.Truef(t, waited >= 5 && running >= 1,
		"%d executions wait and %d run: the data does not show what it is for", waited, running)
	w.serve(1)
	l := w.newLoad()
	l.retryUntilDone("/v1/events", adminToken, "", "",
		map[string]any{"event": "EVENT_COMPLETED", "key": "event old", "data": map[string]any{"is": "heard"}, "id": "1"}, nil)
	l.retryUntilDone("/v1/events", adminToken, "", "",
		map[string]any{"event": "MESSAGE_RECEIVED", "key": "old", "data": map[string]any{"content": "heard"}, "id": "2"}, nil)
	for kind, event := range map[string]string{
		"document": "DOCUMENT_UPLOADED", "signature": "SIGNATURE_COMPLETED",
		"test": "TEST_COMPLETED",
	} {
		id := pgtest.Value[string](w.t, w.db, `select id::text from agent_requests where kind = $1 and status = 'pending'`,
			kind)
		l.retryUntilDone("/v1/events", adminToken, "", "", map[string]any{
			"event": event, "key": id, "id": kind,
			"data": map[string]any{"document": "INE", "url": "heard", "score": 7, "result": "passed"},
		}, nil)
	}
	pgtest.Eventually(t, func() bool {
		return pgtest.Value[bool](w.t, w.db, `select not exists (select from agent_executions where completed_at is null
			and flow like 'old%')`)
	}, "executions of the previous version end")
	for _, bad := range pgtest.Column[string](w.t, w.db, `
		select format('%s %s is %s: %s', flow, id, status, error_message) from agent_executions where flow like 'old%'
		  and status <> 'completed'`) {
		t.Error(bad)
	}
	assert.Equal(t, waited+running, pgtest.Value[int](w.t, w.db,
		`select count(*) from agent_messages m join agent_executions x on x.id = m.execution_id
		where x.flow like 'old%' and m.content like 'done%' and m.status = 'sent'`))
	w.checkRunning()
}
