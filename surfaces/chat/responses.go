package chat

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	"github.com/jackc/pgx/v5"
	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/responsewire"
	"github.com/lanekeeper/lanekeeper/threads"
	"github.com/lanekeeper/lanekeeper/trace"
)

// Prefixes of the ids of a response and of its message. The id of the execution follows.
const (
	responsePrefix = "resp_"
	itemPrefix     = "msg_"
)

// byClient is the canceller of a response that its client cancelled.
const byClient = "client"

// reasonApproval is the reason of a response that waits for an approval.
const reasonApproval = "approval_pending"

// responseEcho is the part of a request that its response repeats.
type responseEcho struct {
	Previous   string            `json:"previous_response_id,omitempty"`
	Metadata   map[string]string `json:"metadata,omitempty"`
	Background bool              `json:"background,omitempty"`
}

// ResponsesHandler serves POST /v1/responses.
func (c *Chat) ResponsesHandler() http.Handler { return c.handler(c.respond) }

// ResponseHandler serves GET /v1/responses/{id}: the current state, or with ?stream=true the whole stream.
func (c *Chat) ResponseHandler() http.Handler { return c.handler(c.showResponse) }

// CancelResponseHandler serves POST /v1/responses/{id}/cancel.
func (c *Chat) CancelResponseHandler() http.Handler { return c.handler(c.cancelResponse) }

// InputItemsHandler serves GET /v1/responses/{id}/input_items.
func (c *Chat) InputItemsHandler() http.Handler { return c.handler(c.inputItems) }

// DeleteResponseHandler serves DELETE /v1/responses/{id}. It always refuses: the answer is a message of its thread.
func (c *Chat) DeleteResponseHandler() http.Handler {
	return c.handler(func(_ http.ResponseWriter, r *http.Request, _ trace.ID) error {
		if _, _, err := c.response(r); err != nil {
			return err
		}
		return badRequest("response_id", "unsupported_value",
			"A response is a message of its conversation and is not deleted alone; retention removes conversations.")
	})
}

// respond accepts a message and sends its answer.
func (c *Chat) respond(w http.ResponseWriter, r *http.Request, id trace.ID) error {
	var req responseRequest
	hash, err := c.readJSON(w, r, &req)
	if err != nil {
		return err
	}
	user, _ := text(req.User)
	stream := req.Stream != nil && *req.Stream
	a, started, err := c.accept(w, r, chatRequest{
		trace: id, user: user, hash: hash, stream: stream,
		read: func(secret string) (*UserMessage, error) { return c.responseMessage(r, req, secret) },
	})
	if err != nil {
		return err
	}
	defer started.release()
	return c.sendAnswer(w, r, a.retry, func(w http.ResponseWriter) error {
		in, err := readInput(&started.exec)
		switch {
		case err != nil:
			return err
		case stream:
			return c.streamResponse(w, r, started, in)
		case a.response.Background:
			return c.currentResponse(w, r, started, in)
		}
		return c.awaitResponse(w, r, started, in)
	})
}

// awaitResponse waits for the answer and sends the complete response.
func (c *Chat) awaitResponse(w http.ResponseWriter, r *http.Request, started *startedTurn, in input) error {
	stamp(w, started.exec.TraceID, started.name)
	f := &follower{Chat: c, id: started.exec.ID, traceID: started.exec.TraceID, in: in, feed: started.feed}
	got, err := f.follow(r.Context())
	if err != nil {
		return err
	}
	return responsewire.Write(w, withAnswer(newResponse(started.exec, in), got))
}

// currentResponse sends the current state of a response.
func (c *Chat) currentResponse(w http.ResponseWriter, r *http.Request, started *startedTurn, in input) error {
	stamp(w, started.exec.TraceID, started.name)
	x, head := started.exec, newResponse(started.exec, in)
	switch {
	case x.Status == executions.Completed:
		got, err := answerOf(x)
		if err != nil {
			return err
		}
		return responsewire.Write(w, withAnswer(head, got))
	case x.Status.Ended():
		f := &follower{Chat: c, id: x.ID, in: in, feed: started.feed}
		_, why := f.toAnswer(r.Context(), &x)
		list, err := threads.Messages(r.Context(), c.Front, threads.MessageFilter{ExecutionID: x.ID, Role: threads.Assistant})
		if err != nil {
			return err
		}
		for _, m := range list {
			if m.Interrupted {
				head.Text = m.Content
			}
		}
		return responsewire.Write(w, withFailure(head, x, why))
	}
	v, err := c.partialText(r, started)
	if err != nil {
		return err
	}
	head.Text = v.text
	return responsewire.Write(w, head)
}

// streamResponse streams a response as events. An error after the first byte is an event of the stream.
func (c *Chat) streamResponse(w http.ResponseWriter, r *http.Request, started *startedTurn, in input) error {
	stamp(w, started.exec.TraceID, started.name)
	head := newResponse(started.exec, in)
	s := responsewire.Open(w, head)
	ctx, stop := context.WithCancel(r.Context())
	defer stop()
	f := &follower{Chat: c, id: started.exec.ID, traceID: started.exec.TraceID, in: in, feed: started.feed}
	f.streamTo(s, stop)
	got, err := f.follow(ctx)
	switch refusal := (*Refusal)(nil); {
	case err == nil:
		s.Finish(withAnswer(head, got))
	case errors.As(err, &refusal):
		s.Finish(withFailure(head, started.exec, err))
	case ctx.Err() == nil:
		c.Logger.ErrorContext(ctx, "stream broken off", "execution", started.exec.ID, "trace_id", started.exec.TraceID,
			"error", err)
		s.Finish(withFailure(head, started.exec, errors.New("something went wrong here; trace "+started.exec.TraceID)))
	}
	return nil // the stream has the error, or the client is gone
}

// response finds the turn of the id in the request's path.
func (c *Chat) response(r *http.Request) (*startedTurn, input, error) {
	who, err := c.principal(r)
	if err != nil {
		return nil, input{}, err
	}
	x, in, err := c.find(r.Context(), who, "response", r.PathValue("id"))
	if err != nil {
		return nil, input{}, err
	}
	return &startedTurn{exec: x, name: in.name()}, in, nil
}

// showResponse sends the current state of a response, or streams it from its beginning.
func (c *Chat) showResponse(w http.ResponseWriter, r *http.Request, _ trace.ID) error {
	started, in, err := c.response(r)
	if err != nil {
		return err
	}
	started.feed, started.release = c.feeds.join(started.exec.ID)
	defer started.release()
	if started.exec.Status.Ended() {
		started.feed.finish(started.exec)
	}
	q := r.URL.Query()
	if after := q.Get("starting_after"); after != "" && after != "0" {
		return badRequest("starting_after", "unsupported_value",
			"A stream begins at its beginning: leave starting_after out.")
	}
	if q.Get("stream") == "true" {
		return c.streamResponse(w, r, started, in)
	}
	return c.currentResponse(w, r, started, in)
}

// cancelResponse cancels an active response and stores its text so far. An ended response is returned unchanged.
func (c *Chat) cancelResponse(w http.ResponseWriter, r *http.Request, _ trace.ID) error {
	started, in, err := c.response(r)
	if err != nil {
		return err
	}
	ctx, x := r.Context(), started.exec
	if !x.Status.Ended() {
		var ended []executions.Ended
		err := c.keyedTx.Do(ctx, c.Front, in.Thread, func(tx pgx.Tx) error {
			ended = nil // of an earlier try
			if err := lockThread(ctx, tx, in.Thread); err != nil {
				return err
			}
			busy, err := activeTurns(ctx, tx, in.Thread, 0)
			for _, u := range busy {
				if err == nil && u.ExecutionID == x.ID {
					ended, err = c.interruptTurn(ctx, tx, in.Thread, x.TraceID, byClient, "the client cancelled the response", u)
				}
			}
			return err
		})
		if err != nil {
			return threadError(err)
		}
		c.Engine.LogEnded(ctx, ended)
		if _, err := c.Engine.Cancel(ctx, x.ID, byClient, "the client cancelled the response"); err != nil {
			return fmt.Errorf("cancel response: %w", err)
		}
		if started.exec, err = executions.Get(ctx, c.Front, x.ID); err != nil {
			return err
		}
	}
	started.feed, started.release = c.feeds.join(x.ID)
	defer started.release()
	return c.currentResponse(w, r, started, in)
}

// inputItems lists the messages that a response answers, newest first.
func (c *Chat) inputItems(w http.ResponseWriter, r *http.Request, _ trace.ID) error {
	started, _, err := c.response(r)
	if err != nil {
		return err
	}
	filter := threads.MessageFilter{ExecutionID: started.exec.ID, Role: threads.User}
	messages, err := threads.Messages(r.Context(), c.Front, filter)
	if err != nil {
		return err
	}
	images, err := threads.Images(r.Context(), c.Front, messages, false)
	if err != nil {
		return err
	}
	stamp(w, started.exec.TraceID, started.name)
	data := make([]item, len(messages))
	list := map[string]any{"object": "list", "data": data, "has_more": false, "first_id": nil, "last_id": nil}
	for i, m := range messages {
		data[i] = itemOf(m, images[m.ID])
		if list["last_id"] = data[i].ID; i == 0 {
			list["first_id"] = data[i].ID
		}
	}
	return responsewire.WriteJSON(w, list)
}

// newResponse returns an active response of a turn.
func newResponse(x executions.Execution, in input) responsewire.Response {
	r := responsewire.Response{
		ID: responsePrefix + x.ID, ItemID: itemPrefix + x.ID, Model: in.Model, Status: responsewire.InProgress,
		Created: x.CreatedAt.Unix(), Conversation: in.name(), MaxTokens: in.MaxTokens,
		Format: formats(in),
	}
	if e := in.Response; e != nil {
		r.Previous, r.Metadata, r.Background = e.Previous, e.Metadata, e.Background
	}
	return r
}

// withAnswer returns the response with its answer, or with the error of a refused or unformed one.
func withAnswer(r responsewire.Response, got answer) responsewire.Response {
	if got.Unformed {
		r.Status, r.Error = responsewire.Failed, &responsewire.Error{Code: "server_error", Message: got.Text}
		return r
	}
	if got.Refused {
		r.Status, r.Error = responsewire.Failed, &responsewire.Error{Code: "rate_limit_exceeded", Message: got.Text}
		return r
	}
	r.Status, r.Text = responsewire.Completed, got.Text
	r.Usage = &responsewire.Usage{Input: got.Usage.PromptTokens, Output: got.Usage.CompletionTokens}
	if d := got.Usage.PromptTokensDetails; d != nil {
		r.Usage.Cached = d.CachedTokens
	}
	switch {
	case got.Ended == "approval":
		r.Status, r.Reason = responsewire.Incomplete, reasonApproval
	case got.Finish == openai.FinishReasonLength:
		r.Status, r.Reason = responsewire.Incomplete, "max_output_tokens"
	case got.Finish == openai.FinishReasonContentFilter:
		r.Status, r.Reason = responsewire.Incomplete, "content_filter"
	}
	return r
}

// withFailure returns the response of a failed or cancelled turn.
func withFailure(r responsewire.Response, x executions.Execution, why error) responsewire.Response {
	r.Status = responsewire.Failed
	refusal, refused := errors.AsType[*Refusal](why)
	if x.Status == executions.Cancelled || refused && (refusal.Code == codeCancelled || refusal.Code == codeInterrupted) {
		r.Status = responsewire.Cancelled // x may be older than the cancel
		return r
	}
	r.Error = &responsewire.Error{Code: "server_error", Message: "The answer failed."}
	if refused && refusal.Type == "insufficient_quota" {
		r.Error.Code = "rate_limit_exceeded"
	}
	if why != nil {
		r.Error.Message = why.Error()
	}
	return r
}
