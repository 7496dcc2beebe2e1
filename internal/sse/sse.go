// Package sse writes server-sent events.
//
// No text can inject an event or a field into a stream that is written through this package. A client that follows the
// HTML standard gets exactly one event for each [Event], with its name, id and data:
//
//   - Each line of the data is a line of the stream. All line breaks become \n; JSON has none.
//   - A name or an id is one line. Line breaks in it become spaces. NUL, for which clients drop an id, becomes U+FFFD.
//     So do bytes that are not UTF-8, everywhere.
//   - A comment stays one, also over several lines.
package sse

import (
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// Event is one event. Without a name it is a message to clients; without an id the last id stays.
type Event struct {
	ID   string
	Name string
	Data string
	// Retry is the client's pause before it reconnects; not sent when 0.
	Retry time.Duration
}

// lineBreaks makes all line breaks \n.
var lineBreaks = strings.NewReplacer("\r\n", "\n", "\r", "\n")

// oneLine makes a field's value of a text.
var oneLine = strings.NewReplacer("\r\n", " ", "\r", " ", "\n", " ", "\x00", string(utf8.RuneError))

// Append appends the encoded event to b.
func (e Event) Append(b []byte) []byte {
	if e.Retry > 0 {
		b = field(b, "retry", strconv.FormatInt(e.Retry.Milliseconds(), 10))
	}
	if e.ID != "" {
		b = field(b, "id", oneLine.Replace(e.ID))
	}
	if e.Name != "" {
		b = field(b, "event", oneLine.Replace(e.Name))
	}
	for line := range strings.SplitSeq(lineBreaks.Replace(e.Data), "\n") {
		b = field(b, "data", line)
	}
	return append(b, '\n')
}

// Comment appends a comment to b. Clients ignore it; it keeps the connection alive.
func Comment(b []byte, text string) []byte {
	for line := range strings.SplitSeq(lineBreaks.Replace(text), "\n") {
		b = field(b, "", line)
	}
	return append(b, '\n')
}

// Retry appends to b the client's pause before it reconnects, without an event.
func Retry(b []byte, retry time.Duration) []byte {
	return append(field(b, "retry", strconv.FormatInt(retry.Milliseconds(), 10)), '\n')
}

// Open sends the headers of a stream.
func Open(w http.ResponseWriter) {
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("Cache-Control", "no-cache")
	w.Header().Set("X-Accel-Buffering", "no")
	w.WriteHeader(http.StatusOK)
}

// Send writes an encoded event and flushes it.
func Send(w http.ResponseWriter, event []byte) error {
	if _, err := w.Write(event); err != nil {
		return fmt.Errorf("send event: %w", err)
	}
	if err := http.NewResponseController(w).Flush(); err != nil {
		return fmt.Errorf("flush event: %w", err)
	}
	return nil
}

// field appends one line. The space after the colon is no part of the value.
func field(b []byte, name, value string) []byte {
	b = append(append(b, name...), ':', ' ')
	return append(append(b, strings.ToValidUTF8(value, string(utf8.RuneError))...), '\n')
}
