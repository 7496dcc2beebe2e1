package engineroom

import (
	"fmt"
	"net/url"
	"slices"
	"strings"
	"time"
)

const (
	// maxRanked bounds the rows searched for the slowest or the most expensive rows, or for rows with errors.
	maxRanked = 10_000
	// rankedShown bounds the rows of such a list, which has one page.
	rankedShown = 50
)

// Orders of a list; empty is newest first.
const (
	byTook = "took" // the slowest first
	byCost = "cost" // the most expensive first
)

// rangeOption is a period that ends now.
type rangeOption struct {
	Value, Label string
	span         time.Duration
}

var rangeOptions = []rangeOption{
	{"1h", "the last hour", time.Hour},
	{"24h", "the last day", 24 * time.Hour},
	{"7d", "the last 7 days", 7 * 24 * time.Hour},
	{"30d", "the last 30 days", 30 * 24 * time.Hour},
}

// timeRange is the period in which the rows of a list were created, and their order.
type timeRange struct {
	Range        string // a rangeOption; empty for none
	Since, Until time.Time
	Sort         string
}

// rangeFilters are the parameters of a timeRange. since may be a range, too.
var rangeFilters = []string{"range", "since", "until", "sort"}

// timeRange reads the period and the order.
func (req *pageRequest) timeRange() (p timeRange, err error) {
	names := make([]string, len(rangeOptions))
	for i, r := range rangeOptions {
		names[i] = r.Value
	}
	p.Range, p.Sort = req.Query.Get("range"), req.Query.Get("sort")
	if since := req.Query.Get("since"); slices.Contains(names, since) {
		p.Range = since
	} else if p.Since, err = req.timeFilter("since"); err != nil {
		return p, err
	}
	if p.Until, err = req.timeFilter("until"); err != nil {
		return p, err
	}
	if err := checkOneOf("range", p.Range, names); err != nil {
		return p, err
	}
	return p, checkOneOf("sort", p.Sort, []string{byTook, byCost})
}

// Ranges are the options of Range.
func (timeRange) Ranges() []rangeOption { return rangeOptions }

// Bounded reports whether the period is bounded.
func (p timeRange) Bounded() bool { return p.Range != "" || !p.Since.IsZero() || !p.Until.IsZero() }

// addTo adds the parameters to a query.
func (p timeRange) addTo(q url.Values) {
	for name, value := range map[string]string{"range": p.Range, "sort": p.Sort} {
		if value != "" {
			q.Set(name, value)
		}
	}
	for name, t := range map[string]time.Time{"since": p.Since, "until": p.Until} {
		if !t.IsZero() {
			q.Set(name, t.UTC().Format(time.RFC3339))
		}
	}
}

// start is the beginning of the period; zero for none.
func (p timeRange) start() time.Time {
	start := p.Since
	if i := slices.IndexFunc(rangeOptions, func(r rangeOption) bool { return r.Value == p.Range }); i >= 0 {
		if from := time.Now().Add(-rangeOptions[i].span); from.After(start) {
			start = from
		}
	}
	return start
}

// firstID and lastID are the least and the greatest id.
const (
	firstID = "00000000-0000-0000-0000-000000000000"
	lastID  = "ffffffff-ffff-ffff-ffff-ffffffffffff"
)

// bounds returns the bounds on ids, which are in the order of time. from is included, until is not. before is the last
// id of the previous page; empty for none.
func (p timeRange) bounds(before string) (from, until string) {
	from, until = firstID, lastID
	if start := p.start(); !start.IsZero() {
		from = idFloor(start)
	}
	if !p.Until.IsZero() {
		until = idFloor(p.Until)
	}
	if before != "" {
		until = min(until, strings.ToLower(before))
	}
	return from, until
}

// idFloor returns the least id of a millisecond, like lanekeeper.agent_uuid7_floor.
func idFloor(t time.Time) string {
	ms := fmt.Sprintf("%012x", min(max(t.UnixMilli(), 0), 1<<48-1))
	return ms[:8] + "-" + ms[8:] + "-7000-8000-000000000000"
}

// parseExclusion splits a filter that excludes a value: !heartbeat matches all values but heartbeat.
func parseExclusion(value string) (rest string, excluded bool) {
	rest, excluded = strings.CutPrefix(strings.TrimSpace(value), "!")
	return strings.TrimSpace(rest), excluded
}
