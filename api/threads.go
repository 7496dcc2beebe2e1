package api

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/principals"
	"github.com/lanekeeper/lanekeeper/threads"
)

// threadDetail is a thread with a page of messages, newest first.
type threadDetail struct {
	threads.Thread
	Messages   []threads.Message `json:"messages"`
	NextCursor *string           `json:"next_cursor"`
}

// listThreads lists threads by their last message. A thread with a new message moves to the front during a listing.
func (s *server) listThreads(r request) (response, error) {
	after, err := decodeCursor("threads", r.query["cursor"])
	if err != nil {
		return response{}, err
	}
	f := threads.Filter{
		Channel: r.query["channel"], Owner: r.query["owner"], Agent: r.query["agent"], Limit: r.query.limit(),
	}
	if after != "" {
		at, id, _ := strings.Cut(after, " ")
		f.BeforeID = id
		if f.BeforeTime, err = time.Parse(time.RFC3339Nano, at); err != nil {
			return response{}, activity.ErrCursor
		}
	}
	rows, err := threads.List(r.Context(), s.pool, f)
	if err != nil || len(rows) < f.Limit {
		return response{body: pageOf(rows, "")}, err
	}
	last := rows[len(rows)-1]
	f.BeforeTime, f.BeforeID, f.Limit = last.UpdatedAt, last.ID, 1
	more, err := threads.List(r.Context(), s.pool, f)
	if err != nil || len(more) == 0 {
		return response{body: pageOf(rows, "")}, err
	}
	return response{body: pageOf(rows,
		encodeCursor("threads", last.UpdatedAt.UTC().Format(time.RFC3339Nano)+" "+last.ID))}, nil
}

func (s *server) getThread(r request) (response, error) {
	id, err := pathThread(r)
	if err != nil {
		return response{}, err
	}
	t, err := threads.Find(r.Context(), s.pool, id)
	if err != nil {
		return response{}, threadError(err)
	}
	messages, next, err := s.messages(r, t.ID)
	if err != nil {
		return response{}, err
	}
	p := pageOf(messages, next)
	return response{body: threadDetail{t, p.Items, p.NextCursor}}, nil
}

// messages reads a page of a thread. Queued messages have no sequence number and come first, all on the first page.
func (s *server) messages(r request, thread string) (rows []threads.Message, next string, err error) {
	f := threads.MessageFilter{ThreadID: thread, Limit: r.query.limit()}
	after, err := decodeCursor("messages", r.query["cursor"])
	if err != nil {
		return nil, "", err
	}
	if after != "" {
		if f.Before, err = strconv.ParseInt(after, 10, 64); err != nil || f.Before <= 0 {
			return nil, "", activity.ErrCursor
		}
	}
	rows, err = threads.Messages(r.Context(), s.pool, f)
	if err != nil || len(rows) < f.Limit {
		return rows, "", err
	}
	f.Before = int64(math.MaxInt64)
	if last := rows[len(rows)-1].Seq; last != nil {
		f.Before = *last
	} else if rows, err = s.queued(r, thread); err != nil {
		return nil, "", err
	}
	f.Limit = 1
	more, err := threads.Messages(r.Context(), s.pool, f)
	if err != nil || len(more) == 0 {
		return rows, "", err
	}
	return rows, encodeCursor("messages", strconv.FormatInt(f.Before, 10)), nil
}

// queued lists the messages without a sequence number.
func (s *server) queued(r request, thread string) ([]threads.Message, error) {
	rows, err := threads.Messages(r.Context(), s.pool, threads.MessageFilter{ThreadID: thread, Limit: maxPage})
	return slices.DeleteFunc(rows, func(m threads.Message) bool { return m.Seq != nil }), err
}

type joinTokenRequest struct {
	Reusable    bool            `json:"reusable,omitempty"`     // any number of visitors may join with it, not only one
	ExpiresIn   json.RawMessage `json:"expires_in,omitempty"`   // seconds, or text such as 24h or 7d; default 24h
	ExecutionID string          `json:"execution_id,omitempty"` // expires with this execution
}

func (i joinTokenRequest) check() error {
	if i.ExecutionID != "" && !uuidForm.MatchString(i.ExecutionID) {
		return problem.BadBody("execution_id is %.60q; use the id of an execution", i.ExecutionID)
	}
	life, err := timeout(i.ExpiresIn)
	switch {
	case err != nil:
		return problem.BadBody("expires_in must be a positive number of seconds, or text such as 90m, 24h or 7d")
	case life > threads.MaxTokenLife:
		return problem.BadBody("expires_in is at most 30 days")
	}
	return nil
}

// accessRequest names a participant by exactly one of Key, Flow and Webhook.
type accessRequest struct {
	Key     string `json:"key,omitempty"` // name of a chat key
	Flow    string `json:"flow,omitempty"`
	Webhook string `json:"webhook,omitempty"` // an endpoint
	Name    string `json:"name,omitempty"`    // the thread's name for the key or endpoint; default its id
}

func (b accessRequest) principal() threads.Principal {
	switch {
	case b.Key != "":
		return threads.Key(b.Key)
	case b.Flow != "":
		return threads.Principal{Kind: threads.ByFlow, Owner: b.Flow}
	}
	return threads.Principal{Kind: threads.ByWebhook, Owner: b.Webhook}
}

func (b accessRequest) check() error {
	named := 0
	for _, name := range []string{b.Key, b.Flow, b.Webhook} {
		if name != "" {
			named++
		}
		if !isPrintableText(name) || len(name) > 200 {
			return problem.BadBody("key, flow and webhook have at most 200 bytes of text")
		}
	}
	switch {
	case named != 1:
		return problem.BadBody("name one of key, flow and webhook")
	case b.Flow != "" && b.Name != "":
		return problem.BadBody("name belongs to key and webhook; a flow uses the thread's id")
	case b.Name != "" && threads.CheckID(b.Name) != nil:
		return problem.BadBody("name: %s", threads.ErrInvalid)
	}
	return nil
}

// pathThread returns the thread's id from the path.
func pathThread(r request) (string, error) {
	id := r.PathValue("id")
	if err := threads.CheckID(id); err != nil {
		return "", problem.New(http.StatusBadRequest, "%s", err).Kind("malformed-id", "Malformed id")
	}
	return id, nil
}

// threadError maps a missing thread or access to 404.
func threadError(err error) error {
	for _, missing := range []error{threads.ErrNoAccess, threads.ErrNotFound} {
		if errors.Is(err, missing) {
			return problem.New(http.StatusNotFound, "%s", missing)
		}
	}
	return err
}

func (s *server) createJoinToken(r request) (response, error) {
	b := r.body.(joinTokenRequest)
	id, err := pathThread(r)
	if err != nil {
		return response{}, err
	}
	life, err := timeout(b.ExpiresIn)
	if err != nil {
		return response{}, err
	}
	var token threads.Token
	c, err := s.record(r.Context(), "invite_into_thread", "a join token was given out", map[string]any{"thread_id": id},
		func(tx pgx.Tx, _ string) (any, error) {
			token, err = threads.Invite(r.Context(), tx, threads.Invitation{
				ThreadID: id, Reusable: b.Reusable, Life: life, ExecutionID: b.ExecutionID, By: actorName(r.Context()),
			})
			return map[string]any{"access_id": token.ID, "expires_at": token.ExpiresAt.UTC().Format(time.RFC3339)}, err
		})
	return response{body: token, status: http.StatusCreated, trace: c.TraceID}, threadError(err)
}

type accessResponse struct {
	ID       string `json:"id"`
	ThreadID string `json:"thread_id"`
	Name     string `json:"name"` // the thread's name for the participant
}

func (s *server) grantAccess(r request) (response, error) {
	b := r.body.(accessRequest)
	id, err := pathThread(r)
	if err == nil {
		err = s.auth.checkChatKey(b.Key)
	}
	if err != nil {
		return response{}, err
	}
	to := b.principal()
	granted := accessResponse{ThreadID: id, Name: cmp.Or(b.Name, id)}
	c, err := s.record(r.Context(), "open_thread", "a thread was opened to "+string(to.Kind)+" "+to.Owner,
		map[string]any{"thread_id": id, string(to.Kind): to.Owner},
		func(tx pgx.Tx, _ string) (any, error) {
			granted.ID, err = threads.Grant(r.Context(), tx, id, to, granted.Name, actorName(r.Context()))
			return map[string]any{"access_id": granted.ID}, err
		})
	if errors.Is(err, threads.ErrTaken) {
		return response{}, problem.New(http.StatusConflict, "%s %s has another thread %q; give this one another name",
			to.Kind, to.Owner, granted.Name)
	}
	return response{body: granted, status: http.StatusCreated, trace: c.TraceID}, threadError(err)
}

func (s *server) listAccess(r request) (response, error) {
	id, err := pathThread(r)
	if err != nil {
		return response{}, err
	}
	if _, err := threads.Get(r.Context(), s.pool, id); err != nil {
		return response{}, threadError(err)
	}
	list, err := threads.AccessOf(r.Context(), s.pool, id)
	return response{body: pageOf(list, "")}, err
}

func (s *server) revokeAccess(r request) (response, error) {
	id, err := pathThread(r)
	if err != nil {
		return response{}, err
	}
	access := r.PathValue("access_id")
	if !uuidForm.MatchString(access) {
		return response{}, problem.New(http.StatusBadRequest, "malformed access id").Kind("malformed-id", "Malformed id")
	}
	c, err := s.record(r.Context(), "revoke_thread_access", "an access to a thread was revoked",
		map[string]any{"thread_id": id, "access_id": access},
		func(tx pgx.Tx, _ string) (any, error) {
			return map[string]any{"revoked": true}, threads.Revoke(r.Context(), tx, id, access)
		})
	c.Name, c.Changed = access, err == nil
	return response{body: c, trace: c.TraceID}, threadError(err)
}

// titleRequest names a thread.
type titleRequest struct {
	Title *string `json:"title"` // required; "" removes the title
}

func (b titleRequest) check() error {
	switch {
	case b.Title == nil:
		return problem.BadBody("title is required; an empty one removes it")
	case utf8.RuneCountInString(*b.Title) > threads.MaxTitle || !isPrintableText(*b.Title):
		return problem.BadBody("title is not text of at most %d characters", threads.MaxTitle)
	}
	return nil
}

func (s *server) nameThread(r request) (response, error) {
	id, err := pathThread(r)
	if err != nil {
		return response{}, err
	}
	title := strings.TrimSpace(*r.body.(titleRequest).Title)
	c, err := s.record(r.Context(), "name_thread", "a conversation was named",
		map[string]any{"thread_id": id, "title": title},
		func(tx pgx.Tx, _ string) (any, error) {
			before, err := threads.SetTitle(r.Context(), tx, id, title)
			if err == nil && before == title {
				return activity.Unchanged, nil
			}
			return map[string]any{"before": before}, err
		})
	if err != nil {
		return response{trace: c.TraceID}, threadError(err)
	}
	t, err := threads.Get(r.Context(), s.pool, id)
	return response{body: t, trace: c.TraceID}, threadError(err)
}

// accessRoutes returns the routes that manage access to threads.
func (s *server) accessRoutes() []route {
	return []route{
		{
			method: "POST", path: "/v1/threads/{id}/join_tokens", body: joinTokenRequest{}, response: threads.Token{},
			status: http.StatusCreated, handle: s.createJoinToken, repeatable: true,
			about: "Create a join token: a visitor joins the conversation by sending it as X-Thread-Join. It is " +
				"valid for one visitor, or reusable until it expires, and is shown once.",
		}, {
			method: "POST", path: "/v1/threads/{id}/participants", body: accessRequest{}, response: accessResponse{},
			status: http.StatusCreated, handle: s.grantAccess, repeatable: true, conflicts: true,
			about: "Open a conversation to a chat key, a flow or a webhook endpoint. 409 if the participant has another one " +
				"of that name.",
		}, {
			method: "GET", path: "/v1/threads/{id}/access", response: page[threads.Access]{}, handle: s.listAccess,
			about: "Access grants and join tokens of a conversation, without the secrets.",
		}, {
			method: "DELETE", path: "/v1/threads/{id}/access/{access_id}", response: change{}, handle: s.revokeAccess,
			about: "Revoke an access. Revoking a join token also ends the access of its visitors.",
		},
	}
}

const (
	maxMessage = 64 << 10          // bytes
	maxIdle    = 30 * 24 * 60 * 60 // seconds
)

// messageRequest is a message from the admin, or from an execution that an external worker has locked.
type messageRequest struct {
	Content     string `json:"content"`
	ExecutionID string `json:"execution_id,omitempty"`
	LockID      string `json:"lock_id,omitempty"`
}

// messageResponse reports whether the message was sent or queued.
type messageResponse struct {
	Success   bool   `json:"success"`
	Queued    bool   `json:"queued"`
	MessageID string `json:"message_id"`
}

func (b messageRequest) check() error {
	switch {
	case strings.TrimSpace(b.Content) == "":
		return problem.BadBody("content is missing")
	case len(b.Content) > maxMessage:
		return problem.BadBody("content is longer than %d bytes", maxMessage)
	case b.ExecutionID != "" && !uuidForm.MatchString(b.ExecutionID):
		return problem.BadBody("execution_id is %.60q; use the id of an execution", b.ExecutionID)
	case b.LockID != "" && b.ExecutionID == "":
		return problem.BadBody("lock_id needs execution_id: name the locked execution")
	}
	return nil
}

type threadRequest struct {
	ID          string `json:"id"`
	Channel     string `json:"channel,omitempty"` // chat (default), webhook or log
	Target      string `json:"target,omitempty"`  // the outgoing target of channel webhook
	Participant string `json:"participant,omitempty"`
	Owner       string `json:"owner,omitempty"`        // a chat key with access; empty: no access until an admin grants it
	IdleSeconds *int   `json:"idle_seconds,omitempty"` // idle time after which other senders may send; default 600
}

func (o threadRequest) check() error {
	channels := []string{threads.ChannelChat, threads.ChannelWebhook, threads.ChannelLog}
	switch {
	case threads.CheckID(o.ID) != nil:
		return problem.BadBody("id: %s", threads.ErrInvalid)
	case o.Channel != "" && !slices.Contains(channels, o.Channel):
		return problem.BadBody("channel is %.60q; use %s", o.Channel, strings.Join(channels, ", "))
	case (o.Channel == threads.ChannelWebhook) != (o.Target != ""):
		return problem.BadBody("target and channel webhook require each other")
	case o.IdleSeconds != nil && (*o.IdleSeconds < 1 || *o.IdleSeconds > maxIdle):
		return problem.BadBody("idle_seconds is %d; use 1 to %d (30 days)", *o.IdleSeconds, maxIdle)
	case threads.IsGenerated(o.ID):
		return problem.BadBody("id has the form of generated ids; choose another")
	case !isPrintableText(o.Participant) || !isPrintableText(o.Owner) || !isPrintableText(o.Target) ||
		len(o.Participant) > 200 || len(o.Owner) > 200:
		return problem.BadBody("participant and owner have at most 200 bytes of text")
	}
	return nil
}

func (s *server) openThread(r request) (response, error) {
	o := r.body.(threadRequest)
	if o.Target != "" {
		var known bool
		err := s.pool.QueryRow(r.Context(), `select exists (select from agent_webhook_targets where name = @name)`,
			postgres.Strict{"name": o.Target}).Scan(&known)
		if err != nil {
			return response{}, err
		}
		if !known {
			return response{}, problem.BadBody("no outgoing webhook target %q; declare it in the workspace", o.Target)
		}
	}
	var thread threads.Thread
	var created bool
	done, err := s.record(r.Context(), "begin_thread", "a conversation was begun", map[string]any{"thread_id": o.ID},
		func(tx pgx.Tx, _ string) (_ any, err error) {
			if thread, created, err = s.createThread(r.Context(), tx, o); err != nil || !created {
				return activity.Unchanged, err
			}
			return map[string]string{"thread_id": thread.ID}, nil
		})
	switch {
	case errors.Is(err, threads.ErrTaken):
		return response{}, problem.New(http.StatusConflict, "the key %s already has a thread %q; choose another id", o.Owner,
			o.ID)
	case errors.Is(err, threads.ErrForeign) || err == nil && !created:
		return response{}, problem.New(http.StatusConflict, "thread %q exists", o.ID)
	case err != nil:
		return response{}, err
	}
	return response{body: thread, status: http.StatusCreated, trace: done.TraceID}, nil
}

// createThread creates a thread of the admin or of its channel, and opens it to the named key.
func (s *server) createThread(ctx context.Context, tx pgx.Tx, o threadRequest) (threads.Thread, bool, error) {
	t := threads.Thread{
		ID: o.ID, Channel: o.Channel, Target: o.Target, Participant: o.Participant, Owner: o.Owner,
		IdleSeconds: postgres.Deref(o.IdleSeconds),
	}
	if o.Channel == "" || o.Channel == threads.ChannelChat || o.Owner != "" {
		return threads.Ensure(ctx, tx, t)
	}
	return threads.Open(ctx, tx, threads.Principal{Kind: threads.ByChannel, Owner: o.Channel}, t)
}

func (s *server) sendMessage(r request) (response, error) {
	b := r.body.(messageRequest)
	id, err := pathThread(r)
	if err != nil {
		return response{}, err
	}
	if err := s.mayMessage(r, b); err != nil {
		return response{}, err
	}
	if _, err := threads.Get(r.Context(), s.pool, id); err != nil {
		return response{}, threadError(err)
	}
	o := threads.Outgoing{ThreadID: id, Content: b.Content, ExecutionID: b.ExecutionID, Key: messageKey(r.Request, id, b)}
	if b.ExecutionID == "" {
		return s.sendAsAdmin(r, o)
	}
	x, err := s.messageExecution(r, b)
	if err != nil {
		return response{}, err
	}
	if o.Claim, err = s.engine.LockClaim(r.Context(), x.ID, b.LockID); err != nil {
		return response{}, err
	}
	var sent threads.SendResult
	err = withFreshKey(r.Context(), s.pool, o.Key, func(key string) (string, error) {
		o.Key = key
		err := s.withThreadLock(r.Context(), id, func(ctx context.Context) error {
			return postgres.InTxWithin(ctx, s.pool, func(tx pgx.Tx) (err error) {
				sent, err = threads.SendTx(ctx, tx, o)
				return err
			})
		})
		return sent.MessageID, err
	})
	if postgres.IsCode(err, "LK001") { // the worker lost the lock meanwhile
		if _, err = s.engine.LockClaim(r.Context(), x.ID, b.LockID); err == nil {
			err = executions.ErrVoid
		}
	}
	if err != nil {
		return response{}, messageError(err)
	}
	sent.Log(r.Context(), s.log.With("trace_id", x.TraceID, "execution_id", x.ID), id, fmt.Sprintf("%s#%d", x.ID, o.Claim))
	return response{
		body: messageResponse{true, sent.Queued, sent.MessageID}, status: http.StatusCreated, trace: x.TraceID,
	}, nil
}

// mayMessage rejects a message for an execution on which the worker may not work.
func (s *server) mayMessage(r request, b messageRequest) error {
	caller := principals.From(r.Context())
	switch {
	case caller == nil || caller.May(principals.ThreadsWrite):
		return nil
	case b.ExecutionID == "":
		return missingScope(caller, string(principals.ThreadsWrite))
	}
	return s.mayWork(r.Context(), b.ExecutionID)
}

// messageExecution returns the execution that sends a message. Only external executions may use this route.
func (s *server) messageExecution(r request, b messageRequest) (executions.Execution, error) {
	x, err := executions.Get(r.Context(), s.pool, b.ExecutionID)
	switch {
	case err != nil:
		return x, err
	case x.Flow != "external" && !strings.HasPrefix(x.Flow, "external:"):
		return x, problem.New(http.StatusForbidden,
			"execution %s of flow %s runs in this program and sends its own messages; omit execution_id to send as the admin",
			x.ID, x.Flow).WithTrace(x.TraceID)
	case b.LockID == "":
		return x, problem.New(http.StatusForbidden, "lock_id is missing: only the worker with the lock of execution %s can "+
			"send its messages", x.ID).WithTrace(x.TraceID)
	}
	return x, nil
}

// withThreadLock writes to a thread whose lane or row another transaction may hold.
func (s *server) withThreadLock(ctx context.Context, id string, write func(ctx context.Context) error) error {
	what := fmt.Sprintf("thread %q", id)
	return postgres.ExplainLock(ctx, s.pool, s.locks.Try(ctx, what, write), what, "agent_locks",
		"agent_threads", "agent_messages")
}

// sendAsAdmin sends a message outside any execution and records it.
func (s *server) sendAsAdmin(r request, o threads.Outgoing) (response, error) {
	var sent threads.SendResult
	var c change
	err := s.withThreadLock(r.Context(), o.ThreadID, func(ctx context.Context) (err error) {
		c, err = s.record(ctx, "send_message", "an admin's own message", map[string]any{"thread_id": o.ThreadID},
			func(tx pgx.Tx, _ string) (any, error) {
				err := withFreshKey(ctx, tx, o.Key, func(key string) (_ string, err error) {
					keyed := o
					keyed.Key = key
					sent, err = threads.SendTx(ctx, tx, keyed)
					return sent.MessageID, err
				})
				return map[string]any{"message_id": sent.MessageID, "queued": sent.Queued}, err
			})
		return err
	})
	if err != nil {
		return response{}, messageError(err)
	}
	sent.Log(r.Context(), s.log.With("trace_id", c.TraceID), o.ThreadID, actorName(r.Context()))
	return response{
		body: messageResponse{true, sent.Queued, sent.MessageID}, status: http.StatusCreated, trace: c.TraceID,
	}, nil
}

func messageError(err error) error {
	if refused, ok := errors.AsType[*pgconn.PgError](err); ok && postgres.IsCode(err, "22023") {
		return problem.BadBody("%s", refused.Message)
	}
	return err
}

// messageKey derives the message's key from the Idempotency-Key. So the server sends the message once even if the
// process dies before it stores the response.
func messageKey(r *http.Request, thread string, b messageRequest) string {
	key := r.Header.Get(keyHeader)
	if key == "" {
		return ""
	}
	sum := sha256.Sum256([]byte(strings.Join([]string{key, thread, b.ExecutionID, b.Content}, "\n")))
	return "request " + hex.EncodeToString(sum[:])
}

func (s *server) messageRoutes() []route {
	return []route{
		{
			method: "POST", path: "/v1/threads", body: threadRequest{}, response: threads.Thread{}, status: http.StatusCreated,
			handle: s.openThread, conflicts: true, about: "Create a conversation. 409 if the id exists.",
		}, {
			method: "PATCH", path: "/v1/threads/{id}", body: titleRequest{}, response: threads.Thread{}, handle: s.nameThread,
			about: "Name a conversation for people. Lists show the title and searches use it; it identifies no thread.",
		}, {
			method: "POST", path: "/v1/threads/{id}/messages", body: messageRequest{}, response: messageResponse{},
			status: http.StatusCreated, handle: s.sendMessage, conflicts: true, derivesKey: true,
			about: "Send a message to a conversation: for a locked external execution with execution_id and lock_id, " +
				"else as the admin. The thread's holder sends at once; other messages are queued, first in, first out.",
		},
	}
}
