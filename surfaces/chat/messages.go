package chat

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/lanekeeper/lanekeeper/threads"
)

// blank reports whether a text has nothing to store: white space and NUL characters are removed.
func blank(text string) bool { return strings.TrimSpace(strings.ReplaceAll(text, "\x00", "")) == "" }

// truncate shortens a text to limit characters and an ellipsis, and drops invalid UTF-8.
func truncate(s string, limit int) string {
	s = strings.ToValidUTF8(s, "")
	if r := []rune(s); len(r) > limit {
		return string(r[:limit]) + "…"
	}
	return s
}

// Limits of a request. Earlier messages are ignored: the thread has the history.
const (
	maxNewMessages     = 32  // new messages
	maxEarlierMessages = 200 // earlier messages that a new thread imports
	maxReadMessages    = 2 * (maxNewMessages + maxEarlierMessages)
)

type wireMessage struct {
	Role    string          `json:"role"`
	Content json.RawMessage `json:"content"`
}

// history has the last messages of a request, at most maxReadMessages. Decoding keeps at most twice as many in memory.
type history struct {
	skipped int // messages before the first of latest
	latest  []wireMessage
}

// UnmarshalJSON reads an array of messages.
func (h *history) UnmarshalJSON(raw []byte) error {
	*h = history{}
	if string(raw) == "null" {
		return nil
	}
	dec := json.NewDecoder(bytes.NewReader(raw))
	if open, err := dec.Token(); err != nil || open != json.Delim('[') {
		return badRequest("messages", "invalid_type", "The parameter messages must be a list.")
	}
	for dec.More() {
		var m wireMessage
		if err := dec.Decode(&m); err != nil {
			return badRequest(fmt.Sprintf("messages[%d]", h.skipped+len(h.latest)), "invalid_type",
				"A message is an object with role, a string, and content.")
		}
		if len(h.latest) == 2*maxReadMessages {
			h.skipped += maxReadMessages
			h.latest = append(h.latest[:0], h.latest[maxReadMessages:]...)
		}
		h.latest = append(h.latest, m)
	}
	if over := len(h.latest) - maxReadMessages; over > 0 {
		h.skipped, h.latest = h.skipped+over, h.latest[over:]
	}
	return nil
}

// line is a message of the conversation and its index in the request.
type line struct {
	Line
	index   int
	files   []filePart
	problem error // why it is refused
}

// readMessages splits the request into new user messages, after the last answer, and the history, which a new thread
// imports. Instructions and results of client tools are dropped.
func (c *Chat) readMessages(a *UserMessage, h history) error {
	if len(h.latest) == 0 {
		return badRequest("messages", "missing_messages", "messages must not be empty.")
	}
	lines, err := h.conversation()
	if err != nil {
		return err
	}
	first := len(lines)
	for first > 0 && lines[first-1].Role == threads.User {
		first--
	}
	if first == len(lines) {
		return badRequest("messages", "invalid_value", "The last message must be the user's.")
	}
	if err := c.addNew(a, lines[first:]); err != nil {
		return err
	}
	for _, m := range lines[:first] {
		if (m.Role == threads.User || m.Role == threads.Assistant) && (!blank(m.Text) || len(m.Images) > 0) {
			a.Earlier = append(a.Earlier, m.Line)
		}
	}
	a.Earlier = a.Earlier[max(0, len(a.Earlier)-maxEarlierMessages):]
	return nil
}

// conversation returns the messages without instructions.
func (h history) conversation() (lines []line, err error) {
	for i, m := range h.latest {
		index := h.skipped + i
		switch m.Role {
		case "system", "developer":
		case threads.User, threads.Assistant, "tool", "function":
			content, err := decodeContent(m.Content)
			if err != nil {
				return nil, badRequest(fmt.Sprintf("messages[%d].content", index), "invalid_type",
					"The content of a message is a string or a list of parts.")
			}
			lines = append(lines, line{Line{m.Role, content.words, content.images}, index, content.files, content.problem})
		default:
			return nil, badRequest(fmt.Sprintf("messages[%d].role", index), "invalid_value", "The role %q is not known.",
				truncate(m.Role, 40))
		}
	}
	return lines, nil
}

// addNew validates the new messages and adds them to a.
func (c *Chat) addNew(a *UserMessage, lines []line) error {
	if len(lines) > maxNewMessages {
		return badRequest("messages", "too_many_messages",
			"At most %d messages may follow the last answer; join them, or send the answers that came between.",
			maxNewMessages)
	}
	size := 0
	for _, m := range lines {
		param := fmt.Sprintf("messages[%d].content", m.index)
		if m.problem != nil {
			return badRequest(param, "unsupported_content", "This content is not usable: %s.", m.problem)
		}
		if blank(m.Text) && len(m.files) == 0 && len(m.Images) == 0 {
			return badRequest(param, "empty_message", "A message must not be empty.")
		}
		if size += len(m.Text); size > c.MaxMessage {
			return badRequest(param, "string_above_max_length", "A message has at most %d bytes.", c.MaxMessage)
		}
		files, err := c.readFiles(m.files, param)
		if err != nil {
			return err
		}
		a.Texts, a.Files, a.Images = append(a.Texts, m.Text), append(a.Files, files), append(a.Images, m.Images)
	}
	return nil
}
