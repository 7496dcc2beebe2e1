package executions_test

import (
	"context"
	"encoding/json"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/enginetest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/trace"
)

func TestListFiltersByLabel(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	e := enginetest.New(t, pool)
	enginetest.Register(t, e, "order", func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
		return executions.Result{}, executions.SetLabels(ctx, "label", executions.Labels{"customer": "Ana", "order": "A-2"})
	})
	start := func(e *executions.Engine, key string, labels executions.Labels) (string, bool) {
		t.Helper()
		x, created, err := e.Start(t.Context(), pool, executions.Spec{
			Flow: "order", Surface: trace.Flow, DedupeKey: key, Labels: labels,
		})
		require.NoError(t, err)
		return x.ID, created
	}
	first, _ := start(e, "one", executions.Labels{"order": "A-1"})
	again, created := start(e, "one", executions.Labels{"order": "other"})
	assert.Truef(t, !created && again == first, "a second start is %s, created %v", again, created)
	stop := testkit.Run(t, e.Run)
	second, _ := start(e, "", executions.Labels{"order": "A-1"})
	for _, id := range []string{first, second} {
		enginetest.Await(t, pool, id, executions.Completed)
	}
	stop()
	third, _ := start(e, "", executions.Labels{"shop": "A-2"})
	found := func(f executions.Filter) (ids []string) {
		t.Helper()
		list, err := executions.List(t.Context(), pool, f)
		require.NoError(t, err)
		for _, x := range list {
			ids = append(ids, x.ID)
		}
		return ids
	}
	for _, c := range []struct {
		f    executions.Filter
		want []string
	}{
		{executions.Filter{Label: "A-2"}, []string{third, second, first}},
		{executions.Filter{Label: "order=A-2"}, []string{second, first}},
		{executions.Filter{Label: "A-2", Status: "pending"}, []string{third}},
		{executions.Filter{Label: "A-2", Before: third, Limit: 1}, []string{second}},
		{executions.Filter{Label: "A-1"}, nil}, // replaced
		{executions.Filter{Label: "A"}, nil},
		{executions.Filter{Label: "order="}, nil},
	} {
		got := found(c.f)
		assert.Truef(t, strings.Join(got, " ") == strings.Join(c.want, " "), "%+v finds %v, want %v", c.f, got, c.want)
	}
	labels, err := executions.LabelsOf(t.Context(), pool, []string{first, third})
	require.NoError(t, err)
	assert.Truef(t, labels[first]["customer"] == "Ana" && len(labels[first]) == 2 && len(labels[third]) == 1,
		"labels %v", labels)
	pgtest.Exec(t, pool, `delete from agent_executions where id = @id`, postgres.Strict{"id": first})
	pgtest.Equal(t, pool, 0, `select count(*) from agent_execution_labels where execution_id = $1`, first)
}

func TestDefaultLabelsFillUpThoseOfTheStart(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	e := enginetest.New(t, pool)
	enginetest.Register(t, e, "order", func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
		own := executions.Labels{}
		for name := range strings.SplitSeq("abcdefgh", "") {
			own[name] = "own"
		}
		return executions.Result{}, executions.SetDefaultLabels(ctx, "labels", own)
	})
	testkit.Run(t, e.Run)
	x, _, err := e.Start(t.Context(), pool, executions.Spec{
		Flow: "order", Surface: trace.Flow, Labels: executions.Labels{"a": "given", "order": "A-1"},
	})
	require.NoError(t, err)
	enginetest.Await(t, pool, x.ID, executions.Completed)
	pgtest.Equal(t, pool, "a=given b=own c=own d=own e=own f=own g=own order=A-1", `
		select string_agg(name || '=' || value, ' ' order by name) from agent_execution_labels`)
}

func TestForkKeepsLabels(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	e := enginetest.New(t, pool)
	enginetest.Register(t, e, "order", func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
		return executions.Result{}, executions.SetLabels(ctx, "label", executions.Labels{"customer": "Ana"})
	})
	testkit.Run(t, e.Run)
	labels := executions.Labels{"order": "A-1"}
	x, _, err := e.Start(t.Context(), pool, executions.Spec{Flow: "order", Surface: trace.Flow, Labels: labels})
	require.NoError(t, err)
	enginetest.Await(t, pool, x.ID, executions.Completed)
	fork, err := e.Fork(t.Context(), pool, executions.ForkSpec{ID: x.ID})
	require.NoError(t, err)
	of, err := executions.LabelsOf(t.Context(), pool, []string{fork.ID})
	require.NoError(t, err)
	assert.NoDiff(t, executions.Labels{"customer": "Ana", "order": "A-1"}, of[fork.ID])
}

func TestStartRejectsInvalidLabels(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	e := enginetest.New(t, pool)
	many := executions.Labels{}
	for name := range strings.SplitSeq("abcdefghi", "") {
		many[name] = "x"
	}
	for _, labels := range []executions.Labels{
		many, {"Order": "x"}, {"": "x"}, {"order": ""}, {"order": "a\nb"}, {"order": strings.Repeat("x", 201)},
	} {
		_, _, err := e.Start(t.Context(), pool, executions.Spec{Flow: "order", Surface: trace.Flow, Labels: labels})
		assert.ErrorIs(t, err, executions.ErrLabels, labels)
	}
	pgtest.Equal(t, pool, 0, `select count(*) from agent_executions`)
	assert.Equal(t, "a b"+strings.Repeat("é", 196), executions.LabelValue(" a\n\x00b"+strings.Repeat("é", 300)))
}
