package models

import (
	"bytes"
	"encoding/json"
	"maps"
	"slices"
	"strings"

	"github.com/lanekeeper/lanekeeper/internal/exactjson"
)

// object writes the members of a JSON object in order, unchanged.
type object struct {
	names []string
	texts map[string]string
	err   error
}

// set adds a member.
func (o *object) set(name string, value any) {
	encoded, err := exactjson.Encode(value)
	if err != nil && o.err == nil {
		o.err = err
	}
	o.raw(name, string(encoded))
}

// raw adds or replaces a member that is JSON already.
func (o *object) raw(name, text string) {
	if o.texts == nil {
		o.texts = map[string]string{}
	}
	if _, known := o.texts[name]; !known {
		o.names = append(o.names, name)
	}
	o.texts[name] = text
}

// members adds members that are JSON already, by name.
func (o *object) members(texts map[string]string) {
	for _, name := range slices.Sorted(maps.Keys(texts)) {
		o.raw(name, texts[name])
	}
}

// merge merges another object. It merges member objects by member; any other value replaces the present value. A null
// removes a member.
func (o *object) merge(extra map[string]json.RawMessage) {
	for _, name := range slices.Sorted(maps.Keys(extra)) {
		value := extra[name]
		var present, members map[string]json.RawMessage
		switch {
		case isNull(value):
			delete(o.texts, name)
			o.names = slices.DeleteFunc(o.names, func(n string) bool { return n == name })
		case json.Unmarshal([]byte(o.texts[name]), &present) == nil && present != nil &&
			json.Unmarshal(value, &members) == nil && members != nil:
			var inner object
			for _, n := range slices.Sorted(maps.Keys(present)) {
				inner.raw(n, string(present[n]))
			}
			inner.merge(members)
			text, err := inner.end()
			if err != nil && o.err == nil {
				o.err = err
			}
			o.raw(name, text)
		default:
			o.raw(name, string(value))
		}
	}
}

func (o *object) end() (string, error) {
	var out bytes.Buffer
	out.WriteByte('{')
	for i, name := range o.names {
		if i > 0 {
			out.WriteByte(',')
		}
		encoded, err := exactjson.Encode(name)
		if err != nil && o.err == nil {
			o.err = err
		}
		out.Write(encoded)
		out.WriteByte(':')
		out.WriteString(o.texts[name])
	}
	out.WriteByte('}')
	return out.String(), o.err
}

// list returns a JSON array of JSON texts.
func list(texts []string) string { return "[" + strings.Join(texts, ",") + "]" }
