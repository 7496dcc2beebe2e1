package api

import (
	"bufio"
	"cmp"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/admission"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// newBareServer returns a server without a database, and its handler for one route.
func newBareServer(t *testing.T, rt route) (*server, http.Handler) {
	t.Helper()
	s := &server{
		auth: &authenticator{}, classes: newClasses(), timeouts: defaultTimeouts(),
		log: slog.New(slog.DiscardHandler),
	}
	return s, s.withMiddleware(s.serve(rt))
}

func TestRejectionDoesNotWaitForBody(t *testing.T) {
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
			_, h := newBareServer(t, route{
				access: Public, maxBody: 25 << 20,
				expect: func(r *http.Request) (*http.Request, int64, error) {
					return r, c.most, c.refusal
				}, httpHandler: http.HandlerFunc(func(http.ResponseWriter, *http.Request) { t.Error("the route was called") }),
			})
			server := httptest.NewUnstartedServer(nil)
			server.Config = Server(h, slog.New(slog.DiscardHandler))
			server.Start()
			t.Cleanup(server.Close)
			conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", server.Listener.Addr().String())
			require.NoError(t, err)
			defer conn.Close()
			require.NoError(t, conn.SetDeadline(time.Now().Add(90*time.Second)))
			fmt.Fprintf(conn, "POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n", c.length) // no body follows
			answer, err := http.ReadResponse(bufio.NewReader(conn), nil)
			require.NoError(t, err)
			defer answer.Body.Close()
			assert.Truef(t, answer.StatusCode == c.status && answer.Close,
				"answer is %d, closed %t, want %d", answer.StatusCode, answer.Close, c.status)
		})
	}
}

// The server limits requests of strangers and rejects them at once. Other requests and probes are not affected.
func TestFullClassRejectsOnlyItsOwn(t *testing.T) {
	t.Parallel()
	ok := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "ok") })
	publicRequests := func(c *requestClasses) limits { return c.public.requests }
	for name, c := range map[string]struct {
		rt   route
		full func(*requestClasses) limits
		want int
	}{
		"requests":    {route{access: Public}, publicRequests, 429},
		"bytes":       {route{access: Public, maxBody: 100}, func(c *requestClasses) limits { return c.public.bytes }, 429},
		"other class": {route{access: Public}, func(c *requestClasses) limits { return c.webhook.requests }, 200},
		"login":       {route{access: Public, path: loginPath}, publicRequests, 200},
		"probe":       {route{access: Public, probe: true}, publicRequests, 200},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c.rt.httpHandler = ok
			s, h := newBareServer(t, c.rt)
			full := c.full(&s.classes)
			held, err := full.budget.Acquire(full.all)
			require.NoError(t, err)
			ask := func() *httptest.ResponseRecorder {
				w := httptest.NewRecorder()
				h.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/x", strings.NewReader("body")))
				return w
			}
			if w := ask(); w.Code != c.want || c.want != http.StatusOK && w.Header().Get("Retry-After") == "" {
				t.Errorf("answer %d %v %s", w.Code, w.Header(), w.Body)
			}
			held.Release()
			for range 3 { // each request releases its slots
				w := ask()
				assert.Truef(t, w.Code == http.StatusOK, "afterwards: %d %s", w.Code, w.Body)
			}
			if c := s.classes.public; c.requests.budget.Used() != 0 || c.bytes.budget.Used() != 0 {
				t.Errorf("%d requests and %d bytes are left", c.requests.budget.Used(), c.bytes.budget.Used())
			}
		})
	}
}

// A burst of webhooks waits for slots, unread. Only a bounded number waits, for a bounded time; others are rejected at
// once.
func TestWebhookWaitsForSlot(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var busy atomic.Int32
		rt := route{
			access: Public, maxBody: 100, busy: func(*http.Request) { busy.Add(1) },
			expect:      func(r *http.Request) (*http.Request, int64, error) { return r, 100, nil },
			httpHandler: http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}),
		}
		s, h := newBareServer(t, rt)
		c := s.classes.webhook
		var read atomic.Bool
		post := func(i int64) (status int, took time.Duration) {
			w, began := httptest.NewRecorder(), time.Now()
			r := httptest.NewRequestWithContext(t.Context(), "POST", fmt.Sprint("/webhooks/", i/c.waiting.endpoint),
				readFunc(func([]byte) (int, error) { read.Store(true); return 0, io.EOF }))
			r.RemoteAddr = fmt.Sprintf("192.0.2.%d:1", i/c.waiting.address)
			h.ServeHTTP(w, r)
			return w.Code, time.Since(began)
		}
		held, err := c.requests.budget.Acquire(c.requests.all)
		require.NoError(t, err)
		var group sync.WaitGroup
		var ok, late atomic.Int64
		waiters := func() {
			for i := range c.waiting.all {
				group.Go(func() {
					if status, took := post(i); status == http.StatusOK {
						ok.Add(1)
					} else if took == slotWait {
						late.Add(1)
					}
				})
			}
			synctest.Wait()
		}
		waiters()
		status, took := post(0)
		assert.Truef(t, status == 429 && took == 0 && busy.Load() == 1, "one more: %d after %s", status, took)
		assert.True(t, !read.Load(), "a waiting request's body was read")
		time.Sleep(slotWait / 2)
		held.Release()
		group.Wait()
		assert.Equal(t, c.waiting.all, ok.Load(), "served after the wait")
		held, err = c.requests.budget.Acquire(c.requests.all)
		require.NoError(t, err)
		waiters()
		group.Wait()
		held.Release()
		assert.Equal(t, c.waiting.all, late.Load(), "rejected after the wait")
		assert.Equal(t, 0, c.waiting.budget.Used()+c.requests.budget.Used())
	})
}

// readFunc is a body.
type readFunc func([]byte) (int, error)

func (f readFunc) Read(b []byte) (int, error) { return f(b) }

func TestAddressLimitOfConnections(t *testing.T) {
	t.Parallel()
	entered, end := make(chan struct{}), make(chan struct{})
	s, h := newBareServer(t, route{access: Public, httpHandler: http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		entered <- struct{}{}
		<-end
	})})
	from := func(address string) *http.Request {
		r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/x", nil)
		r.RemoteAddr = address
		return r
	}
	var group sync.WaitGroup
	for i := range s.classes.public.requests.address {
		group.Go(func() { h.ServeHTTP(httptest.NewRecorder(), from(fmt.Sprintf("[2001:db8::%x]:1", i+1))) }) // one host's /64
		<-entered
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, from("[2001:db8::ffff:1]:1"))
	assert.Equal(t, http.StatusTooManyRequests, w.Code)
	group.Go(func() { h.ServeHTTP(httptest.NewRecorder(), from("[2001:db8:0:1::1]:1")) })
	<-entered
	close(end)
	group.Wait()
}

// sendSilently announces a large body, sends none of it, and returns the status: 100 if the server waits for the
// body.
func sendSilently(t *testing.T, address, header string, length int64) int {
	t.Helper()
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", address)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	require.NoError(t, conn.SetDeadline(time.Now().Add(90*time.Second)))
	fmt.Fprintf(conn, "POST /x HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n%sExpect: 100-continue\r\n"+
		"Content-Length: %d\r\n\r\n", header, length)
	answer, err := http.ReadResponse(bufio.NewReader(conn), nil)
	require.NoError(t, err)
	defer answer.Body.Close()
	return answer.StatusCode
}

// Connections that send no body do not block others, not even from their own address.
func TestSlowBodiesDoNotBlockOthers(t *testing.T) {
	t.Parallel()
	const key = "a-long-random-text-of-the-chat-4711"
	ok := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		fmt.Fprint(w, len(body), err)
	})
	expected := func(r *http.Request) (*http.Request, int64, error) { return r, 25 << 20, nil }
	for name, c := range map[string]struct {
		rt     route
		header string
		length int64
	}{
		"webhooks":     {route{access: Public, maxBody: 25 << 20, expect: expected}, "", 25 << 20},
		"browser key":  {route{access: Visitor, maxBody: 16 << 20}, "Authorization: Bearer " + key + "\r\n", 16 << 20},
		"other public": {route{access: Public, maxBody: 1 << 20}, "", 1 << 20},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			log := slog.New(slog.DiscardHandler)
			g, err := newAuthenticator(Options{Logger: log, ChatKeys: map[string]string{"site": key}})
			require.NoError(t, err)
			c.rt.httpHandler = ok
			s, h := newBareServer(t, c.rt)
			s.auth = g
			server := httptest.NewUnstartedServer(nil)
			server.Config, server.Listener = Server(h, log), Listen(server.Listener)
			server.Start()
			t.Cleanup(server.Close)
			for i := range 300 { // more than the limit of an address
				got := sendSilently(t, server.Listener.Addr().String(), c.header, c.length)
				require.Equal(t, http.StatusContinue, got, i+1)
			}
			body := strings.NewReader(strings.Repeat("x", 500_000))
			r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, server.URL+"/x", body)
			require.NoError(t, err)
			r.Header.Set("Authorization", "Bearer "+key)
			r.Header.Set("Content-Type", "application/json")
			w, err := server.Client().Do(r)
			require.NoError(t, err)
			defer w.Body.Close()
			assert.Equal(t, http.StatusOK, w.StatusCode)
		})
	}
}

func TestEndpointLimitIsHalf(t *testing.T) {
	t.Parallel()
	b := newClasses().webhook
	for name, of := range map[string]limits{"requests": b.requests, "bytes": b.bytes} {
		from := func(path, address string) []admission.Share {
			r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, path, nil)
			r.RemoteAddr = address
			return of.subLimits(r)
		}
		for i := range 4 {
			_, err := of.budget.Acquire(of.all/8, from("/webhooks/a", fmt.Sprintf("192.0.2.%d:1", i))...)
			assert.NoError(t, err, name)
		}
		_, err := of.budget.Acquire(1, from("/webhooks/a", "192.0.2.9:1")...)
		assert.ErrorIs(t, err, admission.ErrFull, name, "more than half for one endpoint")
		_, err = of.budget.Acquire(of.all/8, from("/webhooks/b", "192.0.2.9:1")...)
		assert.NoError(t, err, name, "another endpoint")
	}
}

func TestAddressLimitOfBytes(t *testing.T) {
	t.Parallel()
	b := newClasses()
	for name, c := range map[string]requestClass{"webhook": b.webhook, "public": b.public, "chat": b.chat} {
		of := c.bytes
		whole := cmp.Or(of.key, of.all)
		assert.Truef(t, of.address <= whole/4, "%s: an address has %d of %d", name, of.address, whole)
	}
}

func TestPanicReleasesAdmission(t *testing.T) {
	t.Parallel()
	panics := func(*http.Request) (*http.Request, int64, error) { panic("no") }
	s, h := newBareServer(t, route{access: Public, maxBody: 10, expect: panics})
	h.ServeHTTP(httptest.NewRecorder(), httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/x", nil))
	assert.Equal(t, 0, s.classes.webhook.requests.budget.Used())
}

func TestConcurrentProbesShareOneCheck(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var p prober
		var probes, ready atomic.Int32
		end := make(chan struct{})
		probe := func(context.Context) readiness {
			probes.Add(1)
			<-end
			return readiness{Status: "ready"}
		}
		var group sync.WaitGroup
		for range 21 {
			group.Go(func() {
				if p.run(t.Context(), probe).Status == "ready" {
					ready.Add(1)
				}
			})
		}
		synctest.Wait()
		close(end)
		group.Wait()
		assert.Equal(t, 1, probes.Load())
		assert.Equal(t, 21, ready.Load())
	})
}

// shortLimit is the time limit of each part of a request to sendWithoutReading.
const shortLimit = 3 * time.Second

// sendWithoutReading serves one route with short limits, and returns a connection to it.
func sendWithoutReading(t *testing.T, rt route) net.Conn {
	t.Helper()
	s := &server{auth: &authenticator{}, classes: newClasses(), log: slog.New(slog.DiscardHandler), timeouts: timeouts{
		request: shortLimit, body: shortLimit, send: shortLimit,
	}}
	rt.access, rt.maxBody = Public, 100
	server := httptest.NewUnstartedServer(nil)
	server.Config = Server(s.withMiddleware(s.serve(rt)), s.log)
	server.Start()
	t.Cleanup(server.Close)
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", server.Listener.Addr().String())
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	require.NoError(t, conn.SetDeadline(time.Now().Add(90*time.Second)))
	return conn
}

// A page of a rare filter may have no rows.
func TestCSVEndsBeforeItsDeadline(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		rt := route{path: "/x", csv: true, params: listParams(), handle: func(r request) (response, error) {
			time.Sleep(7 * time.Second)
			n, _ := strconv.Atoi(r.query["cursor"])
			if n == 9 {
				return response{body: pageOf([]bulkItem{{ID: "rare"}}, "")}, r.Context().Err()
			}
			return response{body: pageOf[bulkItem](nil, strconv.Itoa(n+1))}, r.Context().Err()
		}}
		s, _ := newBareServer(t, rt)
		h := s.withDeadline(rt, s.apiHandler(rt))
		path, tables := "/x", 0
		for ; path != ""; tables++ {
			r := httptest.NewRequestWithContext(t.Context(), "GET", path, nil)
			r.Header.Set("Accept", "text/csv")
			w := httptest.NewRecorder()
			h.ServeHTTP(w, r)
			require.Truef(t, w.Code == http.StatusOK, "%s: %d %s", path, w.Code, w.Body)
			path = strings.TrimSuffix(strings.TrimPrefix(w.Header().Get("Link"), "<"), `>; rel="next"`)
			assert.Equal(t, path == "", strings.Contains(w.Body.String(), "rare"), "the row is in the last table")
		}
		assert.Equal(t, 2, tables)
	})
}

func TestSlowBodyIsRequestTimeout(t *testing.T) {
	t.Parallel()
	conn := sendWithoutReading(t, route{httpHandler: http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		t.Error("the route was called without its body")
	})})
	fmt.Fprint(conn, "POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\nabc")
	answer, err := http.ReadResponse(bufio.NewReader(conn), nil)
	require.NoError(t, err)
	defer answer.Body.Close()
	assert.Truef(t, answer.StatusCode == http.StatusRequestTimeout && answer.Close,
		"answer is %d, closed %v", answer.StatusCode, answer.Close)
	text, err := io.ReadAll(answer.Body)
	require.NoError(t, err)
	assert.Contains(t, string(text), "send it evenly") // it came to an end before the whole time was over
}

// Without a reader the connection's buffers fill up.
func TestClientThatDoesNotReadIsDisconnected(t *testing.T) {
	t.Parallel()
	for name, stream := range map[string]bool{"an answer": false, "a stream": true} {
		t.Run(name, func(t *testing.T) {
			failed := make(chan error, 1)
			conn := sendWithoutReading(t,
				route{stream: stream, httpHandler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
					piece := make([]byte, 1<<20)
					for {
						if _, err := w.Write(piece); err != nil {
							failed <- err
							return
						}
					}
				})})
			fmt.Fprint(conn, "GET /x HTTP/1.1\r\nHost: x\r\n\r\n")
			select {
			case err := <-failed:
				assert.ErrorIs(t, err, os.ErrDeadlineExceeded)
			case <-time.After(90 * time.Second):
				t.Error("the server writes to it for ever")
			}
		})
	}
}

// A request's deadline must not apply to the next request of the connection.
func TestIdleConnectionIsReused(t *testing.T) {
	t.Parallel()
	conn := sendWithoutReading(t,
		route{httpHandler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "ok") })})
	reader := bufio.NewReader(conn)
	for i := range 2 {
		<-time.After(time.Duration(i) * (shortLimit + time.Second))
		fmt.Fprint(conn, "POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\na")
		answer, err := http.ReadResponse(reader, nil)
		require.Truef(t, err == nil && answer.StatusCode == http.StatusOK, "%v, %v", answer, err)
		_, err = io.Copy(io.Discard, answer.Body)
		require.NoError(t, err)
		_ = answer.Body.Close()
	}
}
