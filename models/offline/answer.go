package offline

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"

	openai "github.com/sashabaranov/go-openai"
)

const (
	nothing        = "nothing (0 rows)"
	maxDescription = 200  // bytes of a tool's description
	maxSummary     = 5000 // bytes of a conversation's summary
)

func (t turn) wantsJSON() bool {
	return t.format != nil && t.format.Type != openai.ChatCompletionResponseFormatTypeText
}

// answer returns the final text, as JSON where the request wants that.
func (t turn) answer() string {
	text := cmp.Or(t.conversationSummary(), t.findings())
	if !t.wantsJSON() {
		return text
	}
	schema := map[string]any{}
	if t.format.JSONSchema != nil && t.format.JSONSchema.Schema != nil {
		if raw, err := t.format.JSONSchema.Schema.MarshalJSON(); err == nil {
			_ = json.Unmarshal(raw, &schema) // an unreadable schema binds nobody
		}
	}
	if len(schema) == 0 {
		return encode(map[string]any{"summary": text})
	}
	f := filler{turn: t, text: text}
	return encode(f.value("summary", schema))
}

// conversationSummary answers the runtime's request to summarize a conversation with the beginnings of its newest
// messages.
func (t turn) conversationSummary() string {
	var request struct {
		Before   *string `json:"summary_so_far"`
		Messages []struct{ Role, Text string }
	}
	if !strings.HasPrefix(t.prompt, "{") || json.Unmarshal([]byte(t.prompt), &request) != nil || request.Before == nil {
		return ""
	}
	lines := strings.Split(*request.Before, "\n")
	for _, m := range request.Messages {
		lines = append(lines, m.Role+": "+truncate(oneLine(m.Text), 200))
	}
	for len(strings.Join(lines, "\n")) > maxSummary {
		lines = lines[1:]
	}
	return strings.TrimSpace(strings.Join(lines, "\n"))
}

// findings says what the calls found, what failed and what was recorded. The first line stands alone.
func (t turn) findings() string {
	var found, failed, recorded []string
	for _, c := range t.calls {
		switch {
		case c.failed:
			failed = append(failed, t.failure(c))
		case bookkeeping.MatchString(c.name):
			recorded = append(recorded, c.name)
		case !navigation.MatchString(c.name):
			found = append(found, t.finding(c))
		}
	}
	var first string
	lines := append(found, failed...)
	switch {
	case len(lines)+len(recorded) == 0:
		return t.withoutCalls()
	case len(lines) == 0:
		first = fmt.Sprintf(t.texts["recorded"], t.count(len(recorded), "item"),
			truncate(append(factLines(t.prompt), oneLine(t.prompt))[0], 150))
	case len(lines)+len(recorded) == 1:
		first, lines = strings.TrimRight(lines[0], ".")+".", nil
	case len(found) == 0:
		first = fmt.Sprintf(t.texts["all_failed"], t.count(len(failed), "call"))
	default:
		first = fmt.Sprintf(t.texts["found"], t.count(len(found), "call"), truncate(strings.Join(found, "; "), 170))
	}
	for _, s := range t.steps {
		if s.open && !t.reported(s) {
			lines = append(lines, "not done: "+truncate(s.title, 100)+" (no call of its own shows it)")
		}
	}
	return strings.Join(append([]string{first}, lines...), "\n- ")
}

func (t turn) count(n int, noun string) string {
	if n != 1 {
		noun += "s"
	}
	return fmt.Sprintf("%d %s", n, t.texts[noun])
}

// withoutCalls answers from the message alone.
func (t turn) withoutCalls() string {
	for _, tl := range t.tools {
		if _, ordered := t.ordered(tl.name); ordered {
			return t.needs(tl)
		}
	}
	if lines := factLines(t.prompt); len(lines) > 0 && (len(t.tools) == 0 || t.isTask()) {
		return "From what I was given: " + truncate(strings.Join(lines[:min(len(lines), 3)], "; "), 400) + "."
	}
	return t.fixedText("")
}

func (t turn) needs(tl tool) string {
	return fmt.Sprintf(t.texts["needs"], tl.name, strings.Join(required(tl.schema), ", "))
}

// fixedText returns a text of the lexicon, followed by the tools where it introduces the model.
func (t turn) fixedText(key string) string {
	var names, descriptions []string
	for _, tl := range t.tools {
		line := tl.name
		if tl.changes() {
			line += t.texts["when_ordered"]
		}
		names, descriptions = append(names, tl.name),
			append(descriptions, line+": "+truncate(oneLine(tl.description), maxDescription))
	}
	switch {
	case key == "identity" && t.identity != "":
		return t.identity
	case key == "welcome":
		return t.texts[key]
	case len(names) == 0:
		return t.texts["about"] + t.texts["none"]
	case key == "help":
		return strings.Join(append([]string{t.texts[key]}, descriptions...), "\n- ") + "\n" + t.texts["hint"]
	}
	return t.texts[key] + t.texts["about"] + fmt.Sprintf(t.texts["may"], strings.Join(names, ", "))
}

// finding describes a call that succeeded.
func (t turn) finding(c call) string {
	key := map[string]string{"memory_write": "remembered", "memory_forget": "forgotten"}[c.name]
	if c.object["forgotten"] == false {
		key = "not_forgotten"
	}
	if text := t.texts[key]; text != "" {
		return fmt.Sprintf(text, plain(c.object["category"]), plain(c.object["key"]))
	}
	return c.facts()
}

// failure describes a call that did not succeed.
func (t turn) failure(c call) string {
	switch {
	case c.pending:
		return fmt.Sprintf(t.texts["pending"], c.name, plain(c.object["approval_id"]))
	case strings.EqualFold(plain(c.object["error"]), "denied"):
		return fmt.Sprintf(t.texts["denied"], c.name, plain(c.object["reason"])+plain(c.object["message"]))
	}
	return fmt.Sprintf(t.texts["failed"], c.failure())
}

// failure names a failed call and the reason.
func (c call) failure() string {
	text := c.result
	if c.object != nil {
		text = strings.Trim(plain(c.object["error"])+": "+plain(c.object["message"])+plain(c.object["reason"]), ": ")
	}
	return c.name + ": " + truncate(oneLine(text), 160)
}

// facts quotes a result: its first rows with their figures.
func (c call) facts() string {
	row, limit := describeRow, 300
	if format := lexicon.Rows[c.name]; format != "" {
		limit = 3000
		row = func(object map[string]any) string {
			text := os.Expand(format, func(column string) string { return plain(object[column]) })
			return truncate(strings.TrimSuffix(text, " ()"), 160)
		}
	}
	return c.name + ": " + truncate(cmp.Or(describe(decode(c.result), row), oneLine(c.result)), limit)
}

// describe puts a value into a line. It counts equal rows and shows the first ten others.
func describe(v any, row func(map[string]any) string) string {
	rows, isList := v.([]any)
	object, _ := v.(map[string]any)
	for _, key := range slices.Sorted(maps.Keys(object)) {
		if list, has := object[key].([]any); has && !isList {
			rows, isList = list, true
		}
	}
	switch {
	case !isList && object != nil:
		return row(object)
	case !isList:
		return plain(v)
	case len(rows) == 0:
		return nothing
	}
	var lines []string
	times := map[string]int{}
	for _, item := range rows {
		line := describe(item, row)
		if times[line]++; times[line] == 1 {
			lines = append(lines, line)
		}
	}
	for i, line := range lines {
		if times[line] > 1 {
			lines[i] = fmt.Sprintf("%d × %s", times[line], line)
		}
	}
	if len(lines) > 10 {
		lines = append(lines[:10], fmt.Sprintf("and %d more", len(lines)-10))
	}
	return strings.Join(lines, ", ")
}

// volatile matches times and UUIDs.
var volatile = regexp.MustCompile(`^\d{4}-\d\d-\d\d[T ]|^[0-9a-f]{8}-[0-9a-f]{4}-`)

// describeRow returns the row's names, and its first figures.
func describeRow(row map[string]any) string {
	var names, figures []string
	for _, key := range slices.Sorted(maps.Keys(row)) {
		text := truncate(plain(row[key]), 160)
		_, isText := row[key].(string)
		switch {
		case text == "" || volatile.MatchString(text) || listed("technical_columns", key):
		case isText && !hasDigit(text) || listed("name_columns", key):
			names = append(names, text)
		case len(figures) < 3:
			figures = append(figures, key+" "+text)
		}
	}
	return strings.Join(append(names, figures...), " ")
}

// plain returns a scalar as text, and other values as JSON.
func plain(v any) string {
	switch v := v.(type) {
	case nil:
		return ""
	case string:
		return oneLine(v)
	}
	return encode(v)
}

func oneLine(text string) string { return strings.Join(strings.Fields(text), " ") }
