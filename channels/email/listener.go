package email

import (
	"net"
	"sync"
	"time"
)

// listener closes a silent connection after busyTimeout, instead of idleTimeout, while there are maxConnections. So
// idle connections do not block mail for long.
type listener struct {
	net.Listener
	mu   sync.Mutex
	open map[*connection]struct{}
}

// Accept implements [net.Listener].
func (l *listener) Accept() (net.Conn, error) {
	accepted, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	c := &connection{Conn: accepted, listener: l}
	l.open[c] = struct{}{}
	if len(l.open) == maxConnections {
		for other := range l.open {
			_ = other.limit()
		}
	}
	return c, nil
}

// connection is a connection with the server's deadline for its reads.
type connection struct {
	net.Conn
	listener *listener
	deadline time.Time
}

// limit sets the deadline of the next read. The caller holds the listener's mu.
func (c *connection) limit() error {
	deadline := c.deadline
	if busy := time.Now().Add(busyTimeout); len(c.listener.open) == maxConnections && busy.Before(deadline) {
		deadline = busy
	}
	return c.Conn.SetReadDeadline(deadline)
}

// SetReadDeadline implements [net.Conn].
func (c *connection) SetReadDeadline(at time.Time) error {
	c.listener.mu.Lock()
	defer c.listener.mu.Unlock()
	c.deadline = at
	return c.limit()
}

// Read implements [net.Conn].
func (c *connection) Read(b []byte) (int, error) {
	c.listener.mu.Lock()
	err := c.limit()
	c.listener.mu.Unlock()
	if err != nil {
		return 0, err
	}
	return c.Conn.Read(b)
}

// Close implements [net.Conn].
func (c *connection) Close() error {
	c.listener.mu.Lock()
	delete(c.listener.open, c)
	c.listener.mu.Unlock()
	return c.Conn.Close()
}
