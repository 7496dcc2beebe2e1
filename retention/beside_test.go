package retention_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/retention"
	"github.com/lanekeeper/lanekeeper/trace"
)

// beside is an engine that works while retention deletes rows that ended a moment ago. Its sessions have a short lock
// timeout.
type beside struct {
	t      *testing.T
	pool   *pgxpool.Pool // for the engine, its clients and the readers
	engine *executions.Engine

	mu     sync.Mutex
	truth  map[string][]string // the steps and received values of each execution so far
	traces []string
}

// note adds to the record of an execution.
func (b *beside) note(ctx context.Context, what string) {
	x, _ := executions.Current(ctx)
	b.noteOf(x.ID, what)
}

func (b *beside) noteOf(id, what string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.truth[id] = append(b.truth[id], what)
}

type errand struct {
	N     int  `json:"n"`
	Stays bool `json:"stays"`
}

// errand has a step, a child that ends soon, an event long before its wait, and an end that may be far away.
func (b *beside) errand(ctx context.Context, raw json.RawMessage) (executions.Result, error) {
	var in errand
	if err := json.Unmarshal(raw, &in); err != nil {
		return executions.Result{}, err
	}
	for _, name := range []string{"one", "two"} {
		if _, err := executions.Step(ctx, name, func(context.Context) (string, error) { return name, nil }); err != nil {
			return executions.Result{}, err
		}
		b.note(ctx, name)
	}
	child, err := executions.Trigger(ctx, "child", executions.Child{Flow: "child", Wait: true})
	if err != nil || !child.Success {
		return executions.Result{}, errors.Join(err, fmt.Errorf("child: %+v", child))
	}
	b.note(ctx, "child")
	b.noteOf(child.ExecutionID, "done")
	if in.Stays {
		if _, err := executions.Wait(ctx, "go", executions.Event(fmt.Sprintf("go %d", in.N), time.Hour)); err != nil {
			return executions.Result{}, err
		}
	}
	early, err := executions.Wait(ctx, "early", executions.Event(fmt.Sprintf("early %d", in.N), time.Hour))
	if err != nil {
		return executions.Result{}, err
	}
	return executions.Result{Value: map[string]any{"child": child.ExecutionID, "early": early.Data}}, nil
}

func (b *beside) child(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
	_, err := executions.Step(ctx, "done", func(context.Context) (string, error) { return "done", nil })
	return executions.Result{Value: "done"}, err
}

// start runs the engine until the test ends.
func (b *beside) start() {
	engine, err := executions.New(b.pool, executions.Options{
		Keeper: lanes.NewKeeper(b.pool, lanes.Options{}), Logger: slog.New(slog.DiscardHandler),
		SweepEvery: 200 * time.Millisecond, PollOnly: true,
	})
	require.NoError(b.t, err)
	b.engine = engine
	require.NoError(b.t, errors.Join(engine.Register("errand", b.errand), engine.Register("child", b.child)))
	ctx, cancel := context.WithCancel(context.WithoutCancel(b.t.Context()))
	var group errgroup.Group
	group.Go(func() error { return engine.Run(ctx) })
	b.t.Cleanup(func() {
		cancel()
		assert.NoError(b.t, group.Wait(), "engine")
	})
}

// begin starts an errand, raises its early event, and returns its id.
func (b *beside) begin(ctx context.Context, in errand) string {
	raw, _ := json.Marshal(in)
	x, _, err := b.engine.Start(ctx, b.pool,
		executions.Spec{Flow: "errand", Surface: trace.Flow, Input: json.RawMessage(raw)})
	if err != nil {
		b.t.Errorf("start: %v", err)
		return ""
	}
	b.deliver(ctx, fmt.Sprintf("early %d", in.N))
	b.mu.Lock()
	defer b.mu.Unlock()
	b.traces = append(b.traces, x.TraceID)
	return x.ID
}

func (b *beside) deliver(ctx context.Context, key string) {
	_, err := b.engine.Deliver(ctx, b.pool, "EVENT_COMPLETED", key, json.RawMessage(`"`+key+`"`), key)
	assert.NoError(b.t, err, "deliver", key)
}

// read reads traces: recent ones and some of old partitions.
func (b *beside) read(ctx context.Context) error {
	for ctx.Err() == nil {
		b.mu.Lock()
		id := "hb_none"
		if len(b.traces) > 0 {
			id = b.traces[rand.IntN(len(b.traces))]
		}
		b.mu.Unlock()
		if _, err := activity.TraceOf(ctx, b.pool, id); err != nil && !errors.Is(err, activity.ErrNotFound) &&
			!errors.Is(err, trace.ErrInvalid) && ctx.Err() == nil {
			return fmt.Errorf("read trace %s: %w", id, err)
		}
		var n int
		err := b.pool.QueryRow(ctx, `select count(*)
			from (select from agent_activity where skill_name = 's' order by id desc limit 1000) x`).Scan(&n)
		if err != nil && ctx.Err() == nil {
			return fmt.Errorf("read the log: %w", err)
		}
	}
	return nil
}

// missing compares the recorded rows of unfinished executions and their children with the database.
func (b *beside) missing(ids []string) []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	var gone []string
	for _, id := range ids {
		var status string
		err := b.pool.QueryRow(b.t.Context(), `select status from agent_executions where id = $1`, id).Scan(&status)
		if err != nil {
			gone = append(gone, fmt.Sprintf("execution %s: %v", id, err))
			continue
		}
		had := pgtest.Rows[struct{ Step string }](b.t, b.pool, `select step from agent_checkpoints where execution_id = '`+id+
			`'`)
		logged := pgtest.Value[int](b.t, b.pool, `select count(*) from agent_activity where execution_id = $1`, id)
		for _, step := range b.truth[id] {
			if !slices.ContainsFunc(had, func(s struct{ Step string }) bool { return s.Step == step }) {
				gone = append(gone, fmt.Sprintf("step %s of execution %s (%s)", step, id, status))
			}
		}
		if logged != 2 {
			gone = append(gone, fmt.Sprintf("activity of execution %s: %d rows are left", id, logged))
		}
		ended := pgtest.Value[int](b.t, b.pool, `
			select count(*) from agent_executions c join agent_events v on v.external_id = 'completed ' || c.id
			 where c.parent_id = $1 and c.status = 'completed'`, id)
		if ended != 1 {
			gone = append(gone, fmt.Sprintf("child of execution %s", id))
		}
	}
	return gone
}

// TestNothingUnfinishedIsTouchedAndNobodyWaits prunes right behind executions that start, wait and end, and readers of
// traces. The passes also detach and drop old months.
func TestNothingUnfinishedIsTouchedAndNobodyWaits(t *testing.T) {
	t.Parallel()
	if pgtest.Pooled() {
		t.Skip("the time that a session waits for a lock is set when it begins")
	}
	url := pgtest.URL(t)
	own := pgtest.Pool(t, url, postgres.Options{ApplicationName: passing})
	random(t, own, rand.New(rand.NewPCG(3, 4)))
	pgtest.Exec(t, own, `delete from agent_executions where completed_at is null; delete from agent_executions
		where completed_at > now() - interval '1 hour'`)
	pgtest.Exec(t, own, `delete from agent_activity_uncounted; delete from agent_activity_open; update agent_approvals
		set status = 'rejected' where status in ('pending', 'approved')`)
	// No admin can set this policy: rows that ended a moment ago are old.
	pgtest.Exec(t, own, `
		alter table agent_retention drop constraint agent_retention_check;
		update agent_retention set keep = '300 milliseconds'
		  where kind in ('executions', 'events', 'messages', 'approvals', 'automation_runs');
		update agent_retention set keep = '60 days' where kind = 'activity'`)
	b := &beside{t: t, pool: hasty(t, url, own), truth: map[string][]string{}}
	b.start()
	var stay []string
	for n := range 15 {
		stay = append(stay, b.begin(t.Context(), errand{N: n, Stays: true}))
	}
	// The executions work for long, so one of the old months belongs to them.
	pgtest.Exec(t, own, `
		insert into agent_activity (id, trace_id, execution_id, skill_name, created_at)
		select lanekeeper.agent_uuid7(at + n * interval '1 ms'), x.trace_id, x.id, 's', at
		  from agent_executions x, generate_series(1, 2) n, (select clock_timestamp() - interval '150 days' as at) a
		    where x.id = any($1::uuid[]);`, stay)
	pgtest.Exec(t, own, `delete from agent_activity_uncounted`)
	theirs := pgtest.Value[string](t, own, `select distinct tableoid::regclass::text from agent_activity
		where execution_id = any($1::uuid[])`, stay)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var readers, passes errgroup.Group
	for range 3 {
		readers.Go(func() error { return b.read(ctx) })
	}
	removed := map[string]int64{}
	passes.Go(func() error {
		for ctx.Err() == nil {
			done, err := retention.Run(ctx, own, retention.Options{Restart: true, DetachTimeout: time.Second})
			if err != nil && ctx.Err() == nil {
				return err
			}
			for _, d := range done {
				removed[d.Kind] += d.Removed
				removed["partitions"] += int64(len(d.Partitions))
			}
		}
		return nil
	})
	for n := range 60 {
		b.begin(t.Context(), errand{N: 100 + n})
	}
	pgtest.Eventually(t, func() bool {
		return pgtest.Value[int](t, own,
			`select count(*) from agent_executions where flow = 'errand' and status <> 'waiting'`) == 0 &&
			pgtest.Value[int](t, own,
				`select count(*) from agent_executions where flow = 'errand' and completed_at is not null`) == 0
	}, "all that ended is gone")
	for range 3 {
		gone := b.missing(stay)
		assert.Truef(t, len(gone) == 0, "gone, though it has not ended: %v", gone)
	}
	assert.Equal(t, theirs, pgtest.Value[string](t, own, `
		select coalesce(string_agg(split_part(partition, '.', 2), ' '), '') from agent_activity_partitions
		 where upper_id < lanekeeper.agent_uuid7_floor(now() - interval '95 days')`))
	// The remaining executions complete, with all their rows.
	stop()
	assert.NoError(t, errors.Join(readers.Wait(), passes.Wait()))
	for n := range stay {
		b.deliver(t.Context(), fmt.Sprintf("go %d", n))
	}
	pgtest.Until(t, own, len(stay), `select count(*) from agent_executions where id = any($1::uuid[])
			and status = 'completed'`, stay)
	for _, kind := range []string{"executions", "events", "activity", "messages", "partitions"} {
		assert.Truef(t, removed[kind] != 0, "nothing of %s was removed: nothing was tried", kind)
	}
}
