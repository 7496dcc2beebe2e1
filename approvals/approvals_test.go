package approvals_test

import (
	"context"
	"encoding/json"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/approvals"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/enginetest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/trace"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// setUp creates a database with a built-in skill named drop, with trust approve.
func setUp(t *testing.T) (*pgxpool.Pool, skills.Skill) {
	t.Helper()
	pool := pgtest.DB(t)
	return pool, putDropSkill(t, pool, "drops a table")
}

// putDropSkill stores the skill drop. A changed description creates a new revision.
func putDropSkill(t *testing.T, pool *pgxpool.Pool, description string) skills.Skill {
	t.Helper()
	d := skills.Definition{Name: "drop", Description: description, Handler: "builtin:drop", Trust: skills.TrustApprove}
	_, err := skills.Put(t.Context(), pool, d, skills.SourceWorkspace)
	require.NoError(t, err)
	s, err := skills.Get(t.Context(), pool, "drop")
	require.NoError(t, err)
	return s
}

// runFlow runs fn in an execution without a requester.
func runFlow(t *testing.T, pool *pgxpool.Pool, fn func(ctx context.Context) error) executions.Execution {
	t.Helper()
	return runFlowAs(t, pool, "", trace.Flow, fn)
}

// runFlowAs runs fn in an execution that a principal requested. An empty principal means that nobody did.
func runFlowAs(
	t *testing.T, pool *pgxpool.Pool, principal string, surface trace.Surface, fn func(ctx context.Context) error,
) executions.Execution {
	t.Helper()
	e := enginetest.New(t, pool)
	enginetest.Register(t, e, "flow", func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
		return executions.Result{}, fn(ctx)
	})
	ctx := activity.WithActor(context.WithoutCancel(t.Context()), activity.Actor{Name: principal})
	x, err := e.RunSync(ctx, executions.Spec{Flow: "flow", Surface: surface})
	assert.NoError(t, err)
	return x
}

func requestApproval(t *testing.T, pool *pgxpool.Pool, s skills.Skill, args string) (id string) {
	t.Helper()
	return requestApprovalAs(t, pool, s, args, "", trace.Flow)
}

// requestApprovalAs requests the approval of a call in an execution of a principal, and returns the approval's id.
func requestApprovalAs(
	t *testing.T, pool *pgxpool.Pool, s skills.Skill, args, principal string, surface trace.Surface,
) (id string) {
	t.Helper()
	runFlowAs(t, pool, principal, surface, func(ctx context.Context) error {
		approval, err := approvals.Ask(ctx, approvals.Request{
			Skill: s.Name, SkillID: s.ID, Revision: s.Revision, Args: json.RawMessage(args),
		})
		assert.NoError(t, err)
		id = approval.ID
		return err
	})
	return id
}

func approve(t *testing.T, pool *pgxpool.Pool, id string) error {
	t.Helper()
	_, err := approvals.Decide(t.Context(), pool, id, true, "admin", "looks right")
	return err
}

// callApproved makes the approved call in an execution of its own. It returns the error of executions.Do.
func callApproved(t *testing.T, pool *pgxpool.Pool, id string, act func()) (result error) {
	t.Helper()
	runFlow(t, pool, func(ctx context.Context) error {
		x, _ := executions.Current(ctx)
		_, result = executions.Do(ctx, "approved "+id, executions.Call{
			Entry: activity.Entry{Skill: "drop"}, OnIntent: approvals.Use(id, x.ID, "approved "+id),
		}, func(context.Context, *executions.Effect) (bool, error) {
			act()
			return true, nil
		})
		return nil
	})
	return result
}

func TestSameCallHasOneApproval(t *testing.T) {
	t.Parallel()
	pool, s := setUp(t)
	first := requestApproval(t, pool, s, `{"table":"x","n":1}`)
	assert.Equal(t, first, requestApproval(t, pool, s, `{"n": 1, "table": "x"}`))
	assert.True(t, requestApproval(t, pool, s, `{"table":"y","n":1}`) != first, "another call led to the same approval")
	assert.Equal(t, 3, pgtest.Value[int](t, pool, `select count(distinct trace_id) from agent_activity
		where status = 'pending_approval' and skill_name = 'drop'`))
	pgtest.Equal(t, pool, 2, `select count(*) from agent_activity where output ->> 'approval_id' = $1`, first)
	pgtest.Equal(t, pool, true, `select activity_id = (select min(n.id::text)::uuid from agent_activity n
		where n.output ->> 'approval_id' = a.id::text) from agent_approvals a where id::text = $1`, first)
	pending, err := approvals.Pending(t.Context(), pool, 10)
	require.NoError(t, err)
	require.Equal(t, 2, len(pending), "pending approvals")
	assert.Equal(t, first, pending[0].ID)
}

func TestConcurrentDecisionsTakeEffectOnce(t *testing.T) {
	t.Parallel()
	pool, s := setUp(t)
	id := requestApproval(t, pool, s, `{}`)
	var won atomic.Int32
	var group errgroup.Group
	for i := range 8 {
		group.Go(func() error {
			_, err := approvals.Decide(t.Context(), pool, id, i%2 == 0, "admin", "")
			if err == nil {
				won.Add(1)
			} else if !errors.Is(err, approvals.ErrDecided) {
				return err
			}
			return nil
		})
	}
	require.NoError(t, group.Wait())
	assert.Equal(t, 1, int(won.Load()), "decisions that took effect")
}

func TestUnknownApprovalIsNotDecided(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	for _, unknown := range []string{"01890000-0000-7000-8000-000000000000", "no id"} {
		assert.ErrorIs(t, approve(t, pool, unknown), approvals.ErrNotFound, "decide", unknown)
	}
}

func TestApprovalIsUsedOnce(t *testing.T) {
	t.Parallel()
	pool, s := setUp(t)
	id := requestApproval(t, pool, s, `{}`)
	require.NoError(t, approve(t, pool, id))
	var acted, refused atomic.Int32
	var group sync.WaitGroup
	for range 6 {
		group.Go(func() {
			if err := callApproved(t, pool, id, func() { acted.Add(1) }); approvals.IsUnusable(err) {
				refused.Add(1)
			} else if err != nil {
				t.Error(err)
			}
		})
	}
	group.Wait()
	assert.Equal(t, 1, int(acted.Load()), "calls made")
	assert.Equal(t, 5, int(refused.Load()), "calls refused")
	assert.Equal(t, 1, pgtest.Value[int](t, pool, `select count(*) from agent_activity where skill_name = 'drop'
		and status = 'success'`))
	unused, err := approvals.Approved(t.Context(), pool, "", 10)
	require.NoError(t, err)
	assert.Equal(t, 0, len(unused), "approvals listed as approved")
}

// A terminal may send a reason that is not valid UTF-8.
func TestReasonMayBeInvalidUTF8(t *testing.T) {
	t.Parallel()
	pool, s := setUp(t)
	_, err := approvals.Decide(t.Context(), pool, requestApproval(t, pool, s, `{}`), true, "admin", "looks right \xff")
	assert.NoError(t, err)
}

func TestUnusableApprovalsAreRefused(t *testing.T) {
	t.Parallel()
	for name, prepare := range map[string]func(t *testing.T, pool *pgxpool.Pool, id string){
		"pending": func(*testing.T, *pgxpool.Pool, string) {},
		"rejected": func(t *testing.T, pool *pgxpool.Pool, id string) {
			_, err := approvals.Decide(t.Context(), pool, id, false, "admin", "no")
			require.NoError(t, err)
		},
		"expired": func(t *testing.T, pool *pgxpool.Pool, id string) {
			require.NoError(t, approve(t, pool, id))
			pgtest.Exec(t, pool, `update agent_approvals set expires_at = clock_timestamp() where id = $1`, id)
		},
	} {
		t.Run(name, func(t *testing.T) {
			pool, s := setUp(t)
			id := requestApproval(t, pool, s, `{}`)
			prepare(t, pool, id)
			err := callApproved(t, pool, id, func() { t.Error("acted") })
			assert.Truef(t, approvals.IsUnusable(err), "err = %v", err)
			unused, err := approvals.Approved(t.Context(), pool, "", 10)
			require.NoError(t, err)
			assert.Equal(t, 0, len(unused), "approvals listed as approved")
		})
	}
}

func TestExpiredApprovalIsReplaced(t *testing.T) {
	t.Parallel()
	pool, s := setUp(t)
	first := requestApproval(t, pool, s, `{}`)
	pgtest.Exec(t, pool, `update agent_approvals set expires_at = clock_timestamp() where id = $1`, first)
	assert.ErrorIs(t, approve(t, pool, first), approvals.ErrDecided)
	second := requestApproval(t, pool, s, `{}`)
	require.True(t, second != first, "the repeated request returned the expired approval")
	assert.NoError(t, approve(t, pool, second))
}

// A heartbeat may use the approval only at its next start.
func TestLateApprovalCanBeUsedForAWeek(t *testing.T) {
	t.Parallel()
	pool, s := setUp(t)
	id := requestApproval(t, pool, s, `{}`)
	pgtest.Exec(t, pool, `update agent_approvals set created_at = clock_timestamp() - interval '167 hours',
		expires_at = clock_timestamp() + interval '1 hour' where id = $1`, id)
	require.NoError(t, approve(t, pool, id))
	a, err := approvals.Get(t.Context(), pool, id)
	require.NoError(t, err)
	assert.Equal(t, approvals.Lifetime, a.ExpiresAt.Sub(*a.DecidedAt).Round(time.Minute))
}

func TestChangedSkillVoidsApprovals(t *testing.T) {
	t.Parallel()
	pool, s := setUp(t)
	pending, granted := requestApproval(t, pool, s, `{"n":1}`), requestApproval(t, pool, s, `{"n":2}`)
	require.NoError(t, approve(t, pool, granted))
	changed := putDropSkill(t, pool, "drops the whole schema")
	require.True(t, changed.Revision != s.Revision, "the skill has not changed")
	assert.ErrorIs(t, approve(t, pool, pending), approvals.ErrDecided)
	unused, err := approvals.Approved(t.Context(), pool, "", 10)
	require.NoError(t, err)
	assert.Equal(t, 0, len(unused), "approvals listed as approved")
	assert.True(t, requestApproval(t, pool, changed, `{"n":2}`) != granted, "the changed skill kept the approval")
}

func TestApprovalOfDisabledSkillIsNotListed(t *testing.T) {
	t.Parallel()
	pool, s := setUp(t)
	id := requestApproval(t, pool, s, `{}`)
	require.NoError(t, approve(t, pool, id))
	_, err := skills.Disable(t.Context(), pool, "drop", "admin", "for now", nil)
	require.NoError(t, err)
	unused, err := approvals.Approved(t.Context(), pool, "", 10)
	require.NoError(t, err)
	assert.Equal(t, 0, len(unused), "approvals listed while the skill is disabled")
	_, err = skills.Enable(t.Context(), pool, "drop", "admin", "again")
	require.NoError(t, err)
	unused, err = approvals.Approved(t.Context(), pool, "", 10)
	require.NoError(t, err)
	assert.Equal(t, 1, len(unused), "approvals listed as approved")
}

func TestHashIgnoresFormOfArguments(t *testing.T) {
	t.Parallel()
	hash := func(args string) string {
		h, err := approvals.Hash(json.RawMessage(args))
		require.NoError(t, err)
		return h
	}
	if hash(`{"a":1,"b":{"c":[1,2],"d":null}}`) != hash(` {"b":{"d":null,"c":[1,2]},"a":1}`) {
		t.Error("the order of keys matters")
	}
	for form, plain := range map[string]string{
		`[1e0]`: `[1]`, `{"a":{"b":-1.5E+2}}`: `{"a":{"b":-150}}`, `12.50e-1`: `1.250`, `1e22`: `10000000000000000000000`,
	} {
		assert.Equal(t, hash(plain), hash(form), form)
	}
	assert.True(t, hash(`1e99999999`) != hash(`1e99999998`), "two large numbers have one hash")
	// As in jsonb, a trailing zero counts.
	for _, other := range []string{`{"a":2}`, `{"a":"1"}`, `{"a":1.0}`, `{"a":9007199254740993}`, `{}`} {
		assert.Truef(t, hash(other) != hash(`{"a":1}`) && hash(other) != hash(`{"a":9007199254740992}`),
			"%s has another's hash", other)
	}
	_, err := approvals.Hash(json.RawMessage(`{"a":`))
	assert.Error(t, err, "invalid JSON has a hash")
}

// A request notifies the channels only while one is enabled, because each notification serialises commits.
func TestRequestNotifiesEnabledChannels(t *testing.T) {
	t.Parallel()
	pool, s := setUp(t)
	listener, err := pgtest.Dialer(t, pool)(t.Context())
	require.NoError(t, err)
	defer listener.Close(context.WithoutCancel(t.Context()))
	_, err = listener.Exec(t.Context(), `listen agent_channels`)
	require.NoError(t, err)
	// firstNotification requests an approval, sends a marker, and returns the first payload that arrives.
	firstNotification := func(args string) string {
		t.Helper()
		requestApproval(t, pool, s, args)
		pgtest.Exec(t, pool, `select pg_notify('agent_channels', 'marker')`)
		got, err := listener.WaitForNotification(t.Context())
		require.NoError(t, err)
		return got.Payload
	}
	assert.Equal(t, "marker", firstNotification(`{"table":"x"}`), "without a channel")
	pgtest.Exec(t, pool, `insert into agent_channels (name, type) values ('team', 'telegram')`)
	assert.Equal(t, "approval requested", firstNotification(`{"table":"y"}`), "with a channel")
}
