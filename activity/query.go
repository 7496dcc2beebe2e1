package activity

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

// Every query uses an index: a trace by (trace_id, created_at), a skill by (skill_name, id), everything else by the
// time-ordered id, which also excludes partitions. A filter without an index reads its range of time.

// customPlan makes the server plan each query for its own arguments. So one SQL text serves all filters: an unset
// filter costs nothing, and a set filter chooses its index.
const customPlan = pgx.QueryExecModeCacheDescribe

// Row is one row of agent_activity: a past or running action. Times are UTC.
type Row struct {
	ID             string          `json:"id"`
	TraceID        string          `json:"trace_id"`
	ConversationID string          `json:"conversation_id"` // the trace id under its older name
	ExecutionID    *string         `json:"execution_id"`
	ParentID       *string         `json:"parent_id"`
	CauseID        *string         `json:"cause_id"` // the model call that requested it
	Claim          *int64          `json:"claim"`
	Step           string          `json:"step"`
	Kind           Kind            `json:"kind"`
	Agent          string          `json:"agent"`
	Surface        string          `json:"surface"`
	SkillName      string          `json:"skill_name"`
	SkillID        *string         `json:"skill_id"`
	Purpose        string          `json:"purpose"`
	Status         Status          `json:"status"`
	Input          json.RawMessage `json:"input"`
	Output         json.RawMessage `json:"output"`
	ErrorMessage   *string         `json:"error_message"`
	ErrorClass     string          `json:"error_class"`
	Model          string          `json:"model"`
	TokenUsage     Usage           `json:"token_usage"` // zero except for model calls
	CostUSD        float64         `json:"cost_usd"`
	LedTo          Counts          `json:"led_to"`      // of a model call: calls of each skill in its answer
	DurationMS     *int64          `json:"duration_ms"` // nil while it runs
	IdempotencyKey string          `json:"idempotency_key"`
	ThreadID       *string         `json:"thread_id"`
	Lane           string          `json:"lane"`
	CreatedAt      time.Time       `json:"created_at"`
	FinishedAt     *time.Time      `json:"finished_at"`
}

// rowsOfTraces lists the first rows of traces, at most maxActivities + 1, in the order in which they began.
func rowsOfTraces(ctx context.Context, db postgres.DB, traceIDs []string) ([]Row, error) {
	rows, err := db.Query(ctx, `
		select a.id, a.trace_id, a.conversation_id, a.execution_id, a.parent_id, a.cause_id, a.claim, a.step, a.kind,
		       a.agent, a.surface, a.skill_name, a.skill_id, a.purpose, a.status, a.input, a.output, a.error_message,
		       a.error_class, a.model, a.token_usage, a.cost_usd::float8 as cost_usd, a.led_to, a.duration_ms,
		       a.idempotency_key, a.thread_id, a.lane, a.created_at, a.finished_at
		  from agent_activity a
		 where a.trace_id = any (@trace_ids)
		 order by a.created_at, a.id limit @limit`,
		customPlan, postgres.Strict{"trace_ids": traceIDs, "limit": maxActivities + 1})
	return collect(ctx, rows, err, "list activities of trace "+strings.Join(traceIDs, " or "))
}

// collect reads rows, puts their times into UTC, and hides texts from callers without the scope.
func collect(ctx context.Context, rows pgx.Rows, err error, verb string) ([]Row, error) {
	list, err := postgres.Collect(rows, err, verb, pgx.RowToStructByName[Row])
	if err != nil {
		return nil, err
	}
	for i := range list {
		list[i].CreatedAt = list[i].CreatedAt.UTC()
		list[i].FinishedAt = utc(list[i].FinishedAt)
		list[i].hideTexts(ctx)
	}
	return list, nil
}

// utc converts to UTC; nil stays nil.
func utc(t *time.Time) *time.Time {
	if t == nil {
		return nil
	}
	at := t.UTC()
	return &at
}

// timeArg is a time bound for SQL: null for none, and the epoch for an earlier one, because ids have no time before it.
func timeArg(t time.Time) any {
	switch {
	case t.IsZero():
		return nil
	case t.Before(time.Unix(0, 0)):
		return time.Unix(0, 0)
	}
	return t
}

// lookBack bounds a listing whose filters have no index: otherwise a filter without a match would read the whole log.
const lookBack = 30 * 24 * time.Hour

// openLimit bounds the running calls that a listing reads.
const openLimit = 10_000

// Filter selects rows; empty fields select all. [Recent] looks back 30 days if a filter has no index: one that is set
// without Since, TraceID, TraceIDs, Skill, and a Status of running.
type Filter struct {
	Surface string
	Status  Status
	Skill   string
	Lane    string
	TraceID string // in any form that trace.ParseAny reads
	Agent   string
	// TraceIDs are whole ids, any of which matches; nil for all. TraceID is then not used.
	TraceIDs []string
	// SkillLike, LaneLike and AgentLike are case-insensitive LIKE patterns. Only [Lines] reads them.
	SkillLike, LaneLike, AgentLike string

	Kinds []Kind
	// NoEvals leaves out trials of evals.
	NoEvals bool

	Since  time.Time // inclusive, to the millisecond
	Until  time.Time // exclusive
	Limit  int       // 50 when 0, at most MaxLimit
	Cursor string    // from the previous page
}

// Recent lists activities, newest first, and returns the cursor of the next page; empty after the last one. New rows
// do not shift a page. The error wraps ErrCursor or trace.ErrInvalid for invalid input.
func Recent(ctx context.Context, db postgres.DB, f Filter) (page []Row, next string, err error) {
	if f.scans() && f.Since.IsZero() {
		f.Since = time.Now().Add(-lookBack)
	}
	args, err := f.arguments(ctx, db)
	if err != nil {
		return nil, "", fmt.Errorf("list activities: %w", err)
	}
	rows, err := db.Query(ctx, `
		select a.id, a.trace_id, a.conversation_id, a.execution_id, a.parent_id, a.cause_id, a.claim, a.step, a.kind,
		       a.agent, a.surface, a.skill_name, a.skill_id, a.purpose, a.status, a.input, a.output, a.error_message,
		       a.error_class, a.model, a.token_usage, a.cost_usd::float8 as cost_usd, a.led_to, a.duration_ms,
		       a.idempotency_key, a.thread_id, a.lane, a.created_at, a.finished_at
		  from agent_activity a
		 where (@trace_ids::text[] is null or a.trace_id = any (@trace_ids))
		   and (@skill::text = '' or a.skill_name = @skill)
		   and (@open::text[] is null or a.id = any (@open::text[]::uuid[]))
		   and (@since::timestamptz is null or (a.id >= lanekeeper.agent_uuid7_floor(@since) and a.created_at >= @since))
		   and (@until::timestamptz is null
		        or (a.id < lanekeeper.agent_uuid7_floor(@until + interval '1 ms') and a.created_at < @until))
		   and (@before::text is null or a.id < @before::text::uuid)
		   and (@surface::text = '' or a.surface = @surface)
		   and (@status::text = '' or a.status = @status)
		   and (@lane::text = '' or a.lane = @lane)
		   and (@agent::text = '' or a.agent = @agent)
		   and (@kinds::text[] is null or a.kind = any (@kinds))
		   and (not @no_evals or a.surface <> 'eval')
		 order by a.id desc
		 limit @limit::int + 1`,
		customPlan, args)
	page, err = collect(ctx, rows, err, "list activities")
	if err != nil {
		return nil, "", err
	}
	if size := pageSize(f.Limit); len(page) > size {
		page = page[:size]
		next = ToCursor(page[size-1].ID)
	}
	return page, next, nil
}

// arguments returns the arguments of the query.
func (f Filter) arguments(ctx context.Context, db postgres.DB) (postgres.Strict, error) {
	last, err := FromCursor(f.Cursor)
	if err != nil {
		return nil, err
	}
	traces := f.TraceIDs
	if traces == nil {
		if traces, err = traceIDs(f.TraceID); err != nil {
			return nil, err
		}
	}
	openIDs, err := f.listOpen(ctx, db)
	if err != nil {
		return nil, err
	}
	return postgres.Strict{
		"trace_ids": traces, "skill": f.Skill, "open": openIDs, "since": timeArg(f.Since), "until": timeArg(f.Until),
		"before": last, "surface": f.Surface, "status": string(f.Status), "lane": f.Lane, "agent": f.Agent,
		"kinds": plainStrings(f.Kinds), "no_evals": f.NoEvals, "limit": pageSize(f.Limit),
	}, nil
}

// scans reports whether the filter has conditions without an index.
func (f Filter) scans() bool {
	indexed := f.TraceID != "" || f.TraceIDs != nil || f.Skill != "" || f.Status == Running
	narrowed := f.Surface != "" || f.Status != "" || f.Lane != "" || f.Agent != "" || len(f.Kinds) > 0 || f.NoEvals
	return narrowed && !indexed
}

// listOpen lists the newest 10,000 running actions for a filter on them; nil without such a filter. An index on the
// status would slow down the end of every action.
func (f Filter) listOpen(ctx context.Context, db postgres.DB) ([]string, error) {
	if f.Status != Running {
		return nil, nil
	}
	return postgres.Values[string](ctx, db, "list running activities", `
		select o.activity_id::text from agent_activity_open o order by o.activity_id desc limit @limit`,
		postgres.Strict{"limit": openLimit})
}

// traceIDs returns the ids that a trace id in any form may stand for; nil for none.
func traceIDs(anyForm string) ([]string, error) {
	if anyForm == "" {
		return nil, nil
	}
	ids, err := trace.ParseAny(anyForm)
	if err != nil {
		return nil, err
	}
	return plainStrings(ids), nil
}

// plainStrings converts named strings to plain ones; nil for none.
func plainStrings[S ~string](named []S) []string {
	if len(named) == 0 {
		return nil
	}
	plain := make([]string, 0, len(named))
	for _, s := range named {
		plain = append(plain, string(s))
	}
	return plain
}

var (
	// ErrNotFound reports a trace without records.
	ErrNotFound = errors.New("no such trace")
	// ErrCursor reports an invalid cursor.
	ErrCursor = errors.New("not a cursor: take it from the page before")
)
