package executions_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/trace"
)

// worker registers a worker by plain SQL, as an outside one would.
func worker(t *testing.T, pool *pgxpool.Pool) string {
	t.Helper()
	return value[string](t, pool, `
		insert into agent_workers (name, expires_at) values ('test', clock_timestamp() + interval '30 seconds') returning id::text`)
}

// pending inserts an execution by plain SQL.
func pending(t *testing.T, pool *pgxpool.Pool) string {
	t.Helper()
	return value[string](t, pool, `
		insert into agent_executions (trace_id, surface, flow) values (@trace, 'flow', 'flow') returning id::text`,
		postgres.Strict{"trace": string(trace.New(trace.Flow))})
}

// claim returns the number of a new claim, 0 when the execution was not ready.
func claim(ctx context.Context, db postgres.DB, id, worker string) (n int64, err error) {
	err = db.QueryRow(ctx, `select coalesce(max(claim), 0) from lanekeeper.claim_agent_execution(@id, @worker)`,
		postgres.Strict{"id": id, "worker": worker}).Scan(&n)
	return n, err
}

func mustClaim(t *testing.T, db postgres.DB, id, worker string) int64 {
	t.Helper()
	n, err := claim(t.Context(), db, id, worker)
	if err != nil || n == 0 {
		t.Fatalf("claim: %d, %v", n, err)
	}
	return n
}

func get(t *testing.T, db postgres.DB, id string) executions.Execution {
	t.Helper()
	x, err := executions.Get(t.Context(), db, id)
	if err != nil {
		t.Fatal(err)
	}
	return x
}

// sweepOnce is one sweep by a process that runs nothing.
func sweepOnce(ctx context.Context, pool *pgxpool.Pool) error {
	e, err := executions.New(pool, executions.Options{Keeper: lanes.NewKeeper(pool, lanes.Options{})})
	if err != nil {
		return err
	}
	return e.Sweep(ctx)
}

func sweep(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	if err := sweepOnce(t.Context(), pool); err != nil {
		t.Fatal(err)
	}
}

func TestOneOfManyRacersGetsTheClaim(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	workers := make([]string, 8)
	for i := range workers {
		workers[i] = worker(t, pool)
	}
	for range 20 {
		id := pending(t, pool)
		var won atomic.Int32
		group, ctx := errgroup.WithContext(t.Context())
		for _, w := range workers {
			group.Go(func() error {
				n, err := claim(ctx, pool, id, w)
				if n > 0 {
					won.Add(1)
				}
				return err
			})
		}
		if err := group.Wait(); err != nil || won.Load() != 1 {
			t.Fatalf("%d racers claimed the execution, %v", won.Load(), err)
		}
	}
}

func TestTwoEnginesRunEachExecutionOnce(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	var mu sync.Mutex
	ran := map[string]int{}
	flows := flow(func(ctx context.Context) (executions.Result, error) {
		x, _ := executions.Current(ctx)
		mu.Lock()
		defer mu.Unlock()
		ran[x.ID]++
		return executions.Result{}, nil
	})
	p := start(t, pool, flows)
	start(t, pool, flows)
	ids := make([]string, 40)
	for i := range ids {
		ids[i] = p.begin(t, "flow")
	}
	for _, id := range ids {
		if got := until(t, pool, id, executions.Completed); got.Claim != 1 {
			t.Errorf("claimed %d times", got.Claim)
		}
	}
	mu.Lock()
	defer mu.Unlock()
	for id, n := range ran {
		if n != 1 {
			t.Errorf("%s ran %d times", id, n)
		}
	}
}

func TestAWorkerThatExpiredComesBackUnderANewID(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	middle := newGate(t)
	lost := make(chan error, 1)
	p := start(t, pool, flow(func(ctx context.Context) (executions.Result, error) {
		return ends(executions.Step(ctx, "work", func(ctx context.Context) (int, error) {
			if middle.passed.Add(1) > 1 {
				return 2, nil
			}
			x, _ := executions.Current(ctx)
			middle.entered <- x.ID
			<-ctx.Done()
			lost <- context.Cause(ctx)
			return 0, ctx.Err()
		}))
	}))
	p.begin(t, "flow")
	id := middle.arrival(t)
	before := str(get(t, pool, id).ClaimedBy)
	expire(t, pool, id)
	got := until(t, pool, id, executions.Completed)
	if cause := receive(t, lost); !errors.Is(cause, executions.ErrLost) {
		t.Errorf("the run ended with %v, not ErrLost", cause)
	}
	if string(got.Result) != "2" || got.Claim < 2 {
		t.Errorf("claim %d, result %s", got.Claim, got.Result)
	}
	after := value[string](t, pool, `select string_agg(id::text, ' ') from agent_workers`)
	if after == before || len(after) != 36 || p.Live() != nil {
		t.Errorf("worker before %s, after %s; live: %v", before, after, p.Live())
	}
}

func TestAnExpiredWorkerIsNotRevived(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	w := worker(t, pool)
	exec(t, pool, `update agent_workers set expires_at = clock_timestamp() - interval '1 ms'`)
	id := pending(t, pool)
	if n, err := claim(t.Context(), pool, id, w); n != 0 || err != nil {
		t.Errorf("an expired worker got claim %d, %v", n, err)
	}
	if alive, err := executions.RenewWorker(t.Context(), pool, w); err != nil || alive {
		t.Errorf("an expired worker was renewed: %v, %v", alive, err)
	}
}

// lose lets a worker claim an execution and die.
func lose(t *testing.T, pool *pgxpool.Pool, id, checkpoint string) {
	t.Helper()
	w := worker(t, pool)
	n := mustClaim(t, pool, id, w)
	if checkpoint != "" {
		exec(t, pool, `insert into agent_checkpoints (execution_id, step, claim) values (@id, @step, @claim)`,
			postgres.Strict{"id": id, "step": checkpoint, "claim": n})
	}
	expire(t, pool, id)
	sweep(t, pool)
}

func TestClaimsLostWithoutACheckpointAreBounded(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	id := pending(t, pool)
	for i := 1; i < 5; i++ {
		lose(t, pool, id, "")
		if x := get(t, pool, id); x.Status != executions.Running || x.Attempt != i || x.ClaimedBy != nil {
			t.Fatalf("after %d lost claims: status %s, attempt %d", i, x.Status, x.Attempt)
		}
	}
	lose(t, pool, id, "")
	got := get(t, pool, id)
	if got.Status != executions.Failed || str(got.ErrorMessage) != "given up after 5 workers were lost without a checkpoint between" {
		t.Errorf("status %s, error %q", got.Status, str(got.ErrorMessage))
	}
	if n := completions(t, pool, id); n != 1 {
		t.Errorf("%d AGENT_COMPLETED", n)
	}
}

func TestACheckpointGivesNewAttempts(t *testing.T) {
	t.Parallel()
	cases := map[string]func(t *testing.T, pool *pgxpool.Pool, id string){
		"of a claim that is lost": func(t *testing.T, pool *pgxpool.Pool, id string) { lose(t, pool, id, "progress") },
		"of a claim that is handed back": func(t *testing.T, pool *pgxpool.Pool, id string) {
			n := mustClaim(t, pool, id, worker(t, pool))
			exec(t, pool, `insert into agent_checkpoints (execution_id, step, claim) values (@id, 'progress', @claim)`,
				postgres.Strict{"id": id, "claim": n})
			exec(t, pool, `select lanekeeper.release_agent_claim(@id, @claim)`, postgres.Strict{"id": id, "claim": n})
		},
	}
	for name, progress := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.DB(t)
			id := pending(t, pool)
			for range 4 {
				lose(t, pool, id, "")
			}
			progress(t, pool, id)
			for range 3 {
				lose(t, pool, id, "")
			}
			if got := get(t, pool, id); got.Status != executions.Running {
				t.Errorf("status %s, attempt %d: %s", got.Status, got.Attempt, str(got.ErrorMessage))
			}
		})
	}
}

func TestAReadyBacklogBurnsNoAttempts(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	ids := make([]string, 20)
	for i := range ids {
		ids[i] = pending(t, pool)
	}
	for range 10 {
		sweep(t, pool)
	}
	if n := value[int](t, pool, `select count(*) from agent_executions where status = 'pending' and attempt = 0`); n != len(ids) {
		t.Errorf("%d of %d are as they were", n, len(ids))
	}
}

func TestClaimsOfAnUnknownWorkerAreSwept(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	id := pending(t, pool)
	mustClaim(t, pool, id, worker(t, pool))
	exec(t, pool, `delete from agent_workers`)
	start(t, pool, flow(func(context.Context) (executions.Result, error) { return executions.Result{}, nil }))
	until(t, pool, id, executions.Completed)
}

// A claim whose answer was lost with its connection belongs to a worker that lives and does not know.
func TestAClaimWithoutARunIsHandedBack(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := start(t, pool, flow(func(context.Context) (executions.Result, error) { return executions.Result{}, nil }))
	pgtest.Eventually(t, patience, func() bool { return p.Live() == nil }, "the engine lives")
	id := value[string](t, pool, `
		insert into agent_executions (trace_id, surface, flow, status, claimed_by, claim, started_at)
		select lanekeeper.agent_trace_id('fl'), 'flow', 'flow', 'running', w.id, 1, clock_timestamp() from agent_workers w returning id::text`)
	if got := until(t, pool, id, executions.Completed); got.Attempt != 0 {
		t.Errorf("attempt %d", got.Attempt)
	}
}

func TestWhatOutsideWorkersLoseFollowsOnLost(t *testing.T) {
	t.Parallel()
	for policy, want := range map[string]executions.Status{"resume": executions.Running, "hand_on": executions.Running, "fail": executions.Failed} {
		t.Run(policy, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.DB(t)
			id := pending(t, pool)
			exec(t, pool, `update agent_executions set on_lost = @policy`, postgres.Strict{"policy": policy})
			lose(t, pool, id, "")
			if got := get(t, pool, id); got.Status != want {
				t.Errorf("status %s", got.Status)
			}
		})
	}
}

func TestARunWithoutProgressFails(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	id, working := pending(t, pool), pending(t, pool)
	w := worker(t, pool)
	mustClaim(t, pool, id, w)
	n := mustClaim(t, pool, working, w)
	exec(t, pool, `insert into agent_checkpoints (execution_id, step, claim) values (@id, 'x', @claim)`, postgres.Strict{"id": working, "claim": n})
	exec(t, pool, `update agent_executions set progress_seconds = 60, updated_at = clock_timestamp() - interval '2 minutes'`)
	sweep(t, pool)
	if a, b := get(t, pool, id).Status, get(t, pool, working).Status; a != executions.Failed || b != executions.Running {
		t.Errorf("without progress %s, with %s", a, b)
	}
}

func TestEngineOptionsHaveFloors(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := start(t, pool, flow(func(context.Context) (executions.Result, error) { return executions.Result{}, nil }),
		func(o *executions.Options) { o.LeaseTTL, o.SweepEvery = time.Millisecond, time.Nanosecond })
	until(t, pool, p.begin(t, "flow"), executions.Completed)
	if _, err := executions.New(pool, executions.Options{}); err == nil {
		t.Error("an engine without a keeper was made")
	}
	if err := p.Register("flow", nil); err == nil {
		t.Error("a flow without a function was registered")
	}
}

func TestADedupeKeyStartsOnce(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := prepare(t, pool, nil)
	var created atomic.Int32
	ids := make([]string, 16)
	var group errgroup.Group
	for i := range ids {
		group.Go(func() error {
			x, fresh, err := p.Start(t.Context(), pool, executions.Spec{Flow: "flow", Surface: trace.Flow, DedupeKey: "order 7"})
			if fresh {
				created.Add(1)
			}
			ids[i] = x.ID
			return err
		})
	}
	if err := group.Wait(); err != nil || created.Load() != 1 {
		t.Fatalf("created %d, %v", created.Load(), err)
	}
	for _, id := range ids {
		if id != ids[0] {
			t.Errorf("ids differ: %s", fmt.Sprint(ids))
		}
	}
}

func TestAnExpiredLeaseStopsWritesBeforeAnybodySweeps(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	id := pending(t, pool)
	args := postgres.Strict{"id": id, "claim": mustClaim(t, pool, id, worker(t, pool))}
	expire(t, pool, id)
	for name, sql := range map[string]string{
		"checkpoint": `insert into agent_checkpoints (execution_id, step, claim) values (@id, 'late', @claim)`,
		"finish":     `select lanekeeper.complete_agent_execution(@id, @claim, 'completed', '', null, null, null)`,
		"park":       `select lanekeeper.wait_agent_execution(@id, @claim, 'late', 'event', 'key', '1 hour', null)`,
	} {
		if _, err := pool.Exec(t.Context(), sql, args); !postgres.IsCode(err, "LK001") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if x := get(t, pool, id); x.Status != executions.Running {
		t.Errorf("status %s", x.Status)
	}
}
