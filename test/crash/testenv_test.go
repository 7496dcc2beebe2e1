package crash_test

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/internal/testkit/bills"
)

// never is a heartbeat schedule that fires on 29 February.
const never = "0 0 29 2 *"

// testEnv is a database, a model and skills. The workspace of newTestEnv gives every phase of a heartbeat something to
// do.
type testEnv struct {
	t            testing.TB
	url          string
	db           *pgxpool.Pool
	model        *modeltest.Server
	skills       *bills.Skills
	dir          string
	extraEnviron []string // additional environment of its processes

	modelBlocker atomic.Pointer[blocker] // before the model answers
}

// newTestEnv creates a test environment with a new database.
func newTestEnv(t testing.TB) *testEnv {
	t.Helper()
	s := newIdleTestEnv(t, pgtest.URL(t), bills.YAML)
	s.model.Handle(s.modelReply)
	bills.MakeDue(t, s.db)
	return s
}

// newIdleTestEnv creates a test environment with a workspace but no work, and a model without replies.
func newIdleTestEnv(t testing.TB, database, declared string) *testEnv {
	t.Helper()
	s := &testEnv{t: t, url: database, model: modeltest.New(t), dir: t.TempDir()}
	s.db = pgtest.Pool(t, s.url, postgres.Options{MaxConns: 4, ApplicationName: "crash"})
	s.skills = bills.Apply(t, s.db, declared)
	return s
}

// modelReply answers as the model of a heartbeat, once modelBlocker lets it.
func (s *testEnv) modelReply(_ int, req openai.ChatCompletionRequest) modeltest.Reply {
	s.modelBlocker.Load().enter()
	return bills.Model(req)
}

// ctx returns the test's context. A cleanup must not use it.
func (s *testEnv) ctx() context.Context { return s.t.Context() }

// environ returns the environment of a process. Without a database it is the test's own.
func (s *testEnv) environ(database string, more ...string) []string {
	return append(testkit.Environ(cmp.Or(database, s.url), s.model, "AGENT_ADMIN_TOKEN="+adminToken,
		"AGENT_HEARTBEAT_CRON="+never, "AGENT_WORKER_LEASE=30s", "AGENT_LOG_LEVEL=debug"),
		slices.Concat(s.extraEnviron, more)...)
}

// startAgent starts the program in the test environment. The database is as in environ.
func (s *testEnv) startAgent(database string, args ...string) *agent {
	s.t.Helper()
	return launch(s.t, s.dir, s.environ(database), args...)
}

// startServer starts `agent serve` with further settings and waits until it is ready.
func (s *testEnv) startServer(database string, more ...string) *agent {
	s.t.Helper()
	a := launch(s.t, s.dir, s.environ(database, more...), "serve")
	s.t.Cleanup(s.reportSessions) // before the cleanup that kills the process
	a.AwaitOutput("msg=serving")
	return a
}

// reportSessions logs the sessions after a failed test.
func (s *testEnv) reportSessions() {
	if s.t.Failed() {
		s.t.Log(s.sessions())
	}
}

// requestHeartbeat requests a heartbeat from any serving process, and returns its execution's id.
func (s *testEnv) requestHeartbeat() string {
	s.t.Helper()
	return pgtest.Value[string](s.t, s.db, `
		insert into agent_executions (trace_id, surface, flow, status, hinted_at)
		values (lanekeeper.agent_trace_id('hb'), 'heartbeat', 'heartbeat', 'pending', 'epoch') returning id::text`)
}

// heartbeat returns the id of the first heartbeat, or "" without one.
func (s *testEnv) heartbeat() string {
	s.t.Helper()
	return pgtest.Value[string](s.t, s.db, `select coalesce((select id::text from agent_executions where flow = 'heartbeat'
		order by id limit 1), '')`)
}

// status returns the status of an execution.
func (s *testEnv) status(id string) string {
	s.t.Helper()
	return pgtest.Value[string](s.t, s.db, `select status from agent_executions where id = $1`, id)
}

// waitStatus waits for an execution to end in a status.
func (s *testEnv) waitStatus(id, status string) {
	s.t.Helper()
	late, logged := time.Now().Add(waitTimeout*9/10), false
	eventually(s.t, "execution "+id+" ends", func() bool {
		if !logged && time.Now().After(late) {
			logged = true
			s.t.Log(s.sessions())
		}
		return pgtest.Value[bool](s.t, s.db, `select completed_at is not null from agent_executions where id = $1`, id)
	})
	if got := s.status(id); got != status {
		s.t.Errorf("the execution ended %s, want %s: %s", got, status,
			pgtest.Value[string](s.t, s.db, `select coalesce(error_message, '') from agent_executions where id = $1`, id))
	}
}

// sessions lists the database's sessions, workers and unfinished executions, for a failure. It also works after the
// test has ended.
func (s *testEnv) sessions() (report string) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	err := s.db.QueryRow(ctx, `
		select concat_ws(e'\n',
		       (select string_agg(concat_ws(' ', pid, application_name, state, wait_event, 'behind', pg_blocking_pids(pid),
		         'since', state_change,
		               left(regexp_replace(query, '\s+', ' ', 'g'), 200)), e'\n') from pg_stat_activity
		                 where datname = current_database()),
		       (select string_agg(to_jsonb(w)::text, e'\n') from agent_workers w),
		       (select string_agg(jsonb_strip_nulls(to_jsonb(x))::text, e'\n') from agent_executions x
		         where x.completed_at is null))`).Scan(&report)
	if err != nil {
		return "sessions: " + err.Error()
	}
	return report
}

// expireLeases ends the leases of all workers at once, after their processes have ended.
func (s *testEnv) expireLeases() {
	s.t.Helper()
	pgtest.Exec(s.t, s.db, `update agent_workers set expires_at = clock_timestamp() - interval '1 second'`)
}

// modelCalls counts the model's requests, by idempotency key.
func (s *testEnv) modelCalls() map[string]int {
	counts := map[string]int{}
	for _, r := range s.model.Requests() {
		counts[r.IdempotencyKey()]++
	}
	return counts
}

// skillCalls counts the requests of skills, by idempotency key.
func (s *testEnv) skillCalls() map[string]int {
	counts := map[string]int{}
	for _, c := range s.skills.Calls() {
		counts[c.Key]++
	}
	return counts
}

// modelSawResult reports whether a request to the model had a tool result with these words.
func (s *testEnv) modelSawResult(words string) bool {
	for _, r := range s.model.Requests() {
		for _, m := range r.Messages {
			if m.Role == openai.ChatMessageRoleTool && strings.Contains(m.Content, words) {
				return true
			}
		}
	}
	return false
}
