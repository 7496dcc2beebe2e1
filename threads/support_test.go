package threads_test

import (
	"context"
	"encoding/json"
	"log/slog"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/threads"
	"github.com/lanekeeper/lanekeeper/trace"
)

// logRecorder collects log lines.
type logRecorder struct{ testkit.Log }

// assertLine reports an error unless a log line has all parts.
func (j *logRecorder) assertLine(t *testing.T, parts ...string) {
	t.Helper()
	assert.Truef(t, j.hasLine(parts...), "no line of the log has %q:\n%s", parts, j)
}

func (j *logRecorder) hasLine(parts ...string) bool { return len(j.Lines(parts...)) > 0 }

type process struct {
	*executions.Engine
	pool *pgxpool.Pool
	log  *logRecorder
}

type flow = func(ctx context.Context) (executions.Result, error)

// startProcess starts a process with flows.
func startProcess(t *testing.T, pool *pgxpool.Pool, flows map[string]flow) *process {
	t.Helper()
	log := &logRecorder{}
	keeper := lanes.NewKeeper(pool, lanes.Options{})
	e, err := executions.New(pool, executions.Options{
		// The lease outlasts any pause of a busy machine: tests compare the claim that held a thread.
		Keeper: keeper, SweepEvery: 100 * time.Millisecond, LeaseTTL: 10 * time.Minute, Workers: 60,
		Logger: slog.New(slog.NewTextHandler(log, nil)),
	})
	require.NoError(t, err)
	for name, fn := range flows {
		require.NoError(t, e.Register(name, func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
			return fn(ctx)
		}))
	}
	testkit.Run(t, e.Run, keeper.Run)
	return &process{e, pool, log}
}

func (p *process) startFlow(t *testing.T, flow string) string {
	t.Helper()
	x, _, err := p.Start(t.Context(), p.pool, executions.Spec{Flow: flow, Surface: trace.Flow, ThreadID: "t"})
	require.NoError(t, err)
	return x.ID
}

// receive delivers a message of the participant.
func (p *process) receive(t *testing.T, thread, content string) threads.ReceiveResult {
	t.Helper()
	var got threads.ReceiveResult
	err := postgres.InTx(t.Context(), p.pool, func(tx pgx.Tx) (err error) {
		got, err = threads.Receive(t.Context(), p.Engine, tx, threads.Incoming{ThreadID: thread, Content: content})
		return err
	})
	require.NoError(t, err)
	return got
}

// sendAll sends messages for the execution of ctx.
func sendAll(ctx context.Context, contents ...string) error {
	for _, content := range contents {
		if _, err := threads.Send(ctx, threads.Outgoing{ThreadID: "t", Content: content}); err != nil {
			return err
		}
	}
	return nil
}

func resultOf(err error) (executions.Result, error) { return executions.Result{}, err }

// sentContents returns the sent messages of a thread in order, without queued or withdrawn ones.
func sentContents(t *testing.T, db postgres.DB, thread string) []string {
	t.Helper()
	return pgtest.Value[[]string](t, db, `
		select coalesce(array_agg(content order by seq), '{}') from agent_messages where thread_id = $1
		  and seq is not null`, thread)
}

// startClaimed starts an execution that a live worker of the test runs.
func startClaimed(t *testing.T, db postgres.DB, parent string) string {
	t.Helper()
	worker := pgtest.Value[string](t, db, `
		insert into agent_workers (name, ttl_seconds, expires_at)
		  values ('test', 600, clock_timestamp() + interval '10 minutes') returning id::text`)
	var id string
	// in one transaction, so that no process of the test claims it first
	err := postgres.InTx(t.Context(), db.(postgres.Beginner), func(tx pgx.Tx) error {
		id = pgtest.Value[string](t, tx, `
			insert into agent_executions (trace_id, surface, agent, flow, thread_id, status, parent_id, inherits, hinted_at)
			values (lanekeeper.agent_trace_id('fl'), 'flow', 'a', 'sql', 't', 'pending', nullif($1, '')::uuid, $1 <> '',
			  'infinity') returning id::text`, parent)
		require.Equal(t, 1, pgtest.Value[int](t, tx, `select count(*)::int from lanekeeper.claim_agent_execution($1, $2)`,
			id, worker), "not claimed")
		return nil
	})
	require.NoError(t, err)
	return id
}

// sendAs sends a message for an execution without running it.
func sendAs(t *testing.T, db postgres.DB, id, content string) threads.SendResult {
	t.Helper()
	var got threads.SendResult
	require.NoError(t, postgres.InTx(t.Context(), db.(postgres.Beginner), func(tx pgx.Tx) (err error) {
		claim := pgtest.Value[int64](t, tx, `select claim from agent_executions where id = $1`, id)
		got, err = threads.SendTx(t.Context(), tx, threads.Outgoing{
			ThreadID: "t", Content: content, ExecutionID: id, Claim: claim,
		})
		return err
	}))
	return got
}

// endExecution ends an execution by its status: completed, failed or cancelled.
func endExecution(t *testing.T, db postgres.DB, id, status string) {
	t.Helper()
	if status == "cancelled" {
		pgtest.Exec(t, db, `select cancel_agent_execution($1, 'admin', 'a test')`, id)
		return
	}
	pgtest.Exec(t, db, `select lanekeeper.complete_agent_execution(x.id, x.claim, $2, '', null, null, null)
		from agent_executions x where x.id = $1`, id, status)
}

// flush sends the queued messages of the thread t, and returns the log.
func flush(t *testing.T, db postgres.DB) *logRecorder {
	t.Helper()
	log := &logRecorder{}
	_, err := threads.Flush(t.Context(), db, slog.New(slog.NewTextHandler(log, nil)), "t")
	require.NoError(t, err)
	return log
}
