package chat

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/oklog/ulid/v2"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/internal/admission"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/threads"
	"github.com/lanekeeper/lanekeeper/trace"
)

// request is a chat completion request. n must be 1: a turn has one answer. Undocumented parameters are ignored.
type request struct {
	parameters
	Model         json.RawMessage `json:"model"`
	Messages      history         `json:"messages"`
	Stream        *bool           `json:"stream"`
	StreamOptions *streamOptions  `json:"stream_options"`
	MaxTokens     *int            `json:"max_tokens"`
	MaxCompletion *int            `json:"max_completion_tokens"`
	N             *int            `json:"n"`
	User          json.RawMessage `json:"user"`
	Metadata      json.RawMessage `json:"metadata"`
	thread        string          // of the metadata
}

type streamOptions struct {
	IncludeUsage    bool `json:"include_usage"`
	IncludeActivity bool `json:"include_activity"` // not OpenAI's
}

func (c *Chat) decode(w http.ResponseWriter, r *http.Request) (*request, string, error) {
	req := new(request)
	hash, err := c.readJSON(w, r, req)
	if err != nil {
		return req, "", err
	}
	var values map[string]json.RawMessage
	if len(req.Metadata) > 0 && json.Unmarshal(req.Metadata, &values) == nil {
		var ok bool
		if req.thread, ok = text(values["thread_id"]); !ok { // otherwise a new thread would be started
			return req, "", bad("metadata.thread_id", "invalid_type",
				"The parameter metadata.thread_id must be a string.")
		}
	}
	return req, hash, nil
}

// readJSON decodes a request's body and returns its digest.
func (c *Chat) readJSON(w http.ResponseWriter, r *http.Request, into any) (string, error) {
	body, err := admission.All(w, r, c.MaxBody)
	large, isLarge := errors.AsType[*admission.TooLarge](err)
	switch {
	case isLarge:
		return "", &Refusal{
			Status: http.StatusRequestEntityTooLarge, Type: "invalid_request_error", Code: "request_too_large",
			Message: fmt.Sprintf("The request is too large: at most %d bytes are taken.", large.Most),
		}
	case err != nil:
		return "", bad("", "invalid_body", "The request's body could not be read.")
	}
	defer r.Body.Close() // which frees the memory: the answer may take minutes
	if err := json.Unmarshal(body, into); err != nil {
		var kind *json.UnmarshalTypeError
		if refusal, is := errors.AsType[*Refusal](err); is {
			return "", refusal
		}
		switch {
		case errors.As(err, &kind) && kind.Field != "":
			return "", bad(kind.Field, "invalid_type", "The parameter %s must not be a %s.", kind.Field, kind.Value)
		case json.Valid(body):
			return "", bad("", "invalid_type", "The request's body must be a JSON object.")
		}
		return "", bad("", "invalid_json", "The request's body is not valid JSON.")
	}
	sum := sha256.Sum256(compact(body))
	return hex.EncodeToString(sum[:]), nil
}

// compact removes white space from JSON, so different encoders of one request agree.
func compact(body []byte) []byte {
	var b bytes.Buffer
	if json.Compact(&b, body) != nil {
		return body
	}
	return b.Bytes()
}

// soleOwner is the owner of a key without a name. Its users' names are thread names without a prefix.
const soleOwner = "visitor"

// threadOf returns the thread name of a client's user. It has the owner's name, because owners may use equal user
// names.
func threadOf(owner, user string) string {
	if user == "" || owner == soleOwner {
		return user
	}
	return owner + ":" + user
}

func (c *Chat) completionMessage(r *http.Request, req *request, secret string) (*UserMessage, error) {
	a, err := c.newMessage(r, req, secret)
	if err != nil {
		return a, err
	}
	a.formParam = "response_format"
	if a.form, err = formOf(a.formParam, req.Format, true); err != nil {
		return nil, err
	}
	for name, bound := range map[string]*int{"max_tokens": req.MaxTokens, "max_completion_tokens": req.MaxCompletion} {
		if bound == nil {
			continue
		}
		if *bound < 1 {
			return nil, bad(name, "invalid_value", "%s must be at least 1.", name)
		}
		if a.MaxTokens == 0 || *bound < a.MaxTokens {
			a.MaxTokens = *bound
		}
	}
	if err := c.readMessages(a, req.Messages); err != nil {
		return a, err
	}
	return a, c.checkImages(a)
}

// newMessage returns a message with its sender, agent and thread, and without content.
func (c *Chat) newMessage(r *http.Request, req *request, secret string) (*UserMessage, error) {
	model, ok := text(req.Model)
	switch {
	case !ok || model == "":
		return nil, bad("model", "missing_model", "Name a model: one of GET /v1/models, or %s.", agents.Alias)
	case req.N != nil && *req.N != 1:
		return nil, bad("n", "unsupported_value", "n must be 1: a message has one answer.")
	}
	if err := req.refuse(); err != nil {
		return nil, err
	}
	user, ok := text(req.User)
	if !ok {
		return nil, bad("user", "invalid_type", "The parameter user must be a string.")
	}
	a := &UserMessage{
		Owner: c.Visitor(r), Secret: secret, Model: model, Participant: cmp.Or(user, "visitor"),
		Channel: channel,
	}
	a.Name, a.Join = cmp.Or(r.Header.Get(threadHeader), req.thread), r.Header.Get(joinHeader)
	if a.Name == "" && a.Join == "" {
		a.Name = threadOf(a.Owner, user)
	}
	if a.Name != "" && threads.CheckID(a.Name) != nil {
		return nil, bad("thread_id", "invalid_thread_id",
			"A thread id (X-Thread-Id, metadata.thread_id or user) is 1 to %d printable characters.", threads.MaxID)
	}
	if a.Key = r.Header.Get("Idempotency-Key"); len(a.Key) > 255 || strings.TrimSpace(a.Key) != a.Key ||
		!utf8.ValidString(a.Key) {
		return nil, bad("Idempotency-Key", "invalid_value", "An Idempotency-Key is UTF-8 of at most 255 bytes.")
	}
	return a, c.lookUp(r.Context(), a)
}

// lookUp reads the agents, their skills and the thread of the visitor's name, and chooses the agent of the model id. It
// retries when the connection breaks.
func (c *Chat) lookUp(ctx context.Context, a *UserMessage) error {
	from := &reason.Available{}
	err := postgres.RetryOnDisconnect(ctx, func() error {
		b := &pgx.Batch{}
		c.Agents.QueueList(b, &from.Agents)
		skills.QueueCallable(b, scopes, &from.Skills)
		if a.Name != "" && a.Join == "" {
			a.resolved = a.Name
			threads.QueueResolve(b, a.principal(), a.Name, &a.thread, &a.known)
		}
		return c.Front.SendBatch(ctx, b).Close()
	})
	if err != nil {
		return fmt.Errorf("find agent and thread: %w", err)
	}
	a.available = from
	a.agent, err = selectAgent(agents.ReachedBy(from.Agents, a.Owner), a.Model)
	return err
}

// NewThreadID returns a thread id that cannot be guessed.
func NewThreadID() string { return "th_" + ulid.MustNew(ulid.Now(), entropy()).String() }

// blank reports whether nothing of a text would be stored. NUL is not stored.
func blank(text string) bool { return strings.TrimSpace(strings.ReplaceAll(text, "\x00", "")) == "" }

// messageContent is the decoded content of a message. problem describes the first part that is refused.
type messageContent struct {
	words   string
	images  []threads.Image
	files   []filePart
	problem string
}

func decodeContent(raw json.RawMessage) (c messageContent, err error) {
	if words, ok := text(raw); ok {
		return messageContent{words: words}, nil
	}
	var parts []wirePart
	if err := json.Unmarshal(raw, &parts); err != nil {
		return c, fmt.Errorf("decode content: %w", err)
	}
	var texts []string
	for _, p := range parts {
		switch p.Type {
		case "text", "input_text", "output_text", "refusal":
			texts = append(texts, p.Text+p.Refusal)
		case "file", "input_file":
			file := p.file()
			c.problem = cmp.Or(c.problem, file.check())
			c.files = append(c.files, file)
		case "image_url", "input_image":
			image, err := p.image()
			if err != nil {
				c.problem = cmp.Or(c.problem, "This image is not usable: "+err.Error()+".")
				continue
			}
			c.images = append(c.images, image)
		default:
			c.problem = cmp.Or(c.problem, "Only text, images and files are supported, not audio.")
		}
	}
	if len(c.images) > threads.MaxImages {
		c.problem = cmp.Or(c.problem, fmt.Sprintf("A message has at most %d images.", threads.MaxImages))
	}
	c.words = strings.Join(texts, "\n")
	return c, nil
}

// truncate shortens a text to limit characters.
func truncate(s string, limit int) string {
	s = strings.ToValidUTF8(s, "")
	if r := []rune(s); len(r) > limit {
		return string(r[:limit]) + "…"
	}
	return s
}

// parameters are the documented parameters of a chat completion that are refused unless their value changes nothing.
// The others are supported (request), or ignored in favour of the agent's settings.
type parameters struct {
	Audio        json.RawMessage `json:"audio"`
	Modalities   json.RawMessage `json:"modalities"`
	Tools        json.RawMessage `json:"tools"`
	ToolChoice   json.RawMessage `json:"tool_choice"`
	Functions    json.RawMessage `json:"functions"`
	FunctionCall json.RawMessage `json:"function_call"`
	Format       json.RawMessage `json:"response_format"`
	Logprobs     json.RawMessage `json:"logprobs"`
	TopLogprobs  json.RawMessage `json:"top_logprobs"`
	LogitBias    json.RawMessage `json:"logit_bias"`
	Stop         json.RawMessage `json:"stop"`
	WebSearch    json.RawMessage `json:"web_search_options"`
	Moderation   json.RawMessage `json:"moderation"`
}

// rule lists the allowed values of a parameter.
type rule struct {
	name    string
	raw     json.RawMessage
	allowed []string // compact JSON; null and absence are always allowed
	why     string
}

// Reasons for refusals, which chat completions and responses share.
const (
	reasonTools = "Client tools are not offered to the model; the agent uses its own. " +
		"Leave them out, or declare a skill in the agent's workspace."
	reasonToolChoice = "A client cannot make the agent call a tool; none and auto are accepted."
	reasonLogprobs   = "Log probabilities are not returned."
	reasonWebSearch  = "Web search is a skill of the agent; a client cannot enable it."
	reasonModeration = "Moderation is not run here."
	reasonFormat     = "The formats of an answer are text, json_object and json_schema."
)

// refuse returns the refusal of the first unsupported parameter.
func (p parameters) refuse() error {
	tools, functions := p.Tools, p.Functions
	if equalsJSON(p.ToolChoice, `"none"`) { // tools then change nothing
		tools = nil
	}
	if equalsJSON(p.FunctionCall, `"none"`) {
		functions = nil
	}
	return refuse([]rule{
		{"audio", p.Audio, nil, "The agent answers in text, not in audio."},
		{"modalities", p.Modalities, []string{`["text"]`, `[]`}, `Only ["text"] is answered.`},
		{"tools", tools, []string{`[]`}, reasonTools},
		{"functions", functions, []string{`[]`}, reasonTools},
		{"tool_choice", p.ToolChoice, []string{`"none"`, `"auto"`}, reasonToolChoice},
		{"function_call", p.FunctionCall, []string{`"none"`, `"auto"`}, reasonToolChoice},
		{"logprobs", p.Logprobs, []string{`false`}, reasonLogprobs},
		{"top_logprobs", p.TopLogprobs, []string{`0`}, reasonLogprobs},
		{"logit_bias", p.LogitBias, []string{`{}`}, "logit_bias is not passed to the model."},
		{"stop", p.Stop, []string{`[]`, `""`}, "Stop sequences are not supported."},
		{"web_search_options", p.WebSearch, nil, reasonWebSearch},
		{"moderation", p.Moderation, nil, reasonModeration},
	})
}

// refuse returns the refusal of the first value that its rule does not allow.
func refuse(rules []rule) error {
	for _, r := range rules {
		if isSet(r.raw) && !slices.ContainsFunc(r.allowed, func(v string) bool { return equalsJSON(r.raw, v) }) {
			return bad(r.name, "unsupported_value", "%s: %s", r.name, r.why)
		}
	}
	return nil
}

// isSet reports whether a value is present and not null.
func isSet(raw json.RawMessage) bool { return len(raw) > 0 && !equalsJSON(raw, "null") }

// equalsJSON compares a value with compact JSON.
func equalsJSON(raw json.RawMessage, value string) bool {
	raw = bytes.TrimSpace(raw)
	return string(raw) == value || len(raw) <= 64 && string(compact(raw)) == value
}

// Limits of a request. The history of a client is read only as far as it matters: the thread has the history.
const (
	maxNewMessages     = 32  // new messages
	maxEarlierMessages = 200 // earlier messages that a new thread imports
	maxReadMessages    = 2 * (maxNewMessages + maxEarlierMessages)
)

type wireMessage struct {
	Role    string          `json:"role"`
	Content json.RawMessage `json:"content"`
}

// history has the last messages of a request, at most maxReadMessages. Decoding keeps no more in memory.
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
		return bad("messages", "invalid_type", "The parameter messages must be a list.")
	}
	for dec.More() {
		var m wireMessage
		if err := dec.Decode(&m); err != nil {
			return bad(fmt.Sprintf("messages[%d]", h.skipped+len(h.latest)), "invalid_type",
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

// line is a message of the conversation and its place in the request.
type line struct {
	Line
	at      int
	files   []filePart
	problem string // why it is refused; "" for none
}

// readMessages splits the request into new user messages, after the last answer, and the history, which a new thread
// imports. Instructions and results of client tools are dropped.
func (c *Chat) readMessages(a *UserMessage, h history) error {
	if len(h.latest) == 0 {
		return bad("messages", "missing_messages", "messages must not be empty.")
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
		return bad("messages", "invalid_value", "The last message must be the user's.")
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
		at := h.skipped + i
		switch m.Role {
		case "system", "developer":
		case threads.User, threads.Assistant, "tool", "function":
			content, err := decodeContent(m.Content)
			if err != nil {
				return nil, bad(fmt.Sprintf("messages[%d].content", at), "invalid_type",
					"The content of a message is a string or a list of parts.")
			}
			lines = append(lines, line{Line{m.Role, content.words, content.images}, at, content.files, content.problem})
		default:
			return nil, bad(fmt.Sprintf("messages[%d].role", at), "invalid_value", "The role %q is not known.",
				truncate(m.Role, 40))
		}
	}
	return lines, nil
}

// addNew validates the new messages and adds them to a.
func (c *Chat) addNew(a *UserMessage, lines []line) error {
	if len(lines) > maxNewMessages {
		return bad("messages", "too_many_messages",
			"At most %d messages may follow the last answer; join them, or send the answers that came between.",
			maxNewMessages)
	}
	size := 0
	for _, m := range lines {
		param := fmt.Sprintf("messages[%d].content", m.at)
		if m.problem != "" {
			return bad(param, "unsupported_content", "%s", m.problem)
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

// chatRequest is a decoded request.
type chatRequest struct {
	trace  trace.ID
	user   string // the user that the client names
	hash   string // of the body
	stream bool
	read   func(secret string) (*UserMessage, error) // converts the request to a message
}

// accept admits a message and starts its turn, or finds the turn of a retry. The caller calls release.
func (c *Chat) accept(
	w http.ResponseWriter, r *http.Request, in chatRequest,
) (a *UserMessage, b *startedTurn, err error) {
	if utf8.RuneCountInString(in.user) > threads.MaxID {
		return a, b, bad("user", "invalid_value", "The parameter user may have at most %d characters.", threads.MaxID)
	}
	secret, isNew, err := c.visitorToken(r)
	if err != nil {
		return a, b, err
	}
	token := secret
	if isNew {
		token = "" // the visitor has no proof yet
	}
	if err := c.allow(r, c.Visitor(r), in.user, token); err != nil {
		return a, b, err
	}
	if isNew {
		w.Header().Set(visitorHeader, secret)
	}
	if a, err = in.read(secret); err != nil {
		return a, b, err
	}
	if a.place, err = c.admit(r, a); err != nil {
		return a, b, err
	}
	a.TraceID, a.own = in.trace, true
	if a.Key != "" {
		a.Hash = in.hash
	}
	if a.retry, err = c.newRetry(r, a, in.hash, isNew, in.stream); err == nil {
		b, err = c.startTurn(r.Context(), a)
	}
	if err != nil {
		a.place.Release()
		return a, b, err
	}
	release := b.release
	b.release = func() {
		release()
		a.place.Release()
	}
	return a, b, nil
}

// The headers that name the visitor and the thread.
const (
	threadHeader  = "X-Thread-Id"
	joinHeader    = "X-Thread-Join"
	visitorHeader = "X-Visitor-Token"
)

// newVisitor as the visitor token requests a new token.
const newVisitor = "new"

// secretForm matches a visitor token.
var secretForm = regexp.MustCompile(`^vis_[A-Za-z0-9_-]{32,128}$`)

// visitorToken returns the visitor token of a request, or generates one. A key that browsers hold requires a token.
// Any other key speaks for its users unless the client sends one.
func (c *Chat) visitorToken(r *http.Request) (secret string, isNew bool, err error) {
	token := r.Header.Get(visitorHeader)
	switch {
	case token == "" && !c.Browser(c.Visitor(r)):
		return "", false, nil
	case token == "" || token == newVisitor:
		random := make([]byte, 32)
		_, _ = rand.Read(random) // never fails
		return "vis_" + base64.RawURLEncoding.EncodeToString(random), true, nil
	case !secretForm.MatchString(token):
		return "", false, bad(visitorHeader, "invalid_visitor_token",
			"%s must be the token of an earlier answer, or %q for a new one.", visitorHeader, newVisitor)
	}
	return token, false, nil
}

// principal returns the sender of a request.
func (c *Chat) principal(r *http.Request) (threads.Principal, error) {
	secret, _, err := c.visitorToken(r)
	return (&UserMessage{Owner: c.Visitor(r), Secret: secret}).principal(), err
}
