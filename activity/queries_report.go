package activity

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Period says how spend is grouped in time.
type Period string

// The periods.
const (
	ByDay Period = "day"   // one line per UTC day
	Total Period = "total" // one line for the whole time
)

// Spending is what model calls made for one purpose, on one surface and by one model cost.
type Spending struct {
	Skill            string  `json:"skill"` // the phase, skill or turn that the model was called for
	Surface          string  `json:"surface"`
	Model            string  `json:"model"`
	Period           string  `json:"period"` // a UTC day such as 2026-11-21; empty for the total
	Calls            int64   `json:"calls"`
	PromptTokens     int64   `json:"prompt_tokens"`
	CompletionTokens int64   `json:"completion_tokens"`
	Tokens           int64   `json:"tokens"`
	CostUSD          float64 `json:"cost_usd"`
	UnknownTokens    int64   `json:"unknown_tokens"` // the part of Tokens that nobody reported
	UnknownUSD       float64 `json:"unknown_usd"`    // the part of CostUSD that nobody reported
}

// Spend attributes tokens and money since a moment (the zero time: ever) by skill, surface, model and
// period: the latest period first, and in it what cost most. Only model calls carry tokens, so nothing
// is counted twice. The view agent_spend counts the same way.
func Spend(ctx context.Context, db postgres.DB, since time.Time, by Period) ([]Spending, error) {
	if by != ByDay && by != Total {
		return nil, fmt.Errorf("sum spend: period %q is not one of %s, %s", string(by), ByDay, Total)
	}
	rows, err := db.Query(ctx, `
		select coalesce(nullif(a.purpose, ''), a.skill_name) as skill, a.surface, a.model,
		       case when @daily::boolean then to_char(a.created_at at time zone 'UTC', 'YYYY-MM-DD') else '' end as period,
		       count(*) as calls,
		       coalesce(sum(agent_tokens(a.token_usage, 'prompt_tokens')), 0)::bigint as prompt_tokens,
		       coalesce(sum(agent_tokens(a.token_usage, 'completion_tokens')), 0)::bigint as completion_tokens,
		       coalesce(sum(agent_tokens(a.token_usage, 'total_tokens')), 0)::bigint as tokens,
		       sum(a.cost_usd)::float8 as cost_usd,
		       coalesce(sum(agent_tokens(a.token_usage, 'unknown_tokens')), 0)::bigint as unknown_tokens,
		       coalesce(sum(agent_usd(a.token_usage, 'unknown_usd')), 0)::float8 as unknown_usd
		  from agent_activity a
		 where a.kind = 'model' and (@since::timestamptz is null or (a.id >= agent_uuid7_floor(@since) and a.created_at >= @since))
		 group by 1, 2, 3, 4
		 order by period desc, cost_usd desc, tokens desc, skill, surface, model`,
		perQuery, postgres.Strict{"daily": by == ByDay, "since": moment(since)})
	return report[Spending](rows, err, "sum spend")
}

// Slow is how long the calls of a skill take, in milliseconds.
type Slow struct {
	Skill          string  `json:"skill"`
	Calls          int64   `json:"calls"`
	P50MS          float64 `json:"p50_ms"`
	P95MS          float64 `json:"p95_ms"`
	MaxMS          int64   `json:"max_ms"`
	TotalMS        int64   `json:"total_ms"`
	SlowestTraceID string  `json:"slowest_trace_id"`
}

// Slowest lists the skills whose calls since a moment (the zero time: ever) took longest, by the 95th
// percentile. Calls that were skipped or await approval say nothing about speed and are left out.
func Slowest(ctx context.Context, db postgres.DB, since time.Time, limit int) ([]Slow, error) {
	rows, err := db.Query(ctx, `
		select a.skill_name as skill, count(*) as calls,
		       percentile_cont(0.5) within group (order by a.duration_ms) as p50_ms,
		       percentile_cont(0.95) within group (order by a.duration_ms) as p95_ms,
		       max(a.duration_ms) as max_ms, sum(a.duration_ms)::bigint as total_ms,
		       substr(max((lpad(a.duration_ms::text, 15, '0') || a.trace_id) collate "C"), 16) as slowest_trace_id
		  from agent_activity a
		 where a.kind = 'call' and a.status in ('success', 'error') and a.duration_ms is not null
		   and (@since::timestamptz is null or (a.id >= agent_uuid7_floor(@since) and a.created_at >= @since))
		 group by a.skill_name
		 order by p95_ms desc, skill
		 limit @limit`,
		perQuery, postgres.Strict{"since": moment(since), "limit": pageSize(limit)})
	return report[Slow](rows, err, "list the slowest skills")
}

// Failure is how a skill fares that has failed.
type Failure struct {
	Skill      string    `json:"skill"`
	Calls      int64     `json:"calls"`
	Errors     int64     `json:"errors"`
	Rate       float64   `json:"rate"`   // errors by calls
	Streak     int64     `json:"streak"` // failures since the last success
	P50MS      float64   `json:"p50_ms"`
	P95MS      float64   `json:"p95_ms"`
	LastError  string    `json:"last_error"`
	LastClass  string    `json:"last_error_class"`
	LastFailed time.Time `json:"last_failed_at"`
	LastTrace  string    `json:"last_trace_id"` // of the last failure
}

// Failing lists the skills that failed since a moment (the zero time: ever), those with the most
// failures first. What counts as a call is what self-heal counts, the view agent_skill_calls: a model's
// bad arguments, for one, are not the skill's failure.
func Failing(ctx context.Context, db postgres.DB, since time.Time, limit int) ([]Failure, error) {
	rows, err := db.Query(ctx, `
		select t.skill, t.calls, t.errors, t.errors::float8 / t.calls as rate, s.streak, coalesce(t.p50_ms, 0) as p50_ms,
		       coalesce(t.p95_ms, 0) as p95_ms, coalesce(f.error_message, '') as last_error, f.error_class as last_class,
		       f.created_at as last_failed, f.trace_id as last_trace
		  from (select c.skill_name as skill, count(*) as calls, count(*) filter (where c.status = 'error') as errors,
		               percentile_cont(0.5) within group (order by c.duration_ms) as p50_ms,
		               percentile_cont(0.95) within group (order by c.duration_ms) as p95_ms,
		               (max(c.id::text collate "C") filter (where c.status = 'success'))::uuid as last_success,
		               (max(c.id::text collate "C") filter (where c.status = 'error'))::uuid as last_error
		          from agent_skill_calls c
		         where @since::timestamptz is null or (c.id >= agent_uuid7_floor(@since) and c.created_at >= @since)
		         group by c.skill_name
		        having count(*) filter (where c.status = 'error') > 0
		         order by errors desc, skill
		         limit @limit) t
		 cross join lateral (
		       select count(*) as streak from agent_skill_calls c
		        where c.skill_name = t.skill and c.status = 'error' and (t.last_success is null or c.id > t.last_success)
		          and (@since::timestamptz is null or (c.id >= agent_uuid7_floor(@since) and c.created_at >= @since))) s
		  join agent_skill_calls f on f.id = t.last_error
		 order by t.errors desc, t.skill`,
		perQuery, postgres.Strict{"since": moment(since), "limit": pageSize(limit)})
	list, err := report[Failure](rows, err, "list failing skills")
	for i := range list {
		list[i].LastFailed = list[i].LastFailed.UTC()
	}
	return list, err
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
