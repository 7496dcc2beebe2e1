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

// request is a chat completion request. n must be 1: a turn has one answer. The server ignores parameters without a
// field.
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
	thread        string          // metadata.thread_id
}

type streamOptions struct {
	IncludeUsage    bool `json:"include_usage"`
	IncludeActivity bool `json:"include_activity"` // not OpenAI's
}

// decode reads a completion request and returns it with the digest of its body.
func (c *Chat) decode(w http.ResponseWriter, r *http.Request) (req *request, digest string, err error) {
	req = new(request)
	if digest, err = c.readJSON(w, r, req); err != nil {
		return nil, "", err
	}
	// A value of another type is an error, because without a thread id the message would start a new thread.
	var values map[string]json.RawMessage
	if len(req.Metadata) > 0 && json.Unmarshal(req.Metadata, &values) != nil {
		return nil, "", badRequest("metadata", "invalid_type", "The parameter metadata must be an object.")
	}
	var ok bool
	if req.thread, ok = text(values["thread_id"]); !ok {
		return nil, "", badRequest("metadata.thread_id", "invalid_type",
			"The parameter metadata.thread_id must be a string.")
	}
	return req, digest, nil
}

// readJSON decodes a request's body and returns the body's digest.
func (c *Chat) readJSON(w http.ResponseWriter, r *http.Request, into any) (string, error) {
	body, err := admission.All(w, r, c.MaxBody)
	large, ok := errors.AsType[*admission.TooLarge](err)
	switch {
	case ok:
		return "", &Refusal{
			Status: http.StatusRequestEntityTooLarge, Type: "invalid_request_error", Code: "request_too_large",
			Message: fmt.Sprintf("The request is too large: at most %d bytes are taken.", large.MaxBytes),
		}
	case err != nil:
		return "", badRequest("", "invalid_body", "The request's body could not be read.")
	}
	defer r.Body.Close() // releases the body's memory budget now: the answer may take minutes
	if err := json.Unmarshal(body, into); err != nil {
		if refusal, ok := errors.AsType[*Refusal](err); ok {
			return "", refusal
		}
		typeErr, ok := errors.AsType[*json.UnmarshalTypeError](err)
		switch {
		case ok && typeErr.Field != "":
			return "", badRequest(typeErr.Field, "invalid_type", "The parameter %s has the wrong type: %s.", typeErr.Field,
				typeErr.Value)
		case json.Valid(body):
			return "", badRequest("", "invalid_type", "The request's body must be a JSON object.")
		}
		return "", badRequest("", "invalid_json", "The request's body is not valid JSON.")
	}
	sum := sha256.Sum256(compact(body))
	return hex.EncodeToString(sum[:]), nil
}

// compact removes white space from JSON, so a retry with other white space has the same digest.
func compact(body []byte) []byte {
	var b bytes.Buffer
	if json.Compact(&b, body) != nil {
		return body
	}
	return b.Bytes()
}

// completionMessage converts a completion request to a message. An error in the request is a *Refusal.
func (c *Chat) completionMessage(r *http.Request, req *request, secret string) (*UserMessage, error) {
	msg, err := c.newMessage(r, req, secret)
	if err != nil {
		return nil, err
	}
	msg.formParam = "response_format"
	if msg.form, err = formOf(msg.formParam, req.Format, true); err != nil {
		return nil, err
	}
	for _, limit := range []struct {
		name   string
		tokens *int
	}{{"max_tokens", req.MaxTokens}, {"max_completion_tokens", req.MaxCompletion}} {
		switch {
		case limit.tokens == nil:
		case *limit.tokens < 1:
			return nil, badRequest(limit.name, "invalid_value", "%s must be at least 1.", limit.name)
		case msg.MaxTokens == 0 || *limit.tokens < msg.MaxTokens:
			msg.MaxTokens = *limit.tokens
		}
	}
	if err := c.readMessages(msg, req.Messages); err != nil {
		return nil, err
	}
	if err := c.checkImages(msg); err != nil {
		return nil, err
	}
	return msg, nil
}

// newMessage validates all parts of a request but its messages. It returns a message with its sender, agent and thread,
// and without content.
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
	msg := &UserMessage{
		Owner: c.Visitor(r), Secret: secret, Model: model, Participant: cmp.Or(postgres.Text(user), "visitor"),
		Channel: channel, Join: r.Header.Get(joinHeader), Key: r.Header.Get("Idempotency-Key"),
	}
	msg.Name = cmp.Or(r.Header.Get(threadHeader), req.thread)
	if msg.Name == "" && msg.Join == "" {
		msg.Name = threadOf(msg.Owner, user)
	}
	if msg.Name != "" && threads.CheckID(msg.Name) != nil {
		return nil, badRequest("thread_id", "invalid_thread_id",
			"A thread id (X-Thread-Id, metadata.thread_id or user) is 1 to %d printable characters in Unicode NFC.",
			threads.MaxID)
	}
	if len(msg.Key) > 255 || strings.TrimSpace(msg.Key) != msg.Key || !utf8.ValidString(msg.Key) {
		return nil, badRequest("Idempotency-Key", "invalid_value",
			"An Idempotency-Key is UTF-8 of at most 255 bytes, without white space at its ends.")
	}
	if err := c.resolveAgent(r.Context(), msg); err != nil {
		return nil, err
	}
	return msg, nil
}

// resolveAgent reads the agents, the callable skills and the thread that the visitor names msg.Name, in one batch. Then
// it selects the agent that the model id names. It retries the batch when the connection breaks.
func (c *Chat) resolveAgent(ctx context.Context, msg *UserMessage) error {
	available := &reason.Available{}
	err := postgres.RetryOnDisconnect(ctx, func() error {
		b := &pgx.Batch{}
		c.Agents.QueueList(b, &available.Agents)
		skills.QueueCallable(b, scopes, &available.Skills)
		if msg.Name != "" && msg.Join == "" {
			msg.resolvedName = msg.Name
			threads.QueueResolve(b, msg.principal(), msg.Name, &msg.thread, &msg.threadExists)
		}
		return c.Front.SendBatch(ctx, b).Close()
	})
	if err != nil {
		return fmt.Errorf("find agent and thread: %w", err)
	}
	msg.available = available
	msg.agent, err = selectAgent(agents.ReachedBy(available.Agents, msg.Owner), msg.Model)
	return err
}

// NewThreadID returns a thread id that cannot be guessed.
func NewThreadID() string { return "th_" + ulid.MustNew(ulid.Now(), rand.Reader).String() }
