package activity

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

// lookBack is how far a listing goes when only filters without an index narrow it down: without a bound
// a filter that matches nothing would read the whole log.
const lookBack = 30 * 24 * time.Hour

// openMost is how many calls under way a listing considers.
const openMost = 10_000

// Filter narrows a listing down; what is empty does not. Without Since, and with neither TraceID nor
// Skill, the other filters look back 30 days.
type Filter struct {
	Surface string
	Status  Status
	Skill   string
	Lane    string
	TraceID string // in any form that trace.ParseAny reads
	Agent   string
	Kinds   []Kind
	Since   time.Time // inclusive, to the millisecond
	Until   time.Time // exclusive
	Limit   int       // 50 when 0, at most MaxLimit
	Cursor  string    // from the page before
}

// Recent lists activities, newest first, and returns the cursor of the next page; it is empty after the
// last one. A page does not shift when new rows arrive. The error wraps ErrCursor or trace.ErrInvalid
// where the caller's input is at fault.
func Recent(ctx context.Context, db postgres.DB, f Filter) (page []Row, next string, err error) {
	if f.scans() && f.Since.IsZero() {
		f.Since = time.Now().Add(-lookBack)
	}
	args, err := f.arguments(ctx, db)
	if err != nil {
		return nil, "", fmt.Errorf("list activities: %w", err)
	}
	rows, err := db.Query(ctx, `
		select a.id, a.trace_id, a.conversation_id, a.execution_id, a.parent_id, a.cause_id, a.claim, a.step, a.kind, a.agent, a.surface,
		       a.skill_name, a.skill_id, a.purpose, a.status, a.input, a.output, a.error_message, a.error_class, a.model,
		       a.token_usage, a.cost_usd::float8 as cost_usd, a.led_to, a.duration_ms, a.idempotency_key, a.thread_id, a.lane,
		       a.created_at, a.finished_at
		  from agent_activity a
		 where (@trace_ids::text[] is null or a.trace_id = any (@trace_ids))
		   and (@skill::text = '' or a.skill_name = @skill)
		   and (@open::text[] is null or a.id = any (@open::text[]::uuid[]))
		   and (@since::timestamptz is null or (a.id >= lanekeeper.agent_uuid7_floor(@since) and a.created_at >= @since))
		   and (@until::timestamptz is null or (a.id < lanekeeper.agent_uuid7_floor(@until + interval '1 ms') and a.created_at < @until))
		   and (@before::text is null or a.id < @before::text::uuid)
		   and (@surface::text = '' or a.surface = @surface)
		   and (@status::text = '' or a.status = @status)
		   and (@lane::text = '' or a.lane = @lane)
		   and (@agent::text = '' or a.agent = @agent)
		   and (@kinds::text[] is null or a.kind = any (@kinds))
		 order by a.id desc
		 limit @limit::int + 1`,
		perQuery, args)
	page, err = collect(rows, err, "list activities")
	if err != nil {
		return nil, "", err
	}
	if size := pageSize(f.Limit); len(page) > size {
		page = page[:size]
		next = cursor(page[size-1].ID)
	}
	return page, next, nil
}

// arguments are the filter as SQL sees it.
func (f Filter) arguments(ctx context.Context, db postgres.DB) (postgres.Strict, error) {
	last, err := before(f.Cursor)
	if err != nil {
		return nil, err
	}
	traces, err := traceIDs(f.TraceID)
	if err != nil {
		return nil, err
	}
	open, err := f.open(ctx, db)
	if err != nil {
		return nil, err
	}
	return postgres.Strict{
		"trace_ids": traces, "skill": f.Skill, "open": open, "since": moment(f.Since), "until": moment(f.Until),
		"before": last, "surface": f.Surface, "status": string(f.Status), "lane": f.Lane, "agent": f.Agent,
		"kinds": words(f.Kinds), "limit": pageSize(f.Limit),
	}, nil
}

// scans reports whether the filter has conditions, and none that an index answers.
func (f Filter) scans() bool {
	indexed := f.TraceID != "" || f.Skill != "" || f.Status == Running
	narrowed := f.Surface != "" || f.Status != "" || f.Lane != "" || f.Agent != "" || len(f.Kinds) > 0
	return narrowed && !indexed
}

// open lists the actions under way when the filter asks for those, so that no index on the status is
// needed, which would make each finishing update a costly one.
func (f Filter) open(ctx context.Context, db postgres.DB) ([]string, error) {
	if f.Status != Running {
		return nil, nil
	}
	rows, err := db.Query(ctx, `
		select o.activity_id::text from agent_activity_open o order by o.activity_id desc limit @most`,
		postgres.Strict{"most": openMost})
	if err != nil {
		return nil, fmt.Errorf("list what runs: %w", err)
	}
	ids, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return nil, fmt.Errorf("list what runs: %w", err)
	}
	return ids, nil
}

// traceIDs are the ids that one in any form can mean; nil for none.
func traceIDs(anyForm string) ([]string, error) {
	if anyForm == "" {
		return nil, nil
	}
	ids, err := trace.ParseAny(anyForm)
	if err != nil {
		return nil, err
	}
	return words(ids), nil
}

// words are named strings as plain ones; nil for none.
func words[S ~string](named []S) []string {
	if len(named) == 0 {
		return nil
	}
	plain := make([]string, 0, len(named))
	for _, s := range named {
		plain = append(plain, string(s))
	}
	return plain
}
