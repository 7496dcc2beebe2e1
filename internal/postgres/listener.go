package postgres

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

const (
	subscriberBuffer  = 16
	reconnectFirst    = 100 * time.Millisecond
	maxReconnectPause = 10 * time.Second
	silenceCheck      = 30 * time.Second
	pingLimit         = 5 * time.Second
)

// Listener is the one LISTEN connection of a process. It delivers each notification to every subscriber of the channel,
// and never waits for a slow subscriber. It reconnects when the connection breaks.
//
// A subscriber receives payloads; the empty payload means "something may have changed, read everything". The Listener
// sends the empty payload after every (re)connect, because it may have missed a notification. The empty payload also
// replaces payloads without room. Behind a pooler LISTEN has no effect: Run logs that once and delivers nothing. So a
// subscriber always polls as well.
//
// All methods are safe for concurrent use.
type Listener struct {
	connect  func(ctx context.Context) (*pgx.Conn, error)
	logger   *slog.Logger
	failures int // only Run uses it: since the last connection

	mu      sync.Mutex
	subs    map[string]map[*subscriber]struct{}
	changed chan struct{} // room for one signal: the set of channels differs from the LISTENs of the connection
}

type subscriber struct {
	payloads chan string
	wanted   func(payload string) bool // nil for all payloads
}

// NewListener returns a listener that gets its connections from connect; see [Dialer].
func NewListener(connect func(ctx context.Context) (*pgx.Conn, error), logger *slog.Logger) *Listener {
	return &Listener{
		connect: connect,
		logger:  logger,
		subs:    make(map[string]map[*subscriber]struct{}),
		changed: make(chan struct{}, 1),
	}
}

// Subscribe delivers the notifications of channel. For the first subscriber of a channel, delivery starts after Run has
// sent LISTEN, and an empty payload announces the start. cancel ends the subscription and closes the returned channel.
// Repeated calls of cancel are safe.
func (l *Listener) Subscribe(channel string) (payloads <-chan string, cancel func()) {
	return l.SubscribeTo(channel, nil)
}

// SubscribeTo is Subscribe to the wanted payloads and the empty payload. Other payloads do not fill the subscriber's
// channel. wanted must return at once.
func (l *Listener) SubscribeTo(channel string, wanted func(payload string) bool) (payloads <-chan string,
	cancel func(),
) {
	s := &subscriber{payloads: make(chan string, subscriberBuffer), wanted: wanted}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.subs[channel] == nil {
		l.subs[channel] = make(map[*subscriber]struct{})
	}
	l.subs[channel][s] = struct{}{}
	l.announceChange()
	return s.payloads, sync.OnceFunc(func() { l.unsubscribe(channel, s) })
}

func (l *Listener) unsubscribe(channel string, s *subscriber) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.subs[channel], s)
	if len(l.subs[channel]) == 0 {
		delete(l.subs, channel)
	}
	close(s.payloads)
	l.announceChange()
}

func (l *Listener) announceChange() {
	select {
	case l.changed <- struct{}{}:
	default:
	}
}

// Run listens until ctx ends and then returns nil. It reopens a broken connection, with growing pauses, and logs the
// first error of a series.
func (l *Listener) Run(ctx context.Context) error {
	pause := reconnectFirst
	for ctx.Err() == nil {
		began := time.Now()
		err := l.session(ctx)
		switch {
		case ctx.Err() != nil:
			return nil //nolint:nilerr // the end of ctx is the intended end
		case errors.Is(err, errPooled):
			l.logger.WarnContext(ctx, "notifications are not delivered through a connection pooler: polling only")
			<-ctx.Done()
			return nil
		}
		if time.Since(began) > maxReconnectPause {
			pause = reconnectFirst
		}
		if l.failures++; l.failures == 1 {
			l.logger.WarnContext(ctx, "notification connection lost", "error", err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause/2 + rand.N(pause/2)):
		}
		pause = min(2*pause, maxReconnectPause)
	}
	return nil
}

var errPooled = errors.New("listen: behind a connection pooler")

// session runs for the life of one connection. It always ends with an error.
func (l *Listener) session(ctx context.Context) error {
	conn, err := l.connect(ctx)
	if err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	defer func() {
		closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), pingLimit)
		defer cancel()
		if err := conn.Close(closing); err != nil {
			l.logger.DebugContext(ctx, "notification connection did not close cleanly", "error", err)
		}
	}()
	if p, err := pooled(ctx, conn); err != nil {
		return err
	} else if p {
		return errPooled
	}
	if l.failures > 0 {
		l.logger.InfoContext(ctx, "notification connection restored", "failures", l.failures)
		l.failures = 0
	}
	listening := make(map[string]bool)
	for {
		if err := l.follow(ctx, conn, listening); err != nil {
			return err
		}
		if err := l.receive(ctx, conn); err != nil {
			return err
		}
	}
}

// follow makes the channels of conn equal to the subscribed channels. It wakes the subscribers of each new channel,
// because notifications from before LISTEN are lost.
func (l *Listener) follow(ctx context.Context, conn *pgx.Conn, listening map[string]bool) error {
	add, remove := l.difference(listening)
	for _, channel := range add {
		if _, err := conn.Exec(ctx, "listen "+pgx.Identifier{channel}.Sanitize()); err != nil {
			return fmt.Errorf("listen %s: %w", channel, err)
		}
		listening[channel] = true
		l.deliver(channel, "")
	}
	for _, channel := range remove {
		if _, err := conn.Exec(ctx, "unlisten "+pgx.Identifier{channel}.Sanitize()); err != nil {
			return fmt.Errorf("unlisten %s: %w", channel, err)
		}
		delete(listening, channel)
	}
	return nil
}

func (l *Listener) difference(listening map[string]bool) (add, remove []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for channel := range l.subs {
		if !listening[channel] {
			add = append(add, channel)
		}
	}
	for channel := range listening {
		if l.subs[channel] == nil {
			remove = append(remove, channel)
		}
	}
	return add, remove
}

// receive waits for one notification, a change of subscriptions or a long silence. After a silence it checks that the
// server still responds.
func (l *Listener) receive(ctx context.Context, conn *pgx.Conn) error {
	waiting, stop := context.WithTimeout(ctx, silenceCheck)
	defer stop()
	arrived := make(chan struct{})
	var n *pgconn.Notification
	var err error
	go func() {
		defer close(arrived)
		n, err = conn.WaitForNotification(waiting)
	}()
	changed := false
	select {
	case <-arrived:
	case <-l.changed:
		changed = true
		stop()
		<-arrived
	}
	switch {
	case err == nil:
		l.deliver(n.Channel, n.Payload)
		if changed {
			l.announceChange()
		}
		return nil
	case ctx.Err() != nil:
		return ctx.Err()
	case waiting.Err() == nil || conn.IsClosed():
		return fmt.Errorf("wait for a notification: %w", err)
	case changed:
		return nil
	}
	return ping(ctx, conn)
}

func ping(ctx context.Context, conn *pgx.Conn) error {
	limited, cancel := context.WithTimeout(ctx, pingLimit)
	defer cancel()
	if err := conn.Ping(limited); err != nil {
		return fmt.Errorf("ping: %w", err)
	}
	// After a failover the old primary may run on as a standby, which sends no notifications.
	if still := conn.Config().ValidateConnect; still != nil {
		if err := still(limited, conn.PgConn()); err != nil {
			return fmt.Errorf("ping: %w", err)
		}
	}
	return nil
}

// deliver never blocks: a slow subscriber gets one empty payload instead of its payloads.
func (l *Listener) deliver(channel, payload string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for s := range l.subs[channel] {
		if payload != "" && s.wanted != nil && !s.wanted(payload) {
			continue
		}
		select {
		case s.payloads <- payload:
		default:
			s.coalesce()
		}
	}
}

func (s *subscriber) coalesce() {
	for {
		select {
		case <-s.payloads:
			continue
		default:
		}
		break
	}
	s.payloads <- "" // never blocks: only deliver sends, under the lock
}
