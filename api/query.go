package api

import (
	"cmp"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/memory"
	"github.com/lanekeeper/lanekeeper/trace"
)

// maxText bounds a filter's value, in bytes.
const maxText = 300

// param is a query parameter that a route takes.
type param struct {
	name, about string
	enum        []string
	format      string             // date-time, integer, or empty for text
	most        int                // of an integer; 0 is no bound
	usual       int                // of an integer, where none is given
	check       func(string) error // nil accepts every text
}

var (
	surfaceParam = oneOf("surface", "Where the work began", surfaces()...)
	sinceParam   = moment("since", "Only what began at this moment or later")
	traceParam   = param{name: "trace_id", about: "Id of a trace, in any form", check: checkTrace}
)

func text(name, about string) param { return param{name: name, about: about} }

func oneOf(name, about string, values ...string) param {
	return param{name: name, about: about, enum: values}
}

func moment(name, about string) param {
	return param{name: name, about: about + " (RFC 3339)", format: "date-time", check: checkTime}
}

// listing adds the parameters that every listing takes.
func listing(more ...param) []param {
	return append(slices.Clip(more),
		limitParam("Rows", maxPage, defaultPage),
		text("cursor", "next_cursor of the page before"))
}

// limitParam says how much is on a page.
func limitParam(what string, most, usual int) param {
	return param{
		name: "limit", about: fmt.Sprintf("%s on a page, 1 to %d", what, most), format: "integer", most: most, usual: usual,
		check: checkUpTo(most),
	}
}

func surfaces() []string {
	return names(trace.Heartbeat, trace.Operate, trace.Chat, trace.Webhook, trace.Flow)
}

func statuses() []string {
	return names(executions.Pending, executions.Running, executions.Waiting, executions.Completed, executions.Failed,
		executions.Timeout, executions.Cancelled)
}

func activityStatuses() []string {
	return names(activity.Running, activity.Success, activity.Error, activity.PendingApproval, activity.Skipped, activity.Unknown)
}

func names[S ~string](values ...S) []string {
	plain := make([]string, 0, len(values))
	for _, v := range values {
		plain = append(plain, string(v))
	}
	return plain
}

// query holds parameters that have passed their checks.
type query map[string]string

// readQuery refuses what the route does not take, what comes twice, and values that cannot be meant.
func readQuery(raw string, params []param) (query, error) {
	values, err := url.ParseQuery(raw)
	if err != nil {
		return nil, badParameter("the query cannot be read: %s", err)
	}
	got := query{}
	for _, name := range slices.Sorted(maps.Keys(values)) {
		i := slices.IndexFunc(params, func(p param) bool { return p.name == name })
		if i < 0 {
			return nil, badParameter("there is no parameter %.60q here; %s", name, known(params))
		}
		if len(values[name]) > 1 {
			return nil, badParameter("parameter %s is given %d times", name, len(values[name]))
		}
		if err := params[i].accept(values[name][0]); err != nil {
			return nil, badParameter("parameter %s %s", name, err)
		}
		got[name] = values[name][0]
	}
	return got, nil
}

// accept checks a value; the error goes on after "parameter x".
func (p param) accept(value string) error {
	switch {
	case value == "":
		return errors.New("is empty; leave it out to not filter")
	case len(value) > maxText:
		return fmt.Errorf("is longer than %d bytes", maxText)
	case !storable(value):
		return errors.New("has control characters or is not UTF-8")
	case p.enum != nil && !slices.Contains(p.enum, value):
		return fmt.Errorf("is %q; it can be %s", value, strings.Join(p.enum, ", "))
	case p.check != nil:
		return p.check(value)
	}
	return nil
}

func known(params []param) string {
	if len(params) == 0 {
		return "this route takes none"
	}
	list := make([]string, 0, len(params))
	for _, p := range params {
		list = append(list, p.name)
	}
	return "this route takes " + strings.Join(list, ", ")
}

func badParameter(format string, args ...any) *problem.Problem {
	return problem.New(http.StatusBadRequest, format, args...).Kind("bad-parameter", "Bad parameter")
}

func checkTime(value string) error {
	if _, err := time.Parse(time.RFC3339, value); err != nil {
		return fmt.Errorf("is %q; it looks like 2026-01-31T15:04:05Z (a + in it is written %%2B)", value)
	}
	return nil
}

func checkUpTo(most int) func(string) error {
	return func(value string) error {
		if n, err := strconv.Atoi(value); err != nil || n < 1 || n > most {
			return fmt.Errorf("is %q; it can be 1 to %d", value, most)
		}
		return nil
	}
}

func checkTrace(value string) error {
	_, err := trace.ParseAny(value)
	if err != nil {
		return fmt.Errorf("is not one: %w", err)
	}
	return nil
}

// traceIDs are those that the parameter can mean; nil when it is not given.
func (q query) traceIDs() []trace.ID {
	ids, err := trace.ParseAny(q["trace_id"])
	if err != nil {
		return nil
	}
	return ids
}

// time is a moment; zero when the parameter is not given.
func (q query) time(name string) time.Time {
	t, err := time.Parse(time.RFC3339, q[name])
	if err != nil {
		return time.Time{}
	}
	return t
}

// limit is how many rows a page has.
func (q query) limit() int { return cmp.Or(q.number("limit"), defaultPage) }

// number is a parameter that is one; 0 when it is not given.
func (q query) number(name string) int {
	n, err := strconv.Atoi(q[name])
	if err != nil {
		return 0
	}
	return n
}

// flag is a true or false; nil when the parameter is not given.
func (q query) flag(name string) *bool {
	v, err := strconv.ParseBool(q[name])
	if err != nil {
		return nil
	}
	return &v
}

const (
	defaultPage = 50
	maxPage     = activity.MaxLimit
)

// page is the one shape of all listings.
type page[T any] struct {
	Items []T `json:"items"`
	// NextCursor leads to the next page; null after the last one.
	NextCursor *string `json:"next_cursor"`
}

// pageOf makes a page of rows and the cursor behind them, which is empty after the last page.
func pageOf[T any](rows []T, next string) page[T] {
	p := page[T]{Items: rows}
	if rows == nil {
		p.Items = []T{}
	}
	if next != "" {
		p.NextCursor = &next
	}
	return p
}

// seal hides the key of a page's last row, so that nobody relies on what it is. The listing's name keeps
// a cursor from being used elsewhere.
func seal(listing, key string) string {
	return base64.RawURLEncoding.EncodeToString([]byte(listing + "\n" + key))
}

// unseal is the key that a cursor hides; empty for the first page.
func unseal(listing, cursor string) (string, error) {
	if cursor == "" {
		return "", nil
	}
	raw, err := base64.RawURLEncoding.DecodeString(cursor)
	key, ours := strings.CutPrefix(string(raw), listing+"\n")
	if err != nil || !ours || key == "" {
		return "", activity.ErrCursor
	}
	return key, nil
}

// unsealID is unseal for listings that go by an id.
func unsealID(listing, cursor string) (string, error) {
	id, err := unseal(listing, cursor)
	if err != nil || (id != "" && !uuidForm.MatchString(id)) {
		return "", activity.ErrCursor
	}
	return id, nil
}

// paged reads a page of a listing that goes by id, newest first, and looks whether there is another one.
// read takes the id after which to go on, and how many rows.
func paged[T any](listing string, q query, id func(T) string, read func(before string, limit int) ([]T, error)) (page[T], error) {
	before, err := unsealID(listing, q["cursor"])
	if err != nil {
		return page[T]{}, err
	}
	rows, err := read(before, q.limit())
	if err != nil || len(rows) < q.limit() {
		return pageOf(rows, ""), err
	}
	last := id(rows[len(rows)-1])
	more, err := read(last, 1)
	if err != nil || len(more) == 0 {
		return pageOf(rows, ""), err
	}
	return pageOf(rows, seal(listing, last)), nil
}

// etag is a revision as an entity tag.
func etag(revision int) string { return `"` + strconv.Itoa(revision) + `"` }

// precondition is what a client says about the state that its change is based on.
type precondition struct {
	given    bool
	absent   bool // If-None-Match: * — there must be nothing
	exists   bool // If-Match: * — there must be something
	revision int  // If-Match: "3"
}

// basedOn reads If-Match and If-None-Match.
func (r request) basedOn() (precondition, error) {
	match, none := r.Header.Values("If-Match"), r.Header.Values("If-None-Match")
	switch {
	case len(match)+len(none) == 0:
		return precondition{}, nil
	case len(match)+len(none) > 1:
		return precondition{}, badPrecondition("give one of If-Match and If-None-Match, once")
	case len(none) == 1:
		if strings.TrimSpace(none[0]) != "*" {
			return precondition{}, badPrecondition("If-None-Match is %.60q; with a change it can be *", none[0])
		}
		return precondition{given: true, absent: true}, nil
	}
	tag := strings.TrimSpace(match[0])
	if tag == "*" {
		return precondition{given: true, exists: true}, nil
	}
	plain := strings.TrimPrefix(tag, "W/") // proxies that compress answers weaken tags
	number, err := strconv.Atoi(strings.Trim(plain, `"`))
	if err != nil || number < 1 || etag(number) != plain {
		return precondition{}, badPrecondition("If-Match is %.60q; it can be the ETag of an answer, or *", match[0])
	}
	return precondition{given: true, revision: number}, nil
}

func badPrecondition(format string, args ...any) *problem.Problem {
	return problem.New(http.StatusBadRequest, format, args...).Kind("bad-precondition", "Bad precondition")
}

// required refuses a change that does not say what it is based on.
func (p precondition) required() error {
	if p.given {
		return nil
	}
	return problem.New(http.StatusPreconditionRequired, "say what the change is based on: If-Match with the ETag of what you read, or "+
		"If-None-Match: * for what must be new").Kind("precondition-required", "Precondition required")
}

// known is the precondition of a route whose subject has to be there.
func (r request) known() (revision int, err error) {
	p, err := r.basedOn()
	if err == nil && p.absent {
		err = badPrecondition("If-None-Match: * does not go with this route: what it changes has to be there")
	}
	return p.revision, err
}

// ofMemory is the precondition as a memory's writer says it; read gives the entry where that has to be known.
func (p precondition) ofMemory(ctx context.Context, read func(ctx context.Context) (memory.Entry, error)) (int, error) {
	switch {
	case p.absent:
		return memory.Absent, nil
	case !p.exists:
		return p.revision, nil
	}
	e, err := read(ctx)
	if err != nil {
		return 0, fmt.Errorf("read what If-Match: * is about: %w", err)
	}
	return e.Revision, nil
}
