package migrations_test

import (
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// A scan that is to be avoided counts as very dear, and what is dear is compiled, which takes a thousand times as long as the scan.
func TestWhatAvoidsScansIsNotCompiled(t *testing.T) {
	t.Parallel()
	rows, err := pgtest.DB(t).Query(t.Context(), `
		select p.oid::regprocedure::text from pg_proc p
		 where 'enable_seqscan=off' = any (p.proconfig) and not 'jit=off' = any (p.proconfig)`)
	require.NoError(t, err)
	compiled, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	if len(compiled) > 0 {
		t.Errorf("these set enable_seqscan = off and not jit = off: %q", compiled)
	}
}
