package resourcefaults_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/fstest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/trace"
	"github.com/lanekeeper/lanekeeper/workspace"
)

const (
	largest     = 25 << 20        // bytes of a webhook
	floodBound  = 3 * time.Second // a busy machine; without limits answers take minutes
	floodMemory = 200 << 20       // without limits 1.6 GB
)

// signedEndpoint accepts the largest bodies. It must read a body to authenticate its sender.
const signedEndpoint = `
kind: webhook
name: signed
scheme: github
secrets: ["${HOOK_SECRET}"]
max_bytes: 26214400
actions:
  - event: EVENT_COMPLETED
    key: "{body.key}"
`

// TestFloodDoesNotBlockAdmin: under any flood of strangers and visitors, the process stays ready, answers its admin,
// and uses bounded memory.
func TestFloodDoesNotBlockAdmin(t *testing.T) {
	const chatKey = "a-long-random-text-of-the-chat"
	url := pgtest.URL(t)
	declare(t, url, signedEndpoint)
	for name, c := range map[string]struct{ path, header string }{
		"no endpoint": {"/webhooks/nothing", ""},
		"signed endpoint": {
			"/webhooks/signed",
			"X-Hub-Signature-256: sha256=" + strings.Repeat("ab", 32) + "\r\nX-GitHub-Delivery: 1\r\n",
		},
		"chunked transfer": {
			"/webhooks/signed",
			"X-Hub-Signature-256: sha256=" + strings.Repeat("ab", 32) + "\r\nTransfer-Encoding: chunked\r\n",
		},
	} {
		t.Run(name, func(t *testing.T) {
			a := serve(t, "", environ(url, "AGENT_CHAT_KEY="+chatKey, "AGENT_CHAT_RATE=100000", "AGENT_LOG_LEVEL=info"))
			eventually(t, "the process is ready",
				func() bool { return a.request(http.MethodGet, "/readyz", "").status == http.StatusOK })
			a.request(http.MethodGet, "/v1/lanes", "")
			before := a.memory("VmRSS")
			ctx, stop := context.WithCancel(t.Context())
			defer stop()
			var group sync.WaitGroup
			var bodies, chats atomic.Int32
			for range 64 {
				group.Go(func() { a.floodWebhook(ctx, c.path, c.header, &bodies) })
			}
			for i := range 24 {
				group.Go(func() { a.floodChat(ctx, chatKey, i, &chats) })
			}
			a.checkResponsive()
			eventually(t, "as much was sent as all of them send at once",
				func() bool { return bodies.Load() >= 64 && chats.Load() >= 24 })
			a.checkResponsive()
			stop()
			group.Wait()
			if after := a.memory("VmHWM"); after-before > floodMemory {
				t.Errorf("the process grew from %d MB to %d MB", before>>20, after>>20)
			} else {
				t.Logf("from %d MB to %d MB at most", before>>20, after>>20)
			}
		})
	}
}

// checkResponsive measures the response times of the admin's paths. It repeats a slow round, because the machine may be
// busy.
func (a *agent) checkResponsive() {
	a.t.Helper()
	const rounds, each = 5, 20
	for round := 1; ; round++ {
		ready, lanes := a.p95("/readyz", each), a.p95("/v1/lanes", each)
		a.t.Logf("round %d: 95 of 100 answers of /readyz within %s, of /v1/lanes within %s", round, ready, lanes)
		if a.t.Failed() || ready <= floodBound && lanes <= floodBound {
			return
		}
		if round == rounds {
			a.t.Errorf("answers take longer than %s", floodBound)
			return
		}
	}
}

// p95 requests a path over new connections and returns the 95th percentile of the response times.
func (a *agent) p95(path string, n int) time.Duration {
	a.t.Helper()
	var took []time.Duration
	for range n {
		a.client.CloseIdleConnections()
		began := time.Now()
		got := a.request(http.MethodGet, path, "")
		lasted := time.Since(began)
		if got.status != http.StatusOK {
			a.t.Logf("%s: %d %s", path, got.status, got.body)
			lasted = time.Hour // a failure counts as late
		}
		took = append(took, lasted)
	}
	slices.Sort(took)
	return took[n*95/100-1]
}

// memory returns a line of the process's status in bytes, or 0 if the system has none.
func (a *agent) memory(name string) int {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", a.Cmd.Process.Pid))
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(raw)) {
		if rest, is := strings.CutPrefix(line, name+":"); is {
			kb, err := strconv.Atoi(strings.TrimSuffix(strings.TrimSpace(rest), " kB"))
			require.NoError(a.t, err)
			return kb << 10
		}
	}
	return 0
}

// floodWebhook sends the largest body again and again, even after an early response.
func (a *agent) floodWebhook(ctx context.Context, path, header string, sent *atomic.Int32) {
	piece := bytes.Repeat([]byte("x"), 64<<10)
	chunked := strings.Contains(header, "chunked")
	if !chunked {
		header += "Content-Length: " + strconv.Itoa(largest) + "\r\n"
	}
	for ctx.Err() == nil {
		c, err := (&net.Dialer{}).DialContext(ctx, "tcp", strings.TrimPrefix(a.base, "http://"))
		if err != nil {
			continue
		}
		release := context.AfterFunc(ctx, func() { _ = c.Close() })
		fmt.Fprintf(c, "POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n%s\r\n", path, header)
		for n := 0; n < largest && err == nil; n += len(piece) {
			if chunked {
				fmt.Fprintf(c, "%x\r\n", len(piece))
			}
			if _, err = c.Write(piece); err == nil && chunked {
				_, err = io.WriteString(c, "\r\n")
			}
		}
		if line, _ := bufio.NewReader(c).ReadString('\n'); line != "" {
			sent.Add(1)
		}
		release()
		_ = c.Close()
	}
}

// floodChat sends a history of 8,000 messages, in a new thread each time.
func (a *agent) floodChat(ctx context.Context, key string, n int, answers *atomic.Int32) {
	var body strings.Builder
	body.WriteString(`{"model":"agent","messages":[`)
	for i := range 8000 {
		fmt.Fprintf(&body, `{"role":%q,"content":"%d"},`, []string{"user", "assistant"}[i%2], i)
	}
	body.WriteString(`{"role":"user","content":"hello"}]}`)
	for i := 0; ctx.Err() == nil; i++ {
		r, err := http.NewRequestWithContext(ctx, http.MethodPost, a.base+"/v1/chat/completions",
			strings.NewReader(body.String()))
		if err != nil {
			return
		}
		r.Header.Set("Authorization", "Bearer "+key)
		r.Header.Set("Content-Type", "application/json")
		r.Header.Set("X-Thread-Id", fmt.Sprintf("flood %d %d", n, i))
		if w, err := http.DefaultClient.Do(r); err == nil {
			_, _ = io.Copy(io.Discard, w.Body)
			_ = w.Body.Close()
			answers.Add(1)
		}
	}
}

// TestExhaustedPool exhausts the pool for longer than a lease. The run ends, and records nothing false. When the
// connections return, the execution completes.
func TestExhaustedPool(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	db := admin(t, url)
	pool := pgtest.Pool(t, url, postgres.Options{MaxConns: 3, ApplicationName: "engine"})
	var first, second atomic.Int32
	at, outcome := newGate(), newFirstError()
	e := engine(t, pool, map[string]executions.Func{"two": func(ctx context.Context, _ json.RawMessage) (executions.Result,
		error,
	) {
		if _, err := executions.Step(ctx, "first",
			func(context.Context) (int32, error) { return first.Add(1), nil }); err != nil {
			return executions.Result{}, err
		}
		_, err := executions.Step(ctx, "second", func(context.Context) (int32, error) {
			at.enter()
			return second.Add(1), nil
		})
		if err == nil { // the second step has a checkpoint before the third starts
			_, err = executions.Step(ctx, "third", func(context.Context) (int, error) { return 0, nil })
		}
		outcome.set(err)
		return executions.Result{}, err
	}}, &testkit.Log{})
	x, _, err := e.Start(t.Context(), pool, executions.Spec{Flow: "two", Surface: trace.Flow})
	require.NoError(t, err)
	testkit.Receive(t, at.entered)
	giveBack := acquireConns(t, pool, 3)
	close(at.opened)
	assert.ErrorIs(t, testkit.Receive(t, outcome.ch), executions.ErrLost)
	assert.Equal(t, 1, pgtest.Value[int](t, db, `select count(*) from agent_checkpoints where execution_id = $1`, x.ID))
	got := pgtest.Value[string](t, db, `select status from agent_executions where id = $1`, x.ID)
	assert.Truef(t, got == "running" || got == "pending", "the execution is %s", got)
	giveBack()
	eventually(t, "the execution completes", func() bool {
		return pgtest.Value[string](t, db, `select status from agent_executions where id = $1`, x.ID) == "completed"
	})
	assert.Truef(t, first.Load() == 1 && second.Load() >= 2,
		"the first step ran %d times, the second %d times", first.Load(), second.Load())
}

// acquireConns acquires connections of a pool, like code that leaks them.
func acquireConns(t *testing.T, pool *pgxpool.Pool, n int) (release func()) {
	t.Helper()
	var taken []*pgxpool.Conn
	for range n {
		c, err := pool.Acquire(t.Context())
		require.NoError(t, err)
		taken = append(taken, c)
	}
	given := false
	release = func() {
		for _, c := range taken {
			if !given {
				c.Release()
			}
		}
		given = true
	}
	t.Cleanup(release)
	return release
}

// TestEngineOnSmallestPool runs many flows with every kind of step on two connections.
func TestEngineOnSmallestPool(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	db := admin(t, url)
	pgtest.Exec(t, db, `create table effects (by text not null, what text not null)`)
	pool := pgtest.Pool(t, url, postgres.Options{MaxConns: 2, ApplicationName: "engine"})
	e := engine(t, pool, map[string]executions.Func{"effect": effect, "all": allSteps}, &testkit.Log{},
		func(o *executions.Options) { o.Workers, o.LeaseTTL = 8, 20*time.Second })
	const runs = 20
	for range runs {
		_, _, err := e.Start(t.Context(), pool, executions.Spec{Flow: "all", Surface: trace.Flow})
		require.NoError(t, err)
	}
	eventually(t, "all runs have ended", func() bool {
		return pgtest.Value[int](t, db, `select count(*) from agent_executions where completed_at is null`) == 0
	})
	assert.Equal(t, 2*runs, pgtest.Value[int](t, db, `select count(*) from agent_executions where status = 'completed'`))
	assert.Equal(t, 2*runs, pgtest.Value[int](t, db, `select count(distinct by) from effects`))
}

// allSteps has each kind of step, a timer, a child, and one lane for all.
func allSteps(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
	x, _ := executions.Current(ctx)
	if _, err := executions.Step(ctx, "step", func(context.Context) (int, error) { return 1, nil }); err != nil {
		return executions.Result{}, err
	}
	_, err := executions.Phase(ctx, "phase", func(ctx context.Context, _ *executions.Effect) (int, error) {
		return executions.StepTx(ctx, "write", func(ctx context.Context, tx pgx.Tx) (int, error) {
			_, err := tx.Exec(ctx, `insert into effects (by, what) values ($1, 'phase')`, x.ID)
			return 1, err
		})
	})
	if err != nil {
		return executions.Result{}, fmt.Errorf("phase: %w", err)
	}
	if _, err := executions.Wait(ctx, "pause", executions.Delay(time.Millisecond)); err != nil {
		return executions.Result{}, err
	}
	_, err = executions.Trigger(ctx, "child", executions.Child{Flow: "effect", Input: x.ID, Wait: true})
	return executions.Result{}, err
}

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

// TestLockedThreadBlocksOnlyItsWriters locks a thread's row in a transaction. A writer of that thread gets an error
// that asks to retry. Other visitors, webhooks, readiness and the admin still work.
func TestLockedThreadBlocksOnlyItsWriters(t *testing.T) {
	const key = "a-long-random-text-of-the-chat"
	url := pgtest.URL(t)
	pool := declare(t, url, bearerEndpoint)
	a := serve(t, "", environ(url, "AGENT_CHAT_KEY="+key, "AGENT_CHAT_RATE=100000", "AGENT_LOG_LEVEL=info"))
	eventually(t, "the process is ready", func() bool {
		return a.request(http.MethodGet, "/readyz", "").status == http.StatusOK
	})
	say := func(ctx context.Context, thread string) answer {
		return a.requestIn(ctx, http.MethodPost, "/v1/chat/completions",
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
			return a.request(http.MethodPost, "/webhooks/open", fmt.Sprintf(`{"key":"%d"}`, n), "Authorization",
				"Bearer hook-secret-of-the-test")
		},
		"readiness": func() answer { return a.request(http.MethodGet, "/readyz", "") },
		"the admin": func() answer { return a.request(http.MethodGet, "/v1/lanes", "") },
	} {
		a.checkFast(name, func() answer { n++; return ask() })
	}
	stop()
	group.Wait()
	require.NoError(t, tx.Rollback(t.Context()))
	eventually(t, "the thread takes messages again",
		func() bool { return say(t.Context(), "held").status == http.StatusOK })
}

// checkFast checks that all requests succeed, and nearly all quickly in one of a few rounds. The machine may be as busy
// as the process.
func (a *agent) checkFast(name string, ask func() answer) {
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
