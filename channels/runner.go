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
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/logging"
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
		open map[string]*openHook
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
		all, unsubscribe := r.Listener.SubscribeTo(notifications, func(name string) bool { return name == "" })
		defer unsubscribe()
		notes = all
	}
	var running sync.WaitGroup
	defer running.Wait()
	workers := map[string]*startedWorker{}
	var failures logging.Failures
	tick := time.NewTicker(rescanPeriod)
	defer tick.Stop()
	for {
		list, err := declared(ctx, r.Pool, "")
		failures.Log(ctx, r.Logger, "channels not read, trying again", err)
		if err == nil {
			r.reconcile(ctx, list, workers, &running)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-notes:
		case <-tick.C:
		}
	}
}

// startedWorker is a running worker, with its declaration and secrets.
type startedWorker struct {
	declared Channel
	secrets  map[string]string
	stop     context.CancelFunc
}

// reconcile starts the workers of new and changed channels, and stops those of removed and disabled ones. A rotated
// secret restarts its channel. While a secret cannot be read, the running worker keeps the old one.
func (r *Runner) reconcile(
	ctx context.Context, list []Channel, workers map[string]*startedWorker, running *sync.WaitGroup,
) {
	seen := map[string]bool{}
	for _, c := range list {
		if !c.Enabled {
			continue
		}
		seen[c.Name] = true
		secrets, err := r.secrets(c)
		if s := workers[c.Name]; s != nil {
			if reflect.DeepEqual(s.declared, c) && (err != nil || maps.Equal(s.secrets, secrets)) {
				continue
			}
			s.stop()
		}
		inner, stop := context.WithCancel(ctx)
		workers[c.Name] = &startedWorker{declared: c, secrets: secrets, stop: stop}
		running.Go(func() { r.runChannel(inner, c) })
	}
	for name, s := range workers {
		if !seen[name] {
			s.stop()
			delete(workers, name)
		}
	}
}

// declared reads the declaration of one channel, or of all channels if name is "". The other fields stay empty: the
// counts take long while many messages wait.
func declared(ctx context.Context, db postgres.DB, name string) ([]Channel, error) {
	rows, err := db.Query(ctx, `
		select id::text, name, type, agent, secrets, settings, pairing, report_to, enabled from agent_channels
		 where @name = '' or name = @name
		 order by name`, postgres.Strict{"name": name})
	return postgres.Collect(rows, err, "read channels", pgx.RowToStructByNameLax[Channel])
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

// secrets resolves the secrets of a channel.
func (r *Runner) secrets(c Channel) (map[string]string, error) {
	secrets := make(map[string]string, len(c.Secrets))
	for _, name := range slices.Sorted(maps.Keys(c.Secrets)) { // in order, so the error does not change between passes
		resolved, err := webhooks.Secrets([]string{c.Secrets[name]}, r.Getenv)
		if err != nil {
			// Not "password: …": package redact would hide the reason.
			return nil, fmt.Errorf("secrets.%s cannot be read: %w", name, err)
		}
		secrets[name] = resolved[0]
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
