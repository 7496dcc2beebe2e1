package approvals_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/approvals"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/enginetest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/trace"
)

// The requester of a call cannot decide it, however often it tries and whoever else decides at the same time. Root may,
// and the audit log says so.
func TestFourEyes(t *testing.T) {
	t.Parallel()
	pool, _ := setUp(t)
	d := skills.Definition{
		Name: "drop", Description: "drops a table", Handler: "builtin:drop", Trust: skills.TrustApprove,
		Approvals: skills.Approvals{FourEyes: true},
	}
	changed, err := skills.Put(t.Context(), pool, d, skills.SourceWorkspace)
	if require.NoError(t, err); !changed {
		t.Fatal("the skill did not change")
	}
	s, err := skills.Get(t.Context(), pool, "drop")
	require.NoError(t, err)
	askBy := func(args, by string) string {
		t.Helper()
		id := requestApproval(t, pool, s, args)
		pgtest.Exec(t, pool, `update agent_approvals set requested_by = array[$2] where id = $1::text::uuid`, id, by)
		return id
	}
	id := askBy(`{"n": 1}`, "ana")
	for _, yes := range []bool{true, false} {
		_, err := approvals.Decide(t.Context(), pool, id, yes, "ana", "")
		assert.ErrorIs(t, err, approvals.ErrFourEyes, "the requester decided", yes)
	}
	var group sync.WaitGroup
	var mu sync.Mutex
	outcomes := map[string]int{}
	for i := range 12 { // two concurrent decisions
		who := []string{"ana", "bob"}[i%2]
		group.Go(func() {
			_, err := approvals.Decide(t.Context(), pool, id, true, who, "")
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err == nil:
				outcomes[who+" decided"]++
			case errors.Is(err, approvals.ErrFourEyes), errors.Is(err, approvals.ErrDecided):
			default:
				t.Error(err)
			}
		})
	}
	group.Wait()
	assert.Equal(t, "map[bob decided:1]", fmt.Sprint(outcomes))
	ctx := activity.WithActor(t.Context(), activity.Actor{Name: "root", Via: "http"})
	_, err = approvals.Decide(ctx, pool, askBy(`{"n": 2}`, "root"), true, "root", "an emergency")
	require.NoError(t, err)
	assert.Equal(t, "the requester decided", pgtest.Value[string](t, pool,
		`select input ->> 'four_eyes' from agent_activity where skill_name = 'decide_approval' and input ->> 'by' = 'root'`))
	_, err = pool.Exec(t.Context(), `update agent_approvals set four_eyes = false`)
	assert.Error(t, err, "an approval lost its four eyes")
	d.Trust = skills.TrustAuto
	assert.Contains(t, fmt.Sprint(skills.Validate(d)), "four_eyes needs trust: approve")
}

// setUpFourEyes creates a database with the skill drop, which needs an approval by a principal other than its
// requester.
func setUpFourEyes(t *testing.T) (*pgxpool.Pool, skills.Skill) {
	t.Helper()
	pool, _ := setUp(t)
	_, err := skills.Put(t.Context(), pool, skills.Definition{
		Name: "drop", Description: "drops a table", Handler: "builtin:drop", Trust: skills.TrustApprove,
		Approvals: skills.Approvals{FourEyes: true},
	}, skills.SourceWorkspace)
	require.NoError(t, err)
	s, err := skills.Get(t.Context(), pool, "drop")
	require.NoError(t, err)
	return pool, s
}

func TestOnlyRootDecidesWithoutRequester(t *testing.T) {
	t.Parallel()
	pool, s := setUpFourEyes(t)
	decide := func(id, by string) error {
		_, err := approvals.Decide(t.Context(), pool, id, true, by, "")
		return err
	}
	unknown := requestApproval(t, pool, s, `{"n": 1}`)
	assert.ErrorIs(t, decide(unknown, "ana"), approvals.ErrFourEyes)
	require.NoError(t, decide(unknown, "root"))
	require.NoError(t, decide(requestApprovalAs(t, pool, s, `{"n": 2}`, "", trace.Chat), "ana"))
	known := requestApprovalAs(t, pool, s, `{"n": 3}`, "ana", trace.Flow)
	assert.ErrorIs(t, decide(known, "ana"), approvals.ErrFourEyes)
	require.NoError(t, decide(known, "bob"))
	pgtest.Exec(t, pool, `select from decide_agent_approval($1::text::uuid, true, 'dba', '')`,
		requestApproval(t, pool, s, `{"n": 4}`))
	pgtest.Equal(t, pool, "approved", `select distinct status from agent_approvals`)
}

func TestDecisionClosesListOfRequesters(t *testing.T) {
	t.Parallel()
	pool, s := setUpFourEyes(t)
	id := requestApprovalAs(t, pool, s, `{}`, "ana", trace.Flow)
	assert.Equal(t, id, requestApprovalAs(t, pool, s, `{}`, "eve", trace.Flow))
	_, err := approvals.Decide(t.Context(), pool, id, true, "bob", "")
	require.NoError(t, err)
	assert.Equal(t, id, requestApprovalAs(t, pool, s, `{}`, "bob", trace.Flow))
	pgtest.Equal(t, pool, "ana eve", `select array_to_string(requested_by, ' ') from agent_approvals`)
}

// The sender of an event influences the execution's next calls, so it is a requester of them.
func TestEventSenderIsRequester(t *testing.T) {
	t.Parallel()
	pool, s := setUpFourEyes(t)
	e := enginetest.New(t, pool)
	for who, key := range map[string]string{"eve": "paid", "leo": "in a loop", "mallory": "other"} {
		require.NoError(t, postgres.InTx(t.Context(), pool, func(tx pgx.Tx) error {
			sent, err := e.Deliver(t.Context(), tx, "EVENT_COMPLETED", key, nil, "")
			if err != nil {
				return err
			}
			ctx := activity.WithActor(t.Context(), activity.Actor{Name: who})
			return activity.RecordRequester(ctx, tx, "event "+sent.EventID)
		}))
	}
	runFlowAs(t, pool, "ana", trace.Flow, func(ctx context.Context) error {
		if _, err := executions.Wait(ctx, "wait", executions.Event("paid", 0)); err != nil {
			return err
		}
		_, err := executions.Loop(ctx, "loop", 0, func(ctx context.Context, n int) (int, bool, error) {
			_, err := executions.Wait(ctx, "wait", executions.Event("in a loop", 0))
			return n, true, err
		})
		if err != nil {
			return err
		}
		_, err = approvals.Ask(ctx, approvals.Request{
			Skill: s.Name, SkillID: s.ID, Revision: s.Revision, Args: json.RawMessage(`{}`),
		})
		return err
	})
	pgtest.Equal(t, pool, "ana eve leo", `select array_to_string(requested_by, ' ') from agent_approvals`)
}

func TestMissingPrivilegeIsNotFourEyes(t *testing.T) {
	t.Parallel()
	pool, s := setUpFourEyes(t)
	id := requestApproval(t, pool, s, `{}`)
	config := pool.Config()
	config.AfterConnect = func(ctx context.Context, c *pgx.Conn) error {
		_, err := c.Exec(ctx, `set role pg_monitor`)
		return err
	}
	limited, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	defer limited.Close()
	_, err = approvals.Decide(t.Context(), limited, id, true, "root", "")
	assert.Truef(t, postgres.IsCode(err, "42501") && !errors.Is(err, approvals.ErrFourEyes),
		"a role without grants: %v", err)
}

// The audit log has a decision by SQL, marked as SQL.
func TestSQLDecisionIsAudited(t *testing.T) {
	t.Parallel()
	pool, s := setUp(t)
	id := requestApproval(t, pool, s, `{"n": 1}`)
	pgtest.Exec(t, pool, `select from decide_agent_approval($1::text::uuid, true, 'dba', 'by hand')`, id)
	assert.Equal(t, "dba sql decision: approve, approval "+id+", skill drop by hand", pgtest.Value[string](t, pool,
		`select concat_ws(' ', actor, via, object, reason) from agent_audit where act = 'decide_approval'`))
	a, err := approvals.Get(t.Context(), pool, id)
	require.NoError(t, err)
	assert.Equal(t, "dba via sql", a.Decider())
	_, err = json.Marshal(a)
	assert.NoError(t, err)
}
