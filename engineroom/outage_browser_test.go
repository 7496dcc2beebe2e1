package engineroom

import (
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/browser"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/internal/testkit/rows"
)

// stoppableServer is a server that a test stops, restarts at its address, and makes hang.
type stoppableServer struct {
	tb      testing.TB
	handler http.Handler
	address string
	server  *http.Server
	hanging sync.RWMutex // locked for writing while the server hangs
}

func serveStoppable(t *testing.T) (*pgxpool.Pool, *stoppableServer) {
	t.Helper()
	pool := pgtest.DB(t)
	room := newRoom(t, Options{Pool: pool})
	m := &stoppableServer{tb: t, handler: muxOf(room), address: testkit.FreeAddress(t)}
	m.start()
	t.Cleanup(m.stop)
	return pool, m
}

func (m *stoppableServer) start() {
	m.tb.Helper()
	listener, err := net.Listen("tcp", m.address)
	require.NoError(m.tb, err)
	m.server = &http.Server{Handler: m.handler}
	go m.server.Serve(&hangingListener{listener, m})
}

func (m *stoppableServer) stop() { _ = m.server.Close() }

// hangingListener accepts connections whose writes wait while the server hangs.
type hangingListener struct {
	net.Listener
	of *stoppableServer
}

func (l *hangingListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	return &hangingConn{c, l.of}, err
}

type hangingConn struct {
	net.Conn
	of *stoppableServer
}

func (c *hangingConn) Write(b []byte) (int, error) {
	c.of.hanging.RLock()
	defer c.of.hanging.RUnlock()
	return c.Conn.Write(b)
}

const (
	isLive = `document.getElementById("live-state").dataset.state === "live" &&
		document.getElementById("disconnected").textContent === ""`
	isDead = `/^Disconnected since \d\d:\d\d$/.test(document.getElementById("disconnected").innerText) &&
		document.title.startsWith("Disconnected · ") && document.getElementById("icon").href.includes("icon-dead") &&
		document.body.classList.contains("is-disconnected")`
)

// waitWithin waits for a condition and fails if that takes longer than limit.
func waitWithin(t *testing.T, p *browser.Page, limit time.Duration, what, condition string) {
	t.Helper()
	if testing.Short() {
		limit *= 3 // other packages run in parallel
	}
	start := time.Now()
	p.Until(what, condition)
	took := time.Since(start)
	assert.Truef(t, took <= limit, "%s: it took %s, limit %s", what, took, limit)
}

// A page without its server shows that, and its clocks stop.
func TestPageShowsServerOutage(t *testing.T) {
	t.Parallel()
	pool, m := serveStoppable(t)
	running := rows.Execution(t, pool, "waiting", "flow", "onboarding")
	p := browser.Open(t, browser.Look{})
	p.Expect("ERR_") // failed connections are part of the test
	p.Go("http://" + m.address + "/executions/" + running)
	p.Until("the page is live", isLive)
	m.stop()
	waitWithin(t, p, 10*time.Second, "the page says that it is disconnected", isDead)
	frozen := func() (text string) {
		p.Eval(`[...document.querySelectorAll("main time")].map((t) => t.textContent).join("|")`, &text)
		return text
	}
	before := frozen()
	assert.Truef(t, strings.Contains(before, " s"), "no clock runs on the page: %q", before)
	faults := p.Inaccessible()
	assert.Truef(t, len(faults) == 0, "not accessible:\n%s", strings.Join(faults, "\n"))
	time.Sleep(3 * time.Second)
	assert.Equal(t, before, frozen())
	insertApproval(t, pool, "pending", `{"amount": 5}`, 5)
	m.start()
	waitWithin(t, p, 5*time.Second, "the page is live again",
		isLive+` && !document.body.classList.contains("is-disconnected")`)
	p.Until("it is up to date, and its clocks go on", `document.title.startsWith("(1) ") &&
		[...document.querySelectorAll("main time")].map((t) => t.textContent).join("|") !== `+fmt.Sprintf("%q", before))
}

// A form of a page without its server is not sent, so the page stays and recovers.
func TestFormIsNotSentWhileDisconnected(t *testing.T) {
	t.Parallel()
	pool, m := serveStoppable(t)
	insertApproval(t, pool, "pending", `{"amount": 5}`, 5)
	p := browser.Open(t, browser.Look{})
	p.Expect("ERR_")
	p.Go("http://" + m.address + "/approvals")
	p.Until("the page is live", isLive)
	m.stop()
	p.Until("the page says that it is disconnected", isDead)
	p.Click("button[value=approve]")
	p.Shows("Not sent. Disconnected since ")
	m.start()
	p.Until("the page is live, without the message", isLive+` && !document.body.innerText.includes("Not sent.")`)
}

// After the end of the login a form is not sent, so what was typed stays.
func TestFormIsNotSentAfterLoginEnds(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	insertApproval(t, pool, "pending", `{"amount": 5}`, 5)
	mux := muxOf(newRoom(t, Options{Pool: pool}))
	var revoked, sent atomic.Bool
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if revoked.Load() {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		sent.Store(sent.Load() || r.Method == http.MethodPost)
		mux.ServeHTTP(w, r)
	}))
	t.Cleanup(server.Close)
	p := browser.Open(t, browser.Look{})
	p.Expect("ERR_")
	p.Expect("401")
	p.Go(server.URL + "/approvals")
	p.Until("the page is live", isLive)
	p.Type("form.decide [name=reason]", "looks right")
	revoked.Store(true)
	server.CloseClientConnections()
	p.Shows("The login has ended. Log in again")
	p.Click("button[value=approve]")
	p.Shows("Not sent. The login has ended.")
	p.Until("the reason stays", `document.querySelector("form.decide [name=reason]").value === "looks right"`)
	revoked.Store(false) // a new login in another tab
	p.Click("button[value=approve]")
	pgtest.Eventually(t, sent.Load, "the form is sent")
}

// A page that the viewer may no longer open says so.
func TestPageShowsNarrowedRole(t *testing.T) {
	t.Parallel()
	room := newRoom(t, Options{Pool: pgtest.DB(t)})
	mux := muxOf(room)
	var narrowed atomic.Bool
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if narrowed.Load() && strings.HasPrefix(r.URL.Path, "/live/") {
			w.WriteHeader(http.StatusForbidden)
			return
		}
		mux.ServeHTTP(w, r)
	}))
	t.Cleanup(server.Close)
	p := browser.Open(t, browser.Look{})
	p.Expect("ERR_")
	p.Expect("403")
	p.Go(server.URL + "/lanes")
	p.Until("the page is live", isLive)
	narrowed.Store(true)
	server.CloseClientConnections()
	p.Shows("You may no longer open this page. Overview")
}

// The same holds if the server accepts connections and does not answer.
func TestPageDetectsHangingServer(t *testing.T) {
	t.Parallel()
	_, m := serveStoppable(t)
	p := browser.Open(t, browser.Look{})
	p.Expect("ERR_")
	p.Go("http://" + m.address + "/lanes")
	p.Until("the page is live", isLive)
	m.hanging.Lock()
	waitWithin(t, p, 11*time.Second, "the page says that it is disconnected", isDead)
	time.Sleep(5 * time.Second) // some attempts fail
	m.hanging.Unlock()
	waitWithin(t, p, 5*time.Second, "the page is live again", isLive)
}

// A page recovers after it was offline for longer than the browser's own timeout.
func TestPageRecoversAfterOffline(t *testing.T) {
	t.Parallel()
	pool, m := serveStoppable(t)
	p := browser.Open(t, browser.Look{Dark: true})
	p.Expect("ERR_")
	p.Go("http://" + m.address + "/")
	p.Until("the page is live", isLive)
	p.Offline(true)
	waitWithin(t, p, 10*time.Second, "the page says that it is disconnected", isDead)
	insertApproval(t, pool, "pending", `{"amount": 5}`, 5)
	time.Sleep(30 * time.Second)
	p.Offline(false)
	waitWithin(t, p, 5*time.Second, "it is right again", isLive+` && document.title.startsWith("(1) Overview")`)
}
