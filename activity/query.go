package activity

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

// Every query is bounded by an index, so reads stay fast on a table of any size: a trace by (trace_id, created_at),
// a skill by (skill_name, id), everything else by the time-ordered id, which also excludes partitions.

// perQuery plans each query for its own arguments. So one SQL text serves all filters: an unset filter costs nothing,
// and a set filter chooses its index.
const perQuery = pgx.QueryExecModeCacheDescribe

const (
	defaultLimit = 50
	// MaxLimit bounds the rows of one page.
	MaxLimit = 500
)

var (
	// ErrNotFound reports a trace without records.
	ErrNotFound = errors.New("no such trace")
	// ErrCursor reports an invalid cursor.
	ErrCursor = errors.New("not a cursor: take it from the page before")
)

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
	LedTo          map[string]int  `json:"led_to"`      // of a model call: calls of each skill in its answer
	DurationMS     *int64          `json:"duration_ms"` // nil while it runs
	IdempotencyKey string          `json:"idempotency_key"`
	ThreadID       *string         `json:"thread_id"`
	Lane           string          `json:"lane"`
	CreatedAt      time.Time       `json:"created_at"`
	FinishedAt     *time.Time      `json:"finished_at"`
}

// rowsOfTraces lists the rows of traces in the order in which they began.
func rowsOfTraces(ctx context.Context, db postgres.DB, traceIDs []string) ([]Row, error) {
	rows, err := db.Query(ctx, `
		select a.id, a.trace_id, a.conversation_id, a.execution_id, a.parent_id, a.cause_id, a.claim, a.step, a.kind,
		       a.agent, a.surface, a.skill_name, a.skill_id, a.purpose, a.status, a.input, a.output, a.error_message,
		       a.error_class, a.model, a.token_usage, a.cost_usd::float8 as cost_usd, a.led_to, a.duration_ms,
		       a.idempotency_key, a.thread_id, a.lane, a.created_at, a.finished_at
		  from agent_activity a
		 where a.trace_id = any (@trace_ids)
		 order by a.created_at, a.id`,
		perQuery, postgres.Strict{"trace_ids": traceIDs})
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

func pageSize(limit int) int { return postgres.PageSize(limit, defaultLimit, MaxLimit) }

// ToCursor encodes the id of the last row of a page. Clients treat it as opaque.
func ToCursor(id string) string {
	return base64.RawURLEncoding.EncodeToString([]byte(strings.ReplaceAll(id, "-", "")))
}

// CheckCursor returns an error that wraps ErrCursor if c is not a cursor. The empty cursor is valid.
func CheckCursor(c string) error {
	_, err := FromCursor(c)
	return err
}

// FromCursor decodes a cursor for SQL: null for the first page. The error wraps ErrCursor.
func FromCursor(c string) (any, error) {
	if c == "" {
		return nil, nil
	}
	hex, err := base64.RawURLEncoding.DecodeString(c)
	if err != nil || len(hex) != 32 || strings.Trim(string(hex), "0123456789abcdef") != "" {
		return nil, fmt.Errorf("read cursor %.60q: %w", c, ErrCursor)
	}
	return string(hex), nil
}

// lookBack bounds a listing whose filters have no index: otherwise a filter without a match would read the whole log.
const lookBack = 30 * 24 * time.Hour

// openLimit bounds the running calls that a listing reads.
const openLimit = 10_000

// Filter selects rows; empty fields select all. Without Since, TraceID and Skill, the other filters look back 30
// days.
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
		   and (@until::timestamptz is null or (a.id < lanekeeper.agent_uuid7_floor(@until + interval '1 ms')
		     and a.created_at < @until))
		   and (@before::text is null or a.id < @before::text::uuid)
		   and (@surface::text = '' or a.surface = @surface)
		   and (@status::text = '' or a.status = @status)
		   and (@lane::text = '' or a.lane = @lane)
		   and (@agent::text = '' or a.agent = @agent)
		   and (@kinds::text[] is null or a.kind = any (@kinds))
		   and (not @no_evals or a.surface <> 'eval')
		 order by a.id desc
		 limit @limit::int + 1`,
		perQuery, args)
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
	open, err := f.open(ctx, db)
	if err != nil {
		return nil, err
	}
	return postgres.Strict{
		"trace_ids": traces, "skill": f.Skill, "open": open, "since": timeArg(f.Since), "until": timeArg(f.Until),
		"before": last, "surface": f.Surface, "status": string(f.Status), "lane": f.Lane, "agent": f.Agent,
		"kinds": words(f.Kinds), "no_evals": f.NoEvals, "limit": pageSize(f.Limit),
	}, nil
}

// scans reports whether the filter has conditions without an index.
func (f Filter) scans() bool {
	indexed := f.TraceID != "" || f.Skill != "" || f.Status == Running
	narrowed := f.Surface != "" || f.Status != "" || f.Lane != "" || f.Agent != "" || len(f.Kinds) > 0 || f.NoEvals
	return narrowed && !indexed
}

// open lists running actions for a filter on them. An index on the status would slow down the end of every action.
func (f Filter) open(ctx context.Context, db postgres.DB) ([]string, error) {
	if f.Status != Running {
		return nil, nil
	}
	return postgres.Values[string](ctx, db, "list running activities", `
		select o.activity_id::text from agent_activity_open o order by o.activity_id desc limit @most`,
		postgres.Strict{"most": openLimit})
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
	return words(ids), nil
}

// words converts named strings to plain ones; nil for none.
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

// AuditEntry is a row of the view agent_audit. Times are UTC; texts are truncated to 300 characters.
type AuditEntry struct {
	ID          string     `json:"id"`
	At          time.Time  `json:"at"`
	FinishedAt  *time.Time `json:"finished_at"`
	Actor       string     `json:"actor"`        // a principal or admin, the agent's name, or the sender of a webhook
	Kind        Kind       `json:"kind"`         // call, model, phase, note
	Act         string     `json:"act"`          // skill, phase or admin action
	Object      string     `json:"object"`       // target: skill pay, lane automation:nightly, memory admin / contact
	Reason      string     `json:"reason"`       // from an admin, or the purpose
	Origin      string     `json:"origin"`       // start of the run: a message, a schedule, an automation, a delivery …
	OnBehalfOf  string     `json:"on_behalf_of"` // an admin, a visitor in a thread, a sender, or the agent itself
	Status      Status     `json:"status"`
	ErrorClass  string     `json:"error_class"`
	Error       string     `json:"error_message"`
	Model       string     `json:"model"`
	Tokens      int64      `json:"tokens"`
	CostUSD     float64    `json:"cost_usd"`
	DurationMS  *int64     `json:"duration_ms"`
	Surface     string     `json:"surface"`
	TraceID     string     `json:"trace_id"`
	ExecutionID *string    `json:"execution_id"`
	ParentID    *string    `json:"parent_id"` // the containing activity
	CauseID     *string    `json:"cause_id"`  // the model call that requested it
	ThreadID    string     `json:"thread_id"`
	Lane        string     `json:"lane"`
	TokenID     string     `json:"token_id"` // of the API token of a principal's act
	Via         string     `json:"via"`      // of a principal's act: http, page, cli, slack, …
	Message     string     `json:"message"`  // with the button of the act, in the words of the provider
}

// AuditPage is a page of the audit.
type AuditPage struct {
	Rows []AuditEntry
	Next string // cursor of the next page; empty after the last
	// Partial says that the page is short because Window rows were read. Next continues after them.
	Partial bool
}

// Audit lists every kind of row, newest first. Filters, cursors and errors are those of [Lines].
func Audit(ctx context.Context, db postgres.DB, f Filter) (AuditPage, error) {
	page, err := Lines(ctx, db, f)
	if err != nil {
		return AuditPage{}, err
	}
	ids := make([]string, len(page.Lines))
	for i, l := range page.Lines {
		ids[i] = l.ID
	}
	list, err := postgres.Rows[AuditEntry](ctx, db, "read audit", `
		select a.id::text, a.at, a.finished_at, a.actor, a.kind, left(a.act, 300) as act, left(a.object, 300) as object,
		       left(a.reason, 300) as reason, left(a.origin, 300) as origin, left(a.on_behalf_of, 300) as on_behalf_of,
		       a.status, left(a.error_class, 300) as error_class, left(a.error_message, 300) as error,
		       left(a.model, 300) as model, a.tokens, a.cost_usd::float8 as cost_usd, a.duration_ms,
		       left(a.surface, 300) as surface, a.trace_id, a.execution_id::text, a.parent_id::text, a.cause_id::text,
		       left(a.thread_id, 300) as thread_id, left(a.lane, 300) as lane, left(a.token_id, 300) as token_id,
		       left(a.via, 300) as via, left(a.message, 300) as message
		  from agent_audit a where a.id = any (@ids::uuid[]) order by a.id desc`, perQuery, postgres.Strict{"ids": ids})
	if err != nil {
		return AuditPage{}, err
	}
	for i := range list {
		list[i].At, list[i].FinishedAt = list[i].At.UTC(), utc(list[i].FinishedAt)
	}
	return AuditPage{Rows: list, Next: page.Next, Partial: page.Partial}, nil
}
