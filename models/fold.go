package models

import (
	"slices"
	"strings"
)

// imageLeftOut stands where an image was that the model cannot take.
const imageLeftOut = "[An image was left out here: this model takes text alone.]"

// adapted is the history in the form that the model takes.
func adapted(messages []Message, d dialect, known Facts) []Message {
	if d.has(noImages) || known.NoImages {
		messages = withoutImages(messages)
	}
	if d.has(oneSystem) || known.OneSystem {
		messages = folded(messages)
	}
	return messages
}

// adaptedRequest is a request in the form that the server is known to take.
func adaptedRequest(req Request, d dialect) Request {
	known := FactsOf(req.Model)
	req.Messages = adapted(withForm(req, d, known), d, known)
	if req.Schema != nil && inWords(req.Schema, d, known) {
		req.Schema = nil
	}
	if d.has(noTemperature) || known.NoTemperature {
		req.Temperature = nil
	}
	if d.has(noEffort) {
		req.Effort = ""
	}
	return req
}

// folded is a history with one system message, the first. What the system says later goes to the end of the tool's
// result before it, else into what the user says.
func folded(messages []Message) []Message {
	var out []Message
	for _, m := range messages {
		last := len(out) - 1
		switch {
		case last >= 0 && m.Role == RoleSystem && out[last].Role != RoleAssistant:
			out[last] = with(out[last], m)
		case last >= 0 && m.Role == RoleSystem:
			m.Role = RoleUser
			out = append(out, m)
		case last >= 0 && m.Role == RoleUser && out[last].Role == RoleUser:
			out[last] = with(out[last], m)
		default:
			out = append(out, m)
		}
	}
	return out
}

// with is a message with what another says after it.
func with(m, more Message) Message {
	if len(m.Parts) == 0 {
		m.Content = strings.Join(slices.DeleteFunc([]string{m.Content, more.Content}, isBlank), "\n\n")
		m.Parts = more.Parts
		return m
	}
	m.Parts = slices.Clip(m.Parts)
	if more.Content != "" {
		m.Parts = append(m.Parts, Part{Text: more.Content})
	}
	m.Parts = append(m.Parts, more.Parts...)
	return m
}

func isBlank(text string) bool { return text == "" }

// severalSystem reports whether folding changes anything.
func severalSystem(messages []Message) bool {
	for i, m := range messages {
		if i > 0 && m.Role == RoleSystem {
			return true
		}
	}
	return false
}

// withoutImages says in words where an image was.
func withoutImages(messages []Message) []Message {
	out := slices.Clone(messages)
	for i, m := range out {
		if !slices.ContainsFunc(m.Parts, isImage) {
			continue
		}
		texts := []string{m.Content}
		for _, p := range m.Parts {
			if isImage(p) {
				p.Text = imageLeftOut
			}
			texts = append(texts, p.Text)
		}
		out[i].Content, out[i].Parts = strings.Join(slices.DeleteFunc(texts, isBlank), "\n"), nil
	}
	return out
}

func isImage(p Part) bool { return p.Image != nil }

// images reports whether the request has any.
func (r Request) images() bool {
	return slices.ContainsFunc(r.Messages, func(m Message) bool { return slices.ContainsFunc(m.Parts, isImage) })
}

// calls reports whether the history has calls.
func (r Request) calls() bool {
	return slices.ContainsFunc(r.Messages, func(m Message) bool { return len(m.ToolCalls) > 0 })
}

// thought reports whether the history has reasoning.
func (r Request) thought() bool {
	return slices.ContainsFunc(r.Messages, func(m Message) bool { return m.Reasoning != "" })
}

// opaque reports whether the history has a provider's members.
func (r Request) opaque() bool {
	return slices.ContainsFunc(r.Messages, func(m Message) bool {
		return m.Opaque != nil || slices.ContainsFunc(m.ToolCalls, func(c ToolCall) bool { return c.Opaque != nil })
	})
}
