package admission

import (
	"container/list"
	"context"
	"net"
	"net/http"
	"sync"
)

// Listen returns a listener that closes idle connections while more than maxConns are open. Connections with an active
// request stay open, so there may be more. The end of the handler ends a request, even if its last bytes are not sent
// yet. The server's ConnContext and handler are [ConnContext] and [Handler]. With TLS no request counts as active.
func Listen(l net.Listener, maxConns int) net.Listener {
	return &listener{Listener: l, conns: &conns{max: maxConns}}
}

type listener struct {
	net.Listener
	conns *conns
}

// Accept accepts a connection. Above the bound, it closes the connections that have been idle longest.
func (l *listener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return l.conns.add(c), nil
}

// conns are the open connections of a listener.
type conns struct {
	max int

	mu   sync.Mutex
	open int
	idle list.List // of *conn without an active request, the longest idle first
}

// conn is a connection. The lock of conns protects its fields.
type conn struct {
	net.Conn
	conns    *conns
	idleElem *list.Element // nil while a request is active
	active   int
	closed   bool
}

func (s *conns) add(c net.Conn) *conn {
	added := &conn{Conn: c, conns: s}
	var surplus []*conn
	s.mu.Lock()
	s.open++
	for e := s.idle.Front(); e != nil && s.open-len(surplus) > s.max; e = e.Next() {
		surplus = append(surplus, e.Value.(*conn))
	}
	added.idleElem = s.idle.PushBack(added)
	s.mu.Unlock()
	for _, c := range surplus {
		_ = c.Close() // the server's next read or write fails
	}
	return added
}

// Close forgets the connection.
func (c *conn) Close() error {
	c.conns.mu.Lock()
	if !c.closed {
		c.closed = true
		c.conns.open--
		c.setIdleElem(nil)
	}
	c.conns.mu.Unlock()
	return c.Conn.Close()
}

// CloseWrite lets the server end its response while the client still sends.
func (c *conn) CloseWrite() error {
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return nil
}

// setIdleElem replaces the connection's element in the list of idle connections; nil removes it. The caller holds the
// lock.
func (c *conn) setIdleElem(at *list.Element) {
	if c.idleElem != nil {
		c.conns.idle.Remove(c.idleElem)
	}
	c.idleElem = at
}

// markActive counts an active request of the connection, and markIdle its end. Both accept nil.
func (c *conn) markActive() {
	if c == nil {
		return
	}
	c.conns.mu.Lock()
	defer c.conns.mu.Unlock()
	c.active++
	c.setIdleElem(nil)
}

func (c *conn) markIdle() {
	if c == nil {
		return
	}
	c.conns.mu.Lock()
	defer c.conns.mu.Unlock()
	if c.active--; c.active == 0 && !c.closed {
		c.setIdleElem(c.conns.idle.PushBack(c))
	}
}

// touch records that bytes of a body have arrived on an idle connection.
func (c *conn) touch() {
	if c == nil {
		return
	}
	c.conns.mu.Lock()
	defer c.conns.mu.Unlock()
	if c.idleElem != nil {
		c.conns.idle.MoveToBack(c.idleElem)
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
	if own, ok := c.(*conn); ok {
		return context.WithValue(ctx, connKey{}, own)
	}
	return ctx
}

// Handler tracks for the listener the connections with an active request. It wraps all other handlers.
func Handler(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c := connOf(r)
		c.markActive()
		defer c.markIdle()
		next.ServeHTTP(w, r)
	})
}
