package chat

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/admission"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/threads"
	"github.com/lanekeeper/lanekeeper/trace"
)

// Line is one line of a conversation that a client sends along.
type Line struct {
	Role, Text string
	Images     []threads.Image
}

// UserMessage is a message of a visitor, with what the runtime found out about it.
type UserMessage struct {
	Owner       string // the chat key
	Secret      string // of a visitor whom the key's other visitors must not read; "": who has the key speaks for its users
	Name        string // of the thread, as this visitor calls it; "": a new one
	Join        string // a join token: the visitor gets into its thread, and calls it Name
	Participant string
	Channel     string // default chat
	Texts       []string
	Images      [][]threads.Image // of each of Texts
	Earlier     []Line            // taken over when the thread is new
	Model       string            // the id the client used
	MaxTokens   int               // 0: no bound
	Key         string            // makes the message count once; "" for none
	Hash        string            // of what must be the same when the key comes again
	TraceID     trace.ID
	Files       [][]File        // of each of Texts
	Seen        int64           // a place in the thread: the visitor has seen what flows said up to it
	agent       agents.Agent    // who answers
	own         bool            // the trace was made for this message alone
	thread      string          // the id of the thread
	known       bool            // the thread exists
	resolved    string          // the name that thread and known were read for; "" before that, and once they were used
	fresh       bool            // the name was made up here
	response    *responseEcho   // of a request for a response
	form        *reason.Form    // of the answer; nil for one in words
	formParam   string          // the parameter that says so
	unseen      *span           // of flows' words, which the answer shows first
	last        string          // execution that must be the thread's last; "" for any
	retry       *retry          // recognises the request when it is sent again; nil when it cannot be
	place       *admission.Hold // among the turns under way; nil for one that did not come by HTTP
}

// principal is the sender.
func (a UserMessage) principal() threads.Principal {
	if a.Secret != "" {
		return threads.Visitor(a.Owner, a.Secret)
	}
	return threads.Key(a.Owner)
}

// input is the input of the turn, or of the relay to an execution.
func (a UserMessage) input(to string) input {
	return input{
		Owner: a.Owner, Visitor: a.principal().Proof, Thread: a.thread, Name: a.Name, Model: a.Model, MaxTokens: a.MaxTokens, Hash: a.Hash, To: to,
		Response: a.response, Form: a.form, Unseen: a.unseen,
	}
}

// input is the input of an execution of the flow. The message itself is in the thread.
type input struct {
	Owner     string `json:"owner"`
	Visitor   string `json:"visitor,omitempty"` // digest of the visitor's secret
	Thread    string `json:"thread_id"`
	Name      string `json:"thread_name,omitempty"` // as the visitor calls it; "": its id
	Model     string `json:"model"`
	MaxTokens int    `json:"max_tokens,omitempty"`
	Hash      string `json:"request_hash,omitempty"`
	To        string `json:"to,omitempty"` // of a relay: the execution that the message is for
	// Response is what a response repeats of its request; nil for a completion.
	Response *responseEcho `json:"response,omitempty"`
	Form     *reason.Form  `json:"form,omitempty"` // of the answer; nil for one in words
	// Unseen is where flows spoke since the last answer; nil for a relay that shows what comes after its message.
	Unseen *span `json:"unseen,omitempty"`
}

// isOf reports whether a principal sent the message.
func (in input) isOf(p threads.Principal) bool { return in.Owner == p.Owner && in.Visitor == p.Proof }

// principal is the sender.
func (in input) principal() threads.Principal {
	if in.Visitor != "" {
		return threads.Principal{Kind: threads.ByVisitor, Owner: in.Owner, Proof: in.Visitor}
	}
	return threads.Key(in.Owner)
}

// name is what the visitor calls the thread.
func (in input) name() string { return cmp.Or(in.Name, in.Thread) }

// inputOf reads the input of an execution.
func inputOf(x executions.Execution) (in input, err error) {
	if err := json.Unmarshal(x.Input, &in); err != nil {
		return in, fmt.Errorf("read input of execution %s: %w", x.ID, err)
	}
	return in, nil
}

func entropy() io.Reader { return rand.Reader }

// spec describes the execution of a turn.
func (a UserMessage) spec() executions.Spec {
	s := executions.Spec{
		Flow: Flow, Surface: trace.Chat, TraceID: a.TraceID, Agent: rowName(a.agent), ThreadID: a.thread,
		Queue: executions.Interactive, Priority: 1, Input: a.input(""),
	}
	switch {
	case a.Key != "" && a.Secret != "":
		s.DedupeKey = "chat visitor:" + a.principal().Proof + ":" + a.Owner + ":" + a.Key
	case a.Key != "":
		s.DedupeKey = "chat:" + a.Owner + ":" + a.Key
	case a.own: // so that the message counts once when the answer to its commit is lost
		s.DedupeKey = "chat request " + string(a.TraceID)
	}
	return s
}

// startedTurn is a turn that has begun.
type startedTurn struct {
	exec  executions.Execution
	name  string // of the thread, as the visitor calls it
	feed  *feed
	leave func()
}

// begin stores the message together with its turn, or with the relay of what the execution says that the message is
// for, and lets that run here. The caller leaves the feed when it has seen enough of it. Errors that the visitor may
// know are *Refusal.
func (c *Chat) begin(ctx context.Context, a UserMessage) (startedTurn, error) {
	var x executions.Execution
	var created bool
	var cut []string
	var posted *posted
	broke := false
	if a.fresh = a.Name == ""; a.fresh {
		a.Name = NewThreadID()
	}
	err := postgres.Again(ctx, func() error {
		err := c.locate(ctx, &a)
		if err == nil {
			err = c.intake.Do(ctx, c.Front, a.thread, func(tx pgx.Tx) (err error) {
				var got inserted
				got, err = c.insert(ctx, tx, a)
				if x, created, posted = got.exec, got.created, got.posted; created {
					cut = got.cut
				}
				if err != nil || !created {
					return err
				}
				return activity.Link(ctx, tx, trace.ID(x.TraceID))
			})
		}
		broke = broke || postgres.Broken(err)
		return err
	})
	if err != nil {
		return startedTurn{}, refused(err)
	}
	if broke && !created && a.own && x.TraceID == string(a.TraceID) {
		created = true // by the try whose answer was lost; nobody else runs it
	}
	for _, id := range cut { // the transaction has done it; this stops the ones that run here
		if _, err := c.Engine.Cancel(ctx, id, byInterrupt, "a newer message came"); err != nil {
			c.Logger.WarnContext(ctx, "interrupted turn not told", "execution", id, "error", err)
		}
	}
	switch {
	case a.retry != nil && a.retry.attached:
		return c.joined(x)
	case !created:
		return c.repeated(ctx, a, x)
	}
	b := c.launch(ctx, x, a.place, posted)
	b.name = a.Name
	return b, nil
}

// locate finds the thread that the visitor means, or whose join token the visitor has. A name that the agent gives out
// is never begun by a visitor: another's thread, and one that never was, are the same refusal.
func (c *Chat) locate(ctx context.Context, a *UserMessage) (err error) {
	if a.Join != "" {
		return c.intake.Do(ctx, c.Front, "join "+a.Join, func(tx pgx.Tx) (err error) {
			a.thread, a.Name, err = threads.Join(ctx, tx, a.principal(), a.Join, a.Name, !a.fresh)
			return err
		})
	}
	if a.fresh { // nobody can have a thread of this name
		a.thread = a.Name
		return nil
	}
	if a.resolved != a.Name {
		a.thread, a.known, err = threads.Resolve(ctx, c.Front, a.principal(), a.Name)
	}
	a.resolved = ""
	if err == nil && !a.known && threads.GivenOut(a.Name) {
		err = threads.ErrNotFound
	}
	return err
}

// inserted is what became of a message.
type inserted struct {
	exec    executions.Execution
	created bool     // false when the key was used before
	cut     []string // the turns that it has cancelled
	posted  *posted  // nil for a relay
}

// posted is what a turn that begins in this process need not read.
type posted struct {
	messages []threads.Message // that it answers; nil where they come with images, which are read
	alone    bool              // no earlier turn of the thread is under way, and none can begin any more
}

// insert stores the message together with its turn, or with a relay, in one transaction.
func (c *Chat) insert(ctx context.Context, tx pgx.Tx, a UserMessage) (got inserted, err error) {
	// One message of a thread is stored at a time. This lock comes before executions, and they before the
	// thread's row: the order in which a turn's answer takes them, too.
	var words span
	var known bool
	var again, to string
	b := &pgx.Batch{}
	if a.retry != nil {
		a.retry.queueFind(b, &again)
	}
	queueThreadLock(b, a.thread)
	c.queueUnseen(b, a, &words, &known)
	queueListener(b, a.thread, &to)
	if err := tx.SendBatch(ctx, b).Close(); err != nil {
		return got, fmt.Errorf("lock thread: %w", err)
	}
	if a.retry != nil {
		if a.retry.attached = again != ""; a.retry.attached {
			got.exec, err = executions.Get(ctx, tx, again)
			return got, err
		}
	}
	if a.last != "" {
		if err := a.isLast(ctx, tx); err != nil {
			return got, err
		}
	}
	asked, err := c.requested(ctx, tx, a)
	if err != nil {
		return got, err
	}
	if asked.waiter != "" || to != "" {
		if err := a.passable(); err != nil {
			return got, err
		}
		if err := c.opened(ctx, tx, a); err != nil {
			return got, err
		}
		if known {
			a.unseen = &words
		}
		if asked.waiter != "" {
			got.exec, got.created, err = c.hand(ctx, tx, a, asked)
		} else {
			got.exec, got.created, err = c.pass(ctx, tx, a, to)
		}
		if err != nil || !got.created || a.retry == nil {
			return got, err
		}
		b := &pgx.Batch{}
		a.retry.queueNote(b, got.exec.ID)
		if err := tx.SendBatch(ctx, b).Close(); err != nil {
			return got, fmt.Errorf("note request: %w", err)
		}
		return got, nil
	}
	a.unseen = &words
	if got.exec, got.created, err = c.Engine.InsertClaimed(ctx, tx, a.spec()); err != nil || !got.created {
		return got, err
	}
	got.cut, got.posted, err = c.store(ctx, tx, a, got.exec, asked)
	return got, err
}

// lockThread lets one transaction at a time store messages of a thread.
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

// launch runs a turn that was inserted. It does not end with ctx, and has its place for as long as it runs here.
func (c *Chat) launch(ctx context.Context, x executions.Execution, place *admission.Hold, posted *posted) startedTurn {
	if place != nil {
		place.Keep()
	}
	f, leave := c.feeds.join(x.ID)
	f.change(func() { f.live, f.local, f.claim, f.posted = true, true, x.Claim, posted })
	runner, done := c.feeds.join(x.ID)
	detached := context.WithoutCancel(ctx)
	c.turns.Go(func() {
		defer done()
		defer c.ended.ring()
		if place != nil {
			defer place.Release()
		}
		got, err := c.Engine.RunClaimed(detached, x)
		switch {
		case err != nil:
			c.Logger.ErrorContext(detached, "chat turn not finished here", "execution", x.ID, "error", err)
			runner.away(x.Claim)
		case got.Status.Ended():
			runner.finish(got)
		default:
			runner.away(x.Claim)
		}
	})
	return startedTurn{exec: x, feed: f, leave: leave}
}

// repeated answers a key that was used before.
func (c *Chat) repeated(ctx context.Context, a UserMessage, x executions.Execution) (startedTurn, error) {
	first, err := inputOf(x)
	if err != nil {
		return startedTurn{}, err
	}
	if first.isOf(a.principal()) && first.Thread != "" {
		switch may, err := c.hasAccess(ctx, first); {
		case err != nil:
			return startedTurn{}, err
		case !may: // it was revoked since
			return startedTurn{}, refused(threads.ErrNotFound)
		}
	}
	id := CompletionID(x.ID)
	switch {
	case x.Flow != Flow && x.Flow != RelayFlow || !first.isOf(a.principal()) || first.Hash != a.Hash:
		return startedTurn{}, &Refusal{
			Status: http.StatusUnprocessableEntity, Type: "invalid_request_error", Code: "idempotency_key_reused",
			Param: "Idempotency-Key", Message: "This Idempotency-Key was used for another request.",
		}
	case !x.Status.Ended():
		r := conflict("still_running", "The first request with this Idempotency-Key is still being answered; attach to it with GET /v1/chat/completions/%s.", id)
		r.CompletionID, r.RetryAfter = id, retrySoon
		return startedTurn{}, r
	}
	f, leave := c.feeds.join(x.ID)
	f.finish(x)
	return startedTurn{exec: x, name: first.name(), feed: f, leave: leave}, nil
}

// opening is the thread as the message opens it.
func (a UserMessage) opening() threads.Thread {
	return threads.Thread{
		ID: a.thread, Name: a.Name, Channel: cmp.Or(a.Channel, channel), Agent: rowName(a.agent), Participant: clip(a.Participant, 200),
	}
}

// opened makes sure that the thread is there, and that the visitor may speak in it.
func (c *Chat) opened(ctx context.Context, tx pgx.Tx, a UserMessage) error {
	got, _, err := threads.Open(ctx, tx, a.principal(), a.opening())
	if err == nil && got.ID != a.thread {
		err = threads.ErrForeign // it was revoked, or given, this moment
	}
	if err != nil {
		return err
	}
	return c.sameAgent(ctx, tx, got.Agent, a)
}

// store puts the message into its thread, and deals with the turns that are under way there. It returns the
// turns that it has cancelled.
func (c *Chat) store(
	ctx context.Context, tx pgx.Tx, a UserMessage, x executions.Execution, asked documentRequest,
) (cut []string, said *posted, err error) {
	from := cmp.Or(a.Channel, channel)
	if cut, err = c.applyDoubleTexting(ctx, tx, a, x); err != nil {
		return nil, nil, err
	}
	var earlier []activeTurn
	thread, err := threads.OpenLocked(ctx, tx, a.principal(), a.opening(), func(b *pgx.Batch) {
		queueActiveTurns(b, a.thread, 0, &earlier)
		if a.retry != nil {
			a.retry.queueNote(b, x.ID)
		}
	})
	if err == nil {
		err = c.sameAgent(ctx, tx, thread.Agent, a)
	}
	if err != nil {
		return nil, nil, err
	}
	texts, docs, err := c.attachFiles(ctx, tx, a)
	if err != nil {
		return nil, nil, err
	}
	images, err := c.imagesWith(ctx, tx, a, docs)
	if err != nil {
		return nil, nil, err
	}
	if err := asked.answer(ctx, c, tx, x, idsOf(docs)); err != nil {
		return nil, nil, err
	}
	var drafts []threads.NewMessage
	if thread.NextSeq == 1 {
		drafts = takeOver(a, from)
	}
	for i, words := range texts {
		d := threads.NewMessage{
			Role: threads.User, Content: words, Channel: from, ExecutionID: x.ID, TraceID: x.TraceID,
			Status: threads.Received, Follows: i > 0, Images: images[i],
		}
		drafts = append(drafts, d)
	}
	list, err := threads.PostAll(ctx, tx, a.thread, drafts)
	if err != nil {
		return nil, nil, err
	}
	words := list[len(drafts)-len(texts):]
	said = &posted{messages: words, alone: len(earlier) == 0}
	for _, some := range images {
		if len(some) > 0 {
			said.messages = nil
		}
	}
	return cut, said, nil
}

// takeOver is what the client says was said before, to fill a new thread with.
func takeOver(a UserMessage, from string) []threads.NewMessage {
	drafts := make([]threads.NewMessage, 0, len(a.Earlier)+len(a.Texts)+1)
	if a.agent.Greeting != "" && len(a.Earlier) == 0 {
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

// refused turns an error of a thread into what a visitor may know of it.
func refused(err error) error {
	var r *Refusal
	switch {
	case errors.As(err, &r):
		return r
	case errors.Is(err, threads.ErrForeign), errors.Is(err, threads.ErrNotFound), errors.Is(err, threads.ErrToken):
		return unknown("thread_not_found", "There is no such thread.")
	case errors.Is(err, threads.ErrTaken):
		return conflict("thread_name_taken", "You have another thread of that name. Send X-Thread-Join with another X-Thread-Id, or without one.")
	case postgres.Locked(err):
		r := broken(http.StatusServiceUnavailable, "thread_locked", "This thread is busy: another transaction has it locked. Please send the message again.")
		r.RetryAfter = retrySoon
		return r
	case errors.Is(err, threads.ErrInvalid):
		return bad("thread_id", "invalid_thread_id", "A thread id is 1 to %d printable characters.", threads.MaxID)
	}
	return err
}

// documentRequest is a flow's request for documents that a message with files answers: the oldest of the thread.
type documentRequest struct {
	id      string
	missing []string // in the order in which they were asked for
	waiter  string   // the execution that waits for it; "" when none does
}

// requested finds the request that the files of a message answer, and locks it as an event locks it. Without files, or
// without a request, it has no id.
func (c *Chat) requested(ctx context.Context, tx pgx.Tx, a UserMessage) (r documentRequest, err error) {
	if len(slices.Concat(a.Files...)) == 0 {
		return r, nil
	}
	// An event that answers it locks in the same order: the wait, executions, the request.
	err = tx.QueryRow(ctx, `
		select r.id::text, pg_advisory_xact_lock(hashtextextended('wait document ' || r.id, 0))::text from (
		  select id from agent_requests where thread_id = @thread and kind = 'document' and status = 'pending' order by id limit 1) r`,
		postgres.Strict{"thread": a.thread}).Scan(&r.id, nil)
	if err == nil {
		err = tx.QueryRow(ctx, `
			select coalesce((select id::text from agent_executions
			                  where waiting_for = 'document' and waiting_key = @id and (status = 'waiting') is true order by id limit 1 for no key update), '')`,
			postgres.Strict{"id": r.id}).Scan(&r.waiter)
	}
	if err == nil {
		err = tx.QueryRow(ctx, `
			select m.items from (
			  select array_agg(i order by n) as items from agent_requests r cross join unnest(r.items) with ordinality u (i, n)
			   where r.id = @id::uuid and r.status = 'pending' and not r.received ? i) m where m.items is not null`,
			postgres.Strict{"id": r.id}).Scan(&r.missing)
	}
	if errors.Is(err, pgx.ErrNoRows) {
		return documentRequest{}, nil
	}
	if err != nil {
		return r, fmt.Errorf("find request for documents: %w", err)
	}
	return r, nil
}

// answer raises the event that answers the request: each file is the next document that is missing. Further files
// are attachments alone.
func (r documentRequest) answer(ctx context.Context, c *Chat, tx pgx.Tx, x executions.Execution, ids []string) error {
	if r.id == "" || len(ids) == 0 {
		return nil
	}
	type given struct {
		Document string `json:"document"`
		ID       string `json:"document_id"`
	}
	var all []given
	for i, id := range ids[:min(len(ids), len(r.missing))] {
		all = append(all, given{r.missing[i], id})
	}
	data, err := json.Marshal(map[string]any{"documents": all})
	if err != nil {
		return fmt.Errorf("answer request: %w", err)
	}
	_, err = c.Engine.Deliver(ctx, tx, "DOCUMENT_UPLOADED", r.id, data, "chat "+x.ID)
	return err
}

// hand stores a message whose files an execution waits for, and lets that go on. Its words are the answer, as those of
// one that waits for a message are.
func (c *Chat) hand(ctx context.Context, tx pgx.Tx, a UserMessage, r documentRequest) (x executions.Execution, created bool, err error) {
	s := a.spec()
	s.Flow, s.Input = RelayFlow, a.input(r.waiter)
	if x, created, err = c.Engine.InsertClaimed(ctx, tx, s); err != nil || !created {
		return x, created, err
	}
	texts, docs, err := c.attachFiles(ctx, tx, a)
	if err != nil {
		return x, false, err
	}
	if err := r.answer(ctx, c, tx, x, idsOf(docs)); err != nil { // before the thread's row, which lanes precede
		return x, false, err
	}
	drafts := make([]threads.NewMessage, len(texts))
	for i, words := range texts {
		drafts[i] = threads.NewMessage{
			Role: threads.User, Content: words, Channel: cmp.Or(a.Channel, channel), ExecutionID: x.ID, TraceID: x.TraceID,
			Status: threads.Received, Follows: i > 0,
		}
	}
	_, err = threads.PostAll(ctx, tx, a.thread, drafts)
	return x, true, err
}

// notice is the answer when nothing was said: which documents a flow of the thread waits for, or that the message was
// passed on. It repeats the flow's last words as long as no document came. It is empty when something was said.
func (c *Chat) notice(ctx context.Context, in input, said int) (string, error) {
	if said > 0 {
		return "", nil
	}
	var question string
	missing, err := executions.RetryTransient(ctx, func(ctx context.Context) (items []string, err error) {
		err = c.Pool.QueryRow(ctx, `
			select array(select i from unnest(r.items) with ordinality u (i, n) where not r.received ? i order by n),
			       case when r.received = '{}' then coalesce((
			         select m.content from agent_messages m
			          where m.execution_id = x.id and m.thread_id = r.thread_id and m.role = 'assistant' and m.channel = 'chat'
			            and m.seq is not null order by m.seq desc limit 1), r.title) else '' end
			  from agent_requests r
			  join agent_executions x on x.id = r.execution_id and x.status = 'waiting' and x.waiting_for = 'document'
			   and x.waiting_key = r.id::text
			 where r.thread_id = @thread and r.kind = 'document' and r.status = 'pending' order by r.id limit 1`,
			postgres.Strict{"thread": in.Thread}).Scan(&items, &question)
		if errors.Is(err, pgx.ErrNoRows) {
			return nil, nil
		}
		return items, err
	})
	switch {
	case err != nil:
		return "", fmt.Errorf("find missing documents: %w", err)
	case len(missing) == 0:
		return passedOn, nil
	}
	return clean(question + "\n\nStill missing: " + strings.Join(missing, ", ") + ". Send each as a file with your next message."), nil
}

// Answer is what a message came to.
type Answer struct {
	ID       string `json:"id"`        // of the completion
	ThreadID string `json:"thread_id"` // as the visitor calls it
	TraceID  string `json:"trace_id"`
	Text     string `json:"text"`
	Finish   string `json:"finish_reason"`
}

// cancelRest is how long the caller of a turn that was cancelled waits for its run to notice: what it uses may be
// closed next.
const cancelRest = 5 * time.Second

// Say sends a message and returns the answer, without HTTP; show, where set, gets its text piece by piece. When
// ctx ends first, the turn is cancelled. Errors that a visitor may know are *Refusal. The engine's lease
// must be kept meanwhile: by Engine.Run, or Engine.KeepAlive.
func (c *Chat) Say(ctx context.Context, a UserMessage, show func(piece string)) (Answer, error) {
	if a.TraceID == "" {
		a.TraceID, a.own = trace.New(trace.Chat), true
	}
	var err error
	if a.agent, err = c.Agents.Find(ctx, c.Front, a.Model); err != nil {
		return Answer{}, err
	}
	b, err := c.begin(ctx, a)
	if err != nil {
		return Answer{}, err
	}
	defer b.leave()
	told := Answer{ID: CompletionID(b.exec.ID), ThreadID: b.name, TraceID: b.exec.TraceID}
	f := &follower{Chat: c, id: b.exec.ID, feed: b.feed, show: show}
	got, err := f.follow(ctx)
	if ctx.Err() != nil {
		if _, err := c.Engine.Cancel(context.WithoutCancel(ctx), b.exec.ID, "interrupt",
			"the visitor interrupted"); err != nil {
			return told, fmt.Errorf("cancel turn: %w", err)
		}
		b.feed.rest(cancelRest)
		return told, context.Cause(ctx)
	}
	told.Text, told.Finish = got.Text, string(got.Finish)
	return told, err
}
