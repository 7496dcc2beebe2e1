package engineroom

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/aymanbagabas/go-udiff"

	"github.com/lanekeeper/lanekeeper/internal/human"
	"github.com/lanekeeper/lanekeeper/internal/redact"
)

// shownValue is a redacted and cut value.
type shownValue struct {
	Text  string
	Bytes int64 // size of the whole value
	Whole bool  // Text is the whole value
}

const (
	// maxValue bounds the characters that a query reads of a value. It exceeds maxShownText, so that redaction sees the
	// rest of a secret at the end of the shown part. The statements repeat the number as a literal.
	maxValue = 8192
	// maxShownText bounds the shown characters of a value.
	maxShownText = 4000
)

// shownJSON formats the first maxValue characters of JSON of a given size.
func shownJSON(text string, size int64) shownValue {
	if text == "" {
		return shownValue{Whole: true}
	}
	if int64(len(text)) < size || len(text) > maxShownText || !json.Valid([]byte(text)) {
		return shownText(text, size)
	}
	return shownValue{Text: formatJSON(string(redact.JSON(json.RawMessage(text), maxValue))), Bytes: size, Whole: true}
}

// shownText formats the first maxValue characters of a text of a given size.
func shownText(text string, size int64) shownValue {
	clean := redact.Text(text, 4*maxValue)
	whole := int64(len(text)) == size && utf8.RuneCountInString(clean) <= maxShownText
	return shownValue{Text: clip(clean, size, maxShownText), Bytes: size, Whole: whole}
}

// clip returns at most n characters of a text. If the text or its original of a given size is longer, clip appends the
// size. A text of less than n characters counts as complete, even if redaction has made it shorter than its original.
func clip(text string, size int64, n int) string {
	count := 0
	for i := range text {
		if count == n {
			return fmt.Sprintf("%s… (%s in all)", text[:i], human.Bytes(size))
		}
		count++
	}
	if int64(len(text)) < size && count >= n {
		return fmt.Sprintf("%s… (%s in all)", text, human.Bytes(size))
	}
	return text
}

// formatJSON formats JSON with sorted keys, which is the hashed order, and unchanged numbers. Deeply nested or invalid
// JSON stays unchanged.
func formatJSON(text string) string {
	if jsonDepth(text) > maxJSONDepth {
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

// maxJSONDepth bounds the nesting of formatted JSON.
const maxJSONDepth = 60

// jsonDepth returns the nesting of JSON.
func jsonDepth(text string) int {
	current, deepest, inText := 0, 0, false
	for i := 0; i < len(text); i++ {
		switch c := text[i]; {
		case inText && c == '\\':
			i++
		case c == '"':
			inText = !inText
		case inText:
		case c == '{' || c == '[':
			current++
			deepest = max(deepest, current)
		case c == '}' || c == ']':
			current--
		}
	}
	return deepest
}

// diffLine is a line of a comparison. Sign is + for a new line, − for a removed line, a space for a kept line, and …
// for omitted kept lines.
type diffLine struct{ Sign, Text string }

// Gone reports a removed line.
func (l diffLine) Gone() bool { return l.Sign == "−" }

// New reports a new line.
func (l diffLine) New() bool { return l.Sign == "+" }

// maxDiffLines bounds the lines of both compared texts together.
const maxDiffLines = 20_000

// compare returns the differences of two texts; nil for equal texts. ok is false for too many lines.
func compare(before, after string) ([]diffLine, bool) {
	if strings.Count(before, "\n")+strings.Count(after, "\n") > maxDiffLines {
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
