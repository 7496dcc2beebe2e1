package activity

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// The reports read what everybody can read in SQL: the views agent_spend and agent_spend_by_purpose, and the function
// behind the views agent_slowest_skills and agent_failing_skills, for another time than the last 7 days. No figure is
// defined here.

// Period says how spend is grouped in time.
type Period string

// The periods.
const (
	ByDay Period = "day"   // one line per UTC day
	Total Period = "total" // one line for the whole time
)

// ReportFilter narrows a report down; what is empty does not.
type ReportFilter struct {
	Since, Until          time.Time // of spend: whole days (UTC); of the others, only Since counts
	Skill, Surface, Model string    // Surface and Model: of spend only
	Limit                 int       // 50 when 0, at most MaxLimit
	Cursor                string    // from the page before
}

// Spending is what model calls cost on one day, on one surface, by one model.
type Spending struct {
	Day              string  `json:"day"`               // UTC, such as 2026-11-21
	Skill            string  `json:"skill"`             // what the model calls led to; empty: no skill
	Purpose          string  `json:"purpose,omitempty"` // instead of Skill, by purpose: what the model was called for
	Surface          string  `json:"surface"`
	Model            string  `json:"model"`
	Calls            int64   `json:"calls"`
	PromptTokens     int64   `json:"prompt_tokens"`
	CompletionTokens int64   `json:"completion_tokens"`
	Tokens           int64   `json:"tokens"`
	CostUSD          float64 `json:"cost_usd"`
	UnknownTokens    int64   `json:"unknown_tokens"` // the part of Tokens that nobody reported
	UnknownUSD       float64 `json:"unknown_usd"`    // the part of CostUSD that nobody reported
}

// ErrSkillOrPurpose reports that spend is asked for by a skill and by purpose at once.
var ErrSkillOrPurpose = errors.New("spend is counted by skill or by purpose, not by both: leave the skill out")

// Spend lists lines of agent_spend, and the cursor of the next page: the latest day first, and in it what cost most.
func Spend(ctx context.Context, db postgres.DB, f ReportFilter) ([]Spending, string, error) {
	return spend(ctx, db, f, `
		select s.day::text, s.skill, '' as purpose, s.surface, s.model, s.calls, s.prompt_tokens, s.completion_tokens, s.tokens,
		       s.cost_usd::float8 as cost_usd, s.unknown_tokens, s.unknown_usd::float8 as unknown_usd
		  from agent_spend s
		 where (@since::timestamptz is null or s.day >= (@since at time zone 'UTC')::date)
		   and (@until::timestamptz is null or s.day < (@until at time zone 'UTC')::date)
		   and (@skill::text = '' or s.skill = lanekeeper.agent_count_key(@skill)) and (@surface::text = '' or s.surface = lanekeeper.agent_count_key(@surface))
		   and (@model::text = '' or s.model = lanekeeper.agent_count_key(@model))
		 order by s.day desc, s.cost_usd desc, s.tokens desc, s.skill, s.surface, s.model
		 offset @offset limit @limit::int + 1`)
}

// SpendByPurpose is Spend by what the model was called for: lines of agent_spend_by_purpose. It cannot be narrowed
// down to a skill.
func SpendByPurpose(ctx context.Context, db postgres.DB, f ReportFilter) ([]Spending, string, error) {
	if f.Skill != "" {
		return nil, "", ErrSkillOrPurpose
	}
	return spend(ctx, db, f, `
		select s.day::text, '' as skill, s.purpose, s.surface, s.model, s.calls, s.prompt_tokens, s.completion_tokens, s.tokens,
		       s.cost_usd::float8 as cost_usd, s.unknown_tokens, s.unknown_usd::float8 as unknown_usd
		  from agent_spend_by_purpose s
		 where (@since::timestamptz is null or s.day >= (@since at time zone 'UTC')::date)
		   and (@until::timestamptz is null or s.day < (@until at time zone 'UTC')::date)
		   and @skill::text = '' and (@surface::text = '' or s.surface = lanekeeper.agent_count_key(@surface))
		   and (@model::text = '' or s.model = lanekeeper.agent_count_key(@model))
		 order by s.day desc, s.cost_usd desc, s.tokens desc, s.purpose, s.surface, s.model
		 offset @offset limit @limit::int + 1`)
}

func spend(ctx context.Context, db postgres.DB, f ReportFilter, sql string) ([]Spending, string, error) {
	return reported[Spending](ctx, db, f, sql, postgres.Strict{
		"since": moment(f.Since), "until": moment(f.Until), "skill": f.Skill, "surface": f.Surface, "model": f.Model,
	}, "sum spend")
}

// Slow is how long the calls of a skill take, in milliseconds.
type Slow struct {
	Skill          string  `json:"skill"`
	Calls          int64   `json:"calls"`
	P50MS          float64 `json:"p50_ms"`
	P95MS          float64 `json:"p95_ms"`
	MaxMS          *int64  `json:"max_ms"` // nil where the calls were counted before this was
	SlowestTraceID string  `json:"slowest_trace_id"`
}

// Slowest lists skills by how long their calls took since a moment (the zero time: the last 7 days), by the 95th
// percentile.
func Slowest(ctx context.Context, db postgres.DB, f ReportFilter) ([]Slow, string, error) {
	return reported[Slow](ctx, db, f, `
		select s.skill, s.calls, s.p50_ms, s.p95_ms, s.max_ms, coalesce(s.slowest_trace_id, '') as slowest_trace_id
		  from lanekeeper.read_agent_skill_figures(coalesce(@since::timestamptz, clock_timestamp() - interval '7 days')) s
		 where s.p95_ms is not null and (@skill::text = '' or s.skill = @skill)
		 order by s.p95_ms desc, s.skill
		 offset @offset limit @limit::int + 1`, postgres.Strict{"since": moment(f.Since), "skill": f.Skill}, "list the slowest skills")
}

// Failure is how a skill fares that has failed.
type Failure struct {
	Skill      string     `json:"skill"`
	Calls      int64      `json:"calls"`
	Errors     int64      `json:"errors"`
	Rate       float64    `json:"rate"`   // errors by calls
	Streak     int64      `json:"streak"` // failures in a row up to now, since the skill was last enabled, as in agent_skill_health
	P50MS      float64    `json:"p50_ms"`
	P95MS      float64    `json:"p95_ms"`
	LastError  string     `json:"last_error"`
	LastClass  string     `json:"last_error_class"`
	LastFailed *time.Time `json:"last_failed_at"` // nil when the log of it is gone
	LastTrace  string     `json:"last_trace_id"`  // of the last failure
	State      string     `json:"state"`          // enabled, on trial, disabled
}

// Failing lists the skills that failed since a moment (the zero time: the last 7 days), those with the most failures
// first. What counts as a call is what self-heal counts, the view agent_skill_calls: a model's bad arguments, for
// one, are not the skill's failure.
func Failing(ctx context.Context, db postgres.DB, f ReportFilter) ([]Failure, string, error) {
	list, next, err := reported[Failure](ctx, db, f, `
		select f.skill, f.calls, f.failed as errors, f.failed::float8 / f.calls as rate, h.streak, coalesce(f.p50_ms, 0) as p50_ms,
		       coalesce(f.p95_ms, 0) as p95_ms, coalesce(l.error_message, '') as last_error, coalesce(l.error_class, '') as last_class,
		       l.created_at as last_failed, coalesce(l.trace_id, '') as last_trace, h.state
		  from (select coalesce(@since::timestamptz, clock_timestamp() - interval '7 days') as at) since
		 cross join lateral lanekeeper.read_agent_skill_figures(since.at) f
		  join agent_skill_health h on h.skill = f.skill
		  left join lateral (
		       select k.error_message, k.error_class, k.created_at, k.trace_id from agent_skill_calls k
		        where k.skill_name between f.skill and f.skill and k.status = 'error' and k.id >= lanekeeper.agent_uuid7_floor(since.at)
		        order by k.skill_name desc, k.id desc limit 1) l on true
		 where f.failed > 0 and (@skill::text = '' or f.skill = @skill)
		 order by f.failed desc, f.skill
		 offset @offset limit @limit::int + 1`, postgres.Strict{"since": moment(f.Since), "skill": f.Skill}, "list failing skills")
	for i := range list {
		list[i].LastFailed = utc(list[i].LastFailed)
	}
	return list, next, err
}

// reported reads a page of a report. A report is short and is reckoned anew for each page, so a cursor is how far one
// has come.
func reported[T any](ctx context.Context, db postgres.DB, f ReportFilter, sql string, args postgres.Strict, verb string) ([]T, string, error) {
	offset, err := place(f.Cursor)
	if err != nil {
		return nil, "", fmt.Errorf("%s: %w", verb, err)
	}
	size := pageSize(f.Limit)
	args["offset"], args["limit"] = offset, size
	rows, err := db.Query(ctx, sql, perQuery, args)
	list, err := report[T](rows, err, verb)
	if err != nil || len(list) <= size {
		return list, "", err
	}
	return list[:size], placeCursor(offset + size), nil
}

// placeCursor hides how far a reader of a report has come.
func placeCursor(n int) string { return cursor(fmt.Sprintf("%032x", n)) }

// place is what placeCursor hides; 0 for the first page.
func place(c string) (int, error) {
	hidden, err := before(c)
	if err != nil || hidden == nil {
		return 0, err
	}
	n, err := strconv.ParseUint(hidden.(string), 16, 31)
	if err != nil {
		return 0, fmt.Errorf("read cursor %.60q: %w", c, ErrCursor)
	}
	return int(n), nil
}

// report collects the lines of a report.
func report[T any](rows pgx.Rows, err error, verb string) ([]T, error) {
	if err != nil {
		return nil, fmt.Errorf("%s: %w", verb, err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowToStructByName[T])
	if err != nil {
		return nil, fmt.Errorf("%s: %w", verb, err)
	}
	return list, nil
}
