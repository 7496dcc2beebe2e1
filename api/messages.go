package api

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/principals"
	"github.com/lanekeeper/lanekeeper/threads"
)

// messageRequest is a message from the admin, or from an execution that an external worker has locked.
type messageRequest struct {
	Content     string `json:"content"`
	ExecutionID string `json:"execution_id,omitempty"`
	LockID      string `json:"lock_id,omitempty"`
}

func (b messageRequest) check() error {
	switch {
	case strings.TrimSpace(b.Content) == "":
		return problem.BadBody("content is missing")
	case len(b.Content) > threads.MaxContent:
		return problem.BadBody("content is longer than %d bytes", threads.MaxContent)
	case b.ExecutionID != "" && !uuidForm.MatchString(b.ExecutionID):
		return problem.BadBody("execution_id is %.60q; use the id of an execution", b.ExecutionID)
	case b.LockID != "" && b.ExecutionID == "":
		return problem.BadBody("lock_id needs execution_id: name the locked execution")
	}
	return nil
}

// messageResponse reports whether the message was sent or queued.
type messageResponse struct {
	Success   bool   `json:"success"`
	Queued    bool   `json:"queued"`
	MessageID string `json:"message_id"`
}

// sendMessage stores a message of the admin, or of an execution whose lock the worker holds. The execution's message is
// stored only while the lock holds.
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
	o := threads.Outgoing{
		ThreadID: id, Content: b.Content, ExecutionID: b.ExecutionID,
		Key: derivedKey(r.Request, id, b.ExecutionID, b.Content),
	}
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
	if postgres.IsCode(err, "LK001") { // the fence of the claim: the worker lost the lock meanwhile
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
	case !executions.IsExternal(x.Flow):
		return x, problem.New(http.StatusForbidden,
			"execution %s of flow %s runs in this program and sends its own messages; omit execution_id to send as the admin",
			x.ID, x.Flow).WithTrace(x.TraceID)
	case b.LockID == "":
		return x, problem.New(http.StatusForbidden, "lock_id is missing: only the worker with the lock of execution %s can "+
			"send its messages", x.ID).WithTrace(x.TraceID)
	}
	return x, nil
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

// withThreadLock writes to a thread whose lane or row another transaction may hold.
func (s *server) withThreadLock(ctx context.Context, id string, write func(ctx context.Context) error) error {
	what := fmt.Sprintf("thread %q", id)
	return postgres.ExplainLock(ctx, s.pool, s.locks.Try(ctx, what, write), what, "agent_locks",
		"agent_threads", "agent_messages")
}

func messageError(err error) error {
	if refused, ok := errors.AsType[*pgconn.PgError](err); ok && postgres.IsCode(err, "22023") {
		return problem.BadBody("%s", refused.Message)
	}
	return err
}
