package operate_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/surfaces/operate"
)

func TestSessionHoldsLane(t *testing.T) {
	t.Parallel()
	w := newTestDatabase(t, modeltest.Text("One."))
	p := w.process(t, false)
	s := p.open(t, "")
	require.NoError(t, s.Hold(t.Context(), false))
	before := w.laneHolder(t)
	done, err := s.Turn(t.Context(), "Hello.", false, func(operate.Event) {})
	require.NoError(t, err)
	if now := w.laneHolder(t); before == "" || now != before || !strings.HasPrefix(now, done.TraceID+"/") {
		t.Errorf("held by %q before and %q after; the turn's trace is %s", before, now, done.TraceID)
	}
	if h, err := p.Holder(t.Context()); err != nil || !h.Held || h.SessionID != s.ID() || h.TraceID != done.TraceID {
		t.Errorf("the holder is %+v, %v", h, err)
	}
	if err := s.Close(t.Context()); err != nil || w.laneHolder(t) != "" {
		t.Errorf("after the session the lane is held by %q: %v", w.laneHolder(t), err)
	}
}

func TestIdleSessionFreesLane(t *testing.T) {
	t.Parallel()
	w := newTestDatabase(t, modeltest.Text("One."), modeltest.Text("Two."))
	p := w.process(t, false, func(o *operate.Options) { o.Idle = 200 * time.Millisecond })
	s := p.open(t, "")
	for range 2 {
		_, err := s.Turn(t.Context(), "Hello.", false, func(operate.Event) {})
		require.NoError(t, err)
		assert.True(t, w.laneHolder(t) != "", "the lane is free at once")
		pgtest.Eventually(t, func() bool { return w.laneHolder(t) == "" }, "the lane is freed")
	}
}

// Even the shortest idle timeout frees the lane, also just when the session becomes idle.
func TestNewIdleSessionFreesLane(t *testing.T) {
	t.Parallel()
	w := newTestDatabase(t)
	s := w.process(t, false, func(o *operate.Options) { o.Idle = time.Nanosecond }).open(t, "")
	for range 30 {
		require.NoError(t, s.Hold(t.Context(), false))
		pgtest.Eventually(t, func() bool { return w.laneHolder(t) == "" }, "the lane is freed")
	}
}

// A session closed during the acquire does not keep the lane.
func TestClosedSessionFreesLane(t *testing.T) {
	t.Parallel()
	w := newTestDatabase(t)
	p := w.process(t, false)
	for range 30 {
		s := p.open(t, "")
		var group errgroup.Group
		group.Go(func() error { return s.Hold(t.Context(), false) })
		group.Go(func() error { return s.Close(t.Context()) })
		require.NoError(t, group.Wait())
		pgtest.Eventually(t, func() bool { return w.laneHolder(t) == "" }, "the lane is freed")
	}
}

func TestSessionReusesID(t *testing.T) {
	t.Parallel()
	w := newTestDatabase(t, modeltest.Text("One."))
	other, p := w.process(t, false).open(t, ""), w.process(t, false)
	require.NoError(t, other.Hold(t.Context(), false))
	s := p.open(t, "ses_again")
	if err := s.Hold(t.Context(), false); !errors.Is(err, lanes.ErrBusy) { // it frees the lane
		t.Fatal(err)
	}
	require.NoError(t, other.Close(t.Context()))
	require.NoError(t, s.Hold(t.Context(), false))
	_, err := p.open(t, "ses_again").Turn(t.Context(), "Hello.", false, func(operate.Event) {})
	assert.NoError(t, err, "the session's own lane is in its way")
	if err := p.Close(t.Context()); err != nil || w.laneHolder(t) != "" {
		t.Errorf("after the process has closed its sessions the lane is held by %q: %v", w.laneHolder(t), err)
	}
}

func TestLongTurnIsNotIdle(t *testing.T) {
	t.Parallel()
	w := newTestDatabase(t, modeltest.ToolCall("slow", `{}`), modeltest.Text("Done."))
	p := w.process(t, false, func(o *operate.Options) { o.Idle = 50 * time.Millisecond })
	s := p.open(t, "")
	w.builtin(t, "slow", "", func(context.Context, skills.Call) (any, error) {
		timer := time.NewTimer(300 * time.Millisecond)
		defer timer.Stop()
		<-timer.C
		assert.True(t, w.laneHolder(t) != "", "the lane was freed during the turn")
		return "late", nil
	})
	require.NoError(t, s.Hold(t.Context(), false))
	_, err := s.Turn(t.Context(), "Hello.", false, func(operate.Event) {})
	require.NoError(t, err)
}

func TestAbandonedWaitCleansUp(t *testing.T) {
	t.Parallel()
	w := newTestDatabase(t)
	first, other := w.process(t, false).open(t, ""), w.process(t, false)
	require.NoError(t, first.Hold(t.Context(), false))
	b := other.send(t, other.open(t, ""), "Let me in.", true)
	pgtest.Until(t, w.pool, 1, `select count(*) from agent_lock_waiters where lane = 'operate'`)
	b.leave(operate.ErrInterrupt)
	_, err := b.wait(t)
	assert.ErrorIs(t, err, operate.ErrInterrupt, "the wait ended with")
	pgtest.Equal(t, w.pool, 0,
		`select (select count(*) from agent_lock_waiters) + (select count(*) from agent_executions)`)
}

func TestLostLaneStopsTurn(t *testing.T) {
	t.Parallel()
	w := newTestDatabase(t, modeltest.ToolCall("slow", `{}`))
	stopped := make(chan struct{})
	w.builtin(t, "slow", "", func(ctx context.Context, _ skills.Call) (any, error) {
		<-ctx.Done()
		close(stopped)
		return nil, ctx.Err()
	})
	p := w.process(t, false)
	s := p.open(t, "")
	b := p.send(t, s, "Be slow.", false)
	waitEvent[operate.ToolCall](t, b, "tool")
	broken, err := lanes.Break(t.Context(), w.pool, operate.Lane, "the test wants it")
	require.True(t, err == nil && broken, broken, err)
	start := waitEvent[operate.Start](t, b, "start")
	_, err = b.wait(t)
	assert.Truef(t, err != nil && strings.Contains(err.Error(), "lane lost"), "the turn ended with %v", err)
	<-stopped
	assert.Equal(t, executions.Failed, w.execution(t, start.ExecutionID).Status)
	pgtest.Equal(t, w.pool, 0, `select count(*) from agent_activity where status = 'running'`)
}

func TestTurnsDoNotOverlap(t *testing.T) {
	t.Parallel()
	w := newTestDatabase(t)
	var inside, most, taken atomic.Int64
	w.builtin(t, "look", "", func(context.Context, skills.Call) (any, error) {
		most.Store(max(most.Load(), inside.Add(1)))
		defer inside.Add(-1)
		taken.Add(1)
		timer := time.NewTimer(5 * time.Millisecond)
		defer timer.Stop()
		<-timer.C
		return "seen", nil
	})
	w.model.Handle(callLookOnce)
	processes := []*process{w.process(t, false), w.process(t, true)}
	var admins sync.WaitGroup
	for n := range 6 {
		admins.Go(func() {
			p := processes[n%2]
			s, err := p.Session("", false)
			if err != nil {
				t.Error(err)
				return
			}
			for range 3 {
				_, err := s.Turn(t.Context(), "Look.", true, func(operate.Event) {})
				assert.NoError(t, err)
			}
		})
	}
	admins.Wait()
	assert.Truef(t, most.Load() == 1 && taken.Load() == 18, "%d turns at once, %d in all", most.Load(), taken.Load())
}

func TestSessionRunsOneTurnAtATime(t *testing.T) {
	t.Parallel()
	w := newTestDatabase(t, modeltest.ToolCall("slow", `{}`), modeltest.Text("One."), modeltest.Text("Two."))
	release := make(chan struct{})
	w.builtin(t, "slow", "", func(context.Context, skills.Call) (any, error) {
		<-release
		return "ok", nil
	})
	p := w.process(t, false)
	s := p.open(t, "")
	b := p.send(t, s, "Be slow.", false)
	waitEvent[operate.ToolCall](t, b, "tool")
	_, err := s.Turn(t.Context(), "And this?", false, func(operate.Event) {})
	assert.ErrorIs(t, err, operate.ErrBusySession, "the second turn ended with")
	later := p.send(t, s, "And this?", true)
	close(release)
	done, err := b.wait(t)
	assert.Truef(t, err == nil && done.Text == "One.", "first: %+v, %v", done, err)
	done, err = later.wait(t)
	assert.Truef(t, err == nil && done.Text == "Two.", "second: %+v, %v", done, err)
}
