package channels

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptrace"
	"sync/atomic"
	"time"
)

// Transport speaks with one provider. Its methods may be called from any goroutine.
type Transport interface {
	// Run receives until ctx ends. It hands messages to in and acknowledges them after in has returned nil. After an
	// error it is called again, with growing pauses; the error is the state of the channel.
	Run(ctx context.Context, in Inbox) error
	// Send sends one part and returns the provider's id of it. An error that is no [SendError] counts as maybe sent.
	Send(ctx context.Context, m Message) (externalID string, err error)
	Limits() Limits
	// Issuer names the issuer of the senders' ids, such as telegram:4711.
	Issuer(ctx context.Context) (string, error)
}

// Editor replaces the text of a sent message.
type Editor interface {
	Edit(ctx context.Context, externalID string, m Message) error
}

// Typist shows in a conversation that the agent writes an answer.
type Typist interface {
	Typing(ctx context.Context, conversation string) error
}

// Acknowledger answers a click with a sentence.
type Acknowledger interface {
	Acknowledge(ctx context.Context, click Incoming, text string) error
}

// Fetcher reads a file of a message, at most limit bytes.
type Fetcher interface {
	Fetch(ctx context.Context, f File, limit int64) ([]byte, error)
}

// Extractor reads a file of a message from the data stored with the message.
type Extractor interface {
	Extract(raw []byte, f File, limit int64) ([]byte, error)
}

// Finder reports whether a part arrived. A channel without a Finder never repeats a part whose answer was lost.
type Finder interface {
	Find(ctx context.Context, m Message) (externalID string, found bool, err error)
}

// Hook receives messages by POST /channels/{name}. It authenticates the request and answers it.
type Hook interface {
	Hook(w http.ResponseWriter, r *http.Request, in Inbox)
}

// Limits are the limits of a provider.
type Limits struct {
	Text    int                   // length of a part, in units of Length
	Length  func(text string) int // default: characters
	Edits   time.Duration         // the shortest pause between two edits of a draft; 0: the channel shows no draft
	Buttons bool                  // a message may have buttons
}

// Message is one part of an outgoing message.
type Message struct {
	ID           string // of the message in agent_messages, the same in every attempt; for a draft, of its execution
	Part         int    // from 0
	Conversation string
	Markdown     string // within the limits
	ReplyTo      string // the provider's id of the answered message; "" for none
	Buttons      []Button
}

// Button is a button below a message.
type Button struct {
	Label string
	Nonce string // at most 64 bytes
}

// Incoming is a message or a click of a person.
type Incoming struct {
	ExternalID   string // unique in the channel
	Conversation string
	Sender       string // the provider's id
	SenderName   string
	Text         string
	Files        []File
	Click        string // the nonce of a button; a click has no text
	Ref          string // the data for Acknowledge
	MessageRef   string // the provider's id of the message, or of the one with the button
	Ignored      string // why nobody answers it; stored with the message
	Raw          []byte // the source from which an [Extractor] reads the files; stored with the message
}

// File is a reference to a file of a message.
type File struct {
	ID   string `json:"id"`
	Name string `json:"name"`
	Type string `json:"type,omitempty"`
	Size int64  `json:"size,omitempty"`
}

// Inbox stores the messages that a transport receives.
type Inbox interface {
	// Receive commits messages, each once, together with the cursor, unless the cursor is "".
	Receive(ctx context.Context, cursor string, messages ...Incoming) error
	// Cursor returns the cursor and its age by the database's clock.
	Cursor(ctx context.Context) (cursor string, age time.Duration, err error)
	// Known reports whether the agent was brought into a conversation.
	Known(ctx context.Context, conversation string) (bool, error)
	// Connected records that the provider answered.
	Connected(ctx context.Context)
	// Failing records that the provider does not answer. Messages may still arrive.
	Failing(ctx context.Context, cause error)
	// Bounced records that a message did not arrive after all, by the id of [Message].
	Bounced(ctx context.Context, id, why string) error
}

// SendError describes the fate of a part.
type SendError struct {
	Err        error
	RetryAfter time.Duration // the provider requested a pause; the part was not sent
	Permanent  bool          // the provider will never accept it
	MaybeSent  bool          // the part may have been sent
}

func (e *SendError) Error() string { return e.Err.Error() }

func (e *SendError) Unwrap() error { return e.Err }

// NotSent returns the error of a part that certainly was not sent. The worker tries it again.
func NotSent(err error) error { return &SendError{Err: err} }

// Do sends a request with client. If client got no connection, no byte was sent, and the error is that of [NotSent].
func Do(client *http.Client, r *http.Request) (*http.Response, error) {
	var connected atomic.Bool
	trace := &httptrace.ClientTrace{GotConn: func(httptrace.GotConnInfo) { connected.Store(true) }}
	response, err := client.Do(r.WithContext(httptrace.WithClientTrace(r.Context(), trace)))
	if err != nil && !connected.Load() {
		return nil, NotSent(err)
	}
	return response, err
}

// Config has the inputs of Open.
type Config struct {
	Channel Channel
	Secrets map[string]string // resolved
	Client  *http.Client
	Logger  *slog.Logger
}

// Open opens a transport. It must not contact the provider.
type Open func(c Config) (Transport, error)

// ErrMisconfigured marks an error of Run that a person has to correct, such as a wrong token. The worker then asks the
// provider once a minute.
var ErrMisconfigured = errors.New("the channel is misconfigured")
