package workspace

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"reflect"
	"slices"
	"strings"

	"github.com/lanekeeper/lanekeeper/internal/redact"
)

// Action is what applying a workspace does to one row.
type Action string

// The actions.
const (
	Create    Action = "create"
	Update    Action = "update"
	Remove    Action = "remove"
	Keep      Action = "keep" // no file declares the row, and it was not to be removed
	Unchanged Action = "unchanged"
)

// Diff is what applying a workspace changes, by kind and name.
type Diff struct {
	Items    []Item   `json:"items"`
	Warnings []string `json:"warnings,omitempty"` // what could not be checked
}

// Item is one row. Changes are those of an update; secrets are blotted out of them.
type Item struct {
	Kind    string   `json:"kind"`
	Name    string   `json:"name"`
	Action  Action   `json:"action"`
	Changes []Change `json:"changes,omitempty"`
}

// Change is one field before and after; null is absent.
type Change struct {
	Field string          `json:"field"` // a path: config.query
	Old   json.RawMessage `json:"old"`
	New   json.RawMessage `json:"new"`
}

// byAdmin are the changes that would overwrite what an admin has declared in the database, as agent objectives add
// does. To take over what says the same, and to add steps, overwrites nothing.
func (i Item) byAdmin() (lost []Change) {
	admins := slices.ContainsFunc(i.Changes, func(c Change) bool { return c.Field == "source" && string(c.Old) == `"admin"` })
	if !admins {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(i.Changes), func(c Change) bool { return c.Field == "source" || c.Field == "steps" })
}

// refusal says what an admin has declared otherwise, and what to do.
func (i Item) refusal(lost []Change) string {
	var differ []string
	for _, c := range lost {
		differ = append(differ, fmt.Sprintf("%s is %s there and %s in this file", c.Field, short(c.Old), short(c.New)))
	}
	return fmt.Sprintf("%s %s was declared or changed by an admin in the database: %s. Nothing was changed. Write into the file what is "+
		"there, and apply that; after that, changes of the file count again", i.Kind, i.Name, strings.Join(differ, "; "))
}

// Empty reports whether nothing was changed. Rows that no file declares may have been kept.
func (d Diff) Empty() bool { return len(d.changed()) == 0 }

// Count is the number of items with an action.
func (d Diff) Count(a Action) int { return len(d.Of(a)) }

// Of lists the items with an action.
func (d Diff) Of(a Action) []Item {
	return slices.DeleteFunc(slices.Clone(d.Items), func(item Item) bool { return item.Action != a })
}

// changed are the rows that are not as they were.
func (d Diff) changed() []Item {
	return slices.DeleteFunc(slices.Clone(d.Items), func(item Item) bool {
		return item.Action == Unchanged || item.Action == Keep
	})
}

// names are the kind and name of each row that is not as it was.
func (d Diff) names() []string { return names(d.changed()) }

// names are the kind and name of each item.
func names(items []Item) []string {
	all := make([]string, len(items))
	for i, item := range items {
		all[i] = item.Kind + " " + item.Name
	}
	return all
}

// WriteText writes the diff for people: a line for each row that is created (+), updated (~, its fields below),
// removed (-) or kept although no file declares it (=), then the numbers.
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

// write shows texts of several lines by the lines that differ, and everything else side by side.
func (c Change) write(out *bufio.Writer) {
	var before, after string
	texts := json.Unmarshal(c.Old, &before) == nil && json.Unmarshal(c.New, &after) == nil
	if !texts || !strings.Contains(before+after, "\n") {
		fmt.Fprintf(out, "    %s: %s → %s\n", c.Field, short(c.Old), short(c.New))
		return
	}
	fmt.Fprintf(out, "    %s:\n", c.Field)
	removed, added := differing(strings.Split(before, "\n"), strings.Split(after, "\n"))
	for _, line := range removed {
		fmt.Fprintf(out, "      - %s\n", line)
	}
	for _, line := range added {
		fmt.Fprintf(out, "      + %s\n", line)
	}
}

// differing drops the lines with which both begin and end.
func differing(before, after []string) (removed, added []string) {
	for len(before) > 0 && len(after) > 0 && before[0] == after[0] {
		before, after = before[1:], after[1:]
	}
	for len(before) > 0 && len(after) > 0 && before[len(before)-1] == after[len(after)-1] {
		before, after = before[:len(before)-1], after[:len(after)-1]
	}
	return before, after
}

func short(value json.RawMessage) string {
	const longest = 100
	text := string(value)
	if len(text) <= longest {
		return text
	}
	return strings.ToValidUTF8(text[:longest], "") + "…"
}

// changes lists the fields that differ, by name.
func changes(before, after map[string]any) []Change {
	var list []Change
	fields := maps.Clone(before)
	maps.Copy(fields, after)
	for _, field := range slices.Sorted(maps.Keys(fields)) {
		if !reflect.DeepEqual(before[field], after[field]) {
			list = append(list, Change{Field: field, Old: hide(field, before[field]), New: hide(field, after[field])})
		}
	}
	return list
}

// hide writes a field's value without secrets.
func hide(field string, value any) json.RawMessage {
	const limit = 64 << 10
	name := field[strings.LastIndexByte(field, '.')+1:]
	var wrapped map[string]json.RawMessage
	if err := json.Unmarshal(redact.JSON(map[string]any{name: value}, limit), &wrapped); err != nil || wrapped[name] == nil {
		return json.RawMessage(`"` + redact.Marker + `"`)
	}
	return wrapped[name]
}

// fieldsIn returns the named fields of a row, as its JSON has them; of an object, its own fields under their paths.
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
		spread(found, name, all[name], 2)
	}
	return found, nil
}

func spread(into map[string]any, path string, value any, levels int) {
	object, ok := value.(map[string]any)
	if !ok || levels == 0 {
		into[path] = value
		return
	}
	for key, item := range object {
		spread(into, join(path, key), item, levels-1)
	}
}
