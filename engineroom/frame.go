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
	zoneForm = regexp.MustCompile(`^[A-Z][A-Za-z]+(?:[/_+-]?[A-Za-z0-9]+)*$`)
	// typedForm matches a time as a browser sends it, without a zone.
	typedForm = regexp.MustCompile(`^\d{4}-\d\d-\d\dT\d\d:\d\d(?::\d\d)?$`)
)

// zoneOf returns the reader's time zone; UTC if unknown.
func zoneOf(r *http.Request) *time.Location {
	c, err := r.Cookie(origin.CookieName(r, zoneCookie))
	if err != nil || len(c.Value) > 64 || c.Value == "Local" || !zoneForm.MatchString(c.Value) {
		return time.UTC
	}
	zone, err := time.LoadLocation(c.Value)
	if err != nil {
		return time.UTC
	}
	return zone
}

// resolveTimes replaces typed times in the query by absolute times, so the URL means the same to every reader.
func (v *visit) resolveTimes() {
	for _, name := range []string{"since", "until"} {
		value := v.Query.Get(name)
		if !typedForm.MatchString(value) {
			continue
		}
		if len(value) == len("2006-01-02T15:04") {
			value += ":00"
		}
		if t, err := time.ParseInLocation("2006-01-02T15:04:05", value, v.zone); err == nil {
			v.Query.Set(name, t.UTC().Format(time.RFC3339))
		}
	}
}

// timeField is an input for a moment, in the reader's zone.
type timeField struct{ Label, Name, Zone, Value, Instant string }

// TimeField returns the input of a time filter with its current value; a zero time is empty.
func (v *visit) TimeField(label, name string, t time.Time) timeField {
	f := timeField{Label: label, Name: name, Zone: zoneName(v.zone)}
	if !t.IsZero() {
		f.Value, f.Instant = t.In(v.zone).Format("2006-01-02T15:04"), t.UTC().Format(time.RFC3339)
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
func (s show) Zone() string { return zoneName(s.zone) }

// ZoneCookie is the name of the zone's cookie here.
func (s show) ZoneCookie() string { return s.zoneCookie }

// maxWaits bounds the counted items: "99+".
const maxWaits = 99

// waits counts approvals and requests of executions that wait for a person. Titles, icons and notifications show the
// count.
type waits struct {
	Approvals, Requests int64
	Newest, Skill       string // of the newest approval: id and skill; empty for none
}

// Total is the text of a title: 3, or 99+; empty for none.
func (w waits) Total() string { return waitsText(w.Approvals + w.Requests) }

// Asked is the text beside the link to the approvals.
func (w waits) Asked() string { return waitsText(w.Approvals) }

func waitsText(n int64) string {
	if n == 0 {
		return ""
	}
	return capped(n, maxWaits)
}

// recent shares one read among pages and viewers.
type recent[T any] struct {
	stale atomic.Bool // since forget
	mu    sync.Mutex  // held during a read
	at    time.Time
	last  T
}

// read returns a result of at most the given age, or reads a new one.
func (r *recent[T]) read(age time.Duration, read func() (T, error)) (T, error) {
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

// forget makes the next call read again, even during a running read.
func (r *recent[T]) forget() { r.stale.Store(true) }

// sumsEvery is how often a stream refreshes sums over the log.
const sumsEvery = 10 * time.Second

// waitsAge is the longest age of a shared read. Topics that are due together share it.
const waitsAge = 200 * time.Millisecond

// waiting counts the items that wait for a person.
func (room *Room) waiting(ctx context.Context) (waits, error) {
	return room.waits.read(waitsAge, func() (waits, error) { return room.readWaits(ctx) })
}

func (room *Room) readWaits(ctx context.Context) (w waits, err error) {
	err = room.Read.QueryRow(ctx, `
		with pending as (
		 select a.id, a.skill_name from agent_approvals a
		  where a.status = 'pending' and a.expires_at > clock_timestamp()
		  order by a.status, a.expires_at desc limit @most::int + 1)
		select (select count(*) from pending),
		       (select count(*) from (select from agent_requests r where r.status = 'pending'
		         order by r.id limit @most::int + 1) x),
		       coalesce(n.id::text, ''), coalesce(left(n.skill_name, 100), '')
		  from (select) one left join (select p.id, p.skill_name from pending p order by p.id desc limit 1) n on true`,
		postgres.Strict{"most": maxWaits}).Scan(&w.Approvals, &w.Requests, &w.Newest, &w.Skill)
	if err != nil {
		return w, fmt.Errorf("count pending approvals and requests: %w", err)
	}
	return w, nil
}

// withWaits adds the part to every page, so each title is live.
func (room *Room) withWaits(pages []page) []page {
	load := func(ctx context.Context, _ *visit) (any, error) { return room.waiting(ctx) }
	for i := range pages {
		one := part{name: "waits", every: time.Second, refreshOnActivity: true, about: asksChanged, shared: true, load: load}
		pages[i].parts = append([]part{one}, pages[i].parts...)
	}
	return pages
}
