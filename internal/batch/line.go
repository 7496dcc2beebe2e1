package batch

import (
	"cmp"
	"slices"
	"sync"
	"time"
)

const (
	// beside is how many have to have gathered to go while another batch is under way.
	beside = 32
	// most is how many batches are under way at once, without those that are slow.
	most = 2
	// heldUp is how many batches of a group are under way at once, with those that are slow.
	heldUp = 3
	// defaultSlow is how long a batch is waited for.
	defaultSlow = 10 * time.Millisecond
	// defaultOverdue is how long a group waits while larger ones go before it, when many wait; the fewer, the shorter.
	defaultOverdue = 4 * time.Millisecond
	// defaultRegroup is how long those who had an answer are waited for.
	defaultRegroup = time.Millisecond
)

// Line is where groups of writes wait for their turn. It lets one batch go at a time, and a second only when there are many. One that
// takes long is not waited for.
//
// Who has had an answer often comes back at once with its next write, so the next batch waits for them: for as many as have come back
// of late, and for a millisecond at most, unless it goes beside another. A Line is ready for use. What its groups write should take about as
// long: one waits for the other.
type Line struct {
	slow, overdue, regroup time.Duration // as by default when they are not set

	mu      sync.Mutex
	groups  []member
	waiting int       // writes
	flying  []*flight // batches that are waited for, also of one
	alarm   *time.Timer
	alarmAt time.Time // zero when it is not set

	landed   time.Time // the last batch of several
	answered int       // by the last batch
	came     int       // since then
	returns  float64   // what part of those who had an answer came back, of late
	owed     int       // so many will hardly be long
}

// member is a Group of any kind.
type member interface {
	gatheredLocked() (n int, since time.Time)
	giveUpLocked(now time.Time) time.Time
	underwayLocked() underway
	sendLocked()
}

// underway is what of a group is under way.
type underway struct {
	alone  bool // a write by itself that is waited for
	shared int  // batches of several, also slow ones
}

// comeLocked notes that somebody is here. It reports whether they may go at once, by themselves: where few write, one waits only for
// another of its own group.
func (l *Line) comeLocked(alone bool) bool {
	l.came++
	if l.owed > 0 {
		l.owed--
	}
	return !alone && l.waiting == 0 && l.owed == 0 && !l.sharedLocked()
}

// sharedLocked reports whether a batch of several is under way.
func (l *Line) sharedLocked() bool {
	return slices.ContainsFunc(l.flying, func(f *flight) bool { return !f.alone })
}

// restsLocked reports that one more who has come changes nothing before the alarm: they gather while a batch is under way, or until those
// are back who are waited for.
func (l *Line) restsLocked() bool {
	if l.alarmAt.IsZero() || l.waiting >= beside {
		return false
	}
	until := l.landed.Add(cmp.Or(l.regroup, defaultRegroup))
	if len(l.flying) > 0 {
		until = l.flying[0].began.Add(cmp.Or(l.slow, defaultSlow))
	}
	return !l.alarmAt.After(until) && (l.sharedLocked() || l.owed > 0 && len(l.flying) == 0)
}

// goOnLocked sends what may go, and sees to it that the rest is looked at again.
func (l *Line) goOnLocked() {
	slow := cmp.Or(l.slow, defaultSlow)
	for l.waiting > 0 {
		now := time.Now()
		tired := l.giveUpLocked(now)
		if l.waiting == 0 {
			return
		}
		l.dismissLocked(func(f *flight) bool { return now.Sub(f.began) >= slow })
		regrouped := l.landed.Add(cmp.Or(l.regroup, defaultRegroup))
		if !now.Before(regrouped) {
			l.owed = 0
		}
		next := l.nextLocked(now)
		switch {
		case len(l.flying) >= most, len(l.flying) > 0 && next == nil, l.waiting < beside && l.sharedLocked():
			l.wakeLocked(earlier(tired, l.flying[0].began.Add(slow)))
			return
		case next == nil: // until one of those that are slow has landed, or for as long as they have patience
			l.wakeLocked(tired)
			return
		case l.owed > 0 && len(l.flying) == 0:
			l.wakeLocked(regrouped)
			return
		}
		next.sendLocked()
	}
}

// giveUpLocked has those who have waited for too long write by themselves, and returns when the next one will have.
func (l *Line) giveUpLocked(now time.Time) (next time.Time) {
	for _, g := range l.groups {
		if until := g.giveUpLocked(now); !until.IsZero() && (next.IsZero() || until.Before(next)) {
			next = until
		}
	}
	return next
}

func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

// nextLocked is the group in which most have gathered, or the one that has waited longest if that is too long; nil when none may go.
func (l *Line) nextLocked(now time.Time) (next member) {
	n, oldest := 0, time.Time{}
	overdue := cmp.Or(l.overdue, defaultOverdue) * time.Duration(min(l.waiting, beside)) / beside
	for _, g := range l.groups {
		gathered, since := g.gatheredLocked()
		under := g.underwayLocked()
		switch {
		case gathered == 0, gathered > 1 && under.shared >= heldUp, under.alone && l.waiting < beside:
		case now.Sub(since) > overdue:
			if oldest.IsZero() || since.Before(oldest) {
				next, oldest = g, since
			}
		case oldest.IsZero() && gathered > n:
			next, n = g, gathered
		}
	}
	return next
}

// wakeLocked has those who wait looked at when it is so late, if nothing else happens before. One who does not wait sets no alarm, which
// costs more than it seems to.
func (l *Line) wakeLocked(at time.Time) {
	if !l.alarmAt.IsZero() && !at.Before(l.alarmAt) {
		return // and then for this, too
	}
	l.alarmAt = at
	if l.alarm == nil {
		l.alarm = time.AfterFunc(time.Until(at), l.wake)
		return
	}
	l.alarm.Reset(time.Until(at))
}

func (l *Line) wake() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.alarmAt = time.Time{}
	l.goOnLocked()
}

// flight is a batch that is under way.
type flight struct {
	line  *Line
	group *underway
	alone bool // of one write
	began time.Time
}

// takeOffLocked begins one, of a group.
func (l *Line) takeOffLocked(group *underway, alone bool) *flight {
	if alone {
		group.alone = true
	} else {
		group.shared++
	}
	l.owed = 0
	f := &flight{line: l, group: group, alone: alone, began: time.Now()}
	l.flying = append(l.flying, f)
	return f
}

// dismissLocked no longer waits for some of those that are under way.
func (l *Line) dismissLocked(gone func(f *flight) bool) {
	l.flying = slices.DeleteFunc(l.flying, func(f *flight) bool {
		if !gone(f) {
			return false
		}
		if f.alone {
			f.group.alone = false
		}
		return true
	})
}

// land ends it: so many get their answers, and are expected back as far as they have come back of late. Where few write, nobody waits
// for another.
func (f *flight) land(answered int) {
	l := f.line
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.answered > 1 {
		l.returns += (min(1, float64(l.came)/float64(l.answered)) - l.returns) / 4
	}
	l.answered, l.came = answered, 0
	if answered > 1 {
		l.landed = time.Now()
		l.owed += int(l.returns*float64(answered) + 0.5)
	}
	if !f.alone {
		f.group.shared--
	}
	l.dismissLocked(func(other *flight) bool { return other == f })
	l.goOnLocked()
}
