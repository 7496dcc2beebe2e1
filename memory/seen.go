package memory

import (
	"bytes"
	"cmp"
	"encoding/json"
)

// Name is what an entry is known by. Other rows whose revisions a run keeps have a Kind, and no category.
type Name struct {
	Kind     string `json:"kind,omitempty"`
	Category string `json:"category"`
	Key      string `json:"key"`
}

// Sight is a revision of a key that was read; [Absent]: the key was found to hold nothing.
type Sight struct {
	Name
	Revision int `json:"revision"`
}

// Seen is what a run has read. What it writes is based on that: a key that it has not read must be new.
type Seen map[Name]int

// Revision is what a [Note] about a key says: the revision that was read, or [Absent].
func (s Seen) Revision(category, key string) int {
	return cmp.Or(s[Name{Category: cmp.Or(category, defaultCategory), Key: key}], Absent)
}

// Add takes in what was read.
func (s Seen) Add(sights ...Sight) {
	for _, x := range sights {
		s[x.Name] = x.Revision
	}
}

// SightsIn are the entries in an answer that end within its first upto bytes, which is how much of it was shown. An answer is a
// JSON object that has entries in the list "memories", or one in "theirs". What is inside a value is not looked at.
func SightsIn(answer []byte, upto int) []Sight {
	var found []Sight
	for _, raw := range ShownIn(answer, upto, "memories") {
		var s Sight
		if json.Unmarshal(raw, &s) == nil && s.Key != "" {
			s.Kind = ""
			found = append(found, s)
		}
	}
	return found
}

// ShownIn are the values in an answer's list, and its "theirs", that end within the first upto bytes of the answer, a
// JSON object.
func ShownIn(answer []byte, upto int, list string) []json.RawMessage {
	var found []json.RawMessage
	decoder := json.NewDecoder(bytes.NewReader(answer))
	if token, err := decoder.Token(); err != nil || token != json.Delim('{') {
		return nil
	}
	for decoder.More() {
		name, err := decoder.Token()
		if err != nil {
			return found
		}
		switch name {
		case list:
			if token, err := decoder.Token(); err != nil || token != json.Delim('[') {
				return found
			}
			for decoder.More() {
				if !shown(decoder, upto, &found) {
					return found
				}
			}
			if _, err := decoder.Token(); err != nil {
				return found
			}
		case "theirs":
			if !shown(decoder, upto, &found) {
				return found
			}
		default:
			if !shown(decoder, 0, &found) {
				return found
			}
		}
	}
	return found
}

// shown reads one value, which was shown if it ends within upto bytes; false at the end of what can be read.
func shown(decoder *json.Decoder, upto int, found *[]json.RawMessage) bool {
	var raw json.RawMessage
	if decoder.Decode(&raw) != nil {
		return false
	}
	if decoder.InputOffset() <= int64(upto) {
		*found = append(*found, raw)
	}
	return true
}
