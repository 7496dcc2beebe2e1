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

// deliveredFor is how long after an answer was sent a counted retry still gets it: the client may have lost the end.
// A person who repeats the same words needs longer.
const deliveredFor = 30 * time.Second

// settlePatience bounds the note of how a connection ended.
const settlePatience = 5 * time.Second

// retry recognises a request that a client sends again, so that it is answered once and paid once.
//
// The same request is one of the same caller, with the same thread, Idempotency-Key and body. It gets the turn of the
// first in these cases, within 15 minutes:
//
//   - The client counts it as a retry (attemptHeader above 0), and the first was not answered, or less than
//     deliveredFor ago.
//   - It does not, but the turn is under way and the first one's connection is gone, or its process.
//
// Anything else is a message of its own: who says "yes" twice is heard twice.
//
// Two users of one backend may send equal requests. When these name neither thread nor visitor, the address counts,
// too, and a turn is shared only when its first connection ended unanswered, or is another process's. Uncounted, it is
// shared only when no thread was named to the first client: a stream names its thread at once. A visitor who is new
// with the request is never recognised.
type retry struct {
	print    []byte
	worker   string // this process
	trace    string // of this request
	attempt  int
	named    bool // a thread or a visitor is named
	quiet    bool // the first client knows no thread until it is answered
	attached bool // the turn was found
}

// retryOf is what recognises a request; nil for one that cannot be a retry.
func (c *Chat) retryOf(r *http.Request, a UserMessage, digest string, made, stream bool) (*retry, error) {
	if made {
		return nil, nil
	}
	attempt, err := strconv.Atoi(r.Header.Get(attemptHeader))
	if err != nil || attempt < 0 || attempt > 100 {
		attempt = 0
	}
	worker, err := c.Engine.WorkerID(r.Context())
	if err != nil {
		return nil, fmt.Errorf("recognise request: %w", err)
	}
	t := &retry{
		worker: worker, trace: string(a.TraceID), attempt: attempt, quiet: !stream,
		named: a.Name != "" || a.Join != "" || a.Secret != "",
	}
	who := []string{a.Owner, a.principal().Proof, a.Name, a.Join, a.Key, r.URL.Path, digest, ""}
	if !t.named {
		who[len(who)-1] = c.Address(r)
	}
	sum := sha256.Sum256([]byte(strings.Join(who, "\x00")))
	t.print = sum[:]
	return t, nil
}

// queueFind queues the search for the turn that the request asked for before, and makes its answer this connection's.
// id is "" when there is none. Equal requests wait for each other, in a lock that is taken before their thread's.
func (t *retry) queueFind(b *pgx.Batch, id *string) {
	b.Queue(`select pg_advisory_xact_lock(hashtextextended('chat request ' || encode(@print, 'hex'), 0))`,
		postgres.Strict{"print": t.print})
	b.Queue(`
		with same as (
		  select r.id from agent_chat_requests r join agent_executions x on x.id = r.execution_id
		   where r.fingerprint = @print and r.created_at > statement_timestamp() - interval '15 minutes' and case
		     when r.connection = @trace then x.trace_id <> @trace -- by a commit whose answer was lost
		     when @attempt > 0 and r.state = 'delivered' then r.attempt <= @attempt and @named::boolean
		       and r.changed_at > clock_timestamp() - make_interval(secs => @delivered)
		     when @attempt > 0 and @named::boolean then r.attempt <= @attempt
		     when @attempt > 0 then r.attempt < @attempt and (r.state = 'left' or r.worker <> @worker::uuid)
		     else (@named::boolean or @quiet::boolean) and x.completed_at is null and
		       (r.state = 'left' or r.state = 'open' and not exists
		         (select from agent_workers w where w.id = r.worker and w.expires_at > clock_timestamp())) end
		   order by array_position(array['left', 'open'], r.state), r.created_at desc limit 1),
		taken as (
		  update agent_chat_requests r
		     set connection = @trace, worker = @worker, attempt = greatest(r.attempt, @attempt), state = 'open',
		         changed_at = clock_timestamp()
		    from same s where r.id = s.id returning r.execution_id)
		select coalesce((select k.execution_id::text from taken k), '')`, postgres.Strict{
		"print": t.print, "attempt": t.attempt, "named": t.named, "quiet": t.quiet, "worker": t.worker,
		"trace": t.trace, "delivered": deliveredFor.Seconds(),
	}).QueryRow(func(row pgx.Row) error { return row.Scan(id) })
}

// queueNote queues the note of the request with the turn that it began. It drops a few that are old.
func (t *retry) queueNote(b *pgx.Batch, execution string) {
	b.Queue(`
		with old as (
		  select r.id from agent_chat_requests r where r.expires_at < statement_timestamp() order by r.expires_at limit 20
		     for update skip locked),
		gone as (delete from agent_chat_requests r using old o where r.id = o.id)
		insert into agent_chat_requests (fingerprint, execution_id, connection, worker, attempt)
		values (@print, @execution::uuid, @trace, @worker::uuid, @attempt)`, postgres.Strict{
		"print": t.print, "execution": execution, "trace": t.trace, "worker": t.worker, "attempt": t.attempt,
	})
}

// settle notes whether the client got its answer. A retry that took the answer over meanwhile is not touched.
func (c *Chat) settle(ctx context.Context, t *retry, delivered bool) {
	if t == nil {
		return
	}
	state := "left"
	if delivered {
		state = "delivered"
	}
	ctx, stop := context.WithTimeout(context.WithoutCancel(ctx), settlePatience)
	defer stop()
	_, err := c.Front.Exec(ctx, `
		update agent_chat_requests set state = @state, changed_at = clock_timestamp()
		 where fingerprint = @print and connection = @trace`,
		postgres.Strict{"state": state, "print": t.print, "trace": t.trace})
	if err != nil {
		c.Logger.WarnContext(ctx, "end of a connection not noted", "error", err)
	}
}

// joined attaches a retry to the turn of the first request.
func (c *Chat) joined(x executions.Execution) (startedTurn, error) {
	in, err := inputOf(x)
	if err != nil {
		return startedTurn{}, err
	}
	f, leave := c.feeds.join(x.ID)
	if x.Status.Ended() {
		f.finish(x)
	}
	return startedTurn{exec: x, name: in.name(), feed: f, leave: leave}, nil
}

// sent is a connection that remembers whether all was written to it.
type sent struct {
	http.ResponseWriter
	err error
}

// Write passes on, and keeps the first error.
func (s *sent) Write(p []byte) (int, error) {
	n, err := s.ResponseWriter.Write(p)
	if s.err == nil {
		s.err = err
	}
	return n, err
}

// Unwrap lets http.ResponseController flush.
func (s *sent) Unwrap() http.ResponseWriter { return s.ResponseWriter }

// answering shows an answer and notes whether the client got it.
func (c *Chat) answering(w http.ResponseWriter, r *http.Request, t *retry, show func(http.ResponseWriter) error) error {
	out := &sent{ResponseWriter: w}
	err := show(out)
	draining := errors.Is(c.Engine.Live(), executions.ErrDraining)
	c.settle(r.Context(), t, out.err == nil && r.Context().Err() == nil && !draining)
	return err
}
