package randomflows_test

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"os/signal"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/pgproxy"
	"github.com/lanekeeper/lanekeeper/internal/pgserver"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/lanes"
)

// These variables tell a process that it is a worker, and the addresses of its database and its sink.
const (
	workerURL  = "LANEKEEPER_FLOWCHECK_URL"
	workerSink = "LANEKEEPER_FLOWCHECK_SINK"
)

// lease is a worker's lease. A worker stopped for longer loses its runs.
const lease = 2 * time.Second

func TestMain(m *testing.M) {
	if url := os.Getenv(workerURL); url != "" {
		if err := runWorker(url, os.Getenv(workerSink)); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	pgserver.GuardMain()
	pgtest.Main(m)
}

// runWorker runs flows until SIGTERM.
func runWorker(url, sink string) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	pool, err := postgres.Open(ctx, url, postgres.Options{MaxConns: 12})
	if err != nil {
		return err
	}
	defer pool.Close()
	listener := postgres.NewListener(postgres.Dialer(pool), log)
	keeper := lanes.NewKeeper(pool, lanes.Options{Listener: listener, Logger: log})
	engine, err := executions.New(pool, executions.Options{
		Keeper: keeper, Listener: listener, Logger: log, Workers: 24, LeaseTTL: lease, SweepEvery: 300 * time.Millisecond,
		StopTimeout: 5 * time.Second,
	})
	if err != nil {
		return err
	}
	if err := engine.Register(flowName, player{sink}.flow); err != nil {
		return err
	}
	hearing, silent := context.WithCancel(context.WithoutCancel(ctx))
	defer silent()
	var below, above errgroup.Group
	below.Go(func() error { return listener.Run(hearing) })
	below.Go(func() error { return keeper.Run(hearing) })
	above.Go(func() error { return engine.Run(ctx) })
	fmt.Println("works")
	err = above.Wait()
	silent()
	if waited := below.Wait(); err == nil {
		err = waited
	}
	return err
}

// proxy forwards connections to a database, and breaks them on request.
type proxy struct {
	*pgproxy.Proxy

	mu    sync.Mutex
	links map[*link]struct{}
}

func newProxy(t testing.TB, target string) *proxy {
	t.Helper()
	p := &proxy{links: map[*link]struct{}{}}
	p.Proxy = pgproxy.Listen(t, target, func(client, server net.Conn) pgproxy.Link {
		l := &link{proxy: p, client: client, server: server}
		p.mu.Lock()
		defer p.mu.Unlock()
		p.links[l] = struct{}{}
		return l
	})
	return p
}

// cut breaks some connections at their next request or answer.
func (p *proxy) cut() (n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for l := range p.links {
		if rand.IntN(3) == 0 && l.fate.CompareAndSwap(whole, []int32{unheard, unanswered}[rand.IntN(2)]) {
			n++
		}
	}
	return n
}

// These are the fates of a link.
const (
	whole      int32 = iota
	unheard          // the server does not get the next request
	unanswered       // the client does not get the next answer
	broken
)

// link is one connection through the proxy.
type link struct {
	proxy          *proxy
	client, server net.Conn
	fate           atomic.Int32
}

// Upstream forwards the client's requests.
func (l *link) Upstream() { l.carry(l.client, l.server, unheard) }

// Downstream forwards the server's answers.
func (l *link) Downstream() { l.carry(l.server, l.client, unanswered) }

// carry copies data from one side to the other, until one side has left or the link breaks in this direction.
func (l *link) carry(from io.Reader, to io.Writer, fate int32) {
	defer func() {
		l.proxy.mu.Lock()
		defer l.proxy.mu.Unlock()
		delete(l.proxy.links, l)
	}()
	buf := make([]byte, 1<<16)
	for {
		n, err := from.Read(buf)
		if err != nil || l.fate.CompareAndSwap(fate, broken) {
			return
		}
		if _, err := to.Write(buf[:n]); err != nil {
			return
		}
	}
}

// sleepAbout waits for about the given time.
func sleepAbout(d time.Duration) { time.Sleep(d/2 + rand.N(max(d, 1))) }
