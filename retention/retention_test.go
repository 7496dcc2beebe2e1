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
	"github.com/jackc/pgx/v5"

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

// randomPolicy returns a policy that keeps each kind for some days, or forever.
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

// TestPassDeletesWhatOracleDeletes prunes random states under random policies. A pass deletes exactly the rows that the
// oracle deletes: no unfinished work, and nothing that such work needs.
func TestPassDeletesWhatOracleDeletes(t *testing.T) {
	t.Parallel()
	for n := range rounds() {
		seed := uint64(time.Now().UnixNano()) + uint64(n)
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			pool := pgtest.DB(t)
			r := rand.New(rand.NewPCG(seed, 0))
			seedRandomState(t, pool, r)
			seedCauses(t, pool)
			policy := randomPolicy(r)
			_, err := retention.Set(t.Context(), pool, policy, "admin", "")
			require.NoError(t, err)
			want := readOracle(t, pool)
			before := want.remaining()
			want.prune(policy)
			counted, err := retention.Run(t.Context(), pool, retention.Options{DryRun: true})
			require.NoError(t, err)
			assert.NoDiff(t, before, readOracle(t, pool).remaining())
			done, err := retention.Run(t.Context(), pool, retention.Options{Restart: true})
			require.NoError(t, err)
			assert.Equal(t, "", cmp.Diff(want.remaining(), readOracle(t, pool).remaining()), policy)
			checkCounts(t, before, want.remaining(), counted, done)
			checkCauses(t, pool)
		})
	}
}

// checkCounts compares the reported numbers of rows with the numbers of deleted rows.
func checkCounts(t *testing.T, before, left map[string][]string, counted, done []retention.Result) {
	t.Helper()
	tables := map[string]string{
		"activity": "activity", "executions": "executions", "deliveries": "deliveries", "outbox": "outbox",
		"automation_runs":  "runs",
		"channel_messages": "channel_messages",
		"budgets":          "budgets", "hour_counts": "counts", "messages": "messages", "prompts": "prompts",
	}
	for _, d := range counted {
		if table, ok := tables[d.Kind]; ok && d.Removed != int64(len(before[table])-len(left[table])) {
			t.Errorf("the dry run reports %d rows of %s; the pass kept %d of %d", d.Removed, d.Kind, len(left[table]),
				len(before[table]))
		}
	}
	for _, d := range done {
		if table, ok := tables[d.Kind]; ok && len(d.Partitions) == 0 &&
			d.Removed != int64(len(before[table])-len(left[table])) {
			t.Errorf("the pass reports %d rows of %s; it kept %d of %d", d.Removed, d.Kind, len(left[table]), len(before[table]))
		}
	}
}

// TestInterruptedPassesReachSameState runs pairs of passes at once and cancels them repeatedly. The result is the same
// as that of one pass.
func TestInterruptedPassesReachSameState(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	r := rand.New(rand.NewPCG(7, 7))
	seedRandomState(t, pool, r)
	policy := map[string]string{}
	for _, kind := range []string{
		"activity", "executions", "events", "messages", "approvals", "automation_runs",
		"deliveries", "outbox", "budgets", "hour_counts", "prompts", "channel_messages",
	} {
		policy[kind] = "64d"
	}
	_, err := retention.Set(t.Context(), pool, policy, "admin", "")
	require.NoError(t, err)
	want := readOracle(t, pool)
	want.prune(policy)
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
	assert.NoDiff(t, want.remaining(), readOracle(t, pool).remaining())
	assert.Equal(t, 0, pgtest.Value[int](t, pool, `select count(*) from agent_retention_leftovers`))
}

func TestForeverKeepsAllRows(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	seedRandomState(t, pool, rand.New(rand.NewPCG(1, 2)))
	// All other kinds have the policy forever by default.
	pgtest.Exec(t, pool, `update agent_retention set keep = null
		where kind in ('deliveries', 'outbox', 'budgets', 'prompts', 'channel_messages', 'evals')`)
	before := readOracle(t, pool).remaining()
	done, err := retention.Run(t.Context(), pool, retention.Options{Restart: true})
	assert.Truef(t, err == nil && len(done) == 2 && done[0].Removed+done[1].Removed == 0, "%+v, %v", done, err)
	assert.NoDiff(t, before, readOracle(t, pool).remaining())
}

// TestLongestPolicyKeepsAllRows sets policies that reach back before 1970, the smallest time of an id.
func TestLongestPolicyKeepsAllRows(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	seedRandomState(t, pool, rand.New(rand.NewPCG(1, 2)))
	pgtest.Exec(t, pool, `update agent_retention set keep = '100 years'`)
	before := readOracle(t, pool).remaining()
	done, err := retention.Run(t.Context(), pool, retention.Options{Restart: true})
	require.NoError(t, err)
	for _, d := range done {
		assert.Truef(t, d.Removed == 0 && len(d.Partitions) == 0, "%+v", d)
	}
	assert.NoDiff(t, before, readOracle(t, pool).remaining())
}

func TestSetRejectsInvalidPolicies(t *testing.T) {
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
	assert.Truef(t, postgres.IsCode(err, "23514"), "a policy shorter than min_keep: %v", err)
	pgtest.Exec(t, pool, `select set_agent_retention('{"events": "91 days"}', p_reason => null)`)
}

// A pass skips rows that a client has locked, and deletes the others. The next pass deletes the formerly locked rows.
func TestPassSkipsLockedRows(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	seedRandomState(t, pool, rand.New(rand.NewPCG(seed, 0)))
	seedCauses(t, pool)
	policy := map[string]string{
		"activity": "7d", "executions": "1d", "events": "1d", "messages": "1d", "approvals": "1d", "automation_runs": "1d",
		"deliveries":       "1d",
		"channel_messages": "1d",
		"outbox":           "1d", "budgets": "31d", "hour_counts": "35d", "prompts": "1d",
	}
	_, err := retention.Set(t.Context(), pool, policy, "admin", "")
	require.NoError(t, err)
	want := readOracle(t, pool)
	before := want.remaining()
	want.prune(policy)
	tx := pgtest.Begin(t, pool)
	tables := []string{
		"agent_executions", "agent_events", "agent_messages", "agent_threads", "agent_approvals",
		"agent_webhook_deliveries",
	}
	for _, table := range tables {
		pgtest.Exec(t, tx, "select from "+table+" order by id limit 3 for update")
	}
	passCtx, stop := context.WithTimeout(t.Context(), time.Minute)
	defer stop()
	_, err = retention.Run(passCtx, pool, retention.Options{Restart: true})
	require.NoError(t, err, "pass with locked rows")
	remaining := readOracle(t, pool).remaining()
	for kind, ids := range want.remaining() {
		deleted := slices.DeleteFunc(slices.Clone(ids),
			func(id string) bool { return slices.Contains(remaining[kind], id) })
		assert.Truef(t, len(deleted) == 0, "%s that must stay are deleted: %v", kind, deleted)
	}
	assert.Truef(t, len(remaining["executions"]) < len(before["executions"]),
		"the pass deleted none of %d executions", len(remaining["executions"]))
	require.NoError(t, tx.Rollback(t.Context()))
	_, err = retention.Run(t.Context(), pool, retention.Options{Restart: true})
	require.NoError(t, err)
	assert.NoDiff(t, want.remaining(), readOracle(t, pool).remaining())
}

func TestPassReportsKindOfAnotherPass(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	_, err := retention.Set(t.Context(), pool, map[string]string{"events": "91d", "automation_runs": "91d"}, "admin", "")
	require.NoError(t, err)
	kinds := retention.Options{Kinds: []string{"events", "automation_runs"}}
	err = pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		pgtest.Exec(t, tx, `select pg_advisory_xact_lock(hashtextextended('retention events', 0))`)
		done, err := retention.Run(t.Context(), pool, kinds)
		assert.Truef(t, err == nil && len(done) == 2 && done[0].Later == "another pass works on it" && done[1].Later == "",
			"%+v, %v", done, err)
		return nil
	})
	require.NoError(t, err)
	done, err := retention.Run(t.Context(), pool, kinds)
	assert.Truef(t, err == nil && done[0].Later == "", "without another pass: %+v, %v", done, err)
}
