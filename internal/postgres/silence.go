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

const (
	// A server may be there and say nothing: it was stopped, or its machine is, and what is sent to it is confirmed all
	// the same. A request that was not answered for silentFor has the server asked over another connection; when that is
	// not answered within answerWithin either, nobody goes on waiting for this server. One that does answer is asked
	// again later and later.
	answerWithin = 10 * time.Second
	lookEvery    = 5 * time.Second
	silentMost   = 4 * time.Minute
)

// errSilent is what the connections to a server that answers nobody end with.
var errSilent = errors.New("the server takes what is sent and answers nobody")

// sslRequest asks any PostgreSQL server, or pooler, for one byte.
var sslRequest = []byte{0, 0, 0, 8, 4, 210, 22, 47}

// patience ends the connections of a pool to a server that has stopped answering. Without it whatever waits for an
// answer, such as a sweep, would wait until the server goes on, also when another one has long taken its place.
type patience struct {
	dial                 func(ctx context.Context, network, address string) (net.Conn, error)
	silent, within, look time.Duration
	began                time.Time // times are counted from here, so that clocks may jump

	mu      sync.Mutex
	conns   map[*asking]struct{}
	looking bool // a look is due, or under way
}

func newPatience() *patience {
	return &patience{
		dial: dialer().DialContext, silent: silentFor, within: answerWithin, look: lookEvery, began: time.Now(),
		conns: map[*asking]struct{}{},
	}
}

// now is never 0.
func (p *patience) now() int64 { return int64(time.Since(p.began)) + 1 }

// asking is a connection with what it waits for.
type asking struct {
	net.Conn
	p      *patience
	since  atomic.Int64 // of what was sent and has no byte of an answer yet, or of the last look; 0 for nothing
	bear   atomic.Int64 // how long that may last until the server is asked
	silent atomic.Bool  // given up
}

// DialContext opens a connection.
func (p *patience) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	conn, err := p.dial(ctx, network, address)
	if err != nil {
		return nil, err
	}
	c := &asking{Conn: conn, p: p}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.conns[c] = struct{}{}
	p.lookLater()
	return c, nil
}

// Write notes that an answer is waited for.
func (c *asking) Write(b []byte) (int, error) {
	if c.since.Load() == 0 {
		c.bear.Store(int64(c.p.silent))
		c.since.Store(c.p.now())
	}
	n, err := c.Conn.Write(b)
	return n, c.explain(err)
}

// Read notes that it came.
func (c *asking) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if n > 0 {
		c.since.Store(0)
	}
	return n, c.explain(err)
}

// Close forgets the connection.
func (c *asking) Close() error {
	c.p.mu.Lock()
	delete(c.p.conns, c)
	c.p.mu.Unlock()
	return c.Conn.Close()
}

// explain says why a connection was given up.
func (c *asking) explain(err error) error {
	if err != nil && c.silent.Load() {
		return fmt.Errorf("%w: %w", errSilent, err)
	}
	return err
}

// waits reports whether the server is to be asked for its silence.
func (c *asking) waits(now int64) bool {
	since := c.since.Load()
	return since != 0 && now-since > c.bear.Load()
}

// bearOn has the next look come later, unless the answer has come meanwhile.
func (c *asking) bearOn(now int64) {
	c.bear.Store(min(2*c.bear.Load(), int64(silentMost)))
	if since := c.since.Load(); since != 0 {
		c.since.CompareAndSwap(since, now)
	}
}

// lookLater looks after the connections as long as there are any. It is called with the lock held.
func (p *patience) lookLater() {
	if p.looking || len(p.conns) == 0 {
		return
	}
	p.looking = true
	time.AfterFunc(p.look, func() {
		p.lookNow()
		p.mu.Lock()
		defer p.mu.Unlock()
		p.looking = false
		p.lookLater()
	})
}

// lookNow asks each server that owes an answer, and gives up those that do not give this one either, with everything
// that leads there: also what is idle, or in the middle of an answer.
func (p *patience) lookNow() {
	var asked sync.WaitGroup
	for _, server := range p.owing() {
		asked.Go(func() {
			heard := p.hears(server[0].RemoteAddr())
			now := p.now()
			for _, c := range server {
				if heard && c.waits(now) {
					c.bearOn(now)
				}
			}
			if !heard {
				p.closeConnections(server[0].RemoteAddr())
			}
		})
	}
	asked.Wait()
}

// owing are the connections that wait for long, by server.
func (p *patience) owing() map[string][]*asking {
	now := p.now()
	p.mu.Lock()
	defer p.mu.Unlock()
	servers := map[string][]*asking{}
	for c := range p.conns {
		if c.waits(now) {
			servers[c.RemoteAddr().String()] = append(servers[c.RemoteAddr().String()], c)
		}
	}
	return servers
}

// hears reports whether a server answers. Only silence says that it does not: one that refuses is there, or the
// kernel will end what leads to it. A socket on which too many stand in the queue says nothing about the server.
func (p *patience) hears(server net.Addr) bool {
	ctx, cancel := context.WithTimeout(context.Background(), p.within)
	defer cancel()
	conn, err := p.dial(ctx, server.Network(), server.String())
	if err != nil {
		return !ranOut(err)
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
	return !ranOut(err)
}

func ranOut(err error) bool {
	var network net.Error
	if errors.Is(err, syscall.EAGAIN) {
		return false
	}
	return errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, context.DeadlineExceeded) ||
		errors.As(err, &network) && network.Timeout()
}

func (p *patience) closeConnections(server net.Addr) {
	p.mu.Lock()
	var ended []*asking
	for c := range p.conns {
		if c.RemoteAddr().String() == server.String() {
			ended = append(ended, c)
		}
	}
	p.mu.Unlock()
	for _, c := range ended {
		c.silent.Store(true)
		_ = c.Close() // who waits on it is told
	}
}
