// Package chat is the surface on which visitors talk with an agent: OpenAI's chat completions and responses, a small
// page, and `agent chat`.
//
// A conversation is a thread and lives in Postgres. A request names it by the header X-Thread-Id, by metadata.thread_id
// or by user, else it begins a new one; the answer names it in X-Thread-Id. Names are the visitor's own: the visitor is
// the key, for a backend that speaks for its users, or the key and a secret, X-Visitor-Token, which the page always has
// and a key that browsers hold (Chat.Browser) must have. Of a request's messages only the user's after the last answer
// are new, at most 32. The last 200 earlier ones are taken over when the thread is new, so that clients which keep
// their own history work; all are stored in one statement. System and developer messages are dropped, because nothing
// that a client sends is an instruction to the agent.
//
// A turn is one execution. It is inserted, claimed by the process that has the connection, in one transaction with
// the visitor's message, and does not end with the connection: GET /v1/chat/completions/{id} attaches again, with
// stream=true to what is said from the beginning. When the process dies, another finishes the turn. The turn
// holds the lane thread:{id}, and the turns of a thread are answered in the order in which their messages were
// stored: each waits until no earlier one is under way, without a worker while it is resumed headless, so few
// workers cannot deadlock. The answer is a message of the thread before the final chunk is sent; what was
// streamed up to [DONE] is what is stored. When a model call is repeated after text of it was shown, the text
// stays and says that the answer begins again. The one sentence that is not stored is the notice with which a
// connection ends that has waited too long for an admin's approval. A turn that the limit of a day keeps from answering
// stores a sentence that says when the limit ends, and its client gets that as the error insufficient_quota.
//
// A message is stored by one short transaction. It waits for locks of others without a connection, and for a second at
// most: then it is refused as thread_locked, 503, and nothing is stored. So one thread that somebody has locked takes
// no connections from the visitors of others. Turns use the connections of the engine.
//
// A message in a thread that an execution of another flow has, or that one waits for, is for that execution: it is
// recorded, it ends the wait as MESSAGE_RECEIVED, and no model is called. Its answer is what is said in the thread
// after it, until whoever got it waits for something again or has ended, or two minutes have passed; it has an id like
// any other, to attach to. When nothing was said, one sentence says that the message was passed on. Into a thread that
// somebody else began a visitor gets by a join token, X-Thread-Join, or because the key was named (package threads);
// any other is refused, and looks as if it did not exist.
//
// What a flow says without a message of the visitor comes first in the next answer (unseen.go). The input of the turn
// has the places of these words, so a repeated request shows them again and no other turn does.
//
// Images come with messages (image.go), as https URLs, which the model's server fetches and this one never does, or as
// their bytes. They are kept with their message, outside of the record. A model that takes text alone refuses them.
//
// A client that sends a request again, because its connection broke, gets the turn that the first one began: see retry.
// POST /v1/responses begins the same turns. Its thread is that of the conversation, else of the previous response,
// which must be the thread's last (409); client tools are refused by name.
//
// A request may ask for an answer in a form, JSON of a schema (form.go). Nothing of such an answer is shown before the
// loop has validated it, and what is not in the form is an error.
//
// The model of a request names an agent (package agents). A key reaches the agents that name it, else the default one.
// A thread has one agent: another model there is refused with 409. An agent's greeting is the first message of each new
// thread.
//
// POST /v1/files stores a document of the visitor (package documents). A message that names its id shows the model the
// document's name, type and size, and the beginning of its text. The document then belongs to the message's thread, by
// the same transaction. That transaction also stores a file that the message itself holds (file_data).
// A file that is an image is shown as an image to a model that takes images.
//
// A visitor gets the skills of scope external and both, nothing else. Which those are is fixed here, not by
// anything in a request, a message or a model's answer. A skill that needs approval parks the turn.
package chat

import (
	"cmp"
	"container/list"
	"context"
	"crypto/sha256"
	"errors"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/time/rate"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/documents"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/admission"
	"github.com/lanekeeper/lanekeeper/internal/chatwire"
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

// channel is where the threads of this surface are begun.
const channel = "chat"

// DoubleTexting says what happens to a message that comes while the thread's last one is being answered.
type DoubleTexting string

// The ways of double texting.
const (
	Enqueue   DoubleTexting = "enqueue"   // answered next
	Reject    DoubleTexting = "reject"    // refused with 409
	Interrupt DoubleTexting = "interrupt" // the answer under way is cut short, and the new message answered
)

// Chat is the surface. Pool, Engine and Loop are required; zero fields take the default. Change nothing after
// Register.
type Chat struct {
	Pool   *pgxpool.Pool // for turns
	Front  *pgxpool.Pool // for requests, whose senders are anybody; Pool when nil
	Engine *executions.Engine
	Loop   *reason.Loop
	Logger *slog.Logger
	// Agents says which agents a key reaches; the Loop's by default. Their names are the models that clients see.
	Agents *agents.Directory
	// Visitor names the key a request came with; that is who owns the threads it begins. Default: nobody in particular.
	Visitor func(r *http.Request) string
	// Browser says of a key that browsers hold it: each visitor has a token of its own, and without it a request is a
	// new visitor's. Default: none.
	Browser func(key string) bool
	// Address is where a request came from, for the rate limit; default clientip.Key.
	Address       func(r *http.Request) string
	DoubleTexting DoubleTexting // default Enqueue
	// Rate is how many messages a minute a visitor may send; default 30, negative for no limit. A third of it may
	// come at once.
	Rate int
	// Turns is how many turns may be under way in this process that came from requests; default 2048. One key may have
	// three quarters of them, one address half; one visitor, or thread of a key without visitors, a sixteenth and at
	// most 16.
	Turns int
	// MaxBody is the size of a request, in bytes; default 256 KiB. MaxMessage is that of what is new in it; default 32
	// KiB.
	MaxBody int64
	// DocumentBytes bounds a file that a visitor uploads; default [documents.DefaultMaxBytes].
	DocumentBytes int64
	MaxMessage    int
	// KeepAlive is how often a silent stream sends an empty chunk; default 10 s.
	KeepAlive time.Duration
	// ApprovalWait is how long a connection waits for an admin; default 2 min.
	ApprovalWait time.Duration
	// Patience is how long a turn waits in its process for earlier ones, before it waits durably; default 1 min.
	Patience time.Duration
	// History is how many tokens of a conversation a model gets to see verbatim; default 12,000. What is older is
	// summarised.
	History int
	// RelayWait is how long the answer to a message which goes to an execution takes at most, before it ends with what
	// was said until then; default 2 min.
	RelayWait time.Duration
	Listener  *postgres.Listener // shortens waits; may be nil
	// Budget, where set, stands in for the Loop's.
	Budget *reason.Budget
	// Summarise makes a summary of messages and of the previous summary; default the Loop's.
	Summarise func(ctx context.Context, purpose, previous string, messages []models.Message) (string, error)

	created int64 // unix seconds, of the model listing
	limits  *limits
	work    *admission.Budget // of turns
	feeds   feeds
	intake  postgres.KeyedTx
	ended   bell // rings when a turn has ended here
	turns   sync.WaitGroup
}

// Register tells the engine how to take turns, and fills in the defaults.
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
	c.Patience = cmp.Or(c.Patience, time.Minute)
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
	c.work = admission.New(int64(c.Turns))
	for _, flow := range []string{Flow, RelayFlow, SummaryFlow} {
		e.Unforkable(flow, "a turn answers one message of its thread; say it again in the thread")
	}
	return errors.Join(e.Register(Flow, c.run), e.Register(RelayFlow, c.relay), e.Register(SummaryFlow, c.summarise))
}

// Run returns when ctx has ended and the turns that this process began for its connections have ended, too, or were
// handed on. Call it beside the engine's Run.
func (c *Chat) Run(ctx context.Context) error {
	if c.Listener != nil { // so that streams do not begin and end to listen, one after the other
		_, unsubscribe := c.Listener.SubscribeTo(threads.AccessChannel, func(string) bool { return false })
		defer unsubscribe()
	}
	<-ctx.Done()
	c.turns.Wait()
	return nil
}

// mostVisitors is how many visitors are remembered; the one that was quiet longest is forgotten first.
const mostVisitors = 20_000

// guests is how many visitors one address may speak for.
const guests = 20

// limits bounds how much a visitor may send. Safe for concurrent use.
type limits struct {
	perMinute int
	mu        sync.Mutex
	known     map[visitorKey]*list.Element
	recent    *list.List // of *visitor, the latest first
}

// visitorKey is the digest of a visitor's name: what is remembered has a fixed size.
type visitorKey [sha256.Size]byte

type visitor struct {
	key   visitorKey
	quota *rate.Limiter
}

// newLimits allows so many messages a minute, a third of them at once; a negative number is no limit.
func newLimits(perMinute int) *limits {
	return &limits{perMinute: perMinute, known: map[visitorKey]*list.Element{}, recent: list.New()}
}

// take counts a message against a name whose share is some times the usual one; it returns how long to wait
// when that is too many.
func (l *limits) take(name string, share int) time.Duration {
	if l.perMinute < 0 {
		return 0
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	key := visitorKey(sha256.Sum256([]byte(name)))
	e := l.known[key]
	if e == nil {
		n := l.perMinute * share
		e = l.recent.PushFront(&visitor{key, rate.NewLimiter(rate.Limit(float64(n)/60), max(1, n/3))})
		l.known[key] = e
		if l.recent.Len() > mostVisitors {
			oldest := l.recent.Back()
			delete(l.known, l.recent.Remove(oldest).(*visitor).key)
		}
	}
	l.recent.MoveToFront(e)
	now := time.Now()
	wanted := e.Value.(*visitor).quota.ReserveN(now, 1)
	wait := wanted.DelayFrom(now)
	if wait > 0 {
		wanted.CancelAt(now)
	}
	return wait
}

// allow refuses a visitor who sends too much. The visitor is the key with the token that the request brings, else with
// the user that it names, else with its address. A client may make up any token and any user. So the address has a
// bound as well, for many, which comes first.
func (c *Chat) allow(r *http.Request, owner, user, token string) error {
	address := c.Address(r)
	who := "\x00" + user
	if token != "" {
		who = "\x00token " + token
	}
	var wait time.Duration
	if user == "" && token == "" {
		wait = c.limits.take(owner+"\x00@"+address, 1)
	} else if wait = c.limits.take(owner+"\x00@@"+address, guests); wait == 0 {
		wait = c.limits.take(owner+who, 1)
	}
	if wait == 0 {
		return nil
	}
	return &Refusal{
		Status: http.StatusTooManyRequests, Type: "rate_limit_error", Code: "rate_limit_exceeded",
		Message: "Too many messages. Please wait a moment.", RetryAfter: max(wait, time.Second),
	}
}

// enter finds a place for a turn among those that are under way here. It is bounded by key, address, and visitor or
// else thread, so that no one of them has all: what a message costs is due after it was taken, and also when its sender
// has left. A message that names neither visitor nor thread begins a thread of its own.
func (c *Chat) enter(r *http.Request, a UserMessage) (*admission.Hold, error) {
	turns := int64(c.Turns)
	few := min(turns/16, 16) // of one visitor
	shares := []admission.Share{
		{Name: "key " + a.Owner, Most: turns * 3 / 4},
		{Name: "address " + c.Address(r), Most: turns / 2},
	}
	switch {
	case a.Secret != "":
		shares = append(shares, admission.Share{
			Name: "visitor " + a.Owner + "\x00" + a.principal().Proof,
			Most: few,
		})
	case a.Name != "":
		shares = append(shares, admission.Share{Name: "thread " + a.Owner + "\x00" + a.Name, Most: few})
	}
	place, err := c.work.Take(1, shares...)
	if err != nil {
		return nil, &Refusal{
			Status: http.StatusTooManyRequests, Type: "rate_limit_error", Code: "rate_limit_exceeded",
			Message: "Too many messages are being answered. Please wait a moment.", RetryAfter: retrySoon,
		}
	}
	return place, nil
}

// modelOwner is who owns the models that clients see.
const modelOwner = "lanekeeper"

// formerName was the default of AGENT_NAME, and stands in clients' configurations.
const formerName = "flowpilot"

// reachable lists the agents that a request's key reaches.
func (c *Chat) reachable(r *http.Request) ([]agents.Agent, error) {
	return c.reachedBy(r.Context(), c.Visitor(r))
}

// reachedBy lists the agents that a chat key reaches. A connection that breaks is no answer: another is asked.
func (c *Chat) reachedBy(ctx context.Context, key string) (list []agents.Agent, err error) {
	err = postgres.Again(ctx, func() error {
		list, err = c.Agents.Reachable(ctx, c.Front, key)
		return err
	})
	return list, err
}

// choose finds the agent of a model id. The alias is the default agent, or the only one that the key reaches.
func choose(reachable []agents.Agent, model string) (agents.Agent, error) {
	for _, a := range reachable {
		if a.Name == model || model == agents.Alias && (a.Default || len(reachable) == 1) {
			return a, nil
		}
		if model == formerName && !a.Declared() {
			return a, nil
		}
	}
	r := unknown("model_not_found", "The model %q does not exist, or this key does not reach it. There is: %s.",
		clip(model, 100), strings.Join(names(reachable), ", "))
	r.Param = "model"
	return agents.Agent{}, r
}

func names(list []agents.Agent) []string {
	all := make([]string, len(list))
	for i, a := range list {
		all[i] = a.Name
	}
	return all
}

// modelsOf lists the models that clients may name: the agents, and the alias where it means one of them.
func modelsOf(reachable []agents.Agent) []chatwire.Model {
	var list []chatwire.Model
	for _, a := range reachable {
		list = append(list, modelOf(a))
	}
	if a, err := choose(reachable, agents.Alias); err == nil && a.Name != agents.Alias {
		alias := modelOf(a)
		alias.ID = agents.Alias
		list = append(list, alias)
	}
	return list
}

// modelOf is an agent as clients see it.
func modelOf(a agents.Agent) chatwire.Model {
	return chatwire.Model{ID: a.Name, Description: a.Description, Greeting: a.Greeting}
}

// rowName is an agent's name on executions, threads and activity rows.
func rowName(a agents.Agent) string {
	if !a.Declared() {
		return Agent
	}
	return a.Name
}

// sameAgent refuses a message to another agent than the thread's. A thread whose agent is not declared is the default
// agent's.
func (c *Chat) sameAgent(ctx context.Context, tx pgx.Tx, thread string, a UserMessage) error {
	if thread == rowName(a.agent) {
		return nil
	}
	owner, err := c.Agents.Acting(ctx, tx, thread)
	if err != nil || owner.Name == a.agent.Name {
		return err
	}
	r := conflict("thread_agent", "This thread is one with %s. Name that model, or begin another thread.", owner.Name)
	r.Param = "model"
	return r
}

// opened lets a history begin with the visitor, as servers want it: the agent may have spoken first, with its greeting.
func opened(history []models.Message) []models.Message {
	if len(history) == 0 || history[0].Role != threads.Assistant {
		return history
	}
	return slices.Insert(history, 0, models.Message{
		Role:    threads.User,
		Content: "[The visitor opened the conversation.]",
	})
}
