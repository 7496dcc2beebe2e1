package chat

import (
	"context"
	"errors"
	"net/http"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/admission"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/threads"
	"github.com/lanekeeper/lanekeeper/trace"
)

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
) (a *UserMessage, started *startedTurn, err error) {
	if utf8.RuneCountInString(threadOf(c.Visitor(r), in.user)) > threads.MaxID {
		return a, started, badRequest("user", "invalid_value",
			"The parameter user, behind the name of the key and a colon, may have at most %d characters.", threads.MaxID)
	}
	secret, isNew, err := c.visitorToken(r)
	if err != nil {
		return a, started, err
	}
	token := secret
	if isNew {
		token = "" // the visitor has no proof yet
	}
	visitor := c.visitorName(r, c.Visitor(r), in.user, token)
	defer func() {
		if refusal, ok := errors.AsType[*Refusal](err); ok && refusal.isTemporary() && attemptOf(r) == 0 {
			c.limits.noteRefusal(visitor, in.hash)
		}
	}()
	if err = c.allow(r, c.Visitor(r), in.user, token); err != nil {
		return a, started, err
	}
	if isNew {
		w.Header().Set(visitorHeader, secret)
	}
	if a, err = in.read(secret); err != nil {
		return a, started, err
	}
	if a.hold, err = c.admit(r, a); err != nil {
		return a, started, err
	}
	a.TraceID, a.ownsTrace = in.trace, true
	if a.Key != "" {
		a.Hash = in.hash
	}
	if a.retry, err = c.newRetry(r, a, visitor, in.hash, isNew, in.stream); err == nil {
		started, err = c.startTurn(r.Context(), a)
	}
	if err != nil {
		a.hold.Release()
		return a, started, err
	}
	release := started.release
	started.release = func() {
		release()
		a.hold.Release()
	}
	return a, started, nil
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
	var inserted insertResult
	var ended []executions.Ended
	disconnected := false
	if a.nameGenerated = a.Name == ""; a.nameGenerated {
		a.Name = NewThreadID()
	}
	err := postgres.RetryOnDisconnect(ctx, func() error {
		err := c.resolveThread(ctx, a)
		if err == nil {
			err = c.keyedTx.Do(ctx, c.Front, a.thread, func(tx pgx.Tx) (err error) {
				if inserted, err = c.insert(ctx, tx, a); err != nil || !inserted.created {
					return err
				}
				ended = inserted.ended
				return activity.Link(ctx, tx, trace.ID(inserted.exec.TraceID))
			})
		}
		disconnected = disconnected || postgres.Broken(err)
		return err
	})
	if err != nil {
		return nil, threadError(err)
	}
	x, created := inserted.exec, inserted.created
	if disconnected && !created && a.ownsTrace && x.TraceID == string(a.TraceID) {
		created = true // a try inserted it whose commit was not confirmed, and no other process runs it
	}
	c.Engine.LogEnded(ctx, ended)
	for _, e := range ended { // the transaction cancelled them; this stops those that run in this process
		if _, err := c.Engine.Cancel(ctx, e.ID, byInterrupt, "a newer message came"); err != nil {
			c.Logger.WarnContext(ctx, "interrupted turn not stopped", "execution", e.ID, "error", err)
		}
	}
	switch {
	case a.headless(): // any process runs it
		return &startedTurn{exec: x, name: a.Name}, nil
	case a.retry != nil && a.retry.attached:
		return c.attachRetry(ctx, x)
	case !created:
		return c.replay(ctx, a, x)
	}
	started := c.runTurn(ctx, x, a.hold, inserted.stored)
	started.name = a.Name
	return started, nil
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
	case x.Flow != Flow && x.Flow != RelayFlow || !original.isSentBy(a.principal()) || original.Hash != a.Hash ||
		!a.mayRepeat(original):
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

// mayRepeat reports whether a message is for the thread of an earlier one. Two messages without a name are.
func (a *UserMessage) mayRepeat(original input) bool {
	return original.Thread == a.thread || a.nameGenerated && a.Join == "" && threads.IsGenerated(original.name())
}

// attachRetry attaches a retry to the turn of the first request.
func (c *Chat) attachRetry(ctx context.Context, x executions.Execution) (*startedTurn, error) {
	in, err := readInput(&x)
	if err != nil {
		return nil, err
	}
	switch allowed, err := c.hasAccess(ctx, in); {
	case err != nil:
		return nil, err
	case !allowed: // it was revoked since
		return nil, threadError(threads.ErrNotFound)
	}
	f, release := c.feeds.join(x.ID)
	if x.Status.Ended() {
		f.finish(x)
	}
	return &startedTurn{exec: x, name: in.name(), feed: f, release: release}, nil
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
		r := serverError(http.StatusServiceUnavailable, codeThreadLocked, "This thread is busy: another transaction has it "+
			"locked. Please send the message again.")
		r.RetryAfter = retryDelay
		return r
	case errors.Is(err, threads.ErrInvalid):
		return badRequest("thread_id", "invalid_thread_id", "A thread id is 1 to %d printable characters in Unicode NFC.",
			threads.MaxID)
	}
	return err
}
