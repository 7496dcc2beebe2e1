package engineroom

import (
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/problem"
)

// freshPlan has a query planned for the values at hand: a filter that is not set costs nothing, and one that is set
// chooses its index. A plan that is kept for all values could do neither.
const freshPlan = pgx.QueryExecModeCacheDescribe

// uuidShape is how ids of rows look.
var uuidShape = regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)

// oneOf is a filter's value, the first of the known ones when it is not given. Another is refused by name.
func (v *visit) oneOf(name string, known ...string) (string, error) {
	value := v.Query.Get(name)
	switch {
	case value == "":
		return known[0], nil
	case !slices.Contains(known, value):
		return "", problem.New(http.StatusBadRequest, "%s is %.60q; it can be %s", name, value,
			strings.Join(slices.DeleteFunc(slices.Clone(known), func(s string) bool { return s == "" }), ", ")).
			Kind("bad-parameter", "Bad filter")
	}
	return value, nil
}

// uuidFilter is a filter or a place in a listing that is a row's id; empty when it is not given.
func (v *visit) uuidFilter(name string) (string, error) {
	value := v.Query.Get(name)
	if value != "" && !uuidShape.MatchString(value) {
		return "", problem.New(http.StatusBadRequest, "%s is %.60q, which is no place in this list; begin at its top", name, value).
			Kind("bad-parameter", "Bad filter")
	}
	return value, nil
}

// at is the page's own address with one parameter changed, or without it when the value is empty.
func (v *visit) at(name, value string) string {
	path, _, _ := strings.Cut(v.URL, "?")
	query := url.Values{}
	for key, values := range v.Query {
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

// missing is the answer for an id without a row.
func missing(format string, args ...any) error {
	return problem.New(http.StatusNotFound, format, args...)
}

// onPage is the first n of what was read, and whether there was more.
func onPage[T any](list []T, n int) ([]T, bool) { return list[:min(len(list), n)], len(list) > n }
