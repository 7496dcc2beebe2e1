package executions_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/enginetest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/trace"
)

// Many callers run executions at once. A failing or panicking flow does not affect the others: each execution ends
// once, with its checkpoints.
func TestConcurrentRunSyncSharesBatches(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	var ran atomic.Int32
	p := newEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
		switch ran.Add(1) % 8 {
		case 1:
			panic("of the flow")
		case 2:
			return executions.Result{}, errors.New("of the flow")
		}
		return resultOf(executions.Step(ctx, "step", func(context.Context) (int, error) { return 1, nil }))
	}), func(o *executions.Options) { o.LeaseTTL = time.Minute })
	var group errgroup.Group
	for range 48 {
		group.Go(func() error {
			for range 20 {
				x, err := p.RunSync(t.Context(), executions.Spec{Flow: "flow", Surface: trace.Flow})
				if err != nil {
					return err
				}
				if x.Status != executions.Completed && x.Status != executions.Failed {
					return fmt.Errorf("execution %s is %s", x.ID, x.Status)
				}
			}
			return nil
		})
	}
	assert.NoError(t, group.Wait())
	assert.Equal(t, 0, pgtest.Value[int](t, pool, `
		select count(*) from agent_executions x where x.completed_at is null
		    or (select count(*) from agent_events v where v.execution_id = x.id) <> 1
		    or (select count(*) from agent_checkpoints c where c.execution_id = x.id) <> (x.status = 'completed')::int`))
}

// A database crash may lose a start if no durable write followed it. The execution then never existed: its run ends
// with an error that says so and writes nothing.
func TestStartLostInACrashNeverExisted(t *testing.T) {
	t.Parallel()
	server := pgtest.Own(t)
	open := func() *pgxpool.Pool { return pgtest.Pool(t, server.URL(), postgres.Options{MaxConns: 8}) }
	pool := open()
	lease := func(o *executions.Options) { o.LeaseTTL = time.Minute }
	p := newEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
		return resultOf(executions.Step(ctx, "step", func(context.Context) (int, error) { return 1, nil }))
	}), lease)
	spec := executions.Spec{Flow: "flow", Surface: trace.Flow}
	durable, err := p.RunSync(t.Context(), spec) // begins the lease
	require.NoError(t, err)
	writer := pgtest.Value[int](t, pool, `select pid from pg_stat_activity where backend_type = 'walwriter'`)
	require.NoError(t, syscall.Kill(writer, syscall.SIGSTOP)) // it would flush the starts
	pgtest.Exec(t, pool, `select pg_switch_wal()`)            // the starts begin a WAL page; a full page may flush
	lost, err := p.StartSeveral(t.Context(), []executions.Spec{spec, spec}, []bool{true, true})
	require.NoError(t, err)
	pool.Close()
	server.Crash()
	pool = open()
	p = newEngine(t, pool, p.flows, lease)
	x, err := p.RunClaimed(t.Context(), &lost[0])
	assert.Truef(t, errors.Is(err, executions.ErrNotFound) && strings.Contains(err.Error(), "database crash"),
		"a run whose start is lost: %v, %v", x.Status, err)
	assert.Equal(t, 0, pgtest.Value[int](t, pool, `
		select (select count(*) from agent_executions where id <> @id::uuid)
		     + (select count(*) from agent_events where execution_id <> @id::uuid)
		     + (select count(*) from agent_checkpoints where execution_id <> @id::uuid)`,
		postgres.Strict{"id": durable.ID}))
	assert.Equal(t, executions.Completed, getExecution(t, pool, durable.ID).Status)
}

// awaitSyncReplication returns when a commit of this server waits for a standby. Sessions see the setting earlier than
// the checkpointer. Commits wait only after the checkpointer has read it.
func awaitSyncReplication(t *testing.T, url string) {
	t.Helper()
	watch, err := pgx.Connect(t.Context(), url)
	require.NoError(t, err)
	defer func() { _ = watch.Close(context.WithoutCancel(t.Context())) }()
	for range 1000 {
		conn, err := pgx.Connect(t.Context(), url)
		require.NoError(t, err)
		pid := conn.PgConn().PID()
		ctx, leave := context.WithTimeout(t.Context(), timeout)
		ended := make(chan error, 1)
		go func() {
			_, err := conn.Exec(ctx, `create table if not exists committed (n int)`)
			if err == nil {
				_, err = conn.Exec(ctx, `insert into committed values (1)`)
			}
			ended <- err
		}()
		var waits bool
		pgtest.Eventually(t, func() bool {
			if len(ended) > 0 {
				return true
			}
			waits = pgtest.Value[bool](t, watch,
				`select exists (select from pg_stat_activity where pid = $1 and wait_event = 'SyncRep')`, pid)
			return waits
		}, "a commit ends, or waits for a standby")
		leave()
		<-ended
		_ = conn.Close(context.WithoutCancel(t.Context()))
		if waits {
			return
		}
	}
	t.Fatal("no commit waits for a standby")
}

// A start for another process waits for the disk and for a synchronous standby. A start for its own caller does not
// wait; its completion does. A standby that never answers shows the difference.
func TestCompletionMakesStartDurable(t *testing.T) {
	t.Parallel()
	server := pgtest.Own(t)
	pool := pgtest.Pool(t, server.URL(), postgres.Options{MaxConns: 8})
	p := newEngine(t, pool, flowMap(noop),
		func(o *executions.Options) { o.LeaseTTL = time.Minute })
	spec := executions.Spec{Flow: "flow", Surface: trace.Flow}
	if _, err := p.RunSync(t.Context(), spec); err != nil { // begins the lease
		t.Fatal(err)
	}
	pgtest.Exec(t, pool, `alter system set synchronous_standby_names = 'nobody'`)
	pgtest.Exec(t, pool, `select pg_reload_conf()`)
	awaitSyncReplication(t, server.URL())
	specs := []executions.Spec{spec, spec}
	begin := func(here ...bool) ([]executions.Execution, error) {
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		return p.StartSeveral(ctx, specs, here)
	}
	got, err := p.StartSeveral(t.Context(), specs, []bool{true, true})
	require.NoError(t, err, "starts that are run here wait for the standby")
	if got, err := begin(true, false); err == nil {
		t.Errorf("%d starts, one of them for another process, did not wait for the standby", len(got))
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	_, err = pool.Exec(ctx, `
		select from lanekeeper.complete_agent_executions(array[$1, $2]::uuid[], '{1,1}',
		  '[{"status": "completed"}, {"status": "completed"}]')`, min(got[0].ID, got[1].ID), max(got[0].ID, got[1].ID))
	assert.Error(t, err, "ends did not wait for the standby")
	// The lease ended, but the process does not know it. The start returns queued executions.
	pgtest.Exec(t, pool, `with c as (select set_config('synchronous_commit', 'local', true)) update agent_workers
		set expires_at = clock_timestamp() from c`)
	if got, err := begin(true, true); err == nil {
		t.Errorf("unclaimed starts did not wait for the standby: %s, %s", got[0].Status, got[1].Status)
	}
	pgtest.Exec(t, pool, `alter system reset synchronous_standby_names`)
	pgtest.Exec(t, pool, `select pg_reload_conf()`)
}

// checkpointBatch records a step of each execution, and variables if given. It returns the positions of the recorded
// steps.
func checkpointBatch(
	ctx context.Context, db postgres.DB, ids []string, claims []int64, steps []string, variables []*string,
) (recorded string, err error) {
	err = db.QueryRow(ctx, `
		select coalesce(string_agg(i::text, ' ' order by i), '')
		  from generate_series(1, @n::int) i
		 where i not in (
		   select n from lanekeeper.checkpoint_agent_executions(@ids, @claims, @steps,
		     array_fill('print'::text, array[@n::int]), null, array_fill('3'::jsonb, array[@n::int]),
		          (@variables::text[])::jsonb[]) where verdict = 'alone')`,
		postgres.Strict{"ids": ids, "claims": claims, "n": len(ids), "steps": steps, "variables": variables}).Scan(&recorded)
	return recorded, err
}

// A batch writes only steps with a live claim and an unlocked row.
func TestCheckpointBatchChecksClaims(t *testing.T) {
	t.Parallel()
	t.Run("with variables", func(t *testing.T) { testCheckpointBatch(t, true, "1 6 11 14") })
	t.Run("without", func(t *testing.T) { testCheckpointBatch(t, false, "1 6 11 13 14") })
}

func testCheckpointBatch(t *testing.T, withVariables bool, want string) {
	t.Parallel()
	pool := pgtest.DB(t)
	live, dead := newWorker(t, pool), newWorker(t, pool)
	names := []string{
		"live", "stale", "ahead", "dead", "locked", "written", "cancelled", "parked", "pending", "ended",
		"shown", "shown stale", "unshowable", "live",
	}
	ids, claims, steps, variables := make([]string, len(names)), make([]int64, len(names)), make([]string, len(names)),
		make([]*string, len(names))
	tx := pgtest.Begin(t, pool)
	for i, name := range names {
		steps[i] = "step"
		if i > 0 && name == "live" { // another branch of the first
			ids[i], claims[i], steps[i] = ids[0], claims[0], "other"
			continue
		}
		ids[i] = insertPending(t, pool)
		args := postgres.Strict{"id": ids[i]}
		if name == "pending" {
			continue
		}
		claims[i] = mustClaim(t, pool, ids[i], map[bool]string{true: dead, false: live}[name == "dead"])
		if withVariables && (strings.HasPrefix(name, "shown") || name == "unshowable") {
			variables[i] = new(`{"x": 2}`)
		}
		switch name {
		case "stale", "shown stale":
			claims[i]--
		case "ahead":
			claims[i]++
		case "locked":
			pgtest.Exec(t, tx, `select from agent_executions where id = @id for update`, args)
		case "written", "unshowable": // another branch fences: its lock lets others write steps, but not the row
			pgtest.Exec(t, tx, `select fence_agent_execution(@id, @claim)`, postgres.Strict{"id": ids[i], "claim": claims[i]})
			if name == "unshowable" {
				pgtest.Exec(t, tx, `update agent_executions set progress_seconds = 9 where id = @id`, args)
			}
		case "cancelled":
			pgtest.Exec(t, pool, `select cancel_agent_execution(@id, 'test', 'test')`, args)
			claims[i]++ // a cancel increments the claim; no process has the new one
		case "parked":
			pgtest.Exec(t, pool, `select lanekeeper.wait_agent_execution(@id, 1, 'wait', 'event', 'k', '1 hour', null)`, args)
			claims[i]++
		case "ended":
			pgtest.Exec(t, pool, `select lanekeeper.complete_agent_execution(@id, 1, 'completed', '', null, null, null)`, args)
		}
	}
	expireLease(t, pool, ids[slices.Index(names, "dead")])
	before := make([]string, len(ids))
	for i, id := range ids {
		before[i] = dumpExecution(t, pool, id)
	}
	got, err := checkpointBatch(t.Context(), pool, ids, claims, steps, variables)
	assert.NoError(t, err)
	assert.Equal(t, want, got)
	for i, name := range names {
		if !slices.Contains(strings.Fields(want), strconv.Itoa(i+1)) {
			assert.Equal(t, before[i], dumpExecution(t, pool, ids[i]), name)
			continue
		}
		record := pgtest.Value[string](t, pool, `
			select claim || fingerprint || failed || output from agent_checkpoints where execution_id = @id and step = @step`,
			postgres.Strict{"id": ids[i], "step": steps[i]})
		x := getExecution(t, pool, ids[i])
		shown := string(x.Variables) == `{"x": 2}`
		if record != "1printfalse3" || shown != (withVariables && name == "shown") {
			t.Errorf("%s: record %s, variables %s", name, record, x.Variables)
		}
	}
}

// A step with a checkpoint keeps its first result. A batch with such a step writes nothing; the engine then writes its
// steps or completions one by one.
func TestBatchWithDuplicateCheckpointRollsBack(t *testing.T) {
	t.Parallel()
	for name, sql := range map[string]string{
		"steps": `select lanekeeper.checkpoint_agent_executions(@ids, @claims, '{last,last}', '{print,print}', null, '{1,1}',
			'{"{\"x\": 2}",null}')`,
		"completions": `select lanekeeper.complete_agent_executions(@ids, @claims,
			'[{"status": "completed", "step": "last", "output": 1}, {"status": "completed", "step": "last", "output": 1}]')`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.DB(t)
			w := newWorker(t, pool)
			ids, claims := make([]string, 2), make([]int64, 2)
			for i := range ids {
				ids[i] = insertPending(t, pool)
				claims[i] = mustClaim(t, pool, ids[i], w)
			}
			pgtest.Exec(t, pool, existingRecords["step"], postgres.Strict{"id": ids[1]})
			before := dumpExecution(t, pool, ids[0]) + dumpExecution(t, pool, ids[1])
			_, err := pool.Exec(t.Context(), sql, postgres.Strict{"ids": ids, "claims": claims})
			assert.Truef(t, postgres.IsCode(err, "23505"), "the batch: %v", err)
			assert.Equal(t, before, dumpExecution(t, pool, ids[0])+dumpExecution(t, pool, ids[1]))
		})
	}
}

// A takeover waits for a fenced write, although the fence's lock lets other writes pass.
func TestTakeoverWaitsForFencedWrite(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	id := insertPending(t, pool)
	claim := mustClaim(t, pool, id, newWorker(t, pool))
	tx := pgtest.Begin(t, pool)
	pgtest.Exec(t, tx, `select fence_agent_execution(@id, @claim)`, postgres.Strict{"id": id, "claim": claim})
	pgtest.Exec(t, pool, `update agent_executions set progress_seconds = 9 where id = @id`, postgres.Strict{"id": id})
	_, err := pool.Exec(t.Context(), `
		with briefly as materialized (select set_config('lock_timeout', '100ms', true))
		update agent_executions x set claim = x.claim + 1 from briefly where x.id = @id`, postgres.Strict{"id": id})
	assert.Truef(t, postgres.IsCode(err, "55P03"), "the claim was taken: %v", err)
}

// A batch tells a stale claim from its neighbour in the order, also without a locked row.
func TestBatchSkipsStaleClaims(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"live", "stale", "ahead", "dead", "cancelled", "parked", "pending", "nobody's"} {
		for _, ends := range []bool{false, true} {
			t.Run(name+map[bool]string{true: ", ends"}[ends], func(t *testing.T) {
				t.Parallel()
				pool := pgtest.DB(t)
				live, dead := newWorker(t, pool), newWorker(t, pool)
				ids, claims := []string{insertPending(t, pool), insertPending(t, pool)}, make([]int64, 2)
				slices.Sort(ids)
				claims[0] = mustClaim(t, pool, ids[0], live)
				if name != "pending" {
					claims[1] = mustClaim(t, pool, ids[1], map[bool]string{true: dead, false: live}[name == "dead"])
				}
				args := postgres.Strict{"id": ids[1]}
				switch name {
				case "stale":
					claims[1]--
				case "ahead":
					claims[1]++
				case "dead":
					expireLease(t, pool, ids[1])
				case "cancelled":
					pgtest.Exec(t, pool, `select cancel_agent_execution(@id, 'test', 'test')`, args)
					claims[1]++
				case "parked":
					pgtest.Exec(t, pool, `select lanekeeper.wait_agent_execution(@id, 1, 'wait', 'event', 'k', '1 hour', null)`, args)
					claims[1]++
				case "nobody's":
					pgtest.Exec(t, pool, `update agent_executions set claimed_by = null where id = @id`, args)
				}
				before := dumpExecution(t, pool, ids[1])
				want, got := "1", ""
				if name == "live" {
					want = "1 2"
				}
				if ends {
					got = completeBatch(t, pool, ids, claims, []*string{new("last"), new("last")}, "completed")
				} else {
					var err error
					got, err = checkpointBatch(t.Context(), pool, ids, claims, []string{"step", "step"}, make([]*string, 2))
					require.NoError(t, err)
				}
				if after := dumpExecution(t, pool, ids[1]); got != want || (after == before) == (name == "live") {
					t.Errorf("%s were written:\nbefore %s\nafter  %s", got, before, after)
				}
			})
		}
	}
}

// completeBatch completes executions with their last steps. It returns the positions of the completed ones.
func completeBatch(t *testing.T, db postgres.DB, ids []string, claims []int64, steps []*string, status string) string {
	t.Helper()
	return pgtest.Value[string](t, db, `
		select coalesce(string_agg(n::text, ' ' order by n), '')
		  from lanekeeper.complete_agent_executions(@ids, @claims, (
		    select jsonb_agg(jsonb_build_object('status', @status::text, 'summary', 'said', 'result', '{"v": 1}'::jsonb,
		                                        'variables', '{"x": 2}'::jsonb)
		             || case when s is null then '{}' else jsonb_build_object('step', s, 'print', 'print', 'output', 3) end
		               order by i)
		      from (select i, (@steps::text[])[i] as s from generate_series(1, cardinality(@ids::uuid[])) i) u))`,
		postgres.Strict{"ids": ids, "claims": claims, "steps": steps, "status": status})
}

// If a batch leaves out a completion, it writes nothing of it, not even its last step.
func TestCompletionAndLastStepAreAtomic(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	live, dead := newWorker(t, pool), newWorker(t, pool)
	names := []string{
		"live", "stale", "dead", "lane", "lender", "locked", "cancelled", "parked", "reserved",
		"twice", "twice", "stepless",
	}
	ids, claims, steps := make([]string, len(names)), make([]int64, len(names)), make([]*string, len(names))
	for i, name := range names {
		if name != "stepless" {
			steps[i] = new("last")
		}
		w := map[bool]string{true: dead, false: live}[name == "dead"]
		if i > 0 && names[i-1] == name {
			ids[i], claims[i] = ids[i-1], claims[i-1]
			continue
		}
		ids[i] = insertPending(t, pool)
		claims[i] = mustClaim(t, pool, ids[i], w)
		args := postgres.Strict{"id": ids[i]}
		switch name {
		case "stale":
			claims[i]--
		case "lane":
			pgtest.Exec(t, pool, `select acquire_agent_lock('lane', @id || '#1')`, args)
		case "lender":
			pgtest.Exec(t, pool, `insert into agent_locks (lane, fencing_token, expires_at)
				values ('lent', 1, clock_timestamp())`)
			pgtest.Exec(t, pool, `insert into agent_lock_loans (lane, depth, lender, borrower, ttl_seconds)
				values ('lent', 1, @id, lanekeeper.agent_uuid7(), 30)`, args)
		case "cancelled":
			pgtest.Exec(t, pool, `select cancel_agent_execution(@id, 'test', 'test')`, args)
			claims[i]++ // a cancel increments the claim; no process has the new one
		case "parked":
			pgtest.Exec(t, pool, `select lanekeeper.wait_agent_execution(@id, 1, 'wait', 'event', 'k', '1 hour', null)`, args)
			claims[i]++
		case "reserved":
			pgtest.Exec(t, pool, `
				insert into agent_budget_reservations (execution_id, step, scopes, granted, tokens, cost_usd)
				  values (@id, 's', '{}', 1, 1, 0)`, args)
		}
	}
	expireLease(t, pool, ids[2])
	tx := pgtest.Begin(t, pool)
	// execution 5 is in a fenced write
	pgtest.Exec(t, tx, `select fence_agent_execution(@id, @claim)`, postgres.Strict{"id": ids[5], "claim": claims[5]})
	before := make([]string, len(ids))
	for i, id := range ids {
		before[i] = dumpExecution(t, pool, id)
	}
	assert.Equal(t, "1 10 12", completeBatch(t, pool, ids, claims, steps, "completed"))
	for i, name := range names {
		x := getExecution(t, pool, ids[i])
		switch name {
		case "live", "stepless", "twice":
			step := pgtest.Value[string](t, pool, `
				select coalesce(string_agg(step || fingerprint || failed || output, ' '), '') from agent_checkpoints
				 where execution_id = @id and claim = 1`, postgres.Strict{"id": ids[i]})
			want := map[string]string{"live": `lastprintfalse3`, "twice": `lastprintfalse3`}[name]
			assert.Truef(t, x.Status == executions.Completed && x.ResultSummary == "said" && string(x.Result) == `{"v": 1}` &&
				string(x.Variables) == `{"x": 2}` && step == want, "%s: %s, %q, %s, %s, step %s", name, x.Status, x.ResultSummary,
				x.Result, x.Variables, step)
			assert.Equal(t, 1, countCompletions(t, pool, ids[i]), name)
		default:
			assert.Equal(t, before[i], dumpExecution(t, pool, ids[i]), name)
		}
	}
	assert.True(t, !pgtest.Value[bool](t, pool, `
		select bool_or(c.created_at > x.completed_at) from agent_checkpoints c
		  join agent_executions x on x.id = c.execution_id`), "a step is younger than the end of its execution")
	for _, status := range []string{"waiting", "cancelled", "running"} {
		_, err := pool.Exec(t.Context(), `
			select lanekeeper.complete_agent_executions('{}', '{}',
			  jsonb_build_array('{"status": "completed"}'::jsonb, jsonb_build_object('status', @status::text)))`,
			postgres.Strict{"status": status})
		assert.Truef(t, postgres.IsCode(err, "22023"), "an end as %s: %v", status, err)
	}
}

// existingRecords has records of @id that may exist before it ends.
var existingRecords = map[string]string{
	"step":  `insert into agent_checkpoints (execution_id, step, claim, output) values (@id, 'last', 1, '"earlier"')`,
	"event": `insert into agent_events (event, key, external_id) values ('mine', @id::text, 'completed ' || @id)`,
}

// Earlier records do not prevent the end of an execution: the first result of a step counts, and an existing event
// stays.
func TestCompletionKeepsExistingCheckpoint(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	flows := map[string]executions.Func{}
	for what, record := range existingRecords {
		flows[what] = func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
			return resultOf(executions.Step(ctx, "last", func(ctx context.Context) (string, error) {
				x, _ := executions.Current(ctx)
				_, err := pool.Exec(ctx, record, postgres.Strict{"id": x.ID})
				return "later", err
			}))
		}
	}
	p := startEngine(t, pool, flows)
	for what, want := range map[string]string{"step": `"earlier" 1`, "event": `"later" 1`} {
		x := enginetest.Await(t, pool, p.startFlow(t, what), executions.Completed)
		got := pgtest.Value[string](t, pool, `
			select (select output::text from agent_checkpoints where execution_id = @id) || ' ' ||
			       (select count(*) from agent_events where external_id = 'completed ' || @id::text)`,
			postgres.Strict{"id": x.ID})
		assert.Equal(t, want, got, what)
	}
}

// consequence is an effect of an execution's end beyond its result.
type consequence struct {
	flow    string // "flow" if empty
	status  string // "completed" if empty
	prepare string // of @id
	check   string // true after it happened to @id
}

var consequences = map[string]consequence{
	"none": {prepare: `select @id::text`, check: `select @id <> ''`},
	"event": {prepare: `select @id::text`, check: `select count(*) = 1 from agent_events
		where external_id = 'completed ' || @id::text and execution_id = @id::text::uuid and key = @id::text
		and consumed_by is null and data = jsonb_build_object('execution_id', @id::text, 'status', 'completed', 'result_type',
		  'success', 'result_summary', 'said', 'locks_released', 0)`},
	"call": {
		prepare: `insert into agent_activity_open (activity_id, execution_id, claim, step, kind)
			values (lanekeeper.agent_uuid7(), @id, 1, 's', 'call')`,
		check: `select count(*) = 0 from agent_activity_open where execution_id = @id`,
	},
	"approval": {
		prepare: `insert into agent_approvals (trace_id, execution_id, step, parked, skill_name, skill_revision, arguments,
			arguments_hash, expires_at)
			values ('t', @id::text::uuid, 's', true, 'skill', 1, '{}', @id::text, clock_timestamp() + interval '1 hour')`,
		check: `select bool_and(status = 'expired') from agent_approvals where execution_id = @id`,
	},
	"request": {
		prepare: `insert into agent_requests (kind, execution_id, trace_id) values ('signature', @id, 't')`,
		check:   `select bool_and(status = 'closed') from agent_requests where execution_id = @id`,
	},
	"parent": {
		prepare: `with p as (
			  insert into agent_executions (trace_id, surface, flow, status) values ('t', 'flow', 'flow', 'running')
			    returning id)
			select id, @id::text from p`,
		check: `select count(*) = 1 from agent_unpublished_completions where execution_id = @id`,
	},
	"target": {
		prepare: `insert into agent_webhook_targets (name, url, secrets, events)
			values ('t' || right(@id::text, 12), 'http://localhost/' || @id::text, '{whsec_x}', '{execution.completed}')`,
		check: `select count(*) > 0 from agent_webhook_outbox where strpos(payload::text, @id::text) > 0`,
	},
	"delivery": {
		flow: "webhook", status: "failed",
		prepare: `with d as (
			  insert into agent_webhook_deliveries (endpoint, delivery_id, trace_id, last_trace_id, execution_id, body,
			    body_sha256)
			  values ('e', @id::text, 't', 't', @id::text::uuid, '', '') returning id)
			update agent_executions set input = jsonb_build_object('delivery', (select id from d)) where id = @id::text::uuid`,
		check: `select bool_and(status = 'dead') from agent_webhook_deliveries where execution_id = @id`,
	},
	"outside": {
		flow:    "external:there",
		prepare: `select @id::text`,
		check:   `select count(*) = 1 from agent_status_changes where execution_id = @id and status = 'completed'`,
	},
	"automation": {
		prepare: `insert into agent_automations (name, trigger, event, prompt)
			values (@id::text, 'event', 'AGENT_COMPLETED', 'do')`,
		check: `select count(*) > 0 from agent_automation_runs r join agent_events v on v.id = r.event_id
			where v.key = @id::text`,
	},
}

// createRunning creates a running execution whose completion has the consequence.
func (c consequence) createRunning(t *testing.T, pool *pgxpool.Pool, id, w string) string {
	t.Helper()
	args := postgres.Strict{"id": id}
	if c.flow != "" {
		pgtest.Exec(t, pool, `update agent_executions set flow = @flow where id = @id`,
			postgres.Strict{"id": id, "flow": c.flow})
	}
	pgtest.Exec(t, pool, `update agent_executions set status = 'running', claimed_by = @w, claim = 1 where id = @id`,
		postgres.Strict{"id": id, "w": w})
	pgtest.Exec(t, pool, c.prepare, args)
	if strings.Contains(c.check, "agent_unpublished_completions") {
		pgtest.Exec(t, pool, `update agent_executions set status = 'waiting', waiting_for = 'agent', waiting_key = @id::text
			where trace_id = 't' and status = 'running'`, args)
	}
	return id
}

// insertPendingWithID inserts a pending execution with the given id.
func insertPendingWithID(t *testing.T, pool *pgxpool.Pool, id string) string {
	t.Helper()
	pgtest.Exec(t, pool, `insert into agent_executions (id, trace_id, surface, flow) values (@id, @trace, 'flow', 'flow')`,
		postgres.Strict{"id": id, "trace": string(trace.New(trace.Flow))})
	return id
}

// first, second and third began together, early began before them.
const (
	early  = "01930000-0000-7000-8000-000000000001"
	first  = "01939999-9900-7000-8000-000000000001"
	second = "01939999-9980-7000-8000-000000000002"
	third  = "01939999-99ff-7000-8000-000000000003"
)

// batchLayouts are batches. Field at is the position of the execution with the consequence: alone, between executions
// that began with it, or apart from them.
var batchLayouts = map[string]struct {
	ids []string
	at  int
}{
	"alone":   {ids: []string{first}},
	"between": {ids: []string{first, second, third}, at: 1},
	"after":   {ids: []string{early, third}, at: 1},
	"unlike":  {ids: []string{third, first}, at: 1}, // not in order of ids
}

// A completion has the same consequences alone and in a batch, also next to executions without consequences.
func TestBatchedCompletionHasAllSideEffects(t *testing.T) {
	t.Parallel()
	for name, c := range consequences {
		for place, l := range batchLayouts {
			t.Run(name+" "+place, func(t *testing.T) {
				t.Parallel()
				pool := pgtest.DB(t)
				w, status := newWorker(t, pool), map[bool]string{true: "completed", false: c.status}[c.status == ""]
				alone := c.createRunning(t, pool, insertPending(t, pool), w)
				claims, ended := make([]int64, len(l.ids)), make([]string, len(l.ids))
				for i, id := range l.ids {
					insertPendingWithID(t, pool, id)
					claims[i], ended[i] = 1, fmt.Sprint(i+1)
					if i == l.at {
						c.createRunning(t, pool, id, w)
					} else {
						mustClaim(t, pool, id, w)
					}
				}
				pgtest.Exec(t, pool, `select lanekeeper.complete_agent_execution(@id, 1, @status, 'said', null, null, null)`,
					postgres.Strict{"id": alone, "status": status})
				require.Equal(t, strings.Join(ended, " "), completeBatch(t, pool, l.ids, claims, nil, status))
				for how, id := range map[string]string{"by itself": alone, "in a batch": l.ids[l.at]} {
					assert.Truef(t, pgtest.Value[bool](t, pool, c.check, postgres.Strict{"id": id}),
						"it does not follow an end %s", how)
				}
				for _, id := range append([]string{alone}, l.ids...) {
					assert.Equal(t, 1, countCompletions(t, pool, id))
				}
			})
		}
	}
}

// Lanes and budgets have their own lock order, so their executions complete alone.
func TestCompletionBatchSkipsLanesAndBudgets(t *testing.T) {
	t.Parallel()
	for what, take := range map[string]string{
		"lane": `select acquire_agent_lock('lane', @id || '#1')`,
		"loan": `with l as (select acquire_agent_lock('lane', 'another'))
			insert into agent_lock_loans (lane, depth, lender, borrower, ttl_seconds) select 'lane', 1, @id::text::uuid,
			lanekeeper.agent_uuid7(), 60 from l`,
		"budget": `insert into agent_budget_reservations (execution_id, step, scopes, granted, tokens, cost_usd)
			values (@id::text::uuid, 's', '{}', 1, 1, 0)`,
	} {
		for place, l := range batchLayouts {
			t.Run(what+" "+place, func(t *testing.T) {
				t.Parallel()
				pool := pgtest.DB(t)
				w := newWorker(t, pool)
				claims, want := make([]int64, len(l.ids)), []string{}
				for i, id := range l.ids {
					claims[i] = mustClaim(t, pool, insertPendingWithID(t, pool, id), w)
					if i != l.at {
						want = append(want, fmt.Sprint(i+1))
					}
				}
				pgtest.Exec(t, pool, take, postgres.Strict{"id": l.ids[l.at]})
				assert.Equal(t, strings.Join(want, " "), completeBatch(t, pool, l.ids, claims, nil, "completed"), want)
				assert.Equal(t, executions.Running, getExecution(t, pool, l.ids[l.at]).Status)
			})
		}
	}
}

// A completion batch notifies processes of free slots.
func TestCompletionBatchNotifiesFreeSlots(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	w := newWorker(t, pool)
	for _, limited := range []string{"another", "flow"} {
		pgtest.Exec(t, pool, `insert into agent_limits (kind, name, running) values ('flow', @flow, 1)`,
			postgres.Strict{"flow": limited})
		id := insertPending(t, pool)
		mustClaim(t, pool, id, w)
		conn, err := pgtest.Dialer(t, pool)(t.Context())
		require.NoError(t, err)
		defer func() { _ = conn.Close(context.WithoutCancel(t.Context())) }()
		pgtest.Exec(t, conn, `listen agent_ready`)
		require.Equal(t, "1", completeBatch(t, conn, []string{id}, []int64{1}, nil, "completed"))
		pgtest.Exec(t, conn, `select pg_notify('agent_ready', 'nothing')`)
		ctx, cancel := context.WithTimeout(t.Context(), timeout)
		heard, err := conn.WaitForNotification(ctx)
		cancel()
		assert.Truef(t, err == nil && (limited == "flow") == (heard.Payload == ""),
			"with a limit of %s: heard %+v, %v", limited, heard, err)
	}
}

// The function passes a setting to the triggers. The setting holds for its own statement only.
func TestCompletionBatchKeepsInvariants(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	w := newWorker(t, pool)
	ended, next := insertPending(t, pool), insertPending(t, pool)
	mustClaim(t, pool, ended, w)
	mustClaim(t, pool, next, w)
	tx := pgtest.Begin(t, pool)
	require.Equal(t, "1", completeBatch(t, tx, []string{ended}, []int64{1}, nil, "completed"))
	pgtest.Exec(t, tx, `update agent_executions set status = 'failed' where id = @id`, postgres.Strict{"id": next})
	assert.Equal(t, 1, countCompletions(t, tx, next))
	_, err := tx.Exec(t.Context(), `insert into agent_checkpoints (execution_id, step, claim) values (@id, 'late', 1)`,
		postgres.Strict{"id": ended})
	assert.Truef(t, postgres.IsCode(err, "LK001"), "a step after the end: %v", err)
}

// A plan made for small tables must also serve large ones: a batch reads only rows of its executions.
func TestBatchReadsOnlyItsRows(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	w := newWorker(t, pool)
	tx := pgtest.Begin(t, pool) // one session
	read := func() int {
		return pgtest.Value[int](t, tx, `
			select sum(seq_tup_read + coalesce(idx_tup_fetch, 0))::int from pg_stat_xact_user_tables
			 where relname in ('agent_executions', 'agent_checkpoints', 'agent_events', 'agent_requests', 'agent_approvals',
			                   'agent_activity_open', 'agent_locks')`)
	}
	batch := func() int {
		ids := pgtest.Value[[]string](t, tx, `
			select array_agg(id::text) from lanekeeper.start_agent_executions('{t,t,t}', '{flow,flow,flow}', '{flow,flow,flow}',
			  null, null, @worker, '{0,0}', '{}')`,
			postgres.Strict{"worker": w})
		before := read()
		pgtest.Exec(t, tx, `select lanekeeper.checkpoint_agent_executions(@ids, '{1,1,1}', '{s,s,s}', null, null, '{1,1,1}',
			null)`, postgres.Strict{"ids": ids})
		require.Equal(t, "1 2", completeBatch(t, tx, ids[:2], []int64{1, 1}, []*string{new("last"), nil}, "completed"))
		pgtest.Exec(t, tx, `select lanekeeper.complete_agent_execution(@id, 1, 'completed', '', null, null, null)`,
			postgres.Strict{"id": ids[2]})
		return read() - before
	}
	small := batch()
	for _, grow := range []string{
		`insert into agent_executions (id, trace_id, surface, flow, status) select lanekeeper.agent_uuid7(), 't', 'flow',
			'parent', 'running' from generate_series(1, 2000)`,
		`update agent_executions set status = 'waiting', waiting_for = 'agent', waiting_key = lanekeeper.agent_uuid7()::text
			where flow = 'parent'`,
		`insert into agent_requests (kind, execution_id, trace_id) select 'signature', id, 't' from agent_executions
			where flow = 'parent'`,
		`insert into agent_approvals (trace_id, execution_id, step, parked, skill_name, skill_revision, arguments,
			arguments_hash, expires_at)
		 select 't', id, 's', true, 'skill', 1, '{}', id::text, clock_timestamp() + interval '1 hour' from agent_executions
		where flow = 'parent'`,
		`insert into agent_activity_open (activity_id, execution_id, claim, step, kind) select id, id, 1, 's', 'call'
			from agent_executions where flow = 'parent'`,
		`insert into agent_locks (lane, locked_by, fencing_token, expires_at, execution_id)
		 select id::text, id::text, 1, clock_timestamp() + interval '1 hour', id from agent_executions where flow = 'parent'`,
	} {
		pgtest.Exec(t, tx, grow)
	}
	large := batch()
	assert.Truef(t, large <= small+20, "three executions read %d rows, and %d when the tables had grown", small, large)
}
