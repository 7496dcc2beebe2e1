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
	// countMost is how many rows one pass counts. It takes a fraction of a second.
	countMost = 20_000
	// countLag is how far a pass stays behind the clock. The trigger agent_activity_late lists rows whose id is older
	// than 5 seconds, so the lag must be longer than that.
	countLag = 20 * time.Second
	// noID is below every id.
	noID = "00000000-0000-0000-0000-000000000000"
)

// Count counts rows of the log that have ended, at most 20,000 or so, and reports whether there are others
// that can be counted at once. It writes nothing where there is nothing to count, or where another process
// is at it. A pass is one transaction, and blocks nobody who writes to the log.
func Count(ctx context.Context, db postgres.Beginner) (more bool, err error) {
	_, more, err = CountPass(ctx, db, countMost, countLag)
	return more, err
}

// CountPass is Count for at most so many rows, and as many that are listed one by one, with a lag of its own. It also
// returns how many rows it counted.
//
// A row of an open transaction is not seen, and may have an id below those that are. So a pass notes an id, the
// candidate, and its own transaction id. Rows below the candidate are counted once no transaction before that one
// is under way.
func CountPass(ctx context.Context, db postgres.Beginner, most int, lag time.Duration) (counted int, more bool, err error) {
	idle, err := nothingToCount(ctx, db, lag)
	if err != nil || idle {
		return 0, false, wrapCount(err)
	}
	err = pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
		counted, more, err = countIn(ctx, tx, most, lag)
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

// nothingToCount is the common case, and costs no write. The order by keeps the planner to the index of ids.
func nothingToCount(ctx context.Context, db postgres.DB, lag time.Duration) (idle bool, err error) {
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

// countIn is a pass, in its transaction.
func countIn(ctx context.Context, tx pgx.Tx, most int, lag time.Duration) (counted int, more bool, err error) {
	var locked bool
	err = tx.QueryRow(ctx, `
		select set_config('enable_seqscan', 'off', true) = set_config('jit', 'off', true)
		  from agent_activity_counted c for update skip locked`).Scan(&locked)
	if errors.Is(err, pgx.ErrNoRows) {
		return 0, false, nil // another process is at it
	} else if err != nil {
		return 0, false, err
	}
	var upto, listedUpto, bound string
	var candidate *string
	// A candidate of a later transaction than any here is of another server: the database was restored from a dump.
	err = tx.QueryRow(ctx, `
		with counted as (
		  select c.counted_upto, c.looked, c.candidate_xid,
		         case when c.candidate_xid < pg_snapshot_xmax(pg_current_snapshot()) then c.candidate end as candidate
		    from agent_activity_counted c)
		select c.counted_upto::text, c.looked::text, c.candidate::text,
		       case when c.candidate is null or c.candidate_xid > pg_snapshot_xmin(pg_current_snapshot()) then c.counted_upto
		            else coalesce((select a.id from agent_activity a where a.id >= c.counted_upto and a.id < c.candidate
		                            order by a.id offset @most::int limit 1), c.candidate) end::text
		  from counted c`, perQuery, postgres.Strict{"most": most}).Scan(&upto, &listedUpto, &candidate, &bound)
	if err != nil {
		return 0, false, err
	}
	var listed int
	err = tx.QueryRow(ctx, countSQL, perQuery, postgres.Strict{
		"counted_upto": upto, "bound": bound, "listed_upto": listedUpto, "most": most,
	}).Scan(&counted, &listed, &listedUpto)
	if err != nil {
		return 0, false, err
	}
	if listed < most {
		listedUpto = noID // the end of the list: begin anew
	}
	more = candidate != nil && upto < bound && bound < *candidate || listed == most
	if candidate != nil && bound == *candidate {
		candidate = nil
	}
	// now() is before the transaction has an id.
	_, err = tx.Exec(ctx, `
		update agent_activity_counted c
		   set counted_upto = @bound::uuid, looked = @listed_upto::uuid, candidate = n.candidate,
		       candidate_xid = case when @candidate::uuid is not null then c.candidate_xid when n.candidate is not null then pg_current_xact_id() end
		  from (select coalesce(@candidate::uuid, (
		                 select h.id from lanekeeper.agent_uuid7_floor(now() - @lag::interval) h (id)
		                  where exists (select from agent_activity a where a.id >= @bound::uuid and a.id < h.id))) as candidate) n`,
		perQuery, postgres.Strict{"bound": bound, "listed_upto": listedUpto, "candidate": candidate, "lag": lag})
	return counted, more, err
}

// Sums over the log do not read the log. Count adds what ended to the tables agent_activity_counts and
// agent_activity_durations, each row once. A reader adds the rows that
// are not counted yet, those of the last half minute and those that run, so its figures are those of the
// log at that moment, as the views agent_spend and agent_skill_calls would have them. Only percentiles are
// approximate, to 2.5 per cent.

// tailMost is how many rows that are not counted yet a reader adds.
const tailMost = 20_000

// ByHour is a period of Counted sums.
const ByHour Period = "hour" // one line per hour (UTC)

// Dimension says what spend is attributed to.
type Dimension string

// The dimensions.
const (
	BySkill   Dimension = "skill"   // what the model call led to; empty where it led to no skill
	ByPurpose Dimension = "purpose" // what the model was called for: a phase, a turn, an automation
	BySurface Dimension = "surface"
	ByModel   Dimension = "model"
	Together  Dimension = "" // one line per period
)

// SpendFilter says which sums CountedSpend makes.
type SpendFilter struct {
	Since                 time.Time // cut to the hour (UTC); the zero time: ever
	By                    Dimension
	Period                Period // Total when empty
	Skill, Surface, Model string // only what was spent there; empty for all
	Purpose               string // likewise; not together with Skill or BySkill, for nothing is counted by both
}

// SpendLine is what was spent on one thing in one period.
type SpendLine struct {
	Key              string     `json:"key"`    // of the dimension; empty for Together
	Period           *time.Time `json:"period"` // its beginning, UTC; nil for Total
	Calls            int64      `json:"calls"`
	PromptTokens     int64      `json:"prompt_tokens"`
	CompletionTokens int64      `json:"completion_tokens"`
	Tokens           int64      `json:"tokens"`
	CostUSD          float64    `json:"cost_usd"`
	UnknownTokens    int64      `json:"unknown_tokens"` // the part of Tokens that no provider reported
	UnknownUSD       float64    `json:"unknown_usd"`    // the part of CostUSD that no provider reported
}

// Counted are sums over the log. Until is nil when they hold all of it; else rows from that moment on are
// missing, because more than 20,000 are not counted yet, and will be there when Count has caught up.
type Counted[T any] struct {
	Lines []T        `json:"lines"`
	Until *time.Time `json:"until"`
}

//go:embed counts_spend.sql
var countedSpendSQL string

// CountedSpend has the sums of the views agent_spend and, by purpose, agent_spend_by_purpose, at a cost that does not
// grow with the log: the latest period first, and in it what cost most. A key of more than 300 bytes is shortened.
func CountedSpend(ctx context.Context, db postgres.DB, f SpendFilter) (Counted[SpendLine], error) {
	switch f.Period {
	case "":
		f.Period = Total
	case ByHour, ByDay, Total:
	default:
		return Counted[SpendLine]{}, fmt.Errorf("sum spend: period %q is not one of %s, %s, %s", string(f.Period), ByHour, ByDay, Total)
	}
	switch f.By {
	case BySkill, ByPurpose, BySurface, ByModel, Together:
	default:
		return Counted[SpendLine]{}, fmt.Errorf("sum spend: %q is not one of %s, %s, %s, %s", string(f.By), BySkill, ByPurpose, BySurface, ByModel)
	}
	kind := "charge"
	if f.By == ByPurpose || f.Purpose != "" {
		if kind = "model"; f.By == BySkill || f.Skill != "" {
			return Counted[SpendLine]{}, fmt.Errorf("sum spend: %w", ErrSkillOrPurpose)
		}
	}
	since := hourOf(f.Since)
	type line struct {
		SpendLine
		Nothing bool
		LeftOut *time.Time
	}
	rows, err := db.Query(ctx, countedSpendSQL, perQuery, postgres.Strict{
		"since": since, "hours_until": daysFrom(since, f.Period), "by": string(f.By), "period": string(f.Period),
		"skill": f.Skill, "surface": f.Surface, "model": f.Model, "purpose": f.Purpose, "kind": kind, "most": tailMost,
	})
	list, err := report[line](rows, err, "sum spend")
	if err != nil {
		return Counted[SpendLine]{}, err
	}
	sums := Counted[SpendLine]{Lines: []SpendLine{}}
	for _, l := range list {
		sums.Until = utc(l.LeftOut)
		if l.Nothing {
			continue // there to tell what was left out
		}
		l.Period = utc(l.Period)
		sums.Lines = append(sums.Lines, l.SpendLine)
	}
	return sums, nil
}

// hourOf is the beginning of a moment's hour (UTC), and not before ids begin.
func hourOf(t time.Time) time.Time {
	if t.Before(time.Unix(0, 0)) {
		return time.Unix(0, 0).UTC()
	}
	return t.UTC().Truncate(time.Hour)
}

// daysFrom is the moment from which whole days are added up, where hours need not be told apart: the first
// midnight not before since.
func daysFrom(since time.Time, p Period) time.Time {
	if p == ByHour {
		return time.Date(9999, 1, 1, 0, 0, 0, 0, time.UTC)
	}
	day := since.Truncate(24 * time.Hour)
	if day.Before(since) {
		day = day.Add(24 * time.Hour)
	}
	return day
}

// CallLine is how a skill's calls ended in one period.
type CallLine struct {
	Period *time.Time `json:"period"` // its beginning, UTC; nil for Total
	Calls  int64      `json:"calls"`  // all that were made
	Worked int64      `json:"worked"` // those that say something about the skill, as in agent_skill_calls
	Failed int64      `json:"failed"` // and of these
}

//go:embed counts_calls.sql
var countedCallsSQL string

// CountedCalls counts a skill's calls since a moment, which is cut to the hour (UTC), the latest period
// first. Periods without calls are left out.
func CountedCalls(ctx context.Context, db postgres.DB, skill string, since time.Time, by Period) (Counted[CallLine], error) {
	if by != ByHour && by != ByDay && by != Total {
		return Counted[CallLine]{}, fmt.Errorf("count calls: period %q is not one of %s, %s, %s", string(by), ByHour, ByDay, Total)
	}
	type line struct {
		CallLine
		LeftOut *time.Time
	}
	since = hourOf(since)
	rows, err := db.Query(ctx, countedCallsSQL, perQuery, postgres.Strict{
		"skill": skill, "since": since, "hours_until": daysFrom(since, by), "period": string(by), "most": tailMost,
	})
	list, err := report[line](rows, err, "count calls")
	sums := Counted[CallLine]{Lines: []CallLine{}}
	for _, l := range list {
		sums.Until = utc(l.LeftOut)
		if l.Calls == 0 {
			continue // there to tell what was left out
		}
		l.Period = utc(l.Period)
		sums.Lines = append(sums.Lines, l.CallLine)
	}
	return sums, err
}

const (
	// healthDays is how far health looks back: from the hour that began so many days ago.
	healthDays = 7
	// streakMost is how many rows of a skill a streak is walked back.
	streakMost = 500
	// skillsMost is how many skills a listing has.
	skillsMost = 1000
)

// HealthFilter narrows skills down; what is empty does not.
type HealthFilter struct {
	Skill string // this one
	State string // enabled, on trial or disabled
	After string // by name
	Limit int    // 1,000 when 0, and at most
}

// Health is how a skill fares: the last 7 days.
type Health struct {
	Skill          string     `json:"skill"`
	Calls          int64      `json:"calls"` // that say something about the skill, as in agent_skill_calls
	Failed         int64      `json:"failed"`
	SuccessRate    *float64   `db:"-" json:"success_rate"` // 0 to 1; nil without calls
	Streak         int64      `json:"streak"`              // failures in a row up to now, since the skill was last enabled
	StreakMore     bool       `json:"streak_more"`         // and more: no success among the newest 500 rows
	P50MS          *float64   `db:"-" json:"p50_ms"`       // to 2.5 per cent, over whole days (UTC)
	P95MS          *float64   `db:"-" json:"p95_ms"`
	State          string     `json:"state"` // enabled, on trial, disabled
	DisabledBy     string     `json:"disabled_by"`
	DisabledReason string     `json:"disabled_reason"` // its first 2,000 characters
	DisabledAt     *time.Time `json:"disabled_at"`
}

//go:embed counts_health.sql
var countedHealthSQL string

// CountedHealth lists skills by name with what the view agent_skill_health says of them, at a cost that does
// not grow with the log. It looks back from the beginning of the hour, so it may have up to an hour more than
// the view. A streak goes by the order in which calls began to be recorded.
func CountedHealth(ctx context.Context, db postgres.DB, f HealthFilter) (Counted[Health], error) {
	type line struct {
		Health
		Buckets []int32
		Counts  []int64
		LeftOut *time.Time
	}
	since := hourOf(time.Now().AddDate(0, 0, -healthDays))
	limit := skillsMost
	if f.Limit > 0 {
		limit = min(f.Limit, skillsMost)
	}
	rows, err := db.Query(ctx, countedHealthSQL, perQuery, postgres.Strict{
		"since": since, "hours_until": daysFrom(since, Total), "skill": f.Skill, "state": f.State, "after": f.After, "limit": limit,
		"walk": streakMost, "most": tailMost,
	})
	list, err := report[line](rows, err, "sum health of skills")
	sums := Counted[Health]{Lines: []Health{}}
	for _, l := range list {
		sums.Until = utc(l.LeftOut)
		h := l.Health
		h.DisabledAt = utc(h.DisabledAt)
		h.P50MS, h.P95MS = percentile(0.5, l.Buckets, l.Counts), percentile(0.95, l.Buckets, l.Counts)
		if h.Calls > 0 {
			rate := float64(h.Calls-h.Failed) / float64(h.Calls)
			h.SuccessRate = &rate
		}
		sums.Lines = append(sums.Lines, h)
	}
	return sums, err
}

// percentile is percentile_cont over durations of which the buckets are known; nil when there are none.
func percentile(p float64, buckets []int32, counts []int64) *float64 {
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
