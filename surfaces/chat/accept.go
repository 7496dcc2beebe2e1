package chat

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/admission"
	"github.com/lanekeeper/lanekeeper/internal/chatwire"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/threads"
	"github.com/lanekeeper/lanekeeper/trace"
)

// Line is a message of the history that a client sends.
type Line struct {
	Role, Text string
	Images     []threads.Image
}

// UserMessage is a visitor's message with its sender, thread and agent.
type UserMessage struct {
	Owner         string // the chat key
	Secret        string // the visitor token; "": the key speaks for its users
	Name          string // the visitor's name for the thread; "": a new thread
	Join          string // a join token, which gives access to its thread under Name
	Participant   string
	Channel       string // default chat
	Target        string // on a channel of people: its name
	Texts         []string
	Images        [][]threads.Image // of each of Texts
	Earlier       []Line            // the history of a new thread
	Model         string            // the id in the request
	MaxTokens     int               // 0: no bound
	Key           string            // the idempotency key; "": none
	Hash          string            // of the body; a repeated key requires the same one
	TraceID       trace.ID
	Files         [][]File          // of each of Texts
	Seen          int64             // the last place in the thread that the visitor has read
	agent         agents.Agent      // the agent that answers
	available     *reason.Available // what the turn chooses from
	ownsTrace     bool              // no other message has the trace
	thread        string            // the id of the thread
	threadExists  bool              // the thread exists
	resolvedName  string            // the name for which thread and threadExists were read; "": none, or used
	nameGenerated bool              // Name was generated
	response      *responseEcho     // of a request to /v1/responses
	form          *reason.Form      // the format of the answer; nil for text
	formParam     string            // the parameter that names the format
	unseen        *span             // the flows' messages that the answer shows first
	requiredLast  string            // the execution that must be the thread's last; "": any
	retry         *retry            // recognises a retry; nil when the request is none
	hold          *admission.Hold   // admits the turn; nil for a message without HTTP
}

// principal is the sender.
func (a *UserMessage) principal() threads.Principal {
	if a.Secret != "" {
		return threads.Visitor(a.Owner, a.Secret)
	}
	return threads.Key(a.Owner)
}

// input returns the input of the turn, or of the relay to an execution.
func (a *UserMessage) input(to string) input {
	return input{
		Owner: a.Owner, Visitor: a.principal().Proof, Thread: a.thread, Name: a.Name, Model: a.Model, MaxTokens: a.MaxTokens,
		Hash: a.Hash, To: to, Channel: a.Channel, Target: a.Target,
		Response: a.response, Form: a.form, Unseen: a.unseen,
	}
}

// input is the input of a turn's execution. The thread has the message.
type input struct {
	Owner     string `json:"owner"`
	Visitor   string `json:"visitor,omitempty"` // digest of the visitor's secret
	Thread    string `json:"thread_id"`
	Name      string `json:"thread_name,omitempty"` // the visitor's name for the thread; "": its id
	Model     string `json:"model"`
	MaxTokens int    `json:"max_tokens,omitempty"`
	Hash      string `json:"request_hash,omitempty"`
	To        string `json:"to,omitempty"`      // the execution that receives a relayed message
	Channel   string `json:"channel,omitempty"` // default chat
	Target    string `json:"target,omitempty"`  // on a channel of people: its name
	// Response is the part of the request that a response repeats; nil for a completion.
	Response *responseEcho `json:"response,omitempty"`
	Form     *reason.Form  `json:"form,omitempty"` // the format of the answer; nil for text
	// Unseen is the span of the flows' messages since the last answer; nil for a relay.
	Unseen *span `json:"unseen,omitempty"`
}

// isSentBy reports whether a principal sent the message.
func (in input) isSentBy(p threads.Principal) bool {
	return in.Owner == p.Owner && in.Visitor == p.Proof
}

// principal is the sender.
func (in input) principal() threads.Principal {
	if in.Visitor != "" {
		return threads.Principal{Kind: threads.ByVisitor, Owner: in.Owner, Proof: in.Visitor}
	}
	return threads.Key(in.Owner)
}

// name returns the visitor's name for the thread.
func (in input) name() string { return cmp.Or(in.Name, in.Thread) }

func readInput(x *executions.Execution) (in input, err error) {
	if err := json.Unmarshal(x.Input, &in); err != nil {
		return in, fmt.Errorf("read input of execution %s: %w", x.ID, err)
	}
	return in, nil
}

// spec describes the execution of a turn.
func (a *UserMessage) spec() executions.Spec {
	s := executions.Spec{
		Flow: Flow, Surface: trace.Chat, TraceID: a.TraceID, Agent: agentName(a.agent), ThreadID: a.thread,
		Queue: executions.Interactive, Priority: 1, Input: a.input(""),
	}
	switch {
	case a.Key != "" && a.Secret != "":
		s.DedupeKey = "chat visitor:" + a.principal().Proof + ":" + a.Owner + ":" + a.Key
	case a.Key != "":
		s.DedupeKey = "chat:" + a.Owner + ":" + a.Key
	case a.ownsTrace: // stores the message once if the answer to its commit is lost
		s.DedupeKey = "chat request " + string(a.TraceID)
	}
	return s
}

// startedTurn is a turn that was started.
type startedTurn struct {
	exec    executions.Execution
	name    string // the visitor's name for the thread
	feed    *feed
	release func()
}

// startTurn stores the message together with its turn, or its relay, and runs that in this process. The caller calls
// release when it no longer reads the feed. Errors for the visitor are *Refusal.
func (c *Chat) startTurn(ctx context.Context, a *UserMessage) (*startedTurn, error) {
	var x executions.Execution
	var created bool
	var cancelled []string
	var stored *storedMessages
	disconnected := false
	if a.nameGenerated = a.Name == ""; a.nameGenerated {
		a.Name = NewThreadID()
	}
	err := postgres.RetryOnDisconnect(ctx, func() error {
		err := c.resolveThread(ctx, a)
		if err == nil {
			err = c.keyedTx.Do(ctx, c.Front, a.thread, func(tx pgx.Tx) (err error) {
				var got insertResult
				got, err = c.insert(ctx, tx, a)
				if x, created, stored = got.exec, got.created, got.stored; created {
					cancelled = got.cancelled
				}
				if err != nil || !created {
					return err
				}
				return activity.Link(ctx, tx, trace.ID(x.TraceID))
			})
		}
		disconnected = disconnected || postgres.Broken(err)
		return err
	})
	if err != nil {
		return nil, threadError(err)
	}
	if disconnected && !created && a.ownsTrace && x.TraceID == string(a.TraceID) {
		created = true // by the try whose answer was lost; nobody else runs it
	}
	for _, id := range cancelled { // the transaction has done it; this stops the ones that run here
		if _, err := c.Engine.Cancel(ctx, id, byInterrupt, "a newer message came"); err != nil {
			c.Logger.WarnContext(ctx, "interrupted turn not stopped", "execution", id, "error", err)
		}
	}
	switch {
	case a.headless(): // any process runs it
		return &startedTurn{exec: x, name: a.Name}, nil
	case a.retry != nil && a.retry.attached:
		return c.attachRetry(x)
	case !created:
		return c.replay(ctx, a, x)
	}
	b := c.runTurn(ctx, x, a.hold, stored)
	b.name = a.Name
	return b, nil
}

// resolveThread finds the thread of a name or a join token. A visitor cannot create a thread under a name of the form
// that the agent generates; the refusal is that of another visitor's thread.
func (c *Chat) resolveThread(ctx context.Context, a *UserMessage) (err error) {
	if a.Join != "" {
		return c.keyedTx.Do(ctx, c.Front, "join "+a.Join, func(tx pgx.Tx) (err error) {
			a.thread, a.Name, err = threads.Join(ctx, tx, a.principal(), a.Join, a.Name, !a.nameGenerated)
			return err
		})
	}
	if a.nameGenerated { // nobody can have a thread of this name
		a.thread = a.Name
		return nil
	}
	if a.resolvedName != a.Name {
		a.thread, a.threadExists, err = threads.Resolve(ctx, c.Front, a.principal(), a.Name)
	}
	a.resolvedName = ""
	if err == nil && !a.threadExists && threads.IsGenerated(a.Name) {
		err = threads.ErrNotFound
	}
	return err
}

// insertResult is the result of storing a message.
type insertResult struct {
	exec      executions.Execution
	created   bool            // false: the key was used before
	cancelled []string        // executions of the cancelled turns
	stored    *storedMessages // nil for a relay
}

// storedMessages has what a turn that starts in this process need not read.
type storedMessages struct {
	messages      []threads.Message // the turn answers; nil when they have images
	noEarlierTurn bool              // the thread has no earlier active turn
	available     *reason.Available // nil: not read
}

// insert stores the message together with its turn, or with a relay, in one transaction.
func (c *Chat) insert(ctx context.Context, tx pgx.Tx, a *UserMessage) (inserted insertResult, err error) {
	// Lock order: the thread's advisory lock, executions, the thread's row. An answer locks in the same order.
	var unseen span
	var known bool
	var retriedID, recipient string
	a.unseen = nil // of an earlier try
	b := &pgx.Batch{}
	if a.retry != nil {
		a.retry.queueFind(b, &retriedID)
	}
	queueThreadLock(b, a.thread)
	c.queueUnseen(b, a, &unseen, &known)
	queueListener(b, a.thread, &recipient)
	if err := tx.SendBatch(ctx, b).Close(); err != nil {
		return inserted, fmt.Errorf("lock thread: %w", err)
	}
	if a.retry != nil {
		if a.retry.attached = retriedID != ""; a.retry.attached {
			inserted.exec, err = executions.Get(ctx, tx, retriedID)
			return inserted, err
		}
	}
	if a.requiredLast != "" {
		if err := a.checkLast(ctx, tx); err != nil {
			return inserted, err
		}
	}
	docRequest, err := c.findDocumentRequest(ctx, tx, a)
	if err != nil {
		return inserted, err
	}
	if docRequest.waiter != "" || recipient != "" {
		if known {
			a.unseen = &unseen
		}
		inserted.exec, inserted.created, err = c.insertRelay(ctx, tx, a, docRequest, recipient)
		return inserted, err
	}
	a.unseen = &unseen
	if inserted.exec, inserted.created, err = c.insertTurn(ctx, tx, a, a.spec()); err != nil || !inserted.created {
		return inserted, err
	}
	inserted.cancelled, inserted.stored, err = c.storeMessage(ctx, tx, a, inserted.exec, docRequest)
	return inserted, err
}

// insertRelay stores the message with a relay to the execution that listens, or that has requested documents.
func (c *Chat) insertRelay(
	ctx context.Context, tx pgx.Tx, a *UserMessage, docRequest documentRequest, recipient string,
) (x executions.Execution, created bool, err error) {
	if err := a.checkRelay(); err != nil {
		return x, false, err
	}
	if err := c.ensureThread(ctx, tx, a); err != nil {
		return x, false, err
	}
	if docRequest.waiter != "" {
		x, created, err = c.relayDocuments(ctx, tx, a, docRequest)
	} else {
		x, created, err = c.relayMessage(ctx, tx, a, recipient)
	}
	if err != nil || !created || a.retry == nil {
		return x, created, err
	}
	b := &pgx.Batch{}
	a.retry.queueRecord(b, x.ID)
	if err := tx.SendBatch(ctx, b).Close(); err != nil {
		return x, created, fmt.Errorf("note request: %w", err)
	}
	return x, created, nil
}

// lockThread serialises the transactions that store messages of a thread.
func lockThread(ctx context.Context, tx pgx.Tx, thread string) error {
	b := &pgx.Batch{}
	queueThreadLock(b, thread)
	if err := tx.SendBatch(ctx, b).Close(); err != nil {
		return fmt.Errorf("lock thread: %w", err)
	}
	return nil
}

func queueThreadLock(b *pgx.Batch, thread string) {
	b.Queue(`select pg_advisory_xact_lock(hashtextextended('chat ' || @thread, 0))`, postgres.Strict{"thread": thread})
}

// runTurn runs an inserted turn in this process. The turn does not end with ctx and holds its admission.
func (c *Chat) runTurn(
	ctx context.Context, x executions.Execution, hold *admission.Hold, stored *storedMessages,
) *startedTurn {
	if hold != nil {
		hold.Keep()
	}
	f, release := c.feeds.join(x.ID)
	f.update(func() { f.startedHere, f.runsHere, f.claim, f.stored = true, true, x.Claim, stored })
	runner, done := c.feeds.join(x.ID)
	detached := context.WithoutCancel(ctx)
	c.wg.Go(func() {
		defer done()
		defer c.turnEnded.notify()
		if hold != nil {
			defer hold.Release()
		}
		got, err := c.Engine.RunClaimed(detached, &x)
		switch {
		case err != nil:
			c.Logger.ErrorContext(detached, "chat turn not finished here", "execution", x.ID, "trace_id", x.TraceID,
				"error", err)
			runner.detach(x.Claim)
		case got.Status.Ended():
			runner.finish(got)
		default:
			runner.detach(x.Claim)
		}
	})
	return &startedTurn{exec: x, feed: f, release: release}
}

// replay answers a message whose idempotency key was used before.
func (c *Chat) replay(ctx context.Context, a *UserMessage, x executions.Execution) (*startedTurn, error) {
	original, err := readInput(&x)
	if err != nil {
		return nil, err
	}
	if original.isSentBy(a.principal()) && original.Thread != "" {
		switch allowed, err := c.hasAccess(ctx, original); {
		case err != nil:
			return nil, err
		case !allowed: // it was revoked since
			return nil, threadError(threads.ErrNotFound)
		}
	}
	id := CompletionID(x.ID)
	switch {
	case x.Flow != Flow && x.Flow != RelayFlow || !original.isSentBy(a.principal()) || original.Hash != a.Hash:
		return nil, &Refusal{
			Status: http.StatusUnprocessableEntity, Type: "invalid_request_error", Code: "idempotency_key_reused",
			Param: "Idempotency-Key", Message: "This Idempotency-Key was used for another request.",
		}
	case !x.Status.Ended():
		r := conflict("still_running", "The first request with this Idempotency-Key is still being answered; attach to it "+
			"with GET /v1/chat/completions/%s.", id)
		r.CompletionID, r.RetryAfter = id, retryDelay
		return nil, r
	}
	f, release := c.feeds.join(x.ID)
	f.finish(x)
	return &startedTurn{exec: x, name: original.name(), feed: f, release: release}, nil
}

// newThread returns the thread that the message creates.
func (a *UserMessage) newThread() threads.Thread {
	return threads.Thread{
		ID: a.thread, Name: a.Name, Channel: cmp.Or(a.Channel, channel), Target: a.Target, Agent: agentName(a.agent),
		Participant: truncate(a.Participant, 200),
	}
}

// ensureThread creates the thread if it is missing, and checks the access of the visitor.
func (c *Chat) ensureThread(ctx context.Context, tx pgx.Tx, a *UserMessage) error {
	thread, _, err := threads.Open(ctx, tx, a.principal(), a.newThread())
	if err == nil && thread.ID != a.thread {
		err = threads.ErrForeign // the access changed since it was read
	}
	if err != nil {
		return err
	}
	return c.checkAgent(ctx, tx, thread.Agent, a)
}

// storeMessage stores the message and applies double texting to the active turns. It returns the ids of the cancelled
// turns.
func (c *Chat) storeMessage(
	ctx context.Context, tx pgx.Tx, a *UserMessage, x executions.Execution, docRequest documentRequest,
) (cancelled []string, stored *storedMessages, err error) {
	from := cmp.Or(a.Channel, channel)
	if cancelled, err = c.applyDoubleTexting(ctx, tx, a, x); err != nil {
		return nil, nil, err
	}
	var earlier []activeTurn
	thread, err := threads.OpenLocked(ctx, tx, a.principal(), a.newThread(), func(b *pgx.Batch) {
		queueActiveTurns(b, a.thread, 0, &earlier)
		if a.retry != nil {
			a.retry.queueRecord(b, x.ID)
		}
	})
	if err == nil {
		err = c.checkAgent(ctx, tx, thread.Agent, a)
	}
	if err != nil {
		return nil, nil, err
	}
	texts, docs, err := c.attachFiles(ctx, tx, a)
	if err != nil {
		return nil, nil, err
	}
	images, err := c.collectImages(ctx, tx, a, docs)
	if err != nil {
		return nil, nil, err
	}
	if err := docRequest.deliver(ctx, c, tx, x, documentIDs(docs)); err != nil {
		return nil, nil, err
	}
	var drafts []threads.NewMessage
	if thread.NextSeq == 1 {
		drafts = importHistory(a, from)
	}
	for i, content := range texts {
		d := threads.NewMessage{
			Role: threads.User, Content: content, Channel: from, ExecutionID: x.ID, TraceID: x.TraceID,
			Status: threads.Received, Follows: i > 0, Images: images[i],
		}
		drafts = append(drafts, d)
	}
	list, err := threads.PostAll(ctx, tx, a.thread, drafts)
	if err != nil {
		return nil, nil, err
	}
	posted := list[len(drafts)-len(texts):]
	stored = &storedMessages{messages: posted}
	if stored.noEarlierTurn = len(earlier) == 0; stored.noEarlierTurn {
		stored.available = a.available
	}
	for _, attached := range images {
		if len(attached) > 0 {
			stored.messages = nil
		}
	}
	return cancelled, stored, nil
}

// importHistory returns the greeting, or the history that the client sent, as the first messages of a new thread.
func importHistory(a *UserMessage, from string) []threads.NewMessage {
	drafts := make([]threads.NewMessage, 0, len(a.Earlier)+len(a.Texts)+1)
	if a.agent.Greeting != "" && len(a.Earlier) == 0 && !a.headless() {
		drafts = append(drafts, threads.NewMessage{
			Role: threads.Assistant, Content: a.agent.Greeting, Channel: from, Status: threads.Sent, Follows: true,
		})
	}
	for _, line := range a.Earlier {
		d := threads.NewMessage{
			Role: line.Role, Content: line.Text, Channel: from, Status: threads.Received, Images: line.Images,
		}
		if line.Role == threads.Assistant {
			d.Status, d.Follows = threads.Sent, true
		}
		drafts = append(drafts, d)
	}
	return drafts
}

// threadError converts an error of a thread to a *Refusal for the visitor.
func threadError(err error) error {
	var r *Refusal
	switch {
	case errors.As(err, &r):
		return r
	case errors.Is(err, threads.ErrForeign), errors.Is(err, threads.ErrNotFound), errors.Is(err, threads.ErrToken):
		return notFound("thread_not_found", "There is no such thread.")
	case errors.Is(err, threads.ErrTaken):
		return conflict("thread_name_taken", "You have another thread of that name. Send X-Thread-Join with another "+
			"X-Thread-Id, or without one.")
	case postgres.Locked(err):
		r := serverError(http.StatusServiceUnavailable, "thread_locked", "This thread is busy: another transaction has it "+
			"locked. Please send the message again.")
		r.RetryAfter = retryDelay
		return r
	case errors.Is(err, threads.ErrInvalid):
		return badRequest("thread_id", "invalid_thread_id", "A thread id is 1 to %d printable characters.", threads.MaxID)
	}
	return err
}

// Answer is the answer to a message.
type Answer struct {
	ID       string `json:"id"`        // of the completion
	ThreadID string `json:"thread_id"` // the visitor's name for it
	TraceID  string `json:"trace_id"`
	Text     string `json:"text"`
	Finish   string `json:"finish_reason"`
}

// cancelTimeout bounds how long Send waits for a cancelled turn to stop: the caller may close what the turn uses.
const cancelTimeout = 5 * time.Second

// Say sends a message without HTTP and returns the answer. show, where set, receives the text in pieces. onApproval is
// called once when the turn waits for an approval. The turn is cancelled when ctx ends first. Errors for the visitor
// are *Refusal. Engine.Run or Engine.KeepAlive must keep the engine's lease meanwhile.
func (c *Chat) Say(ctx context.Context, a UserMessage, show func(piece string), onApproval func()) (Answer, error) {
	if a.TraceID == "" {
		a.TraceID, a.ownsTrace = trace.New(trace.Chat), true
	}
	var err error
	if a.agent, err = c.Agents.Find(ctx, c.Front, a.Model); err != nil {
		return Answer{}, err
	}
	b, err := c.startTurn(ctx, &a)
	if err != nil {
		return Answer{}, err
	}
	defer b.release()
	answer := Answer{ID: CompletionID(b.exec.ID), ThreadID: b.name, TraceID: b.exec.TraceID}
	f := &follower{Chat: c, id: b.exec.ID, traceID: b.exec.TraceID, feed: b.feed, show: show}
	waited := false
	f.activity = func(kind, _ string) {
		if kind == chatwire.ActivityApproval && !waited {
			waited = true
			onApproval()
		}
	}
	got, err := f.follow(ctx)
	if ctx.Err() != nil {
		if _, err := c.Engine.Cancel(context.WithoutCancel(ctx), b.exec.ID, activity.ActorFrom(ctx).Name,
			"the visitor interrupted"); err != nil {
			return answer, fmt.Errorf("cancel turn: %w", err)
		}
		b.feed.awaitDetach(cancelTimeout)
		return answer, context.Cause(ctx)
	}
	answer.Text, answer.Finish = got.Text, string(got.Finish)
	return answer, err
}
