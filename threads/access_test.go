package threads_test

import (
	"errors"
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/threads"
)

func TestNamesAreScopedByOwner(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	owners := []threads.Principal{
		threads.Key("site"), threads.Key("shop"), threads.Visitor("site", "a"), threads.Visitor("site", "b"),
		threads.Visitor("shop", "a"),
		{Kind: threads.ByWebhook, Owner: "site"},
		threads.Admin,
	}
	ids := map[string]threads.Principal{}
	for _, p := range owners {
		would, known, err := threads.Resolve(t.Context(), db, p, "talk")
		require.Truef(t, err == nil && (!known || p == threads.Admin), "%+v knows the thread before it begins it: %v", p, err)
		got, made, err := threads.Open(t.Context(), db, p, threads.Thread{Name: "talk"})
		assert.Truef(t, err == nil && made && got.ID == would && got.OwnerKind == p.Kind && got.Owner == p.Owner,
			"%+v begins %+v, %t, %v; want id %s", p, got, made, err, would)
		other, taken := ids[got.ID]
		assert.Truef(t, !taken, "%+v gets the thread of %+v", p, other)
		ids[got.ID] = p
		again, made, err := threads.Open(t.Context(), db, p, threads.Thread{Name: "talk"})
		assert.Truef(t, err == nil && !made && again.ID == got.ID, "%+v opens %+v, %t, %v again", p, again, made, err)
	}
	for id, owner := range ids { // an id is no name
		for _, p := range owners {
			if p == owner || p == threads.Admin {
				continue
			}
			got, _, err := threads.Resolve(t.Context(), db, p, id)
			assert.Truef(t, got != id && err == nil, "%+v gets into the thread of %+v by its id: %v", p, owner, err)
		}
	}
	_, _, err := threads.Open(t.Context(), db, threads.Principal{Kind: threads.ByFlow, Owner: "f"},
		threads.Thread{ID: "talk"})
	assert.ErrorIs(t, err, threads.ErrForeign, "a flow takes the admin's id")
	for _, wrong := range []threads.Principal{
		{Kind: threads.ByVisitor, Owner: "site"},
		{Kind: threads.ByKey, Owner: "site", Proof: "proof"},
		{Kind: "nobody"},
	} {
		got, _, err := threads.Open(t.Context(), db, wrong, threads.Thread{Name: "x"})
		assert.Error(t, err, wrong, "opened", got)
	}
	assert.Error(t, threads.OpenForFlow(t.Context(), db, "x", "", "", ""), "no flow began a thread")
	for _, to := range []threads.Principal{{Kind: "token", Owner: "x"}, threads.Admin, {Kind: threads.ByKey}} {
		_, err := threads.Grant(t.Context(), db, "talk", to, "x", "")
		assert.Error(t, err, "a thread is opened to", to)
	}
}

func TestConcurrentOpensCreateOneThread(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	for round := range 5 {
		var made atomic.Int32
		var group errgroup.Group
		for range 8 {
			group.Go(func() error {
				_, first, err := threads.Open(t.Context(), db, threads.Key("site"),
					threads.Thread{Name: fmt.Sprint("talk ", round)})
				if first {
					made.Add(1)
				}
				return err
			})
		}
		err := group.Wait()
		assert.Truef(t, err == nil && made.Load() == 1, "%d have begun it: %v", made.Load(), err)
	}
}

func TestJoinTokenIsUsedOnce(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	open(t, db, "maria")
	token, err := threads.Invite(t.Context(), db, threads.Invitation{ThreadID: "maria"})
	require.NoError(t, err)
	var joined atomic.Int32
	var group errgroup.Group
	for n := range 8 {
		group.Go(func() error {
			id, as, err := threads.Join(t.Context(), db, threads.Visitor("site", fmt.Sprint(n)), token.Secret, "job", true)
			if errors.Is(err, threads.ErrToken) {
				return nil
			}
			joined.Add(1)
			if err == nil && (id != "maria" || as != "job") {
				return fmt.Errorf("joined %s as %s", id, as)
			}
			return err
		})
	}
	require.NoError(t, group.Wait())
	assert.Equal(t, int32(1), joined.Load())
	_, err = threads.Invite(t.Context(), db, threads.Invitation{ThreadID: "nobody"})
	assert.ErrorIs(t, err, threads.ErrNotFound, "a token for no thread")
}

// An execution cannot send in a thread to which it has no access, even if SQL requests it.
func TestExecutionSendsOnlyWithAccess(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	visitors, _, err := threads.Open(t.Context(), db, threads.Key("site"), threads.Thread{Name: "talk"})
	require.NoError(t, err)
	require.NoError(t, threads.OpenForFlow(t.Context(), db, "begun", "greet", "", ""))
	const run = `insert into agent_executions (trace_id, surface, agent, flow, thread_id, parent_id, claim)
		values (lanekeeper.agent_trace_id('fl'), 'flow', 'a', $1, $2, $3, 1) returning id::text`
	one := func(flow string, thread, parent any) (id string) {
		t.Helper()
		require.NoError(t, db.QueryRow(t.Context(), run, flow, thread, parent).Scan(&id))
		return id
	}
	turn := one("chat", visitors.ID, nil)
	for who, c := range map[string]struct {
		execution, thread string
		may               bool
	}{
		"the visitor's turn":           {turn, visitors.ID, true},
		"its child":                    {one("other", nil, turn), visitors.ID, true},
		"another flow":                 {one("other", nil, nil), visitors.ID, false},
		"the flow that began it":       {one("greet", nil, nil), "begun", true},
		"one that was started in it":   {one("other", "begun", nil), "begun", true},
		"another flow, in that":        {one("other", nil, nil), "begun", false},
		"another flow, in an admin's":  {one("other", nil, nil), open(t, db, "admins").ID, true},
		"a flow in no thread there is": {one("other", nil, nil), "nowhere", false},
	} {
		err := postgres.InTx(t.Context(), db, func(tx pgx.Tx) error {
			var may bool
			err := tx.QueryRow(t.Context(), `select lanekeeper.agent_flow_may_join($1, null, $2)`, c.thread,
				c.execution).Scan(&may)
			assert.Truef(t, err == nil && may == c.may, "%s may: %t, %v", who, may, err)
			return nil
		})
		require.NoError(t, err)
	}
}

// A thread of an earlier release has no owner. A webhook endpoint may send in it only if webhooks have sent in it
// before.
func TestWebhookUsesOldThreadsOfWebhooksOnly(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	for thread, surface := range map[string]string{"of webhooks": "wh", "of a flow": "fl"} {
		_, err := db.Exec(t.Context(), `
			with thread as (insert into agent_threads (id, channel, owner_kind) values ($1, 'chat', '') returning id),
			run as (insert into agent_executions (trace_id, surface, agent, flow)
			  values (lanekeeper.agent_trace_id($2), 'flow', 'a', 'greet') returning id)
			insert into agent_messages (thread_id, seq, turn, role, content, status, tokens, execution_id)
			select t.id, 1, 1, 'assistant', 'Hello.', 'sent', 1, r.id from thread t, run r`, thread, surface)
		require.NoError(t, err)
		id, known, err := threads.Resolve(t.Context(), db, threads.Principal{Kind: threads.ByWebhook, Owner: "shop"}, thread)
		assert.Truef(t, err == nil && known == (surface == "wh") && (!known || id == thread),
			"%s: %s, %t, %v", thread, id, known, err)
	}
}
