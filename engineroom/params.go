package engineroom

import (
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
)

// oneOf returns the value of an enumerated filter. The default is the first known value.
func (req *pageRequest) oneOf(name string, known ...string) (string, error) {
	value := req.Query.Get(name)
	switch {
	case value == "":
		return known[0], nil
	case !slices.Contains(known, value):
		return "", problem.BadParameter("%s is %.60q; it can be %s", name, value,
			strings.Join(slices.DeleteFunc(slices.Clone(known), func(s string) bool { return s == "" }), ", "))
	}
	return value, nil
}

// textFilter reads a text filter of at most maxFilterBytes; empty if absent.
func (req *pageRequest) textFilter(name string) (string, error) {
	value := strings.TrimSpace(req.Query.Get(name))
	if len(value) > maxFilterBytes || !postgres.IsText(value) {
		return "", problem.BadParameter("%s is not text of at most %d bytes", name, maxFilterBytes)
	}
	return value, nil
}

// timeFilter reads a time filter; resolveTimes has put typed times into UTC.
func (req *pageRequest) timeFilter(name string) (time.Time, error) {
	value := req.Query.Get(name)
	if value == "" {
		return time.Time{}, nil
	}
	for _, form := range []string{time.RFC3339, "2006-01-02T15:04Z07:00", "2006-01-02T15:04:05", time.DateOnly} {
		if t, err := time.Parse(form, value); err == nil {
			return t, nil
		}
	}
	return time.Time{}, problem.BadParameter("%s is %.60q; it looks like 2026-01-31T15:04 or 2026-01-31T15:04Z", name,
		value)
}

// uuidFilter reads an id parameter; empty if absent. Its error is for a cursor, the most frequent such parameter.
func (req *pageRequest) uuidFilter(name string) (string, error) {
	value := req.Query.Get(name)
	if value != "" && !uuidPattern.MatchString(value) {
		return "", problem.BadParameter("%s is %.60q, which is no place in this list; begin at its top", name, value)
	}
	return value, nil
}

// uuidPattern matches ids of rows.
var uuidPattern = regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)

// filtersOf reads URL parameters. It accepts only known parameters, each at most once. It drops empty parameters, which
// forms send.
func filtersOf(values url.Values, known ...string) (map[string]string, error) {
	q := map[string]string{}
	for name, given := range values {
		switch {
		case len(known) == 0:
			return nil, problem.BadParameter("there is no filter %.60q here; this page has no filters", name)
		case !slices.Contains(known, name):
			return nil, problem.BadParameter("there is no filter %.60q here; there are %s", name, strings.Join(known, ", "))
		case len(given) > 1:
			return nil, problem.BadParameter("filter %s is given %d times", name, len(given))
		case len(given[0]) > maxFilterBytes || !utf8.ValidString(given[0]) ||
			strings.ContainsFunc(given[0], unicode.IsControl):
			return nil, problem.BadParameter("filter %s has to be text of at most %d bytes", name, maxFilterBytes)
		case strings.TrimSpace(given[0]) != "":
			q[name] = given[0]
		}
	}
	return q, nil
}

// maxFilterBytes bounds a filter's value. The longest label, name=value, fits.
const maxFilterBytes = 1000

// checkOneOf rejects a value outside the filter's list; empty is no filter.
func checkOneOf(name, value string, allowed []string) error {
	if value == "" || slices.Contains(allowed, value) {
		return nil
	}
	return problem.New(http.StatusBadRequest, "filter %s is one of %s, not %.60q", name,
		strings.Join(allowed, ", "), value)
}

func invalidCursor() error {
	return problem.BadParameter("this is not a cursor of this listing: take it from the page before")
}

// customPlan makes the server plan a query for its arguments: pgx then uses no named prepared statement, for which the
// server may choose a generic plan. An unset filter then costs nothing, and a set filter uses its index.
const customPlan = pgx.QueryExecModeCacheDescribe
