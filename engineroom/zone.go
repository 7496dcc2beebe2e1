package engineroom

import (
	"net/http"
	"regexp"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/origin"
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

// zoneName names a zone on the page.
func zoneName(zone *time.Location) string {
	if zone == time.UTC {
		return "UTC"
	}
	return "local (" + zone.String() + ")"
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

// Zone names the zone of the times on the page.
func (d pageData) Zone() string { return zoneName(d.zone) }

// ZoneCookie is the name of the zone's cookie here.
func (d pageData) ZoneCookie() string { return d.zoneCookie }
