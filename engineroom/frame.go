package engineroom

import (
	"context"
	"fmt"
	"net/http"
	"regexp"
	"sync"
	"sync/atomic"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/origin"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// zoneCookie has the reader's time zone, an IANA name. The page's script writes the cookie and shows times in that
// zone. The server reads typed times in the zone. Without the cookie both use UTC.
const zoneCookie = "lanekeeper_zone"

var (
	zonePattern = regexp.MustCompile(`^[A-Z][A-Za-z]+(?:[/_+-]?[A-Za-z0-9]+)*$`)
	// localTimePattern matches a time as a browser sends it, without a zone.
	localTimePattern = regexp.MustCompile(`^\d{4}-\d\d-\d\dT\d\d:\d\d(?::\d\d)?$`)
)

// zoneOf returns the reader's time zone; UTC if unknown.
func zoneOf(r *http.Request) *time.Location {
	c, err := r.Cookie(origin.CookieName(r, zoneCookie))
	if err != nil || len(c.Value) > 64 || c.Value == "Local" || !zonePattern.MatchString(c.Value) {
		return time.UTC
	}
	zone, err := time.LoadLocation(c.Value)
	if err != nil {
		return time.UTC
	}
	return zone
}

// resolveTimes replaces typed times in the query by absolute times, so the URL means the same to every reader.
func (req *pageRequest) resolveTimes() {
	for _, name := range []string{"since", "until"} {
		value := req.Query.Get(name)
		if !localTimePattern.MatchString(value) {
			continue
		}
		if len(value) == len("2006-01-02T15:04") {
			value += ":00"
		}
		if t, err := time.ParseInLocation("2006-01-02T15:04:05", value, req.zone); err == nil {
			req.Query.Set(name, t.UTC().Format(time.RFC3339))
		}
	}
}

// timeField is an input for a time in the reader's zone.
type timeField struct{ Label, Name, Zone, Value, Instant string }

// TimeField returns the input of a time filter with its current value; a zero time is empty.
func (req *pageRequest) TimeField(label, name string, t time.Time) timeField {
	f := timeField{Label: label, Name: name, Zone: zoneName(req.zone)}
	if !t.IsZero() {
		f.Value, f.Instant = t.In(req.zone).Format("2006-01-02T15:04"), t.UTC().Format(time.RFC3339)
	}
	return f
}

// zoneName names a zone on the page.
func zoneName(zone *time.Location) string {
	if zone == time.UTC {
		return "UTC"
	}
	return "local (" + zone.String() + ")"
}

// Zone names the zone of the times on the page.
func (d pageData) Zone() string { return zoneName(d.zone) }

// ZoneCookie is the name of the zone's cookie here.
func (d pageData) ZoneCookie() string { return d.zoneCookie }

// maxPendingCount bounds the counted items: "99+".
const maxPendingCount = 99

// pendingCounts counts approvals and requests of executions that wait for a person. Titles, icons and notifications
// show the count.
type pendingCounts struct {
	Approvals, Requests int64
	Newest, Skill       string // id and skill of the newest approval; empty for none
}

// Total is the text of a title: 3, or 99+; empty for none.
func (w pendingCounts) Total() string { return pendingText(w.Approvals + w.Requests) }

// Asked is the text beside the link to the approvals.
func (w pendingCounts) Asked() string { return pendingText(w.Approvals) }

func pendingText(n int64) string {
	if n == 0 {
		return ""
	}
	return capped(n, maxPendingCount)
}

// cached shares the result of a read among pages and viewers.
type cached[T any] struct {
	stale atomic.Bool // set by invalidate
	mu    sync.Mutex  // held during a read
	at    time.Time
	last  T
}

// read returns a result of at most the given age, or reads a new one.
func (r *cached[T]) read(age time.Duration, read func() (T, error)) (T, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.stale.Swap(false) && time.Since(r.at) < age {
		return r.last, nil
	}
	r.at = time.Time{}
	got, err := read()
	if err == nil {
		r.last, r.at = got, time.Now()
	}
	return got, err
}

// invalidate makes the next call read again, even during a running read.
func (r *cached[T]) invalidate() { r.stale.Store(true) }

// sumsInterval is the interval at which a stream refreshes sums over the log.
const sumsInterval = 10 * time.Second

// pendingTTL is the longest age of a shared count. Topics that are due together share one count.
const pendingTTL = 200 * time.Millisecond

// countPending counts the items that wait for a person.
func (room *Room) countPending(ctx context.Context) (pendingCounts, error) {
	return room.pendingCache.read(pendingTTL, func() (pendingCounts, error) { return room.readPending(ctx) })
}

func (room *Room) readPending(ctx context.Context) (w pendingCounts, err error) {
	err = room.Read.QueryRow(ctx, `
		with pending as (
		 select a.id, a.skill_name from agent_approvals a
		  where a.status = 'pending' and a.expires_at > clock_timestamp()
		  order by a.status, a.expires_at desc limit @limit::int + 1)
		select (select count(*) from pending),
		       (select count(*) from (select from agent_requests r where r.status = 'pending'
		         order by r.id limit @limit::int + 1) x),
		       coalesce(n.id::text, ''), coalesce(left(n.skill_name, 100), '')
		  from (select) one left join (select p.id, p.skill_name from pending p order by p.id desc limit 1) n on true`,
		postgres.Strict{"limit": maxPendingCount}).Scan(&w.Approvals, &w.Requests, &w.Newest, &w.Skill)
	if err != nil {
		return w, fmt.Errorf("count pending approvals and requests: %w", err)
	}
	return w, nil
}

// withPendingCounts adds the part to every page, so each title is live.
func (room *Room) withPendingCounts(pages []page) []page {
	load := func(ctx context.Context, _ *pageRequest) (any, error) { return room.countPending(ctx) }
	for i := range pages {
		one := part{
			name: "waits", interval: time.Second, refreshOnActivity: true, triggers: asksChanged,
			sharedTemplate: true, load: load,
		}
		pages[i].parts = append([]part{one}, pages[i].parts...)
	}
	return pages
}
