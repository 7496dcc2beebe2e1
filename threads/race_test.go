package threads_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/threads"
	"github.com/lanekeeper/lanekeeper/trace"
)

// Fifty executions send three messages each in one thread, while claims are lost and some executions are cancelled.
// Each one's messages are sent once and in order. No other message comes between those of a holder. Queued messages
// leave in the order of the queue.
func TestFiftyExecutionsShareThread(t *testing.T) {
	t.Parallel()
	const racers, words = 50, 3
	pool := pgtest.DB(t)
	open(t, pool, "t")
	startDispatcher(t, pool)
	var paused atomic.Int32
	p := startProcess(t, pool, map[string]flow{"speak": func(ctx context.Context) (executions.Result, error) {
		x, _ := executions.Current(ctx)
		for n := range words {
			if err := sendAll(ctx, fmt.Sprintf("%s %d", x.ID, n)); err != nil {
				return resultOf(err)
			}
			if n == 1 && paused.Add(1)%5 == 0 {
				if _, err := executions.Wait(ctx, "nap", executions.Delay(50*time.Millisecond)); err != nil {
					return resultOf(err)
				}
			}
		}
		return resultOf(nil)
	}})
	ids := make([]string, racers)
	for i := range ids {
		x, _, err := p.Start(t.Context(), pool, executions.Spec{
			Flow: "speak", Surface: trace.Flow,
			ThreadID: "t", MaxAttempts: 100,
		})
		require.NoError(t, err)
		ids[i] = x.ID
	}
	asked, cancelled := map[string]bool{}, map[string]bool{} // a cancel blocked by a lock completes later
	deadline := time.Now().Add(pgtest.Timeout)
	for ended := 0; ended < racers; {
		require.Truef(t, !time.Now().After(deadline), "%d of %d have ended", ended, racers)
		id := ids[rand.N(racers)]
		if len(asked) < 8 && rand.N(10) == 0 {
			_, err := p.Cancel(t.Context(), id, "admin", "a test")
			require.NoError(t, err)
			asked[id] = true
		} else {
			// A claim is lost: its run is fenced off, and another starts again from the checkpoints.
			pgtest.Exec(t, pool, `
				update agent_executions set claimed_by = null, claim = claim + 1, wake = wake + 1, hinted_at = 'epoch'
				 where id = (select id from agent_executions where id = $1 and status = 'running'
				   and claimed_by is not null for update skip locked)`, id)
		}
		ended = pgtest.Value[int](t, pool, `select count(*)::int from agent_executions where flow = 'speak'
			and completed_at is not null`)
	}
	pgtest.Until(t, pool, 0, `select count(*)::int from agent_messages where status = 'queued'`)
	for _, id := range pgtest.Column[string](t, pool, `select id::text from agent_executions where status = 'cancelled'`) {
		assert.True(t, asked[id], id, "was cancelled without a request")
		cancelled[id] = true
	}
	assertOrder(t, sentContents(t, pool, "t"), ids, cancelled, words)
	// Seqs have no gaps, and no queued message has overtaken one of another execution.
	assert.Equal(t, 0, pgtest.Value[int](t, pool,
		`select (max(seq) - count(seq))::int from agent_messages where thread_id = 't'`))
	assert.Equal(t, 0, pgtest.Value[int](t, pool,
		`select count(*)::int from agent_locks where lane = 'thread:t' and locked_by <> ''`))
}

// assertOrder checks that each execution's messages were sent once and in order. All must be there unless it was
// cancelled.
func assertOrder(t *testing.T, sent, ids []string, cancelled map[string]bool, words int) {
	t.Helper()
	next := map[string]int{}
	for _, line := range sent {
		id, n, _ := strings.Cut(line, " ")
		assert.Equal(t, fmt.Sprint(next[id]), n, id, next[id])
		next[id]++
	}
	for _, id := range ids {
		assert.Truef(t, next[id] == words || cancelled[id], "%s said %d of %d", id, next[id], words)
	}
	assert.Equal(t, len(sent), len(slices.Compact(slices.Sorted(slices.Values(sent)))))
}

// No other message interrupts the holder of a thread, however many executions want to send.
func TestHolderIsNotInterrupted(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	open(t, pool, "t")
	startDispatcher(t, pool)
	p := startProcess(t, pool, map[string]flow{"speak": func(ctx context.Context) (executions.Result, error) {
		x, _ := executions.Current(ctx)
		for n := range 4 {
			s, err := threads.Send(ctx, threads.Outgoing{ThreadID: "t", Content: fmt.Sprintf("%s %d", x.ID, n)})
			if err != nil {
				return resultOf(err)
			}
			if s.Queued && n == 0 { // it continues when it has the thread
				if _, err := executions.Wait(ctx, "turn", executions.Response("t", time.Hour)); err != nil {
					return resultOf(err)
				}
			}
		}
		return resultOf(nil)
	}})
	for range 10 {
		p.startFlow(t, "speak")
	}
	pgtest.Eventually(t, func() bool {
		if pgtest.Value[bool](t, pool, `select exists (select from agent_executions x where x.status = 'waiting'
			and not x.waiting_data ? 'queued_message')`) {
			p.receive(t, "t", "go on")
		}
		return pgtest.Value[int](t, pool, `select count(*)::int from agent_executions where completed_at is not null`) == 10
	}, "all have spoken")
	var speakers []string
	for _, line := range sentContents(t, pool, "t") {
		if id, _, speaks := strings.Cut(line, " "); speaks && line != "go on" &&
			(len(speakers) == 0 || speakers[len(speakers)-1] != id) {
			speakers = append(speakers, id)
		}
	}
	assert.Equal(t, 10, len(speakers))
}

// The holder of a thread has fenced a write by the token of its lane. Then another wants to send. The holder of the
// lane's row and its waiter do not wait for each other.
func TestFencedHolderAndWaiterDoNotDeadlock(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	open(t, pool, "t")
	holder, other := startClaimed(t, pool, ""), startClaimed(t, pool, "")
	sendAs(t, pool, holder, "first")
	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
	pgtest.Exec(t, tx, `select fence_agent_lock('thread:t', (select fencing_token from agent_locks
		where lane = 'thread:t'))`)
	const send = `select lanekeeper.send_agent_message('t', x.id, x.claim, $2) from agent_executions x where x.id = $1`
	sent := make(chan error, 1)
	go func() {
		_, err := pool.Exec(t.Context(), send, other, "later")
		sent <- err
	}()
	pgtest.AwaitBlocked(t, pool, 1, "send_agent_message")
	pgtest.Exec(t, tx, send, holder, "second")
	assert.NoError(t, tx.Commit(t.Context()))
	assert.NoError(t, <-sent, "send of the other execution")
	got := sentContents(t, pool, "t")
	assert.Truef(t, slices.Equal(got, []string{"first", "second"}), "the sent messages are %q", got)
}

// A thread's lane has no row yet. Of concurrent senders one gets the thread, and the messages of the others are queued.
func TestOneOfConcurrentFirstSendersGetsThread(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	open(t, pool, "t")
	for range 10 {
		pgtest.Exec(t, pool, `delete from agent_messages`)
		pgtest.Exec(t, pool, `delete from agent_locks`)
		queued := make(chan bool, 6)
		for range cap(queued) {
			id := startClaimed(t, pool, "")
			go func() {
				var later bool
				err := pool.QueryRow(t.Context(), `select m.queued from agent_executions x,
					lanekeeper.send_agent_message('t', x.id, x.claim, 'hola') m where x.id = $1`, id).Scan(&later)
				assert.NoError(t, err)
				queued <- later
			}()
		}
		first := 0
		for range cap(queued) {
			if !<-queued {
				first++
			}
		}
		assert.Equal(t, 1, first)
	}
}
