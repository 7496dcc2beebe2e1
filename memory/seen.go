package memory

import (
	"bytes"
	"cmp"
	"encoding/json"
	"slices"
)

// Seen maps the names that a run has read to their revisions. A key that the run has not read must be new for its
// write.
type Seen map[Name]int

// Sight is a name that a run read, and its revision; [Absent] if there was no entry.
type Sight struct {
	Name
	Revision int `json:"revision"`
}

// Revision returns the revision for a [Note] about a key: the one that was read, or [Absent].
func (s Seen) Revision(category, key string) int {
	return cmp.Or(s[Name{Category: cmp.Or(category, defaultCategory), Key: key}], Absent)
}

// Add adds sights.
func (s Seen) Add(sights ...Sight) {
	for _, x := range sights {
		s[x.Name] = x.Revision
	}
}

// Sights returns all sights, sorted.
func (s Seen) Sights() []Sight {
	var all []Sight
	for name, revision := range s {
		all = append(all, Sight{name, revision})
	}
	slices.SortFunc(all, func(a, b Sight) int {
		return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Category, b.Category), cmp.Compare(a.Key, b.Key))
	})
	return all
}

// SightsIn returns the entries in the first upto bytes of an answer, the part that the model was shown. The answer is a
// JSON object with a list of entries, "memories", or one entry, "theirs". An entry that is cut there does not count.
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

// ShownIn returns the items of the list of that name, and the value of "theirs", that end within the answer's first
// upto bytes.
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
				if !readShown(decoder, upto, &found) {
					return found
				}
			}
			if _, err := decoder.Token(); err != nil {
				return found
			}
		case "theirs":
			if !readShown(decoder, upto, &found) {
				return found
			}
		default:
			if !readShown(decoder, 0, &found) {
				return found
			}
		}
	}
	return found
}

// readShown decodes one value and adds it to found if it ends within upto bytes. It returns false if there is no
// further value, because the answer is cut.
func readShown(decoder *json.Decoder, upto int, found *[]json.RawMessage) bool {
	var raw json.RawMessage
	if decoder.Decode(&raw) != nil {
		return false
	}
	if decoder.InputOffset() <= int64(upto) {
		*found = append(*found, raw)
	}
	return true
}
