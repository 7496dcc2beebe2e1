package engineroom

import (
	"context"
	"errors"
	"maps"
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
	"github.com/lanekeeper/lanekeeper/internal/replica"
	"github.com/lanekeeper/lanekeeper/principals"
)

// pageRequest is a request for a page, also for its stream.
type pageRequest struct {
	path           func(name string) string // value of a path wildcard
	Query          url.Values               // of the URL
	URL            string                   // canonical path and query
	Subject        any                      // the subject that open found
	fromPrimary    bool                     // read from the primary, after a write
	streaming      bool                     // of a stream
	cache          *pageCache               // shared by the parts of a page
	zone           *time.Location           // of the reader
	mayReadThreads bool                     // the viewer may read threads and their quotes
	missingScopes  string                   // scopes of linked pages that the viewer lacks, each after a space
}

// newPageRequest parses a request below prefix.
func newPageRequest(r *http.Request, p page, prefix string) *pageRequest {
	wildcards := map[string]string{}
	for _, m := range wildcard.FindAllStringSubmatch(p.path, -1) {
		wildcards[m[1]] = r.PathValue(m[1])
	}
	req := &pageRequest{
		path: func(name string) string {
			return wildcards[name]
		}, Query: r.URL.Query(), fromPrimary: replica.Fresh(r), zone: zoneOf(r),
		cache: &pageCache{}, streaming: prefix != "",
	}
	req.Query.Del(partParam)
	if prefix != "" {
		req.Query.Del("seen")
		req.fromPrimary = replica.JustWrote(r)
	}
	principal := principals.From(r.Context())
	for _, scope := range linkedScopes {
		if principal != nil && !principal.May(scope) {
			req.missingScopes += " " + string(scope)
		}
	}
	req.mayReadThreads = !strings.Contains(req.missingScopes, string(principals.ThreadsRead))
	req.resolveTimes()
	address := url.URL{
		Path: strings.TrimPrefix(r.URL.Path, prefix), RawPath: strings.TrimPrefix(r.URL.RawPath, prefix),
		RawQuery: req.Query.Encode(),
	}
	req.URL = address.RequestURI()
	return req
}

// wildcard matches the names in a path.
var wildcard = regexp.MustCompile(`\{(\w+)(?:\.\.\.)?\}`)

// partParam is the parameter that requests one part of a page. A script puts the part into the page.
const partParam = "part"

// maxFilterBytes bounds a filter's value, in bytes.
const maxFilterBytes = 300

// uuidPattern matches ids of rows.
var uuidPattern = regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)

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

// uuidFilter reads an id parameter; empty if absent.
func (req *pageRequest) uuidFilter(name string) (string, error) {
	value := req.Query.Get(name)
	if value != "" && !uuidPattern.MatchString(value) {
		return "", problem.BadParameter("%s is %.60q, which is no place in this list; begin at its top", name, value)
	}
	return value, nil
}

// textFilter reads a text filter.
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

// filtersOf reads URL parameters. It accepts only known parameters, each at most once. It drops empty parameters, which
// forms send.
func filtersOf(values url.Values, known ...string) (map[string]string, error) {
	q := map[string]string{}
	for name, given := range values {
		switch {
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

// notFound returns the error for an unknown id.
func notFound(format string, args ...any) error {
	return problem.New(http.StatusNotFound, format, args...)
}

// openByID opens a page by the id in its path. The query returns the name in the title.
func (room *Room) openByID(kind, title, query string) func(ctx context.Context, req *pageRequest) (string, error) {
	return func(ctx context.Context, req *pageRequest) (string, error) {
		id := strings.ToLower(req.path("id"))
		if !uuidPattern.MatchString(id) {
			return "", notFound("there is no %s %.60q", kind, id)
		}
		var name string
		err := room.Read.QueryRow(ctx, query, postgres.Strict{"id": id}).Scan(&name)
		if errors.Is(err, pgx.ErrNoRows) {
			return "", notFound("there is no %s %s", kind, id)
		}
		req.Subject = id
		return title + cut(80, name), err
	}
}

// withParam returns the page's URL with one parameter changed, or removed if the value is empty.
func (req *pageRequest) withParam(name, value string) string {
	path, _, _ := strings.Cut(req.URL, "?")
	query := url.Values{}
	for key, values := range req.Query {
		if len(values) > 0 && values[0] != "" && key != name {
			query.Set(key, values[0])
		}
	}
	if value != "" {
		query.Set(name, value)
	}
	if len(query) == 0 {
		return path
	}
	return path + "?" + query.Encode()
}

// withoutRow returns the URL without the expanded row.
func (req *pageRequest) withoutRow() *pageRequest {
	query := maps.Clone(req.Query)
	query.Del("row")
	return &pageRequest{URL: req.URL, Query: query}
}

// firstN returns the first n items, and reports whether there are more.
func firstN[T any](list []T, n int) ([]T, bool) { return list[:min(len(list), n)], len(list) > n }

// pager holds the links from a page of a list to the next page and to the first page. Each is empty for none.
type pager struct{ Older, Newest string }

// paginate returns the first n items and the links. The URL names the last item of a page, by cursor, in the parameter
// before.
func paginate[T any](req *pageRequest, list []T, n int, cursor func(T) string) ([]T, pager) {
	var links pager
	if req.Query.Get("before") != "" {
		links.Newest = req.withParam("before", "")
	}
	list, more := firstN(list, n)
	if more {
		links.Older = req.withParam("before", cursor(list[n-1]))
	}
	return list, links
}

// customPlan makes the server plan a query for its arguments. An unset filter then costs nothing, and a set filter uses
// its index. A generic plan could do neither.
const customPlan = pgx.QueryExecModeCacheDescribe
