package activity

import (
	"context"
	"math"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// ModelDurations returns the durations of successful calls of models, from the day of since through the day of until
// (UTC). Calls of the last half minute are missing.
func ModelDurations(
	ctx context.Context, db postgres.DB, models []string, since, until time.Time,
) (map[string]Histogram, error) {
	list, err := postgres.Rows[struct {
		Model string
		Histogram
	}](ctx, db, "read durations of model calls", `
		select x.model, array_agg(x.bucket order by x.bucket) as buckets, array_agg(x.calls order by x.bucket) as counts
		  from (select m.model, d.bucket, sum(d.calls)::bigint as calls
		          from unnest(@models::text[]) m (model)
		         cross join generate_series(@since::date, least(@until::date, (clock_timestamp() at time zone 'UTC')::date),
		                                    interval '1 day') g (day)
		         cross join lateral (select u.bucket, u.calls from agent_activity_durations u
		                              where u.day = g.day::date and u.skill = 'model ' || m.model offset 0) d
		         group by 1, 2) x
		 group by 1`, customPlan, postgres.Strict{
		"models": models, "since": since.UTC().Format(time.DateOnly), "until": until.UTC().Format(time.DateOnly),
	})
	byModel := map[string]Histogram{}
	for _, l := range list {
		byModel[l.Model] = l.Histogram
	}
	return byModel, err
}

// Histogram counts durations by bucket. Bucket b has durations from 1.05^b to 1.05^(b+1) milliseconds, and a negative
// bucket those below 1 ms.
type Histogram struct {
	Buckets []int32
	Counts  []int64
}

// Percentile returns percentile_cont of bucketed durations in milliseconds; nil without durations.
func Percentile(p float64, buckets []int32, counts []int64) *float64 {
	var total int64
	for _, n := range counts {
		total += n
	}
	if total == 0 {
		return nil
	}
	rank := p * float64(total-1)
	low := nthDuration(int64(math.Floor(rank)), buckets, counts)
	high := nthDuration(int64(math.Ceil(rank)), buckets, counts)
	return new(low + (high-low)*(rank-math.Floor(rank)))
}

// nthDuration returns the duration of the nth call, from 0, in milliseconds: the only whole number of its bucket, or
// the middle of the bucket. So it is exact below 20 ms, and within 2.5% from there on.
func nthDuration(n int64, buckets []int32, counts []int64) float64 {
	for i, b := range buckets {
		if n -= counts[i]; n >= 0 {
			continue
		} else if b < 0 {
			return 0
		}
		first, end := math.Ceil(math.Pow(1.05, float64(b))), math.Pow(1.05, float64(b+1))
		if first+1 >= end {
			return first
		}
		return math.Pow(1.05, float64(b)+0.5)
	}
	return 0
}
