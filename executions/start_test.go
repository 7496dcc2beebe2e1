package executions_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/enginetest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/trace"
)

// startSpecsOfAllKinds returns starts of all kinds.
func startSpecsOfAllKinds(parent string) []executions.Spec {
	return []executions.Spec{
		{Flow: "flow", Surface: trace.Flow},
		{Flow: "flow", Surface: trace.Chat, TraceID: trace.New(trace.Chat), ThreadID: "thread", Agent: "somebody"},
		{Flow: "flow", Surface: trace.Heartbeat, Input: json.RawMessage(`{"b":1.50,"a":[1e2,null,{}],  "b":"\u00e9<"}`)},
		{Flow: "flow", Surface: trace.Operate, Input: []int{1, 2}, Queue: executions.Interactive, Priority: 4},
		{Flow: "flow", Surface: trace.Flow, Input: struct{}{}, ParentID: parent, Awaited: true, Inherits: true},
		{
			Flow: "flow", Surface: trace.Flow, ParentID: strings.ToUpper(parent), OnLost: "hand_on", MaxAttempts: 9,
			ProgressSeconds: 30,
		},
		{Flow: "external:there", Surface: trace.Webhook},
		{Flow: "external", Surface: trace.Flow, OnLost: "hand_on", Priority: 1},
	}
}

// wantStored compares a returned execution with the stored one.
func wantStored(t *testing.T, db postgres.DB, how string, got executions.Execution) {
	t.Helper()
	assert.Equal(t, "", cmp.Diff(getExecution(t, db, got.ID), got), how)
}

// A start does not read its new row: it builds the result from the request and the response.
func TestStartReturnsStoredRow(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := newEngine(t, pool, flowMap(noop))
	parent := insertPending(t, pool)
	specs := startSpecsOfAllKinds(parent)
	for _, claimed := range []bool{false, true} {
		here := make([]bool, len(specs))
		for i, s := range specs {
			here[i] = claimed && !strings.HasPrefix(s.Flow, "external")
		}
		together, err := p.StartSeveral(t.Context(), specs, here)
		require.NoError(t, err)
		for i, s := range specs {
			wantStored(t, pool, fmt.Sprintf("start %d of several, claimed %t", i, here[i]), together[i])
			assert.Truef(t, together[i].Status == map[bool]executions.Status{
				true:  executions.Running,
				false: executions.Pending,
			}[here[i]] && together[i].Flow == s.Flow, "start %d of several is %s of %s", i, together[i].Status, together[i].Flow)
			alone, err := p.StartSeveral(t.Context(), specs[i:i+1], here[i:i+1])
			require.NoError(t, err)
			wantStored(t, pool, fmt.Sprintf("start %d, claimed %t", i, here[i]), alone[0])
		}
	}
}

// A process starts executions, one by one and many at once. It claims some at their start and leaves the others to the
// queue.
func TestLocalStartReturnsStoredRow(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	leave := make(chan struct{})
	body := func(ctx context.Context) (executions.Result, error) {
		select {
		case <-leave:
		case <-ctx.Done():
		}
		return executions.Result{}, nil
	}
	p := startEngine(t, pool, flowMap(body), neverSweep, func(o *executions.Options) { o.Workers = 2 })
	defer close(leave)
	pgtest.Eventually(t, p.Works, "the engine works")
	begin := func(s executions.Spec) (executions.Execution, error) {
		x, created, err := p.Start(t.Context(), pool, s)
		if err == nil && !created {
			err = fmt.Errorf("%s was not created", x.ID)
		}
		return x, err
	}
	one, err := begin(executions.Spec{Flow: "flow", Surface: trace.Flow, Input: map[string]any{"a": 1}})
	require.NoError(t, err)
	wantStored(t, pool, "the first", one)
	assert.Truef(t, one.Status == executions.Running && one.ClaimedBy != nil && one.Claim == 1 && one.StartedAt != nil,
		"the first, for which there is a worker, is %+v", one)
	started := make([]executions.Execution, 40)
	var group errgroup.Group
	for i := range started {
		group.Go(func() (err error) {
			started[i], err = begin(executions.Spec{Flow: "flow", Surface: trace.Flow, Input: i, ThreadID: fmt.Sprint(i)})
			return err
		})
	}
	require.NoError(t, group.Wait())
	running := 0
	for i, x := range started {
		assert.Truef(t, string(x.Input) == fmt.Sprint(i) && x.ThreadID != nil && *x.ThreadID == fmt.Sprint(i),
			"start %d got the execution of another: %+v", i, x)
		if x.Status == executions.Running {
			running++
			wantStored(t, pool, "claimed as it began", x)
			continue
		}
		if now := getExecution(t, pool, x.ID); now.Status == executions.Pending { // else a worker has claimed it since
			wantStored(t, pool, "left to the queue", x)
		}
	}
	assert.Truef(t, running <= 1, "%d starts were claimed with one free worker", running)
}

// A run also returns the row as it ended, with concurrent writes of others.
func TestRunSyncReturnsStoredRow(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := startEngine(t, pool, map[string]executions.Func{"flow": func(ctx context.Context,
		input json.RawMessage,
	) (executions.Result, error) {
		x, _ := executions.Current(ctx)
		var kind int
		if err := json.Unmarshal(input, &kind); err != nil {
			return executions.Result{}, err
		}
		_, err := executions.Step(ctx, "meanwhile", func(ctx context.Context) (int, error) {
			_, err := pool.Exec(ctx, `
				update agent_executions set flow_version = 3, inherits = true, variables = '{"b": 1, "a": 2}' where id = @id
				   and @kind::int > 1`,
				postgres.Strict{"id": x.ID, "kind": kind})
			return 0, err
		})
		if err == nil && kind == 2 {
			err = executions.SetVariables(ctx, map[string]any{"long": 1, "b": 1.50})
		}
		if err != nil {
			return executions.Result{}, err
		}
		switch kind {
		case 3:
			return executions.Result{}, executions.ErrTimedOut
		case 4:
			_, err = executions.Step(ctx, "fails", func(context.Context) (int, error) { return 0, fmt.Errorf("no") })
			return executions.Result{}, err
		case 5:
			return executions.Result{Summary: "nothing"}, nil
		}
		return executions.Result{Summary: "said", Value: json.RawMessage(`{"z":1.50, "a":` + string(input) + `, "z":"<"}`)},
			nil
	}}, neverSweep)
	pgtest.Eventually(t, p.Works, "the engine works")
	for _, callers := range []int{1, 20} {
		var group errgroup.Group
		for range callers {
			group.Go(func() error {
				for kind := range 6 {
					got, err := p.RunSync(t.Context(), executions.Spec{Flow: "flow", Surface: trace.Operate, Input: kind})
					if err != nil {
						return err
					}
					wantStored(t, pool, fmt.Sprintf("run %d of %d callers", kind, callers), got)
				}
				return nil
			})
		}
		assert.NoError(t, group.Wait())
	}
}

// Concurrent runs of a process whose lease expired unnoticed are queued, and their callers get the rows.
func TestRunSyncWithExpiredLeaseIsQueued(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	body := flowMap(func(ctx context.Context) (executions.Result, error) {
		return resultOf(executions.Step(ctx, "step", func(context.Context) (int, error) { return 7, nil }))
	})
	paused := newEngine(t, pool, body, func(o *executions.Options) { o.LeaseTTL = 10 * time.Minute })
	spec := executions.Spec{Flow: "flow", Surface: trace.Flow}
	_, err := paused.RunSync(t.Context(), spec)
	require.NoError(t, err)
	pgtest.Exec(t, pool, `update agent_workers set expires_at = clock_timestamp()`)
	var group errgroup.Group
	for range 20 {
		group.Go(func() (err error) {
			defer func() {
				if p := recover(); p != nil {
					err = fmt.Errorf("panic: %v", p)
				}
			}()
			x, err := paused.RunSync(t.Context(), spec)
			if err == nil && x.Status.Ended() {
				err = fmt.Errorf("the execution is %s", x.Status)
			}
			return err
		})
	}
	assert.NoError(t, group.Wait())
	startEngine(t, pool, body)
	pgtest.Until(t, pool, 21, `select count(*) from agent_executions where status = 'completed'`)
}

// RunSync cancels the execution of a caller who leaves while the engine looks for the flow.
func TestCallerLeavesBeforeFlow(t *testing.T) {
	t.Parallel()
	p := newEngine(t, pgtest.DB(t), flowMap(noop))
	ctx, leave := context.WithCancel(t.Context())
	p.Fallback(func(ctx context.Context, _ string) (executions.Func, error) {
		leave()
		return nil, ctx.Err()
	})
	x, err := p.RunSync(ctx, executions.Spec{Flow: "other", Surface: trace.Flow})
	assert.Truef(t, err == nil && x.Status == executions.Cancelled, "the execution is %q, %v", x.Status, err)
}

// RunSync cancels the executions of callers who leave during the inserts, also those that a batch queued because the
// lease had expired.
func TestCallersLeaveDuringInsert(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := newEngine(t, pool, flowMap(noop), func(o *executions.Options) { o.LeaseTTL = 10 * time.Minute })
	_, err := p.RunSync(t.Context(), executions.Spec{Flow: "flow", Surface: trace.Flow}) // begins the lease
	require.NoError(t, err)
	pgtest.Exec(t, pool, `update agent_workers set expires_at = clock_timestamp();
		create function await_lock() returns trigger language plpgsql as $$
		begin
		  while not pg_try_advisory_xact_lock(7) loop perform pg_sleep(0.01); end loop;
		  return new;
		end $$;
		create trigger await_lock after insert on agent_executions execute function await_lock()`)
	locked, err := pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = locked.Exec(t.Context(), `select pg_advisory_xact_lock(7)`)
	require.NoError(t, err)
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	var callers sync.WaitGroup
	for range 20 {
		callers.Go(func() { // a caller who leaves before the insert gets an error
			_, _ = p.RunSync(ctx, executions.Spec{Flow: "flow", Surface: trace.Flow})
		})
	}
	pgtest.Until(t, pool, true, `
		select exists (select from pg_stat_activity where datname = current_database() and wait_event = 'PgSleep')`)
	leave()
	require.NoError(t, locked.Rollback(t.Context()))
	callers.Wait()
	pgtest.Equal(t, pool, 0, `select count(*) from agent_executions where not status in ('completed', 'cancelled')`)
}

// A batch of starts keeps the rules of a single row.
func TestStartBatchKeepsConstraints(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	w := newWorker(t, pool)
	// Three starts. The second is claimed and has its own key.
	begin := func(key string, value any) error {
		second := map[string]any{"trace_id": "t", "surface": "flow", "flow": "f"}
		if key != "" {
			second[key] = value
		}
		_, err := pool.Exec(t.Context(), `
			select lanekeeper.start_agent_executions(array['t', s ->> 'trace_id', 't'], array['flow', s ->> 'surface', 'flow'],
			  array['f', s ->> 'flow', 'f'], null,
			       jsonb_build_array('{"queued": true}'::jsonb, s - '{trace_id,surface,flow}'::text[],
			         '{"queued": true}'::jsonb), $1, '{0,0}', '{}')
			  from (select $2::jsonb) o (s)`, w, second)
		return err
	}
	for key, bad := range map[string]any{
		"trace_id": "", "surface": "page", "flow": "", "queue": "slow", "priority": 5, "max_attempts": 0, "on_lost": "hope",
		"progress_seconds": -1,
	} {
		err := begin(key, bad)
		assert.Truef(t, postgres.IsCode(err, "23514"), "%s = %v: %v", key, bad, err)
	}
	for _, flow := range []string{"external", "external:there"} {
		err := begin("flow", flow)
		assert.Truef(t, postgres.IsCode(err, "LK002"), "a claimed %s: %v", flow, err)
	}
	pgtest.Exec(t, pool, `select pause_agent('prices look wrong')`)
	err := begin("", nil)
	assert.Truef(t, postgres.IsCode(err, "LK003"), "claimed while the agent is paused: %v", err)
	pgtest.Exec(t, pool, `select resume_agent('test')`)
	assert.Equal(t, 0, pgtest.Value[int](t, pool, `select count(*) from agent_executions`))
	pgtest.Exec(t, pool, `
		select lanekeeper.start_agent_executions('{t,t,t}', '{flow,flow,flow}', '{external,f,external:there}', null,
		                                         '[{"queued": true}, {}, {"queued": true}]', $1, '{0,0}', '{}')`, w)
	pgtest.Equal(t, pool, "external t fail, external:there t fail, f f resume", `select string_agg(concat_ws(' ', flow, is_external, on_lost), ', ' order by flow)
		from agent_executions`)
}

// The flow alone decides whether an execution is external, for every writer.
func TestIsExternalFollowsFlow(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	id := pgtest.Value[string](t, pool, `insert into agent_executions (trace_id, surface, flow, is_external)
		values ('t', 'flow', 'flow', true) returning id::text`)
	for _, step := range []struct{ set, want string }{
		{set: "is_external = is_external", want: "f"},
		{set: "flow = 'external:there'", want: "t"},
		{set: "is_external = false", want: "t"},
		{set: "flow = 'externals'", want: "f"},
		{set: "is_external = true", want: "f"},
		{set: "flow = 'external'", want: "t"},
	} {
		pgtest.Exec(t, pool, `update agent_executions set `+step.set+` where id = @id`, postgres.Strict{"id": id})
		got := pgtest.Value[string](t, pool, `select left(is_external::text, 1) from agent_executions where id = @id`,
			postgres.Strict{"id": id})
		assert.Equal(t, step.want, got, step.set, "is_external")
	}
}

// The ids of a batch are like those of agent_uuid7: version 7, of this moment, unique, and in the order of creation.
func TestStartBatchIDsAreOrdered(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	for range 3 {
		pgtest.Equal(t, pool, "300 300 300 t t t", `
			with b as (
			  select n, id, at from lanekeeper.start_agent_executions(array_fill('t'::text, '{300}'),
			    array_fill('flow'::text, '{300}'), array_fill('f'::text, '{300}'),
			         null, null, null, '{0,0}', '{}'))
			select concat_ws(' ', count(*), count(distinct id), count(distinct right(id::text, 16)),
			       bool_and(substr(id::text, 15, 1) = '7' and substr(id::text, 20, 1) in ('8', '9', 'a', 'b')),
			       array_agg(id order by id) = array_agg(id order by n),
			       bool_and(id >= lanekeeper.agent_uuid7_floor(at - interval '1 millisecond')
			         and id < lanekeeper.agent_uuid7_floor(at + interval '1 second'))) from b`)
	}
}

// A list reads a few executions of one agent, flow or surface among many without reading others.
func TestListOfRareExecutionsUsesIndex(t *testing.T) {
	t.Parallel()
	tx := pgtest.Begin(t, pgtest.DB(t))
	for _, sql := range []string{
		`set local session_replication_role = replica`,
		`insert into agent_executions (trace_id, surface, agent, flow, status, parent_id)
		 select 'hb_' || n, case n when 9 then 'webhook' when 10 then 'chat' else 'heartbeat' end,
		        case n when 7 then 'rare' else 'common' end, case n when 8 then 'rare' else 'common' end, 'completed',
		        case when n = 10 or n > 1500 then lanekeeper.agent_uuid7() end
		from generate_series(1, 3000) n`,
		`analyze agent_executions`,
	} {
		pgtest.Exec(t, tx, sql)
	}
	for range 7 { // the sixth execution would use a generic plan
		for _, f := range []executions.Filter{{Agent: "rare"}, {Flow: "rare"}, {Surface: "webhook"}, {Surface: "chat"}} {
			found, err := executions.List(t.Context(), tx, f)
			require.Truef(t, err == nil && len(found) == 1, "found %d, %v", len(found), err)
		}
	}
	for index, scans := range map[string]int{
		"agent_executions_of_agent": 7, "agent_executions_of_flow": 7,
		"agent_executions_of_surface": 14, "agent_executions_children_of_surface": 14,
	} {
		assert.Equal(t, scans, pgtest.Value[int](t, tx, `select pg_stat_get_xact_numscans($1::text::regclass)`, index),
			index)
	}
}

func TestNotFoundErrorNamesRetention(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := newEngine(t, pool, nil)
	old := pgtest.Value[string](t, pool, `select lanekeeper.agent_uuid7(clock_timestamp() - interval '31 days')::text`)
	recent := pgtest.Value[string](t, pool, `select lanekeeper.agent_uuid7(clock_timestamp() - interval '29 days')::text`)
	for _, c := range []struct{ after, id, says string }{
		{`select 1`, old, ""},
		{`update agent_retention set keep = '30 days' where kind = 'executions'`, old, ""}, // nothing removed yet
		{`update agent_retention_passes set removed = 1 where kind = 'executions'`, old, "; retention may have removed it: " +
			"it keeps ended executions for 30 days"},
		{`select 1`, recent, ""},
		{`update agent_retention set keep = null where kind = 'executions'`, recent, "; retention may have removed it"},
	} {
		pgtest.Exec(t, pool, c.after)
		want := "execution " + c.id + ": no such execution" + c.says
		_, read := executions.Get(t.Context(), pool, c.id)
		_, forked := p.Fork(t.Context(), pool, executions.ForkSpec{ID: c.id})
		for what, err := range map[string]error{"read": read, "fork": forked} {
			assert.Truef(t, errors.Is(err, executions.ErrNotFound) && strings.HasSuffix(err.Error(), want),
				"%s after %s: %v, want %s", what, c.after, err, want)
		}
	}
	_, err := executions.Get(t.Context(), pool, "nonsense")
	assert.ErrorIs(t, err, executions.ErrNotFound, "an id that is none")
}

// A redacted execution shows every value and every free text bounded and without secrets. The row itself does not
// change.
func TestRedactedExecutionHasNoSecrets(t *testing.T) {
	const secret = "Zq81xLm0Kk77"
	texts := map[string]bool{
		"ResultSummary": true, "WaitingKey": true, "ErrorMessage": true, "FailedStep": true,
		"CancelReason": true, "DedupeKey": true,
		"Step": true,
	}
	for _, long := range []string{"", strings.Repeat("x ", 100<<10)} {
		text := "password=" + secret + " " + long
		for _, row := range []any{&executions.Execution{}, &executions.Checkpoint{}} {
			v := reflect.ValueOf(row).Elem()
			for i := range v.NumField() {
				switch field := v.Field(i).Addr().Interface().(type) {
				case *json.RawMessage:
					*field = json.RawMessage(fmt.Sprintf(`{"token": %q, "said": %q}`, secret, text))
				case *string:
					if texts[v.Type().Field(i).Name] {
						*field = text
					}
				case **string:
					if texts[v.Type().Field(i).Name] {
						*field = &text
					}
				}
			}
			before := fmt.Sprintf("%+v", v.Interface())
			var redacted any
			switch row := row.(type) {
			case *executions.Execution:
				redacted = row.Redacted(t.Context())
			case *executions.Checkpoint:
				redacted = row.Redacted(t.Context())
			}
			got, err := json.Marshal(redacted)
			require.NoError(t, err)
			assert.Truef(t, !strings.Contains(string(got), secret) && strings.Contains(string(got), "[redacted]") &&
				len(got) <= 10*(64<<10)+4096, "%T: %d bytes: %.2000s", row, len(got), got)
			assert.Equal(t, before, fmt.Sprintf("%+v", v.Interface()), row)
		}
	}
}

func TestRedactedKeepsOtherValues(t *testing.T) {
	x := executions.Execution{
		ID: "1", Input: json.RawMessage(`{"n":1.50}`), ResultSummary: "done",
		WaitingKey: new("invoice-7"),
	}
	assert.NoDiff(t, x, x.Redacted(t.Context()))
	c := executions.Checkpoint{Step: "look#2", Output: json.RawMessage(`[1,"a"]`)}
	assert.NoDiff(t, c, c.Redacted(t.Context()))
}

// A checkpoint of any execution may hold the answer of a model or a memory entry.
func TestRedactedHidesTexts(t *testing.T) {
	ctx := activity.WithoutTexts(t.Context())
	c := executions.Checkpoint{Step: "reflect", Output: json.RawMessage(`{"memories":["PURPLE"]}`)}
	assert.Equal(t, `{"note":"`+activity.HiddenText+`"}`, string(c.Redacted(ctx).Output))
	for surface, flow := range map[string]string{"chat": "chat", "heartbeat": "delegate"} {
		x := executions.Execution{Surface: surface, Flow: flow, Input: json.RawMessage(`"PURPLE"`), ResultSummary: "PURPLE"}
		x = x.Redacted(ctx)
		assert.Equal(t, activity.HiddenText, x.ResultSummary, flow)
		assert.Equal(t, `"`+activity.HiddenText+`"`, string(x.Input), flow)
	}
}

func TestInsertClaimedRunsAfterCommit(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := startEngine(t, pool, flowMap(func(context.Context) (executions.Result, error) {
		return executions.Result{Summary: "ran"}, nil
	}))
	spec := executions.Spec{Flow: "flow", Surface: trace.Chat, DedupeKey: "once"}
	undone := errors.New("undone")
	err := postgres.InTx(t.Context(), pool, func(tx pgx.Tx) error {
		_, created, err := p.InsertClaimed(t.Context(), tx, spec)
		require.Truef(t, err == nil && created, "created %v, %v", created, err)
		return undone
	})
	require.ErrorIs(t, err, undone)
	pgtest.Equal(t, pool, 0, `select count(*) from agent_executions`)
	var claimed executions.Execution
	for i := range 2 {
		err = postgres.InTx(t.Context(), pool, func(tx pgx.Tx) error {
			got, created, err := p.InsertClaimed(t.Context(), tx, spec)
			if i == 0 {
				claimed = got
			} else if got.ID != claimed.ID {
				t.Errorf("the key led to %s and %s", claimed.ID, got.ID)
			}
			assert.Equal(t, i == 0, created, i)
			return err
		})
		require.NoError(t, err)
	}
	x, err := p.RunClaimed(t.Context(), &claimed)
	require.NoError(t, err)
	assert.Equal(t, executions.Completed, x.Status)
	assert.Equal(t, "ran", x.ResultSummary)
}

// If the caller of ClaimAndRun leaves, its run continues in another process.
func TestClaimAndRunReleasesRunWhenCallerLeaves(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	ctx, leave := context.WithCancel(t.Context())
	p := newEngine(t, pool, flowMap(func(inner context.Context) (executions.Result, error) {
		leave()
		<-inner.Done()
		return executions.Result{}, context.Cause(inner)
	}))
	id := p.startFlow(t, "flow")
	require.NoError(t, p.ClaimAndRun(ctx, id))
	startEngine(t, pool, flowMap(noop))
	enginetest.Await(t, pool, id, executions.Completed)
}
