package activity

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// The reports read the views agent_spend and agent_spend_by_purpose, and the function behind the views
// agent_slowest_skills and agent_failing_skills for any period. SQL defines every figure.

// Period groups spend in time.
type Period string

// The periods.
const (
	ByDay Period = "day"   // one line per UTC day
	Total Period = "total" // one line for the whole time
)

// ReportFilter selects lines of a report; empty fields select all.
type ReportFilter struct {
	Since, Until          time.Time // of spend: whole days (UTC); of the others, only Since counts
	Skill, Surface, Model string    // Surface and Model: of spend only
	Limit                 int       // 50 when 0, at most MaxLimit
	Cursor                string    // from the previous page
}

// Spending is the cost of model calls on one day, surface and model.
type Spending struct {
	Day              string  `json:"day"`               // UTC, such as 2026-11-21
	Skill            string  `json:"skill"`             // called by the answers; empty for none
	Purpose          string  `json:"purpose,omitempty"` // in place of Skill, by purpose
	Surface          string  `json:"surface"`
	Model            string  `json:"model"`
	Calls            int64   `json:"calls"`
	PromptTokens     int64   `json:"prompt_tokens"`
	CompletionTokens int64   `json:"completion_tokens"`
	Tokens           int64   `json:"tokens"`
	CostUSD          float64 `json:"cost_usd"`
	UnknownTokens    int64   `json:"unknown_tokens"` // part of Tokens that no provider reported
	UnknownUSD       float64 `json:"unknown_usd"`    // part of CostUSD that no provider reported
}

// ErrSkillOrPurpose reports a request for spend both by skill and by purpose.
var ErrSkillOrPurpose = errors.New("spend is counted by skill or by purpose, not by both: leave the skill out")

// Spend lists lines of agent_spend and the cursor of the next page: the latest day first, and within it the highest
// cost.
func Spend(ctx context.Context, db postgres.DB, f ReportFilter) ([]Spending, string, error) {
	return spend(ctx, db, f, `
		select s.day::text, s.skill, '' as purpose, s.surface, s.model, s.calls, s.prompt_tokens, s.completion_tokens,
		       s.tokens, s.cost_usd::float8 as cost_usd, s.unknown_tokens, s.unknown_usd::float8 as unknown_usd
		  from agent_spend s
		 where (@since::timestamptz is null or s.day >= (@since at time zone 'UTC')::date)
		   and (@until::timestamptz is null or s.day < (@until at time zone 'UTC')::date)
		   and (@skill::text = '' or s.skill = lanekeeper.agent_count_key(@skill))
		     and (@surface::text = '' or s.surface = lanekeeper.agent_count_key(@surface))
		   and (@model::text = '' or s.model = lanekeeper.agent_count_key(@model))
		 order by s.day desc, s.cost_usd desc, s.tokens desc, s.skill, s.surface, s.model
		 offset @offset limit @limit::int + 1`)
}

// SpendByPurpose lists lines of agent_spend_by_purpose. It cannot filter by skill.
func SpendByPurpose(ctx context.Context, db postgres.DB, f ReportFilter) ([]Spending, string, error) {
	if f.Skill != "" {
		return nil, "", ErrSkillOrPurpose
	}
	return spend(ctx, db, f, `
		select s.day::text, '' as skill, s.purpose, s.surface, s.model, s.calls, s.prompt_tokens, s.completion_tokens,
		       s.tokens, s.cost_usd::float8 as cost_usd, s.unknown_tokens, s.unknown_usd::float8 as unknown_usd
		  from agent_spend_by_purpose s
		 where (@since::timestamptz is null or s.day >= (@since at time zone 'UTC')::date)
		   and (@until::timestamptz is null or s.day < (@until at time zone 'UTC')::date)
		   and @skill::text = '' and (@surface::text = '' or s.surface = lanekeeper.agent_count_key(@surface))
		   and (@model::text = '' or s.model = lanekeeper.agent_count_key(@model))
		 order by s.day desc, s.cost_usd desc, s.tokens desc, s.purpose, s.surface, s.model
		 offset @offset limit @limit::int + 1`)
}

func spend(ctx context.Context, db postgres.DB, f ReportFilter, sql string) ([]Spending, string, error) {
	return readPage[Spending](ctx, db, f, sql, postgres.Strict{
		"since": timeArg(f.Since), "until": timeArg(f.Until), "skill": f.Skill, "surface": f.Surface, "model": f.Model,
	}, "sum spend")
}

// Slow is the duration of a skill's calls in milliseconds.
type Slow struct {
	Skill          string  `json:"skill"`
	Calls          int64   `json:"calls"`
	P50MS          float64 `json:"p50_ms"`
	P95MS          float64 `json:"p95_ms"`
	MaxMS          *int64  `json:"max_ms"` // nil for calls counted by an older release
	SlowestTraceID string  `json:"slowest_trace_id"`
}

// figuresRead bounds the calls that are read one by one; of others the counts are added up.
const figuresRead = 500

// Failure is the record of a failing skill.
type Failure struct {
	Skill      string     `json:"skill"`
	Calls      int64      `json:"calls"`
	Errors     int64      `json:"errors"`
	Rate       float64    `json:"rate"`   // errors per call
	Streak     int64      `json:"streak"` // consecutive failures until now within the time, since the skill was last enabled
	P50MS      float64    `json:"p50_ms"`
	P95MS      float64    `json:"p95_ms"`
	LastError  string     `json:"last_error"`
	LastClass  string     `json:"last_error_class"`
	LastFailed *time.Time `json:"last_failed_at"` // nil when its rows were pruned
	LastTrace  string     `json:"last_trace_id"`  // of the last failure
	State      string     `json:"state"`          // enabled, on trial, disabled
}

// Figures are the figures of skills since a moment.
type Figures []figure

type figure struct {
	Failure
	MaxMS          *int64
	SlowestTraceID string
	Timed          bool // the figure has durations
}

// ReadFigures reads the figures since a moment (zero: the last 7 days).
func ReadFigures(ctx context.Context, db postgres.DB, f ReportFilter) (Figures, error) {
	list, err := postgres.Rows[figure](ctx, db, "read figures of skills", `
		select f.skill, f.calls, f.failed as errors, coalesce(f.failed::float8 / nullif(f.calls, 0), 0) as rate, f.streak,
		       coalesce(f.p50_ms, 0) as p50_ms, coalesce(f.p95_ms, 0) as p95_ms, f.p95_ms is not null as timed, f.max_ms,
		       coalesce(f.slowest_trace_id, '') as slowest_trace_id, coalesce(l.error_message, '') as last_error,
		       coalesce(l.error_class, '') as last_class, l.created_at as last_failed, coalesce(l.trace_id, '') as last_trace,
		       case when h.enabled then 'enabled' when h.trial_at is not null then 'on trial' else 'disabled' end as state
		  from (select coalesce(@since::timestamptz, clock_timestamp() - interval '7 days') as at) since
		 cross join lateral lanekeeper.read_agent_skill_figures(since.at, @read) f
		  join agent_skills h on h.name = f.skill
		  left join lateral (
		       select k.error_message, k.error_class, k.created_at, k.trace_id from agent_skill_calls k
		        where f.failed > 0 and k.skill_name between f.skill and f.skill and k.status = 'error'
		          and k.id >= lanekeeper.agent_uuid7_floor(since.at)
		        order by k.skill_name desc, k.id desc limit 1) l on true
		 where @skill::text = '' or f.skill = @skill`,
		postgres.Strict{"since": timeArg(f.Since), "skill": f.Skill, "read": figuresRead})
	for i := range list {
		list[i].LastFailed = utc(list[i].LastFailed)
	}
	return list, err
}

// Slowest lists skills by the 95th percentile of their calls.
func (list Figures) Slowest() []Slow {
	slow := []Slow{}
	for _, f := range list {
		if f.Timed {
			slow = append(slow, Slow{f.Skill, f.Calls, f.P50MS, f.P95MS, f.MaxMS, f.SlowestTraceID})
		}
	}
	slices.SortFunc(slow, func(a, b Slow) int {
		return cmp.Or(cmp.Compare(b.P95MS, a.P95MS), cmp.Compare(a.Skill, b.Skill))
	})
	return slow
}

// Failing lists the skills that failed, the most failures first. The view agent_skill_calls defines which calls count:
// invalid arguments of a model, for example, do not.
func (list Figures) Failing() []Failure {
	failing := []Failure{}
	for _, f := range list {
		if f.Errors > 0 {
			failing = append(failing, f.Failure)
		}
	}
	slices.SortFunc(failing, func(a, b Failure) int {
		return cmp.Or(cmp.Compare(b.Errors, a.Errors), cmp.Compare(a.Skill, b.Skill))
	})
	return failing
}

// Slowest is a page of [Figures.Slowest], and the cursor of the next.
func Slowest(ctx context.Context, db postgres.DB, f ReportFilter) ([]Slow, string, error) {
	list, err := ReadFigures(ctx, db, f)
	return pageOf(list.Slowest(), f, "list the slowest skills", err)
}

// Failing is a page of [Figures.Failing], and the cursor of the next.
func Failing(ctx context.Context, db postgres.DB, f ReportFilter) ([]Failure, string, error) {
	list, err := ReadFigures(ctx, db, f)
	return pageOf(list.Failing(), f, "list failing skills", err)
}

// pageOf returns a page of a report that was read as a whole.
func pageOf[T any](list []T, f ReportFilter, verb string, err error) ([]T, string, error) {
	offset, bad := offsetOf(f.Cursor)
	if err := errors.Join(bad, err); err != nil {
		return nil, "", fmt.Errorf("%s: %w", verb, err)
	}
	list, size := list[min(offset, len(list)):], pageSize(f.Limit)
	if len(list) <= size {
		return list, "", nil
	}
	return list[:size], offsetCursor(offset + size), nil
}

// readPage reads a page of a report. A report is short and computed for each page, so a cursor is an offset.
func readPage[T any](
	ctx context.Context, db postgres.DB, f ReportFilter, sql string, args postgres.Strict, verb string,
) ([]T, string, error) {
	offset, err := offsetOf(f.Cursor)
	if err != nil {
		return nil, "", fmt.Errorf("%s: %w", verb, err)
	}
	size := pageSize(f.Limit)
	args["offset"], args["limit"] = offset, size
	list, err := postgres.Rows[T](ctx, db, verb, sql, customPlan, args)
	if err != nil || len(list) <= size {
		return list, "", err
	}
	return list[:size], offsetCursor(offset + size), nil
}
