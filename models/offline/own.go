package offline

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
)

const (
	ownShown   = 10  // entries of an own skill's answer that are told
	namesShown = 50  // or their names
	maxEntry   = 160 // bytes of each
)

// isPlumbing knows the tools that only lead to other tools, or to the rest of a result.
func isPlumbing(name string) bool { return name == "skill_search" || name == "read_result" }

// own tells what one of the runtime's own skills has answered, whose figures are not what matters.
func (c call) own() (text string, ok bool) {
	object, _ := mustDecode(c.result).(map[string]any)
	switch c.name {
	case "recent_activity":
		return activities(object["activities"])
	case "recall", "memory_search":
		return listed(object["memories"], ownShown, func(m map[string]any) string { return plain(m["key"]) + ": " + plain(m["value"]) })
	case "objectives_list":
		return listed(object["objectives"], ownShown, objectiveLine)
	case "skill_list":
		return listed(object["skills"], namesShown, skillLine)
	case "delegate":
		return plain(object["answer"]), object["answer"] != nil
	case "objective_propose", "automation_propose":
		return strings.TrimSpace(plain(object["objective"])+plain(object["automation"])+", ") + " " + plain(object["note"]), object["note"] != nil
	}
	return "", false
}

// listed puts a list into a line.
func listed(list any, most int, line func(map[string]any) string) (string, bool) {
	rows, isList := list.([]any)
	if !isList {
		return "", false
	}
	if len(rows) == 0 {
		return nothing, true
	}
	var parts []string
	for _, row := range rows[:min(len(rows), most)] {
		if object, ok := row.(map[string]any); ok {
			parts = append(parts, clip(line(object), maxEntry))
		}
	}
	if left := len(rows) - most; left > 0 {
		parts = append(parts, fmt.Sprintf("and %d more", left))
	}
	return strings.Join(parts, "; "), true
}

// activities counts what was done, the newest first, each with the time when it was last done. This very look is left out.
func activities(list any) (string, bool) {
	rows, isList := list.([]any)
	var lines, times []string
	count := map[string]int{}
	for _, row := range rows {
		a, _ := row.(map[string]any)
		line := activityLine(a)
		if line == "" || line == "recent_activity running" {
			continue
		}
		if count[line]++; count[line] == 1 {
			lines, times = append(lines, line), append(times, minute(plain(a["time"])))
		}
	}
	if len(lines) == 0 {
		return nothing, isList
	}
	parts := make([]any, len(lines))
	for i, line := range lines {
		if n := count[line]; n > 1 {
			line = fmt.Sprintf("%d × %s", n, line)
		}
		parts[i] = map[string]any{"line": strings.TrimSpace(times[i] + " " + line)}
	}
	return listed(parts, 2*ownShown, func(m map[string]any) string { return plain(m["line"]) })
}

func activityLine(a map[string]any) string {
	text := strings.TrimSpace(plain(a["skill"]) + " " + plain(a["status"]))
	if why := plain(a["error"]); why != "" {
		text += " (" + why + ")"
	}
	return text
}

// minute is a time without its seconds.
func minute(t string) string {
	if len(t) < len("2006-01-02T15:04") {
		return t
	}
	return t[:len("2006-01-02")] + " " + t[len("2006-01-02T"):len("2006-01-02T15:04")]
}

func objectiveLine(o map[string]any) string {
	total := int64(0)
	for _, key := range []string{"done", "failed", "pending"} {
		if n, ok := o[key].(json.Number); ok {
			count, err := n.Int64()
			if err == nil {
				total += count
			}
		}
	}
	text := fmt.Sprintf("%s (%s): %s of %d steps done", plain(o["name"]), plain(o["status"]), plain(o["done"]), total)
	if round := plain(o["round"]); round != "" && round != "1" {
		text += ", round " + round
	}
	if note := plain(o["note"]); note != "" {
		text += ", " + note
	}
	return text
}

func skillLine(s map[string]any) string {
	if s["enabled"] == false {
		return plain(s["name"]) + " (disabled)"
	}
	return plain(s["name"])
}

// line is what is said of a call that succeeded.
func (c call) line(p phrases) string {
	object, _ := mustDecode(c.result).(map[string]any)
	category, key := plain(object["category"]), plain(object["key"])
	switch {
	case c.name == "memory_write" && key != "":
		return strings.TrimSuffix(fmt.Sprintf(p.kept, category, key), ".")
	case c.name == "memory_forget" && key != "" && object["forgotten"] == true:
		return strings.TrimSuffix(fmt.Sprintf(p.forgotten, category, key), ".")
	case c.name == "memory_forget" && key != "":
		return strings.TrimSuffix(fmt.Sprintf(p.notKept, category, key), ".")
	}
	text := c.facts()
	if c.cut != "" {
		text += fmt.Sprintf(p.cut, strings.Replace(c.cut, "/", p.of, 1))
	}
	return text
}

// trouble says honestly what has become of a call that did not succeed.
func (c call) trouble(p phrases) string {
	object, _ := mustDecode(c.result).(map[string]any)
	switch {
	case c.pending:
		return fmt.Sprintf(p.waits, c.name, plain(object["approval_id"]))
	case slices.Contains([]string{"DENIED", "denied"}, plain(object["error"])):
		return fmt.Sprintf(p.denial, c.name, plain(object["reason"])+plain(object["message"]))
	}
	return fmt.Sprintf(p.failure, c.failure())
}

// rowsOf reads the whole rows of a result that was cut.
func rowsOf(result string) []any {
	start := strings.IndexByte(result, '[')
	if start < 0 {
		return nil
	}
	d := json.NewDecoder(strings.NewReader(result[start:]))
	d.UseNumber()
	if _, err := d.Token(); err != nil {
		return nil
	}
	var rows []any
	for {
		var row any
		if err := d.Decode(&row); err != nil {
			return rows // where it was cut
		}
		rows = append(rows, row)
	}
}
