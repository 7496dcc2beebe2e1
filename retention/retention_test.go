package retention_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/retention"
)

// rounds returns the number of random states of a test.
func rounds() int {
	if os.Getenv("AGENT_RETENTION") == "long" {
		return 60
	}
	return 3
}

// randomPolicy keeps each kind for some days, or for ever.
func randomPolicy(r *rand.Rand) map[string]string {
	policy := map[string]string{}
	for kind, minDays := range map[string]int{
		"activity": 7, "executions": 1, "events": 1, "messages": 1, "approvals": 1, "automation_runs": 1, "deliveries": 1,
		"outbox": 1, "channel_messages": 1,
		"budgets": 31, "hour_counts": 35, "prompts": 1,
	} {
		policy[kind] = fmt.Sprintf("%dd", minDays+r.IntN(120))
		if r.IntN(6) == 0 {
			policy[kind] = retention.Forever
		}
	}
	return policy
}

// TestWhatGoesIsWhatThePolicySays prunes random states under random policies. A pass deletes exactly the rows that an
// oracle names: no unfinished work, and nothing that such work needs.
func TestWhatGoesIsWhatThePolicySays(t *testing.T) {
	t.Parallel()
	for n := range rounds() {
		seed := uint64(time.Now().UnixNano()) + uint64(n)
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			pool := pgtest.DB(t)
			r := rand.New(rand.NewPCG(seed, 0))
			random(t, pool, r)
			noteCauses(t, pool)
			policy := randomPolicy(r)
			_, err := retention.Set(t.Context(), pool, policy, "admin", "")
			require.NoError(t, err)
			want := read(t, pool)
			had := want.keys()
			want.take(policy)
			counted, err := retention.Run(t.Context(), pool, retention.Options{DryRun: true})
			require.NoError(t, err)
			assert.NoDiff(t, had, read(t, pool).keys())
			done, err := retention.Run(t.Context(), pool, retention.Options{Restart: true})
			require.NoError(t, err)
			assert.Equal(t, "", cmp.Diff(want.keys(), read(t, pool).keys()), policy)
			agree(t, had, want.keys(), counted, done)
			causesAreOfWhatIsThere(t, pool)
		})
	}
}

// agree compares the reported rows with the deleted ones.
func agree(t *testing.T, had, left map[string][]string, counted, done []retention.Done) {
	t.Helper()
	tables := map[string]string{
		"activity": "activity", "executions": "executions", "deliveries": "deliveries", "outbox": "outbox",
		"automation_runs":  "runs",
		"channel_messages": "channel_messages",
		"budgets":          "budgets", "hour_counts": "counts", "messages": "messages", "prompts": "prompts",
	}
	for _, d := range counted {
		if table, ok := tables[d.Kind]; ok && d.Removed != int64(len(had[table])-len(left[table])) {
			t.Errorf("a dry run says %d of %s would go; %d of %d stayed", d.Removed, d.Kind, len(left[table]), len(had[table]))
		}
	}
	for _, d := range done {
		if table, ok := tables[d.Kind]; ok && len(d.Partitions) == 0 && d.Removed != int64(len(had[table])-len(left[table])) {
			t.Errorf("%d of %s are said to have gone; %d of %d stayed", d.Removed, d.Kind, len(left[table]), len(had[table]))
		}
	}
}

// TestAPassMayBeStoppedAnywhere kills passes repeatedly, several at once. They reach the same result.
func TestAPassMayBeStoppedAnywhere(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	r := rand.New(rand.NewPCG(7, 7))
	random(t, pool, r)
	policy := map[string]string{}
	for _, kind := range []string{
		"activity", "executions", "events", "messages", "approvals", "automation_runs",
		"deliveries", "outbox", "budgets", "hour_counts", "prompts", "channel_messages",
	} {
		policy[kind] = "64d"
	}
	_, err := retention.Set(t.Context(), pool, policy, "admin", "")
	require.NoError(t, err)
	want := read(t, pool)
	want.take(policy)
	for n := range 12 {
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(n*n)*3*time.Millisecond)
		errs := make(chan error, 2)
		for range 2 {
			go func() {
				_, err := retention.Run(ctx, pool, retention.Options{Restart: n == 3})
				errs <- err
			}()
		}
		for range 2 {
			err := <-errs
			assert.Truef(t, err == nil || ctx.Err() != nil || errors.Is(err, context.DeadlineExceeded), "pass %d: %v", n, err)
		}
		cancel()
	}
	for range 2 { // a pass may examine a parked approval before it deletes the row on which the approval depends
		_, err := retention.Run(t.Context(), pool, retention.Options{Restart: true})
		require.NoError(t, err)
	}
	assert.NoDiff(t, want.keys(), read(t, pool).keys())
	assert.Equal(t, 0, pgtest.Value[int](t, pool, `select count(*) from agent_retention_leftovers`))
}

func TestEverythingIsKeptUntilSomebodySaysOtherwise(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	random(t, pool, rand.New(rand.NewPCG(1, 2)))
	// every kind is kept for ever
	pgtest.Exec(t, pool, `update agent_retention set keep = null
		where kind in ('deliveries', 'outbox', 'budgets', 'prompts', 'channel_messages', 'evals')`)
	had := read(t, pool).keys()
	done, err := retention.Run(t.Context(), pool, retention.Options{Restart: true})
	assert.Truef(t, err == nil && len(done) == 1 && done[0].Removed == 0, "%+v, %v", done, err)
	assert.NoDiff(t, had, read(t, pool).keys())
}

func TestPoliciesThatCannotBeAreRefusedWhole(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	before, err := retention.Show(t.Context(), pool)
	require.NoError(t, err)
	for _, bad := range []map[string]string{
		{},
		{"memory": "90d"},
		{"activity": "6d"},
		{"activity": "-90d"},
		{"activity": "soon"},
		{"activity": ""},
		{"executions": "200 years"},
		{"executions": "1d", "events": "1 second"},
	} {
		_, err := retention.Set(t.Context(), pool, bad, "admin", "")
		assert.ErrorIs(t, err, retention.ErrInvalid, bad)
	}
	after, err := retention.Show(t.Context(), pool)
	diff := cmp.Diff(before, after)
	assert.Truef(t, diff == "" && err == nil, "%v, changed:\n%s", err, diff)
	_, err = retention.Run(t.Context(), pool, retention.Options{Kinds: []string{"memory"}})
	assert.ErrorIs(t, err, retention.ErrInvalid, "a pass over memory")
	_, err = pool.Exec(t.Context(), `update agent_retention set keep = '1 second' where kind = 'executions'`)
	assert.Truef(t, postgres.IsCode(err, "23514"), "less than the least: %v", err)
}

// A pass leaves rows that a client has locked, and deletes the others. The next pass returns to the locked ones.
func TestAPassGoesOnBesideLockedRows(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	random(t, pool, rand.New(rand.NewPCG(uint64(time.Now().UnixNano()), 0)))
	noteCauses(t, pool)
	policy := map[string]string{
		"activity": "7d", "executions": "1d", "events": "1d", "messages": "1d", "approvals": "1d", "automation_runs": "1d",
		"deliveries":       "1d",
		"channel_messages": "1d",
		"outbox":           "1d", "budgets": "31d", "hour_counts": "35d", "prompts": "1d",
	}
	_, err := retention.Set(t.Context(), pool, policy, "admin", "")
	require.NoError(t, err)
	want := read(t, pool)
	had := want.keys()
	want.take(policy)
	tx := pgtest.Begin(t, pool)
	tables := []string{
		"agent_executions", "agent_events", "agent_messages", "agent_threads", "agent_approvals",
		"agent_webhook_deliveries",
	}
	for _, table := range tables {
		pgtest.Exec(t, tx, "select from "+table+" order by id limit 3 for update")
	}
	soon, stop := context.WithTimeout(t.Context(), time.Minute)
	defer stop()
	_, err = retention.Run(soon, pool, retention.Options{Restart: true})
	require.NoError(t, err, "beside locked rows")
	beside := read(t, pool).keys()
	for kind, ids := range want.keys() {
		gone := slices.DeleteFunc(slices.Clone(ids),
			func(id string) bool { return slices.Contains(beside[kind], id) })
		assert.Truef(t, len(gone) == 0, "%s that stay are gone: %v", kind, gone)
	}
	assert.Truef(t, len(beside["executions"]) < len(had["executions"]),
		"all %d executions are left", len(beside["executions"]))
	require.NoError(t, tx.Rollback(t.Context()))
	_, err = retention.Run(t.Context(), pool, retention.Options{Restart: true})
	require.NoError(t, err)
	assert.NoDiff(t, want.keys(), read(t, pool).keys())
}
