package channels_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/channels/telegram/telegramtest"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/proctest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

var program string

func TestMain(m *testing.M) {
	pgtest.AtOnce(4)
	proctest.Main(m, "channels", &program)
}

const waitTimeout = 10 * time.Minute

// testEnv is a database with a workspace and its serving processes.
type testEnv struct {
	t       *testing.T
	pool    *pgxpool.Pool
	environ []string
	folder  string
}

// newTestEnv applies a workspace. settings are further environment variables.
func newTestEnv(t *testing.T, model *modeltest.Server, workspace string, settings ...string) *testEnv {
	t.Helper()
	database := pgtest.URL(t)
	w := &testEnv{
		t: t, pool: pgtest.Pool(t, database, postgres.Options{}), folder: t.TempDir(),
		environ: testkit.Environ(database, model, append([]string{
			"AGENT_ADMIN_TOKEN=6b1f0c9e27d84a53b1c7e09f4d2a8836", "AGENT_LISTEN=127.0.0.1:0", "AGENT_LOG_FORMAT=json",
			"AGENT_ALLOW_PRIVATE_HTTP=127.0.0.1", "AGENT_CHAT_RATE=100000",
			"TELEGRAM_TOKEN=" + telegramtest.Token,
		}, settings...)...),
	}
	testkit.WriteFile(t, filepath.Join(w.folder, "workspace.yaml"), workspace)
	w.run("apply", w.folder)
	return w
}

// run runs a command to its end and returns its output.
func (w *testEnv) run(args ...string) string {
	w.t.Helper()
	p := proctest.Start(w.t, waitTimeout, w.folder, w.environ, append([]string{program}, args...)...)
	code := p.Exit()
	require.Truef(w.t, code == 0, "agent %v ended with %d:\n%s%s", args, code, p.Out.String(), p.Err.String())
	return p.Out.String()
}

func (w *testEnv) serve() *proctest.Process {
	w.t.Helper()
	p := proctest.Start(w.t, waitTimeout, w.folder, w.environ, program, "serve")
	p.Base()
	return p
}

// isLong reports whether the large forms run, like in scripts/prove.
func isLong() bool { return os.Getenv("AGENT_CHANNELS") == "long" }

// bySize returns the number of the small form, or that of the large one.
func bySize(small, large int) int {
	if isLong() {
		return large
	}
	return small
}

// lease returns a worker's lease. It is longer if a busy machine has much work.
func lease() string {
	if isLong() {
		return "10s"
	}
	return "2s"
}

// waitAnswered waits until more than n answers were sent, or may have been sent.
func (w *testEnv) waitAnswered(n int) {
	w.t.Helper()
	w.waitUntil(fmt.Sprintf("more than %d answers", n), func() bool {
		return value[int](w, `select count(*) from agent_channel_sends where status in ('sent', 'maybe_sent')`) > n
	})
}

// kill kills the serving process, starts another one and returns it.
func (w *testEnv) kill(p *proctest.Process) *proctest.Process {
	w.t.Helper()
	p.Kill()
	return w.serve()
}

// waitSettled waits until no message is left to send. It returns the number of messages with an uncertain send. Each of
// those is listed.
func (w *testEnv) waitSettled(messages int) (maybe int) {
	w.t.Helper()
	w.waitUntil("all is sent", func() bool {
		return messages == value[int](w, `select count(*) from agent_channel_sends where status not in ('queued', 'sending')`)
	})
	maybe = value[int](w, `select count(*) from agent_channel_sends where status = 'maybe_sent'`)
	failed := value[int](w, `select count(*) from agent_channel_sends where status = 'failed'`)
	assert.Truef(w.t, failed == 0, "%d messages failed", failed)
	w.waitUntil("all are done", func() bool {
		return messages == value[int](w, `select count(*) from agent_channel_messages where status = 'done'`)
	})
	listed := strings.Count(w.run("channels", "sends", "--limit", "500"), "maybe_sent")
	assert.Equal(w.t, maybe, listed, "listed messages that were maybe sent")
	return maybe
}

// waitUntil waits until a condition holds.
func (w *testEnv) waitUntil(what string, holds func() bool) {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.t.Context(), waitTimeout)
	defer cancel()
	for !holds() {
		require.Truef(w.t, testkit.Wait(ctx, 50*time.Millisecond), "not in time: %s", what)
	}
}

func value[T any](w *testEnv, sql string, args ...any) T {
	w.t.Helper()
	var v T
	require.NoError(w.t, w.pool.QueryRow(w.t.Context(), sql, args...).Scan(&v))
	return v
}

func joinYAML(base, more string) string {
	return fmt.Sprintf(`
kind: channel
name: support
type: telegram
secrets: {token: "${TELEGRAM_TOKEN}"}
settings: {base_url: %q}
%s
`, base, more)
}
