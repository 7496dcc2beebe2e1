package workspace

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"reflect"
	"slices"
	"strings"

	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/internal/textcut"
)

// Action is the effect of an apply on one row.
type Action string

// The actions.
const (
	Create    Action = "create"
	Update    Action = "update"
	Remove    Action = "remove"
	Keep      Action = "keep" // no file declares the row, and Prune kept it
	Unchanged Action = "unchanged"
)

// Diff lists the effects of an apply by kind and name.
type Diff struct {
	Items []Item `json:"items"`
	// checks that the apply could not make, effects of changed agents, refusals of gates
	Warnings []string `json:"warnings,omitempty"`
}

// Item is one row. An update has Changes, with secrets redacted. So has a removal that leaves a paused objective.
type Item struct {
	Kind    string   `json:"kind"`
	Name    string   `json:"name"`
	Action  Action   `json:"action"`
	Changes []Change `json:"changes,omitempty"`
}

// Change is one field before and after; null means absent.
type Change struct {
	Field string          `json:"field"` // a path: config.query
	Old   json.RawMessage `json:"old"`
	New   json.RawMessage `json:"new"`
}

// overwrittenByAdmin lists changes that would overwrite an admin's declaration, such as agent objectives add. Equal
// values and new steps overwrite nothing.
func (i Item) overwrittenByAdmin() (lost []Change) {
	admins := slices.ContainsFunc(i.Changes, func(c Change) bool {
		return c.Field == "source" && string(c.Old) == `"admin"`
	})
	if !admins {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(i.Changes), func(c Change) bool {
		return c.Field == "source" || c.Field == "steps"
	})
}

// overwriteProblem explains the conflict with an admin's declaration, and the fix.
func (i Item) overwriteProblem(lost []Change) string {
	var differ []string
	for _, c := range lost {
		differ = append(differ, fmt.Sprintf("%s is %s there and %s in this file", c.Field, shorten(c.Old), shorten(c.New)))
	}
	return fmt.Sprintf("%s %s was declared or changed by an admin in the database: %s. Nothing was changed. Copy its "+
		"present state into the file and apply it; after that, changes of the file count again",
		i.Kind, i.Name, strings.Join(differ, "; "))
}

// Empty reports whether no row changed. The apply may have kept undeclared rows.
func (d Diff) Empty() bool { return len(d.changed()) == 0 }

// Count returns the number of items with an action.
func (d Diff) Count(a Action) int { return len(d.Of(a)) }

// Of lists the items with an action.
func (d Diff) Of(a Action) []Item {
	return slices.DeleteFunc(slices.Clone(d.Items), func(item Item) bool { return item.Action != a })
}

// changed lists the changed rows.
func (d Diff) changed() []Item {
	return slices.DeleteFunc(slices.Clone(d.Items), func(item Item) bool {
		return item.Action == Unchanged || item.Action == Keep
	})
}

// names returns the kind and name of each item.
func names(items []Item) []string {
	all := make([]string, len(items))
	for i, item := range items {
		all[i] = item.Kind + " " + item.Name
	}
	return all
}

// WriteText prints the diff: created (+), updated (~, with fields), removed (-) and kept undeclared (=) rows, then
// the counts.
func (d Diff) WriteText(w io.Writer) error {
	out := bufio.NewWriter(w)
	marks := map[Action]string{Create: "+", Update: "~", Remove: "-", Keep: "="}
	for _, item := range d.Items {
		if item.Action == Unchanged {
			continue
		}
		fmt.Fprintf(out, "%s %s %s\n", marks[item.Action], item.Kind, item.Name)
		for _, change := range item.Changes {
			change.write(out)
		}
	}
	fmt.Fprintf(out, "%d to create, %d to update, %d to remove, %d unchanged",
		d.Count(Create), d.Count(Update), d.Count(Remove), d.Count(Unchanged))
	if kept := d.Count(Keep); kept > 0 {
		fmt.Fprintf(out, ", %d kept", kept)
	}
	fmt.Fprintln(out)
	return out.Flush()
}

// write prints multi-line texts, and values whose shortened forms are equal, as changed lines. It prints other values
// side by side.
func (c Change) write(out *bufio.Writer) {
	var before, after string
	texts := json.Unmarshal(c.Old, &before) == nil && json.Unmarshal(c.New, &after) == nil
	switch {
	case texts && strings.Contains(before+after, "\n"):
	case shorten(c.Old) == shorten(c.New) && !bytes.Equal(c.Old, c.New):
		before, after = indented(c.Old), indented(c.New)
	default:
		fmt.Fprintf(out, "    %s: %s → %s\n", c.Field, shown(c.Old), shown(c.New))
		return
	}
	fmt.Fprintf(out, "    %s:\n", c.Field)
	removed, added := diffLines(strings.Split(before, "\n"), strings.Split(after, "\n"))
	for _, line := range removed {
		fmt.Fprintf(out, "      - %s\n", line)
	}
	for _, line := range added {
		fmt.Fprintf(out, "      + %s\n", line)
	}
}

// shown shortens a value. A key that the document leaves out has its default: "null" would read as none.
func shown(value json.RawMessage) string {
	if string(value) == "null" {
		return "(left out)"
	}
	return shorten(value)
}

func indented(value json.RawMessage) string {
	var b bytes.Buffer
	if json.Indent(&b, value, "", "  ") != nil {
		return string(value)
	}
	return b.String()
}

// diffLines drops the common prefix and suffix.
func diffLines(before, after []string) (removed, added []string) {
	for len(before) > 0 && len(after) > 0 && before[0] == after[0] {
		before, after = before[1:], after[1:]
	}
	for len(before) > 0 && len(after) > 0 && before[len(before)-1] == after[len(after)-1] {
		before, after = before[:len(before)-1], after[:len(after)-1]
	}
	return before, after
}

func shorten(value json.RawMessage) string { return textcut.Text(string(value), 100) }

// changes lists the different fields by name.
func changes(before, after map[string]any) []Change {
	var list []Change
	fields := maps.Clone(before)
	maps.Copy(fields, after)
	for _, field := range slices.Sorted(maps.Keys(fields)) {
		if !reflect.DeepEqual(before[field], after[field]) {
			list = append(list, Change{Field: field, Old: redacted(field, before[field]), New: redacted(field, after[field])})
		}
	}
	return list
}

// redacted encodes a field's value without secrets.
func redacted(field string, value any) json.RawMessage {
	const limit = 64 << 10
	name := field[strings.LastIndexByte(field, '.')+1:]
	var wrapped map[string]json.RawMessage
	if err := json.Unmarshal(redact.JSON(map[string]any{name: value}, limit), &wrapped); err != nil ||
		wrapped[name] == nil {
		return json.RawMessage(`"` + redact.Marker + `"`)
	}
	return wrapped[name]
}

// fieldsIn returns the named fields of a row as in its JSON, with nested fields under their paths.
func fieldsIn(row any, names ...string) (map[string]any, error) {
	raw, err := json.Marshal(row)
	if err != nil {
		return nil, err
	}
	var all map[string]any
	if err := json.Unmarshal(raw, &all); err != nil {
		return nil, err
	}
	found := make(map[string]any)
	for _, name := range names {
		flattenInto(found, name, all[name], 2)
	}
	return found, nil
}

func flattenInto(into map[string]any, path string, value any, levels int) {
	object, ok := value.(map[string]any)
	if !ok || levels == 0 {
		into[path] = value
		return
	}
	for key, item := range object {
		flattenInto(into, join(path, key), item, levels-1)
	}
}
