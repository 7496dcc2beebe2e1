package chat

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// attemptHeader counts the retries of the clients that OpenAI generates: 0 is the first attempt.
const attemptHeader = "X-Stainless-Retry-Count"

// deliveredRetryWindow is how long a counted retry gets an answer that was sent already: the client may have lost its
// end. A person who repeats a message needs longer.
const deliveredRetryWindow = 30 * time.Second

// deliveryNoteTimeout bounds recordDelivery.
const deliveryNoteTimeout = 5 * time.Second

// retry recognises a request that a client sends again. The message is then answered and paid for once.
//
// Equal requests have the same route, caller, thread, Idempotency-Key and body. Within 15 minutes, the second one gets
// the turn of the first in two cases:
//
//   - Its retry count (attemptHeader) is above 0. The first request is unanswered, or was answered less than
//     deliveredRetryWindow ago.
//   - Its count is 0, the turn is active, and the first connection or its process is gone.
//
// Any other request is a new message: a visitor may send "yes" twice. A client also counts its retries of a refused
// attempt. So if this process refused the first attempt of an equal request, a counted retry gets no turn that began
// before the refusal.
//
// Two users of one backend may send equal requests. If these name neither thread nor visitor, the address is compared
// too. Such a turn is shared only if its first connection ended unanswered or belongs to another process. With count 0
// it is shared only if the first client did not learn its thread, which a stream names at once. A request that creates
// a visitor is never a retry.
type retry struct {
	fingerprint []byte
	workerID    string // this process
	trace       string // of this request
	attempt     int
	refusedFor  time.Duration // since this process refused a first attempt of an equal request
	hasThread   bool          // the request names a thread or a visitor
	isUnary     bool          // not a stream: the client learns its thread with the answer
	attached    bool          // an earlier turn was found
}

// attemptOf returns a request's retry count.
func attemptOf(r *http.Request) int {
	n, err := strconv.Atoi(r.Header.Get(attemptHeader))
	if err != nil || n < 0 || n > 100 { // absent, or no count of a real client
		return 0
	}
	return n
}

// newRetry describes a request for recognition. It returns nil when the visitor is new, so there is no earlier request.
func (c *Chat) newRetry(
	r *http.Request, a *UserMessage, visitor, digest string, newVisitor, stream bool,
) (*retry, error) {
	if newVisitor {
		return nil, nil
	}
	worker, err := c.Engine.WorkerID(r.Context())
	if err != nil {
		return nil, fmt.Errorf("recognise retry: %w", err)
	}
	t := &retry{
		workerID: worker, trace: string(a.TraceID), attempt: attemptOf(r), isUnary: !stream,
		refusedFor: c.limits.sinceRefusal(visitor, digest),
		hasThread:  a.Name != "" || a.Join != "" || a.Secret != "",
	}
	parts := []string{a.Owner, a.principal().Proof, a.Name, a.Join, a.Key, r.URL.Path, digest, ""}
	if !t.hasThread {
		parts[len(parts)-1] = c.Address(r)
	}
	sum := sha256.Sum256([]byte(strings.Join(parts, "\x00")))
	t.fingerprint = sum[:]
	return t, nil
}

// queueFind queues the search for the turn of an equal earlier request, and moves its answer to this connection. id is
// "" for none. A lock, acquired before the thread's, serialises equal requests. A request's state is open while its
// connection waits, then delivered or left (see recordDelivery).
func (t *retry) queueFind(b *pgx.Batch, id *string) {
	b.Queue(`select pg_advisory_xact_lock(hashtextextended('chat request ' || encode(@fingerprint, 'hex'), 0))`,
		postgres.Strict{"fingerprint": t.fingerprint})
	b.Queue(`
		with same as (
		  select r.id
		    from agent_chat_requests r
		    join agent_executions x on x.id = r.execution_id
		   where r.fingerprint = @fingerprint
		     and r.created_at > statement_timestamp() - interval '15 minutes'
		     and case
		           -- An earlier try of this request attached it by a commit that was not confirmed.
		           when r.connection = @trace then x.trace_id <> @trace
		           when @attempt > 0 and r.created_at < clock_timestamp() - make_interval(secs => @refused) then false
		           when @attempt > 0 and r.state = 'delivered'
		             then r.attempt <= @attempt
		                  and @named::boolean
		                  and r.changed_at > clock_timestamp() - make_interval(secs => @delivered)
		           when @attempt > 0 and @named::boolean then r.attempt <= @attempt
		           when @attempt > 0 then r.attempt < @attempt and (r.state = 'left' or r.worker <> @worker::uuid)
		           else (@named::boolean or @quiet::boolean)
		                and x.completed_at is null
		                and (r.state = 'left'
		                     or r.state = 'open' and not exists (
		                          select from agent_workers w where w.id = r.worker and w.expires_at > clock_timestamp()))
		         end
		   order by array_position(array['left', 'open'], r.state), r.created_at desc
		   limit 1),
		taken as (
		  update agent_chat_requests r
		     set connection = @trace, worker = @worker, attempt = greatest(r.attempt, @attempt), state = 'open',
		         changed_at = clock_timestamp()
		    from same s
		   where r.id = s.id
		  returning r.execution_id)
		select coalesce((select k.execution_id::text from taken k), '')`, postgres.Strict{
		"fingerprint": t.fingerprint, "attempt": t.attempt, "named": t.hasThread, "quiet": t.isUnary, "worker": t.workerID,
		"trace": t.trace, "delivered": deliveredRetryWindow.Seconds(), "refused": t.refusedFor.Seconds(),
	}).QueryRow(func(row pgx.Row) error { return row.Scan(id) })
}

// queueRecord queues the insert of the request and its turn, and the delete of a few expired requests.
func (t *retry) queueRecord(b *pgx.Batch, execution string) {
	b.Queue(`
		with old as (
		  select r.id from agent_chat_requests r
		   where r.expires_at < statement_timestamp()
		   order by r.expires_at
		   limit 20
		     for update skip locked),
		gone as (delete from agent_chat_requests r using old o where r.id = o.id)
		insert into agent_chat_requests (fingerprint, execution_id, connection, worker, attempt)
		values (@fingerprint, @execution::uuid, @trace, @worker::uuid, @attempt)`, postgres.Strict{
		"fingerprint": t.fingerprint, "execution": execution, "trace": t.trace, "worker": t.workerID, "attempt": t.attempt,
	})
}

// recordDelivery records whether the client received its answer. The record of a later retry is not changed.
func (c *Chat) recordDelivery(ctx context.Context, t *retry, delivered bool) {
	if t == nil {
		return
	}
	state := "left"
	if delivered {
		state = "delivered"
	}
	ctx, stop := context.WithTimeout(context.WithoutCancel(ctx), deliveryNoteTimeout)
	defer stop()
	_, err := c.Front.Exec(ctx, `
		update agent_chat_requests set state = @state, changed_at = clock_timestamp()
		 where fingerprint = @fingerprint and connection = @trace`,
		postgres.Strict{"state": state, "fingerprint": t.fingerprint, "trace": t.trace})
	if err != nil {
		c.Logger.WarnContext(ctx, "delivery not recorded", "error", err)
	}
}

// recordingWriter keeps the first error of its writes.
type recordingWriter struct {
	http.ResponseWriter
	err error
}

// Write writes p and keeps the first error.
func (w *recordingWriter) Write(p []byte) (int, error) {
	n, err := w.ResponseWriter.Write(p)
	if w.err == nil {
		w.err = err
	}
	return n, err
}

// Unwrap lets http.ResponseController flush.
func (w *recordingWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// sendAnswer sends an answer and records whether the client received it. After a shutdown the client may retry: its
// retry gets the same turn.
func (c *Chat) sendAnswer(
	w http.ResponseWriter, r *http.Request, t *retry, show func(http.ResponseWriter) error,
) error {
	recorder := &recordingWriter{ResponseWriter: w}
	err := show(recorder)
	draining := errors.Is(c.Engine.Live(), executions.ErrDraining)
	c.recordDelivery(r.Context(), t, recorder.err == nil && r.Context().Err() == nil && !draining)
	if refusal, ok := errors.AsType[*Refusal](err); ok && t != nil && refusal.Code == codeShuttingDown {
		refusal.stored = false
	}
	return err
}
