// Package sdnotify tells the service manager how the process is, by systemd's protocol: a datagram to the socket that
// NOTIFY_SOCKET names, with READY=1 when it serves, STOPPING=1 when it was told to stop, and WATCHDOG=1 at half the
// interval that WATCHDOG_USEC gives. Without NOTIFY_SOCKET there is nobody to tell, and nothing is done. A program
// that stops answering altogether stops telling too, and is started again.
package sdnotify

import (
	"context"
	"fmt"
	"net"
	"os"
	"strconv"
	"time"
)

// What there is to tell.
const (
	Ready    = "READY=1"
	Stopping = "STOPPING=1"
	watchdog = "WATCHDOG=1"
)

// Manager is who started this process.
type Manager struct {
	socket string
	every  time.Duration // 0: no sign of life is asked for
}

// New reads who is to be told from the environment.
func New(getenv func(string) string) *Manager {
	m := &Manager{socket: getenv("NOTIFY_SOCKET")}
	usec, err := strconv.ParseInt(getenv("WATCHDOG_USEC"), 10, 64)
	pid := getenv("WATCHDOG_PID") // of the process that is meant, which may be our parent
	if err == nil && usec > 1 && (pid == "" || pid == strconv.Itoa(os.Getpid())) {
		m.every = time.Duration(usec) * time.Microsecond / 2
	}
	return m
}

// Tell sends a state.
func (m *Manager) Tell(state string) error {
	if m.socket == "" {
		return nil
	}
	conn, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: m.socket, Net: "unixgram"})
	if err != nil {
		return fmt.Errorf("reach NOTIFY_SOCKET: %w", err)
	}
	defer conn.Close()
	if _, err := conn.Write([]byte(state)); err != nil {
		return fmt.Errorf("tell NOTIFY_SOCKET: %w", err)
	}
	return nil
}

// Watchdog gives signs of life until ctx ends. One that is lost is made good by the next.
func (m *Manager) Watchdog(ctx context.Context) {
	if m.socket == "" || m.every <= 0 {
		return
	}
	tick := time.NewTicker(m.every)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			_ = m.Tell(watchdog)
		}
	}
}
