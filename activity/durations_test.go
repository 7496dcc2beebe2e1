package activity_test

import (
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

func TestModelDurationsDoNotDependOnTheCollation(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	pgtest.Exec(t, db, `insert into agent_activity_durations (day, skill, bucket, calls)
		select (clock_timestamp() at time zone 'UTC')::date, skill, bucket, calls
		  from (values ('model gpt-4', 7, 2), ('model check', 8, 3), ('model-check', 9, 5)) d (skill, bucket, calls)`)
	const want = "map[check:{[8] [3]} gpt-4:{[7] [2]}]"
	for _, collation := range []string{"C", "en_US.utf8", "en-x-icu"} {
		if !pgtest.Value[bool](t, db, `select exists (select from pg_collation where collname = $1)`, collation) {
			t.Logf("the server has no collation %s", collation)
			continue
		}
		pgtest.Exec(t, db, `alter table agent_activity_durations alter column skill type text collate "`+collation+`"`)
		now := time.Now()
		got, err := activity.ModelDurations(t.Context(), db, []string{"gpt-4", "check", "unused"}, now.AddDate(0, 0, -1),
			now.AddDate(0, 0, 1))
		require.NoError(t, err)
		assert.Equal(t, want, fmt.Sprint(got), collation)
	}
}

func TestPercentilesOfShortDurationsAreExact(t *testing.T) {
	for ms := 1; ms < 20; ms++ {
		bucket := int32(math.Floor(math.Log(float64(ms)) / math.Log(1.05)))
		assert.Equal(t, float64(ms), *activity.Percentile(0.95, []int32{bucket}, []int64{3}))
	}
}
