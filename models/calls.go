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

// fragment is a tool call, or a part of one.
type fragment struct {
	Index    *int   `json:"index"`
	ID       string `json:"id"`
	Function struct {
		Name      string    `json:"name"`
		Arguments arguments `json:"arguments"`
	} `json:"function"`

	opaque map[string]json.RawMessage
}

func (f *fragment) UnmarshalJSON(raw []byte) error {
	type plain fragment
	if err := json.Unmarshal(raw, (*plain)(f)); err != nil {
		return err
	}
	if err := json.Unmarshal(raw, &f.opaque); err != nil {
		return err
	}
	maps.DeleteFunc(f.opaque, func(name string, _ json.RawMessage) bool { return slices.Contains(callMembers, name) })
	return nil
}

// arguments are text that should be JSON. Some servers send the JSON itself.
type arguments string

func (a *arguments) UnmarshalJSON(raw []byte) error {
	if bytes.HasPrefix(raw, []byte(`"`)) || string(raw) == "null" {
		return json.Unmarshal(raw, (*string)(a))
	}
	*a = arguments(raw)
	return nil
}

// calls collects tool calls from their fragments. Its zero value is ready.
type calls struct {
	list []*collected
}

type collected struct {
	index     int // -1 when the server gives none
	id, name  string
	arguments strings.Builder
	opaque    gathered
}

// add finds the call that a fragment continues, or begins one.
func (c *calls) add(f fragment) {
	call := c.continued(f)
	if call == nil {
		call = &collected{index: -1, id: f.ID, name: f.Function.Name}
		if f.Index != nil {
			call.index = *f.Index
		}
		c.list = append(c.list, call)
	} else if call.name == "" {
		call.name = f.Function.Name
	}
	if call.id == "" {
		call.id = f.ID
	}
	call.arguments.WriteString(string(f.Function.Arguments))
	for name, piece := range f.opaque {
		call.opaque.add(name, piece)
	}
}

// continued is the call that f is a further fragment of; nil when it begins one. An index decides, without it
// the id. Without both, a name begins a call and anything else belongs to the last.
func (c *calls) continued(f fragment) *collected {
	for _, call := range slices.Backward(c.list) {
		switch {
		case f.Index != nil && call.index == *f.Index:
			if call.another(f) {
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

// another reports whether f, of the same index, is a call of its own nevertheless: servers that send whole calls
// may give each the index 0. Others repeat the name with every fragment, which means nothing.
func (call *collected) another(f fragment) bool {
	if f.Function.Name == "" || call.name == "" {
		return false
	}
	if f.ID != "" {
		return f.ID != call.id
	}
	return f.Function.Name != call.name || json.Valid([]byte(call.arguments.String()))
}

// finished is the calls in the order of their indexes, or as they came where there are none. Every one has an id
// of its own: a missing or repeated one is replaced by a hash of the request and the call's place in the answer,
// so that the same answer to the same request always has the same ids. In an answer that was cut short, a call
// without arguments is one of which they are missing.
func (c *calls) finished(req Request, origin string, cut bool) []ToolCall {
	var out []ToolCall
	seen := map[string]bool{}
	slices.SortStableFunc(c.list, func(a, b *collected) int { return cmp.Compare(a.index, b.index) })
	for place, call := range c.list {
		if call.arguments.Len() == 0 && (cut || call.name == "") {
			continue
		}
		if call.id == "" || seen[call.id] {
			call.id = derivedID(req, place, call.name)
		}
		seen[call.id] = true
		made := ToolCall{
			ID:        call.id,
			Name:      cmp.Or(call.name, "unnamed"), // no tool; servers refuse a history with an empty name
			Arguments: cmp.Or(call.arguments.String(), "{}"),
		}
		if members := call.opaque.texts(); members != nil {
			made.Opaque = &Opaque{Origin: origin, Digest: made.digest(), Members: members}
		}
		out = append(out, made)
	}
	return out
}

// derivedID has the form of a server's own.
func derivedID(req Request, place int, name string) string {
	hash := sha256.New()
	for _, v := range []any{req.Model, req.Messages, req.IdempotencyKey, place, name} {
		encoded, err := json.Marshal(v)
		if err != nil {
			encoded = fmt.Appendf(nil, "%v", v) // a message the encoder refuses was never sent
		}
		hash.Write(append(encoded, '\n'))
	}
	return "call_" + hex.EncodeToString(hash.Sum(nil))[:24]
}
