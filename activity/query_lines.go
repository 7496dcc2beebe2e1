package activity

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Window bounds the rows that [Lines] reads for one page.
const Window = 10_000

// ErrNoRow reports an id without a row.
var ErrNoRow = errors.New("no such activity")

// Line is a row of a listing: without input and output, texts cut at 300 characters. Times are UTC.
type Line struct {
	ID           string
	TraceID      string
	ExecutionID  *string
	Kind         Kind
	Agent        string
	Surface      string
	SkillName    string
	Purpose      string
	Step         string
	Status       Status
	ErrorMessage string
	ErrorClass   string
	Model        string
	Tokens       int64 // zero except for model calls
	CostUSD      float64
	DurationMS   *int64 // nil while it runs
	ThreadID     string
	Lane         string
	CreatedAt    time.Time
	FinishedAt   *time.Time
}

// Listing is a page of lines.
type Listing struct {
	Lines []Line
	Next  string // cursor of the next page; empty after the last
	// Partial says that the page is short because Window rows were read: Next continues after them.
	Partial bool
}

// indexed has the conditions that an index serves, narrowed those that are checked row by row.
const (
	indexed = `
		       (@trace_ids::text[] is null or a.trace_id = any (@trace_ids))
		   and (@skill::text = '' or a.skill_name = @skill)
		   and (@open::text[] is null or a.id = any (@open::text[]::uuid[]))
		   and (@since::timestamptz is null or (a.id >= lanekeeper.agent_uuid7_floor(@since) and a.created_at >= @since))
		   and (@until::timestamptz is null
		        or (a.id < lanekeeper.agent_uuid7_floor(@until + interval '1 ms') and a.created_at < @until))
		   and (@before::text is null or a.id < @before::text::uuid)`
	narrowed = `
		       (@surface::text = '' or a.surface = @surface)
		   and (@status::text = '' or a.status = @status)
		   and (@lane::text = '' or a.lane = @lane)
		   and (@agent::text = '' or a.agent = @agent)
		   and (@skill_like::text = '' or a.skill_name ilike @skill_like)
		   and (@lane_like::text = '' or a.lane ilike @lane_like)
		   and (@agent_like::text = '' or a.agent ilike @agent_like)
		   and (@kinds::text[] is null or a.kind = any (@kinds))
		   and (not @no_evals or a.surface <> 'eval')`
)

// Lines lists activities, newest first, for a screen. Its rows are small, and a page reads at most Window rows, so
// its cost depends neither on the size of the log nor on the filter. Unlike [Recent] it has no bound of 30 days:
// after an empty page continue with Next. Errors are those of Recent.
func Lines(ctx context.Context, db postgres.DB, f Filter) (Listing, error) {
	args, err := f.arguments(ctx, db)
	if err != nil {
		return Listing{}, fmt.Errorf("list activities: %w", err)
	}
	args["window"] = Window
	args["skill_like"], args["lane_like"], args["agent_like"] = f.SkillLike, f.LaneLike, f.AgentLike
	lines, err := postgres.Rows[Line](ctx, db, "list activities", `
		select a.id::text, a.trace_id, a.execution_id::text, a.kind, left(a.agent, 300) as agent,
		       left(a.surface, 300) as surface, left(a.skill_name, 300) as skill_name, left(a.purpose, 300) as purpose,
		       left(a.step, 300) as step, a.status, coalesce(left(a.error_message, 300), '') as error_message,
		       left(a.error_class, 300) as error_class, left(a.model, 300) as model,
		       lanekeeper.agent_tokens(a.token_usage, 'total_tokens') as tokens, a.cost_usd::float8 as cost_usd,
		       a.duration_ms, coalesce(left(a.thread_id, 300), '') as thread_id, left(a.lane, 300) as lane, a.created_at,
		       a.finished_at
		  from (select * from agent_activity a where`+indexed+`
		         order by a.id desc limit @window::int) a
		 where`+narrowed+`
		 order by a.id desc limit @limit::int + 1`,
		customPlan, args)
	if err != nil {
		return Listing{}, err
	}
	for i := range lines {
		lines[i].CreatedAt, lines[i].FinishedAt = lines[i].CreatedAt.UTC(), utc(lines[i].FinishedAt)
	}
	if size := pageSize(f.Limit); len(lines) > size {
		lines = lines[:size]
		return Listing{Lines: lines, Next: ToCursor(lines[size-1].ID)}, nil
	}
	return f.shortPage(ctx, db, lines, args)
}

// shortPage returns a page with fewer lines than requested. It has a cursor if the window was exhausted.
func (f Filter) shortPage(ctx context.Context, db postgres.DB, lines []Line, args postgres.Strict) (Listing, error) {
	if f.Surface == "" && f.Status == "" && f.Lane == "" && f.Agent == "" && len(f.Kinds) == 0 && !f.NoEvals &&
		f.SkillLike+f.LaneLike+f.AgentLike == "" {
		return Listing{Lines: lines}, nil // the page has every scanned row
	}
	last, err := postgres.Values[string](ctx, db, "list activities", `
		select a.id::text
		  from agent_activity a where`+indexed+`
		 order by a.id desc offset @window::int - 1 limit 1`,
		customPlan, postgres.Strict{
			"trace_ids": args["trace_ids"], "skill": args["skill"], "open": args["open"], "since": args["since"],
			"until": args["until"], "before": args["before"], "window": args["window"],
		})
	if err != nil {
		return Listing{}, err
	}
	if len(last) == 0 {
		return Listing{Lines: lines}, nil
	}
	// New rows may have moved the end of the window up, but not past a listed line.
	end := last[0]
	if n := len(lines); n > 0 {
		end = min(end, lines[n-1].ID)
	}
	return Listing{Lines: lines, Next: ToCursor(end), Partial: true}, nil
}

// Details has the fields that a line leaves out, redacted as stored, each value cut at 4,000 characters.
type Details struct {
	ID           string
	Kind         Kind
	SkillName    string
	Input        string // JSON
	InputSize    int64  // bytes
	Output       string // JSON; empty for none
	OutputSize   int64
	ErrorMessage string
	ErrorSize    int64
	ParentID     *string
	Claim        *int64
	Step         string
	Key          string // idempotency key
	PromptTokens int64
	AnswerTokens int64
}

// ReadDetails reads the fields that the line of an id leaves out; [ErrNoRow] for an unknown id.
func ReadDetails(ctx context.Context, db postgres.DB, id string) (Details, error) {
	d, err := postgres.RowOr[Details](ctx, db, ErrNoRow, fmt.Sprintf("read activity %.60q", id), `
		select a.id::text, a.kind, a.skill_name, left(a.input::text, 4000) as input,
		       octet_length(a.input::text) as input_size, coalesce(left(a.output::text, 4000), '') as output,
		       coalesce(octet_length(a.output::text), 0) as output_size,
		       coalesce(left(a.error_message, 4000), '') as error_message,
		       coalesce(octet_length(a.error_message), 0) as error_size, a.parent_id::text, a.claim,
		       left(a.step, 4000) as step, left(a.idempotency_key, 300) as key,
		       lanekeeper.agent_tokens(a.token_usage, 'prompt_tokens') as prompt_tokens,
		       lanekeeper.agent_tokens(a.token_usage, 'completion_tokens') as answer_tokens
		  from agent_activity a where a.id = lanekeeper.agent_uuid(@id)`, postgres.Strict{"id": id})
	if err == nil && HidesTexts(ctx) && HasTexts(d.Kind, d.SkillName) {
		d.Input, d.Output = string(HiddenJSON([]byte(d.Input))), string(HiddenJSON([]byte(d.Output)))
		d.InputSize, d.OutputSize = int64(len(d.Input)), int64(len(d.Output))
	}
	return d, err
}
