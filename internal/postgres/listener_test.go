package postgres_test

import (
	"context"
	"encoding/binary"
	"io"
	"log/slog"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgproxy"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

// syncLog is a log that goroutines write while a test reads it.
type syncLog struct{ testkit.Log }

func listen(t *testing.T, db *pgxpool.Pool) (*postgres.Listener, *syncLog) {
	t.Helper()
	log := &syncLog{}
	l := postgres.NewListener(postgres.Dialer(db), slog.New(slog.NewTextHandler(log, nil)))
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- l.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		assert.NoError(t, <-ended, "Run")
	})
	return l, log
}

func receive(t *testing.T, payloads <-chan string) string {
	t.Helper()
	select {
	case payload, open := <-payloads:
		require.True(t, open, "the subscription is closed")
		return payload
	case <-time.After(90 * time.Second):
		t.Fatal("nothing arrives")
		return ""
	}
}

func want(t *testing.T, payloads <-chan string, payload string) {
	t.Helper()
	assert.Equal(t, payload, receive(t, payloads))
}

func notify(t *testing.T, db *pgxpool.Pool, channel, payload string) {
	t.Helper()
	pgtest.Exec(t, db, "select pg_notify($1, $2)", channel, payload)
}

func TestSubscribersReceiveTheirChannel(t *testing.T) {
	t.Parallel()
	db := pgtest.Empty(t)
	l, _ := listen(t, db)
	first, _ := l.Subscribe("one")
	want(t, first, "") // Run has sent LISTEN by now
	second, cancel := l.Subscribe("one")
	other, _ := l.Subscribe(`Odd "name"`) // while Run waits for a notification
	want(t, other, "")
	notify(t, db, "one", "a")
	notify(t, db, `Odd "name"`, "b")
	want(t, first, "a")
	want(t, second, "a")
	want(t, other, "b")
	cancel()
	cancel()
	_, open := <-second
	assert.True(t, !open, "a cancelled subscription still delivers")
	notify(t, db, "one", "c")
	want(t, first, "c")
}

func TestReconnectWakesAllSubscribers(t *testing.T) {
	t.Parallel()
	db := pgtest.Empty(t)
	l, _ := listen(t, db)
	one, _ := l.Subscribe("one")
	two, _ := l.Subscribe("two")
	want(t, one, "")
	want(t, two, "")
	pgtest.Exec(t, db, `
		select pg_terminate_backend(pid) from pg_stat_activity
		where datname = current_database() and query like 'listen %'`)
	want(t, one, "")
	want(t, two, "")
	notify(t, db, "one", "again")
	want(t, one, "again")
}

func TestSlowSubscriberGetsOneWakeUp(t *testing.T) {
	t.Parallel()
	db := pgtest.Empty(t)
	l, _ := listen(t, db)
	slow, _ := l.Subscribe("busy")
	quick, _ := l.Subscribe("last")
	want(t, slow, "")
	want(t, quick, "")
	pgtest.Exec(t, db, "select pg_notify('busy', n::text) from generate_series(1, 17) n")
	notify(t, db, "last", "done")
	want(t, quick, "done") // the reader has not waited for the slow one
	want(t, slow, "")
	select {
	case payload := <-slow:
		t.Errorf("after the wake-up there is still %q", payload)
	default:
	}
}

// Payloads for others neither displace a subscriber's own payloads nor wake it.
func TestSubscribeToFiltersPayloads(t *testing.T) {
	t.Parallel()
	db := pgtest.Empty(t)
	l, _ := listen(t, db)
	mine, _ := l.SubscribeTo("busy", func(payload string) bool { return payload == "mine" })
	want(t, mine, "")
	notify(t, db, "busy", "mine")
	pgtest.Exec(t, db, "select pg_notify('busy', n::text) from generate_series(1, 100) n")
	notify(t, db, "busy", "mine")
	want(t, mine, "mine")
	want(t, mine, "mine")
}

func TestPoolerIsLoggedOnce(t *testing.T) {
	t.Parallel()
	pool, err := postgres.Open(t.Context(), throughPooler(t, pgtest.EmptyURL(t)), postgres.Options{})
	require.NoError(t, err)
	defer pool.Close()
	l, log := listen(t, pool)
	l.Subscribe("one")
	pgtest.Eventually(t, func() bool { return strings.Count(log.String(), "polling only") == 1 },
		"the warning")
}

// throughPooler returns a connection string through a proxy. Like PgBouncer, the proxy announces a made-up process id.
func throughPooler(t *testing.T, to string) string {
	t.Helper()
	return pgproxy.Listen(t, to, func(client, server net.Conn) pgproxy.Link { return relay{client, server} }).URL("")
}

type relay struct{ client, server net.Conn }

func (r relay) Upstream() { _, _ = io.Copy(r.server, r.client) }

func (r relay) Downstream() {
	if changeProcessID(r.client, r.server) == nil {
		_, _ = io.Copy(r.client, r.server)
	}
}

// changeProcessID forwards the server's messages up to BackendKeyData, and changes the process id.
func changeProcessID(client io.Writer, server io.Reader) error {
	for {
		head := make([]byte, 5)
		if _, err := io.ReadFull(server, head); err != nil {
			return err
		}
		body := make([]byte, binary.BigEndian.Uint32(head[1:])-4)
		if _, err := io.ReadFull(server, body); err != nil {
			return err
		}
		const backendKeyData = 'K'
		if head[0] == backendKeyData {
			binary.BigEndian.PutUint32(body, binary.BigEndian.Uint32(body)+1)
		}
		if _, err := client.Write(append(head, body...)); err != nil {
			return err
		}
		if head[0] == backendKeyData {
			return nil
		}
	}
}
