package postgres_test

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

// What PostgreSQL takes for a time can be read, in every mode of asking, and written as JSON.
func TestEveryTimeIsRead(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	last, first := "9999-12-30T00:00:00Z", "0001-01-02T00:00:00Z"
	for given, want := range map[string]string{
		"infinity": last, "294276-12-31 00:00+00": last, "9999-12-31 23:59:59+00": last,
		"-infinity": first, "4713-01-01 00:00+00 BC": first, "0001-01-01 00:00+00": first,
		"2026-01-31 12:00+02": "2026-01-31T10:00:00Z",
	} {
		for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeSimpleProtocol} {
			var got time.Time
			var also, none *time.Time
			err := pool.QueryRow(t.Context(), "select $1::text::timestamptz, $1::text::timestamptz, null::timestamptz", mode,
				given).
				Scan(&got, &also, &none)
			if err != nil {
				t.Errorf("%s, %s: %v", given, mode, err)
				continue
			}
			text, err := json.Marshal(got)
			assert.Truef(t, err == nil && string(text) == `"`+want+`"` && also != nil && also.Equal(got) && none == nil,
				"%s, %s: read as %s, %v and %v (%v), want %s", given, mode, text, also, none, err, want)
		}
	}
	var got time.Time
	assert.Error(t, pool.QueryRow(t.Context(), "select null::timestamptz").Scan(&got), "null was read as", got)
}
