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

// build creates a random state: traces of running or ended executions, with all their rows, from now to 200 days ago.
// No age is within an hour of a policy's days.
type build struct {
	t     *testing.T
	r     *rand.Rand
	now   time.Time
	batch pgx.Batch
	execs []made
	last  int
}

type made struct {
	id, trace string
	created   time.Time
	over      bool
}

var (
	terminal   = []string{"completed", "failed", "timeout", "cancelled"}
	unfinished = []string{"pending", "running", "waiting"}
)

// partitions creates the partitions of the last eight months.
func partitions(t *testing.T, db postgres.DB) {
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

// random fills a database with a random state.
func random(t *testing.T, pool *pgxpool.Pool, r *rand.Rand) {
	t.Helper()
	partitions(t, pool)
	b := &build{t: t, r: r, now: time.Now()}
	b.add(`insert into agent_webhook_targets (id, name, url, secrets, events)
		values ('00000000-0000-7000-8000-000000000001', 't', 'u', '{a}', '{*}')`)
	b.add(`insert into agent_automations (id, name, cron, prompt)
		values ('00000000-0000-7000-8000-000000000002', 'a', '* * * * *', 'p')`)
	for range 60 {
		b.trace()
	}
	for n := range 25 {
		b.thread(fmt.Sprintf("thread %d", n))
	}
	for range 60 {
		b.alone()
	}
	err := postgres.InTx(t.Context(), pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(t.Context(), `set local session_replication_role = replica`); err != nil {
			return err
		}
		return tx.SendBatch(t.Context(), &b.batch).Close()
	})
	require.NoError(t, err)
	pgtest.Exec(t, pool,
		`update agent_activity_counted set counted_upto = lanekeeper.agent_uuid7_floor(clock_timestamp())`)
}

func (b *build) add(sql string, args ...any) { b.batch.Queue(sql, args...) }

// ago returns a random moment of the last 200 days, at half past some hour from now.
func (b *build) ago() time.Time {
	return b.now.Add(-time.Duration(b.r.IntN(200*24))*time.Hour - 30*time.Minute)
}

func (b *build) after(t time.Time) time.Time {
	if b.chance(3) {
		return t
	}
	return t.Add(time.Duration(b.r.Int64N(int64(b.now.Sub(t).Hours())+1)) * time.Hour)
}

func (b *build) chance(one int) bool { return b.r.IntN(one) == 0 }

func (b *build) pick(of ...string) string { return of[b.r.IntN(len(of))] }

// id returns a time-ordered uuid of a moment.
func (b *build) id(at time.Time) string {
	b.last++
	ms := fmt.Sprintf("%012x", at.UnixMilli())
	return fmt.Sprintf("%s-%s-7%03x-8000-%012x", ms[:8], ms[8:], b.r.IntN(4096), b.last)
}

// some returns an existing execution, or a deleted one.
func (b *build) some() (made, bool) {
	if len(b.execs) == 0 || b.chance(8) {
		return made{id: b.id(b.ago()), trace: "hb_gone"}, false
	}
	return b.execs[b.r.IntN(len(b.execs))], true
}

// trace creates the executions of one trace, mostly ended, and their rows.
func (b *build) trace() {
	begun := b.ago()
	trace := "hb_" + b.id(begun)
	calm := !b.chance(3)
	var parents []any
	for n := range 1 + b.r.IntN(4) {
		x := made{id: b.id(begun), trace: trace, created: begun, over: calm || !b.chance(2)}
		parent := any(nil)
		if n > 0 {
			x.created = b.after(begun)
			x.id = b.id(x.created)
			parent = parents[b.r.IntN(n)]
		}
		if b.chance(12) && len(b.execs) > 0 {
			parent = b.execs[b.r.IntN(len(b.execs))].id // of another trace
		}
		parents = append(parents, x.id)
		b.execution(x, parent)
	}
}

func (b *build) execution(x made, parent any) {
	status, completed := b.pick(unfinished...), any(nil)
	var kind, key any
	if x.over {
		status, completed = b.pick(terminal...), b.after(x.created)
	} else if status == "waiting" {
		other, _ := b.some()
		kind, key = "agent", any(other.id)
		if b.chance(2) {
			kind, key = "response", fmt.Sprintf("thread %d", b.r.IntN(25))
		}
	}
	var dedupe, thread any
	if b.chance(10) {
		call := b.id(x.created)
		dedupe = "mcp.call " + call
		b.add(`insert into agent_mcp_calls (id, skill_name, skill_revision, arguments_hash, collected_at)
			values ($1::text::uuid, 's', 1, $1::text, case when $2 then now() end)`, call, b.chance(2))
	}
	if b.chance(4) {
		thread = fmt.Sprintf("thread %d", b.r.IntN(25))
	}
	b.execs = append(b.execs, x)
	b.add(`insert into agent_executions (id, trace_id, surface, flow, parent_id, status, created_at, completed_at,
		waiting_for, waiting_key, dedupe_key, thread_id)
		values ($1, $2, 'flow', 'f', $3, $4, $5, $6, $7, $8, $9,
		  $10)`, x.id, x.trace, parent, status, x.created, completed, kind, key, dedupe, thread)
	b.belongings(x, completed)
}

// belongings creates the rows that are deleted with an execution, and some that protect it.
func (b *build) belongings(x made, completed any) {
	for n := range b.r.IntN(4) {
		b.add(`insert into agent_checkpoints (execution_id, step, claim) values ($1, $2, 1)`, x.id, fmt.Sprint("step ", n))
		b.add(`insert into agent_status_changes (execution_id, n, status) values ($1, $2, 'running')`, x.id, n)
	}
	if b.chance(3) {
		b.add(`insert into agent_requests (kind, execution_id, trace_id, status) values ('test', $1, $2, 'completed')`, x.id,
			x.trace)
		b.add(`insert into agent_message_drafts (execution_id, claim, content) values ($1, 1, '')`, x.id)
	}
	if completed != nil {
		consumer := any(nil)
		if other, _ := b.some(); b.chance(3) {
			consumer = other.id
		}
		b.add(`insert into agent_events (id, event, key, external_id, execution_id, consumed_by, created_at)
			values ($1, 'AGENT_COMPLETED', $2::text, 'completed ' || $2::text, $2::text::uuid, $3, $4)`,
			b.id(completed.(time.Time)), x.id, consumer, completed)
	}
	switch {
	case b.chance(25):
		b.add(`insert into agent_unpublished_completions values ($1) on conflict do nothing`, x.id)
	case b.chance(25):
		b.add(`insert into agent_locks (lane, locked_by, fencing_token, expires_at, execution_id)
			values ($1::text, $1::text || '#1', 1, now(), $1::text::uuid)`, x.id)
	case b.chance(25):
		b.add(`insert into agent_budget_reservations (execution_id, step, scopes, granted, tokens, cost_usd)
			values ($1, 's', '{}', 1, 1, 1)`, x.id)
	}
	for range b.r.IntN(6) {
		b.activity(x.trace, x.id, b.after(x.created))
	}
	if b.chance(3) {
		b.add(`insert into agent_budgets (scope, created_at, reserved_tokens) values ('run:' || $1::text, $2, $3)
			on conflict do nothing`,
			x.trace, x.created, b.r.IntN(2)*b.r.IntN(2))
	}
}

func (b *build) activity(trace string, execution any, at time.Time) {
	id := b.id(at)
	b.add(`insert into agent_activity (id, trace_id, execution_id, skill_name, created_at) values ($1, $2, $3, 's', $4)`,
		id, trace, execution, at)
	if b.chance(30) {
		b.add(`insert into agent_activity_open (activity_id, kind) values ($1, 'call')`, id)
	} else if b.chance(30) {
		b.add(`insert into agent_activity_uncounted values ($1)`, id)
	}
	if b.chance(3) {
		b.add(`insert into agent_prompts (activity_id, messages, created_at) values ($1, '{}', $2)`, id, at)
	}
}

// thread creates a conversation.
func (b *build) thread(id string) {
	at := b.ago()
	b.add(`insert into agent_threads (id, channel, updated_at, next_seq) values ($1, 'chat', $2, 100)`, id, at)
	for n := range b.r.IntN(6) {
		var of any
		if x, _ := b.some(); b.chance(2) {
			of = x.id
		}
		b.add(`insert into agent_messages (id, thread_id, seq, turn, role, content, status, execution_id)
			values ($1, $2, $3, $3, 'user', '', 'received', $4)`,
			b.id(at), id, n+1, of)
	}
	switch {
	case b.chance(10):
		x, _ := b.some()
		b.add(`insert into agent_messages (id, thread_id, role, content, status, execution_id)
			values ($1, $2, 'user', '', 'queued', $3)`, b.id(at), id, x.id)
	case b.chance(10):
		b.add(`insert into agent_locks (lane, locked_by, fencing_token, expires_at)
			values ('thread:' || $1::text, 'x', 1, now() + $2::text::interval)`,
			id, b.pick("1 hour", "-1 hour"))
	}
}

// alone creates one row of each kind that depends on executions loosely or not at all.
func (b *build) alone() {
	at := b.ago()
	x, _ := b.some()
	var of any
	if b.chance(2) {
		of = x.id
	}
	b.activity(x.trace, nil, at)
	b.add(`insert into agent_events (id, event, key, consumed_by, created_at) values ($1, $2, $3, $4, $5)`, b.id(at),
		b.pick("EVENT_COMPLETED", "MESSAGE_RECEIVED", "paid", "AGENT_COMPLETED"), x.id, of, at)
	approval := b.id(at)
	parked := of != nil && b.chance(2)
	status := b.pick("pending", "approved", "rejected", "expired", "consumed")
	used := ""
	if y, _ := b.some(); status == "consumed" {
		used = y.id + " step"
	}
	b.add(`insert into agent_approvals (id, trace_id, execution_id, step, parked, skill_name, skill_revision, arguments,
		arguments_hash, status,
		       decided_at, consumed_for, expires_at, created_at)
		values ($1::text::uuid, $2, $3, $1::text, $4, 's', 1, '{}', $1::text, $5, case when $5 in ('rejected', 'approved')
		  then $6::timestamptz end, $7, $8, $9)`,
		approval, x.trace, of, parked, status, b.after(at), used, at.Add(time.Duration(b.r.IntN(60))*24*time.Hour), at)
	if parked {
		b.add(`insert into agent_events (id, event, key, external_id, consumed_by, created_at)
			values ($1, 'APPROVAL_DECIDED', $2::text, 'approval ' || $2::text, $3, $4)`,
			b.id(at), approval, of, at)
	}
	b.add(`insert into agent_automation_runs (id, automation_id, scheduled_for, created_at, status, execution_id,
		claimed_at, finished_at)
		values ($1, '00000000-0000-7000-8000-000000000002', $2::timestamptz + make_interval(secs => $6 / 1e6), $2, $3, $4, $2,
		  $5)`,
		b.id(at), at, b.pick("due", "claimed", "success", "success", "error", "dead", "skipped"), of, b.after(at), b.last)
	b.add(`insert into agent_webhook_deliveries (id, endpoint, delivery_id, trace_id, last_trace_id, execution_id, status,
		body, body_sha256, received_at, finished_at)
		values ($1::text::uuid, 'e', $1::text, $2, $2, $3, $4, '', '', $5, $6)`,
		b.id(at), x.trace, of, b.pick("received", "running", "failed", "done", "done", "ignored", "dead"), at, b.after(at))
	b.add(`insert into agent_webhook_outbox (id, target_id, event, payload, trace_id, status, created_at, finished_at)
		values ($1, '00000000-0000-7000-8000-000000000001', 'e', '{}', 't', $2, $3,
		$4)`, b.id(at), b.pick("pending", "sent", "dead"), at, b.after(at))
	if state := b.pick("received", "running", "done", "done"); state == "done" {
		b.add(`insert into agent_channel_messages (id, channel, external_id, conversation, sender, status, received_at,
			finished_at) values ($1::text::uuid, 'c', $1::text, 'c', 's', 'done', $2, $3)`, b.id(at), at, b.after(at))
	} else {
		b.add(`insert into agent_channel_messages (id, channel, external_id, conversation, sender, status, received_at)
			values ($1::text::uuid, 'c', $1::text, 'c', 's', $3, $2)`, b.id(at), at, state)
	}
	b.add(`insert into agent_budgets (scope, created_at) values ($1, $2) on conflict do nothing`,
		strings.TrimPrefix(b.id(at), "0"), at)
	b.add(`insert into agent_activity_counts (span, start, kind, skill, surface, model)
		values ($1, $2, 'call', $3, '', '')`, b.pick("hour", "day"), at.Truncate(time.Hour), fmt.Sprint(b.last))
	b.add(`insert into agent_memory (key, value, created_at, updated_at) values ($1, '1', $2, $2)`, b.id(at), at)
}
