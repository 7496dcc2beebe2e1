package chat

import (
	"bytes"
	"encoding/json"
	"fmt"

	"github.com/lanekeeper/lanekeeper/threads"
)

// Bounds of a request. The thread is the history, so a client's own is only looked at where it can matter.
const (
	mostNew     = 32  // new messages
	mostEarlier = 200 // earlier messages that a new thread takes over: about what a model is shown, and its summary
	mostRead    = 2 * (mostNew + mostEarlier)
)

// said is one message of a request.
type said struct {
	Role    string          `json:"role"`
	Content json.RawMessage `json:"content"`
}

// history is the last messages of a request, at most mostRead of them. Decoding keeps no more in memory.
type history struct {
	skipped int // messages before the first of latest
	latest  []said
}

// UnmarshalJSON reads an array of messages.
func (h *history) UnmarshalJSON(raw []byte) error {
	*h = history{}
	if string(raw) == "null" {
		return nil
	}
	dec := json.NewDecoder(bytes.NewReader(raw))
	if open, err := dec.Token(); err != nil || open != json.Delim('[') {
		return bad("messages", "invalid_type", "The parameter messages must be a list.")
	}
	for dec.More() {
		var m said
		if err := dec.Decode(&m); err != nil {
			return bad(fmt.Sprintf("messages[%d]", h.skipped+len(h.latest)), "invalid_type",
				"A message is an object with role, a string, and content.")
		}
		if len(h.latest) == 2*mostRead {
			h.skipped += mostRead
			h.latest = append(h.latest[:0], h.latest[mostRead:]...)
		}
		h.latest = append(h.latest, m)
	}
	if over := len(h.latest) - mostRead; over > 0 {
		h.skipped, h.latest = h.skipped+over, h.latest[over:]
	}
	return nil
}

// line is a message that somebody said, and its place in the request.
type line struct {
	Line
	at    int
	files []filePart
	wrong string // why it cannot be taken; "" when it can
}

// messages finds what is new: the user's messages after the last answer. What was said before is kept for a
// thread that is new. Instructions and the results of the client's own tools are dropped.
func (c *Chat) messages(a *Ask, h history) error {
	if len(h.latest) == 0 {
		return bad("messages", "missing_messages", "messages must not be empty.")
	}
	talk, err := h.talk()
	if err != nil {
		return err
	}
	first := len(talk)
	for first > 0 && talk[first-1].Role == threads.User {
		first--
	}
	if first == len(talk) {
		return bad("messages", "invalid_value", "The last message must be the user's.")
	}
	if err := c.newOnes(a, talk[first:]); err != nil {
		return err
	}
	for _, m := range talk[:first] {
		if (m.Role == threads.User || m.Role == threads.Assistant) && (!blank(m.Text) || len(m.Images) > 0) {
			a.Earlier = append(a.Earlier, m.Line)
		}
	}
	a.Earlier = a.Earlier[max(0, len(a.Earlier)-mostEarlier):]
	return nil
}

// talk is what was said, without instructions.
func (h history) talk() (talk []line, err error) {
	for i, m := range h.latest {
		at := h.skipped + i
		switch m.Role {
		case "system", "developer":
		case threads.User, threads.Assistant, "tool", "function":
			said, err := content(m.Content)
			if err != nil {
				return nil, bad(fmt.Sprintf("messages[%d].content", at), "invalid_type",
					"The content of a message is a string or a list of parts.")
			}
			talk = append(talk, line{Line{m.Role, said.words, said.images}, at, said.files, said.wrong})
		default:
			return nil, bad(fmt.Sprintf("messages[%d].role", at), "invalid_value", "The role %q is not known.",
				clip(m.Role, 40))
		}
	}
	return talk, nil
}

// newOnes takes the new messages, or says what is wrong with them.
func (c *Chat) newOnes(a *Ask, talk []line) error {
	if len(talk) > mostNew {
		return bad("messages", "too_many_messages",
			"At most %d messages may follow the last answer; join them, or send the answers that came between.",
			mostNew)
	}
	size := 0
	for _, m := range talk {
		param := fmt.Sprintf("messages[%d].content", m.at)
		if m.wrong != "" {
			return bad(param, "unsupported_content", "%s", m.wrong)
		}
		if blank(m.Text) && len(m.files) == 0 && len(m.Images) == 0 {
			return bad(param, "empty_message", "A message must not be empty.")
		}
		if size += len(m.Text); size > c.MaxMessage {
			return bad(param, "string_above_max_length", "A message has at most %d bytes.", c.MaxMessage)
		}
		files, err := c.readFiles(m.files, param)
		if err != nil {
			return err
		}
		a.Texts, a.Files, a.Images = append(a.Texts, m.Text), append(a.Files, files), append(a.Images, m.Images)
	}
	return nil
}
