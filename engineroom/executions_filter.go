package engineroom

import (
	"context"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/trace"
)

// maxFilter bounds the text of a filter, in bytes.
const maxFilter = 300

// executionFilter is what the listing of executions is narrowed to. All of it combines.
type executionFilter struct {
	View                  string // waiting or stuck: by deadline; empty: newest first
	Status, Surface, Flow string
	Agent                 string
	Trace                 string // as it was given
	Failed                bool   // failed or timed out
	Kind                  string // of the wait, in the views
	Before                string // the id after which the page begins
	after                 *time.Time
	traces                []string
}

func executionStatuses() []string {
	return []string{
		string(executions.Pending), string(executions.Running), string(executions.Waiting), string(executions.Completed),
		string(executions.Failed), string(executions.Timeout), string(executions.Cancelled),
	}
}

func surfaceNames() []string {
	return []string{string(trace.Heartbeat), string(trace.Operate), string(trace.Chat), string(trace.Webhook), string(trace.Flow)}
}

func waitKinds() []string {
	return []string{"response", "agent", "document", "signature", "test", "event", "delay", "approval", "lane"}
}

// Statuses are what Status can be.
func (executionFilter) Statuses() []string { return executionStatuses() }

// Surfaces are what Surface can be.
func (executionFilter) Surfaces() []string { return surfaceNames() }

// Kinds are what Kind can be.
func (executionFilter) Kinds() []string { return waitKinds() }

// openExecutions reads the filters.
func openExecutions(_ context.Context, v *visit) (string, error) {
	q, err := filtersOf(v.Query, "view", "status", "surface", "flow", "agent", "trace_id", "failed", "for", "before")
	if err != nil {
		return "", err
	}
	f := executionFilter{View: q["view"], Status: q["status"], Surface: q["surface"], Flow: q["flow"], Agent: q["agent"], Trace: q["trace_id"], Kind: q["for"]}
	for _, one := range []struct {
		name  string
		known []string
	}{
		{"view", []string{"waiting", "stuck"}},
		{"status", executionStatuses()},
		{"surface", surfaceNames()},
		{"for", waitKinds()},
		{"failed", []string{"1"}},
	} {
		if err := oneOf(one.name, q[one.name], one.known); err != nil {
			return "", err
		}
	}
	f.Failed = q["failed"] != ""
	switch {
	case f.View != "" && (f.Status != "" || f.Failed):
		return "", badFilter("view=%s lists what waits: leave status and failed out", f.View)
	case f.View == "" && f.Kind != "":
		return "", badFilter("for narrows what waits: use it with view=waiting or view=stuck")
	}
	if f.traces, err = tracesOf(f.Trace); err != nil {
		return "", err
	}
	if err := f.begin(q["before"]); err != nil {
		return "", err
	}
	v.About = f
	return titleOf(f), nil
}

// titleOf says which executions a listing has.
func titleOf(f executionFilter) string {
	switch {
	case f.View == "waiting":
		return "Executions that wait, by deadline"
	case f.View == "stuck":
		return "Executions that are stuck"
	case f.Failed:
		return "Executions that failed"
	case f.Status != "":
		return "Executions: " + f.Status
	}
	return "Executions"
}

// begin reads where a page begins.
func (f *executionFilter) begin(before string) error {
	if before == "" {
		return nil
	}
	id := before
	if f.View != "" {
		at, rest, _ := strings.Cut(before, " ")
		deadline, err := time.Parse(time.RFC3339Nano, at)
		if err != nil {
			return badCursor()
		}
		f.after, id = &deadline, rest
	}
	if !uuidShape.MatchString(id) {
		return badCursor()
	}
	f.Before = id
	return nil
}

// by is the filter whose index finds the rows that are then looked at for the others.
func (f executionFilter) by() string {
	switch {
	case f.traces != nil:
		return "trace"
	case f.Status != "" && (f.Flow == "" || f.Status != string(executions.Completed)):
		return "status" // but for completed ones they are few
	case f.Failed:
		return "failed"
	case f.Flow != "":
		return "flow"
	}
	return "newest"
}

// narrow reports whether what is looked at is all that there is.
func (f executionFilter) narrow() bool {
	by := f.by()
	others := f.Surface != "" || f.Agent != "" || (f.Flow != "" && by != "flow") || (f.Status != "" && by != "status") || (f.Failed && by != "failed")
	return by == "trace" || !others
}

// Narrowed reports whether anything but the view or a tab narrows the listing down.
func (f executionFilter) Narrowed() bool {
	return f.Surface != "" || f.Flow != "" || f.Agent != "" || f.Trace != ""
}

// query is the filter as it stands in an address, from its beginning on.
func (f executionFilter) query() url.Values {
	q := url.Values{}
	for name, value := range map[string]string{
		"view": f.View, "status": f.Status, "surface": f.Surface, "flow": f.Flow, "agent": f.Agent, "trace_id": f.Trace,
		"for": f.Kind,
	} {
		if value != "" {
			q.Set(name, value)
		}
	}
	if f.Failed {
		q.Set("failed", "1")
	}
	return q
}

// with is the address of the listing with one more filter.
func (f executionFilter) with(name, value string) string {
	q := f.query()
	q.Set(name, value)
	return "/executions?" + q.Encode()
}

// tab is the address of the listing with this in the place of what the tabs choose.
func (f executionFilter) tab(name, value string) string {
	f.View, f.Status, f.Failed, f.Kind = "", "", false, ""
	q := f.query()
	if name != "" {
		q.Set(name, value)
	}
	if len(q) == 0 {
		return "/executions"
	}
	return "/executions?" + q.Encode()
}

// filtersOf are the parameters of an address: each once, none that is not known, empty ones left out. A form sends its
// empty fields too.
func filtersOf(values url.Values, known ...string) (map[string]string, error) {
	q := map[string]string{}
	for name, given := range values {
		switch {
		case !slices.Contains(known, name):
			return nil, badFilter("there is no filter %.60q here; there are %s", name, strings.Join(known, ", "))
		case len(given) > 1:
			return nil, badFilter("filter %s is given %d times", name, len(given))
		case len(given[0]) > maxFilter || !utf8.ValidString(given[0]) || strings.ContainsFunc(given[0], unicode.IsControl):
			return nil, badFilter("filter %s has to be text of at most %d bytes", name, maxFilter)
		case strings.TrimSpace(given[0]) != "":
			q[name] = given[0]
		}
	}
	return q, nil
}

// tracesOf are the ids that one in any form can mean; nil for none.
func tracesOf(anyForm string) ([]string, error) {
	if anyForm == "" {
		return nil, nil
	}
	ids, err := trace.ParseAny(strings.TrimSpace(anyForm))
	if err != nil {
		return nil, badFilter("filter trace_id: %s", err)
	}
	list := make([]string, len(ids))
	for i, id := range ids {
		list[i] = string(id)
	}
	return list, nil
}

func badFilter(format string, args ...any) error {
	return problem.New(http.StatusBadRequest, format, args...).Kind("bad-parameter", "Bad parameter")
}

func badCursor() error {
	return badFilter("this is not where a page of this listing begins: take it from the page before")
}
