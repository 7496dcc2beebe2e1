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
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/retention"
	"github.com/lanekeeper/lanekeeper/trace"
)

// workload is an engine that runs while passes delete rows of executions that have just ended. Its sessions have a
// short lock timeout.
type workload struct {
	t      *testing.T
	pool   *pgxpool.Pool // for the engine, its clients and the readers
	engine *executions.Engine

	mu       sync.Mutex
	recorded map[string][]string // the steps and received values of each execution so far
	traces   []string
}

// record records a step of the current execution.
func (w *workload) record(ctx context.Context, what string) {
	x, _ := executions.Current(ctx)
	w.recordFor(x.ID, what)
}

func (w *workload) recordFor(id, what string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.recorded[id] = append(w.recorded[id], what)
}

type job struct {
	N     int  `json:"n"`
	Waits bool `json:"stays"`
}

// runJob runs two steps and a child that ends soon. Then it may wait, and it consumes an event that came before the
// wait.
func (w *workload) runJob(ctx context.Context, raw json.RawMessage) (executions.Result, error) {
	var in job
	if err := json.Unmarshal(raw, &in); err != nil {
		return executions.Result{}, err
	}
	for _, name := range []string{"one", "two"} {
		if _, err := executions.Step(ctx, name, func(context.Context) (string, error) { return name, nil }); err != nil {
			return executions.Result{}, err
		}
		w.record(ctx, name)
	}
	child, err := executions.Trigger(ctx, "child", executions.Child{Flow: "child", Wait: true})
	if err != nil || !child.Success {
		return executions.Result{}, errors.Join(err, fmt.Errorf("child: %+v", child))
	}
	w.record(ctx, "child")
	w.recordFor(child.ExecutionID, "done")
	if in.Waits {
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

func (w *workload) runChild(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
	_, err := executions.Step(ctx, "done", func(context.Context) (string, error) { return "done", nil })
	return executions.Result{Value: "done"}, err
}

// start runs the engine until the test ends.
func (w *workload) start() {
	engine, err := executions.New(w.pool, executions.Options{
		Keeper: lanes.NewKeeper(w.pool, lanes.Options{}), Logger: slog.New(slog.DiscardHandler),
		SweepEvery: 200 * time.Millisecond, PollOnly: true,
	})
	require.NoError(w.t, err)
	w.engine = engine
	require.NoError(w.t, errors.Join(engine.Register("errand", w.runJob), engine.Register("child", w.runChild)))
	testkit.Run(w.t, engine.Run)
}

// startJob starts a job, raises its early event, and returns the id of its execution.
func (w *workload) startJob(ctx context.Context, in job) string {
	raw, _ := json.Marshal(in)
	x, _, err := w.engine.Start(ctx, w.pool,
		executions.Spec{Flow: "errand", Surface: trace.Flow, Input: json.RawMessage(raw)})
	if err != nil {
		w.t.Errorf("start: %v", err)
		return ""
	}
	w.deliver(ctx, fmt.Sprintf("early %d", in.N))
	w.mu.Lock()
	defer w.mu.Unlock()
	w.traces = append(w.traces, x.TraceID)
	return x.ID
}

func (w *workload) deliver(ctx context.Context, key string) {
	_, err := w.engine.Deliver(ctx, w.pool, "EVENT_COMPLETED", key, json.RawMessage(`"`+key+`"`), key)
	assert.NoError(w.t, err, "deliver", key)
}

// read reads recent traces and the activity log until ctx ends.
func (w *workload) read(ctx context.Context) error {
	for ctx.Err() == nil {
		w.mu.Lock()
		id := "hb_none"
		if len(w.traces) > 0 {
			id = w.traces[rand.IntN(len(w.traces))]
		}
		w.mu.Unlock()
		if _, err := activity.TraceOf(ctx, w.pool, id); err != nil && !errors.Is(err, activity.ErrNotFound) &&
			!errors.Is(err, trace.ErrInvalid) && ctx.Err() == nil {
			return fmt.Errorf("read trace %s: %w", id, err)
		}
		var n int
		err := w.pool.QueryRow(ctx, `select count(*)
			from (select from agent_activity where skill_name = 's' order by id desc limit 1000) x`).Scan(&n)
		if err != nil && ctx.Err() == nil {
			return fmt.Errorf("read the log: %w", err)
		}
	}
	return nil
}

// lostRows returns the recorded rows of unfinished executions and their children that the database lacks.
func (w *workload) lostRows(ids []string) []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	var lost []string
	for _, id := range ids {
		var status string
		err := w.pool.QueryRow(w.t.Context(), `select status from agent_executions where id = $1`, id).Scan(&status)
		if err != nil {
			lost = append(lost, fmt.Sprintf("execution %s: %v", id, err))
			continue
		}
		checkpoints := pgtest.Rows[struct{ Step string }](w.t, w.pool,
			`select step from agent_checkpoints where execution_id = '`+id+
				`'`)
		activities := pgtest.Value[int](w.t, w.pool, `select count(*) from agent_activity where execution_id = $1`, id)
		for _, step := range w.recorded[id] {
			if !slices.ContainsFunc(checkpoints, func(s struct{ Step string }) bool { return s.Step == step }) {
				lost = append(lost, fmt.Sprintf("step %s of execution %s (%s)", step, id, status))
			}
		}
		if activities != 2 {
			lost = append(lost, fmt.Sprintf("activity of execution %s: %d rows, want 2", id, activities))
		}
		completions := pgtest.Value[int](w.t, w.pool, `
			select count(*) from agent_executions c join agent_events v on v.external_id = 'completed ' || c.id
			 where c.parent_id = $1 and c.status = 'completed'`, id)
		if completions != 1 {
			lost = append(lost, fmt.Sprintf("child of execution %s", id))
		}
	}
	return lost
}

// TestPassesBesideRunningEngine runs passes while executions start, wait and end, and while readers read traces. The
// passes also detach and drop old months. They delete nothing that unfinished executions need, and no session waits for
// them.
func TestPassesBesideRunningEngine(t *testing.T) {
	t.Parallel()
	if pgtest.Pooled() {
		t.Skip("the time that a session waits for a lock is set when it begins")
	}
	url := pgtest.URL(t)
	pool := pgtest.Pool(t, url, postgres.Options{ApplicationName: passAppName})
	seedRandomState(t, pool, rand.New(rand.NewPCG(3, 4)))
	pgtest.Exec(t, pool, `delete from agent_executions where completed_at is null; delete from agent_executions
		where completed_at > now() - interval '1 hour'`)
	pgtest.Exec(t, pool, `delete from agent_activity_uncounted; delete from agent_activity_open; update agent_approvals
		set status = 'rejected' where status in ('pending', 'approved')`)
	// An admin cannot set such a short policy. It makes rows old a moment after their end.
	pgtest.Exec(t, pool, `
		alter table agent_retention drop constraint agent_retention_check;
		update agent_retention set keep = '300 milliseconds'
		  where kind in ('executions', 'events', 'messages', 'approvals', 'automation_runs');
		update agent_retention set keep = '60 days' where kind = 'activity'`)
	w := &workload{t: t, pool: impatientPool(t, url, pool), recorded: map[string][]string{}}
	w.start()
	var waiting []string
	for n := range 15 {
		waiting = append(waiting, w.startJob(t.Context(), job{N: n, Waits: true}))
	}
	// The waiting executions have rows in an old month, so passes must keep that month.
	pgtest.Exec(t, pool, `
		insert into agent_activity (id, trace_id, execution_id, skill_name, created_at)
		select lanekeeper.agent_uuid7(at + n * interval '1 ms'), x.trace_id, x.id, 's', at
		  from agent_executions x, generate_series(1, 2) n, (select clock_timestamp() - interval '150 days' as at) a
		    where x.id = any($1::uuid[]);`, waiting)
	pgtest.Exec(t, pool, `delete from agent_activity_uncounted`)
	wantPartition := pgtest.Value[string](t, pool, `select distinct tableoid::regclass::text from agent_activity
		where execution_id = any($1::uuid[])`, waiting)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var readers, passes errgroup.Group
	for range 3 {
		readers.Go(func() error { return w.read(ctx) })
	}
	removed := map[string]int64{}
	passes.Go(func() error {
		for ctx.Err() == nil {
			done, err := retention.Run(ctx, pool, retention.Options{Restart: true, DetachTimeout: time.Second})
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
		w.startJob(t.Context(), job{N: 100 + n})
	}
	pgtest.Eventually(t, func() bool {
		return pgtest.Value[int](t, pool,
			`select count(*) from agent_executions where flow = 'errand' and status <> 'waiting'`) == 0 &&
			pgtest.Value[int](t, pool,
				`select count(*) from agent_executions where flow = 'errand' and completed_at is not null`) == 0
	}, "passes have deleted all ended executions")
	for range 3 {
		lost := w.lostRows(waiting)
		assert.Truef(t, len(lost) == 0, "rows of unfinished executions are deleted: %v", lost)
	}
	assert.Equal(t, wantPartition, pgtest.Value[string](t, pool, `
		select coalesce(string_agg(split_part(partition, '.', 2), ' '), '') from agent_activity_partitions
		 where upper_id < lanekeeper.agent_uuid7_floor(now() - interval '95 days')`))
	// The remaining executions complete, with all their rows.
	stop()
	assert.NoError(t, errors.Join(readers.Wait(), passes.Wait()))
	for n := range waiting {
		w.deliver(t.Context(), fmt.Sprintf("go %d", n))
	}
	pgtest.Until(t, pool, len(waiting), `select count(*) from agent_executions where id = any($1::uuid[])
			and status = 'completed'`, waiting)
	for _, kind := range []string{"executions", "events", "activity", "messages", "partitions"} {
		assert.Truef(t, removed[kind] != 0, "passes deleted no %s, so the test shows nothing about them", kind)
	}
}
