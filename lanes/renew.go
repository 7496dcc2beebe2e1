package lanes

import (
	"context"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

const (
	busyRetry = 250 * time.Millisecond // for a row that somebody had locked
	failRetry = time.Second            // at most, for a database that did not answer
	idleLook  = time.Minute            // when there is nothing to renew; a new lease wakes Run
	renewMost = 5 * time.Second        // for one renewal to be answered
)

// Run renews every lease of the process until ctx ends, then returns nil: one statement for all of
// them, each at a third of its TTL but at least every 10 seconds, and at once when a release has handed it over. A
// lease that is lost is cancelled with ErrLost. A break notifies its holder: with a Listener that hears, Run finds
// the loss at once, otherwise at the next renewal. Without Run leases end after their TTL.
func (k *Keeper) Run(ctx context.Context) error {
	k.runs.Add(1)
	defer k.runs.Add(-1)
	var said <-chan string
	if k.listener != nil && k.enabled {
		var stop func()
		said, stop = k.listener.SubscribeTo(channel, k.holds)
		defer stop()
	}
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-timer.C:
		case <-k.changed:
		case payload := <-said:
			k.doubt(payload)
		}
		due, next := k.due(time.Now())
		if len(due) > 0 {
			k.renewDue(ctx, due)
			_, next = k.due(time.Now())
		}
		timer.Reset(next)
	}
}

// holds reports whether a notification is about a lane that this process holds under another name or token: it may be
// lost.
func (k *Keeper) holds(payload string) bool {
	lane, to, _ := strings.Cut(payload, "\t")
	k.mu.Lock()
	defer k.mu.Unlock()
	for h := range k.lanes[lane] {
		if h.state == live && !strings.HasPrefix(to, h.owner.name+"\t") {
			return true
		}
	}
	return false
}

// doubt has what is held of a lane renewed now, which shows whether it is lost; of all lanes when notifications may
// have been missed.
func (k *Keeper) doubt(payload string) {
	lane, _, _ := strings.Cut(payload, "\t")
	k.mu.Lock()
	defer k.mu.Unlock()
	if payload == "" {
		for _, h := range k.held {
			h.renewAt = time.Now()
		}
		return
	}
	for h := range k.lanes[lane] {
		h.renewAt = time.Now()
	}
}

// renewing reports whether Run is there.
func (k *Keeper) renewing() bool { return k.runs.Load() > 0 }

// renewDue renews and, when the database does not answer, plans the next try.
func (k *Keeper) renewDue(ctx context.Context, due []*hold) {
	err := k.renew(ctx, due)
	if err == nil || ctx.Err() != nil {
		return
	}
	k.log.WarnContext(ctx, "lanes not renewed, trying again", "lanes", len(due), "error", err)
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, h := range due {
		h.renewAt = time.Now().Add(min(failRetry, h.interval()/4))
	}
}

// due returns the leases to renew now, if any is due: with it go those that would be soon. next
// is how long nothing is due.
func (k *Keeper) due(now time.Time) (due []*hold, next time.Duration) {
	k.mu.Lock()
	defer k.mu.Unlock()
	next = idleLook
	defer func() { k.planned = now.Add(next) }()
	for _, h := range k.held {
		if h.state != live || !h.policy.renewed {
			continue
		}
		left := h.renewAt.Sub(now)
		next = min(next, max(left, 0))
		if left <= h.interval()/2 {
			due = append(due, h)
		}
	}
	if next > 0 {
		return nil, next
	}
	return due, 0
}

// leaseColumns is the arrays of a statement about many leases.
type leaseColumns struct {
	lanes, owners []string
	tokens        []int64
	ttls          []int32
}

func (b *leaseColumns) add(h *hold) {
	b.lanes = append(b.lanes, h.lane)
	b.owners = append(b.owners, h.owner.name)
	b.tokens = append(b.tokens, h.token)
	b.ttls = append(b.ttls, seconds(h.ttl))
}

type renewal struct {
	Lane         string
	FencingToken int64
	Renewed      bool
	Busy         bool
	ExpiresAt    time.Time
}

// renew asks for all of them in one statement and acts on the answer. An error means that nothing is known.
func (k *Keeper) renew(ctx context.Context, holds []*hold) error {
	var b leaseColumns
	limit := renewMost
	k.mu.Lock()
	for _, h := range holds {
		b.add(h)
		limit = min(limit, h.interval()/2) // leaves time for more tries before the lease ends
	}
	k.mu.Unlock()
	before := time.Now()
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	answers, err := renewLanes(ctx, k.db, b)
	if err != nil {
		return err
	}
	type grantKey struct {
		lane  string
		token int64
	}
	byGrant := make(map[grantKey]renewal, len(answers))
	for _, a := range answers {
		byGrant[grantKey{a.Lane, a.FencingToken}] = a
	}
	for i, h := range holds {
		ttl := time.Duration(b.ttls[i]) * time.Second
		k.settle(h, byGrant[grantKey{h.lane, h.token}], before, ttl)
	}
	return nil
}

// settle acts on the answer to one renewal.
func (k *Keeper) settle(h *hold, a renewal, before time.Time, ttl time.Duration) {
	k.mu.Lock()
	after := func() {}
	switch {
	case h.state != live: // released or lost meanwhile
	case a.Renewed && ttl < h.ttl:
		h.shorten(before, ttl)
	case a.Renewed:
		h.extend(before, ttl, a.ExpiresAt)
	case a.Busy:
		h.renewAt = time.Now().Add(busyRetry)
	default:
		after = k.loseLocked(h, "the database says it ended or was taken")
	}
	k.mu.Unlock()
	after()
}

func renewLanes(ctx context.Context, db postgres.DB, b leaseColumns) ([]renewal, error) {
	rows, err := db.Query(ctx, `
		select r.lane, r.fencing_token, r.renewed, r.busy, coalesce(r.expires_at, 'epoch') as expires_at
		  from lanekeeper.renew_agent_locks(@lanes::text[], @owners::text[], @tokens::bigint[], @ttls::int[]) r`,
		postgres.Strict{"lanes": b.lanes, "owners": b.owners, "tokens": b.tokens, "ttls": b.ttls})
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowToStructByName[renewal])
}
