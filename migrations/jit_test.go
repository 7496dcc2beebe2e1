package migrations_test

import (
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

// A scan that is to be avoided counts as very dear, and what is dear is compiled, which takes a thousand times as
// long as the scan.
func TestWhatAvoidsScansIsNotCompiled(t *testing.T) {
	t.Parallel()
	compiled := pgtest.Column[string](t, pgtest.DB(t), `
		select p.oid::regprocedure::text from pg_proc p
		 where 'enable_seqscan=off' = any (p.proconfig) and not 'jit=off' = any (p.proconfig)`)
	assert.Truef(t, len(compiled) == 0, "these set enable_seqscan = off and not jit = off: %q", compiled)
}
