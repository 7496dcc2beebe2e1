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

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/threads"
)

// threadDetail is a thread with a page of what was said in it, newest first.
type threadDetail struct {
	threads.Thread
	Messages   []threads.Message `json:"messages"`
	NextCursor *string           `json:"next_cursor"`
}

// listThreads goes by when a thread was last spoken in. That changes: a thread that is spoken in while the
// listing is read moves to its front.
func (s *server) listThreads(r request) (answer, error) {
	after, err := unseal("threads", r.query["cursor"])
	if err != nil {
		return answer{}, err
	}
	f := threads.Filter{
		Channel: r.query["channel"], Owner: r.query["owner"], Agent: r.query["agent"], Limit: r.query.limit(),
	}
	if after != "" {
		at, id, _ := strings.Cut(after, " ")
		f.BeforeID = id
		if f.BeforeTime, err = time.Parse(time.RFC3339Nano, at); err != nil {
			return answer{}, activity.ErrCursor
		}
	}
	rows, err := threads.List(r.Context(), s.pool, f)
	if err != nil || len(rows) < f.Limit {
		return answer{body: pageOf(rows, "")}, err
	}
	last := rows[len(rows)-1]
	f.BeforeTime, f.BeforeID, f.Limit = last.UpdatedAt, last.ID, 1
	more, err := threads.List(r.Context(), s.pool, f)
	if err != nil || len(more) == 0 {
		return answer{body: pageOf(rows, "")}, err
	}
	return answer{body: pageOf(rows, seal("threads", last.UpdatedAt.UTC().Format(time.RFC3339Nano)+" "+last.ID))}, nil
}

func (s *server) getThread(r request) (answer, error) {
	id := r.PathValue("id")
	if err := threads.CheckID(id); err != nil {
		return answer{}, problem.New(http.StatusBadRequest, "%s", err).Kind("malformed-id", "Malformed id")
	}
	t, err := threads.Find(r.Context(), s.pool, id)
	if errors.Is(err, threads.ErrNotFound) {
		return answer{}, problem.New(http.StatusNotFound, "%s", threads.ErrNotFound)
	}
	if err != nil {
		return answer{}, err
	}
	messages, next, err := s.messages(r, t.ID)
	if err != nil {
		return answer{}, err
	}
	p := pageOf(messages, next)
	return answer{body: threadDetail{t, p.Items, p.NextCursor}}, nil
}

// messages is a page of a thread. What is queued has no place yet and comes first, all on the first page.
func (s *server) messages(r request, thread string) (rows []threads.Message, next string, err error) {
	f := threads.MessageFilter{ThreadID: thread, Limit: r.query.limit()}
	after, err := unseal("messages", r.query["cursor"])
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
	return rows, seal("messages", strconv.FormatInt(f.Before, 10)), nil
}

// queued are the messages of a thread that have no place yet.
func (s *server) queued(r request, thread string) ([]threads.Message, error) {
	rows, err := threads.Messages(r.Context(), s.pool, threads.MessageFilter{ThreadID: thread, Limit: maxPage})
	return slices.DeleteFunc(rows, func(m threads.Message) bool { return m.Seq != nil }), err
}

// inviting asks for a join token.
type inviting struct {
	Reusable    bool            `json:"reusable,omitempty"`     // lets any number of visitors in until its end; else one
	ExpiresIn   json.RawMessage `json:"expires_in,omitempty"`   // seconds, or text such as 24h or 7d; 24h when left out
	ExecutionID string          `json:"execution_id,omitempty"` // the token ends with this execution
}

func (i inviting) check() error {
	if i.ExecutionID != "" && !uuidForm.MatchString(i.ExecutionID) {
		return badBody("execution_id is %.60q; it has to be the id of an execution", i.ExecutionID)
	}
	life, err := timeout(i.ExpiresIn)
	switch {
	case err != nil:
		return badBody("expires_in has to be more than 0: a number of seconds, or text such as 90m, 24h or 7d")
	case life > threads.MaxTokenLife:
		return badBody("expires_in is at most 30 days")
	}
	return nil
}

// letting names who may read and speak in a thread.
type letting struct {
	Key     string `json:"key,omitempty"` // name of a chat key
	Flow    string `json:"flow,omitempty"`
	Webhook string `json:"webhook,omitempty"` // an endpoint
	Name    string `json:"name,omitempty"`    // what the key or the endpoint calls the thread; its id when left out
}

func (l letting) principal() threads.Principal {
	switch {
	case l.Key != "":
		return threads.Key(l.Key)
	case l.Flow != "":
		return threads.Principal{Kind: threads.ByFlow, Owner: l.Flow}
	}
	return threads.Principal{Kind: threads.ByWebhook, Owner: l.Webhook}
}

func (l letting) check() error {
	named := 0
	for _, name := range []string{l.Key, l.Flow, l.Webhook} {
		if name != "" {
			named++
		}
		if !storable(name) || len(name) > 200 {
			return badBody("key, flow and webhook have at most 200 bytes of text")
		}
	}
	switch {
	case named != 1:
		return badBody("name one of key, flow and webhook")
	case l.Flow != "" && l.Name != "":
		return badBody("name belongs to key and webhook; a flow calls the thread by its id")
	case l.Name != "" && threads.CheckID(l.Name) != nil:
		return badBody("name: %s", threads.ErrInvalid)
	}
	return nil
}

// threadIn is the thread that the path names.
func threadIn(r request) (string, error) {
	id := r.PathValue("id")
	if err := threads.CheckID(id); err != nil {
		return "", problem.New(http.StatusBadRequest, "%s", err).Kind("malformed-id", "Malformed id")
	}
	return id, nil
}

// noThread tells of a thread, or an access, that there is not.
func noThread(err error) error {
	if errors.Is(err, threads.ErrNoAccess) {
		return problem.New(http.StatusNotFound, "%s", threads.ErrNoAccess)
	}
	if errors.Is(err, threads.ErrNotFound) {
		return problem.New(http.StatusNotFound, "%s", threads.ErrNotFound)
	}
	return err
}

func (s *server) inviteIntoThread(r request) (answer, error) {
	b := r.body.(inviting)
	id, err := threadIn(r)
	if err != nil {
		return answer{}, err
	}
	life, err := timeout(b.ExpiresIn)
	if err != nil {
		return answer{}, err
	}
	var token threads.Token
	c, err := s.audited(r.Context(), "invite_into_thread", "a join token was given out", map[string]any{"thread_id": id},
		func(tx pgx.Tx, _ string) (any, error) {
			token, err = threads.Invite(r.Context(), tx, threads.Invitation{
				ThreadID: id, Reusable: b.Reusable, Life: life, ExecutionID: b.ExecutionID, By: admin,
			})
			return map[string]any{"access_id": token.ID, "expires_at": token.ExpiresAt.UTC().Format(time.RFC3339)}, err
		})
	return answer{body: token, status: http.StatusCreated, trace: c.TraceID}, noThread(err)
}

// letIn is an access that was given.
type letIn struct {
	ID       string `json:"id"`
	ThreadID string `json:"thread_id"`
	Name     string `json:"name"` // what the participant calls the thread
}

func (s *server) letIntoThread(r request) (answer, error) {
	b := r.body.(letting)
	id, err := threadIn(r)
	if err != nil {
		return answer{}, err
	}
	to := b.principal()
	given := letIn{ThreadID: id, Name: cmp.Or(b.Name, id)}
	c, err := s.audited(r.Context(), "open_thread", "a thread was opened to "+string(to.Kind)+" "+to.Owner,
		map[string]any{"thread_id": id, string(to.Kind): to.Owner},
		func(tx pgx.Tx, _ string) (any, error) {
			given.ID, err = threads.Let(r.Context(), tx, id, to, given.Name, admin)
			return map[string]any{"access_id": given.ID}, err
		})
	if errors.Is(err, threads.ErrTaken) {
		return answer{}, problem.New(http.StatusConflict, "%s %s has another thread %q; give this one another name", to.Kind, to.Owner, given.Name)
	}
	return answer{body: given, status: http.StatusCreated, trace: c.TraceID}, noThread(err)
}

func (s *server) listAccess(r request) (answer, error) {
	id, err := threadIn(r)
	if err != nil {
		return answer{}, err
	}
	if _, err := threads.Get(r.Context(), s.pool, id); err != nil {
		return answer{}, noThread(err)
	}
	got, err := threads.AccessOf(r.Context(), s.pool, id)
	return answer{body: pageOf(got, "")}, err
}

func (s *server) revokeAccess(r request) (answer, error) {
	id, err := threadIn(r)
	if err != nil {
		return answer{}, err
	}
	access := r.PathValue("access_id")
	if !uuidForm.MatchString(access) {
		return answer{}, problem.New(http.StatusBadRequest, "that is not the id of an access").Kind("malformed-id", "Malformed id")
	}
	c, err := s.audited(r.Context(), "revoke_thread_access", "an access to a thread was revoked", map[string]any{"thread_id": id, "access_id": access},
		func(tx pgx.Tx, _ string) (any, error) {
			return map[string]any{"revoked": true}, threads.Revoke(r.Context(), tx, id, access)
		})
	c.Name, c.Changed = access, err == nil
	return answer{body: c, trace: c.TraceID}, noThread(err)
}

// admitting is how somebody gets into a thread of somebody else's.
func (s *server) admitting() []route {
	return []route{
		{
			method: "POST", path: "/v1/threads/{id}/join_tokens", body: inviting{}, answer: threads.Token{}, status: http.StatusCreated,
			handle: s.inviteIntoThread, repeatable: true,
			about: "Give out a join token: a visitor who sends it as X-Thread-Join gets into the conversation. It lets one visitor in, or any number until " +
				"its end, and is told once.",
		}, {
			method: "POST", path: "/v1/threads/{id}/participants", body: letting{}, answer: letIn{}, status: http.StatusCreated, handle: s.letIntoThread,
			repeatable: true, conflicts: true,
			about: "Open a conversation to a chat key, a flow or a webhook endpoint. 409 when the key or the endpoint has another one of that name.",
		}, {
			method: "GET", path: "/v1/threads/{id}/access", answer: page[threads.Access]{}, handle: s.listAccess,
			about: "Who was let into a conversation, and its join tokens, without the tokens themselves.",
		}, {
			method: "DELETE", path: "/v1/threads/{id}/access/{access_id}", answer: change{}, handle: s.revokeAccess,
			about: "Revoke an access. With a join token goes everybody whom it has let in.",
		},
	}
}

const (
	maxMessage = 64 << 10          // of what is said in a thread, in bytes
	maxIdle    = 30 * 24 * 60 * 60 // of a thread's idle time, in seconds
)

// saying is a message for a thread: of the run that a worker outside holds the lock of, or of the admin.
type saying struct {
	Content     string `json:"content"`
	ExecutionID string `json:"execution_id,omitempty"`
	LockID      string `json:"lock_id,omitempty"`
}

// saidIn says what became of it. A queued message leaves in its turn, when the thread is free.
type saidIn struct {
	Success   bool   `json:"success"`
	Queued    bool   `json:"queued"`
	MessageID string `json:"message_id"`
}

func (b saying) check() error {
	switch {
	case strings.TrimSpace(b.Content) == "":
		return badBody("content is missing: say something")
	case len(b.Content) > maxMessage:
		return badBody("content is longer than %d bytes", maxMessage)
	case b.ExecutionID != "" && !uuidForm.MatchString(b.ExecutionID):
		return badBody("execution_id is %.60q; it has to be the id of an execution", b.ExecutionID)
	case b.LockID != "" && b.ExecutionID == "":
		return badBody("lock_id is of no use without execution_id: name the execution that it locks")
	}
	return nil
}

// opening makes a thread.
type opening struct {
	ID          string `json:"id"`
	Channel     string `json:"channel,omitempty"` // chat (default), webhook or log
	Target      string `json:"target,omitempty"`  // of channel webhook: the outgoing target
	Participant string `json:"participant,omitempty"`
	Owner       string `json:"owner,omitempty"`        // a chat key that may speak in it, and calls it by this id; empty: nobody outside, until somebody is let in
	IdleSeconds *int   `json:"idle_seconds,omitempty"` // after how long without a message of its holder others may speak; 600 when left out
}

func (o opening) check() error {
	channels := []string{threads.ChannelChat, threads.ChannelWebhook, threads.ChannelLog}
	switch {
	case threads.CheckID(o.ID) != nil:
		return badBody("id: %s", threads.ErrInvalid)
	case o.Channel != "" && !slices.Contains(channels, o.Channel):
		return badBody("channel is %.60q; it can be %s", o.Channel, strings.Join(channels, ", "))
	case (o.Channel == threads.ChannelWebhook) != (o.Target != ""):
		return badBody("target is given with channel webhook, and only then: the name of an outgoing target")
	case o.IdleSeconds != nil && (*o.IdleSeconds < 1 || *o.IdleSeconds > maxIdle):
		return badBody("idle_seconds is %d; it can be 1 to %d (30 days)", *o.IdleSeconds, maxIdle)
	case threads.GivenOut(o.ID):
		return badBody("id is of the form that the agent gives out itself; choose another")
	case !storable(o.Participant) || !storable(o.Owner) || !storable(o.Target) || len(o.Participant) > 200 || len(o.Owner) > 200:
		return badBody("participant and owner have at most 200 bytes of text")
	}
	return nil
}

func (s *server) openThread(r request) (answer, error) {
	o := r.body.(opening)
	if o.Target != "" {
		var known bool
		err := s.pool.QueryRow(r.Context(), `select exists (select from agent_webhook_targets where name = @name)`,
			postgres.Strict{"name": o.Target}).Scan(&known)
		if err != nil {
			return answer{}, err
		}
		if !known {
			return answer{}, badBody("there is no outgoing webhook target %q: declare it in the workspace", o.Target)
		}
	}
	var got threads.Thread
	var made bool
	done, err := s.audited(r.Context(), "begin_thread", "a conversation was begun", map[string]any{"thread_id": o.ID},
		func(tx pgx.Tx, _ string) (_ any, err error) {
			if got, made, err = s.begin(r.Context(), tx, o); err != nil || !made {
				return activity.Unchanged, err
			}
			return map[string]string{"thread_id": got.ID}, nil
		})
	switch {
	case errors.Is(err, threads.ErrTaken):
		return answer{}, problem.New(http.StatusConflict, "the key %s has a thread %q of its own; choose another id", o.Owner, o.ID)
	case errors.Is(err, threads.ErrForeign) || err == nil && !made:
		return answer{}, problem.New(http.StatusConflict, "there is a thread %q already", o.ID)
	case err != nil:
		return answer{}, err
	}
	return answer{body: got, status: http.StatusCreated, trace: done.TraceID}, nil
}

// begin makes a thread of the admin's or, where its messages go out by themselves, of the channel's, and opens it to
// the key that is named.
func (s *server) begin(ctx context.Context, tx pgx.Tx, o opening) (threads.Thread, bool, error) {
	t := threads.Thread{ID: o.ID, Channel: o.Channel, Target: o.Target, Participant: o.Participant, Owner: o.Owner, IdleSeconds: value(o.IdleSeconds)}
	if o.Channel == "" || o.Channel == threads.ChannelChat || o.Owner != "" {
		return threads.Ensure(ctx, tx, t)
	}
	return threads.Open(ctx, tx, threads.Principal{Kind: threads.ByChannel, Owner: o.Channel}, t)
}

func (s *server) sayInThread(r request) (answer, error) {
	b, id := r.body.(saying), r.PathValue("id")
	if err := threads.CheckID(id); err != nil {
		return answer{}, problem.New(http.StatusBadRequest, "%s", err).Kind("malformed-id", "Malformed id")
	}
	if _, err := threads.Get(r.Context(), s.pool, id); errors.Is(err, threads.ErrNotFound) {
		return answer{}, problem.New(http.StatusNotFound, "%s", threads.ErrNotFound)
	} else if err != nil {
		return answer{}, err
	}
	o := threads.Outgoing{ThreadID: id, Content: b.Content, ExecutionID: b.ExecutionID, Key: sayingKey(r.Request, id, b)}
	if b.ExecutionID == "" {
		return s.adminSays(r, o)
	}
	x, err := s.speaker(r, b)
	if err != nil {
		return answer{}, err
	}
	if o.Claim, err = s.engine.LockClaim(r.Context(), x.ID, b.LockID); err != nil {
		return answer{}, err
	}
	var sent threads.SendResult
	err = onceMore(r.Context(), s.pool, o.Key, func(key string) (string, error) {
		o.Key = key
		err := s.inThread(r.Context(), id, func(ctx context.Context) error {
			return postgres.InTxWithin(ctx, s.pool, func(tx pgx.Tx) (err error) {
				sent, err = threads.SendTx(ctx, tx, o)
				return err
			})
		})
		return sent.MessageID, err
	})
	if postgres.IsCode(err, "LK001") { // it was lost meanwhile
		if _, err = s.engine.LockClaim(r.Context(), x.ID, b.LockID); err == nil {
			err = executions.ErrVoid
		}
	}
	if err != nil {
		return answer{}, saidWrong(err)
	}
	sent.Log(r.Context(), s.log.With("trace_id", x.TraceID, "execution_id", x.ID), id, fmt.Sprintf("%s#%d", x.ID, o.Claim))
	return answer{body: saidIn{true, sent.Queued, sent.MessageID}, status: http.StatusCreated, trace: x.TraceID}, nil
}

// speaker is the execution that a message is of. Those that run in this program speak for themselves.
func (s *server) speaker(r request, b saying) (executions.Execution, error) {
	x, err := executions.Get(r.Context(), s.pool, b.ExecutionID)
	switch {
	case err != nil:
		return x, err
	case x.Flow != "external" && !strings.HasPrefix(x.Flow, "external:"):
		return x, problem.New(http.StatusForbidden,
			"execution %s runs in this program, flow %s, and speaks for itself; leave execution_id out to speak as the admin", x.ID, x.Flow).WithTrace(x.TraceID)
	case b.LockID == "":
		return x, problem.New(http.StatusForbidden, "lock_id is missing: only the worker that holds the lock of execution %s speaks for it", x.ID).WithTrace(x.TraceID)
	}
	return x, nil
}

// inThread writes to a thread, whose lane or row an open transaction of a client may hold.
func (s *server) inThread(ctx context.Context, id string, write func(ctx context.Context) error) error {
	what := fmt.Sprintf("thread %q", id)
	return postgres.ExplainLock(ctx, s.pool, s.locks.Try(ctx, what, write), what, "agent_locks", "agent_threads", "agent_messages")
}

// adminSays sends a message of nobody who could hold the thread, and keeps a record of it.
func (s *server) adminSays(r request, o threads.Outgoing) (answer, error) {
	var sent threads.SendResult
	var c change
	err := s.inThread(r.Context(), o.ThreadID, func(ctx context.Context) (err error) {
		c, err = s.audited(ctx, "send_message", "an admin's own message", map[string]any{"thread_id": o.ThreadID},
			func(tx pgx.Tx, _ string) (any, error) {
				err := onceMore(ctx, tx, o.Key, func(key string) (_ string, err error) {
					said := o
					said.Key = key
					sent, err = threads.SendTx(ctx, tx, said)
					return sent.MessageID, err
				})
				return map[string]any{"message_id": sent.MessageID, "queued": sent.Queued}, err
			})
		return err
	})
	if err != nil {
		return answer{}, saidWrong(err)
	}
	sent.Log(r.Context(), s.log.With("trace_id", c.TraceID), o.ThreadID, admin)
	return answer{body: saidIn{true, sent.Queued, sent.MessageID}, status: http.StatusCreated, trace: c.TraceID}, nil
}

// saidWrong tells the client what the database refused.
func saidWrong(err error) error {
	if refused, is := errors.AsType[*pgconn.PgError](err); is && postgres.IsCode(err, "22023") {
		return badBody("%s", refused.Message)
	}
	return err
}

// sayingKey makes the message an effect of its Idempotency-Key, so that it is sent once also when the process died
// between sending it and keeping the answer.
func sayingKey(r *http.Request, thread string, b saying) string {
	key := r.Header.Get(keyHeader)
	if key == "" {
		return ""
	}
	sum := sha256.Sum256([]byte(strings.Join([]string{key, thread, b.ExecutionID, b.Content}, "\n")))
	return "request " + hex.EncodeToString(sum[:])
}

// speaking is how threads are made and spoken in.
func (s *server) speaking() []route {
	return []route{
		{
			method: "POST", path: "/v1/threads", body: opening{}, answer: threads.Thread{}, status: http.StatusCreated, handle: s.openThread,
			conflicts: true, about: "Begin a conversation. 409 when there is one with this id.",
		}, {
			method: "POST", path: "/v1/threads/{id}/messages", body: saying{}, answer: saidIn{}, status: http.StatusCreated,
			handle: s.sayInThread, conflicts: true, keyed: true,
			about: "Say something in a conversation. With execution_id and lock_id it is what the run says that a worker outside has locked; " +
				"without, the admin's own message. Who holds the thread speaks at once; other messages are queued and leave first-in-first-out.",
		},
	}
}
