//go:build unix

package resourcefaults_test

import (
	"bufio"
	"bytes"
	"context"
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
	"time"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

const (
	largest     = 25 << 20        // bytes of a webhook
	floodBound  = 3 * time.Second // a busy machine; without limits answers take minutes
	floodMemory = 200 << 20       // without limits 1.6 GB
)

// signedEndpoint takes the largest bodies, and can only tell who sent them when it has read them.
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

// TestStrangersStopNobody: whatever strangers and visitors send, and however much at once, the process says that it
// is ready, answers its admin, and keeps its memory.
func TestStrangersStopNobody(t *testing.T) {
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
				func() bool { return a.ask(http.MethodGet, "/readyz", "").status == http.StatusOK })
			a.ask(http.MethodGet, "/v1/lanes", "")
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
			a.staysWell()
			eventually(t, "as much was sent as all of them send at once",
				func() bool { return bodies.Load() >= 64 && chats.Load() >= 24 })
			a.staysWell()
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

// staysWell measures the answers of the admin's paths. It repeats a slow round, because the machine may be busy.
func (a *agent) staysWell() {
	a.t.Helper()
	const rounds, each = 5, 20
	for round := 1; ; round++ {
		ready, lanes := a.times("/readyz", each), a.times("/v1/lanes", each)
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

// times requests a path over new connections and returns the 95th percentile of the answers' times.
func (a *agent) times(path string, n int) time.Duration {
	a.t.Helper()
	var took []time.Duration
	for range n {
		a.client.CloseIdleConnections()
		began := time.Now()
		got := a.ask(http.MethodGet, path, "")
		lasted := time.Since(began)
		if got.status != http.StatusOK {
			a.t.Logf("%s: %d %s", path, got.status, got.body)
			lasted = time.Hour // the answer counts as late
		}
		took = append(took, lasted)
	}
	slices.Sort(took)
	return took[n*95/100-1]
}

// memory is a line of the process's status in bytes; 0 where the system does not tell.
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

// floodWebhook sends the largest body again and again, and is not stopped by an answer that comes before its end.
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

// floodChat asks with a history of 8,000 messages, in a thread of its own each time.
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
