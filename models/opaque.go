package models

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"log/slog"
	"slices"

	"github.com/lanekeeper/lanekeeper/internal/exactjson"
)

// Opaque holds fields that a provider requires back unchanged, such as signatures and encrypted reasoning. The client
// sends the fields to their origin only, beside the unchanged message. Logs and pages never show them. The JSON texts
// are strings, because jsonb would reorder their members.
type Opaque struct {
	Origin      string            `json:"origin"`                 // base URL and model
	Digest      string            `json:"digest"`                 // of the message
	ReasoningAs string            `json:"reasoning_as,omitempty"` // the field that held the reasoning
	Members     map[string]string `json:"members,omitempty"`      // JSON texts by field name
	Items       []string          `json:"items,omitempty"`        // JSON texts of a response's output items, in order
}

// String hides the content.
func (o *Opaque) String() string {
	if o == nil {
		return "none"
	}
	return "[opaque]"
}

// LogValue hides the content.
func (o *Opaque) LogValue() slog.Value { return slog.StringValue(o.String()) }

// from reports whether an origin sent the fields, with a message of that digest.
func (o *Opaque) from(origin, digest string) bool {
	return o != nil && o.Origin == origin && o.Digest == digest
}

// repaired keeps the fields of a message with repaired calls, because their origin requires them. It drops the items,
// which hold the original calls.
func (o *Opaque) repaired(before, after string) *Opaque {
	if o == nil || before == after || o.Digest != before {
		return o
	}
	kept := *o
	kept.Digest, kept.Items = after, nil
	return &kept
}

// digest changes with any content that opaque fields depend on.
func (m Message) digest() string {
	texts := []string{m.Role, m.Content, m.Refusal}
	for _, c := range m.ToolCalls {
		texts = append(texts, c.ID, c.Name, c.Arguments)
	}
	return digestOf(texts...)
}

func (c ToolCall) digest() string { return digestOf(c.Name, c.Arguments) }

func digestOf(texts ...string) string {
	hash := sha256.New()
	for _, text := range texts {
		fmt.Fprintf(hash, "%d:%s", len(text), text)
	}
	return hex.EncodeToString(hash.Sum(nil))[:16]
}

// opaqueMembers are fields of a chat completion's message that providers require back. The client drops other unknown
// fields, because servers reject them.
var opaqueMembers = []string{
	"reasoning_details", "extra_content", "thinking_blocks", "provider_specific_fields",
	"thought_signature", "signature",
}

// opaqueFields collects opaque fields from a stream. Its zero value is ready.
type opaqueFields map[string]json.RawMessage

// add merges a piece. A field that arrives once stays unchanged.
func (g *opaqueFields) add(name string, piece json.RawMessage) {
	if isNull(piece) {
		return
	}
	if *g == nil {
		*g = opaqueFields{}
	}
	if have, known := (*g)[name]; known {
		piece = mergeJSON(have, piece)
	}
	(*g)[name] = slices.Clone(piece)
}

// texts returns the fields; nil if there are none.
func (g *opaqueFields) texts() map[string]string {
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

// mergeJSON merges two pieces of a value: lists by index and type of their entries, objects by member. Otherwise the
// later piece wins.
func mergeJSON(a, b json.RawMessage) json.RawMessage {
	var lists [2][]json.RawMessage
	if json.Unmarshal(a, &lists[0]) == nil && json.Unmarshal(b, &lists[1]) == nil {
		return mergeLists(lists[0], lists[1])
	}
	var objects [2]map[string]json.RawMessage
	if json.Unmarshal(a, &objects[0]) == nil && json.Unmarshal(b, &objects[1]) == nil && objects[0] != nil {
		return mergeObjects(objects[0], objects[1])
	}
	return b
}

func mergeLists(a, b []json.RawMessage) json.RawMessage {
	for _, entry := range b {
		at := slices.IndexFunc(a, func(have json.RawMessage) bool { return continues(have, entry) })
		if at < 0 {
			a = append(a, entry)
			continue
		}
		a[at] = mergeJSON(a[at], entry)
	}
	texts := make([]string, len(a))
	for i, entry := range a {
		texts[i] = string(entry)
	}
	return json.RawMessage(list(texts))
}

// continues reports whether an entry continues another.
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

// pieces are the fields whose text is streamed in pieces.
var pieces = []string{"text", "summary", "data", "signature", "thinking"}

func mergeObjects(a, b map[string]json.RawMessage) json.RawMessage {
	for name, value := range b {
		var old, more string
		_, known := a[name]
		switch {
		case isNull(value):
			if !known {
				a[name] = value
			}
		case slices.Contains(pieces, name) && json.Unmarshal(a[name], &old) == nil && json.Unmarshal(value, &more) == nil:
			if encoded, err := exactjson.Encode(old + more); err == nil {
				a[name] = encoded
			}
		case known && bytes.HasPrefix(value, []byte("{")):
			a[name] = mergeJSON(a[name], value)
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
