package engineroom

import (
	"maps"
	"net/http"
	"net/url"
	"regexp"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/replica"
	"github.com/lanekeeper/lanekeeper/principals"
)

// pageRequest is a request for a page, also for its stream.
type pageRequest struct {
	path           func(name string) string // returns the value of a path wildcard
	Query          url.Values               // of the URL
	URL            string                   // canonical path and query
	Subject        any                      // set by page.open
	fromPrimary    bool                     // read from the primary, after a write
	streaming      bool                     // for the page's event stream
	cache          *pageCache               // shared by the parts of a page
	zone           *time.Location           // of the viewer
	cappedFilters  []string                 // filters that match more names than they compare; see namesLike
	mayReadThreads bool                     // the viewer may read threads and their quotes
	missingScopes  string                   // scopes of linked pages that the viewer lacks, each after a space
	viewer         *principals.Caller       // nil outside an authenticated request; of a topic, the first viewer
}

// newPageRequest parses a request for a page. prefix is the part of the path before the page's own path: /live for its
// stream, empty for the page.
func newPageRequest(r *http.Request, p page, prefix string) *pageRequest {
	wildcards := map[string]string{}
	for _, m := range wildcard.FindAllStringSubmatch(p.path, -1) {
		wildcards[m[1]] = r.PathValue(m[1])
	}
	req := &pageRequest{
		path:  func(name string) string { return wildcards[name] },
		Query: r.URL.Query(), fromPrimary: replica.Fresh(r), zone: zoneOf(r),
		cache: &pageCache{}, streaming: prefix != "",
	}
	req.Query.Del(partParam)
	if prefix != "" {
		req.Query.Del("seen")
		req.fromPrimary = replica.JustWrote(r)
	}
	principal := principals.From(r.Context())
	req.viewer = principal
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

// wildcard matches a wildcard of http.ServeMux in a path. Its group is the name.
var wildcard = regexp.MustCompile(`\{(\w+)(?:\.\.\.)?\}`)

// partParam is the parameter that requests one part of a page. A script puts the part into the page.
const partParam = "part"

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

// withoutRow returns the request without the expanded row, to build URLs.
func (req *pageRequest) withoutRow() *pageRequest {
	query := maps.Clone(req.Query)
	query.Del("row")
	return &pageRequest{URL: req.URL, Query: query}
}

// firstN returns the first n items, and reports whether there are more.
func firstN[T any](list []T, n int) ([]T, bool) { return list[:min(len(list), n)], len(list) > n }

// timeCursor is a position in a list by time and key.
type timeCursor struct {
	At  time.Time
	Key string
}

// parseTimeCursor parses a position in a URL; nil for none.
func parseTimeCursor(text string) (*timeCursor, error) {
	if text == "" {
		return nil, nil
	}
	at, key, found := strings.Cut(text, " ")
	t, err := time.Parse(time.RFC3339Nano, at)
	if err != nil || !found {
		return nil, invalidCursor()
	}
	return &timeCursor{t, key}, nil
}

// String formats the position for a URL.
func (c timeCursor) String() string { return c.At.UTC().Format(time.RFC3339Nano) + " " + c.Key }

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
