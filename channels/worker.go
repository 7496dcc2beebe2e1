package channels

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/internal/outbox"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/sleep"
	"github.com/lanekeeper/lanekeeper/lanes"
)

// worker works for one channel.
type worker struct {
	*Runner
	name      string
	channel   Channel
	transport Transport
	inbox     *inbox
	quiet     atomic.Int64                // nothing is sent before this time, in Unix nanoseconds
	drafts    postgres.KeyedMutex[string] // by the execution whose draft is sent or edited
	wake      chan struct{}               // makes watch look for active turns
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
		sleep.For(ctx, time.Minute) // reconcile ends ctx when the declaration or a secret changes
		return
	}
	w := &worker{
		Runner: r, name: c.Name, channel: c, transport: transport, wake: make(chan struct{}, 1),
		inbox: &inbox{db: r.Pool, pool: r.Pool, name: c.Name, lease: lease, state: state},
	}
	if err := w.releaseClaims(ctx); err != nil {
		r.Logger.WarnContext(ctx, "claims of an earlier worker not released; they expire within a minute", "channel", c.Name,
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

// releaseClaims releases the claims of earlier workers, which makes their messages due. Those workers lost the lane or
// were killed.
func (w *worker) releaseClaims(ctx context.Context) error {
	return exec(ctx, w.Pool, "release claims", `
		with entries as (
		  update agent_channel_messages set next_attempt_at = clock_timestamp(), claim = null
		   where channel = @channel and claim < @claim and finished_at is null and status = 'received')
		update agent_channel_sends set next_attempt_at = clock_timestamp(), claim = null
		 where channel = @channel and claim < @claim and status in ('queued', 'sending')`,
		postgres.Strict{"channel": w.name, "claim": w.inbox.lease.Token()})
}

// claimTTL is the lifetime of the claim of a message. After it, a worker may repeat the attempt.
const claimTTL = time.Minute

// attemptContext bounds an attempt, so it ends before its claim. A shutdown does not cancel the attempt. The loss of
// the lane does, because the next worker may repeat it.
func (w *worker) attemptContext(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithTimeout(ctx, claimTTL-5*time.Second)
	leaseCtx := w.inbox.lease.Context()
	stop := context.AfterFunc(leaseCtx, func() {
		if errors.Is(context.Cause(leaseCtx), lanes.ErrLost) {
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
		failure, ok := errors.AsType[*SendError](err)
		switch {
		case errors.Is(err, ErrMisconfigured):
			pause = time.Minute
		case ok && failure.RetryAfter > 0:
			pause = failure.RetryAfter
		}
		sleep.For(ctx, outbox.Jitter(pause))
		pause = min(2*pause, time.Minute)
	}
}
