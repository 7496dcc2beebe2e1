package engineroom

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
)

// chip shows a set filter, with a link to the page without the filter.
type chip struct{ Label, Value, Href string }

// filterLabel is the label of a filter's parameter.
type filterLabel struct{ param, label string }

// filterLabels are in the order of the chips. Cursors have no chips, so they have no labels.
var filterLabels = []filterLabel{
	{"q", "Words"},
	{"status", "State"},
	{"state", "State"},
	{"failed", "State"},
	{"view", "View"},
	{"for", "Waits for"},
	{"surface", "Surface"},
	{"flow", "Flow"},
	{"skill", "Skill"},
	{"agent", "Agent"},
	{"label", "Label"},
	{"lane", "Lane"},
	{"trace", "Id"},
	{"trace_id", "Id"},
	{"channel", "Channel"},
	{"owner", "Owner"},
	{"endpoint", "Endpoint"},
	{"target", "Target"},
	{"category", "Category"},
	{"prefix", "Key"},
	{"name", "Name"},
	{"errors", "Inside"},
	{"range", "Period"},
	{"since", "Since"},
	{"until", "Until"},
	{"sort", "Order"},
}

// valueLabels names the values of parameters that a reader would not understand, by parameter and value. A parameter
// without values here shows its value as it is.
var valueLabels = map[[2]string]string{
	{"sort", byTook}: "slowest first",
	{"sort", byCost}: "most expensive first",
	{"errors", "1"}:  "errors",
	{"failed", "1"}:  "failed or timed out",
}

// Chips lists the set filters, except the named ones. Each chip links to the page without its filter.
func (req *pageRequest) Chips(except ...string) []chip {
	var list []chip
	for _, f := range filterLabels {
		value := strings.TrimSpace(req.Query.Get(f.param))
		if value == "" || slices.Contains(except, f.param) {
			continue
		}
		withoutFilter := req.withoutRow()
		for _, cursor := range []string{"before", "after", "cursor"} {
			withoutFilter.Query.Del(cursor)
		}
		value = cut(60, cmp.Or(valueLabels[[2]string{f.param, value}], value))
		if slices.Contains(req.cappedFilters, f.param) {
			value += fmt.Sprintf(", only the first %d names", maxNamesLike)
		}
		list = append(list, chip{f.label, value, withoutFilter.withParam(f.param, "")})
	}
	return list
}

// CountFilters returns the number of set filters, except the named ones.
func (req *pageRequest) CountFilters(except ...string) int { return len(req.Chips(except...)) }

// maxOptions bounds the suggestions of a filter that a page contains.
const maxOptions = 100

// filterForm is the data of a page's filters.
type filterForm struct {
	*pageRequest
	Path  string
	Lists map[string][]suggestion // by the names of kinds
}

// filtersPart shows the filters of a page with suggestions of some kinds. The part has no refresh interval, so it keeps
// what the viewer types.
func (room *Room) filtersPart(path string, kinds ...string) part {
	return part{name: "filters", load: func(ctx context.Context, req *pageRequest) (any, error) {
		form := filterForm{pageRequest: req, Path: path, Lists: map[string][]suggestion{}}
		for _, kind := range kinds {
			list, err := room.suggested(ctx, kind)
			if err != nil {
				return nil, err
			}
			form.Lists[kind] = list[:min(len(list), maxOptions)]
		}
		return form, nil
	}}
}
