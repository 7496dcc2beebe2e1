package chat

import (
	"context"
	"errors"
	"net/http"
	"strings"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/chatwire"
	"github.com/lanekeeper/lanekeeper/threads"
	"github.com/lanekeeper/lanekeeper/trace"
)

// idPrefix precedes the execution's id in the id of a completion.
const idPrefix = "chatcmpl-"

// CompletionID returns the completion id of an execution.
func CompletionID(execution string) string { return idPrefix + execution }

// CompletionsHandler serves POST /v1/chat/completions.
func (c *Chat) CompletionsHandler() http.Handler { return c.handler(c.complete) }

// CompletionHandler serves GET /v1/chat/completions/{id}: the answer, or 202 with the text so far. With ?stream=true it
// streams the answer from its start.
func (c *Chat) CompletionHandler() http.Handler { return c.handler(c.attach) }

// complete accepts a message and sends its answer.
func (c *Chat) complete(w http.ResponseWriter, r *http.Request, id trace.ID) error {
	req, hash, err := c.decode(w, r)
	if err != nil {
		return err
	}
	user, _ := text(req.User)
	stream := req.Stream != nil && *req.Stream
	a, started, err := c.accept(w, r, chatRequest{
		trace: id, user: user, hash: hash, stream: stream,
		read: func(secret string) (*UserMessage, error) { return c.completionMessage(r, req, secret) },
	})
	if err != nil {
		return err
	}
	defer started.release()
	var opts streamOptions
	if req.StreamOptions != nil {
		opts = *req.StreamOptions
	}
	return c.sendAnswer(w, r, a.retry, func(w http.ResponseWriter) error {
		return c.show(w, r, started, a.Model, stream, opts)
	})
}

// show sends the answer of a turn, as a stream or complete.
func (c *Chat) show(
	w http.ResponseWriter, r *http.Request, started *startedTurn, model string, stream bool, opts streamOptions,
) error {
	stamp(w, started.exec.TraceID, started.name)
	in, err := readInput(&started.exec)
	if err != nil {
		return err
	}
	f := &follower{Chat: c, id: started.exec.ID, traceID: started.exec.TraceID, in: in, feed: started.feed}
	if stream {
		return c.stream(w, r, f, &started.exec, model, opts)
	}
	got, err := f.follow(r.Context())
	if err != nil {
		return err
	}
	return chatwire.WriteJSON(w, chatwire.Answer{
		ID: CompletionID(started.exec.ID), Model: model, Created: started.exec.CreatedAt.Unix(),
		Text: got.Text, Finish: got.Finish, Usage: &got.Usage,
	})
}

// stream streams an answer. An error after the first byte is sent as an event of the stream.
func (c *Chat) stream(
	w http.ResponseWriter, r *http.Request, f *follower, x *executions.Execution, model string, opts streamOptions,
) error {
	s := chatwire.Open(w, CompletionID(x.ID), model, x.CreatedAt.Unix())
	s.Role()
	ctx, stop := context.WithCancel(r.Context())
	defer stop()
	f.streamTo(s, stop)
	if opts.IncludeActivity {
		f.activity = s.Activity
	}
	got, err := f.follow(ctx)
	var refusal *Refusal
	switch {
	case errors.As(err, &refusal):
		s.Failure(refusal.failure())
	case err != nil && ctx.Err() == nil:
		c.Logger.ErrorContext(ctx, "stream broken off", "execution", x.ID, "trace_id", x.TraceID, "error", err)
		s.Failure(serverError(http.StatusInternalServerError, "server_error",
			"Something went wrong here. Trace: "+x.TraceID).failure())
	case err == nil:
		s.Finish(got.Finish)
		if opts.IncludeUsage {
			s.Usage(got.Usage)
		}
		s.Done()
	}
	return nil // the stream has the error, or the client is gone
}

// attach sends an answer by its id.
func (c *Chat) attach(w http.ResponseWriter, r *http.Request, _ trace.ID) error {
	id := r.PathValue("id")
	who, err := c.principal(r)
	if err != nil {
		return err
	}
	x, in, err := c.find(r.Context(), who, "completion", id)
	if err != nil {
		return err
	}
	feed, release := c.feeds.join(x.ID)
	defer release()
	started := &startedTurn{exec: x, name: in.name(), feed: feed, release: release}
	if x.Status.Ended() {
		feed.finish(x)
	}
	if q := r.URL.Query(); q.Get("stream") == "true" {
		return c.show(w, r, started, in.Model, true, streamOptions{
			IncludeUsage: q.Get("include_usage") == "true", IncludeActivity: q.Get("include_activity") == "true",
		})
	}
	if x.Status.Ended() {
		return c.show(w, r, started, in.Model, false, streamOptions{})
	}
	return c.sendUnfinished(w, r, started, in.Model)
}

// sendUnfinished sends 202 and the text so far. The client polls.
func (c *Chat) sendUnfinished(w http.ResponseWriter, r *http.Request, started *startedTurn, model string) error {
	stamp(w, started.exec.TraceID, started.name)
	v, err := c.partialText(r, started)
	if err != nil {
		return err
	}
	w.Header().Set("Retry-After", "2")
	return chatwire.WriteUnfinished(w, chatwire.Answer{
		ID: CompletionID(started.exec.ID), Model: model, Created: started.exec.CreatedAt.Unix(), Text: v.text,
		Finish: openai.FinishReasonNull,
	})
}

// partialText returns the text of an active turn.
func (c *Chat) partialText(r *http.Request, started *startedTurn) (view, error) {
	v := started.feed.snapshot(false)
	if v.runsHere {
		return v, nil
	}
	draft, err := threads.DraftOf(r.Context(), c.Front, started.exec.ID)
	v.text = draft.Content
	return v, err
}

// find returns the turn of a completion's or a response's id. noun names the object in errors. The turn of another
// visitor is refused as if it did not exist.
func (c *Chat) find(
	ctx context.Context, who threads.Principal, noun, id string,
) (executions.Execution, input, error) {
	missing := notFound(noun+"_not_found", "There is no %s %q.", noun, truncate(id, 100))
	execution, ok := strings.CutPrefix(id, idPrefix)
	if !ok {
		execution, ok = strings.CutPrefix(id, responsePrefix)
	}
	if !ok {
		return executions.Execution{}, input{}, missing
	}
	x, err := executions.Get(ctx, c.Front, execution)
	if errors.Is(err, executions.ErrNotFound) {
		return executions.Execution{}, input{}, missing
	}
	if err != nil {
		return executions.Execution{}, input{}, err
	}
	in, err := readInput(&x)
	if x.Flow != Flow && x.Flow != RelayFlow || err != nil || !in.isSentBy(who) || x.ThreadID == nil {
		return executions.Execution{}, input{}, missing
	}
	switch may, err := c.hasAccess(ctx, in); {
	case err != nil:
		return executions.Execution{}, input{}, err
	case !may:
		return executions.Execution{}, input{}, missing
	}
	return x, in, nil
}
