package executions_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	osexec "os/exec"
	"os/signal"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/trace"
)

// restartURL is set in the process that is killed.
const restartURL = "LANEKEEPER_RESTART_TEST_URL"

// many is how many executions wait, and how many run.
const many = 1000

// restartFlows are those of both processes; stay is what the second step does.
func restartFlows(stay func(ctx context.Context) error) map[string]executions.Func {
	note := func(ctx context.Context, step string) error {
		_, err := executions.StepTx(ctx, step, func(ctx context.Context, tx pgx.Tx) (int, error) {
			x, _ := executions.Current(ctx)
			_, err := tx.Exec(ctx, `insert into effects (by) values (@by)`, postgres.Strict{"by": x.ID + " " + step})
			return 0, err
		})
		return err
	}
	return map[string]executions.Func{
		"waits": func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
			x, _ := executions.Current(ctx)
			return ends(executions.Wait(ctx, "go", executions.Event(x.ID, time.Hour)))
		},
		"runs": func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
			if err := note(ctx, "first"); err != nil {
				return executions.Result{}, err
			}
			if _, err := executions.Step(ctx, "second", func(ctx context.Context) (int, error) { return 0, stay(ctx) }); err != nil {
				return executions.Result{}, err
			}
			return ends(0, note(ctx, "third"))
		},
	}
}

// patient makes no process lose its claims because the machine has much to do: which claim did what is looked at.
func patient(o *executions.Options) { o.LeaseTTL = 10 * time.Minute }

// doomed is the process that is killed: it begins everything, says so, and works until then. It has workers to spare, for those
// that come to their wait when all that run are in their step.
func doomed(url string) error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	pool, err := postgres.Open(ctx, url, postgres.Options{MaxConns: 12})
	if err != nil {
		return err
	}
	defer pool.Close()
	opts := executions.Options{Keeper: lanes.NewKeeper(pool, lanes.Options{}), Workers: many + 16}
	patient(&opts)
	engine, err := executions.New(pool, opts)
	if err != nil {
		return err
	}
	for name, fn := range restartFlows(func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }) {
		if err := engine.Register(name, fn); err != nil {
			return err
		}
	}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return engine.Run(ctx) })
	var begin errgroup.Group
	begin.SetLimit(8)
	for i := range 2 * many {
		begin.Go(func() error {
			_, _, err := engine.Start(ctx, pool, executions.Spec{Flow: []string{"waits", "runs"}[i%2], Surface: trace.Flow})
			return err
		})
	}
	if err := begin.Wait(); err != nil {
		return err
	}
	fmt.Println("begun")
	return group.Wait()
}

// kill runs the other process until all its executions wait or are in the middle of a step, and kills it.
func kill(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := osexec.CommandContext(t.Context(), program)
	cmd.Env = append(os.Environ(), restartURL+"="+pool.Config().ConnString())
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	said, err := bufio.NewReader(out).ReadString('\n')
	if err != nil || strings.TrimSpace(said) != "begun" {
		t.Errorf("the process says %q, %v", said, err)
	}
	pgtest.Eventually(t, 2*patience, func() bool {
		return value[bool](t, pool, `
			select (select count(*) from agent_executions where status = 'waiting') = @n
			   and (select count(*) from effects) = @n
			   and (select count(*) from agent_executions where status = 'running' and claimed_by is not null) = @n`, postgres.Strict{"n": many})
	}, "all wait or are in the middle of their second step")
	if err := cmd.Process.Kill(); err != nil {
		t.Error(err)
	}
	_ = cmd.Wait() // it was killed
}

func TestAKilledProcessLosesNothing(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	effects(t, pool)
	kill(t, pool)
	const waits = `select string_agg(id || ' ' || waiting_until || ' ' || wait_number, ',' order by id) from agent_executions where status = 'waiting'`
	before := value[string](t, pool, waits)
	exec(t, pool, `update agent_workers set expires_at = clock_timestamp() - interval '1 second'`) // as time would
	p := start(t, pool, restartFlows(func(context.Context) error { return nil }), patient)
	pgtest.Eventually(t, 2*patience, func() bool {
		return value[int](t, pool, `select count(*) from agent_executions where status = 'completed'`) == many
	}, "all that ran move on")
	if value[string](t, pool, waits) != before {
		t.Error("those that waited do not wait as before")
	}
	// Each effect once; the first step is the killed claim's, the others the next one's.
	got := value[string](t, pool, `
		select concat_ws(' ', (select count(*) from effects), (select count(distinct by) from effects),
		       (select count(*) from agent_checkpoints where step = 'first' and claim = 1),
		       (select count(*) from agent_checkpoints where step <> 'first' and claim > 1),
		       (select count(*) from agent_executions where status = 'completed' and attempt <= 1))`)
	if want := fmt.Sprint(2*many, 2*many, many, 2*many, many); got != want {
		t.Errorf("effects, different ones, first steps, others, runs: %s, want %s", got, want)
	}
	var one string
	one, _, _ = strings.Cut(before, " ")
	if _, err := p.Deliver(t.Context(), pool, "EVENT_COMPLETED", one, nil, ""); err != nil {
		t.Fatal(err)
	}
	until(t, pool, one, executions.Completed)
}
