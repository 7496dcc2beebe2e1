package admission

import (
	"container/list"
	"context"
	"net"
	"net/http"
	"sync"
)

// Listen returns a listener with a bounded number of connections, for a server whose ConnContext and handler are
// [ConnContext] and [Handler].
func Listen(l net.Listener, most int) net.Listener {
	return &listener{Listener: l, conns: &conns{most: most}}
}

type listener struct {
	net.Listener
	conns *conns
}

// Accept accepts a connection, and closes the one that has been idle longest if that exceeds the bound.
func (l *listener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return l.conns.add(c), nil
}

// conns are the open connections of a listener.
type conns struct {
	most int

	mu   sync.Mutex
	n    int
	idle list.List // of *conn without a request in work, the longest first
}

// conn is a connection. The lock of conns protects its fields.
type conn struct {
	net.Conn
	of      *conns
	at      *list.Element // nil while a request is in work
	working int
	closed  bool
}

func (s *conns) add(c net.Conn) *conn {
	added := &conn{Conn: c, of: s}
	s.mu.Lock()
	var over *conn
	if s.n++; s.n > s.most && s.idle.Len() > 0 {
		over = s.idle.Front().Value.(*conn)
	}
	added.at = s.idle.PushBack(added)
	s.mu.Unlock()
	if over != nil {
		_ = over.Close() // its server notices
	}
	return added
}

// Close forgets the connection.
func (c *conn) Close() error {
	c.of.mu.Lock()
	if !c.closed {
		c.closed = true
		c.of.n--
		c.rest(nil)
	}
	c.of.mu.Unlock()
	return c.Conn.Close()
}

// CloseWrite is for the server, which ends an answer that way while the client still sends.
func (c *conn) CloseWrite() error {
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return nil
}

// rest moves the connection to a place in the list of idle ones, or out of it. The caller holds the lock.
func (c *conn) rest(at *list.Element) {
	if c.at != nil {
		c.of.idle.Remove(c.at)
	}
	c.at = at
}

// work marks the connection as having an active request; done ends that. On a nil connection it does nothing.
func (c *conn) work() {
	if c == nil {
		return
	}
	c.of.mu.Lock()
	defer c.of.mu.Unlock()
	c.working++
	c.rest(nil)
}

func (c *conn) done() {
	if c == nil {
		return
	}
	c.of.mu.Lock()
	defer c.of.mu.Unlock()
	if c.working--; c.working == 0 && !c.closed {
		c.rest(c.of.idle.PushBack(c))
	}
}

// progress records that bytes of a body have arrived on an idle connection.
func (c *conn) progress() {
	if c == nil {
		return
	}
	c.of.mu.Lock()
	defer c.of.mu.Unlock()
	if c.at != nil {
		c.of.idle.MoveToBack(c.at)
	}
}

// connOf returns the connection of a request; nil if no listener of this package has it.
func connOf(r *http.Request) *conn {
	c, _ := r.Context().Value(connKey{}).(*conn)
	return c
}

type connKey struct{}

// ConnContext is the ConnContext of an http.Server on such a listener.
func ConnContext(ctx context.Context, c net.Conn) context.Context {
	if ours, ok := c.(*conn); ok {
		return context.WithValue(ctx, connKey{}, ours)
	}
	return ctx
}

// Handler tracks for the listener the connections with an active request. It wraps all other handlers.
func Handler(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c := connOf(r)
		c.work()
		defer c.done()
		next.ServeHTTP(w, r)
	})
}
