package main

import (
	"bytes"
	"context"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

var serving = regexp.MustCompile(`msg=serving listen=(\S+)`)

// chatKey is what visitors send.
const chatKey = "visitor-0123456789abcdef"

// reply is an answer, or that there was none.
type reply struct {
	status int
	closes bool // the connection, behind the answer
	body   string
	err    error
}

// send sends a request on a connection of its own.
func send(ctx context.Context, method, url, key, body string) (got reply) {
	req, err := http.NewRequestWithContext(ctx, method, url, strings.NewReader(body))
	if err != nil {
		return reply{err: err}
	}
	req.Header.Set("Authorization", "Bearer "+key)
	req.Header.Set("Content-Type", "application/json")
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: false}}
	defer client.CloseIdleConnections()
	resp, err := client.Do(req)
	if err != nil {
		return reply{err: err}
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	return reply{resp.StatusCode, resp.Close, string(text), err}
}

// closed reports that nobody takes connections there any more.
func closed(t *testing.T, base string) bool {
	t.Helper()
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", strings.TrimPrefix(base, "http://"))
	if err != nil {
		return true
	}
	_ = conn.Close()
	return false
}

// A process that was told to stop is not ready at once, and serves for as long as was asked. A second signal ends it.
func TestAProcessThatIsStoppedServesUntilOthersKnow(t *testing.T) {
	t.Parallel()
	cmd := exec.Command(os.Args[0], "serve")
	cmd.Env = append(os.Environ(), asAgent+"=1", "DATABASE_URL="+pgtest.URL(t), token, "AGENT_LISTEN=127.0.0.1:0", "AGENT_DRAIN_DELAY=10m")
	cmd.Args = append(cmd.Args, "--migrate")
	var errs stream
	cmd.Stderr = &errs
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := sync.OnceValue(func() int { _ = cmd.Wait(); return cmd.ProcessState.ExitCode() })
	t.Cleanup(func() { _ = cmd.Process.Kill(); ended() })
	var base string
	pgtest.Eventually(t, pgWait, func() bool {
		if found := serving.FindStringSubmatch(errs.String()); found != nil {
			base = found[1]
		}
		return base != ""
	}, "it serves")
	admin := strings.TrimPrefix(token, "AGENT_ADMIN_TOKEN=")
	pgtest.Eventually(t, pgWait, func() bool { return send(t.Context(), "GET", base+"/readyz", "", "").status == 200 }, "it is ready")
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	pgtest.Eventually(t, pgWait, func() bool { return send(t.Context(), "GET", base+"/readyz", "", "").status == 503 }, "it is not ready")
	if got := send(t.Context(), "GET", base+"/readyz", "", ""); !strings.Contains(got.body, `"draining":{"ok":false`) || !strings.Contains(got.body, `"worker":{"ok":true`) {
		t.Errorf("/readyz says %d %s, want that it drains and works", got.status, got.body)
	}
	if got := send(t.Context(), "GET", base+"/healthz", "", ""); got.status != 200 {
		t.Errorf("/healthz answers %d, want that it is alive", got.status)
	}
	got := send(t.Context(), "POST", base+"/v1/executions", admin, `{"flow": "errand"}`)
	if got.status < 200 || got.status >= 500 || !got.closes {
		t.Errorf("a request while it drains: %d %v, closes %t, want an answer and that the connection is closed", got.status, got.err, got.closes)
	}
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if code := ended(); code != exitInterrupted {
		t.Errorf("exit code %d after a second signal, want %d", code, exitInterrupted)
	}
}

// An answer that is being made when the process is told to stop is made to its end, streamed or not, and then the process ends.
func TestAStopWaitsForAnswers(t *testing.T) {
	t.Parallel()
	asked, free := make(chan struct{}, 2), make(chan struct{})
	model := modeltest.New(t)
	model.Handle(func(int, openai.ChatCompletionRequest) modeltest.Reply {
		asked <- struct{}{}
		<-free
		return modeltest.Text("All is well.")
	})
	p := on(t, pgtest.URL(t), token, "AGENT_LISTEN=127.0.0.1:0", "AGENT_LOG_LEVEL=info", "AGENT_CHAT_KEY="+chatKey,
		"OPENAI_BASE_URL="+model.URL(), "OPENAI_API_KEY=sk-none", "AGENT_MODEL="+modeltest.Model)
	p.must("migrate")
	s := p.start("serve")
	base := s.find(t, `msg=serving listen=(\S+)`)
	pgtest.Eventually(t, pgWait, func() bool { return send(t.Context(), "GET", base+"/readyz", "", "").status == 200 }, "it is ready")
	var asking sync.WaitGroup
	got := map[string]*reply{"false": {}, "true": {}}
	for streamed, into := range got {
		asking.Go(func() {
			*into = send(t.Context(), "POST", base+"/v1/chat/completions", chatKey,
				`{"model": "agent", "stream": `+streamed+`, "messages": [{"role": "user", "content": "How is it?"}]}`)
		})
	}
	watched := make(chan reply, 1)
	go func() {
		watched <- send(t.Context(), "GET", base+"/v1/operate/watch", strings.TrimPrefix(token, "AGENT_ADMIN_TOKEN="), "")
	}()
	<-asked
	<-asked
	s.stop()
	pgtest.Eventually(t, pgWait, func() bool { return closed(t, base) }, "no connection is taken")
	if seen := <-watched; seen.err != nil {
		t.Errorf("a stream that is watched ended with %v", seen.err)
	}
	if len(s.ended) > 0 {
		t.Fatal("it has ended before it answered")
	}
	close(free)
	asking.Wait()
	for streamed, a := range got {
		if a.status != 200 || a.err != nil || !strings.Contains(a.body, "All is well.") || streamed == "true" && !strings.Contains(a.body, "[DONE]") {
			t.Errorf("streamed %s: %d %v %s", streamed, a.status, a.err, a.body)
		}
	}
	if code := <-s.ended; code != 0 {
		t.Errorf("exit code %d, want 0: %s", code, s.err.String())
	}
}

// The service manager hears when the process serves, that it lives, and when it stops.
func TestTheServiceManagerIsTold(t *testing.T) {
	t.Parallel()
	dir, err := os.MkdirTemp("", "lk") //nolint:usetesting // the path of a socket has to be short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	socket := filepath.Join(dir, "notify")
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: socket, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	hear := func(want string) {
		t.Helper()
		buf := make([]byte, 100)
		for {
			n, err := conn.Read(buf)
			if err != nil {
				t.Fatal(err)
			}
			if got := string(buf[:n]); got == want {
				return
			} else if got != "WATCHDOG=1" {
				t.Fatalf("the manager heard %q, want %q", got, want)
			}
		}
	}
	p := on(t, pgtest.URL(t), token, "AGENT_LISTEN=127.0.0.1:0", "NOTIFY_SOCKET="+socket, "WATCHDOG_USEC=100000")
	s := p.start("serve", "--migrate")
	hear("READY=1")
	hear("WATCHDOG=1")
	s.stop()
	hear("STOPPING=1")
	if code := <-s.ended; code != 0 {
		t.Errorf("exit code %d, want 0: %s", code, s.err.String())
	}
}

func TestHealthcheck(t *testing.T) {
	t.Parallel()
	p := on(t, pgtest.URL(t), token, "AGENT_LISTEN=0.0.0.0:0", "AGENT_LOG_LEVEL=info")
	s := p.start("serve", "--migrate")
	at, err := url.Parse(s.find(t, `msg=serving listen=(\S+)`))
	if err != nil {
		t.Fatal(err)
	}
	for _, listen := range []string{"0.0.0.0:", ":", "127.0.0.1:", "localhost:"} {
		check := bare(t, "AGENT_LISTEN="+listen+at.Port(), "AGENT_WORKERS=garbage", "DATABASE_URL=garbage")
		if got := check.run("healthcheck"); got.code != 0 || !strings.HasSuffix(got.out, ":"+at.Port()+"/healthz: ok\n") {
			t.Errorf("listening on %s: exit %d, %s%s", listen, got.code, got.out, got.err)
		}
	}
	check := bare(t, "AGENT_LISTEN=:"+at.Port())
	pgtest.Eventually(t, pgWait, func() bool { return check.run("healthcheck", "--ready").code == 0 }, "it is ready")
	s.stop()
	<-s.ended
	if got := check.run("healthcheck"); got.code != 1 || !strings.Contains(got.err, "is agent serve running, with this AGENT_LISTEN?") {
		t.Errorf("with nobody there: exit %d, %s", got.code, got.err)
	}
	if got := bare(t, "AGENT_LISTEN=8080").run("healthcheck"); got.code != 2 || !strings.Contains(got.err, "AGENT_LISTEN") {
		t.Errorf("with a bad address: exit %d, %s", got.code, got.err)
	}
}

// A process that is alive and not ready says what is missing.
func TestHealthcheckSaysWhatIsMissing(t *testing.T) {
	t.Parallel()
	all, own := "[::]", "[::1]:0"
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", own)
	if err != nil { // no IPv6 here
		all, own = "0.0.0.0", "127.0.0.1:0"
		if listener, err = (&net.ListenConfig{}).Listen(t.Context(), "tcp", own); err != nil {
			t.Fatal(err)
		}
	}
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusServiceUnavailable)
		_, _ = io.Copy(w, bytes.NewBufferString(`{"status": "unready", "checks": {"database": {"ok": false, "detail": "no answer"}, "schema": {"ok": true}}}`))
	})}
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(func() { _ = server.Close() })
	_, port, _ := net.SplitHostPort(listener.Addr().String())
	got := bare(t, "AGENT_LISTEN="+all+":"+port).run("healthcheck", "--ready")
	if got.code != 1 || !strings.Contains(got.err, "503 Service Unavailable (database: no answer)") {
		t.Errorf("exit %d, %s", got.code, got.err)
	}
}
