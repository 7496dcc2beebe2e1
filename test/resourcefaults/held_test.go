//go:build unix

package resourcefaults_test

import (
	"context"
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"testing/fstest"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/workspace"
)

const bearerEndpoint = `
kind: webhook
name: open
scheme: bearer
secrets: ["${HOOK_SECRET}"]
actions:
  - event: EVENT_COMPLETED
    key: "{body.key}"
`

// declare applies a workspace of one document, and returns an admin's pool of the database.
func declare(t *testing.T, url, document string) *pgxpool.Pool {
	t.Helper()
	files, err := workspace.Load(fstest.MapFS{"all.yaml": {Data: []byte(document)}})
	require.NoError(t, err)
	pool := admin(t, url)
	_, err = workspace.Apply(t.Context(), pool, files, workspace.Options{})
	require.NoError(t, err)
	return pool
}

// TestAHeldThreadStopsNobodyElse: while a transaction has a thread's row, who writes into it is told to come again, and
// other visitors, webhooks, readiness and the admin go on.
func TestAHeldThreadStopsNobodyElse(t *testing.T) {
	const key = "a-long-random-text-of-the-chat"
	url := pgtest.URL(t)
	pool := declare(t, url, bearerEndpoint)
	a := serve(t, "", environ(url, "AGENT_CHAT_KEY="+key, "AGENT_CHAT_RATE=100000", "AGENT_LOG_LEVEL=info"))
	eventually(t, "the process is ready", func() bool {
		return a.ask(http.MethodGet, "/readyz",
			"").status == http.StatusOK
	})
	say := func(ctx context.Context, thread string) answer {
		return a.askIn(ctx, http.MethodPost, "/v1/chat/completions",
			`{"model":"agent","messages":[{"role":"user","content":"hello"}]}`,
			"Authorization", "Bearer "+key, "X-Thread-Id", thread)
	}
	got := say(t.Context(), "held")
	require.Equal(t, http.StatusOK, got.status, got.body)
	tx := pgtest.Begin(t, pool)
	tag, err := tx.Exec(t.Context(), `select from agent_threads where name = 'held' for update`)
	require.Truef(t, err == nil && tag.RowsAffected() == 1, "%s, %v", tag, err)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var group sync.WaitGroup
	var busy atomic.Int32
	for range 50 {
		group.Go(func() {
			for ctx.Err() == nil {
				got := say(ctx, "held")
				again := got.status == http.StatusServiceUnavailable || got.status == http.StatusTooManyRequests
				if again && got.header.Get("Retry-After") != "" {
					busy.Add(1)
				} else if ctx.Err() == nil {
					t.Errorf("%d %s", got.status, got.body)
				}
			}
		})
	}
	eventually(t, "they are told to come again", func() bool { return busy.Load() > 50 })
	n := 0
	for name, ask := range map[string]func() answer{
		"other visitors": func() answer { return say(t.Context(), fmt.Sprint("other ", n)) },
		"webhooks": func() answer {
			return a.ask(http.MethodPost, "/webhooks/open", fmt.Sprintf(`{"key":"%d"}`, n), "Authorization",
				"Bearer hook-secret-of-the-test")
		},
		"readiness": func() answer { return a.ask(http.MethodGet, "/readyz", "") },
		"the admin": func() answer { return a.ask(http.MethodGet, "/v1/lanes", "") },
	} {
		a.within(name, func() answer { n++; return ask() })
	}
	stop()
	group.Wait()
	require.NoError(t, tx.Rollback(t.Context()))
	eventually(t, "the thread takes messages again",
		func() bool { return say(t.Context(), "held").status == http.StatusOK })
}

// within expects good answers, and nearly all of them quickly in one of a few rounds: the machine may be as busy as the
// process.
func (a *agent) within(name string, ask func() answer) {
	a.t.Helper()
	const rounds, each = 5, 20
	for round := 1; ; round++ {
		slow := 0
		for range each {
			began := time.Now()
			got := ask()
			assert.Truef(a.t, got.status/100 == 2, "%s: %d %s", name, got.status, got.body)
			if time.Since(began) > floodBound {
				slow++
			}
		}
		if slow <= each/20 || a.t.Failed() {
			return
		}
		if round == rounds {
			a.t.Errorf("%s: %d of %d answers took longer than %s", name, slow, each, floodBound)
			return
		}
	}
}
