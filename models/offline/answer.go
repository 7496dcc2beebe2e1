package offline

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/textcut"
)

const (
	nothing        = "nothing (0 rows)"
	maxDescription = 200  // bytes of a tool's description
	maxSummary     = 5000 // bytes of a conversation's summary
)

func (t turn) wantsJSON() bool {
	return t.format != nil && t.format.Type != openai.ChatCompletionResponseFormatTypeText
}

// answer returns the final text, as JSON if the request demands JSON.
func (t turn) answer() string {
	text := cmp.Or(t.conversationSummary(), t.findings())
	if !t.wantsJSON() {
		return text
	}
	schema := map[string]any{}
	if wanted := t.format.JSONSchema; wanted != nil && wanted.Schema != nil {
		_ = json.Unmarshal([]byte(encode(wanted.Schema)), &schema) // answer ignores an unreadable schema
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
	if json.Unmarshal([]byte(t.prompt), &request) != nil || request.Before == nil {
		return ""
	}
	text := *request.Before
	for _, m := range request.Messages {
		text += "\n" + m.Role + ": " + textcut.Text(oneLine(m.Text), 200)
	}
	for len(text) > maxSummary {
		_, text, _ = strings.Cut(text, "\n")
	}
	return strings.TrimSpace(text)
}

// findings returns a text about the results, failures and records of the calls. Its first line makes sense alone.
func (t turn) findings() string {
	var succeeded, failed, recorded []string
	for _, c := range t.calls {
		switch {
		case c.failed:
			failed = append(failed, t.outcome(c))
		case listed("bookkeeping", c.name):
			recorded = append(recorded, c.name)
		case !listed("navigation", c.name):
			succeeded = append(succeeded, t.outcome(c))
		}
	}
	var first string
	lines := append(succeeded, failed...)
	switch {
	case len(lines)+len(recorded) == 0:
		return t.withoutCalls()
	case len(lines) == 0:
		first = t.summary("recorded", recorded, textcut.Text(append(factLines(t.prompt), oneLine(t.prompt))[0], 150))
	case len(lines)+len(recorded) == 1:
		first, lines = strings.TrimRight(lines[0], ".")+".", nil
	case len(succeeded) == 0:
		first = t.summary("all_failed", failed, "")
	default:
		first = t.summary("found", succeeded, textcut.Text(strings.Join(succeeded, "; "), 170))
	}
	for _, s := range t.steps {
		if s.open && !t.reported(s) {
			lines = append(lines, "not done: "+textcut.Text(s.title, 100)+" (no call of its own shows it)")
		}
	}
	return strings.Join(append([]string{first}, lines...), "\n- ")
}

// summary returns a text about some calls, in the singular or the plural.
func (t turn) summary(key string, calls []string, facts string) string {
	plural := "s"
	if len(calls) == 1 {
		plural = ""
	}
	return t.text(key, "$n", strconv.Itoa(len(calls)), "$s", plural, "$facts", facts)
}

// text returns a text of the lexicon with some values in it.
func (t turn) text(key string, values ...string) string {
	return strings.NewReplacer(values...).Replace(t.texts[key])
}

// withoutCalls answers from the message alone.
func (t turn) withoutCalls() string {
	if i := slices.IndexFunc(t.tools, func(tl tool) bool { return tl.ordered }); i >= 0 {
		return t.needs(t.tools[i])
	}
	if lines := factLines(t.prompt); len(lines) > 0 && (len(t.tools) == 0 || t.isTask()) {
		return "From what I was given: " + textcut.Text(strings.Join(lines[:min(len(lines), 3)], "; "), 400) + "."
	}
	return t.lexiconText("about")
}

// needs returns a text about the arguments that a tool requires.
func (t turn) needs(tl tool) string {
	return t.text("needs", "$tool", tl.name, "$parameters", strings.Join(required(tl.schema), ", "))
}

// lexiconText returns a text of the lexicon and fills in the offered tools.
func (t turn) lexiconText(key string) string {
	switch {
	case key == "identity" && t.identity != "":
		return t.identity
	case key != "welcome" && len(t.tools) == 0:
		key = "alone"
	}
	var names []string
	var help strings.Builder
	for _, tl := range t.tools {
		names = append(names, tl.name)
		help.WriteString("\n- " + tl.name)
		if tl.changes() {
			help.WriteString(t.texts["when_ordered"])
		}
		help.WriteString(": " + textcut.Text(oneLine(tl.description), maxDescription))
	}
	return t.text(key, "$tools", strings.Join(names, ", "), "$help", help.String())
}

// outcome describes an answered call.
func (t turn) outcome(c call) string {
	key := "did " + c.name
	switch {
	case c.pending:
		key = "pending"
	case c.failed && strings.EqualFold(plain(c.object["error"]), "denied"):
		key = "denied"
	case c.failed:
		key = "failed"
	case c.object["forgotten"] == false:
		key = "not_forgotten"
	case t.texts[key] == "":
		return c.facts()
	}
	return os.Expand(t.texts[key], func(name string) string {
		switch name {
		case "tool":
			return c.name
		case "failure":
			return c.failure()
		}
		return plain(c.object[name])
	})
}

// failure names a failed call and the reason.
func (c call) failure() string {
	text := c.result
	if c.object != nil {
		text = strings.Trim(plain(c.object["error"])+": "+plain(c.object["message"])+plain(c.object["reason"]), ": ")
	}
	return c.name + ": " + textcut.Text(oneLine(text), 160)
}

// facts quotes a result: its first rows with their figures.
func (c call) facts() string {
	row, limit := describeRow, 300
	if format := lexicon.Rows[c.name]; format != "" {
		limit = 3000
		row = func(object map[string]any) string {
			text := os.Expand(format, func(column string) string { return plain(object[column]) })
			return textcut.Text(strings.TrimSuffix(text, " ()"), 160)
		}
	}
	return c.name + ": " + textcut.Text(cmp.Or(describe(decode(c.result), row), oneLine(c.result)), limit)
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

// describeRow returns the row's names, and its first figures.
func describeRow(row map[string]any) string {
	var names, figures []string
	for _, key := range slices.Sorted(maps.Keys(row)) {
		text := textcut.Text(plain(row[key]), 160)
		_, isText := row[key].(string)
		switch {
		case text == "" || pattern("volatile").MatchString(text) || listed("technical_columns", key):
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
