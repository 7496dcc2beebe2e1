package lanes

import (
	"cmp"
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

const (
	lockedRetryDelay = 250 * time.Millisecond // while a row is locked
	maxFailureDelay  = time.Second            // while the database is unavailable
	idleInterval     = time.Minute            // without a lease to renew; a new lease wakes Run
	renewTimeout     = 5 * time.Second        // of one renewal
)

// Run renews all leases of the process until ctx ends, then returns nil. One statement renews all due leases. A lease
// is due after a third of its TTL, at most 10 seconds, and at once after a handover. Run cancels a lost lease with
// ErrLost. A break notifies the holder: with a Listener Run finds the loss at once, otherwise at the next renewal.
// Without Run leases expire after their TTL.
func (k *Keeper) Run(ctx context.Context) error {
	k.runCount.Add(1)
	defer k.runCount.Add(-1)
	var notifications <-chan string
	if k.listener != nil && k.enabled {
		var stop func()
		notifications, stop = k.listener.SubscribeTo(channel, k.isRelevant)
		defer stop()
	}
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-timer.C:
		case <-k.renewSooner:
		case payload := <-notifications:
			k.renewNow(payload)
		}
		due, next := k.due(time.Now())
		if len(due) > 0 {
			k.renewDue(ctx, due)
			_, next = k.due(time.Now())
		}
		timer.Reset(next)
	}
}

// isRelevant reports whether a notification is about a held lane with another owner or token, so the lane may be lost.
func (k *Keeper) isRelevant(payload string) bool {
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

// renewNow makes the holds of a lane due, because a renewal shows whether they are lost. An empty payload means all
// lanes: the listener may have missed notifications.
func (k *Keeper) renewNow(payload string) {
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

// renewDue renews leases, and plans a retry after a failure.
func (k *Keeper) renewDue(ctx context.Context, due []*hold) {
	err := k.renew(ctx, due)
	if err == nil || ctx.Err() != nil {
		return
	}
	k.log.WarnContext(ctx, "lanes not renewed, trying again", "lanes", len(due), "error", err)
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, h := range due {
		h.renewAt = time.Now().Add(min(maxFailureDelay, h.interval()/4))
	}
}

// due returns the leases that are due or due soon; nil if none is due now. next is the time until one is due.
func (k *Keeper) due(now time.Time) (due []*hold, next time.Duration) {
	k.mu.Lock()
	defer k.mu.Unlock()
	next = idleInterval
	defer func() { k.nextRenewal = now.Add(next) }()
	for _, h := range k.held {
		if h.state != live || !h.policy.renewed {
			continue
		}
		remaining := h.renewAt.Sub(now)
		next = min(next, max(remaining, 0))
		if remaining <= h.interval()/2 {
			due = append(due, h)
		}
	}
	if next > 0 {
		return nil, next
	}
	return due, 0
}

// renewParams are the array parameters of a renewal.
type renewParams struct {
	lanes, owners []string
	tokens        []int64
	ttls          []int32
}

func (p *renewParams) add(h *hold) {
	p.lanes = append(p.lanes, h.lane)
	p.owners = append(p.owners, h.owner.name)
	p.tokens = append(p.tokens, h.token)
	p.ttls = append(p.ttls, seconds(h.ttl))
}

type renewal struct {
	Lane         string
	FencingToken int64
	Renewed      bool
	Busy         bool
	ExpiresAt    time.Time
}

// renew renews leases in one statement and applies the results. After an error their state is unknown.
func (k *Keeper) renew(ctx context.Context, holds []*hold) error {
	var params renewParams
	limit := renewTimeout
	k.mu.Lock()
	for _, h := range holds {
		params.add(h)
		limit = min(limit, h.interval()/2) // leaves time for retries before the lease expires
	}
	k.mu.Unlock()
	sentAt := time.Now()
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	renewals, err := renewLanes(ctx, k.db, params)
	if err != nil {
		return err
	}
	byGrant := make(map[grantKey]renewal, len(renewals))
	for _, r := range renewals {
		byGrant[grantKey{r.Lane, r.FencingToken}] = r
	}
	var lost renewParams
	var lostHolds []*hold
	for i, h := range holds {
		if r := byGrant[grantKey{h.lane, h.token}]; r.Renewed || r.Busy {
			k.applyRenewal(h, r, sentAt, time.Duration(params.ttls[i])*time.Second, "")
			continue
		}
		lost.add(h)
		lostHolds = append(lostHolds, h)
	}
	breaks := k.readBreaks(ctx, lost)
	for i, h := range lostHolds {
		grant := grantKey{h.lane, h.token}
		k.applyRenewal(h, byGrant[grant], sentAt, time.Duration(lost.ttls[i])*time.Second, breaks[grant])
	}
	return nil
}

// breaksTimeout bounds the read of breaks: the holder of a lost lane works on until then.
const breaksTimeout = 300 * time.Millisecond

type grantKey struct {
	lane  string
	token int64
}

// readBreaks returns who broke the lanes of grants, and why. A break is older than its notification, and an error only
// hides the reason.
func (k *Keeper) readBreaks(ctx context.Context, lost renewParams) map[grantKey]string {
	if len(lost.lanes) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, breaksTimeout)
	defer cancel()
	list, err := postgres.Rows[struct {
		Lane         string
		FencingToken int64
		By, Reason   string
	}](ctx, k.db, "read breaks of lanes", `
		select b.lane, b.fencing_token, coalesce(nullif(a.input ->> 'by', ''), 'an admin') as by,
		       coalesce(a.input ->> 'reason', '') as reason
		  from unnest(@lanes::text[], @tokens::bigint[]) b (lane, fencing_token)
		 cross join lateral (
		   select a.input from agent_activity a
		    where a.skill_name = 'break_lane' and a.lane = b.lane and a.input ->> 'fencing_token' = b.fencing_token::text
		      and a.id >= lanekeeper.agent_uuid7_floor(clock_timestamp() - interval '1 day')
		    order by a.id desc limit 1) a`, postgres.Strict{"lanes": lost.lanes, "tokens": lost.tokens})
	if err != nil {
		k.log.WarnContext(ctx, "breaks of lanes not read", "error", err)
	}
	breaks := map[grantKey]string{}
	for _, b := range list {
		breaks[grantKey{b.Lane, b.FencingToken}] = fmt.Sprintf("%s broke it: %s", b.By, b.Reason)
	}
	return breaks
}

// applyRenewal applies the result of one renewal. lossReason is the reason of a break; empty without one.
func (k *Keeper) applyRenewal(h *hold, r renewal, sentAt time.Time, ttl time.Duration, lossReason string) {
	k.mu.Lock()
	notify := func() {}
	switch {
	case h.state != live: // released or lost meanwhile
	case r.Renewed && ttl < h.ttl:
		h.shorten(sentAt, ttl)
	case r.Renewed:
		h.extend(sentAt, ttl, r.ExpiresAt)
	case r.Busy:
		h.renewAt = time.Now().Add(lockedRetryDelay)
	default:
		notify = k.loseLocked(h, cmp.Or(lossReason, "the database reports that it ended or was taken"))
	}
	k.mu.Unlock()
	notify()
}

func renewLanes(ctx context.Context, db postgres.DB, params renewParams) ([]renewal, error) {
	return postgres.Rows[renewal](ctx, db, "renew lanes", `
		select r.lane, r.fencing_token, r.renewed, r.busy, coalesce(r.expires_at, 'epoch') as expires_at
		  from lanekeeper.renew_agent_locks(@lanes::text[], @owners::text[], @tokens::bigint[], @ttls::int[]) r`,
		postgres.Strict{"lanes": params.lanes, "owners": params.owners, "tokens": params.tokens, "ttls": params.ttls})
}
