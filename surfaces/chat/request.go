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
	"github.com/lanekeeper/lanekeeper/threads"
	"github.com/lanekeeper/lanekeeper/trace"
)

// request is what is read of a chat completion request. n must be 1, because a turn has one answer. Parameters that no
// documentation knows are ignored.
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
	IncludeUsage bool `json:"include_usage"`
}

// decode reads a request.
func (c *Chat) decode(w http.ResponseWriter, r *http.Request) (request, string, error) {
	var req request
	hash, err := c.readJSON(w, r, &req)
	if err != nil {
		return req, "", err
	}
	var values map[string]json.RawMessage
	if len(req.Metadata) > 0 && json.Unmarshal(req.Metadata, &values) == nil {
		var ok bool
		if req.thread, ok = text(values["thread_id"]); !ok { // another thread than meant would be begun
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
		if errors.As(err, &kind) && kind.Field != "" {
			return "", bad(kind.Field, "invalid_type", "The parameter %s must not be a %s.", kind.Field, kind.Value)
		}
		return "", bad("", "invalid_json", "The request's body is not valid JSON.")
	}
	sum := sha256.Sum256(compact(body))
	return hex.EncodeToString(sum[:]), nil
}

// compact is JSON without its white space, so that two encoders of one request agree.
func compact(body []byte) []byte {
	var b bytes.Buffer
	if json.Compact(&b, body) != nil {
		return body
	}
	return b.Bytes()
}

// soleOwner is whose key has no name: the one application there usually is. Its users' names are threads as they are.
const soleOwner = "visitor"

// threadOf is the thread of a client's user: applications with keys of their own call different people by the same
// name.
func threadOf(owner, user string) string {
	if user == "" || owner == soleOwner {
		return user
	}
	return owner + ":" + user
}

// ask turns a request into what the visitor wants to say.
func (c *Chat) ask(r *http.Request, req request, secret string) (UserMessage, error) {
	a, err := c.address(r, req, secret)
	if err != nil {
		return a, err
	}
	a.formParam = "response_format"
	if a.form, err = formOf(a.formParam, req.Format, true); err != nil {
		return UserMessage{}, err
	}
	for name, bound := range map[string]*int{"max_tokens": req.MaxTokens, "max_completion_tokens": req.MaxCompletion} {
		if bound == nil {
			continue
		}
		if *bound < 1 {
			return UserMessage{}, bad(name, "invalid_value", "%s must be at least 1.", name)
		}
		if a.MaxTokens == 0 || *bound < a.MaxTokens {
			a.MaxTokens = *bound
		}
	}
	if err := c.messages(&a, req.Messages); err != nil {
		return a, err
	}
	return a, c.seen(a)
}

// address finds out who speaks to which agent, and in which thread.
func (c *Chat) address(r *http.Request, req request, secret string) (UserMessage, error) {
	model, ok := text(req.Model)
	switch {
	case !ok || model == "":
		return UserMessage{}, bad("model", "missing_model", "Name a model: one of GET /v1/models, or %s.", agents.Alias)
	case req.N != nil && *req.N != 1:
		return UserMessage{}, bad("n", "unsupported_value", "n must be 1: a message has one answer.")
	}
	if err := req.refuse(); err != nil {
		return UserMessage{}, err
	}
	user, ok := text(req.User)
	if !ok {
		return UserMessage{}, bad("user", "invalid_type", "The parameter user must be a string.")
	}
	a := UserMessage{Owner: c.Visitor(r), Secret: secret, Model: model, Participant: cmp.Or(user, "visitor"), Channel: channel}
	a.Name, a.Join = cmp.Or(r.Header.Get(threadHeader), req.thread), r.Header.Get(joinHeader)
	if a.Name == "" && a.Join == "" {
		a.Name = threadOf(a.Owner, user)
	}
	if a.Name != "" && threads.CheckID(a.Name) != nil {
		return UserMessage{}, bad("thread_id", "invalid_thread_id",
			"A thread id (X-Thread-Id, metadata.thread_id or user) is 1 to %d printable characters.", threads.MaxID)
	}
	if a.Key = r.Header.Get("Idempotency-Key"); len(a.Key) > 255 || strings.TrimSpace(a.Key) != a.Key ||
		!utf8.ValidString(a.Key) {
		return UserMessage{}, bad("Idempotency-Key", "invalid_value", "An Idempotency-Key is UTF-8 of at most 255 bytes.")
	}
	return a, c.lookUp(r.Context(), &a)
}

// lookUp finds the agent that the model id means, and the thread that the visitor's name for it means. A connection
// that breaks is no answer: another is asked.
func (c *Chat) lookUp(ctx context.Context, a *UserMessage) error {
	var all []agents.Agent
	err := postgres.Again(ctx, func() error {
		b := &pgx.Batch{}
		c.Agents.QueueList(b, &all)
		if a.Name != "" && a.Join == "" {
			a.resolved = a.Name
			threads.QueueResolve(b, a.principal(), a.Name, &a.thread, &a.known)
		}
		return c.Front.SendBatch(ctx, b).Close()
	})
	if err != nil {
		return fmt.Errorf("find agent and thread: %w", err)
	}
	a.agent, err = choose(agents.ReachedBy(all, a.Owner), a.Model)
	return err
}

// NewThreadID is an id that nobody can guess.
func NewThreadID() string { return "th_" + ulid.MustNew(ulid.Now(), entropy()).String() }

// blank reports a text of which nothing is stored: NUL is left out.
func blank(text string) bool { return strings.TrimSpace(strings.ReplaceAll(text, "\x00", "")) == "" }

// spokenContent is what a message has: its texts, its images, its files, and what is wrong with the first that cannot
// be taken.
type spokenContent struct {
	words  string
	images []threads.Image
	files  []filePart
	wrong  string
}

// content reads the content of a message.
func content(raw json.RawMessage) (c spokenContent, err error) {
	if words, ok := text(raw); ok {
		return spokenContent{words: words}, nil
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
			c.wrong = cmp.Or(c.wrong, file.check())
			c.files = append(c.files, file)
		case "image_url", "input_image":
			image, err := p.image()
			if err != nil {
				c.wrong = cmp.Or(c.wrong, "This image cannot be taken: "+err.Error()+".")
				continue
			}
			c.images = append(c.images, image)
		default:
			c.wrong = cmp.Or(c.wrong, "Only text, images and files are understood: audio is not.")
		}
	}
	if len(c.images) > threads.MostImages {
		c.wrong = cmp.Or(c.wrong, fmt.Sprintf("A message has at most %d images.", threads.MostImages))
	}
	c.words = strings.Join(texts, "\n")
	return c, nil
}

// clip shortens what is repeated to a client.
func clip(s string, letters int) string {
	s = strings.ToValidUTF8(s, "")
	if r := []rune(s); len(r) > letters {
		return string(r[:letters]) + "…"
	}
	return s
}

// parameters are the documented parameters of a chat completion that the surface refuses when their value asks for
// what it cannot give. The other documented ones are honoured (see request) or listed in agentParameters.
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

// agentParameters are accepted and change nothing: the agent's own setting stands. Stock clients send several of
// them by default, so a refusal would keep those clients away.
func agentParameters() []string {
	return []string{
		"temperature", "top_p", "seed", "frequency_penalty", "presence_penalty", "reasoning_effort", "verbosity",
		"parallel_tool_calls", "service_tier", "store", "prediction", "prompt_cache_key", "prompt_cache_options",
		"prompt_cache_retention", "safety_identifier",
	}
}

// rule is what one parameter may ask for.
type rule struct {
	name    string
	raw     json.RawMessage
	allowed []string // compact JSON, beside null and absence
	why     string
}

// Reasons for refusals, which chat completions and responses share.
const (
	whyTools = "The agent's tools are its own and run here; tools of a client are not offered to the model. " +
		"Leave them out, or declare a skill in the agent's workspace."
	whyChoice   = "A client cannot make the agent call a tool; none and auto are accepted."
	whyLogprobs = "Log probabilities are not returned."
	whySearch   = "Searching the web is a skill of the agent's own; a client cannot turn it on."
	whyModerate = "Moderation is not run here."
	whyFormat   = "The formats of an answer are text, json_object and json_schema."
)

// refuse returns what the request asks for in vain.
func (p parameters) refuse() error {
	tools, functions := p.Tools, p.Functions
	if is(p.ToolChoice, `"none"`) { // then they change nothing
		tools = nil
	}
	if is(p.FunctionCall, `"none"`) {
		functions = nil
	}
	return refuse([]rule{
		{"audio", p.Audio, nil, "The agent answers in text, not in audio."},
		{"modalities", p.Modalities, []string{`["text"]`, `[]`}, `Only ["text"] is answered.`},
		{"tools", tools, []string{`[]`}, whyTools},
		{"functions", functions, []string{`[]`}, whyTools},
		{"tool_choice", p.ToolChoice, []string{`"none"`, `"auto"`}, whyChoice},
		{"function_call", p.FunctionCall, []string{`"none"`, `"auto"`}, whyChoice},
		{"logprobs", p.Logprobs, []string{`false`}, whyLogprobs},
		{"top_logprobs", p.TopLogprobs, []string{`0`}, whyLogprobs},
		{"logit_bias", p.LogitBias, []string{`{}`}, "The agent chooses its own words: logit_bias is not passed on."},
		{"stop", p.Stop, []string{`[]`, `""`}, "Stop sequences are not supported: an answer is shown whole."},
		{"web_search_options", p.WebSearch, nil, whySearch},
		{"moderation", p.Moderation, nil, whyModerate},
	})
}

// refuse returns the refusal of the first rule that its value breaks.
func refuse(rules []rule) error {
	for _, r := range rules {
		if given(r.raw) && !slices.ContainsFunc(r.allowed, func(v string) bool { return is(r.raw, v) }) {
			return bad(r.name, "unsupported_value", "%s: %s", r.name, r.why)
		}
	}
	return nil
}

// given reports a value that is there and not null.
func given(raw json.RawMessage) bool { return len(raw) > 0 && !is(raw, "null") }

// is reports whether a value is this compact JSON.
func is(raw json.RawMessage, value string) bool {
	raw = bytes.TrimSpace(raw)
	return string(raw) == value || len(raw) <= 64 && string(compact(raw)) == value
}

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
func (c *Chat) messages(a *UserMessage, h history) error {
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
func (c *Chat) newOnes(a *UserMessage, talk []line) error {
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

// incoming is a request that was decoded.
type incoming struct {
	trace  trace.ID
	user   string // whom the client names
	hash   string // of the body
	stream bool
	read   func(secret string) (UserMessage, error) // what the visitor wants to say
}

// take admits a message and begins its turn, or finds the one of a request that is sent again. The caller leaves
// what it gets.
func (c *Chat) take(w http.ResponseWriter, r *http.Request, in incoming) (a UserMessage, b startedTurn, err error) {
	if utf8.RuneCountInString(in.user) > threads.MaxID {
		return a, b, bad("user", "invalid_value", "The parameter user may have at most %d characters.", threads.MaxID)
	}
	secret, made, err := c.secretOf(r)
	if err != nil {
		return a, b, err
	}
	token := secret
	if made {
		token = "" // nobody has proved to be this visitor before
	}
	if err := c.allow(r, c.Visitor(r), in.user, token); err != nil {
		return a, b, err
	}
	if made {
		w.Header().Set(visitorHeader, secret)
	}
	if a, err = in.read(secret); err != nil {
		return a, b, err
	}
	if a.place, err = c.enter(r, a); err != nil {
		return a, b, err
	}
	a.TraceID, a.own = in.trace, true
	if a.Key != "" {
		a.Hash = in.hash
	}
	if a.retry, err = c.retryOf(r, a, in.hash, made, in.stream); err == nil {
		b, err = c.begin(r.Context(), a)
	}
	if err != nil {
		a.place.Release()
		return a, b, err
	}
	leave := b.leave
	b.leave = func() {
		leave()
		a.place.Release()
	}
	return a, b, nil
}

// The headers by which a client says who is at it, and which thread is meant.
const (
	threadHeader  = "X-Thread-Id"
	joinHeader    = "X-Thread-Join"
	visitorHeader = "X-Visitor-Token"
)

// newVisitor is what a client sends as its visitor token to get one.
const newVisitor = "new"

// secretForm is that of a visitor token.
var secretForm = regexp.MustCompile(`^vis_[A-Za-z0-9_-]{32,128}$`)

// secretOf is the visitor token that a request has, or one that is made for it: made says so. A key that browsers hold
// is nobody's proof, so its requests always have one. With any other key who holds it speaks for its users, unless the
// client sends a token.
func (c *Chat) secretOf(r *http.Request) (secret string, made bool, err error) {
	given := r.Header.Get(visitorHeader)
	switch {
	case given == "" && !c.Browser(c.Visitor(r)):
		return "", false, nil
	case given == "" || given == newVisitor:
		random := make([]byte, 32)
		_, _ = rand.Read(random) // never fails
		return "vis_" + base64.RawURLEncoding.EncodeToString(random), true, nil
	case !secretForm.MatchString(given):
		return "", false, bad(visitorHeader, "invalid_visitor_token",
			"%s has to be the token that an answer had, or %q to get one.", visitorHeader, newVisitor)
	}
	return given, false, nil
}

// principal is who a request is of.
func (c *Chat) principal(r *http.Request) (threads.Principal, error) {
	secret, _, err := c.secretOf(r)
	return UserMessage{Owner: c.Visitor(r), Secret: secret}.principal(), err
}
