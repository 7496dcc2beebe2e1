package api

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/problem"
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
	surfaceParam = enumParam("surface", "Surface of the work", trace.Surfaces()...)
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
		if !slices.Contains(executions.Statuses(), one) {
			return fmt.Errorf("is %q; use %s, or several with commas", value, strings.Join(executions.Statuses(), ", "))
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

func checkUUID(text string) error {
	if !uuidForm.MatchString(text) {
		return errors.New("must be a uuid")
	}
	return nil
}
