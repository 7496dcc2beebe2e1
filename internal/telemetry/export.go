package telemetry

import (
	"cmp"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/oklog/ulid/v2"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

const (
	// Backlog is the maximum age of spans that a later pass still sends.
	Backlog = time.Hour
	// passInterval is the pause between export passes.
	passInterval = time.Second
	// senderLease is the lease of the right to send, beside the time that one request may take. A sender that does not
	// renew it loses the right after this time. No pass takes longer.
	senderLease = 10 * time.Second
	// longestTransaction bounds the wait of a pass for a running transaction.
	longestTransaction = 30 * time.Second
	// longestPause bounds the pause between two tries while the receiver rejects everything.
	longestPause = 30 * time.Second
	// flushLimit bounds the last pass of a process.
	flushLimit = 5 * time.Second
)

// Bounds of the activities and of the executions of one request. Rows with content are large.
const (
	maxRows            = 1000
	maxRowsWithContent = 100
)

// Exporter sends spans while its process has the right to send.
type Exporter struct {
	pool     *pgxpool.Pool
	log      *slog.Logger
	metrics  *Metrics
	sender   *sender
	senderID string
	content  bool
	rowLimit int
	lease    time.Duration

	mark       *mark     // the end of the next pass; nil before it is chosen
	failures   int       // consecutive failed passes
	advancedAt time.Time // time of the last advance of the position
	final      bool      // flush runs
}

// mark is the end of a pass, with the transactions that were writing then. They may still commit rows with earlier ids.
type mark struct {
	end     string    // id of the last row of the pass
	writers []string  // virtual ids of these transactions that have not ended
	at      time.Time // by the clock of this process
}

// NewExporter returns the exporter of a process; nil if the settings name no receiver. The methods of a nil exporter do
// nothing.
func NewExporter(pool *pgxpool.Pool, s Settings, version string, m *Metrics, log *slog.Logger) *Exporter {
	if s.Endpoint == "" {
		return nil
	}
	e := &Exporter{
		pool: pool, log: log, metrics: m, sender: newSender(s, version), senderID: ulid.Make().String(), content: s.Content,
		rowLimit: maxRows, lease: senderLease + s.Timeout,
	}
	if s.Content {
		e.rowLimit = maxRowsWithContent
	}
	return e
}

// Run sends ended spans until ctx ends. Then it tries for a few seconds to send the spans that ended by that time. It
// returns nil.
func (e *Exporter) Run(ctx context.Context) error {
	if e == nil {
		return nil
	}
	for ctx.Err() == nil {
		more := e.runPass(ctx)
		if more {
			continue
		}
		timer := time.NewTimer(e.pause())
		select {
		case <-ctx.Done():
		case <-timer.C:
		}
		timer.Stop()
	}
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), flushLimit)
	defer cancel()
	e.flush(last)
	e.releaseLease(last)
	_ = e.sender.receiver.Shutdown(last)
	return nil
}

// pause is the time to the next pass.
func (e *Exporter) pause() time.Duration {
	if e.failures == 0 {
		return passInterval
	}
	return min(passInterval<<min(e.failures, 6), longestPause)
}

// runPass makes one pass. It logs a failure once and does not return it, because no caller depends on the pass.
func (e *Exporter) runPass(ctx context.Context) (more bool) {
	passCtx, end := withGrace(ctx)
	defer end()
	more, err := e.pass(passCtx)
	switch {
	case err == nil:
		if e.failures > 0 {
			e.log.InfoContext(ctx, "traces are sent again", "failures", e.failures)
		}
		e.failures = 0
	case ctx.Err() != nil:
		return false
	default:
		e.failures++
		if e.failures == 1 {
			e.log.WarnContext(ctx, "traces not sent, kept for an hour and sent again", "error", err)
		}
	}
	return more && err == nil
}

// withGrace extends ctx for a running pass, so the pass can still record the sent spans and no process sends them
// again.
func withGrace(ctx context.Context) (context.Context, func()) {
	passCtx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() {
		timer := time.AfterFunc(flushLimit, cancel)
		context.AfterFunc(passCtx, func() { timer.Stop() })
	})
	return passCtx, func() { stop(); cancel() }
}

// flush sends all spans that have ended by now, within ctx, if no other process has the right to send.
func (e *Exporter) flush(ctx context.Context) {
	e.mark, e.final = nil, true
	end := ""
	for ctx.Err() == nil {
		pos, err := e.acquireLease(ctx)
		if err != nil || pos == nil {
			return
		}
		end = cmp.Or(end, pos.Next)
		_, err = e.pass(ctx)
		if err != nil {
			e.log.WarnContext(ctx, "last traces not sent; the next sender sends them", "error", err)
			return
		}
		if pos, err = e.acquireLease(ctx); err != nil || pos == nil || pos.SentUpto >= end {
			return
		}
		// The present millisecond may still get ids, or another transaction is writing.
		timer := time.NewTimer(20 * time.Millisecond)
		select {
		case <-ctx.Done():
		case <-timer.C:
		}
		timer.Stop()
	}
}

// releaseLease releases the right to send, so another process can acquire it at once.
func (e *Exporter) releaseLease(ctx context.Context) {
	_, err := e.pool.Exec(ctx, `update agent_span_export set sender = '', sender_until = '-infinity' where sender = @me`,
		postgres.Strict{"me": e.senderID})
	if err != nil {
		e.log.DebugContext(ctx, "the right to send traces expires", "error", err)
	}
}

// position is the position of the export, as position.sql returns it.
type position struct {
	SentUpto string   // id up to which rows were sent
	Pending  []string // activities up to there that had not ended
	Now      string   // an id before all ids of the present millisecond
	Next     string   // an id after all ids of the present millisecond
}

//go:embed position.sql
var positionSQL string

// acquireLease acquires or renews the right to send; it returns nil if another process has it.
func (e *Exporter) acquireLease(ctx context.Context) (*position, error) {
	rows, err := e.pool.Query(ctx, positionSQL,
		postgres.Strict{"me": e.senderID, "seconds": e.lease.Seconds(), "backlog": Backlog.Seconds()})
	pos, err := postgres.CollectOne(rows, err, pgx.ErrNoRows, "take the right to send traces",
		pgx.RowToAddrOfStructByName[position])
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil
	}
	return pos, err
}

// pass sends the spans that ended since the last pass. more reports that further spans are ready.
func (e *Exporter) pass(ctx context.Context) (more bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, e.lease)
	defer cancel()
	pos, err := e.acquireLease(ctx)
	if err != nil || pos == nil {
		e.mark = nil
		return false, err
	}
	ended, err := e.writersEnded(ctx, pos)
	if err != nil || !ended {
		return false, err
	}
	batch, err := e.collectBatch(ctx, pos)
	if err != nil {
		return false, err
	}
	rows, err := read(ctx, e.pool, batch.ended, batch.runs, e.content)
	if err != nil {
		return false, err
	}
	spans := rows.spans(e.content)
	sent, err := e.sender.send(ctx, spans)
	switch {
	case err != nil && isPermanent(err):
		e.log.ErrorContext(ctx, "spans refused by the receiver, and given up", "spans", sent, "error", err)
		e.metrics.exported("refused", sent)
	case err != nil:
		e.metrics.exportFailed()
		return false, fmt.Errorf("send %d spans: %w", sent, err)
	default:
		e.metrics.exported("sent", sent)
		e.metrics.exported("sampled_out", len(spans)-sent)
	}
	idle := len(batch.ended)+len(batch.runs) == 0 && slices.Equal(batch.pending, pos.Pending)
	if !idle || e.final || time.Since(e.advancedAt) > e.lease/2 {
		if err := e.advance(ctx, pos, batch); err != nil {
			return false, err
		}
		e.advancedAt = time.Now()
	}
	if !batch.more {
		e.mark = nil
	}
	return batch.more, nil
}

// isPermanent reports that the receiver rejects the batch itself, so a retry is useless. The exporter of OpenTelemetry
// has no error type, so isPermanent searches the text for the status.
func isPermanent(err error) bool {
	text := err.Error()
	return strings.Contains(text, ": 400 ") || strings.Contains(text, ": 413 ") || strings.Contains(text, ": 422 ") ||
		strings.Contains(text, "request body too large")
}

// errLeaseLost reports that another process has acquired the right to send. That process may send the spans of this
// process a second time.
var errLeaseLost = errors.New("another process sends traces by now")

// advance moves the position past the sent spans.
func (e *Exporter) advance(ctx context.Context, pos *position, b batch) error {
	tag, err := e.pool.Exec(ctx, `
		update agent_span_export set sent_upto = greatest(sent_upto, @upto::uuid), pending = @pending::uuid[],
		                             updated_at = clock_timestamp()
		 where sender = @me and sent_upto = @since::uuid`,
		postgres.Strict{"me": e.senderID, "since": pos.SentUpto, "upto": b.end, "pending": append([]string{}, b.pending...)})
	if err != nil {
		return fmt.Errorf("note how far traces were sent: %w", err)
	}
	if tag.RowsAffected() == 0 {
		return errLeaseLost
	}
	return nil
}
