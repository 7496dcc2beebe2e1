package models

// responsesBody adds what the Responses API has of a request. Nothing is stored at the server: the whole history is
// sent, with the items of earlier answers as they came.
func (c *Client) responsesBody(o *object, req Request, d dialect) error {
	var input []string
	origin := c.origin(req.Model)
	for _, m := range req.Messages {
		items, err := responseItems(m, origin, d)
		if err != nil {
			return err
		}
		input = append(input, items...)
	}
	o.raw("input", list(input))
	if len(req.Tools) > 0 {
		tools := make([]responseTool, len(req.Tools))
		for i, t := range req.Tools {
			tools[i] = t.response()
		}
		o.set("tools", tools)
	}
	if !d.has(noStore) {
		o.set("store", false)
	}
	if !d.has(noInclude) {
		o.set("include", []string{"reasoning.encrypted_content"})
	}
	if req.MaxTokens > 0 {
		o.set("max_output_tokens", req.MaxTokens)
	}
	if req.Effort != "" {
		o.set("reasoning", map[string]string{"effort": req.Effort})
	}
	if req.Schema != nil {
		o.set("text", map[string]any{"format": req.Schema.flatFormat()})
	}
	return nil
}

// responseTool is a function as the Responses API has it. What is not said there is strict, so it is said.
type responseTool struct {
	Type        string `json:"type"`
	Name        string `json:"name"`
	Description string `json:"description,omitempty"`
	Parameters  any    `json:"parameters"`
	Strict      bool   `json:"strict"`
}

func (t Tool) response() responseTool {
	return responseTool{Type: "function", Name: t.Name, Description: t.Description, Parameters: t.parameters()}
}

// responseItem is what a message becomes that has no items of its own.
type responseItem struct {
	Type      string         `json:"type"`
	Role      string         `json:"role,omitempty"`
	Content   []responsePart `json:"content,omitempty"`
	CallID    string         `json:"call_id,omitempty"`
	Name      string         `json:"name,omitempty"`
	Arguments string         `json:"arguments,omitempty"`
	Output    string         `json:"output,omitempty"`
}

type responsePart struct {
	Type   string `json:"type"`
	Text   string `json:"text,omitempty"`
	URL    string `json:"image_url,omitempty"`
	Detail string `json:"detail,omitempty"`
}

// responseItems is a message as items: those that it came as, for their origin, else new ones.
func responseItems(m Message, origin string, d dialect) ([]string, error) {
	if m.Opaque.from(origin, m.digest()) && len(m.Opaque.Items) > 0 && !d.has(noOpaque) {
		return m.Opaque.Items, nil
	}
	var items []responseItem
	switch m.Role {
	case RoleTool:
		items = append(items, responseItem{Type: "function_call_output", CallID: m.ToolCallID, Output: m.Text()})
	case RoleAssistant:
		text := m.Text()
		if text == "" {
			text = m.Refusal
		}
		if text != "" {
			items = append(items, responseItem{Type: "message", Role: m.Role, Content: []responsePart{
				{Type: "output_text", Text: text},
			}})
		}
	default:
		items = append(items, responseItem{Type: "message", Role: m.Role, Content: inputParts(m)})
	}
	for _, call := range m.ToolCalls {
		items = append(items, responseItem{
			Type: "function_call", CallID: call.ID, Name: call.Name, Arguments: call.Arguments,
		})
	}
	texts := make([]string, len(items))
	for i, item := range items {
		encoded, err := encode(item)
		if err != nil {
			return nil, err
		}
		texts[i] = string(encoded)
	}
	return texts, nil
}

// inputParts is what a user or the system says.
func inputParts(m Message) (parts []responsePart) {
	if m.Content != "" {
		parts = append(parts, responsePart{Type: "input_text", Text: m.Content})
	}
	for _, p := range m.Parts {
		if p.Image == nil {
			parts = append(parts, responsePart{Type: "input_text", Text: p.Text})
			continue
		}
		detail := p.Image.Detail
		if detail == "" {
			detail = "auto"
		}
		parts = append(parts, responsePart{Type: "input_image", URL: p.Image.URL, Detail: detail})
	}
	return parts
}
