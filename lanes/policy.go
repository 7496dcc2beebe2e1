package lanes

import (
	"strings"
	"time"
)

// policy is what a lane's name says about its leases. It is decided here and nowhere else.
type policy struct {
	ttl     time.Duration // default
	renewed bool          // by Run; otherwise only by Lease.Renew or by acquiring again
	cancels bool          // losing it cancels the work
}

const (
	surfaceTTL = 5 * time.Minute
	threadTTL  = 10 * time.Minute
	jobTTL     = time.Hour
)

// policyOf knows the lanes of the runtime by name; any other name is an external job's.
// A thread's lane ends when nothing was sent for its TTL: each send renews it, and losing it cancels
// nothing, because the next send acquires it again or queues.
func policyOf(lane string) policy {
	kind, _, named := strings.Cut(lane, ":")
	switch {
	case kind == "thread" && named:
		return policy{ttl: threadTTL}
	case !named && (kind == "heartbeat" || kind == "operate"),
		named && (kind == "webhook" || kind == "automation" || kind == "objective"):
		return policy{ttl: surfaceTTL, renewed: true, cancels: true}
	}
	return policy{ttl: jobTTL, renewed: true, cancels: true}
}

// Option changes one acquisition.
type Option func(*settings)

type settings struct {
	ttl      time.Duration
	patience time.Duration // 0: a little longer than ttl
	process  string        // its id in agent_workers; empty: the lease ends by its time only
}

// WithTTL sets how long the lease lasts without a renewal, 1 second to 30 days, in whole seconds
// (rounded up). A nested hold never shortens the lease of the outer one.
func WithTTL(ttl time.Duration) Option { return func(s *settings) { s.ttl = ttl } }

// WithPatience sets how long AcquireWait waits. The default is longer than the lane's TTL, so
// that a holder that died is outlived.
func WithPatience(patience time.Duration) Option { return func(s *settings) { s.patience = patience } }

// WithProcess has the lane go free when a process of that id in agent_workers is dead, and not at the end of its
// lease only: the owner ends with "@" and the id, by which the sweep finds it. It is for Acquire and AcquireWait;
// lanes of an execution go on with it.
func WithProcess(id string) Option { return func(s *settings) { s.process = id } }

func settingsFor(lane string, opts []Option) settings {
	s := settings{ttl: policyOf(lane).ttl}
	for _, o := range opts {
		o(&s)
	}
	s.ttl = wholeSeconds(s.ttl)
	if s.patience <= 0 {
		s.patience = s.ttl + s.ttl/4 + queuePlace
	}
	return s
}

// wholeSeconds rounds away from zero, so that neither 1 ms nor -1 ms becomes the invalid 0.
func wholeSeconds(d time.Duration) time.Duration {
	if d%time.Second == 0 {
		return d
	}
	if d > 0 {
		return d.Truncate(time.Second) + time.Second
	}
	return d.Truncate(time.Second) - time.Second
}

// seconds is d for an int parameter; what does not fit is out of every allowed range anyway.
func seconds(d time.Duration) int32 {
	const most = 1<<31 - 1
	return int32(max(-most, min(most, int64(d/time.Second))))
}
