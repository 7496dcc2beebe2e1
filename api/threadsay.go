package api

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/threads"
)

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

// begin makes a thread of the admin's or, where its messages go out by themselves, of the channel's, and opens it to the key that is named.
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

// sayingKey makes the message an effect of its Idempotency-Key, so that it is sent once also when the process died between
// sending it and keeping the answer.
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
