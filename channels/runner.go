package channels

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/internal/logging"
	"github.com/lanekeeper/lanekeeper/internal/outbox"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/sleep"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/webhooks"
)

// Runner runs the channels of a process. Pool, Keeper, Open and Accept are required.
type Runner struct {
	Pool     *pgxpool.Pool
	Keeper   *lanes.Keeper
	Listener *postgres.Listener // shortens waits; may be nil
	Logger   *slog.Logger
	Client   *http.Client        // to providers
	Getenv   func(string) string // of the secrets; default: the process's environment
	Open     map[string]Open     // by type
	// Accept adds a message to its thread, once for each key. A [LaterError] postpones it.
	Accept func(ctx context.Context, v Visit) (Accepted, error)
	// Principals links identities to principals; nil: no button decides.
	Principals Principals
	MaxFile    int64  // bytes of a file; default 10 MiB
	PublicURL  string // of the Engine Room; "" if it has none

	hooks struct {
		sync.Mutex
		open map[string]*hooked
	}
}

const (
	laneTTL      = 10 * time.Second
	laneWait     = 24 * time.Hour // each wait logs "lane busy" once
	rescanPeriod = 5 * time.Second
)

// Lane returns the name of the lane of a channel's worker.
func Lane(name string) string { return "channel:" + name }

// Run runs a worker for each enabled channel until ctx ends.
func (r *Runner) Run(ctx context.Context) error {
	r.Logger = cmp.Or(r.Logger, slog.New(slog.DiscardHandler))
	r.MaxFile = cmp.Or(r.MaxFile, 10<<20)
	r.Client = cmp.Or(r.Client, http.DefaultClient)
	var notes <-chan string
	if r.Listener != nil {
		got, unsubscribe := r.Listener.SubscribeTo(notifications, func(name string) bool { return name == "" })
		defer unsubscribe()
		notes = got
	}
	var running sync.WaitGroup
	defer running.Wait()
	workers := map[string]*started{}
	var failures logging.Failures
	tick := time.NewTicker(rescanPeriod)
	defer tick.Stop()
	for {
		list, err := List(ctx, r.Pool)
		failures.Log(ctx, r.Logger, "channels not read, trying again", err)
		if err == nil {
			r.start(ctx, list, workers, &running)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-notes:
		case <-tick.C:
		}
	}
}

// started is a running worker, with its declaration and secrets.
type started struct {
	declared Channel
	secrets  map[string]string
	stop     context.CancelFunc
}

// start starts the workers of new and changed channels, and stops those of removed ones. A rotated secret restarts its
// channel. An unreadable secret does not change the running worker.
func (r *Runner) start(ctx context.Context, list []Channel, workers map[string]*started, running *sync.WaitGroup) {
	seen := map[string]bool{}
	for _, c := range list {
		if !c.Enabled {
			continue
		}
		seen[c.Name] = true
		d := c.declared()
		secrets, err := r.secrets(c)
		if s := workers[c.Name]; s != nil {
			if reflect.DeepEqual(s.declared, d) && (err != nil || maps.Equal(s.secrets, secrets)) {
				continue
			}
			s.stop()
		}
		inner, stop := context.WithCancel(ctx)
		workers[c.Name] = &started{declared: d, secrets: secrets, stop: stop}
		running.Go(func() { r.runChannel(inner, c) })
	}
	for name, s := range workers {
		if !seen[name] {
			s.stop()
			delete(workers, name)
		}
	}
}

// declared returns the part of a channel that a document declares.
func (c Channel) declared() Channel {
	return Channel{
		ID: c.ID, Name: c.Name, Type: c.Type, Agent: c.Agent, Secrets: c.Secrets, Settings: c.Settings, Pairing: c.Pairing,
		ReportTo: c.ReportTo,
	}
}

// runChannel acquires the lane of a channel and works, repeatedly, until ctx ends.
func (r *Runner) runChannel(ctx context.Context, c Channel) {
	for ctx.Err() == nil {
		lease, err := r.Keeper.AcquireWait(ctx, Lane(c.Name), lanes.WithTTL(laneTTL), lanes.WithTimeout(laneWait))
		if err != nil {
			if _, busy := errors.AsType[*lanes.BusyError](err); !busy && ctx.Err() == nil {
				r.Logger.WarnContext(ctx, "channel not run, trying again", "channel", c.Name, "error", err)
				sleep.For(ctx, time.Second)
			}
			continue
		}
		r.work(lease.Context(), c, lease)
		if err := lease.Release(context.WithoutCancel(ctx)); err != nil && !errors.Is(err, lanes.ErrLost) {
			r.Logger.WarnContext(ctx, "lane of channel not released", "channel", c.Name, "error", err)
		}
	}
}

// worker works for one channel.
type worker struct {
	*Runner
	name      string
	channel   Channel
	transport Transport
	inbox     *inbox
	quiet     atomic.Int64                // nothing is sent before
	drafts    postgres.KeyedMutex[string] // by the execution whose draft is sent or edited
	watching  chan struct{}
}

// secrets resolves the secrets of a channel.
func (r *Runner) secrets(c Channel) (map[string]string, error) {
	secrets := make(map[string]string, len(c.Secrets))
	for _, name := range slices.Sorted(maps.Keys(c.Secrets)) { // keeps the error the same
		got, err := webhooks.Secrets([]string{c.Secrets[name]}, r.Getenv)
		if err != nil {
			return nil, fmt.Errorf("secrets.%s cannot be read: %w", name, err) // not "password:", whose value is redacted
		}
		secrets[name] = got[0]
	}
	return secrets, nil
}

// open opens the transport of a channel with its secrets.
func (r *Runner) open(c Channel, secrets map[string]string) (Transport, error) {
	open := r.Open[c.Type]
	if open == nil {
		return nil, fmt.Errorf("this program has no channels of the type %s", c.Type)
	}
	return open(Config{Channel: c, Secrets: secrets, Client: r.Client, Logger: r.Logger})
}

// work serves a channel while the lease holds.
func (r *Runner) work(ctx context.Context, c Channel, lease *lanes.Lease) {
	state := &stateWriter{pool: r.Pool, name: c.Name, log: r.Logger}
	secrets, err := r.secrets(c)
	var transport Transport
	if err == nil {
		transport, err = r.open(c, secrets)
	}
	if err != nil {
		state.set(ctx, err)
		sleep.For(ctx, time.Minute) // a changed declaration or secret ends ctx
		return
	}
	w := &worker{
		Runner: r, name: c.Name, channel: c, transport: transport, watching: make(chan struct{}, 1),
		inbox: &inbox{db: r.Pool, pool: r.Pool, name: c.Name, lease: lease, state: state},
	}
	if err := w.freeClaims(ctx); err != nil {
		r.Logger.WarnContext(ctx, "claims of an earlier worker not freed; they end within a minute", "channel", c.Name,
			"error", err)
	}
	entries := outbox.Dispatcher[entry]{
		Logger: r.Logger, Claim: w.claimEntries, NextDue: w.entriesDue, Attempt: w.enter,
		Target: func(e entry) string { return e.Conversation },
	}
	sends := outbox.Dispatcher[send]{
		Logger: r.Logger, Claim: w.claimSends, NextDue: w.sendsDue, Attempt: w.deliver,
		Target: func(s send) string { return s.ThreadID },
	}
	if r.Listener != nil {
		mine := func(name string) bool { return name == c.Name }
		in, stopIn := r.Listener.SubscribeTo(notifications, mine)
		defer stopIn()
		out, stopOut := r.Listener.SubscribeTo(notifications, mine)
		defer stopOut()
		entries.Wake, sends.Wake = in, out
	}
	var group errgroup.Group
	group.Go(func() error { w.receive(ctx); return nil })
	group.Go(func() error { entries.Run(ctx); return nil })
	group.Go(func() error { sends.Run(ctx); return nil })
	group.Go(func() error { w.watch(ctx); return nil })
	_ = group.Wait() // no function of the group returns an error
}

// freeClaims releases the claims of earlier workers, which makes their messages due. Those workers lost the lane or
// were killed.
func (w *worker) freeClaims(ctx context.Context) error {
	return exec(ctx, w.Pool, "free claims", `
		with entries as (
		  update agent_channel_messages set next_attempt_at = clock_timestamp(), claim = null
		   where channel = @channel and claim < @claim and finished_at is null and status = 'received')
		update agent_channel_sends set next_attempt_at = clock_timestamp(), claim = null
		 where channel = @channel and claim < @claim and status in ('queued', 'sending')`,
		postgres.Strict{"channel": w.name, "claim": w.inbox.lease.Token()})
}

// attempt bounds the time of an attempt. A shutdown does not cancel it. The loss of the lane does, because another
// worker may then repeat it.
func (w *worker) attempt(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithTimeout(ctx, hold-5*time.Second)
	held := w.inbox.lease.Context()
	stop := context.AfterFunc(held, func() {
		if errors.Is(context.Cause(held), lanes.ErrLost) {
			cancel()
		}
	})
	return ctx, func() { stop(); cancel() }
}

// receive runs the transport and records its state.
func (w *worker) receive(ctx context.Context) {
	pause := time.Second
	for ctx.Err() == nil {
		began := time.Now()
		err := w.transport.Run(ctx, w.inbox)
		if ctx.Err() != nil {
			return
		}
		if err == nil {
			err = errors.New("the connection ended")
		}
		if time.Since(began) > time.Minute {
			pause = time.Second
		}
		w.inbox.state.set(ctx, err)
		failure, is := errors.AsType[*SendError](err)
		switch {
		case errors.Is(err, ErrMisconfigured):
			pause = time.Minute
		case is && failure.RetryAfter > 0:
			pause = failure.RetryAfter
		}
		sleep.For(ctx, outbox.Jitter(pause))
		pause = min(2*pause, time.Minute)
	}
}

// stateWriter records the state of a channel. It writes a change at once, and otherwise every half minute.
type stateWriter struct {
	pool    *pgxpool.Pool
	name    string
	log     *slog.Logger
	writing sync.Mutex // held during a write
	mu      sync.Mutex
	last    string
	written time.Time // begin of the last write; zero after a failed one
	writes  int

	refusedAt time.Time // time of the last log line about a refused request
}

// refused logs a request that is not from the provider, at most one a minute: anybody may send them.
func (s *stateWriter) refused(ctx context.Context) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if time.Since(s.refusedAt) >= time.Minute {
		s.refusedAt = time.Now()
		s.log.WarnContext(ctx, "request for a channel refused: if its provider sent it, a secret of the channel is wrong",
			"channel", s.name)
	}
}

const stateInterval = 30 * time.Second

func (s *stateWriter) set(ctx context.Context, cause error) {
	now, state := message(cause), "connected"
	if cause != nil {
		state = "failing"
	}
	s.mu.Lock()
	if now == s.last && time.Since(s.written) < stateInterval {
		s.mu.Unlock()
		return
	}
	changed := now != s.last || s.written.IsZero()
	s.writes++
	own := s.writes
	s.last, s.written = now, time.Now()
	s.mu.Unlock()
	if changed {
		if cause != nil {
			s.log.WarnContext(ctx, "channel failing", "channel", s.name, "error", now)
		} else {
			s.log.InfoContext(ctx, "channel connected", "channel", s.name)
		}
	}
	s.writing.Lock() // a later state waits for this one; the same state does not
	defer s.writing.Unlock()
	s.mu.Lock()
	overtaken := s.writes != own
	s.mu.Unlock()
	if overtaken {
		return
	}
	err := exec(ctx, s.pool, "record state of channel", `
		update agent_channels
		   set state = @state, error = @error, state_at = case when state = @state then state_at else clock_timestamp() end,
		       seen_at = case when @state = 'connected' then clock_timestamp() else seen_at end
		 where name = @channel`, postgres.Strict{"channel": s.name, "state": state, "error": now})
	if err != nil {
		s.log.WarnContext(ctx, "state of channel not recorded", "channel", s.name, "error", err)
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.writes == own {
			s.written = time.Time{}
		}
	}
}

// hooked is the open transport for a provider's requests.
type hooked struct {
	declared  Channel
	secrets   map[string]string
	transport Transport
	state     *stateWriter
}

// ServeHTTP serves POST /channels/{name}, for providers that send messages by HTTP. Any process may serve it.
func (r *Runner) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	name := req.PathValue("name")
	var c Channel
	err := ErrNotFound
	if postgres.IsText(name) {
		c, err = Get(req.Context(), r.Pool, name)
	}
	if errors.Is(err, ErrNotFound) || err == nil && !c.Enabled {
		http.Error(w, "there is no such channel", http.StatusNotFound)
		return
	}
	var transport Transport
	var state *stateWriter
	if err == nil {
		transport, state, err = r.hookOf(c)
	}
	if err != nil { // a provider drops a message after a 4xx
		r.Logger.WarnContext(req.Context(), "request for a channel not taken, its sender should try again", "channel", name,
			"error", err)
		http.Error(w, "the channel takes no requests now, send it again", http.StatusServiceUnavailable)
		return
	}
	hook, is := transport.(Hook)
	if !is {
		http.Error(w, "this channel takes no requests", http.StatusNotFound)
		return
	}
	answer := &statusWriter{ResponseWriter: w}
	hook.Hook(answer, req, &inbox{db: r.Pool, pool: r.Pool, name: c.Name, state: state})
	if answer.status == http.StatusUnauthorized {
		state.refused(req.Context())
	}
}

// statusWriter remembers the status of an answer.
type statusWriter struct {
	http.ResponseWriter
	status int
}

func (w *statusWriter) WriteHeader(status int) {
	w.status = status
	w.ResponseWriter.WriteHeader(status)
}

// hookOf opens the transport of a channel once for all its requests, until its declaration or a secret changes.
func (r *Runner) hookOf(c Channel) (Transport, *stateWriter, error) {
	r.hooks.Lock()
	defer r.hooks.Unlock()
	d := c.declared()
	secrets, err := r.secrets(c)
	if h := r.hooks.open[c.Name]; h != nil && reflect.DeepEqual(h.declared, d) &&
		(err != nil || maps.Equal(h.secrets, secrets)) {
		return h.transport, h.state, nil
	}
	if err != nil {
		return nil, nil, err
	}
	transport, err := r.open(c, secrets)
	if err != nil {
		return nil, nil, err
	}
	if r.hooks.open == nil {
		r.hooks.open = map[string]*hooked{}
	}
	state := &stateWriter{pool: r.Pool, name: c.Name, log: r.Logger}
	r.hooks.open[c.Name] = &hooked{d, secrets, transport, state}
	return transport, state, nil
}
