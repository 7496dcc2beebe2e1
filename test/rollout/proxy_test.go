//go:build unix

package rollout_test

import (
	"context"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

// askEvery is how often the proxy asks each replica whether it is ready.
const askEvery = 50 * time.Millisecond

// proxy shares out requests among the replicas that are ready, by turns.
type proxy struct {
	*httptest.Server
	client *http.Client

	mu       sync.Mutex
	replicas []string // base URLs
	ready    map[string]bool
	turn     int
}

func newProxy(t testing.TB) *proxy {
	t.Helper()
	p := &proxy{ready: map[string]bool{}, client: &http.Client{Timeout: time.Second, Transport: &http.Transport{}}}
	forward := &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			to, err := url.Parse(p.next())
			if err == nil {
				r.SetURL(to)
			}
		},
		Transport: &http.Transport{MaxIdleConnsPerHost: 50}, FlushInterval: -1, ErrorLog: log.New(io.Discard, "", 0),
	}
	p.Server = httptest.NewServer(forward)
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	var asking sync.WaitGroup
	asking.Go(func() {
		for testkit.Wait(ctx, askEvery) {
			p.ask(ctx)
		}
	})
	t.Cleanup(func() {
		stop()
		asking.Wait()
		p.Close()
	})
	return p
}

// ask asks every replica, all at once.
func (p *proxy) ask(ctx context.Context) {
	p.mu.Lock()
	list := slices.Clone(p.replicas)
	p.mu.Unlock()
	var group sync.WaitGroup
	for _, base := range list {
		group.Go(func() {
			ready := false
			if req, err := http.NewRequestWithContext(ctx, http.MethodGet, base+"/readyz", http.NoBody); err == nil {
				if resp, err := p.client.Do(req); err == nil {
					ready = resp.StatusCode == http.StatusOK
					_, _ = io.Copy(io.Discard, resp.Body) // so that the connection is kept
					_ = resp.Body.Close()
				}
			}
			p.mu.Lock()
			defer p.mu.Unlock()
			p.ready[base] = ready
		})
	}
	group.Wait()
}

// next is the replica whose turn it is.
func (p *proxy) next() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	for range p.replicas {
		p.turn++
		if base := p.replicas[p.turn%len(p.replicas)]; p.ready[base] {
			return base
		}
	}
	return "http://no-replica.invalid"
}

// replace has another replica in the place of one; "" for none.
func (p *proxy) replace(old, replica string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.replicas = slices.DeleteFunc(p.replicas, func(base string) bool { return base == old })
	if replica != "" {
		p.replicas = append(p.replicas, replica)
	}
}

// sendsTo reports whether a replica gets requests.
func (p *proxy) sendsTo(base string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.ready[base]
}
