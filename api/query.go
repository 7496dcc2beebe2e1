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
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/memory"
	"github.com/lanekeeper/lanekeeper/trace"
)

// maxText bounds a filter's value in bytes.
const maxText = 300

// param is a query parameter of a route.
type param struct {
	name, about string
	enum        []string
	format      string             // date-time, integer, or empty for text
	max         int                // of an integer; 0 means no bound
	def         int                // default of an integer
	check       func(string) error // nil accepts every text
}

var (
	surfaceParam = enumParam("surface", "Surface of the work", surfaces()...)
	sinceParam   = timeParam("since", "Start of the period")
	traceParam   = param{name: "trace_id", about: "Id of a trace, in any form", check: checkTrace}
)

func textParam(name, about string) param { return param{name: name, about: about} }

func enumParam(name, about string, values ...string) param {
	return param{name: name, about: about, enum: values}
}

func timeParam(name, about string) param {
	return param{name: name, about: about + " (RFC 3339)", format: "date-time", check: checkTime}
}

// listParams adds the parameters of every listing.
func listParams(more ...param) []param {
	return append(slices.Clip(more),
		limitParam("Rows", maxPage, defaultPage),
		textParam("cursor", "next_cursor of the previous page"))
}

func limitParam(what string, maximum, normal int) param {
	return param{
		name: "limit", about: fmt.Sprintf("%s per page, 1 to %d", what, maximum), format: "integer",
		max: maximum, def: normal, check: checkUpTo(maximum),
	}
}

func surfaces() []string {
	return stringsOf(trace.Heartbeat, trace.Operate, trace.Chat, trace.Webhook, trace.Flow, trace.Eval)
}

func statuses() []string {
	return stringsOf(executions.Pending, executions.Running, executions.Waiting, executions.Completed, executions.Failed,
		executions.Timeout, executions.Cancelled)
}

func activityStatuses() []string {
	return stringsOf(activity.Running, activity.Success, activity.Error, activity.PendingApproval,
		activity.Skipped, activity.Unknown)
}

func stringsOf[S ~string](values ...S) []string {
	plain := make([]string, 0, len(values))
	for _, v := range values {
		plain = append(plain, string(v))
	}
	return plain
}

// query holds validated parameters.
type query map[string]string

// readQuery rejects unknown, repeated and invalid parameters.
func readQuery(raw string, params []param) (query, error) {
	values, err := url.ParseQuery(raw)
	if err != nil {
		return nil, problem.BadParameter("malformed query: %s", err)
	}
	validated := query{}
	for _, name := range slices.Sorted(maps.Keys(values)) {
		i := slices.IndexFunc(params, func(p param) bool { return p.name == name })
		if i < 0 {
			return nil, problem.BadParameter("unknown parameter %.60q; %s", name, knownParams(params))
		}
		if len(values[name]) > 1 {
			return nil, problem.BadParameter("parameter %s occurs %d times", name, len(values[name]))
		}
		if err := params[i].accept(values[name][0]); err != nil {
			return nil, problem.BadParameter("parameter %s %s", name, err)
		}
		validated[name] = values[name][0]
	}
	return validated, nil
}

// accept validates a value. The error continues "parameter x".
func (p param) accept(value string) error {
	switch {
	case value == "":
		return errors.New("is empty; omit it")
	case len(value) > maxText:
		return fmt.Errorf("is longer than %d bytes", maxText)
	case !isPrintableText(value):
		return errors.New("has control characters or is not UTF-8")
	case p.enum != nil && !slices.Contains(p.enum, value):
		return fmt.Errorf("is %q; use %s", value, strings.Join(p.enum, ", "))
	case p.check != nil:
		return p.check(value)
	}
	return nil
}

func knownParams(params []param) string {
	if len(params) == 0 {
		return "this route has none"
	}
	list := make([]string, 0, len(params))
	for _, p := range params {
		list = append(list, p.name)
	}
	return "this route has " + strings.Join(list, ", ")
}

func checkTime(value string) error {
	if _, err := time.Parse(time.RFC3339, value); err != nil {
		return fmt.Errorf("is %q; write 2026-01-31T15:04:05Z (encode + as %%2B)", value)
	}
	return nil
}

// checkStatuses accepts states of executions, separated by commas.
func checkStatuses(value string) error {
	for one := range strings.SplitSeq(value, ",") {
		if !slices.Contains(statuses(), one) {
			return fmt.Errorf("is %q; use %s, or several with commas", value, strings.Join(statuses(), ", "))
		}
	}
	return nil
}

func checkUpTo(maximum int) func(string) error {
	return func(value string) error {
		if n, err := strconv.Atoi(value); err != nil || n < 1 || n > maximum {
			return fmt.Errorf("is %q; use 1 to %d", value, maximum)
		}
		return nil
	}
}

func checkTrace(value string) error {
	_, err := trace.ParseAny(value)
	if err != nil {
		return fmt.Errorf("is invalid: %w", err)
	}
	return nil
}

// traceIDs returns the ids that the parameter can stand for; nil without the parameter.
func (q query) traceIDs() []trace.ID {
	ids, err := trace.ParseAny(q["trace_id"])
	if err != nil {
		return nil
	}
	return ids
}

// time returns the parameter's time; zero without the parameter.
func (q query) time(name string) time.Time {
	t, err := time.Parse(time.RFC3339, q[name])
	if err != nil {
		return time.Time{}
	}
	return t
}

// list returns the comma-separated parts of a parameter; nil without the parameter.
func (q query) list(name string) []string {
	if q[name] == "" {
		return nil
	}
	return strings.Split(q[name], ",")
}

func (q query) limit() int { return cmp.Or(q.number("limit"), defaultPage) }

// number returns the parameter's number; 0 without the parameter.
func (q query) number(name string) int {
	n, err := strconv.Atoi(q[name])
	if err != nil {
		return 0
	}
	return n
}

// flag returns the parameter's flag; nil without the parameter.
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

// page is the format of all listings.
type page[T any] struct {
	Items []T `json:"items"`
	// NextCursor leads to the next page; null after the last page.
	NextCursor *string `json:"next_cursor"`
}

// pageOf builds a page; next is empty after the last page.
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

// encodeCursor makes the key of a page's last row opaque. The listing's name prevents use elsewhere.
func encodeCursor(listing, key string) string {
	return base64.RawURLEncoding.EncodeToString([]byte(listing + "\n" + key))
}

// decodeCursor returns the key; empty for the first page.
func decodeCursor(listing, cursor string) (string, error) {
	if cursor == "" {
		return "", nil
	}
	raw, err := base64.RawURLEncoding.DecodeString(cursor)
	key, matches := strings.CutPrefix(string(raw), listing+"\n")
	if err != nil || !matches || key == "" || !postgres.IsText(key) {
		return "", activity.ErrCursor
	}
	return key, nil
}

// decodeIDCursor is decodeCursor for listings by id.
func decodeIDCursor(listing, cursor string) (string, error) {
	id, err := decodeCursor(listing, cursor)
	if err != nil || (id != "" && !uuidForm.MatchString(id)) {
		return "", activity.ErrCursor
	}
	return id, nil
}

// readPage reads a page of a listing by id, newest first, and checks for a next page. The arguments of read are the id
// to continue after and the row count.
func readPage[T any](
	listing string, q query, id func(T) string, read func(before string, limit int) ([]T, error),
) (page[T], error) {
	before, err := decodeIDCursor(listing, q["cursor"])
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
	return pageOf(rows, encodeCursor(listing, last)), nil
}

// etag formats a revision as an entity tag.
func etag(revision int) string { return `"` + strconv.Itoa(revision) + `"` }

// precondition is the state that a change expects.
type precondition struct {
	given    bool
	absent   bool // If-None-Match: *
	exists   bool // If-Match: *
	revision int  // If-Match: "3"
}

// readPrecondition parses If-Match and If-None-Match.
func (r request) readPrecondition() (precondition, error) {
	match, none := r.Header.Values("If-Match"), r.Header.Values("If-None-Match")
	switch {
	case len(match)+len(none) == 0:
		return precondition{}, nil
	case len(match)+len(none) > 1:
		return precondition{}, badPrecondition("send either If-Match or If-None-Match, once")
	case len(none) == 1:
		if strings.TrimSpace(none[0]) != "*" {
			return precondition{}, badPrecondition("If-None-Match is %.60q; use *", none[0])
		}
		return precondition{given: true, absent: true}, nil
	}
	tag := strings.TrimSpace(match[0])
	if tag == "*" {
		return precondition{given: true, exists: true}, nil
	}
	plain := strings.TrimPrefix(tag, "W/") // compressing proxies weaken tags
	number, err := strconv.Atoi(strings.Trim(plain, `"`))
	if err != nil || number < 1 || etag(number) != plain {
		return precondition{}, badPrecondition("If-Match is %.60q; use the ETag of a response, or *", match[0])
	}
	return precondition{given: true, revision: number}, nil
}

func badPrecondition(format string, args ...any) *problem.Problem {
	return problem.New(http.StatusBadRequest, format, args...).Kind("bad-precondition", "Bad precondition")
}

// require rejects a change without a precondition.
func (p precondition) require() error {
	if p.given {
		return nil
	}
	return problem.New(http.StatusPreconditionRequired, "send If-Match with the ETag that you read, or "+
		"If-None-Match: * for a new object").Kind("precondition-required", "Precondition required")
}

// ifMatch returns the precondition of a route whose object must exist.
func (r request) ifMatch() (revision int, err error) {
	p, err := r.readPrecondition()
	if err == nil && p.absent {
		err = badPrecondition("If-None-Match: * is invalid here: the object must exist")
	}
	return p.revision, err
}

// memoryRevision converts the precondition for package memory. It calls read only for If-Match: *.
func (p precondition) memoryRevision(
	ctx context.Context, read func(ctx context.Context) (memory.Entry, error),
) (int, error) {
	switch {
	case p.absent:
		return memory.Absent, nil
	case !p.exists:
		return p.revision, nil
	}
	e, err := read(ctx)
	if err != nil {
		return 0, fmt.Errorf("read the object of If-Match: *: %w", err)
	}
	return e.Revision, nil
}
