package retention_test

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// seeder inserts a random state: traces of running or ended executions, with all their rows, up to 200 days old. All
// ages are half hours, so no row is close to the end of a policy.
type seeder struct {
	t      *testing.T
	r      *rand.Rand
	now    time.Time
	batch  pgx.Batch
	execs  []seededExecution
	lastID int
}

type seededExecution struct {
	id, trace string
	created   time.Time
	ended     bool
}

var (
	terminal   = []string{"completed", "failed", "timeout", "cancelled"}
	unfinished = []string{"pending", "running", "waiting"}
)

// createPartitions creates the partitions of the last eight months.
func createPartitions(t *testing.T, db postgres.DB) {
	t.Helper()
	pgtest.Exec(t, db, `
		do $$
		declare
		  month timestamptz := (date_trunc('month', clock_timestamp() at time zone 'UTC') - interval '8 months') at time zone 'UTC';
		  name text;
		begin
		  for i in 1..7 loop
		    name := 'agent_activity_' || to_char(month at time zone 'UTC', 'YYYY_MM');
		    if to_regclass(name) is null then
		      execute format('create table %I (like agent_activity including all)', name);
		      execute format('alter table agent_activity attach partition %I for values from (%L) to (%L)', name,
		        lanekeeper.agent_uuid7_floor(month), lanekeeper.agent_uuid7_floor((month at time zone 'UTC' + interval '1 month') at time zone 'UTC'));
		    end if;
		    month := (month at time zone 'UTC' + interval '1 month') at time zone 'UTC';
		  end loop;
		end $$`)
}

// seedRandomState inserts a random state into a database.
func seedRandomState(t *testing.T, pool *pgxpool.Pool, r *rand.Rand) {
	t.Helper()
	createPartitions(t, pool)
	s := &seeder{t: t, r: r, now: time.Now()}
	s.queue(`insert into agent_webhook_targets (id, name, url, secrets, events)
		values ('00000000-0000-7000-8000-000000000001', 't', 'u', '{a}', '{*}')`)
	s.queue(`insert into agent_automations (id, name, cron, prompt)
		values ('00000000-0000-7000-8000-000000000002', 'a', '* * * * *', 'p')`)
	for range 60 {
		s.addTrace()
	}
	for n := range 25 {
		s.addThread(fmt.Sprintf("thread %d", n))
	}
	for range 60 {
		s.addIndependentRows()
	}
	err := postgres.InTx(t.Context(), pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(t.Context(), `set local session_replication_role = replica`); err != nil {
			return err
		}
		return tx.SendBatch(t.Context(), &s.batch).Close()
	})
	require.NoError(t, err)
	pgtest.Exec(t, pool,
		`update agent_activity_counted set counted_upto = lanekeeper.agent_uuid7_floor(clock_timestamp())`)
}

func (s *seeder) queue(sql string, args ...any) { s.batch.Queue(sql, args...) }

// randomTime returns a random time of the last 200 days: some hours and a half ago.
func (s *seeder) randomTime() time.Time {
	return s.now.Add(-time.Duration(s.r.IntN(200*24))*time.Hour - 30*time.Minute)
}

func (s *seeder) randomTimeAfter(t time.Time) time.Time {
	if s.oneIn(3) {
		return t
	}
	return t.Add(time.Duration(s.r.Int64N(int64(s.now.Sub(t).Hours())+1)) * time.Hour)
}

func (s *seeder) oneIn(n int) bool { return s.r.IntN(n) == 0 }

func (s *seeder) choose(of ...string) string { return of[s.r.IntN(len(of))] }

// id returns a UUIDv7 of a time.
func (s *seeder) id(at time.Time) string {
	s.lastID++
	ms := fmt.Sprintf("%012x", at.UnixMilli())
	return fmt.Sprintf("%s-%s-7%03x-8000-%012x", ms[:8], ms[8:], s.r.IntN(4096), s.lastID)
}

// anyExecution returns a random execution, or an id without an execution. It reports whether the execution exists.
func (s *seeder) anyExecution() (seededExecution, bool) {
	if len(s.execs) == 0 || s.oneIn(8) {
		return seededExecution{id: s.id(s.randomTime()), trace: "hb_gone"}, false
	}
	return s.execs[s.r.IntN(len(s.execs))], true
}

// addTrace inserts the executions of one trace, most of them ended, and their rows.
func (s *seeder) addTrace() {
	createdAt := s.randomTime()
	trace := "hb_" + s.id(createdAt)
	allEnded := !s.oneIn(3)
	var parents []any
	for n := range 1 + s.r.IntN(4) {
		x := seededExecution{id: s.id(createdAt), trace: trace, created: createdAt, ended: allEnded || !s.oneIn(2)}
		parent := any(nil)
		if n > 0 {
			x.created = s.randomTimeAfter(createdAt)
			x.id = s.id(x.created)
			parent = parents[s.r.IntN(n)]
		}
		if s.oneIn(12) && len(s.execs) > 0 {
			parent = s.execs[s.r.IntN(len(s.execs))].id // of another trace
		}
		parents = append(parents, x.id)
		s.addExecution(x, parent)
	}
}

func (s *seeder) addExecution(x seededExecution, parent any) {
	status, completed := s.choose(unfinished...), any(nil)
	var kind, key any
	if x.ended {
		status, completed = s.choose(terminal...), s.randomTimeAfter(x.created)
	} else if status == "waiting" {
		other, _ := s.anyExecution()
		kind, key = "agent", any(other.id)
		if s.oneIn(2) {
			kind, key = "response", fmt.Sprintf("thread %d", s.r.IntN(25))
		}
	}
	var dedupe, thread any
	if s.oneIn(10) {
		call := s.id(x.created)
		dedupe = "mcp.call " + call
		s.queue(`insert into agent_mcp_calls (id, skill_name, skill_revision, arguments_hash, collected_at)
			values ($1::text::uuid, 's', 1, $1::text, case when $2 then now() end)`, call, s.oneIn(2))
	}
	if s.oneIn(4) {
		thread = fmt.Sprintf("thread %d", s.r.IntN(25))
	}
	s.execs = append(s.execs, x)
	s.queue(`insert into agent_executions (id, trace_id, surface, flow, parent_id, status, created_at, completed_at,
		waiting_for, waiting_key, dedupe_key, thread_id)
		values ($1, $2, 'flow', 'f', $3, $4, $5, $6, $7, $8, $9,
		  $10)`, x.id, x.trace, parent, status, x.created, completed, kind, key, dedupe, thread)
	s.addDependentRows(x, completed)
}

// addDependentRows inserts rows that are deleted with an execution, and some that protect it.
func (s *seeder) addDependentRows(x seededExecution, completed any) {
	for n := range s.r.IntN(4) {
		s.queue(`insert into agent_checkpoints (execution_id, step, claim) values ($1, $2, 1)`, x.id, fmt.Sprint("step ", n))
		s.queue(`insert into agent_status_changes (execution_id, n, status) values ($1, $2, 'running')`, x.id, n)
	}
	if s.oneIn(3) {
		s.queue(`insert into agent_requests (kind, execution_id, trace_id, status) values ('test', $1, $2, 'completed')`,
			x.id,
			x.trace)
		s.queue(`insert into agent_message_drafts (execution_id, claim, content) values ($1, 1, '')`, x.id)
	}
	if completed != nil {
		consumer := any(nil)
		if other, _ := s.anyExecution(); s.oneIn(3) {
			consumer = other.id
		}
		s.queue(`insert into agent_events (id, event, key, external_id, execution_id, consumed_by, created_at)
			values ($1, 'AGENT_COMPLETED', $2::text, 'completed ' || $2::text, $2::text::uuid, $3, $4)`,
			s.id(completed.(time.Time)), x.id, consumer, completed)
	}
	switch {
	case s.oneIn(25):
		s.queue(`insert into agent_unpublished_completions values ($1) on conflict do nothing`, x.id)
	case s.oneIn(25):
		s.queue(`insert into agent_locks (lane, locked_by, fencing_token, expires_at, execution_id)
			values ($1::text, $1::text || '#1', 1, now(), $1::text::uuid)`, x.id)
	case s.oneIn(25):
		s.queue(`insert into agent_budget_reservations (execution_id, step, scopes, granted, tokens, cost_usd)
			values ($1, 's', '{}', 1, 1, 1)`, x.id)
	}
	for range s.r.IntN(6) {
		s.addActivity(x.trace, x.id, s.randomTimeAfter(x.created))
	}
	if s.oneIn(3) {
		s.queue(`insert into agent_budgets (scope, created_at, reserved_tokens) values ('run:' || $1::text, $2, $3)
			on conflict do nothing`,
			x.trace, x.created, s.r.IntN(2)*s.r.IntN(2))
	}
}

func (s *seeder) addActivity(trace string, execution any, at time.Time) {
	id := s.id(at)
	s.queue(`insert into agent_activity (id, trace_id, execution_id, skill_name, created_at) values ($1, $2, $3, 's', $4)`,
		id, trace, execution, at)
	if s.oneIn(30) {
		s.queue(`insert into agent_activity_open (activity_id, kind) values ($1, 'call')`, id)
	} else if s.oneIn(30) {
		s.queue(`insert into agent_activity_uncounted values ($1)`, id)
	}
	if s.oneIn(3) {
		s.queue(`insert into agent_prompts (activity_id, messages, created_at) values ($1, '{}', $2)`, id, at)
	}
}

// addThread inserts a thread with its messages.
func (s *seeder) addThread(id string) {
	at := s.randomTime()
	s.queue(`insert into agent_threads (id, channel, updated_at, next_seq) values ($1, 'chat', $2, 100)`, id, at)
	for n := range s.r.IntN(6) {
		var executionID any
		if x, _ := s.anyExecution(); s.oneIn(2) {
			executionID = x.id
		}
		s.queue(`insert into agent_messages (id, thread_id, seq, turn, role, content, status, execution_id)
			values ($1, $2, $3, $3, 'user', '', 'received', $4)`,
			s.id(at), id, n+1, executionID)
	}
	switch {
	case s.oneIn(10):
		x, _ := s.anyExecution()
		s.queue(`insert into agent_messages (id, thread_id, role, content, status, execution_id)
			values ($1, $2, 'user', '', 'queued', $3)`, s.id(at), id, x.id)
	case s.oneIn(10):
		s.queue(`insert into agent_messages (id, thread_id, seq, turn, role, content, status)
			values ($1, $2, 50, 50, 'assistant', '', 'sending')`, s.id(at), id)
	case s.oneIn(10):
		s.queue(`insert into agent_locks (lane, locked_by, fencing_token, expires_at)
			values ('thread:' || $1::text, 'x', 1, now() + $2::text::interval)`,
			id, s.choose("1 hour", "-1 hour"))
	}
}

// addIndependentRows inserts one row of each kind that is not deleted together with an execution.
func (s *seeder) addIndependentRows() {
	at := s.randomTime()
	x, _ := s.anyExecution()
	var consumer any
	if s.oneIn(2) {
		consumer = x.id
	}
	s.addActivity(x.trace, nil, at)
	s.queue(`insert into agent_events (id, event, key, consumed_by, created_at) values ($1, $2, $3, $4, $5)`, s.id(at),
		s.choose("EVENT_COMPLETED", "MESSAGE_RECEIVED", "paid", "AGENT_COMPLETED"), x.id, consumer, at)
	approval := s.id(at)
	parked := consumer != nil && s.oneIn(2)
	status := s.choose("pending", "approved", "rejected", "expired", "consumed")
	consumedFor, consumedAt := "", any(nil)
	if y, _ := s.anyExecution(); status == "consumed" {
		consumedFor, consumedAt = y.id+" step", s.randomTimeAfter(at)
	}
	s.queue(`insert into agent_approvals (id, trace_id, execution_id, step, parked, skill_name, skill_revision, arguments,
		arguments_hash, status,
		       decided_at, consumed_for, expires_at, created_at, consumed_at)
		values ($1::text::uuid, $2, $3, $1::text, $4, 's', 1, '{}', $1::text, $5, case when $5 in ('rejected', 'approved')
		  then $6::timestamptz end, $7, $8, $9, $10)`,
		approval, x.trace, consumer, parked, status, s.randomTimeAfter(at), consumedFor,
		at.Add(time.Duration(s.r.IntN(60))*24*time.Hour), at, consumedAt)
	if parked {
		s.queue(`insert into agent_events (id, event, key, external_id, consumed_by, created_at)
			values ($1, 'APPROVAL_DECIDED', $2::text, 'approval ' || $2::text, $3, $4)`,
			s.id(at), approval, consumer, at)
	}
	s.queue(`insert into agent_automation_runs (id, automation_id, scheduled_for, created_at, status, execution_id,
		claimed_at, finished_at)
		values ($1, '00000000-0000-7000-8000-000000000002', $2::timestamptz + make_interval(secs => $6 / 1e6), $2, $3, $4, $2,
		  $5)`,
		s.id(at), at, s.choose("due", "claimed", "success", "success", "error", "dead", "skipped"), consumer,
		s.randomTimeAfter(at), s.lastID)
	s.queue(`insert into agent_webhook_deliveries (id, endpoint, delivery_id, trace_id, last_trace_id, execution_id, status,
		body, body_sha256, received_at, finished_at)
		values ($1::text::uuid, 'e', $1::text, $2, $2, $3, $4, '', '', $5, $6)`,
		s.id(at), x.trace, consumer, s.choose("received", "running", "failed", "done", "done", "ignored", "dead"), at,
		s.randomTimeAfter(at))
	s.queue(`insert into agent_webhook_outbox (id, target_id, event, payload, trace_id, status, created_at, finished_at)
		values ($1, '00000000-0000-7000-8000-000000000001', 'e', '{}', 't', $2, $3,
		$4)`, s.id(at), s.choose("pending", "sent", "dead"), at, s.randomTimeAfter(at))
	if state := s.choose("received", "running", "done", "done"); state == "done" {
		s.queue(`insert into agent_channel_messages (id, channel, external_id, conversation, sender, status, received_at,
			finished_at) values ($1::text::uuid, 'c', $1::text, 'c', 's', 'done', $2, $3)`, s.id(at), at, s.randomTimeAfter(at))
	} else {
		s.queue(`insert into agent_channel_messages (id, channel, external_id, conversation, sender, status, received_at)
			values ($1::text::uuid, 'c', $1::text, 'c', 's', $3, $2)`, s.id(at), at, state)
	}
	s.queue(`insert into agent_budgets (scope, created_at) values ($1, $2) on conflict do nothing`,
		strings.TrimPrefix(s.id(at), "0"), at)
	s.queue(`insert into agent_activity_counts (span, start, kind, skill, surface, model)
		values ($1, $2, 'call', $3, '', '')`, s.choose("hour", "day"), at.Truncate(time.Hour), fmt.Sprint(s.lastID))
	s.queue(`insert into agent_memory (key, value, created_at, updated_at) values ($1, '1', $2, $2)`, s.id(at), at)
}
