package api

import (
	"cmp"
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
