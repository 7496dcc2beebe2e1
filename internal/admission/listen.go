package admission

import (
	"container/list"
	"context"
	"net"
	"net/http"
	"sync"
)

// Listen returns a listener whose connections are at most so many, for a server whose ConnContext and handler are
// [ConnContext] and [Handler].
func Listen(l net.Listener, most int) net.Listener {
	return &listener{Listener: l, conns: &conns{most: most}}
}

type listener struct {
	net.Listener
	conns *conns
}

// Accept takes a connection, and closes the one that has been idle for longest when that is one too many.
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

// conn is a connection. Its fields belong to the lock of conns.
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

// CloseWrite is for the server, which ends an answer that way where the client still sends.
func (c *conn) CloseWrite() error {
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return nil
}

// rest puts the connection at a place among the idle ones, or nowhere. It is called with the lock held.
func (c *conn) rest(at *list.Element) {
	if c.at != nil {
		c.of.idle.Remove(c.at)
	}
	c.at = at
}

// work notes that a request of the connection is in work; done that it is not any more. A nil connection notes nothing.
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

// progress notes that bytes of a body have come over an idle connection.
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

// connOf is the connection of a request; nil where no listener of ours has it.
func connOf(r *http.Request) *conn {
	c, _ := r.Context().Value(connKey{}).(*conn)
	return c
}

type connKey struct{}

// ConnContext is that of an http.Server on such a listener.
func ConnContext(ctx context.Context, c net.Conn) context.Context {
	if ours, ok := c.(*conn); ok {
		return context.WithValue(ctx, connKey{}, ours)
	}
	return ctx
}

// Handler notes for the listener which connections have a request in work. It stands before all other handlers.
func Handler(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c := connOf(r)
		c.work()
		defer c.done()
		next.ServeHTTP(w, r)
	})
}
