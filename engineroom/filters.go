package engineroom

import (
	"context"
	"slices"
	"strings"
)

// chip shows a set filter, with a link to the page without the filter.
type chip struct{ Word, Value, Href string }

// filterWords are the labels of the filters' parameters, in the order of the chips. Cursors have none.
var filterWords = [][2]string{
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

// Chips lists the set filters, except the named ones. Each chip links to the page without its filter.
func (req *pageRequest) Chips(except ...string) []chip {
	var list []chip
	for _, w := range filterWords {
		value := strings.TrimSpace(req.Query.Get(w[0]))
		if value == "" || slices.Contains(except, w[0]) {
			continue
		}
		rest := req.withoutRow()
		for _, cursor := range []string{"before", "after", "cursor"} {
			rest.Query.Del(cursor)
		}
		if w[0] == "failed" {
			value = "failed or timed out"
		}
		switch w[0] + " " + value {
		case "sort took":
			value = "slowest first"
		case "sort cost":
			value = "most expensive first"
		case "errors 1":
			value = "errors"
		}
		list = append(list, chip{w[1], cut(60, value), rest.withParam(w[0], "")})
	}
	return list
}

// Set returns the number of set filters, except the named ones.
func (req *pageRequest) Set(except ...string) int { return len(req.Chips(except...)) }

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
