// Package chat is the surface for visitors: OpenAI's chat completions and responses, a web page, and `agent chat`.
//
// # Threads and visitors
//
// A conversation is a thread in Postgres. A request names it by the header X-Thread-Id, by metadata.thread_id or by
// user; without a name it starts a new thread. The answer returns the name in X-Thread-Id. A name belongs to a visitor.
// A visitor is a chat key, for a backend that speaks for its users, or a key with the token in X-Visitor-Token. The web
// page always has a token, and keys that browsers hold (Chat.Browser) require one.
//
// Only the user messages after the last answer are new, at most 32. A new thread imports up to 200 earlier messages, so
// clients that keep their own history work. One statement stores them all. System and developer messages are dropped:
// a client cannot instruct the agent.
//
// # Turns
//
// A turn is one execution. One transaction stores it together with the message, and the process of the connection
// claims it. It does not end with the connection: GET /v1/chat/completions/{id} attaches again. If the process dies,
// another one finishes the turn.
//
// A turn holds the lane thread:{id}. The turns of a thread run in the order of their messages. A turn without a client
// waits for earlier turns durably, without a worker. The answer is stored before the final chunk is sent, and the text
// of the stream up to [DONE] is the stored text. If a failed model call has shown text, the text stays and the stream
// says that the answer starts again. Only the notice of a connection that waits too long for an approval is not stored.
// If a daily limit blocks a turn, the turn stores a sentence with the time to write again; its client gets
// insufficient_quota.
//
// The transaction that stores a message waits at most one second for each lock. After that the server refuses the
// message with 503, thread_locked, and stores nothing. So a locked thread does not exhaust the connections of other
// visitors.
//
// # Messages to executions
//
// An execution of another flow may hold the thread, or wait for a message in it. That execution then receives the
// message, which ends the wait as MESSAGE_RECEIVED. No model is called. The execution's later messages are the answer,
// until it waits again or ends, or for two minutes. Without a later message, one sentence says that the message was
// passed on. A visitor enters a thread of another owner by a join token, X-Thread-Join, or because its key was named
// (package threads). The server refuses any other thread as if the thread did not exist. Messages that a flow sends
// without a message of the visitor start the next answer.
//
// # Images, files and formats
//
// Images come as https URLs, which the model's server fetches, or as bytes. They are stored with their message. A model
// that takes only text refuses them. POST /v1/files stores a document (package documents). A message that names its id
// shows the model its name, type, size and start. The document then belongs to the thread, in the same transaction,
// which also stores files that the message includes. A request may ask for an answer in a JSON schema: the loop
// validates it before the client sees any of it, and an invalid answer is an error.
//
// # Repeated requests
//
// A client that sends a request again gets the turn of the first request; see retry. POST /v1/responses starts the same
// turns. It uses the thread of the conversation, else that of the previous response, else that of X-Thread-Id. The
// previous response must be the last one of its thread (409).
//
// # Agents and permissions
//
// The model of a request names an agent (package agents). A key reaches the agents that name it, else the default
// agent. A thread has one agent; the server refuses another model with 409. The agent's greeting is the first message
// of a new thread.
//
// Visitors use the skills of the scopes external and both, and document_read if the conversation has a long document.
// No request, message or answer changes that. A skill that requires approval parks the turn.
package chat

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"net/http"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/documents"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/admission"
	"github.com/lanekeeper/lanekeeper/internal/clientip"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/models"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/threads"
)

// The flows that this surface registers: a visitor's turn, and the summary of a long conversation.
const (
	Flow        = "chat"
	SummaryFlow = "chat_summary"
)

// Agent is the agent's name in the activity log when it talks with visitors and no workspace declares an agent.
const Agent = "visitor_chat"

// channel is the channel of threads that this surface creates.
const channel = "chat"

// DoubleTexting is the treatment of a message to a thread with an active turn.
type DoubleTexting string

// The ways of double texting.
const (
	Enqueue   DoubleTexting = "enqueue"   // answered next
	Reject    DoubleTexting = "reject"    // refused with 409
	Interrupt DoubleTexting = "interrupt" // the active turn is cancelled, and the new message answered
)

// Chat is the surface. Pool, Engine and Loop are required; zero fields take the default. Change nothing after
// Register.
type Chat struct {
	Pool   *pgxpool.Pool // for turns
	Front  *pgxpool.Pool // for requests of visitors; default Pool
	Engine *executions.Engine
	Loop   *reason.Loop
	Logger *slog.Logger
	// Agents resolves the agents of a key, whose names are the models that clients see. Default: the Loop's.
	Agents *agents.Directory
	// Visitor returns the name of the key of a request. The key owns the threads that the request creates. Default: "".
	Visitor func(r *http.Request) string
	// Browser reports whether browsers hold a key. Its visitors then need a token each, and a request without one
	// creates a visitor. Default: none.
	Browser func(key string) bool
	// Address returns the client address of a request, for the rate limit; default clientip.Key.
	Address       func(r *http.Request) string
	DoubleTexting DoubleTexting // default Enqueue
	// EmbedOrigins lists the sites that may show the page in a frame, such as https://example.com; default none.
	EmbedOrigins []string
	// Rate is the number of messages per minute of a visitor; default 30, negative: no limit. The burst is a third of it.
	Rate int
	// Turns is the number of active turns of requests in this process; default 2048. A key may have three quarters of
	// them, an address half, and a visitor or an anonymous thread a sixteenth, at most 16.
	Turns int
	// MaxBody bounds a request, in bytes; default 256 KiB. MaxMessage bounds the text of its new messages together, in
	// bytes; default 32 KiB.
	MaxBody    int64
	MaxMessage int
	// DocumentBytes bounds a file that a visitor uploads; default [documents.DefaultMaxBytes].
	DocumentBytes int64
	// KeepAlive is the interval of the empty chunks of an idle stream; default 10 s.
	KeepAlive time.Duration
	// ApprovalWait bounds the wait of a connection for an approval; default 2 min.
	ApprovalWait time.Duration
	// InProcessWait bounds the wait of a turn for earlier turns in its process; then it waits durably. Default 1 min.
	InProcessWait time.Duration
	// History is the number of tokens of the conversation that a model reads verbatim; default 12,000. Older turns are
	// summarised.
	History int
	// RelayWait bounds the answer to a message that an execution receives; default 2 min.
	RelayWait time.Duration
	Listener  *postgres.Listener // shortens waits; may be nil
	// Budget replaces the Loop's budget if set.
	Budget *reason.Budget
	// Summarise summarises messages and the previous summary; default the Loop's.
	Summarise func(ctx context.Context, purpose, previous string, messages []models.Message) (string, error)

	created    int64 // unix seconds, of the model listing
	limits     *limits
	turnBudget *admission.Budget // of turns
	feeds      feeds
	keyedTx    postgres.KeyedTx
	turnEnded  broadcast // of the end of a turn in this process
	wg         sync.WaitGroup
}

// Register registers the flows of the surface with the engine and sets the defaults.
func (c *Chat) Register(e *executions.Engine) error {
	if c.Pool == nil || c.Engine == nil || c.Loop == nil {
		return errors.New("register chat: a pool, an engine and a loop are required")
	}
	c.Front = cmp.Or(c.Front, c.Pool)
	c.Logger = cmp.Or(c.Logger, slog.New(slog.DiscardHandler))
	c.Agents = cmp.Or(c.Agents, c.Loop.Agents, &agents.Directory{})
	c.DoubleTexting = cmp.Or(c.DoubleTexting, Enqueue)
	c.Rate = cmp.Or(c.Rate, 30)
	c.Turns = cmp.Or(c.Turns, 2048)
	c.MaxBody = cmp.Or(c.MaxBody, 256<<10)
	c.DocumentBytes = cmp.Or(c.DocumentBytes, documents.DefaultMaxBytes)
	c.MaxMessage = cmp.Or(c.MaxMessage, 32<<10)
	c.KeepAlive = cmp.Or(c.KeepAlive, 10*time.Second)
	c.ApprovalWait = cmp.Or(c.ApprovalWait, 2*time.Minute)
	c.InProcessWait = cmp.Or(c.InProcessWait, time.Minute)
	c.RelayWait = cmp.Or(c.RelayWait, 2*time.Minute)
	c.History = cmp.Or(c.History, 12_000)
	if c.Visitor == nil {
		c.Visitor = func(*http.Request) string { return "" }
	}
	if c.Browser == nil {
		c.Browser = func(string) bool { return false }
	}
	if c.Address == nil {
		c.Address = clientip.Key
	}
	if c.Summarise == nil {
		c.Summarise = c.Loop.Summarise
	}
	c.created = time.Now().Unix()
	c.limits = newLimits(c.Rate)
	c.turnBudget = admission.New(int64(c.Turns))
	for _, flow := range []string{Flow, RelayFlow, SummaryFlow} {
		e.Unforkable(flow, "a turn answers one message of its thread; say it again in the thread")
	}
	return errors.Join(e.Register(Flow, c.run), e.Register(RelayFlow, c.relay), e.Register(SummaryFlow, c.summarise))
}

// Run waits for the end of ctx. Then it waits until the turns that this process started have ended or were handed over.
// Call it beside the engine's Run.
func (c *Chat) Run(ctx context.Context) error {
	if c.Listener != nil { // one LISTEN for all streams
		_, unsubscribe := c.Listener.SubscribeTo(threads.AccessChannel, func(string) bool { return false })
		defer unsubscribe()
	}
	<-ctx.Done()
	c.wg.Wait()
	return nil
}
