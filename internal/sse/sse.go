// Package sse writes server-sent events.
//
// Everything that streams to a browser or another client writes through here, so that one place knows what could make
// of an event two, or of text a field. A client that reads as the HTML standard says gets, for each event, exactly
// one with its name, id and data:
//
//   - Each line of the data is a line of the stream. Line breaks come out as \n, whichever they were: JSON has none.
//   - A name or an id is one line: line breaks in it become spaces, and NUL, for which clients drop an id, the sign
//     for a character that is none. So do bytes that are not UTF-8, everywhere.
//   - A comment stays one, also over several lines.
package sse

import (
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// Event is one event. Without a name a client takes it for a message; without an id the last one stays.
type Event struct {
	ID   string
	Name string
	Data string
	// Retry is after how long a client shall come back when the stream breaks; not said when it is 0.
	Retry time.Duration
}

// lineBreaks are those that end a line of a stream, as one kind.
var lineBreaks = strings.NewReplacer("\r\n", "\n", "\r", "\n")

// oneLine makes a field's value of what may have several lines.
var oneLine = strings.NewReplacer("\r\n", " ", "\r", " ", "\n", " ", "\x00", string(utf8.RuneError))

// Append adds the event to b as it is sent.
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

// Comment adds to b what a client passes over, a sign of life.
func Comment(b []byte, text string) []byte {
	for line := range strings.SplitSeq(lineBreaks.Replace(text), "\n") {
		b = field(b, "", line)
	}
	return append(b, '\n')
}

// Again adds to b when a client shall come back, without an event.
func Again(b []byte, retry time.Duration) []byte {
	return append(field(b, "retry", strconv.FormatInt(retry.Milliseconds(), 10)), '\n')
}

// field adds one line. The space after the colon is no part of the value.
func field(b []byte, name, value string) []byte {
	b = append(append(b, name...), ':', ' ')
	return append(append(b, strings.ToValidUTF8(value, string(utf8.RuneError))...), '\n')
}
