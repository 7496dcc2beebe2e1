package threads_test

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/enginetest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/threads"
	"github.com/lanekeeper/lanekeeper/trace"
)

func TestParkedThreadKeepsItsHolder(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	open(t, pool, "t")
	p := startProcess(t, pool, map[string]flow{"ask": func(ctx context.Context) (executions.Result, error) {
		if err := sendAll(ctx, "who are you?"); err != nil {
			return resultOf(err)
		}
		out, err := executions.Wait(ctx, "answer", executions.Response("t", 0))
		if err != nil {
			return resultOf(err)
		}
		var data struct{ Content string }
		if err := json.Unmarshal(out.Data, &data); err != nil {
			return resultOf(err)
		}
		return resultOf(sendAll(ctx, "hello, "+data.Content))
	}})
	id := p.startFlow(t, "ask")
	enginetest.Await(t, p.pool, id, executions.Waiting)
	held := pgtest.Value[bool](t, pool, `select parked and expires_at > clock_timestamp() + interval '100 years'
		from agent_locks where lane = 'thread:t'`)
	freed, err := threads.Clean(t.Context(), pool, slog.New(slog.DiscardHandler))
	assert.Truef(t, held && err == nil && len(freed) == 0, "parked %t, freed %+v, %v", held, freed, err)
	other := startClaimed(t, pool, "")
	s := sendAs(t, pool, other, "other")
	assert.Truef(t, s.Queued, "a message of another: %+v", s)
	got := p.receive(t, "t", "Ada")
	assert.Truef(t, len(got.Resumed) == 1 && got.Resumed[0] == id && got.Seq == 2, "received: %+v", got)
	enginetest.Await(t, p.pool, id, executions.Completed)
	pgtest.Eventually(t, func() bool { return len(sentContents(t, pool, "t")) == 4 }, "the queued message leaves")
	assert.NoDiff(t, []string{"who are you?", "Ada", "hello, Ada", "other"}, sentContents(t, pool, "t"))
	p.log.assertLine(t, `msg="lane acquired"`, "lane=thread:t", "owner="+id)
	p.log.assertLine(t, `msg="locks released"`, "count=1")
}

func TestRepeatedIncomingMessageCountsOnce(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	open(t, pool, "t")
	open(t, pool, "u")
	p := startProcess(t, pool, nil)
	receive := func(thread string) (got threads.ReceiveResult, err error) {
		err = postgres.InTx(t.Context(), pool, func(tx pgx.Tx) (err error) {
			got, err = threads.Receive(t.Context(), p.Engine, tx,
				threads.Incoming{ThreadID: thread, Content: "hola", ID: "wa 1"})
			return err
		})
		return got, err
	}
	var group errgroup.Group
	ids := make([]string, 8)
	for i := range ids {
		group.Go(func() error {
			got, err := receive("t")
			ids[i] = got.MessageID
			return err
		})
	}
	require.NoError(t, group.Wait())
	for _, id := range ids {
		assert.Truef(t, id == ids[0] && id != "", "message ids differ: %v", ids)
	}
	assert.Equal(t, 1, pgtest.Value[int](t, pool, `select count(*)::int from agent_messages`))
	_, err := receive("u")
	assert.Truef(t, postgres.IsCode(err, "22023"), "the id in another thread: %v", err)
	_, err = receive("none")
	assert.Error(t, err, "receive in an unknown thread")
}

func TestWaitStartsWhenQueuedQuestionIsSent(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	open(t, pool, "t")
	p := startProcess(t, pool, map[string]flow{"ask": func(ctx context.Context) (executions.Result, error) {
		if err := sendAll(ctx, "first", "second"); err != nil {
			return resultOf(err)
		}
		_, err := executions.Wait(ctx, "answer", executions.Response("t", time.Hour))
		return resultOf(err)
	}})
	a, b := startClaimed(t, pool, ""), ""
	sendAs(t, pool, a, "a")
	id := p.startFlow(t, "ask")
	enginetest.Await(t, p.pool, id, executions.Waiting)
	b = startClaimed(t, pool, "")
	sendAs(t, pool, b, "b")
	got := p.receive(t, "t", "for a")
	assert.Truef(t, len(got.Resumed) == 0, "resumed before the question was sent: %+v", got)
	queued := pgtest.Value[bool](t, pool, `select waiting_data ? 'queued_message'
		and waiting_until > clock_timestamp() + interval '29 days' from agent_executions where id = $1`, id)
	endExecution(t, pool, a, "completed")
	pgtest.Until(t, pool, true, `select not waiting_data ? 'queued_message'
			and waiting_until < clock_timestamp() + interval '61 minutes' from agent_executions where id = $1`, id)
	assert.True(t, queued, "the timeout started before the question was sent")
	// Both of its messages are sent, and it keeps the thread while it waits. b comes after it.
	assert.NoDiff(t, []string{"a", "for a", "first", "second"}, sentContents(t, pool, "t"))
	if !pgtest.Value[bool](t, pool, `select parked and execution_id = $1 from agent_locks where lane = 'thread:t'`, id) {
		t.Error("the thread is not parked with the asking execution")
	}
	got = p.receive(t, "t", "answer")
	assert.Truef(t, len(got.Resumed) == 1, "the answer: %+v", got)
	pgtest.Eventually(t, func() bool { return len(sentContents(t, pool, "t")) == 6 }, "b's message leaves")
}

func TestChildBorrowsThreadAndSiblingQueues(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	open(t, pool, "t")
	p := startProcess(t, pool, map[string]flow{
		"parent": func(ctx context.Context) (executions.Result, error) {
			if err := sendAll(ctx, "parent begins"); err != nil {
				return resultOf(err)
			}
			if _, err := executions.Trigger(ctx, "alone", executions.Child{Flow: "sibling"}); err != nil {
				return resultOf(err)
			}
			if _, err := executions.Trigger(ctx, "child", executions.Child{Flow: "child", Wait: true}); err != nil {
				return resultOf(err)
			}
			return resultOf(sendAll(ctx, "parent ends"))
		},
		"sibling": func(ctx context.Context) (executions.Result, error) { return resultOf(sendAll(ctx, "sibling")) },
		"child": func(ctx context.Context) (executions.Result, error) {
			if err := sendAll(ctx, "child asks"); err != nil {
				return resultOf(err)
			}
			if _, err := executions.Wait(ctx, "answer", executions.Response("t", 0)); err != nil {
				return resultOf(err)
			}
			return resultOf(sendAll(ctx, "child thanks"))
		},
	})
	id := p.startFlow(t, "parent")
	pgtest.Until(t, pool, 2, `select count(*)::int from agent_executions where flow = 'child'
			and status = 'waiting'
			or flow = 'sibling' and status = 'completed'`)
	p.receive(t, "t", "my answer")
	enginetest.Await(t, p.pool, id, executions.Completed)
	pgtest.Eventually(t, func() bool { return len(sentContents(t, pool, "t")) == 6 }, "all is said")
	want := []string{"parent begins", "child asks", "my answer", "child thanks", "parent ends", "sibling"}
	assert.NoDiff(t, want, sentContents(t, pool, "t"))
	child := pgtest.Value[string](t, pool, `select id::text from agent_executions where flow = 'child'`)
	p.log.assertLine(t, `msg="lane inherited"`, "lane=thread:t", "from="+id, "to="+child)
	p.log.assertLine(t, "level=WARN", `msg="lane busy"`, "lane=thread:t", "holder=")
}

// After its wait times out, a parent has the thread again, whether it or its child spoke first. The child's next
// message has to wait.
func TestTimedOutWaitReturnsThreadToParent(t *testing.T) {
	t.Parallel()
	for name, first := range map[string]bool{"parent first": true, "child first": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.DB(t)
			open(t, pool, "t")
			p := startProcess(t, pool, map[string]flow{
				"parent": func(ctx context.Context) (executions.Result, error) {
					if first {
						if err := sendAll(ctx, "parent begins"); err != nil {
							return resultOf(err)
						}
					}
					got, err := executions.Trigger(ctx, "child", executions.Child{
						Flow: "child", ThreadID: "t", Wait: true,
						Timeout: time.Second,
					})
					if err == nil && !got.TimedOut {
						err = errors.New("the wait did not time out")
					}
					if err == nil {
						err = sendAll(ctx, "parent goes on")
					}
					if err != nil {
						return resultOf(err)
					}
					_, err = executions.Wait(ctx, "hold", executions.Event("over", 0))
					return resultOf(err)
				},
				"child": func(ctx context.Context) (executions.Result, error) {
					if err := sendAll(ctx, "child asks"); err != nil {
						return resultOf(err)
					}
					if _, err := executions.Wait(ctx, "answer", executions.Event("answer", 0)); err != nil {
						return resultOf(err)
					}
					return resultOf(sendAll(ctx, "child ends"))
				},
			})
			x, _, err := p.Start(t.Context(), pool, executions.Spec{Flow: "parent", Surface: trace.Flow, ThreadID: "t"})
			require.NoError(t, err)
			want := []string{"child asks", "parent goes on"}
			if first {
				want = append([]string{"parent begins"}, want...)
			}
			pgtest.Until(t, pool, 1, `select count(*)::int from agent_executions where waiting_key = 'over'`)
			assert.NoDiff(t, want, sentContents(t, pool, "t"))
			for _, key := range []string{"answer", "over"} {
				_, err := p.Deliver(t.Context(), pool, "EVENT_COMPLETED", key, nil, "")
				require.NoError(t, err)
				if key == "answer" {
					pgtest.Until(t, pool, 1, `select count(*)::int from agent_messages where status = 'queued'`)
				}
			}
			enginetest.Await(t, p.pool, x.ID, executions.Completed)
			pgtest.Eventually(t, func() bool { return len(sentContents(t, pool, "t")) == len(want)+1 },
				"the child's message leaves")
		})
	}
}

// A child's message is queued while another execution has the thread. It is sent when its parent gets the thread.
func TestQueuedMessageOfChildIsSentByLoan(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	open(t, db, "t")
	other := startClaimed(t, db, "")
	parent := startClaimed(t, db, "")
	child := startClaimed(t, db, parent)
	stranger := startClaimed(t, db, "")
	sendAs(t, db, other, "other")
	sendAs(t, db, parent, "parent")
	sendAs(t, db, stranger, "stranger")
	sendAs(t, db, child, "child")
	endExecution(t, db, other, "completed")
	flush(t, db)
	assert.NoDiff(t, []string{"other", "parent", "child"}, sentContents(t, db, "t"))
}

func TestAdminMessagesQueue(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	open(t, db, "t")
	s := sendByAdmin(t, db, "t", "one")
	assert.Truef(t, !s.Queued, "in a free thread: %+v", s)
	a := startClaimed(t, db, "")
	sendAs(t, db, a, "a")
	s = sendByAdmin(t, db, "t", "two")
	assert.Truef(t, s.Queued, "in a held thread: %+v", s)
	endExecution(t, db, a, "completed")
	flush(t, db)
	// A chat turn in the lane's queue goes first.
	pgtest.Exec(t, db, `select await_agent_lock('thread:t', 'first', 60, 60)`)
	pgtest.Exec(t, db, `select await_agent_lock('thread:t', 'a turn', 60, 60)`)
	pgtest.Exec(t, db, `select release_agent_lock('thread:t', 'first')`)
	s = sendByAdmin(t, db, "t", "three")
	assert.Truef(t, s.Queued && s.Holder == "a turn", "behind a turn: %+v", s)
	b := startClaimed(t, db, "")
	s = sendAs(t, db, b, "b")
	assert.Truef(t, s.Queued, "behind a turn: %+v", s)
	pgtest.Exec(t, db, `select await_agent_lock('thread:t', 'a turn', 60, 60)`)
	pgtest.Exec(t, db, `select release_agent_lock('thread:t', 'a turn')`)
	flush(t, db)
	assert.NoDiff(t, []string{"one", "a", "two", "three", "b"}, sentContents(t, db, "t"))
}

func TestSendRejectsInvalidMessages(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	open(t, db, "t")
	a := startClaimed(t, db, "")
	for name, c := range map[string]struct {
		o    threads.Outgoing
		code string
	}{
		"empty":          {threads.Outgoing{ThreadID: "t", Content: " \n"}, ""},
		"no thread":      {threads.Outgoing{ThreadID: "none", Content: "x"}, ""},
		"channel":        {threads.Outgoing{ThreadID: "t", Content: "x", Channel: "pigeon"}, "22023"},
		"no target":      {threads.Outgoing{ThreadID: "t", Content: "x", Channel: "webhook"}, "22023"},
		"unknown target": {threads.Outgoing{ThreadID: "t", Content: "x", Channel: "webhook", Target: "crm"}, "22023"},
		"an old claim":   {threads.Outgoing{ThreadID: "t", Content: "x", ExecutionID: a, Claim: 7}, "LK001"},
	} {
		err := postgres.InTx(t.Context(), db, func(tx pgx.Tx) error {
			_, err := threads.SendTx(t.Context(), tx, c.o)
			return err
		})
		assert.Truef(t, err != nil && (c.code == "" || postgres.IsCode(err, c.code)),
			"%s: %v, want SQLSTATE %s", name, err, c.code)
	}
	assert.Equal(t, 0, pgtest.Value[int](t, db, `select count(*)::int from agent_messages`))
}
