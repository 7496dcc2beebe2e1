package models

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// callAssembler assembles tool calls from their deltas. Its zero value is ready.
type callAssembler struct {
	list []*partialCall
}

// partialCall is a call whose deltas are still arriving.
type partialCall struct {
	index     int // -1 if the server sends none
	id, name  string
	arguments strings.Builder
	opaque    opaqueFields
}

// add adds a delta to its call, or starts a call.
func (c *callAssembler) add(f callDelta) {
	call := c.callOf(f)
	if call == nil {
		call = &partialCall{index: -1, id: f.ID, name: f.Function.Name}
		if f.Index != nil {
			call.index = *f.Index
		}
		c.list = append(c.list, call)
	} else if call.name == "" {
		call.name = f.Function.Name
	}
	call.id = cmp.Or(call.id, f.ID)
	call.arguments.WriteString(string(f.Function.Arguments))
	for name, piece := range f.opaque {
		call.opaque.add(name, piece)
	}
}

// callOf returns the call that f continues; nil if f starts a call. The index decides; without an index, the id
// decides. Without both, a name starts a call, and any other callDelta belongs to the last call.
func (c *callAssembler) callOf(f callDelta) *partialCall {
	for _, call := range slices.Backward(c.list) {
		switch {
		case f.Index != nil && call.index == *f.Index:
			if call.startsNew(f) {
				return nil
			}
			return call
		case f.Index == nil && f.ID != "" && call.id == f.ID:
			return call
		}
	}
	if f.Index == nil && f.Function.Name == "" && len(c.list) > 0 {
		return c.list[len(c.list)-1]
	}
	return nil
}

// startsNew reports whether f starts a new call under the same index. Servers that send whole calls may give each the
// index 0. Others repeat the name in every callDelta.
func (call *partialCall) startsNew(f callDelta) bool {
	if f.Function.Name == "" || call.name == "" {
		return false
	}
	if f.ID != "" {
		return f.ID != call.id
	}
	return f.Function.Name != call.name || json.Valid([]byte(call.arguments.String()))
}

// finish returns the calls by index, or in their order without an index. Every call has a unique id. A hash of the
// request and the position replaces a missing or repeated id, so equal answers have equal ids. finish drops a call
// without arguments from a truncated answer, because the cut lost them.
func (c *callAssembler) finish(req Request, origin string, cut bool) []ToolCall {
	var out []ToolCall
	seen := map[string]bool{}
	slices.SortStableFunc(c.list, func(a, b *partialCall) int { return cmp.Compare(a.index, b.index) })
	for place, call := range c.list {
		if call.arguments.Len() == 0 && (cut || call.name == "") {
			continue
		}
		if call.id == "" || seen[call.id] {
			call.id = derivedID(req, place, call.name)
		}
		seen[call.id] = true
		toolCall := ToolCall{
			ID:        call.id,
			Name:      cmp.Or(call.name, "unnamed"), // no tool has this name; servers reject an empty name in a history
			Arguments: cmp.Or(call.arguments.String(), "{}"),
		}
		if members := call.opaque.texts(); members != nil {
			toolCall.Opaque = &Opaque{Origin: origin, Digest: toolCall.digest(), Members: members}
		}
		out = append(out, toolCall)
	}
	return out
}

// derivedID has the form of a server's id.
func derivedID(req Request, place int, name string) string {
	hash := sha256.New()
	for _, v := range []any{req.Model, req.Messages, req.IdempotencyKey, place, name} {
		encoded, err := json.Marshal(v)
		if err != nil {
			encoded = fmt.Appendf(nil, "%v", v) // a message that does not encode was never sent
		}
		hash.Write(append(encoded, '\n'))
	}
	return "call_" + hex.EncodeToString(hash.Sum(nil))[:24]
}

// callDelta is a part of a tool call, or a whole call.
type callDelta struct {
	Index    *int   `json:"index"`
	ID       string `json:"id"`
	Function struct {
		Name      string    `json:"name"`
		Arguments arguments `json:"arguments"`
	} `json:"function"`

	opaque map[string]json.RawMessage
}

func (f *callDelta) UnmarshalJSON(raw []byte) error {
	type plain callDelta
	if err := json.Unmarshal(raw, (*plain)(f)); err != nil {
		return err
	}
	if err := json.Unmarshal(raw, &f.opaque); err != nil {
		return err
	}
	maps.DeleteFunc(f.opaque, func(name string, _ json.RawMessage) bool { return slices.Contains(callMembers, name) })
	return nil
}

// callMembers are the known fields of a tool call. The client sends all other fields back.
var callMembers = []string{"index", "id", "type", "function"}

// arguments are a text that should be JSON. Some servers send the JSON itself.
type arguments string

func (a *arguments) UnmarshalJSON(raw []byte) error {
	if bytes.HasPrefix(raw, []byte(`"`)) || string(raw) == "null" {
		return json.Unmarshal(raw, (*string)(a))
	}
	*a = arguments(raw)
	return nil
}
