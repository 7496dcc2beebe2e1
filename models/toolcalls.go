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

// callDelta is a part of a tool call, or a whole call.
type callDelta struct {
	Index    *int   `json:"index"`
	ID       string `json:"id"`
	Function struct {
		Name      string    `json:"name"`
		Arguments arguments `json:"arguments"`
	} `json:"function"`

	opaque map[string]json.RawMessage // the other fields
}

// callAssembler assembles tool calls from their deltas. Its zero value is ready.
type callAssembler struct {
	calls []*partialCall
}

// partialCall is a call whose deltas are still arriving.
type partialCall struct {
	index     int // -1 if the server sends none
	id, name  string
	arguments strings.Builder
	opaque    opaqueFields
}

// add adds a delta to its call, or starts a call.
func (c *callAssembler) add(delta callDelta) {
	call := c.find(delta)
	if call == nil {
		call = &partialCall{index: -1, name: delta.Function.Name}
		if delta.Index != nil {
			call.index = *delta.Index
		}
		c.calls = append(c.calls, call)
	} else if call.name == "" {
		call.name = delta.Function.Name
	}
	call.id = cmp.Or(call.id, delta.ID)
	call.arguments.WriteString(string(delta.Function.Arguments))
	for name, piece := range delta.opaque {
		call.opaque.add(name, piece)
	}
}

// find returns the call that a delta continues; nil if the delta starts a call. A delta with an index continues the
// newest call with that index, unless startsNew. A delta without an index continues the newest call with its id. If
// no call has its id, a delta with a name starts a call, and a delta without a name continues the last call.
func (c *callAssembler) find(delta callDelta) *partialCall {
	for _, call := range slices.Backward(c.calls) {
		switch {
		case delta.Index != nil && call.index == *delta.Index:
			if call.startsNew(delta) {
				return nil
			}
			return call
		case delta.Index == nil && delta.ID != "" && call.id == delta.ID:
			return call
		}
	}
	if delta.Index == nil && delta.Function.Name == "" && len(c.calls) > 0 {
		return c.calls[len(c.calls)-1]
	}
	return nil
}

// startsNew reports whether a delta starts a new call under the same index. Servers that send whole calls may give each
// the index 0. Others repeat the name in every delta, and may send the id late.
func (call *partialCall) startsNew(delta callDelta) bool {
	if delta.Function.Name == "" || call.name == "" {
		return false
	}
	if delta.ID != "" && call.id != "" {
		return delta.ID != call.id
	}
	// After complete arguments, a repeated name starts the next call.
	return delta.Function.Name != call.name || json.Valid([]byte(call.arguments.String()))
}

// finish sorts the calls by index and returns them with unique ids. It derives a missing or repeated id from the
// request and the position, so a repeated request yields the same ids. It drops a call without arguments from a
// truncated answer, because the server may not have sent them, and a call without both name and arguments.
func (c *callAssembler) finish(req Request, origin string, truncated bool) []ToolCall {
	var out []ToolCall
	seen := map[string]bool{}
	slices.SortStableFunc(c.calls, func(a, b *partialCall) int { return cmp.Compare(a.index, b.index) })
	for position, call := range c.calls {
		if call.arguments.Len() == 0 && (truncated || call.name == "") {
			continue
		}
		if call.id == "" || seen[call.id] {
			call.id = derivedID(req, position, call.name)
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

// derivedID returns the id of a call at a position of the answer to a request. It has the form of a server's id.
func derivedID(req Request, position int, name string) string {
	hash := sha256.New()
	for _, v := range []any{req.Model, req.Messages, req.IdempotencyKey, position, name} {
		encoded, err := json.Marshal(v)
		if err != nil {
			encoded = fmt.Appendf(nil, "%v", v) // a message that does not encode was never sent
		}
		hash.Write(append(encoded, '\n'))
	}
	return "call_" + hex.EncodeToString(hash.Sum(nil))[:24]
}

func (d *callDelta) UnmarshalJSON(raw []byte) error {
	type withoutMethods callDelta
	if err := json.Unmarshal(raw, (*withoutMethods)(d)); err != nil {
		return err
	}
	if err := json.Unmarshal(raw, &d.opaque); err != nil {
		return err
	}
	maps.DeleteFunc(d.opaque, func(name string, _ json.RawMessage) bool { return slices.Contains(callFields, name) })
	return nil
}

// callFields are the known fields of a tool call. The client sends all other fields back.
var callFields = []string{"index", "id", "type", "function"}

// arguments is JSON, encoded as a string. Some servers send the bare JSON value.
type arguments string

func (a *arguments) UnmarshalJSON(raw []byte) error {
	if bytes.HasPrefix(raw, []byte(`"`)) || string(raw) == "null" {
		return json.Unmarshal(raw, (*string)(a))
	}
	*a = arguments(raw)
	return nil
}
