package flows_test

import (
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/flows"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/enginetest"
	"github.com/lanekeeper/lanekeeper/internal/logging"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/threads"
	"github.com/lanekeeper/lanekeeper/trace"
)

// scenario is a process that runs one of the three scenarios of threads, with the flows of the example. The table seen
// records the states of the thread's lane and of its messages in commit order. Both change under the lane's lock.
type scenario struct {
	*testProcess
	log *testkit.Log
	id  string // the thread's id
}

// waitForLog waits until the log has n lines with all parts. It fails the test if the log has more.
func (s *scenario) waitForLog(t *testing.T, n int, parts ...string) {
	t.Helper()
	defer func() {
		if t.Failed() {
			t.Log(strings.Join(s.log.Lines("lane"), ""))
		}
	}()
	pgtest.Eventually(t, func() bool { return len(s.log.Lines(parts...)) >= n }, "the log has "+
		strings.Join(parts, " "))
	got := s.log.Lines(parts...)
	assert.Truef(t, len(got) == n, "%d lines have %q, want %d:\n%s", len(got), parts, n, strings.Join(got, ""))
}

// recordStatesSQL creates triggers that record each state of the thread's lane, as in agent_thread_locks, and of its
// messages. An execution is recorded by the name of its flow.
const recordStatesSQL = `
create table seen (n bigint generated always as identity, what text);
create function flow_of(p_id uuid) returns text language sql as $$
  select coalesce((select replace(replace(flow, '_encadenado', ''), 'external:', '') from agent_executions
    where id = p_id), '?') $$;
create function see_lane() returns trigger language plpgsql as $$ begin
  insert into seen (what)
  select coalesce((select flow_of(v.active_execution_id) || ' has it' || case when v.parked then ', parked' else '' end
                     from agent_thread_locks v where 'thread:' || v.thread_id = new.lane), 'free');
  return null; end $$;
create trigger see_lane after insert or update on agent_locks for each row
  when (new.lane like 'thread:%' and new.fencing_token > 0) execute function see_lane();
create function see_message() returns trigger language plpgsql as $$ begin
  insert into seen (what)
  select case when m.role = 'user' then 'visitor' else flow_of(m.execution_id) end || ' ' || m.status || ': ' || m.content
    from agent_messages m where m.id = new.id;
  return null; end $$;
create constraint trigger see_message after insert or update on agent_messages deferrable initially deferred
  for each row execute function see_message();`

// newScenario starts a process with the flows of an example file, and creates a thread.
func newScenario(t *testing.T, name, participant string) *scenario {
	t.Helper()
	pool := pgtest.DB(t)
	for text := range strings.SplitSeq(readFile(t, "../examples/onboarding/threads/"+name), "\n---\n") {
		putFlow(t, pool, strings.Replace(text, "kind: flow\n", "", 1))
	}
	pgtest.Exec(t, pool, recordStatesSQL)
	s := &scenario{testProcess: &testProcess{pool: pool}, log: &testkit.Log{}, id: strings.ToLower(participant)}
	_, _, err := threads.Ensure(t.Context(), pool, threads.Thread{ID: s.id, Participant: participant, IdleSeconds: 600})
	require.NoError(t, err)
	s.startEngine(t, pool)
	return s
}

func (s *scenario) startEngine(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	log := slog.New(logging.Handler(slog.NewTextHandler(s.log, nil)))
	e := enginetest.New(t, pool, func(o *executions.Options) {
		o.Keeper, o.Logger = lanes.NewKeeper(pool, lanes.Options{Logger: log}), log
	})
	s.Engine = e
	e.Fallback((&flows.Interpreter{Pool: pool, Engine: e, Logger: log}).Find)
	testkit.Run(t, e.Run)
}

// startFlow starts a flow in the thread.
func (s *scenario) startFlow(t *testing.T, flow string, input any) string {
	t.Helper()
	x, _, err := s.Start(t.Context(), s.pool, executions.Spec{
		Flow: flow, Surface: trace.Flow,
		ThreadID: s.id, Input: input,
	})
	require.NoError(t, err)
	return x.ID
}

// waitForState waits until the last recorded state is the wanted one.
func (s *scenario) waitForState(t *testing.T, want string) {
	t.Helper()
	pgtest.Eventually(t, func() bool {
		states := s.states(t)
		return len(states) > 0 && states[len(states)-1] == want
	}, want)
}

// states returns the recorded states in order, without repetitions.
func (s *scenario) states(t *testing.T) []string {
	t.Helper()
	return pgtest.Value[[]string](t, s.pool, `
		select coalesce(array_agg(what order by n), '{}')
		  from (select n, what, lag(what) over (order by n) as before from seen) x where what is distinct from before`)
}

// laneState returns the thread's row of agent_thread_locks as a text: holder, minutes, participant, marks and queue. A
// free thread gives "".
func (s *scenario) laneState(t *testing.T) string {
	t.Helper()
	return pgtest.Value[string](t, s.pool, `
		select coalesce((select format('%s %s min, %s%s%s, %s queued', flow_of(active_execution_id), lock_minutes,
		                               participant_name, case when parked then ', parked' else '' end,
		                               case when stale then ', stale' else '' end, queued)
		  from agent_thread_locks where thread_id = $1), '')`, s.id)
}

func (s *scenario) expectLane(t *testing.T, want string) {
	t.Helper()
	assert.Equal(t, want, s.laneState(t))
}

// expectStates compares all recorded states with the expected ones, and expects a free lane.
func (s *scenario) expectStates(t *testing.T, want ...string) {
	t.Helper()
	assert.NoDiff(t, want, s.states(t))
	s.expectLane(t, "")
}

func TestScenarioIndependentAgents(t *testing.T) {
	t.Parallel()
	s := newScenario(t, "independientes.yaml", "Juan")
	a := s.startFlow(t, "agente_a", nil)
	awaitWaiting(t, s.pool, a, 1)
	s.expectLane(t, "agente_a 0 min, Juan, parked, 0 queued")
	s.waitForLog(t, 1, `msg="loading configuration"`, "flow=agente_a", "version=1", "execution_id="+a)
	pgtest.Exec(t, s.pool, `update agent_locks set locked_at = locked_at - interval '190 seconds'
		where lane = 'thread:juan'`)

	b := s.startFlow(t, "agente_b", nil)
	enginetest.Await(t, s.pool, b, executions.Completed)
	s.expectLane(t, "agente_a 3 min, Juan, parked, 1 queued")
	s.waitForLog(t, 1, `msg="lane acquired"`, "lane=thread:juan", "owner="+a+"#1")
	s.waitForLog(t, 1, "level=WARN", `msg="lane busy"`, "lane=thread:juan", "owner="+b+"#1", "holder="+a+"#")
	s.waitForLog(t, 1, `msg="locks released"`, "count=0", "execution_id="+b)

	deliverEvent(t, s.testProcess, "EVENT_COMPLETED", "trabajo "+a, `{}`)
	enginetest.Await(t, s.pool, a, executions.Completed)
	s.waitForState(t, "agente_b sent: Ahora tienes una evaluación pendiente")
	s.waitForLog(t, 1, `msg="locks released"`, "count=1", "execution_id="+a)
	s.expectStates(t,
		"agente_a has it",
		"agente_a sent: Necesito tus documentos",
		"agente_a has it, parked",
		"agente_b queued: Ahora tienes una evaluación pendiente",
		"agente_a has it",
		"free",
		"agente_b sent: Ahora tienes una evaluación pendiente",
	)
}

func TestScenarioChainedAgents(t *testing.T) {
	t.Parallel()
	s := newScenario(t, "encadenados.yaml", "Maria")
	pgtest.Exec(t, s.pool, `update agent_threads set idle_seconds = 1234`)
	parent := s.startFlow(t, "coordinador_encadenado", map[string]string{"pausa": "10ms", "pausa_del_recolector": "10ms"})
	child := *awaitWaiting(t, s.pool, parent, 2).WaitingKey
	awaitWaiting(t, s.pool, child, 2)
	s.expectLane(t, "recolector 0 min, Maria, parked, 0 queued")
	s.waitForLog(t, 1, `msg="lane acquired"`, "lane=thread:maria")
	s.waitForLog(t, 1, `msg="lane inherited"`, "lane=thread:maria", "from="+parent, "to="+child+"#")
	x := enginetest.Await(t, s.pool, child, executions.Waiting)
	assert.Truef(t, postgres.Deref(x.WaitingFor) == "response" && postgres.Deref(x.WaitingKey) == "maria",
		"the collector waits for %s %s", postgres.Deref(x.WaitingFor), postgres.Deref(x.WaitingKey))
	x = enginetest.Await(t, s.pool, parent, executions.Waiting)
	assert.Equal(t, "agent", postgres.Deref(x.WaitingFor), "the coordinator waits for")
	ttl := pgtest.Value[int](t, s.pool, `select ttl_seconds from agent_locks where lane = 'thread:maria'`)
	loans := pgtest.Value[string](t, s.pool,
		`select string_agg(flow_of(lender) || ' to ' || flow_of(borrower) || ' ' || ttl_seconds, ', ') from agent_lock_loans`)
	assert.Equal(t, 1234, ttl)
	assert.Equal(t, "coordinador to recolector 1234", loans)

	pgtest.Exec(t, s.pool, `select * from lanekeeper.receive_agent_message('maria', 'Aquí está mi INE')`)
	enginetest.Await(t, s.pool, child, executions.Completed)
	enginetest.Await(t, s.pool, parent, executions.Completed)
	s.waitForLog(t, 1, `msg="locks released"`, "count=1", "execution_id="+parent)
	s.waitForLog(t, 1, `msg="locks released"`, "execution_id="+child)
	s.waitForLog(t, 1, `msg="lane acquired"`) // the coordinator continues with the returned lane
	s.waitForLog(t, 0, `msg="lane busy"`)
	assert.Equal(t, 0, pgtest.Value[int](t, s.pool, `select count(*)::int from agent_lock_loans`))
	got := s.states(t)
	indexOf := func(want string) int {
		t.Helper()
		for i, state := range got {
			if state == want {
				return i
			}
		}
		t.Errorf("the state %q was not recorded: %q", want, got)
		return -1
	}
	// After the coordinator's last wait, it and its child may resume in either order.
	childStart := indexOf("recolector has it")
	diff := cmp.Diff([]string{
		"coordinador has it", "coordinador sent: Iniciamos tu proceso", "coordinador has it, parked", "coordinador has it",
	}, got[:min(4, len(got))])
	assert.Truef(t, diff == "" && childStart >= 4, "the first states (-want +got):\n%s", diff)
	var rest []string
	for _, state := range got[max(childStart, 0):] {
		if !strings.HasSuffix(state, ", parked") && (len(rest) == 0 || rest[len(rest)-1] != state) {
			rest = append(rest, state)
		}
	}
	if diff := cmp.Diff([]string{
		"recolector has it",
		"recolector sent: Necesito tu INE",
		"recolector has it", // after its wait, and after the answer
		"visitor received: Aquí está mi INE",
		"recolector has it",
		"recolector sent: Documento recibido",
		"coordinador has it",
		"coordinador sent: Siguiente paso...",
		"free",
	}, rest); diff != "" {
		t.Errorf("the recorded states (-want +got):\n%s", diff)
	}
	s.expectLane(t, "")
}

func TestScenarioHungAgent(t *testing.T) {
	t.Parallel()
	s := newScenario(t, "independientes.yaml", "Pedro")
	a := s.startFlow(t, "external:agente_a", nil)
	lock, err := s.LockRun(t.Context(), a, "worker", 10*time.Minute)
	require.NoError(t, err)
	sent := s.sendAsWorker(t, a, lock.LockID, "Necesito tus documentos")
	assert.Truef(t, !sent.Queued, "agente_a: %+v", sent)
	s.expectLane(t, "agente_a 0 min, Pedro, 0 queued")

	// Eleven minutes pass without a message. The execution still waits.
	pgtest.Exec(t, s.pool, `update agent_locks set expires_at = expires_at - interval '11 minutes 10 seconds'
		where lane = 'thread:pedro'`)
	beat, err := s.RenewLock(t.Context(), a, lock.LockID)
	assert.Truef(t, err == nil && beat.Live, "the beat: %+v, %v", beat, err)
	s.expectLane(t, "agente_a 11 min, Pedro, stale, 0 queued")

	b := s.startFlow(t, "agente_b", nil)
	enginetest.Await(t, s.pool, b, executions.Completed)
	s.waitForState(t, "free")
	s.waitForLog(t, 1, "level=WARN", `msg="lane stale, clearing"`, "lane=thread:pedro", "holder="+a+"#1",
		"age=11m1", "execution_id="+b)
	s.waitForLog(t, 1, `msg="lane acquired"`, "owner="+b+"#1")
	s.waitForLog(t, 1, `msg="locks released"`, "count=1", "execution_id="+b)
	s.expectStates(t,
		"agente_a has it",
		"agente_a sent: Necesito tus documentos",
		"agente_a has it",
		"agente_b has it",
		"agente_b sent: Ahora tienes una evaluación pendiente",
		"free",
	)
	assert.Equal(t, executions.Running, enginetest.Await(t, s.pool, a, executions.Running).Status)
}

// sendAsWorker sends a message of an external worker.
func (s *scenario) sendAsWorker(t *testing.T, id, lock, content string) (sent threads.SendResult) {
	t.Helper()
	claim, err := s.LockClaim(t.Context(), id, lock)
	if err == nil {
		err = postgres.InTx(t.Context(), s.pool, func(tx pgx.Tx) (err error) {
			sent, err = threads.SendTx(t.Context(), tx, threads.Outgoing{
				ThreadID: s.id, Content: content,
				ExecutionID: id, Claim: claim,
			})
			return err
		})
	}
	require.NoError(t, err)
	return sent
}
