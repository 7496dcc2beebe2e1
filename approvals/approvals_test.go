package approvals_test

import (
	"context"
	"encoding/json"
	"errors"
	"sync"
	"sync/atomic"
	"testing"

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

// setUp creates a database with the skill drop, which needs approval.
func setUp(t *testing.T) (*pgxpool.Pool, skills.Skill) {
	t.Helper()
	pool := pgtest.DB(t)
	return pool, putSkill(t, pool, "drops a table")
}

// putSkill stores the skill drop. Another description is another revision.
func putSkill(t *testing.T, pool *pgxpool.Pool, description string) skills.Skill {
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

// runFlowAs runs fn in an execution that the principal by requested; empty for none.
func runFlowAs(
	t *testing.T, pool *pgxpool.Pool, by string, surface trace.Surface, fn func(ctx context.Context) error,
) executions.Execution {
	t.Helper()
	e := enginetest.New(t, pool)
	enginetest.Register(t, e, "flow", func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
		return executions.Result{}, fn(ctx)
	})
	ctx := activity.WithActor(context.WithoutCancel(t.Context()), activity.Actor{Name: by})
	x, err := e.RunSync(ctx, executions.Spec{Flow: "flow", Surface: surface})
	assert.NoError(t, err)
	return x
}

func ask(t *testing.T, pool *pgxpool.Pool, s skills.Skill, args string) (id string) {
	t.Helper()
	return askAs(t, pool, s, args, "", trace.Flow)
}

func askAs(t *testing.T, pool *pgxpool.Pool, s skills.Skill, args, by string, surface trace.Surface) (id string) {
	t.Helper()
	runFlowAs(t, pool, by, surface, func(ctx context.Context) error {
		asked, err := approvals.Ask(ctx, approvals.Request{
			Skill: s.Name, SkillID: s.ID, Revision: s.Revision,
			Args: json.RawMessage(args),
		})
		assert.NoError(t, err)
		id = asked.ID
		return err
	})
	return id
}

func approve(t *testing.T, pool *pgxpool.Pool, id string) error {
	t.Helper()
	_, err := approvals.Decide(t.Context(), pool, id, true, "admin", "looks right \xff") // as from a terminal
	return err
}

// use makes the approved call in its own execution. The error is the call's.
func use(t *testing.T, pool *pgxpool.Pool, id string, act func()) (result error) {
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
	first := ask(t, pool, s, `{"table":"x","n":1}`)
	assert.Equal(t, first, ask(t, pool, s, `{"n": 1, "table": "x"}`))
	assert.True(t, ask(t, pool, s, `{"table":"y","n":1}`) != first, "another call led to the same approval")
	assert.Equal(t, 2, pgtest.Value[int](t, pool, `select count(*) from agent_activity where status = 'pending_approval'
		and skill_name = 'drop'`))
	pending, err := approvals.Pending(t.Context(), pool, 10)
	assert.Truef(t, err == nil && len(pending) == 2 && pending[0].ID == first, "pending are %+v, %v", pending, err)
}

func TestConcurrentDecisionsTakeEffectOnce(t *testing.T) {
	t.Parallel()
	pool, s := setUp(t)
	id := ask(t, pool, s, `{}`)
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
	err := group.Wait()
	assert.Truef(t, err == nil && won.Load() == 1, "%d of 8 decided: %v", won.Load(), err)
	for _, unknown := range []string{"01890000-0000-7000-8000-000000000000", "no id"} {
		assert.ErrorIs(t, approve(t, pool, unknown), approvals.ErrNotFound, "decide", unknown)
	}
}

func TestApprovalIsUsedOnce(t *testing.T) {
	t.Parallel()
	pool, s := setUp(t)
	id := ask(t, pool, s, `{}`)
	require.NoError(t, approve(t, pool, id))
	var acted, refused atomic.Int32
	var all sync.WaitGroup
	for range 6 {
		all.Go(func() {
			if err := use(t, pool, id, func() { acted.Add(1) }); approvals.IsUsed(err) {
				refused.Add(1)
			} else if err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	assert.Truef(t, acted.Load() == 1 && refused.Load() == 5, "%d acted, %d were refused", acted.Load(), refused.Load())
	assert.Equal(t, 1, pgtest.Value[int](t, pool, `select count(*) from agent_activity where skill_name = 'drop'
		and status = 'success'`))
	unused, err := approvals.Approved(t.Context(), pool, 10)
	assert.Truef(t, err == nil && len(unused) == 0, "still unused: %+v, %v", unused, err)
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
			id := ask(t, pool, s, `{}`)
			prepare(t, pool, id)
			err := use(t, pool, id, func() { t.Error("acted") })
			assert.Truef(t, approvals.IsUsed(err), "err = %v", err)
			unused, err := approvals.Approved(t.Context(), pool, 10)
			assert.Truef(t, err == nil && len(unused) == 0, "offered: %+v, %v", unused, err)
		})
	}
}

func TestExpiredApprovalIsReplaced(t *testing.T) {
	t.Parallel()
	pool, s := setUp(t)
	first := ask(t, pool, s, `{}`)
	pgtest.Exec(t, pool, `update agent_approvals set expires_at = clock_timestamp() where id = $1`, first)
	assert.ErrorIs(t, approve(t, pool, first), approvals.ErrDecided)
	second := ask(t, pool, s, `{}`)
	require.True(t, second != first, "the repeated request returned the expired approval")
	assert.NoError(t, approve(t, pool, second))
}

func TestChangedSkillVoidsApprovals(t *testing.T) {
	t.Parallel()
	pool, s := setUp(t)
	pending, granted := ask(t, pool, s, `{"n":1}`), ask(t, pool, s, `{"n":2}`)
	require.NoError(t, approve(t, pool, granted))
	changed := putSkill(t, pool, "drops the whole schema")
	require.True(t, changed.Revision != s.Revision, "the skill has not changed")
	assert.ErrorIs(t, approve(t, pool, pending), approvals.ErrDecided)
	unused, err := approvals.Approved(t.Context(), pool, 10)
	assert.Truef(t, err == nil && len(unused) == 0, "offered: %+v, %v", unused, err)
	assert.True(t, ask(t, pool, changed, `{"n":2}`) != granted, "the changed skill kept the approval")
}

func TestApprovalOfDisabledSkillIsNotOffered(t *testing.T) {
	t.Parallel()
	pool, s := setUp(t)
	id := ask(t, pool, s, `{}`)
	require.NoError(t, approve(t, pool, id))
	_, err := skills.Disable(t.Context(), pool, "drop", "admin", "for now", nil)
	require.NoError(t, err)
	unused, err := approvals.Approved(t.Context(), pool, 10)
	assert.Truef(t, err == nil && len(unused) == 0, "offered while disabled: %+v, %v", unused, err)
	_, err = skills.Enable(t.Context(), pool, "drop", "admin", "again")
	require.NoError(t, err)
	unused, err = approvals.Approved(t.Context(), pool, 10)
	assert.Truef(t, err == nil && len(unused) == 1, "offered: %+v, %v", unused, err)
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
	for _, want := range []string{"the end", "approval requested"} {
		ask(t, pool, s, `{"table":"`+want+`"}`)
		pgtest.Exec(t, pool, `select pg_notify('agent_channels', 'the end')`)
		got, err := listener.WaitForNotification(t.Context())
		require.NoError(t, err)
		assert.Equal(t, want, got.Payload, "the first notification")
		pgtest.Exec(t, pool, `insert into agent_channels (name, type) values ('team', 'telegram') on conflict do nothing`)
	}
}
