package chat

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
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
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/threads"
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
			return req, "", badRequest("metadata.thread_id", "invalid_type",
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
			Message: fmt.Sprintf("The request is too large: at most %d bytes are taken.", large.MaxBytes),
		}
	case err != nil:
		return "", badRequest("", "invalid_body", "The request's body could not be read.")
	}
	defer r.Body.Close() // which frees the memory: the answer may take minutes
	if err := json.Unmarshal(body, into); err != nil {
		var kind *json.UnmarshalTypeError
		if refusal, is := errors.AsType[*Refusal](err); is {
			return "", refusal
		}
		switch {
		case errors.As(err, &kind) && kind.Field != "":
			return "", badRequest(kind.Field, "invalid_type", "The parameter %s must not be a %s.", kind.Field, kind.Value)
		case json.Valid(body):
			return "", badRequest("", "invalid_type", "The request's body must be a JSON object.")
		}
		return "", badRequest("", "invalid_json", "The request's body is not valid JSON.")
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
			return nil, badRequest(name, "invalid_value", "%s must be at least 1.", name)
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
		return nil, badRequest("model", "missing_model", "Name a model: one of GET /v1/models, or %s.", agents.Alias)
	case req.N != nil && *req.N != 1:
		return nil, badRequest("n", "unsupported_value", "n must be 1: a message has one answer.")
	}
	if err := req.refuse(); err != nil {
		return nil, err
	}
	user, ok := text(req.User)
	if !ok {
		return nil, badRequest("user", "invalid_type", "The parameter user must be a string.")
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
		return nil, badRequest("thread_id", "invalid_thread_id",
			"A thread id (X-Thread-Id, metadata.thread_id or user) is 1 to %d printable characters.", threads.MaxID)
	}
	if a.Key = r.Header.Get("Idempotency-Key"); len(a.Key) > 255 || strings.TrimSpace(a.Key) != a.Key ||
		!utf8.ValidString(a.Key) {
		return nil, badRequest("Idempotency-Key", "invalid_value", "An Idempotency-Key is UTF-8 of at most 255 bytes.")
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
			a.resolvedName = a.Name
			threads.QueueResolve(b, a.principal(), a.Name, &a.thread, &a.threadExists)
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
func NewThreadID() string { return "th_" + ulid.MustNew(ulid.Now(), rand.Reader).String() }
