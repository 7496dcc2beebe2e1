package cuts_test

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"hash/fnv"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgproxy"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

// cutsPerRun is the number of cuts in one run of the sample. It equals the retries of postgres.RetryOnDisconnect, since
// all cuts may hit one transaction.
const cutsPerRun = 3

// trial is a story and its cuts.
type trial struct {
	story story
	cuts  []cut
	name  string
}

// TestCuts plays each story with a cut at each message, in each way. As a sample, it cuts each statement in each way,
// several in one run.
func TestCuts(t *testing.T) {
	clean := runWithoutCuts(t)
	trials := plan(clean)
	t.Logf("%d runs", len(trials))
	found := &findings{}
	t.Run("at", func(t *testing.T) {
		for _, x := range trials {
			t.Run(x.name, func(t *testing.T) {
				t.Parallel()
				x.run(t, clean[x.story.name].digest, found)
			})
		}
	})
	found.check(t, len(trials))
}

// runWithoutCuts plays each story without a cut, for the comparison.
func runWithoutCuts(t *testing.T) map[string]storyResult {
	t.Helper()
	var mu sync.Mutex
	clean := map[string]storyResult{}
	t.Run("undisturbed", func(t *testing.T) {
		for _, s := range stories {
			t.Run(s.name, func(t *testing.T) {
				t.Parallel()
				e := s.run(t, nil)
				assert.Equal(t, 0, len(e.incidents), e.incidents)
				assert.Truef(t, len(e.sent) >= 60, "%d different messages; does the proxy still see them?", len(e.sent))
				mu.Lock()
				defer mu.Unlock()
				clean[s.name] = e
			})
		}
	})
	if t.Failed() {
		t.FailNow()
	}
	return clean
}

// plan returns the cuts: all, or each statement once in each way. A sample cuts background statements only in the idle
// story, and preparations in none.
func plan(clean map[string]storyResult) []trial {
	beside := map[string]bool{}
	for _, x := range clean["idle"].sent {
		beside[x.text] = x.background
	}
	var trials []trial
	for _, s := range stories {
		var cuts []cut
		for _, x := range slices.SortedFunc(slices.Values(clean[s.name].sent),
			func(a, b countedMessage) int { return cmp.Compare(a.text, b.text) }) {
			idle := s.name == "idle"
			if idle != beside[x.text] && (idle || !cutsAll()) || strings.HasPrefix(x.text, "prepare: ") && !cutsAll() {
				continue
			}
			for time := 1; time <= x.times; time++ {
				for _, w := range []cutKind{before, after} {
					if cutsAll() || time == sample(x, w) && (!testing.Short() || w == sampleKind(x)) {
						cuts = append(cuts, cut{x.text, time, w})
					}
				}
			}
		}
		trials = append(trials, s.groupCuts(cuts)...)
	}
	return trials
}

// groupCuts groups cuts into trials: one in each, or several that are far apart in their order.
func (s story) groupCuts(cuts []cut) []trial {
	n := len(cuts)
	if !cutsAll() {
		n = (n + cutsPerRun - 1) / cutsPerRun
	}
	trials := make([]trial, n)
	for i := range trials {
		trials[i] = trial{story: s, name: fmt.Sprintf("%s/%04d", s.name, i+1)}
	}
	for i, c := range cuts {
		trials[i%n].cuts = append(trials[i%n].cuts, c)
	}
	return trials
}

// sample returns the occurrence of a text that a sample cuts.
func sample(x countedMessage, w cutKind) int {
	return 1 + (hash(x)+int(w))%x.times
}

func hash(x countedMessage) int {
	h := fnv.New32a()
	h.Write([]byte(x.text)) // cannot fail
	return int(h.Sum32() >> 1)
}

// sampleKind returns the only way of a cut in the short run.
func sampleKind(x countedMessage) cutKind { return []cutKind{before, after}[hash(x)%2] }

// run plays the story with the cuts and compares the end. A lost lease may mean that the machine stalled. Then run
// plays the story again.
func (x trial) run(t *testing.T, want []string, found *findings) {
	t.Helper()
	var got storyResult
	var seen []string
	for range 3 {
		got = x.story.run(t, x.cuts)
		seen = append(got.incidents, difference(want, got.digest)...)
		if !got.leaseLost || len(seen) == 0 || t.Failed() {
			break
		}
	}
	slices.Sort(seen)
	found.add(t, x, slices.Compact(seen), got)
}

// findings are the results of all trials.
type findings struct {
	mu              sync.Mutex
	done            int
	cuts            int
	unreached       []string
	exceptionCounts map[int]int // occurrences of each exception
}

// add records the result of a trial.
func (f *findings) add(t *testing.T, x trial, seen []string, got storyResult) {
	t.Helper()
	f.mu.Lock()
	defer f.mu.Unlock()
	f.done++
	f.cuts += len(x.cuts)
	for _, c := range got.uncut {
		f.unreached = append(f.unreached, x.name+": "+c.String())
	}
	unlisted := f.unlisted(x, seen)
	assert.Truef(t, len(unlisted) == 0, "%s\n%s\nthe log:\n%s", x.cuts, strings.Join(unlisted, "\n"), got.log)
}

// unlisted returns the differences that no exception covers.
func (f *findings) unlisted(x trial, seen []string) []string {
	return slices.DeleteFunc(seen, func(what string) bool {
		for i, e := range exceptions {
			if e.covers(x, what) {
				if f.exceptionCounts == nil {
					f.exceptionCounts = map[int]int{}
				}
				f.exceptionCounts[i]++
				return true
			}
		}
		return false
	})
}

// check reports what all trials together show.
func (f *findings) check(t *testing.T, planned int) {
	t.Helper()
	f.mu.Lock()
	defer f.mu.Unlock()
	t.Logf("%d of %d cuts were not reached:\n%s", len(f.unreached), f.cuts, strings.Join(f.unreached, "\n"))
	assert.True(t, f.done != planned || len(f.unreached) <= f.cuts/5,
		"a process sends other messages than without cuts; the sample covers too little")
	if !cutsAll() || f.done < planned {
		return
	}
	for i, e := range exceptions {
		assert.Truef(t, f.exceptionCounts[i] != 0,
			"the exception %q has not occurred: take it out of the table and out of docs/exceptions.md", e.name)
	}
}

// requestUntilDone makes a request over HTTP. It repeats the request under the same Idempotency-Key, like a careful
// client: after a broken connection, after a server error, or while the first request still runs. It notes each failed
// attempt.
func (w *testEnv) requestUntilDone(ctx context.Context, method, path, body, key string) []byte {
	w.t.Helper()
	for {
		status, answer, err := w.request(ctx, method, path, adminToken, body, "Idempotency-Key", key)
		if err == nil && status < 300 {
			return answer
		}
		w.noteIncident("%s %s: %s", method, strings.SplitN(path, "-", 2)[0], outcome(status, answer, err))
		again := err != nil || status >= 500 || strings.Contains(string(answer), "idempotency-key-running")
		if !again || !pause(ctx) {
			return nil
		}
	}
}

// outcome describes a failed request in few words.
func outcome(status int, answer []byte, err error) string {
	if err != nil {
		return "the connection broke"
	}
	var p struct {
		Title string
		Error struct{ Code string }
	}
	if json.Unmarshal(answer, &p) != nil {
		return http.StatusText(status)
	}
	return strings.TrimSpace(http.StatusText(status) + ": " + cmp.Or(p.Title, p.Error.Code))
}

// pause waits briefly before a repeated request.
func pause(ctx context.Context) bool { return testkit.Wait(ctx, 5*time.Millisecond) }

// request makes one request; further words are headers.
func (w *testEnv) request(ctx context.Context, method, path, key, body string, header ...string) (int, []byte, error) {
	r, err := http.NewRequestWithContext(ctx, method, w.url+path, strings.NewReader(body))
	if err != nil {
		return 0, nil, err
	}
	r.Header.Set("Authorization", "Bearer "+key)
	r.Header.Set("Content-Type", "application/json")
	for i := 0; i < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	response, err := client.Do(r)
	if err != nil {
		return 0, nil, err
	}
	defer response.Body.Close()
	answer, err := io.ReadAll(response.Body)
	return response.StatusCode, answer, err
}

// sendMessage sends a visitor's message and reads the answer. If that breaks off, it acts like a careful client: it
// repeats the message under the same key, or attaches to the answer in progress.
func (w *testEnv) sendMessage(ctx context.Context, thread, words string) string {
	w.t.Helper()
	body, err := json.Marshal(map[string]any{
		"model": "agent", "stream": true, "messages": []map[string]string{{"role": "user", "content": words}},
	})
	require.NoError(w.t, err)
	method, path, attached := http.MethodPost, "/v1/chat/completions", false
	for {
		got := w.readAnswer(ctx, method, path, string(body), thread)
		if got.Complete && got.Status == http.StatusOK {
			return got.Text
		}
		w.noteIncident("the visitor was told: %d %s", got.Status, got.Code)
		if attached = got.ID != ""; attached {
			method, path, body = http.MethodGet, "/v1/chat/completions/"+got.ID+"?stream=true", nil
		}
		if !pause(ctx) {
			return got.Text
		}
	}
}

// readAnswer makes a request of the chat API and reads the response.
func (w *testEnv) readAnswer(ctx context.Context, method, path, body, thread string) testkit.Answer {
	r, err := http.NewRequestWithContext(ctx, method, w.url+path, strings.NewReader(body))
	require.NoError(w.t, err)
	r.Header.Set("Authorization", "Bearer "+chatKey)
	if body != "" {
		r.Header.Set("Content-Type", "application/json")
		r.Header.Set("X-Thread-Id", thread)
		r.Header.Set("Idempotency-Key", "message in "+thread)
	}
	return testkit.Chat(r, nil)
}

// newProxy creates a proxy between a process and the database of a URL. Its ledger decides the cuts.
func newProxy(t testing.TB, target string, ledger *ledger) *pgproxy.Proxy {
	t.Helper()
	return pgproxy.Listen(t, target, func(client, server net.Conn) pgproxy.Link {
		return &link{ledger: ledger, client: client, server: server}
	})
}

// link is one connection through the proxy.
type link struct {
	ledger         *ledger
	client, server net.Conn
	last           string      // the last statement of the open transaction
	cut            atomic.Bool // cut at the server's next ReadyForQuery, before the client gets it
}

// Upstream forwards the client's messages, up to each one whose answer it awaits.
func (l *link) Upstream() {
	requests, first, err := pgproxy.NewRequests(l.client)
	if err != nil {
		return
	}
	name := "connect"
	if pgproxy.IsCancel(first) {
		name = ""
	}
	for raw := first; l.send(name, raw); {
		r, err := requests.Next()
		if err != nil {
			return
		}
		name, raw = l.name(r), r.Raw
	}
}

// name returns the name of a request without its number. It is empty if the client awaits no answer.
func (l *link) name(r pgproxy.Request) string {
	if len(r.Bound) == 0 {
		if len(r.Prepared) == 0 {
			return ""
		}
		return "prepare: " + oneLine(r.Prepared)
	}
	name := oneLine(slices.Compact(r.Bound))
	switch word, _, _ := strings.Cut(name, " "); word {
	case "commit", "rollback":
		name += " after: " + l.last
	default:
		l.last = name
	}
	return name
}

// send forwards a message unless the ledger cuts it. It forwards all messages without a name.
func (l *link) send(name string, raw []byte) bool {
	if name != "" {
		switch l.ledger.next(name) {
		case before:
			return false
		case after:
			l.cut.Store(true)
		case pass:
		}
	}
	_, err := l.server.Write(raw)
	return err == nil
}

// Downstream forwards the server's answers.
func (l *link) Downstream() { pgproxy.Answers(l.server, l.client, l.cut.Load) }

// oneLine returns statements on one line.
func oneLine(statements []string) string {
	lines := make([]string, len(statements))
	for i, sql := range statements {
		lines[i] = strings.Join(strings.Fields(sql), " ")
	}
	return strings.Join(lines, "; ")
}
