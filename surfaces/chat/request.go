package chat

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/oklog/ulid/v2"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/internal/admission"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/threads"
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
func (c *Chat) ask(r *http.Request, req request, secret string) (Ask, error) {
	a, err := c.address(r, req, secret)
	if err != nil {
		return a, err
	}
	a.formParam = "response_format"
	if a.form, err = formOf(a.formParam, req.Format, true); err != nil {
		return Ask{}, err
	}
	for name, bound := range map[string]*int{"max_tokens": req.MaxTokens, "max_completion_tokens": req.MaxCompletion} {
		if bound == nil {
			continue
		}
		if *bound < 1 {
			return Ask{}, bad(name, "invalid_value", "%s must be at least 1.", name)
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
func (c *Chat) address(r *http.Request, req request, secret string) (Ask, error) {
	model, ok := text(req.Model)
	switch {
	case !ok || model == "":
		return Ask{}, bad("model", "missing_model", "Name a model: one of GET /v1/models, or %s.", agents.Alias)
	case req.N != nil && *req.N != 1:
		return Ask{}, bad("n", "unsupported_value", "n must be 1: a message has one answer.")
	}
	if err := req.refuse(); err != nil {
		return Ask{}, err
	}
	user, ok := text(req.User)
	if !ok {
		return Ask{}, bad("user", "invalid_type", "The parameter user must be a string.")
	}
	a := Ask{Owner: c.Visitor(r), Secret: secret, Model: model, Participant: cmp.Or(user, "visitor"), Channel: channel}
	a.Name, a.Join = cmp.Or(r.Header.Get(threadHeader), req.thread), r.Header.Get(joinHeader)
	if a.Name == "" && a.Join == "" {
		a.Name = threadOf(a.Owner, user)
	}
	if a.Name != "" && threads.CheckID(a.Name) != nil {
		return Ask{}, bad("thread_id", "invalid_thread_id",
			"A thread id (X-Thread-Id, metadata.thread_id or user) is 1 to %d printable characters.", threads.MaxID)
	}
	if a.Key = r.Header.Get("Idempotency-Key"); len(a.Key) > 255 || strings.TrimSpace(a.Key) != a.Key ||
		!utf8.ValidString(a.Key) {
		return Ask{}, bad("Idempotency-Key", "invalid_value", "An Idempotency-Key is UTF-8 of at most 255 bytes.")
	}
	return a, c.lookUp(r.Context(), &a)
}

// lookUp finds the agent that the model id means, and the thread that the visitor's name for it means. A connection that
// breaks is no answer: another is asked.
func (c *Chat) lookUp(ctx context.Context, a *Ask) error {
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
