package activity

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

const (
	// countLimit bounds the rows of one pass, which takes a fraction of a second.
	countLimit = 20_000
	// countLag is how far a pass stays behind the clock. It must exceed the 5 seconds of the trigger
	// agent_activity_written, which lists rows with older ids.
	countLag = 20 * time.Second
	// noID is below every id.
	noID = "00000000-0000-0000-0000-000000000000"
)

// Count counts ended rows of the log, about 20,000 at most, and reports whether more can be counted now. It writes
// nothing when there is nothing to count or another process counts. A pass is one transaction, and blocks no writer
// of the log.
func Count(ctx context.Context, db postgres.Beginner) (more bool, err error) {
	_, more, err = CountPass(ctx, db, countLimit, countLag)
	return more, err
}

// CountPass is Count with its own limit and lag; the limit applies to scanned and to listed rows. It also returns the
// number of counted rows.
//
// Rows of open transactions are invisible, and may have lower ids than visible rows. So a pass stores an id, the
// candidate, and its own transaction id. Rows below the candidate are counted once no earlier transaction is in
// progress.
func CountPass(
	ctx context.Context, db postgres.Beginner, limit int, lag time.Duration,
) (counted int, more bool, err error) {
	idle, err := isIdle(ctx, db, lag)
	if err != nil || idle {
		return 0, false, wrapCount(err)
	}
	err = pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
		counted, more, err = countInTx(ctx, tx, limit, lag)
		return err
	})
	return counted, more, wrapCount(err)
}

func wrapCount(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("count activities: %w", err)
}

// isIdle is the common case and writes nothing. The order by makes the planner use the index of ids.
func isIdle(ctx context.Context, db postgres.DB, lag time.Duration) (idle bool, err error) {
	err = db.QueryRow(ctx, `
		select c.candidate is null
		       and ((select a.id from agent_activity a where a.id >= c.counted_upto order by a.id limit 1)
		            < lanekeeper.agent_uuid7_floor(now() - @lag::interval)) is not true
		       and not exists (select from agent_activity_uncounted u
		                        where u.activity_id < c.counted_upto
		                          and not exists (select from agent_activity_open o where o.activity_id = u.activity_id))
		  from agent_activity_counted c`, postgres.Strict{"lag": lag}).Scan(&idle)
	return idle, err
}

//go:embed count.sql
var countSQL string

// countInTx is a pass in its transaction.
func countInTx(ctx context.Context, tx pgx.Tx, limit int, lag time.Duration) (counted int, more bool, err error) {
	var locked bool
	err = tx.QueryRow(ctx, `
		select set_config('enable_seqscan', 'off', true) = set_config('jit', 'off', true)
		  from agent_activity_counted c for update skip locked`).Scan(&locked)
	if errors.Is(err, pgx.ErrNoRows) {
		return 0, false, nil // another process counts
	} else if err != nil {
		return 0, false, err
	}
	var upto, listedUpto, bound string
	var candidate *string
	// A candidate of a future transaction is from another server: the database was restored from a dump.
	err = tx.QueryRow(ctx, `
		with counted as (
		  select c.counted_upto, c.checked_upto, c.candidate_xid,
		         case when c.candidate_xid < pg_snapshot_xmax(pg_current_snapshot()) then c.candidate end as candidate
		    from agent_activity_counted c)
		select c.counted_upto::text, c.checked_upto::text, c.candidate::text,
		       case when c.candidate is null or c.candidate_xid > pg_snapshot_xmin(pg_current_snapshot()) then c.counted_upto
		            else coalesce((select a.id from agent_activity a where a.id >= c.counted_upto and a.id < c.candidate
		                            order by a.id offset @most::int limit 1), c.candidate) end::text
		  from counted c`, perQuery, postgres.Strict{"most": limit}).Scan(&upto, &listedUpto, &candidate, &bound)
	if err != nil {
		return 0, false, err
	}
	var listed int
	err = tx.QueryRow(ctx, countSQL, perQuery, postgres.Strict{
		"counted_upto": upto, "bound": bound, "listed_upto": listedUpto, "most": limit,
	}).Scan(&counted, &listed, &listedUpto)
	if err != nil {
		return 0, false, err
	}
	if listed < limit {
		listedUpto = noID // end of the list: start over
	}
	more = candidate != nil && upto < bound && bound < *candidate || listed == limit
	if candidate != nil && bound == *candidate {
		candidate = nil
	}
	// now() precedes the transaction's id.
	_, err = tx.Exec(ctx, `
		update agent_activity_counted c
		   set counted_upto = @bound::uuid, checked_upto = @listed_upto::uuid, candidate = n.candidate,
		       candidate_xid = case when @candidate::uuid is not null then c.candidate_xid when n.candidate is not null
		         then pg_current_xact_id() end
		  from (select coalesce(@candidate::uuid, (
		                 select h.id from lanekeeper.agent_uuid7_floor(now() - @lag::interval) h (id)
		                  where exists (select from agent_activity a where a.id >= @bound::uuid and a.id < h.id)))
		                    as candidate) n`,
		perQuery, postgres.Strict{"bound": bound, "listed_upto": listedUpto, "candidate": candidate, "lag": lag})
	return counted, more, err
}

// Sums do not read the log. Count adds each ended row once to agent_activity_counts and agent_activity_durations.
// A reader adds the uncounted rows: those of the last half minute and running ones. So its figures equal the
// views agent_spend and agent_skill_calls. Only percentiles are approximate, to 2.5 per cent.

// uncountedLimit bounds the uncounted rows that a reader adds.
const uncountedLimit = 20_000

// ByHour is a period of Counted sums: one line per hour (UTC).
const ByHour Period = "hour"

// Dimension is the attribution of spend.
type Dimension string

// The dimensions.
const (
	BySkill   Dimension = "skill"   // called by the model call's answer; empty for none
	ByPurpose Dimension = "purpose" // of the model call: a phase, a turn, an automation
	BySurface Dimension = "surface"
	ByModel   Dimension = "model"
	ByAgent   Dimension = "agent" // that acted
	ByKey     Dimension = "key"   // chat key of the thread
	Together  Dimension = ""      // one line per period
)

// SpendFilter selects the sums of CountedSpend.
type SpendFilter struct {
	Since                 time.Time // cut to the hour (UTC); zero has no bound
	Until                 time.Time // likewise
	By                    Dimension
	Period                Period // Total when empty
	Skill, Surface, Model string // empty for all
	Purpose               string // likewise; not with Skill or BySkill, because no row has both
	Agent                 string // likewise; not with Skill, Purpose, BySkill or ByPurpose
}

// SpendLine is the spend of one key in one period.
type SpendLine struct {
	Key              string     `json:"key"`    // of the dimension; empty for Together
	Period           *time.Time `json:"period"` // its start, UTC; nil for Total
	Calls            int64      `json:"calls"`
	PromptTokens     int64      `json:"prompt_tokens"`
	CompletionTokens int64      `json:"completion_tokens"`
	Tokens           int64      `json:"tokens"`
	CostUSD          float64    `json:"cost_usd"`
	UnknownTokens    int64      `json:"unknown_tokens"` // part of Tokens that no provider reported
	UnknownUSD       float64    `json:"unknown_usd"`    // part of CostUSD that no provider reported
	// CachedTokens is the part of PromptTokens that the provider had cached, and Errors the failed calls; 0 by skill.
	CachedTokens int64 `json:"cached_tokens"`
	Errors       int64 `json:"errors"`
}

// Counted are sums over the log. Until is nil when they are complete. Otherwise more than 20,000 rows are uncounted,
// and rows from that moment on are missing until Count has caught up.
type Counted[T any] struct {
	Lines []T        `json:"lines"`
	Until *time.Time `json:"until"`
}

//go:embed counts_spend.sql
var countedSpendSQL string

// CountedSpend returns the sums of the views agent_spend and, by purpose, agent_spend_by_purpose, at a cost that does
// not grow with the log. The latest period comes first, and within it the highest cost. A key of more than 300 bytes
// is cut.
func CountedSpend(ctx context.Context, db postgres.DB, f SpendFilter) (Counted[SpendLine], error) {
	switch f.Period {
	case "":
		f.Period = Total
	case ByHour, ByDay, Total:
	default:
		return Counted[SpendLine]{}, fmt.Errorf("sum spend: period %q is not one of %s, %s, %s", string(f.Period),
			ByHour, ByDay, Total)
	}
	switch f.By {
	case BySkill, ByPurpose, BySurface, ByModel, ByAgent, ByKey, Together:
	default:
		return Counted[SpendLine]{}, fmt.Errorf("sum spend: %q is not one of %s, %s, %s, %s, %s, %s", string(f.By), BySkill,
			ByPurpose, BySurface, ByModel, ByAgent, ByKey)
	}
	kind, err := f.kind()
	if err != nil {
		return Counted[SpendLine]{}, err
	}
	until := time.Date(9999, 1, 1, 0, 0, 0, 0, time.UTC)
	if !f.Until.IsZero() {
		until = startOfHour(f.Until)
	}
	since := startOfHour(f.Since)
	type line struct {
		SpendLine
		Nothing bool
		LeftOut *time.Time
	}
	list, err := postgres.RowsGeneric[line](ctx, db, "sum spend", countedSpendSQL, postgres.Strict{
		"since": since, "hours_until": firstMidnight(since, f.Period), "until": until, "agent": f.Agent, "by": string(f.By),
		"period": string(f.Period),
		"skill":  f.Skill, "surface": f.Surface, "model": f.Model, "purpose": f.Purpose, "kind": kind, "most": uncountedLimit,
	})
	if err != nil {
		return Counted[SpendLine]{}, err
	}
	sums := Counted[SpendLine]{Lines: []SpendLine{}}
	for _, l := range list {
		sums.Until = utc(l.LeftOut)
		if l.Nothing {
			continue // only reports the missing rows
		}
		l.Period = utc(l.Period)
		sums.Lines = append(sums.Lines, l.SpendLine)
	}
	return sums, nil
}

// kind is the kind of counts that have the sums.
func (f SpendFilter) kind() (string, error) {
	byWork := f.By == BySkill || f.By == ByPurpose || f.Skill != "" || f.Purpose != ""
	switch {
	case f.By == ByKey && (byWork || f.Agent != ""):
		return "", errors.New("sum spend: by key there are no agents, skills and purposes")
	case f.By == ByKey:
		return "key", nil
	case (f.By == ByAgent || f.Agent != "") && byWork:
		return "", errors.New("sum spend: by agent there are no skills and purposes")
	case f.By == ByAgent || f.Agent != "":
		return "agent", nil
	case (f.By == ByPurpose || f.Purpose != "") && (f.By == BySkill || f.Skill != ""):
		return "", fmt.Errorf("sum spend: %w", ErrSkillOrPurpose)
	case f.By == BySkill || f.Skill != "":
		return "charge", nil
	}
	return "model", nil
}

// ModelDurations returns how long successful calls of each model took since a day (UTC), by model: buckets as in
// [Percentile], and counts. Calls of the last half minute are missing.
func ModelDurations(ctx context.Context, db postgres.DB, since, until time.Time) (map[string]Histogram, error) {
	list, err := postgres.Rows[struct {
		Model string
		Histogram
	}](ctx, db, "read durations of model calls", `
		select substr(x.skill, 7) as model, array_agg(x.bucket order by x.bucket) as buckets, array_agg(x.calls order by x.bucket) as counts
		  from (select d.skill, d.bucket, sum(d.calls)::bigint as calls
		          from generate_series(@since::date, least(@until::date, (clock_timestamp() at time zone 'UTC')::date), interval '1 day') g (day)
		         cross join lateral (select u.skill, u.bucket, u.calls from agent_activity_durations u
		                              where u.day = g.day::date and u.skill >= 'model ' and u.skill < 'model!' offset 0) d
		         group by 1, 2) x group by 1`, perQuery, postgres.Strict{
		"since": since.UTC().Format(time.DateOnly), "until": until.UTC().Format(time.DateOnly),
	})
	of := map[string]Histogram{}
	for _, l := range list {
		of[l.Model] = l.Histogram
	}
	return of, err
}

// Histogram counts durations by bucket.
type Histogram struct {
	Buckets []int32
	Counts  []int64
}

// startOfHour is the start of a moment's hour (UTC), not before the epoch.
func startOfHour(t time.Time) time.Time {
	if t.Before(time.Unix(0, 0)) {
		return time.Unix(0, 0).UTC()
	}
	return t.UTC().Truncate(time.Hour)
}

// firstMidnight is the moment from which whole days are summed instead of hours: the first midnight not before since.
func firstMidnight(since time.Time, p Period) time.Time {
	if p == ByHour {
		return time.Date(9999, 1, 1, 0, 0, 0, 0, time.UTC)
	}
	day := since.Truncate(24 * time.Hour)
	if day.Before(since) {
		day = day.Add(24 * time.Hour)
	}
	return day
}

// CallLine counts a skill's calls in one period.
type CallLine struct {
	Period *time.Time `json:"period"` // its start, UTC; nil for Total
	Calls  int64      `json:"calls"`  // all calls
	Worked int64      `json:"worked"` // calls that count for the skill's health, as in agent_skill_calls
	Failed int64      `json:"failed"` // failed ones among them
}

//go:embed counts_calls.sql
var countedCallsSQL string

// CountedCalls counts a skill's calls since a moment, which is cut to the hour (UTC), the latest period first.
// Periods without calls are left out.
func CountedCalls(
	ctx context.Context, db postgres.DB, skill string, since time.Time, by Period,
) (Counted[CallLine], error) {
	if by != ByHour && by != ByDay && by != Total {
		return Counted[CallLine]{}, fmt.Errorf("count calls: period %q is not one of %s, %s, %s", string(by),
			ByHour, ByDay, Total)
	}
	type line struct {
		CallLine
		LeftOut *time.Time
	}
	since = startOfHour(since)
	list, err := postgres.Rows[line](ctx, db, "count calls", countedCallsSQL, perQuery, postgres.Strict{
		"skill": skill, "since": since, "hours_until": firstMidnight(since, by), "period": string(by), "most": uncountedLimit,
	})
	sums := Counted[CallLine]{Lines: []CallLine{}}
	for _, l := range list {
		sums.Until = utc(l.LeftOut)
		if l.Calls == 0 {
			continue // only reports the missing rows
		}
		l.Period = utc(l.Period)
		sums.Lines = append(sums.Lines, l.CallLine)
	}
	return sums, err
}

const (
	// healthDays is the range of the health figures, from the start of the present hour.
	healthDays = 7
	// streakLimit bounds the rows of a skill that a streak reads.
	streakLimit = 500
	// skillsLimit bounds the skills of a listing.
	skillsLimit = 1000
)

// HealthFilter selects skills; empty fields select all.
type HealthFilter struct {
	Skill string
	State string // enabled, on trial or disabled
	After string // a name
	Limit int    // 0 and at most 1,000
	// NoDurations leaves the percentiles out, which are most of the cost.
	NoDurations bool
}

// Health is the health of a skill over the last 7 days.
type Health struct {
	Skill       string   `json:"skill"`
	Calls       int64    `json:"calls"` // that count for its health, as in agent_skill_calls
	Failed      int64    `json:"failed"`
	SuccessRate *float64 `db:"-" json:"success_rate"` // 0 to 1; nil without calls
	// consecutive failures until now, since the skill was last enabled
	Streak         int64      `json:"streak"`
	StreakMore     bool       `json:"streak_more"`   // no success among the newest 500 rows
	P50MS          *float64   `db:"-" json:"p50_ms"` // to 2.5 per cent, over whole days (UTC)
	P95MS          *float64   `db:"-" json:"p95_ms"`
	State          string     `json:"state"` // enabled, on trial, disabled
	DisabledBy     string     `json:"disabled_by"`
	DisabledReason string     `json:"disabled_reason"` // its first 2,000 characters
	DisabledAt     *time.Time `json:"disabled_at"`
}

//go:embed counts_health.sql
var countedHealthSQL string

// CountedHealth lists skills by name with the figures of the view agent_skill_health, at a cost that does not grow
// with the log. It starts at a full hour, so it may cover up to an hour more than the view. A streak follows the
// order in which calls were opened.
func CountedHealth(ctx context.Context, db postgres.DB, f HealthFilter) (Counted[Health], error) {
	type line struct {
		Health
		Buckets []int32
		Counts  []int64
		LeftOut *time.Time
	}
	since := startOfHour(time.Now().AddDate(0, 0, -healthDays))
	limit := skillsLimit
	if f.Limit > 0 {
		limit = min(f.Limit, skillsLimit)
	}
	list, err := postgres.RowsGeneric[line](ctx, db, "sum health of skills", countedHealthSQL, postgres.Strict{
		"since": since, "hours_until": firstMidnight(since, Total), "skill": f.Skill, "state": f.State,
		"after": f.After, "limit": limit, "durations": !f.NoDurations,
		"walk": streakLimit, "most": uncountedLimit,
	})
	sums := Counted[Health]{Lines: []Health{}}
	for _, l := range list {
		sums.Until = utc(l.LeftOut)
		h := l.Health
		h.DisabledAt = utc(h.DisabledAt)
		h.P50MS, h.P95MS = Percentile(0.5, l.Buckets, l.Counts), Percentile(0.95, l.Buckets, l.Counts)
		if h.Calls > 0 {
			rate := float64(h.Calls-h.Failed) / float64(h.Calls)
			h.SuccessRate = &rate
		}
		sums.Lines = append(sums.Lines, h)
	}
	return sums, err
}

// Percentile is percentile_cont over bucketed durations; nil for none.
func Percentile(p float64, buckets []int32, counts []int64) *float64 {
	var all int64
	for _, n := range counts {
		all += n
	}
	if all == 0 {
		return nil
	}
	rank := p * float64(all-1)
	low, high := nth(int64(math.Floor(rank)), buckets, counts), nth(int64(math.Ceil(rank)), buckets, counts)
	at := low + (high-low)*(rank-math.Floor(rank))
	return &at
}

// nth is the duration of the nth call, from 0, in milliseconds: the middle of its bucket.
func nth(n int64, buckets []int32, counts []int64) float64 {
	for i, b := range buckets {
		if n -= counts[i]; n < 0 && b < 0 {
			return 0
		} else if n < 0 {
			return math.Pow(1.05, float64(b)+0.5)
		}
	}
	return 0
}
