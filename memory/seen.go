package memory

import (
	"bytes"
	"cmp"
	"encoding/json"
)

// Name is what an entry is known by.
type Name struct {
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
	return cmp.Or(s[Name{cmp.Or(category, defaultCategory), key}], Absent)
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
		case "memories":
			if token, err := decoder.Token(); err != nil || token != json.Delim('[') {
				return found
			}
			for decoder.More() {
				if !sight(decoder, upto, &found) {
					return found
				}
			}
			if _, err := decoder.Token(); err != nil {
				return found
			}
		case "theirs":
			if !sight(decoder, upto, &found) {
				return found
			}
		default:
			if !sight(decoder, 0, &found) {
				return found
			}
		}
	}
	return found
}

// sight reads one value, an entry that was read if it ends within upto bytes; false at the end of what can be read.
func sight(decoder *json.Decoder, upto int, found *[]Sight) bool {
	var raw json.RawMessage
	if decoder.Decode(&raw) != nil {
		return false
	}
	var s Sight
	if decoder.InputOffset() <= int64(upto) && json.Unmarshal(raw, &s) == nil && s.Key != "" {
		*found = append(*found, s)
	}
	return true
}
