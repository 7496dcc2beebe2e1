package postgres

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// A stopped server, or a server on a stopped machine, may still acknowledge TCP packets. After silentFor without an
// answer to a request, the prober sends a probe over another connection. Without an answer to the probe within
// probeTimeout, the prober closes all connections to the server. After an answer, the delay until the next probe
// doubles, up to maxProbeDelay.
const (
	probeTimeout  = 10 * time.Second
	checkInterval = 5 * time.Second
	maxProbeDelay = 4 * time.Minute
)

// errUnresponsive is the error of connections to a server that answered no probe.
var errUnresponsive = errors.New("the server accepts data and does not answer")

// sslRequest makes any PostgreSQL server, or pooler, answer one byte.
var sslRequest = []byte{0, 0, 0, 8, 4, 210, 22, 47}

// livenessProber closes a pool's connections to a server that does not answer any more. Otherwise a statement, such as
// a sweep's, would wait until that server resumes, even after a failover.
type livenessProber struct {
	dial                     func(ctx context.Context, network, address string) (net.Conn, error)
	delay, timeout, interval time.Duration // until the first probe; of a probe; between two checks
	began                    time.Time     // origin of monotonic times

	mu        sync.Mutex
	conns     map[*probedConn]struct{}
	scheduled bool // a check is due, or runs
}

func newLivenessProber() *livenessProber {
	return &livenessProber{
		dial: dialer().DialContext, delay: silentFor, timeout: probeTimeout, interval: checkInterval, began: time.Now(),
		conns: map[*probedConn]struct{}{},
	}
}

// now returns the monotonic time since the start, which is never 0.
func (p *livenessProber) now() int64 { return int64(time.Since(p.began)) + 1 }

// probedConn is a connection with the age of its unanswered request.
type probedConn struct {
	net.Conn
	p            *livenessProber
	since        atomic.Int64 // start of the unanswered request, or the last probe; 0 without a request
	delay        atomic.Int64 // from since to the next probe
	unresponsive atomic.Bool  // the prober closed it
}

// DialContext opens a connection.
func (p *livenessProber) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	conn, err := p.dial(ctx, network, address)
	if err != nil {
		return nil, err
	}
	c := &probedConn{Conn: conn, p: p}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.conns[c] = struct{}{}
	p.schedule()
	return c, nil
}

// Write records an unanswered request.
func (c *probedConn) Write(b []byte) (int, error) {
	if c.since.Load() == 0 {
		c.delay.Store(int64(c.p.delay))
		c.since.Store(c.p.now())
	}
	n, err := c.Conn.Write(b)
	return n, c.explain(err)
}

// Read records an answer.
func (c *probedConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if n > 0 {
		c.since.Store(0)
	}
	return n, c.explain(err)
}

// Close closes the connection and ends its checks.
func (c *probedConn) Close() error {
	c.p.mu.Lock()
	delete(c.p.conns, c)
	c.p.mu.Unlock()
	return c.Conn.Close()
}

// explain adds errUnresponsive to an error of a connection that the prober closed.
func (c *probedConn) explain(err error) error {
	if err != nil && c.unresponsive.Load() {
		return fmt.Errorf("%w: %w", errUnresponsive, err)
	}
	return err
}

// overdue reports whether the server needs a probe.
func (c *probedConn) overdue(now int64) bool {
	since := c.since.Load()
	return since != 0 && now-since > c.delay.Load()
}

// backOff postpones the next probe, unless the answer has arrived meanwhile.
func (c *probedConn) backOff(now int64) {
	c.delay.Store(min(2*c.delay.Load(), int64(maxProbeDelay)))
	if since := c.since.Load(); since != 0 {
		c.since.CompareAndSwap(since, now)
	}
}

// schedule starts periodic checks while there are connections. The caller holds mu.
func (p *livenessProber) schedule() {
	if p.scheduled || len(p.conns) == 0 {
		return
	}
	p.scheduled = true
	time.AfterFunc(p.interval, func() {
		p.check()
		p.mu.Lock()
		defer p.mu.Unlock()
		p.scheduled = false
		p.schedule()
	})
}

// check probes each server with an overdue answer. It closes all connections to a server that does not respond, even
// idle connections and connections in the middle of an answer.
func (p *livenessProber) check() {
	var probes sync.WaitGroup
	for _, conns := range p.overdue() {
		probes.Go(func() {
			server := conns[0].RemoteAddr()
			if !p.probe(server) {
				p.closeConnections(server)
				return
			}
			now := p.now()
			for _, c := range conns {
				if c.overdue(now) {
					c.backOff(now)
				}
			}
		})
	}
	probes.Wait()
}

// overdue returns the connections with an overdue answer, by server.
func (p *livenessProber) overdue() map[string][]*probedConn {
	now := p.now()
	p.mu.Lock()
	defer p.mu.Unlock()
	servers := map[string][]*probedConn{}
	for c := range p.conns {
		if c.overdue(now) {
			servers[c.RemoteAddr().String()] = append(servers[c.RemoteAddr().String()], c)
		}
	}
	return servers
}

// probe reports whether a server responds. Only a timeout means no response: after a refused connection, the server
// runs, or its kernel ends the connections. A full accept queue proves nothing about the server.
func (p *livenessProber) probe(server net.Addr) bool {
	ctx, cancel := context.WithTimeout(context.Background(), p.timeout)
	defer cancel()
	conn, err := p.dial(ctx, server.Network(), server.String())
	if err != nil {
		return !timedOut(err)
	}
	defer conn.Close()
	if deadline, ok := ctx.Deadline(); ok {
		err = conn.SetDeadline(deadline)
	}
	if err == nil {
		_, err = conn.Write(sslRequest)
	}
	if err == nil {
		_, err = conn.Read(make([]byte, 1))
	}
	return !timedOut(err)
}

func timedOut(err error) bool {
	var network net.Error
	if errors.Is(err, syscall.EAGAIN) { // the accept queue of a unix socket is full
		return false
	}
	return errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, context.DeadlineExceeded) ||
		errors.As(err, &network) && network.Timeout()
}

func (p *livenessProber) closeConnections(server net.Addr) {
	p.mu.Lock()
	var ended []*probedConn
	for c := range p.conns {
		if c.RemoteAddr().String() == server.String() {
			ended = append(ended, c)
		}
	}
	p.mu.Unlock()
	for _, c := range ended {
		c.unresponsive.Store(true)
		_ = c.Close() // ends the pending read of the connection
	}
}
