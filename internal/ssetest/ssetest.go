// Package ssetest reads server-sent events as the HTML standard tells a browser to, for tests of what writes them.
package ssetest

import "strings"

// Event is one event as a client gets it.
type Event struct {
	ID   string // the last one that was given
	Name string
	Data string
}

// Stream is what a client makes of an answer.
type Stream struct {
	Events   []Event
	Comments []string
	Retry    []string
	Unknown  []string // lines that a client passes over because it knows no such field, or cannot use its value
	Left     string   // an event that was begun and not ended, which a client drops
}

// Read takes an answer apart.
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
