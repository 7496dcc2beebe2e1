// Package sdks tests the SDKs of TypeScript and Python. A worker of each runs one scenario against the real server,
// with kills, pauses, lost answers and cancels.
package sdks

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/proctest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

var program string

func TestMain(m *testing.M) { proctest.Main(tests{m}, "sdks", &program) }

const (
	token       = "an-admin-token-of-this-test"
	waitTimeout = 2 * time.Minute
)

// language is an SDK with its scenario.
type language struct {
	name    string
	command []string
}

// languages returns the SDKs whose language is installed.
func languages(t *testing.T) []language {
	t.Helper()
	dir, err := os.Getwd()
	require.NoError(t, err)
	var all []language
	for _, l := range []language{
		{"typescript", []string{"node", filepath.Join(dir, "scenario.mjs")}},
		{"python", []string{"python3", filepath.Join(dir, "scenario.py")}},
	} {
		path, err := exec.LookPath(l.command[0])
		if err != nil {
			t.Errorf("%s is not installed: apt-get install nodejs python3", l.command[0])
			continue
		}
		l.command[0] = path
		if packed && l.name == "typescript" {
			l.command[1] = filepath.Join(installed(t, l.name), "scenario.mjs")
		}
		all = append(all, l)
	}
	return all
}

// testEnv is a server with workers of one SDK.
type testEnv struct {
	*testing.T
	language
	db      *pgxpool.Pool
	base    string
	effects string
}

func newTestEnv(t *testing.T, l language) *testEnv {
	t.Helper()
	address := pgtest.URL(t)
	server := proctest.Start(t, waitTimeout, t.TempDir(), proctest.Environ("DATABASE_URL="+address,
		"AGENT_ADMIN_TOKEN="+token, "AGENT_LISTEN=127.0.0.1:0", "AGENT_LOG_FORMAT=json", "AGENT_LOG_LEVEL=info"),
		program, "serve")
	w := &testEnv{T: t, language: l, base: server.Base(), effects: filepath.Join(t.TempDir(), "effects")}
	w.db = pgtest.Pool(t, address, postgres.Options{})
	require.NoError(t, os.WriteFile(w.effects, nil, 0o600))
	return w
}

// worker starts a worker that connects to the server at base.
func (w *testEnv) worker(owner, base string, ttl int, environ ...string) *proctest.Process {
	w.Helper()
	sdk, err := filepath.Abs("../../sdk/python")
	require.NoError(w, err)
	if packed {
		sdk = installed(w.T, "python")
	}
	return proctest.Start(w, waitTimeout, w.TempDir(), proctest.Environ(append([]string{
		"AGENT_URL=" + base, "AGENT_TOKEN=" + token, "OWNER=" + owner, "EFFECTS=" + w.effects, "SDK=" + sdk,
		fmt.Sprint("TTL_SECONDS=", ttl), "PYTHONDONTWRITEBYTECODE=1",
	}, environ...)...), w.command...)
}

// proxy forwards requests to the server.
func (w *testEnv) proxy() *httputil.ReverseProxy {
	w.Helper()
	target, err := url.Parse(w.base)
	require.NoError(w, err)
	return httputil.NewSingleHostReverseProxy(target)
}

// call sends a request as the admin.
func (w *testEnv) call(method, path, body string, into any) {
	w.Helper()
	got, err := testkit.Do(w.Context(), http.DefaultClient, method, w.base+path, body, testkit.Bearer(token))
	require.NoError(w, err)
	if got.Status >= 300 {
		w.Fatalf("%s %s: %d %s", method, path, got.Status, got.Body)
	}
	if into != nil {
		require.NoError(w, json.Unmarshal(got.Body, into))
	}
}

// start starts an execution of a flow.
func (w *testEnv) start(flow, input string) string {
	w.Helper()
	var x struct{ ID string }
	w.call("POST", "/v1/executions", fmt.Sprintf(`{"flow":%q,"on_lost":"hand_on","input":%s}`, flow, input), &x)
	return x.ID
}

// waitEnded waits for the end, and returns the status, with the summary or the error.
func (w *testEnv) waitEnded(id string) (status, text string) {
	w.Helper()
	pgtest.Until(w, w.db, true, `select completed_at is not null from agent_executions where id = $1::uuid`, id)
	var x struct {
		Status       string
		Summary      string  `json:"result_summary"`
		ErrorMessage *string `json:"error_message"`
	}
	w.call("GET", "/v1/executions/"+id, "", &x)
	if x.ErrorMessage != nil {
		return x.Status, *x.ErrorMessage
	}
	return x.Status, x.Summary
}

// effectLines returns the effects so far.
func (w *testEnv) effectLines() []string {
	w.Helper()
	text, err := os.ReadFile(w.effects)
	require.NoError(w, err)
	return strings.Split(strings.TrimSpace(string(text)), "\n")
}

// countEffects counts the effects that begin with a text.
func (w *testEnv) countEffects(prefix string) (n int) {
	w.Helper()
	for _, line := range w.effectLines() {
		if strings.HasPrefix(line, prefix) {
			n++
		}
	}
	return n
}

// waitEffects waits for effects.
func (w *testEnv) waitEffects(prefix string, n int) {
	w.Helper()
	pgtest.EventuallyWithin(w, waitTimeout, func() bool { return w.countEffects(prefix) >= n }, "no effect "+prefix)
}

// checkEnd checks the end of an execution.
func (w *testEnv) checkEnd(id, status, text string) {
	w.Helper()
	if s, got := w.waitEnded(id); s != status || got != text {
		w.Errorf("the execution ended %s: %q, want %s: %q", s, got, status, text)
	}
}

// text returns the text for the SDK under test.
func (w *testEnv) text(typescript, python string) string {
	if w.name == "python" {
		return python
	}
	return typescript
}

// eachSDK runs a test for both SDKs.
func eachSDK(t *testing.T, test func(w *testEnv)) {
	t.Helper()
	t.Parallel()
	for _, l := range languages(t) {
		t.Run(l.name, func(t *testing.T) {
			t.Parallel()
			test(newTestEnv(t, l))
		})
	}
}

func TestFlowResumesAfterKill(t *testing.T) {
	eachSDK(t, func(w *testEnv) {
		first := w.worker("first", w.base, 6)
		id := w.start("external:scenario", `{"steps":4,"pause_ms":500}`)
		w.waitEffects("add 2", 1)
		first.Kill()
		w.worker("second", w.base, 20)
		w.checkEnd(id, "completed", "the sum is 10")
		keys := map[string]bool{}
		for _, line := range w.effectLines() {
			keys[line] = true // a repeated step has its key twice
		}
		if n := w.countEffects("add 1"); n != 1 || len(keys) != 4 || w.countEffects("add 2")+w.countEffects("add 3") > 3 {
			w.Errorf("the effects are %q: want add 1 once, one step at most twice, each under one key", w.effectLines())
		}
	})
}

func TestStaleWorkerChangesNothing(t *testing.T) {
	eachSDK(t, func(w *testEnv) {
		first := w.worker("first", w.base, 6)
		id := w.start("external:scenario", `{"steps":3,"pause_ms":1500}`)
		w.waitEffects("add 1", 1)
		first.Signal(syscall.SIGSTOP)
		w.worker("second", w.base, 20)
		w.checkEnd(id, "completed", "the sum is 6")
		done := len(w.effectLines())
		first.Signal(syscall.SIGCONT)
		first.AwaitOutput("stopped here")
		before, after := w.effectLines()[:done], w.effectLines()[done:]
		for _, line := range after { // of the current step, which a slow machine may have started twice
			if line != "aborted 1" && (!strings.HasPrefix(line, "add 1 ") || !slices.Contains(before, line)) {
				w.Errorf("after it woke: %q", after)
			}
		}
		if w.countEffects("add 3") != 1 {
			w.Errorf("the effects are %q", w.effectLines())
		}
	})
}

func TestWaitsSuspendFlow(t *testing.T) {
	eachSDK(t, func(w *testEnv) {
		worker := w.worker("first", w.base, 30)
		id := w.start("external:scenario", `{"steps":1,"pause_ms":0,"event":"paid 7","sleep":"1s"}`)
		late := w.start("external:scenario", `{"steps":0,"pause_ms":0,"event":"never","timeout":"1s","sleep":0}`)
		failed := w.start("external:scenario", `{"steps":0,"pause_ms":0,"fail":"it is broken"}`)
		careless := w.start("external:careless", `{"event":"care"}`)
		pgtest.Until(w, w.db, "waiting", `select status::text from agent_executions where id = $1::uuid`, id)
		worker.Stop() // a waiting execution needs no worker
		w.call("POST", "/v1/events", `{"event":"EVENT_COMPLETED","key":"paid 7","data":{"amount":41}}`, nil)
		w.worker("second", w.base, 30)
		w.checkEnd(id, "completed", "the sum is 42")
		w.checkEnd(late, "completed", "the sum is -1")
		w.checkEnd(failed, "failed", w.text("it is broken", "ValueError: it is broken"))
		if w.countEffects("add 1") != 1 {
			w.Errorf("a recorded step was called again: %q", w.effectLines())
		}
		w.waitEffects("swallowed", 1)
		pgtest.Until(w, w.db, "waiting", `select status::text from agent_executions where id = $1::uuid`, careless)
		w.call("POST", "/v1/events", `{"event":"EVENT_COMPLETED","key":"care","data":{}}`, nil)
		w.checkEnd(careless, "completed", "done")
		if w.countEffects("after") != 1 {
			w.Errorf("the careless flow did %q", w.effectLines())
		}
	})
}

// Otherwise the worker with the lock would run the flow again and again.
func TestRejectedEndFailsFlow(t *testing.T) {
	eachSDK(t, func(w *testEnv) {
		worker := w.worker("first", w.base, 30)
		w.checkEnd(w.start("external:huge", `{}`), "failed",
			"the end of the flow was refused: 413: the body is larger than 1048576 bytes")
		w.checkEnd(w.start("external:exit", `{}`), "failed", w.text("it gives up", "SystemExit: it gives up"))
		worker.AwaitOutput("it gives up")
		if status, text := w.waitEnded(w.start("external:no-json", `{}`)); status != "failed" || !strings.Contains(text, "JSON") &&
			!strings.Contains(text, "serialize") {
			w.Errorf("the step without JSON ended the flow %s: %q", status, text)
		}
	})
}

func TestErrorHasItsStepTypeAndPlace(t *testing.T) {
	eachSDK(t, func(w *testEnv) {
		worker := w.worker("first", w.base, 30)
		w.checkEnd(w.start("external:broken", `{"step":"read"}`), "failed",
			w.text("step read: RangeError: it is missing", "step read: KeyError: 'missing'"))
		w.checkEnd(w.start("external:broken", `{}`), "failed", w.text("RangeError: it is missing", "KeyError: 'missing'"))
		worker.AwaitOutput(w.text("scenario.mjs:", "scenario.py"))
		worker.AwaitOutput("in_broken_function")
	})
}

func TestFlowsAreCheckedAtRegistration(t *testing.T) {
	eachSDK(t, func(w *testEnv) {
		w.worker("first", w.base, 30)
		w.checkEnd(w.start("external:register", `{}`), "completed", "flow external:twice: "+
			w.text("a function is required", "a plain function is required, not async def")+
			"; flow external:twice: the name is registered already")
	})
}

func TestManyStepsAtOnceLogNoWarning(t *testing.T) {
	onlyTypeScript(t, func(w *testEnv) {
		worker := w.worker("first", w.base, 30)
		id := w.start("external:many", `{}`)
		w.checkEnd(id, "completed", "20 steps")
		worker.Stop()
		assert.Truef(w, !strings.Contains(worker.Err.String(), "Warning"), "the log is %s", worker.Err.String())
	})
}

func TestStepKeysAreUnique(t *testing.T) {
	eachSDK(t, func(w *testEnv) {
		w.worker("first", w.base, 30)
		w.checkEnd(w.start("external:names", `{}`), "completed", "item #2, item, item #3, item #4")
	})
}

func TestAlteredResultIsAnError(t *testing.T) {
	eachSDK(t, func(w *testEnv) {
		w.worker("first", w.base, 30)
		status, text := w.waitEnded(w.start("external:reader", `{}`))
		assert.Truef(w, status == "completed" && strings.Contains(text, "its result has more than 64 KiB"),
			"the client read the cut result: %s %.200s", status, text)
	})
}

// Each of these ends once ended the worker, or made it run the flow again and again.
func TestOddEndFailsFlow(t *testing.T) {
	eachSDK(t, func(w *testEnv) {
		w.worker("first", w.base, 30)
		for end, want := range map[string][2]string{
			"error without text": {"unknown error", "NoText"}, "error of nothing": {"unknown error", "BaseException"},
			"error with NUL": {"a\ufffdb", "a\ufffdb"}, "huge error": {strings.Repeat("x", 1000), strings.Repeat("x", 1000)},
			"stopped": {"LostError: it was lost", "LostError: it was lost"},
			"key":     {"ByteString", "latin-1"}, "value": {"serialize", "serializable"},
			"infinity": {"", "ValueError: Out of range float values"},
			"summary":  {"result_summary must be a string", "serializable"},
		} {
			text := w.text(want[0], want[1])
			status, got := w.waitEnded(w.start("external:odd", fmt.Sprintf(`{"end":%q}`, end)))
			assert.Truef(w, status == "failed" && strings.Contains(got, text), "%s: %s: %.200q", end, status, got)
		}
	})
}

// Python reads neither an integer of 4,301 digits nor values that are nested more than about 1,000 levels deep.
func TestUnreadableInputFailsItsFlowOnly(t *testing.T) {
	eachSDK(t, func(w *testEnv) {
		deep := w.start("external:exit", fmt.Sprintf(`{"deep":%s%s}`, strings.Repeat("[", 3000), strings.Repeat("]", 3000)))
		digits := w.start("external:exit", `{"digits":`+strings.Repeat("1", 5000)+`}`)
		good := w.start("external:scenario", `{"steps":1,"pause_ms":0}`)
		w.worker("first", w.base, 30)
		w.checkEnd(good, "completed", "the sum is 1")
		w.checkEnd(digits, "failed", w.text("it gives up", "SystemExit: it gives up"))
		w.checkEnd(deep, "failed", w.text("it gives up",
			"RecursionError: the input or a record of the execution is nested too deeply for Python"))
	})
}

// Settings often come from files.
func TestSettingsMayEndInLineBreak(t *testing.T) {
	eachSDK(t, func(w *testEnv) {
		w.worker("first", w.base, 30, "AGENT_URL="+w.base+"\n", "AGENT_TOKEN="+token+"\n")
		w.checkEnd(w.start("external:scenario", `{"steps":1,"pause_ms":0}`), "completed", "the sum is 1")
	})
}

// An error goes into logs.
func TestUnusableTokenIsNotShown(t *testing.T) {
	eachSDK(t, func(w *testEnv) {
		for _, secret := range []string{"s3cret\nwrong", "s3cret\u20ac"} {
			worker := w.worker("first", w.base, 30, "AGENT_TOKEN="+secret)
			worker.AwaitOutput("the token has a line break or another character that is not printable ASCII")
			assert.Truef(w, !strings.Contains(worker.Err.String(), "s3cret"), "the error is %s", worker.Err.String())
		}
	})
}

// One request claims at most 100 executions.
func TestWorkerRunsManyFlows(t *testing.T) {
	eachSDK(t, func(w *testEnv) {
		const n = 101
		pgtest.Exec(w, w.db, `select start_agent_execution('external:scenario', '{"steps":1,"pause_ms":3600000}')
			from generate_series(1, $1::int)`, n)
		w.worker("first", w.base, 60, "CONCURRENCY=1000")
		w.waitEffects("add 1", n)
		w.checkEnd(w.start("external:again", `{}`), "failed",
			w.text("this worker runs already", "RuntimeError: this worker runs already"))
		w.worker("second", w.base, 60, "CONCURRENCY=1001").AwaitOutput("concurrency 1001: use 1 to 1000")
	})
}

func TestRedirectIsNamed(t *testing.T) {
	eachSDK(t, func(w *testEnv) {
		base := testkit.Serve(w, http.RedirectHandler(w.base, http.StatusFound))
		w.worker("first", base, 30).AwaitOutput("302: the server redirects to " + w.base)
	})
}

// The server, or the way to it, forgets one beat. The next one comes before the locks end.
func TestLocksSurviveLostHeartbeat(t *testing.T) {
	eachSDK(t, func(w *testEnv) {
		var beats atomic.Int64
		proxy := w.proxy()
		base := testkit.Serve(w, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
			if r.Method == http.MethodPut && beats.Add(1) == 1 {
				_, _ = io.Copy(io.Discard, r.Body) // afterwards the context reports a closed connection
				<-r.Context().Done()
				return
			}
			proxy.ServeHTTP(rw, r)
		}))
		w.worker("first", base, 9)
		w.checkEnd(w.start("external:scenario", `{"steps":1,"pause_ms":11000}`), "completed", "the sum is 1")
		assert.Equal(w, 1, w.countEffects("add 1"), "effects: the lock was lost")
	})
}

// A lost heartbeat is repeated soon; a refused one is not.
func TestRefusedHeartbeatIsNotRepeatedSoon(t *testing.T) {
	eachSDK(t, func(w *testEnv) {
		var beats atomic.Int64
		proxy := w.proxy()
		base := testkit.Serve(w, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
			if r.Method == http.MethodPut {
				beats.Add(1)
				rw.WriteHeader(http.StatusTooManyRequests)
				return
			}
			proxy.ServeHTTP(rw, r)
		}))
		worker := w.worker("first", base, 10) // no multiple of three
		w.checkEnd(w.start("external:scenario", `{"steps":1,"pause_ms":5000}`), "completed", "the sum is 1")
		worker.AwaitOutput("locks not renewed; the next beat tries again: ")
		assert.True(w, beats.Load() >= 1 && beats.Load() <= 3, "heartbeats: ", beats.Load())
	})
}

// onlyTypeScript runs a test for the SDK whose flows are asynchronous.
func onlyTypeScript(t *testing.T, test func(w *testEnv)) {
	t.Helper()
	t.Parallel()
	for _, l := range languages(t) {
		if l.name == "typescript" {
			test(newTestEnv(t, l))
		}
	}
}

func TestStepReturnsItsRecord(t *testing.T) {
	onlyTypeScript(t, func(w *testEnv) {
		w.worker("first", w.base, 30)
		w.checkEnd(w.start("external:json", `{}`), "completed",
			`true [["string","1970-01-01T00:00:00.000Z"],["object",null],["object",null]]`)
	})
}

// A cancel rejects all promises of a flow. Nothing handles one of them yet.
func TestCancelEndsNoOtherFlow(t *testing.T) {
	onlyTypeScript(t, func(w *testEnv) {
		worker := w.worker("first", w.base, 3)
		id := w.start("external:parallel", `{}`)
		w.waitEffects("ship", 1)
		w.call("POST", "/v1/executions/"+id+"/cancel", `{"reason":"not needed"}`, nil)
		pgtest.Until(w, w.db, "cancelled", `select status::text from agent_executions where id = $1::uuid`, id)
		w.checkEnd(w.start("external:scenario", `{"steps":2,"pause_ms":3000}`), "completed", "the sum is 3")
		assert.Equal(w, 1, w.countEffects("add 1"), "effects")
		worker.Stop()
	})
}

// The server is away when one flow ends and another begins a wait.
func TestStoppedWorkerDoesNotWaitForServer(t *testing.T) {
	onlyTypeScript(t, func(w *testEnv) {
		var ending sync.Map
		proxy := w.proxy()
		base := testkit.Serve(w, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
			if strings.Contains(r.URL.Path, "/lock/") {
				ending.Store(strings.Split(r.URL.Path, "/")[3], true)
				rw.WriteHeader(http.StatusServiceUnavailable)
				return
			}
			proxy.ServeHTTP(rw, r)
		}))
		worker := w.worker("first", base, 30, "GRACE_SECONDS=1")
		for _, input := range []string{`{"steps":0}`, `{"steps":0,"event":"late"}`} {
			id := w.start("external:scenario", input)
			pgtest.EventuallyWithin(w, waitTimeout, func() bool { _, is := ending.Load(id); return is }, "no request")
		}
		worker.Stop()
		assert.Equal(w, 2, strings.Count(worker.Err.String(), "stopped here: the worker stops"), worker.Err.String())
	})
}

// The worker is stopped after the server has locked the run, and before the answer arrives.
func TestStoppedWorkerRunsWhatItClaimed(t *testing.T) {
	eachSDK(t, func(w *testEnv) {
		claimed := make(chan struct{}, 100)
		proxy := w.proxy()
		proxy.ModifyResponse = func(r *http.Response) error {
			if r.Request.Method != http.MethodPost || r.Request.URL.Path != "/v1/locks" {
				return nil
			}
			body, err := io.ReadAll(r.Body)
			r.Body = io.NopCloser(bytes.NewReader(body))
			if bytes.Contains(body, []byte(`"lock_id"`)) {
				claimed <- struct{}{}
				time.Sleep(time.Second)
			}
			return err
		}
		worker := w.worker("first", testkit.Serve(w, proxy), 5)
		var x struct{ ID string }
		w.call("POST", "/v1/executions", `{"flow":"external:scenario","on_lost":"fail","input":{"steps":0}}`, &x)
		<-claimed
		worker.Stop()
		w.checkEnd(x.ID, "completed", "the sum is 0")
	})
}

// Two copies of the SDK run workers in one process. The server is away.
func TestProgramKeepsItsUnhandledRejections(t *testing.T) {
	onlyTypeScript(t, func(w *testEnv) {
		sdk, err := filepath.Abs("../../sdk/typescript/index.js")
		require.NoError(w, err)
		const script = `
			const end = new AbortController(), copies = [];
			for (const copy of ["", "?copy"]) {
				const { Worker } = await import(process.env.SDK + copy);
				const worker = new Worker({ url: "http://127.0.0.1:1", token: "token", log() {} });
				worker.flow("external", () => {});
				copies.push(worker.start({ signal: end.signal }));
			}
			setTimeout(() => Promise.reject(new Error("of the program")), 100);
			setTimeout(() => end.abort(), 200);
			await Promise.all(copies);
			console.log("listeners:", process.listenerCount("unhandledRejection"));`
		file := filepath.Join(w.TempDir(), "two.mjs")
		require.NoError(w, os.WriteFile(file, []byte(script), 0o600))
		run := func(flag string) string {
			cmd := exec.Command(w.command[0], flag, file)
			cmd.Env = proctest.Environ("SDK=" + sdk)
			out, err := cmd.CombinedOutput()
			return fmt.Sprint(err, " ", string(out))
		}
		assert.Contains(w, run("--unhandled-rejections=throw"), "exit status 1", "Error: of the program")
		assert.Contains(w, run("--unhandled-rejections=warn"), "<nil>", "Error: of the program", "listeners: 0")
	})
}

// The server numbers waits in the order of their requests. The first request arrives late.
func TestWaitsAtOnceGetTheirOwnEvents(t *testing.T) {
	onlyTypeScript(t, func(w *testEnv) {
		proxy := w.proxy()
		second := make(chan struct{})
		seen := sync.OnceFunc(func() { close(second) })
		base := testkit.Serve(w, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
			body, _ := io.ReadAll(r.Body)
			r.Body = io.NopCloser(bytes.NewReader(body))
			if bytes.Contains(body, []byte(`"waiting_key":"order 1"`)) {
				select {
				case <-second:
				case <-time.After(time.Second):
				}
			}
			proxy.ServeHTTP(rw, r)
			if bytes.Contains(body, []byte(`"waiting_key":"order 2"`)) {
				seen()
			}
		}))
		w.worker("first", base, 30)
		id := w.start("external:waits", `{"key":"order"}`)
		for n := 2; n > 0; n-- {
			event := fmt.Sprintf(`{"event":"EVENT_COMPLETED","key":"order %d","data":"event %d"}`, n, n)
			w.call("POST", "/v1/events", event, nil)
		}
		w.checkEnd(id, "completed", "event 1, event 2")
	})
}

func TestUnreachableServerIsNamed(t *testing.T) {
	eachSDK(t, func(w *testEnv) {
		w.worker("first", "http://127.0.0.1:1", 30).AwaitOutput("the request to http://127.0.0.1:1 failed and is tried again: ")
		w.worker("second", "127.0.0.1:8080", 30).AwaitOutput("the URL 127.0.0.1:8080 does not begin with http:// or https://")
	})
}

// A proxy cuts off the response to a heartbeat, and then responds in place of the server. The next response stops
// cancelled work.
func TestHeartbeatsContinueAfterBrokenResponse(t *testing.T) {
	eachSDK(t, func(w *testEnv) {
		var beats atomic.Int64
		proxy := w.proxy()
		proxy.ModifyResponse = func(r *http.Response) error {
			if r.Request.Method != http.MethodPut {
				return nil
			}
			switch beats.Add(1) {
			case 1:
				r.Body = io.NopCloser(io.LimitReader(r.Body, 5))
			case 2:
				r.Body, r.ContentLength = io.NopCloser(strings.NewReader("<html>")), 6
				r.Header.Set("Content-Length", "6")
			}
			return nil
		}
		worker := w.worker("first", testkit.Serve(w, proxy), 3)
		id := w.start("external:scenario", `{"steps":2,"pause_ms":60000}`)
		pgtest.EventuallyWithin(w, waitTimeout, func() bool { return beats.Load() > 2 }, "the beats ended")
		w.call("POST", "/v1/executions/"+id+"/cancel", `{"reason":"not needed"}`, nil)
		w.waitEffects("aborted 1", 1)
		worker.AwaitOutput("was cancelled")
		assert.Equal(w, 0, w.countEffects("add 2"), "effects")
	})
}

// The SDKs need neither npm nor pip: a copy of the folder suffices.
func TestSDKsHaveNoDependencies(t *testing.T) {
	t.Parallel()
	for file, forbidden := range map[string]string{
		"../../sdk/typescript/package.json": `ependencies"`, "../../sdk/python/pyproject.toml": "dependencies",
	} {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		assert.Truef(t, !strings.Contains(string(text), forbidden), "%s has dependencies", file)
	}
}

// The responses of a third of all requests are lost after the server has done the work.
func TestLostResponses(t *testing.T) {
	eachSDK(t, func(w *testEnv) {
		var asked atomic.Int64
		proxy := w.proxy()
		proxy.ModifyResponse = func(*http.Response) error {
			if asked.Add(1)%3 == 0 {
				panic(http.ErrAbortHandler)
			}
			return nil
		}
		w.worker("first", testkit.Serve(w, proxy), 30)
		var ids []string
		for range 6 {
			ids = append(ids, w.start("external:scenario", `{"steps":3,"pause_ms":10}`))
		}
		for _, id := range ids {
			w.checkEnd(id, "completed", "the sum is 6")
		}
		if n := w.countEffects("add"); n != 18 {
			w.Errorf("%d effects, want 18 of 6 runs: %q", n, w.effectLines())
		}
	})
}
