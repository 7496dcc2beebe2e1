package models

// signatureLeftOut replaces a signature that Gemini demands and that an edit or a change of models lost.
const signatureLeftOut = `{"google":{"thought_signature":"skip_thought_signature_validator"}}`

// chatBody adds the fields of a chat completion.
func (c *Client) chatBody(o *object, req Request, d dialect, known ModelInfo) error {
	messages := make([]string, len(req.Messages))
	for i, m := range req.Messages {
		text, err := chatWriter{c.origin(req.Model), d, known}.message(m)
		if err != nil {
			return err
		}
		messages[i] = text
	}
	o.raw("messages", list(messages))
	if len(req.Tools) > 0 {
		o.set("tools", req.Tools)
	}
	if !d.has(noStream) && !d.has(noUsage) {
		o.set("stream_options", map[string]bool{"include_usage": true})
	}
	if req.MaxTokens > 0 {
		name := "max_tokens" // the name that most servers know
		if d.has(maxCompletionTokens) || known.MaxCompletionTokens {
			name = "max_completion_tokens"
		}
		o.set(name, req.MaxTokens)
	}
	if req.Effort != "" {
		o.set("reasoning_effort", req.Effort)
	}
	if req.Schema != nil {
		o.set("response_format", req.Schema.format())
	}
	return nil
}

// chatWriter encodes messages for one origin.
type chatWriter struct {
	origin string
	d      dialect
	known  ModelInfo
}

// message encodes a message with the fields that its origin requires back.
func (w chatWriter) message(m Message) (string, error) {
	var o object
	o.set("role", m.Role)
	content, err := m.content()
	if err != nil {
		return "", err
	}
	if content != nil {
		o.raw("content", string(content))
	}
	for _, member := range []struct{ name, text string }{
		{"refusal", m.Refusal}, {"name", m.Name}, {"tool_call_id", m.ToolCallID},
	} {
		if member.text != "" {
			o.set(member.name, member.text)
		}
	}
	w.thoughts(&o, m)
	if len(m.ToolCalls) == 0 {
		return o.end()
	}
	calls := make([]string, len(m.ToolCalls))
	for i, call := range m.ToolCalls {
		if calls[i], err = w.call(call, i == 0); err != nil {
			return "", err
		}
	}
	o.raw("tool_calls", list(calls))
	return o.end()
}

// thoughts adds the reasoning, under its original name, and the opaque fields.
func (w chatWriter) thoughts(o *object, m Message) {
	own := m.Opaque.from(w.origin, m.digest())
	if own && !w.d.has(noOpaque) {
		o.members(m.Opaque.Members)
	}
	if w.d.has(noReasoning) || m.Role != RoleAssistant {
		return
	}
	if own && m.Opaque.ReasoningAs != "" {
		o.set(m.Opaque.ReasoningAs, m.Reasoning)
	}
	wanted := w.known.ReasoningField
	if w.d.has(needsReasoning) {
		wanted = "reasoning_content"
	}
	if wanted == "" || len(m.ToolCalls) == 0 {
		return
	}
	if _, there := o.texts[wanted]; !there {
		o.set(wanted, m.Reasoning) // even if empty
	}
}

// call encodes a call with the fields that its origin requires back.
func (w chatWriter) call(call ToolCall, first bool) (string, error) {
	var o object
	o.set("id", call.ID)
	o.set("type", "function")
	o.set("function", functionCall{call.Name, arguments(call.Arguments)})
	switch {
	case w.d.has(noOpaque):
	case call.Opaque.from(w.origin, call.digest()):
		o.members(call.Opaque.Members)
	case first && w.known.RequiresCallSignature:
		o.raw("extra_content", signatureLeftOut)
	}
	return o.end()
}

// origin identifies the owner of a provider's opaque fields.
func (c *Client) origin(model string) string { return c.config.BaseURL + " " + model }
