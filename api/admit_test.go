package api

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/problem"
)

// bare is a server without a database, and its handler for one route.
func bare(t *testing.T, rt route) (*server, http.Handler) {
	t.Helper()
	s := &server{gate: &gate{}, budgets: newBudgets(), limits: usual(), log: slog.New(slog.DiscardHandler)}
	return s, s.wrap(s.serve(rt))
}

func TestWhatIsRefusedWithoutItsBodyDoesNotWaitForIt(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		most, length int64
		refusal      error
		status       int
	}{
		"not expected": {0, 25 << 20, problem.New(http.StatusNotFound, "no"), http.StatusNotFound},
		"small":        {0, 10, problem.New(http.StatusUnauthorized, "no"), http.StatusUnauthorized},
		"too large":    {100, 101, nil, http.StatusRequestEntityTooLarge},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, h := bare(t, route{access: Public, maxBody: 25 << 20, expect: func(r *http.Request) (*http.Request, int64, error) {
				return r, c.most, c.refusal
			}, handler: http.HandlerFunc(func(http.ResponseWriter, *http.Request) { t.Error("the route was called") })})
			server := httptest.NewUnstartedServer(nil)
			server.Config = Server(h, slog.New(slog.DiscardHandler))
			server.Start()
			t.Cleanup(server.Close)
			conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", server.Listener.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			if err := conn.SetDeadline(time.Now().Add(90 * time.Second)); err != nil {
				t.Fatal(err)
			}
			fmt.Fprintf(conn, "POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n", c.length) // and nothing follows
			answer, err := http.ReadResponse(bufio.NewReader(conn), nil)
			if err != nil {
				t.Fatal(err)
			}
			defer answer.Body.Close()
			if answer.StatusCode != c.status || !answer.Close {
				t.Errorf("answer is %d, closed %t, want %d", answer.StatusCode, answer.Close, c.status)
			}
		})
	}
}

// What strangers have under way is refused to strangers, at once; others and probes do not notice.
func TestAClassThatIsFullRefusesAndOthersGoOn(t *testing.T) {
	t.Parallel()
	ok := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "ok") })
	for name, c := range map[string]struct {
		rt   route
		take func(*budgets) (release func(), err error)
		want int
	}{
		"requests": {route{access: Public}, func(b *budgets) (func(), error) {
			h, err := b.public.requests.budget.Take(b.public.requests.all)
			return h.Release, err
		}, http.StatusTooManyRequests},
		"bytes": {route{access: Public, maxBody: 100}, func(b *budgets) (func(), error) {
			h, err := b.public.bytes.budget.Take(b.public.bytes.all)
			return h.Release, err
		}, http.StatusTooManyRequests},
		"other class": {route{access: Public}, func(b *budgets) (func(), error) {
			h, err := b.intake.requests.budget.Take(b.intake.requests.all)
			return h.Release, err
		}, http.StatusOK},
		"probe": {route{access: Public, probe: true}, func(b *budgets) (func(), error) {
			h, err := b.public.requests.budget.Take(b.public.requests.all)
			return h.Release, err
		}, http.StatusOK},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c.rt.handler = ok
			s, h := bare(t, c.rt)
			release, err := c.take(&s.budgets)
			if err != nil {
				t.Fatal(err)
			}
			ask := func() *httptest.ResponseRecorder {
				w := httptest.NewRecorder()
				h.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/x", strings.NewReader("body")))
				return w
			}
			if w := ask(); w.Code != c.want || c.want != http.StatusOK && w.Header().Get("Retry-After") == "" {
				t.Errorf("answer %d %v %s", w.Code, w.Header(), w.Body)
			}
			release()
			for range 3 { // each gives back what it took
				if w := ask(); w.Code != http.StatusOK {
					t.Errorf("afterwards: %d %s", w.Code, w.Body)
				}
			}
			if c := s.budgets.public; c.requests.budget.Used() != 0 || c.bytes.budget.Used() != 0 {
				t.Errorf("%d requests and %d bytes are left", c.requests.budget.Used(), c.bytes.budget.Used())
			}
		})
	}
}

func TestOneAddressLeavesPlacesToOthers(t *testing.T) {
	t.Parallel()
	entered, end := make(chan struct{}), make(chan struct{})
	s, h := bare(t, route{access: Public, handler: http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		entered <- struct{}{}
		<-end
	})})
	from := func(address string) *http.Request {
		r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/x", nil)
		r.RemoteAddr = address
		return r
	}
	var group sync.WaitGroup
	for i := range s.budgets.public.requests.address {
		group.Go(func() { h.ServeHTTP(httptest.NewRecorder(), from(fmt.Sprintf("[2001:db8::%x]:1", i+1))) }) // one host's /64
		<-entered
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, from("[2001:db8::ffff:1]:1"))
	if w.Code != http.StatusTooManyRequests {
		t.Errorf("one more of the network: %d", w.Code)
	}
	group.Go(func() { h.ServeHTTP(httptest.NewRecorder(), from("[2001:db8:0:1::1]:1")) })
	<-entered
	close(end)
	group.Wait()
}

// Probes are public: those that come at the same time have the answer of one.
func TestProbesAtTheSameTimeCostOne(t *testing.T) {
	t.Parallel()
	var p prober
	var asked atomic.Int32
	begun, end := make(chan struct{}), make(chan struct{})
	probe := func(context.Context) readiness {
		if asked.Add(1) == 1 {
			close(begun)
			<-end
		}
		return readiness{Status: "ready"}
	}
	var group sync.WaitGroup
	var wrong atomic.Pointer[error]
	ask := func() {
		if got := p.ask(t.Context(), probe); got.Status != "ready" {
			err := errors.New(got.Status)
			wrong.Store(&err)
		}
	}
	group.Go(ask)
	<-begun
	var waiting sync.WaitGroup
	for range 20 {
		waiting.Add(1)
		group.Go(func() {
			waiting.Done()
			ask()
		})
	}
	waiting.Wait()
	close(end)
	group.Wait()
	if err := wrong.Load(); err != nil || asked.Load() > 21 {
		t.Errorf("%d probes, %v", asked.Load(), err)
	}
	if p.running != nil {
		t.Error("a probe is left")
	}
}
