package engineroom

import (
	"encoding/json"
	"fmt"
	"unicode/utf8"

	"github.com/lanekeeper/lanekeeper/internal/redact"
)

const (
	// maxValue is how much of a value is read at most for a page, in characters; what is shown of it is less, so that a secret
	// at the place of the cut is seen whole and removed whole. The statements have the number too.
	maxValue = 8192
	// maxPre is how much of a value is shown, in characters.
	maxPre = 4000
)

// shownValue is a value of a row as it may be shown: without secrets, and not all of it where it is long.
type shownValue struct {
	Text  string
	Bytes int64 // of the whole
	Whole bool  // nothing was left out
}

// shownJSON makes a value of the first maxValue characters of JSON that has so many bytes in all.
func shownJSON(text string, size int64) shownValue {
	if text == "" {
		return shownValue{Whole: true}
	}
	if int64(len(text)) < size || len(text) > maxPre || !json.Valid([]byte(text)) {
		return shownText(text, size)
	}
	return shownValue{Text: setOut(string(redact.JSON(json.RawMessage(text), maxValue))), Bytes: size, Whole: true}
}

// shownText makes a value of the first maxValue characters of a text that has so many bytes in all.
func shownText(text string, size int64) shownValue {
	clean := redact.Text(text, 4*maxValue)
	whole := int64(len(text)) == size && utf8.RuneCountInString(clean) <= maxPre
	return shownValue{Text: clip(clean, size, maxPre), Bytes: size, Whole: whole}
}

// clip is at most n characters of a text that is, or was once cut from, one of so many bytes, which it says.
func clip(text string, size int64, n int) string {
	count := 0
	for i := range text {
		if count == n {
			return fmt.Sprintf("%s… (%s in all)", text[:i], bytesIn(size))
		}
		count++
	}
	if int64(len(text)) < size && count >= n {
		return fmt.Sprintf("%s… (%s in all)", text, bytesIn(size))
	}
	return text
}

// bytesIn is size, where a variable has its name.
func bytesIn(n int64) string { return size(n) }
