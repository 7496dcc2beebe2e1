package models

import (
	"bytes"
	"encoding/json"
	"slices"
)

// opaqueMembers are the members of a chat completion's message that providers want back and that nobody else
// understands. Others are left out: servers refuse a history with members that they do not know.
var opaqueMembers = []string{
	"reasoning_details", "extra_content", "thinking_blocks", "provider_specific_fields",
	"thought_signature", "signature",
}

// callMembers are the members of a tool call that are understood here. All others go back.
var callMembers = []string{"index", "id", "type", "function"}

// reasoningNames are the members in which servers send what a model thinks, as text.
var reasoningNames = []string{"reasoning_content", "reasoning", "thinking"}

// gathered collects opaque members from the pieces of a stream. Its zero value is ready.
type gathered map[string]json.RawMessage

// add joins a piece to what is there. A member that comes once stays byte for byte as it came.
func (g *gathered) add(name string, piece json.RawMessage) {
	if isNull(piece) {
		return
	}
	if *g == nil {
		*g = gathered{}
	}
	if have, known := (*g)[name]; known {
		piece = joined(have, piece)
	}
	(*g)[name] = slices.Clone(piece)
}

// texts is what was gathered; nil when that is nothing.
func (g *gathered) texts() map[string]string {
	if len(*g) == 0 {
		return nil
	}
	texts := make(map[string]string, len(*g))
	for name, raw := range *g {
		texts[name] = string(raw)
	}
	return texts
}

func isNull(raw json.RawMessage) bool { return len(raw) == 0 || string(raw) == "null" }

// pieces are the members whose texts a stream sends in pieces.
var pieces = []string{"text", "summary", "data", "signature", "thinking"}

// joined is two pieces of one value: lists entry by entry where these have the same index and type, objects member
// by member, and of anything else the later.
func joined(a, b json.RawMessage) json.RawMessage {
	var lists [2][]json.RawMessage
	if json.Unmarshal(a, &lists[0]) == nil && json.Unmarshal(b, &lists[1]) == nil {
		return joinedLists(lists[0], lists[1])
	}
	var objects [2]map[string]json.RawMessage
	if json.Unmarshal(a, &objects[0]) == nil && json.Unmarshal(b, &objects[1]) == nil && objects[0] != nil {
		return joinedObjects(objects[0], objects[1])
	}
	return b
}

func joinedLists(a, b []json.RawMessage) json.RawMessage {
	for _, entry := range b {
		at := slices.IndexFunc(a, func(have json.RawMessage) bool { return continues(have, entry) })
		if at < 0 {
			a = append(a, entry)
			continue
		}
		a[at] = joined(a[at], entry)
	}
	texts := make([]string, len(a))
	for i, entry := range a {
		texts[i] = string(entry)
	}
	return json.RawMessage(list(texts))
}

// continues reports whether an entry is a further piece of another.
func continues(have, entry json.RawMessage) bool {
	type place struct {
		Index *int   `json:"index"`
		Type  string `json:"type"`
	}
	var a, b place
	if json.Unmarshal(have, &a) != nil || json.Unmarshal(entry, &b) != nil {
		return false
	}
	return a.Index != nil && b.Index != nil && *a.Index == *b.Index && a.Type == b.Type
}

func joinedObjects(a, b map[string]json.RawMessage) json.RawMessage {
	for name, value := range b {
		var old, more string
		_, known := a[name]
		switch {
		case isNull(value):
			if !known {
				a[name] = value
			}
		case slices.Contains(pieces, name) &&
			json.Unmarshal(a[name], &old) == nil && json.Unmarshal(value, &more) == nil:
			if encoded, err := encode(old + more); err == nil {
				a[name] = encoded
			}
		case known && bytes.HasPrefix(value, []byte("{")):
			a[name] = joined(a[name], value)
		default:
			a[name] = value
		}
	}
	var o object
	texts := make(map[string]string, len(a))
	for name, value := range a {
		texts[name] = string(value)
	}
	o.members(texts)
	text, err := o.end()
	if err != nil {
		return nil
	}
	return json.RawMessage(text)
}
