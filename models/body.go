package models

import (
	"bytes"
	"encoding/json"
	"maps"
	"slices"
)

// object writes the members of a JSON object in the order given, and byte for byte as given.
type object struct {
	names []string
	texts map[string]string
	err   error
}

// set adds a member.
func (o *object) set(name string, value any) {
	encoded, err := encode(value)
	if err != nil && o.err == nil {
		o.err = err
	}
	o.raw(name, string(encoded))
}

// raw adds a member that is JSON already, or replaces it.
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

// merge lays an object over this one: objects member by member, else the other's value stands. A null takes a
// member away.
func (o *object) merge(extra map[string]json.RawMessage) {
	for _, name := range slices.Sorted(maps.Keys(extra)) {
		value := extra[name]
		var mine, more map[string]json.RawMessage
		switch {
		case isNull(value):
			delete(o.texts, name)
			o.names = slices.DeleteFunc(o.names, func(n string) bool { return n == name })
		case json.Unmarshal([]byte(o.texts[name]), &mine) == nil && mine != nil &&
			json.Unmarshal(value, &more) == nil && more != nil:
			var inner object
			for _, n := range slices.Sorted(maps.Keys(mine)) {
				inner.raw(n, string(mine[n]))
			}
			inner.merge(more)
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

// end is the whole object.
func (o *object) end() (string, error) {
	var out bytes.Buffer
	out.WriteByte('{')
	for i, name := range o.names {
		if i > 0 {
			out.WriteByte(',')
		}
		encoded, err := encode(name)
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

// list is a JSON array of texts that are JSON.
func list(texts []string) string {
	var out bytes.Buffer
	out.WriteByte('[')
	for i, text := range texts {
		if i > 0 {
			out.WriteByte(',')
		}
		out.WriteString(text)
	}
	out.WriteByte(']')
	return out.String()
}

// body is the request in the form that the server is known to understand.
func (c *Client) body(req Request, api API, d dialect) (string, error) {
	known := FactsOf(req.Model)
	req = adaptedRequest(req, d)
	var o object
	o.set("model", req.Model)
	var err error
	if api == APIResponses {
		err = c.responsesBody(&o, req, d)
	} else {
		err = c.chatBody(&o, req, d, known)
	}
	if err != nil {
		return "", err
	}
	if !d.has(noStream) {
		o.set("stream", true)
	}
	if req.Temperature != nil {
		o.set("temperature", *req.Temperature)
	}
	o.merge(c.config.Extra)
	return o.end()
}
