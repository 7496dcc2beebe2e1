package retention_test

import (
	"slices"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/retention"
)

func TestAPartGoesWithTheLastPromptThatHasIt(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	pgtest.Exec(t, pool, `
		insert into agent_prompt_parts (digest, body, used_on)
		select sha256(p.body::bytea), p.body, (now() at time zone 'UTC')::date - p.days
		  from (values ('shared', 10), ('old', 40), ('unused', 20), ('new', 0)) p (body, days)`)
	pgtest.Exec(t, pool, `
		insert into agent_prompts (activity_id, messages, created_at)
		select lanekeeper.agent_uuid7(now() - make_interval(days => p.days)),
		  array(select sha256(b::bytea) from unnest(p.parts) b), now() - make_interval(days => p.days)
		  from (values (40, '{shared,old}'::text[]), (10, '{shared}'), (0, '{new}')) p (days, parts)`)
	done, err := retention.Run(t.Context(), pool, retention.Options{Kinds: []string{"prompts"}})
	assert.Truef(t, err == nil && len(done) == 1 && done[0].Removed == 3,
		"a pass has done %+v, %v; want 1 prompt and 2 parts", done, err)
	left := pgtest.Value[[]string](t, pool, `select array_agg(body order by body) from agent_prompt_parts`)
	assert.NoDiff(t, []string{"new", "shared"}, left)
	assert.Equal(t, 2, pgtest.Value[int](t, pool, `select count(*) from agent_prompts`))
	_, err = retention.Set(t.Context(), pool, map[string]string{"activity": "7d"}, "admin", "")
	require.NoError(t, err)
	_, err = retention.Run(t.Context(), pool, retention.Options{Kinds: []string{"prompts"}, Anew: true})
	require.NoError(t, err)
	left = pgtest.Value[[]string](t, pool, `select array_agg(body) from agent_prompt_parts`)
	assert.Truef(t, slices.Equal(left, []string{"new"}),
		"%v are left of prompts that are kept no longer than their model calls", left)
}
