package engineroom

import (
	"bytes"
	"encoding/json"
	"strings"

	"github.com/aymanbagabas/go-udiff"
)

// deepest is how deep JSON may nest to be set out in lines: each level is an indent of each line in it.
const deepest = 60

// mostLines is how many lines are compared.
const mostLines = 20_000

// setOut is JSON in lines, the keys of objects sorted, which is the order that is hashed. Numbers stay as they are
// written. What nests too deep, or is no JSON, stays as it is.
func setOut(text string) string {
	if depth(text) > deepest {
		return text
	}
	decoder := json.NewDecoder(strings.NewReader(text))
	decoder.UseNumber()
	var value any
	if err := decoder.Decode(&value); err != nil || decoder.More() {
		return text
	}
	var b bytes.Buffer
	encoder := json.NewEncoder(&b)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent("", "  ")
	if err := encoder.Encode(value); err != nil {
		return text
	}
	return strings.TrimSuffix(b.String(), "\n")
}

// depth is how deep JSON nests.
func depth(text string) int {
	now, most, inText := 0, 0, false
	for i := 0; i < len(text); i++ {
		switch c := text[i]; {
		case inText && c == '\\':
			i++
		case c == '"':
			inText = !inText
		case inText:
		case c == '{' || c == '[':
			now++
			most = max(most, now)
		case c == '}' || c == ']':
			now--
		}
	}
	return most
}

// diffLine is a line of a comparison. Sign is + for a new one, − for one that is gone, a space for one that stayed, and
// … where lines that stayed are left out.
type diffLine struct{ Sign, Text string }

// Gone and New tell the kinds apart in a template.
func (l diffLine) Gone() bool { return l.Sign == "−" }

// New reports a line that was not there before.
func (l diffLine) New() bool { return l.Sign == "+" }

// compare is what became of the lines of before; nothing when they are the same. False when there are too many.
func compare(before, after string) ([]diffLine, bool) {
	if strings.Count(before, "\n")+strings.Count(after, "\n") > mostLines {
		return nil, false
	}
	before, after = before+"\n", after+"\n"
	hunks, err := udiff.ToUnifiedDiff("", "", before, udiff.Lines(before, after), 3)
	if err != nil {
		return nil, false
	}
	signs := map[udiff.OpKind]string{udiff.Delete: "−", udiff.Insert: "+", udiff.Equal: " "}
	var lines []diffLine
	for i, h := range hunks.Hunks {
		if i > 0 || h.FromLine > 1 {
			lines = append(lines, diffLine{"…", ""})
		}
		for _, l := range h.Lines {
			lines = append(lines, diffLine{signs[l.Kind], strings.TrimSuffix(l.Content, "\n")})
		}
	}
	return lines, true
}
