// Package sdnotify reports the state of the process to the service manager by systemd's protocol. It sends datagrams to
// the socket NOTIFY_SOCKET: READY=1 when the process serves, STOPPING=1 when it shuts down, and WATCHDOG=1 at half the
// interval WATCHDOG_USEC. Without NOTIFY_SOCKET it does nothing. The manager may restart a process that stops
// reporting.
package sdnotify

import (
	"context"
	"fmt"
	"net"
	"os"
	"strconv"
	"time"
)

// States.
const (
	Ready    = "READY=1"
	Stopping = "STOPPING=1"
	watchdog = "WATCHDOG=1"
)

// Manager is the service manager of this process.
type Manager struct {
	socket string
	every  time.Duration // 0 if the manager expects no WATCHDOG=1
}

// New reads the socket and the interval from the environment.
func New(getenv func(string) string) *Manager {
	m := &Manager{socket: getenv("NOTIFY_SOCKET")}
	usec, err := strconv.ParseInt(getenv("WATCHDOG_USEC"), 10, 64)
	pid := getenv("WATCHDOG_PID") // pid of the addressed process, which may be our parent
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

// Watchdog sends WATCHDOG=1 regularly until ctx ends. A lost message is harmless, because another follows.
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
