// Package ssetest parses server-sent events like a browser, by the HTML standard, for tests of their writers.
package ssetest

import "strings"

// Event is one event as a client receives it.
type Event struct {
	ID   string // the latest id of the stream
	Name string
	Data string
}

// Stream is the parsed form of a response.
type Stream struct {
	Events   []Event
	Comments []string
	Retry    []string
	Unknown  []string // lines with an unknown field or an invalid value, which a client ignores
	Left     string   // an incomplete event at the end, which a client drops
}

// Read parses a response.
func Read(answer string) Stream {
	var s Stream
	var id, name string
	var data strings.Builder
	var begun []string
	answer = strings.TrimPrefix(answer, "\ufeff")
	answer = strings.NewReplacer("\r\n", "\n", "\r", "\n").Replace(answer)
	lines := strings.Split(answer, "\n")
	for _, line := range lines[:len(lines)-1] { // after the last break there is no line
		if line == "" {
			if data.Len() > 0 {
				s.Events = append(s.Events, Event{ID: id, Name: name, Data: strings.TrimSuffix(data.String(), "\n")})
			}
			name, begun = "", nil
			data.Reset()
			continue
		}
		field, value, _ := strings.Cut(line, ":")
		value = strings.TrimPrefix(value, " ")
		begun = append(begun, line)
		switch {
		case field == "":
			s.Comments = append(s.Comments, value)
		case field == "event":
			name = value
		case field == "data":
			data.WriteString(value + "\n")
		case field == "id" && !strings.Contains(value, "\x00"):
			id = value
		case field == "retry" && value != "" && strings.Trim(value, "0123456789") == "":
			s.Retry = append(s.Retry, value)
		default:
			s.Unknown = append(s.Unknown, line)
		}
	}
	s.Left = strings.Join(append(begun, lines[len(lines)-1]), "\n")
	return s
}
