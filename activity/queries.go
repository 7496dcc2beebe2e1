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
)

// The read side stays fast on a table of any size because every query is bounded by an index: a trace
// by (trace_id, created_at), a skill by (skill_name, id), and everything else by the time-ordered id,
// where a range of time becomes a range of ids and leaves out the partitions beyond it. One literal
// serves all combinations of filters. It is planned with the values at hand (perQuery), so a filter that
// is not set costs nothing and one that is set chooses its index; a plan kept for all values could not.

// perQuery has each query planned for its own arguments.
const perQuery = pgx.QueryExecModeCacheDescribe

const (
	defaultLimit = 50
	// MaxLimit is the most rows that one page of a listing has.
	MaxLimit = 500
)

var (
	// ErrNotFound reports a trace of which nothing is recorded.
	ErrNotFound = errors.New("no such trace")
	// ErrCursor reports a cursor that no listing gave out.
	ErrCursor = errors.New("not a cursor: take it from the page before")
)

// Row is one row of agent_activity: an action the agent took, or is taking. Times are UTC.
type Row struct {
	ID             string          `json:"id"`
	TraceID        string          `json:"trace_id"`
	ConversationID string          `json:"conversation_id"` // the trace id under its older name
	ExecutionID    *string         `json:"execution_id"`
	ParentID       *string         `json:"parent_id"`
	CauseID        *string         `json:"cause_id"` // the model call whose answer asked for it
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
	TokenUsage     Usage           `json:"token_usage"` // zero on everything but model calls
	CostUSD        float64         `json:"cost_usd"`
	LedTo          map[string]int  `json:"led_to"`      // of a model call: how often it calls each skill, which it is charged to
	DurationMS     *int64          `json:"duration_ms"` // nil while it runs
	IdempotencyKey string          `json:"idempotency_key"`
	ThreadID       *string         `json:"thread_id"`
	Lane           string          `json:"lane"`
	CreatedAt      time.Time       `json:"created_at"`
	FinishedAt     *time.Time      `json:"finished_at"`
}

// of lists what happened under traces, in the order in which it began.
func of(ctx context.Context, db postgres.DB, traceIDs []string) ([]Row, error) {
	rows, err := db.Query(ctx, `
		select a.id, a.trace_id, a.conversation_id, a.execution_id, a.parent_id, a.cause_id, a.claim, a.step, a.kind, a.agent, a.surface,
		       a.skill_name, a.skill_id, a.purpose, a.status, a.input, a.output, a.error_message, a.error_class, a.model,
		       a.token_usage, a.cost_usd::float8 as cost_usd, a.led_to, a.duration_ms, a.idempotency_key, a.thread_id, a.lane,
		       a.created_at, a.finished_at
		  from agent_activity a
		 where a.trace_id = any (@trace_ids)
		 order by a.created_at, a.id`,
		perQuery, postgres.Strict{"trace_ids": traceIDs})
	return collect(rows, err, "list activities of trace "+strings.Join(traceIDs, " or "))
}

// collect reads rows and puts their times into UTC.
func collect(rows pgx.Rows, err error, verb string) ([]Row, error) {
	if err != nil {
		return nil, fmt.Errorf("%s: %w", verb, err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowToStructByName[Row])
	if err != nil {
		return nil, fmt.Errorf("%s: %w", verb, err)
	}
	for i := range list {
		list[i].CreatedAt = list[i].CreatedAt.UTC()
		list[i].FinishedAt = utc(list[i].FinishedAt)
	}
	return list, nil
}

// utc is the same instant in UTC; nil stays nil.
func utc(t *time.Time) *time.Time {
	if t == nil {
		return nil
	}
	at := t.UTC()
	return &at
}

// moment is a bound in time for SQL: null when there is none. Ids begin with the epoch, so no bound
// lies before it.
func moment(t time.Time) any {
	switch {
	case t.IsZero():
		return nil
	case t.Before(time.Unix(0, 0)):
		return time.Unix(0, 0)
	}
	return t
}

// pageSize is the number of rows a page has when the caller asked for limit.
func pageSize(limit int) int {
	if limit <= 0 {
		return defaultLimit
	}
	return min(limit, MaxLimit)
}

// cursor hides the id of a page's last row, so that nobody relies on what it is.
func cursor(id string) string {
	return base64.RawURLEncoding.EncodeToString([]byte(strings.ReplaceAll(id, "-", "")))
}

// CheckCursor reports a cursor that no listing gave out, with an error that wraps ErrCursor; the empty one is that of
// the first page.
func CheckCursor(c string) error {
	_, err := before(c)
	return err
}

// before is the id that a cursor hides, for SQL: null for the first page.
func before(c string) (any, error) {
	if c == "" {
		return nil, nil
	}
	hex, err := base64.RawURLEncoding.DecodeString(c)
	if err != nil || len(hex) != 32 || strings.Trim(string(hex), "0123456789abcdef") != "" {
		return nil, fmt.Errorf("read cursor %.60q: %w", c, ErrCursor)
	}
	return string(hex), nil
}

// ToCursor is the cursor of a page that ends with the row of an id, for listings of rows elsewhere.
func ToCursor(id string) string { return cursor(id) }

// FromCursor is the id that a cursor stands for, as an argument of SQL: null for that of the first page. The error
// wraps ErrCursor.
func FromCursor(c string) (any, error) { return before(c) }
