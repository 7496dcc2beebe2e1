package soak_test

import (
	"context"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/proctest"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

const soakYAML = `
kind: skill
name: look_up
description: Look something up.
scope: both
handler: "http:POST %s/look_up"
idempotent: true
parameters: {type: object, required: [about], properties: {about: {type: string}}}
---
kind: skill
name: ship
description: Ship an order.
handler: "http:POST %s/ship"
parameters: {type: object, required: [order], properties: {order: {type: integer}}}
---
kind: skill
name: restock
description: Order what is running out.
handler: "http:POST %s/restock"
---
kind: skill
name: pulse
description: Show a sign of life.
handler: "http:POST %s/pulse"
---
kind: automation
name: settle
event: EVENT_COMPLETED
when: payload.type == "order.paid"
prompt: Ship what was paid, and count it.
---
kind: automation
name: refill
event: EVENT_COMPLETED
when: payload.type == "stock.low"
skill: restock
---
kind: automation
name: pulse
cron: "@every 2s"
skill: pulse
---
kind: webhook
name: shop
scheme: standard
secrets: ["${SHOP_SECRET}"]
actions:
  - event: EVENT_COMPLETED
    key: "shop-{body.n}"
  - when: {body.type: question}
    prompt: "About delivery {body.n}: look into it."
`

// soakWorkspace returns soakYAML with enough objectives for all heartbeats.
func soakWorkspace() string {
	var yaml strings.Builder
	yaml.WriteString(soakYAML)
	for i := range 12 {
		fmt.Fprintf(&yaml, "---\nkind: objective\nname: stock %d\ngoal: Know the stock.\nreview_every: 1m\nsteps: [Count "+
			"the shelf, Count the cellar]\n", i)
	}
	return yaml.String()
}

// loadDuration returns the duration of the load.
func loadDuration(t testing.TB) time.Duration {
	t.Helper()
	given := os.Getenv("AGENT_SOAK")
	switch {
	case given == "" && testing.Short():
		return 10 * time.Second
	case given == "":
		return 20 * time.Second
	}
	d, err := time.ParseDuration(given)
	require.NoError(t, err, "AGENT_SOAK")
	return d
}

// TestEverythingAtOnce is the soak; see the package.
func TestEverythingAtOnce(t *testing.T) {
	w := newTestEnv(t, soakWorkspace())
	w.model.Handle(modelReply)
	total := loadDuration(t)
	ctx, end := context.WithTimeout(t.Context(), total)
	defer end()
	l := &load{testEnv: w, ctx: ctx}
	first, base := w.startServer("AGENT_HEARTBEAT_CRON=@every 3s")
	l.add(base)
	for _, work := range []func(){l.runHeartbeats, l.runAdmin, l.sendWebhooks} {
		l.group.Go(work)
	}
	for i := range 5 {
		l.group.Go(func() { l.runVisitor(fmt.Sprint("t", i+1), i == 4) })
	}
	l.pause(total / 2)
	second, base := w.startServer("AGENT_HEARTBEAT_CRON=@every 3s")
	l.add(base)
	l.group.Wait()
	l.stopAndWait(first, second)
	l.storeLaneLines(append(l.finished, first, second)...)
	for _, name := range slices.Sorted(maps.Keys(checks)) {
		for i, violation := range pgtest.Column[string](t, w.db, checks[name]) {
			if i == 10 {
				t.Errorf("%s: and more", name)
				break
			}
			t.Errorf("%s: %s", name, violation)
		}
	}
	l.checkCounts()
	for _, a := range []*proctest.Process{first, second} {
		n := acquiredLanes(a)
		t.Logf("%6d lanes acquired by one of the processes", n)
		assert.True(t, n != 0, "one of the processes did nothing")
	}
	if t.Failed() {
		for _, a := range []*proctest.Process{first, second} {
			t.Logf("agent %s:\n%s", strings.Join(a.Cmd.Args[1:], " "), warnings(a))
		}
	}
}

// stopAndWait waits until all work has ended, and stops the processes.
func (l *load) stopAndWait(agents ...*proctest.Process) {
	l.t.Helper()
	pgtest.Eventually(l.t, func() bool {
		return pgtest.Value[bool](l.t, l.db, `select exists (select from agent_automation_runs where cause = 'cron')`)
	}, "a heartbeat without an admin runs the scheduled automations")
	pgtest.Exec(l.t, l.db, `update agent_schedules set next_run_at = clock_timestamp() + interval '1 day'`)
	pgtest.Exec(l.t, l.db, `update agent_automations set next_run_at = clock_timestamp() + interval '1 day'
		where trigger = 'cron'`)
	began := time.Now()
	quiet := func() bool { return len(pgtest.Column[string](l.t, l.db, unfinished)) == 0 }
	l.t.Cleanup(func() {
		if !quiet() {
			l.t.Logf("under way: %s", strings.Join(pgtest.Column[string](l.t, l.db, unfinished), ", "))
			l.t.Logf("complaints:\n%s", warnings(agents[0]))
		}
	})
	pgtest.EventuallyWithin(l.t, pgtest.Timeout+loadDuration(l.t), quiet, "everything that was begun ends")
	l.t.Logf("the running work ended within %s", time.Since(began).Round(time.Millisecond))
	for _, a := range agents {
		a.Stop()
	}
}

// unfinished counts the work that has not ended.
const unfinished = `
	select format('%s executions of %s %s for %s', count(*), flow, status, waiting_for) from agent_executions
	 where completed_at is null group by flow, status, waiting_for
	union all
	select format('%s runs of %s %s', count(*), a.name, r.status) from agent_automation_runs r
	  join agent_automations a on a.id = r.automation_id
	 where r.status in ('due', 'claimed', 'error') group by a.name, r.status
	union all
	select format('%s deliveries %s: %s', count(*), status, min(error_message)) from agent_webhook_deliveries
	 where status in ('received', 'running', 'failed') group by status`

// checkCounts logs the counts of each kind of work, and fails the test if a kind did not happen.
func (l *load) checkCounts() {
	l.t.Helper()
	l.t.Logf("visitors asked %d questions and hung up %d times", l.asked, l.disconnects)
	for _, c := range []struct {
		what, sql string
		most      int // the maximum; -1 if at least one must exist
	}{
		{"heartbeats that did something", `select count(distinct execution_id) from agent_activity where surface = 'heartbeat'
			and kind = 'phase'`, -1},
		{"heartbeats by the clock", `select count(*) from agent_executions where flow = 'heartbeat'
			and dedupe_key is not null`, -1},
		{"heartbeats skipped or cut short", `select count(*) from agent_executions where flow = 'heartbeat'
			and (result ->> 'skipped') <> ''`, 1 << 30},
		{"turns of the admin", `select count(*) from agent_executions where flow = 'operate'`, -1},
		{"turns of visitors", `select count(*) from agent_executions where flow = 'chat'`, -1},
		{"deliveries", `select count(*) from agent_webhook_deliveries`, -1},
		{"deliveries that came twice", `select count(*) from agent_webhook_deliveries where repeats > 0`, -1},
		{"orders shipped", `select count(*) from soak.calls where skill = 'ship'`, -1},
		{"runs by the clock", `select count(*) from agent_automation_runs where cause = 'cron'`, -1},
		{"counted", `select count(*) from agent_activity where skill_name = 'memory_write' and status = 'success'`, -1},
		{
			"counts that came too late and were tried again",
			`select count(*) from agent_activity where skill_name = 'memory_write' and status = 'skipped'`, 1 << 30,
		},
		{"steps of objectives done", `select count(*) from agent_objective_evidence`, -1},
		{"model calls", `select count(*) from agent_activity where kind = 'model'`, -1},
		{"model calls that failed", `select count(*) from agent_activity where kind = 'model' and status = 'error'`, 1 << 30},
	} {
		n := pgtest.Value[int](l.t, l.db, c.sql)
		l.t.Logf("%6d %s", n, c.what)
		assert.Truef(l.t, c.most >= 0 || n != 0, "no %s: the soak does not cover them", c.what)
	}
}

// acquiredLanes counts the lanes acquired by a process.
func acquiredLanes(a *proctest.Process) (n int) {
	for _, l := range a.Lines() {
		if l.Message == "lane acquired" {
			n++
		}
	}
	return n
}

// warnings returns the warnings and errors of a process.
func warnings(a *proctest.Process) string {
	var bad []string
	for _, l := range a.Lines() {
		if l.Level == "ERROR" || l.Level == "WARN" && l.Message != "lane busy" && l.Message != "model call repeated" &&
			l.Message != "heartbeat skipped" {
			bad = append(bad, l.Raw)
		}
	}
	slices.Reverse(bad)
	return strings.Join(bad[:min(len(bad), 60)], "\n")
}

// checks are the invariants. Each query lists its violations in words.
var checks = map[string]string{
	"no lost update: the counter is what was counted": `
		select format('the counter is %s at revision %s after %s successful increments', c.value, c.revision, n.n)
		  from (select count(*) as n from agent_activity
		         where kind = 'call' and skill_name = 'memory_write' and status = 'success' and input ->> 'key' = 'counter') n
		  left join agent_memory c on c.category = 'soak' and c.key = 'counter'
		 where coalesce(c.value #>> '{}', '0')::bigint <> n.n or coalesce(c.revision, 0) <> n.n`,
	"no lost update: a revision is written once": `
		select format('%s increments made revision %s', count(*), output ->> 'revision') from agent_activity
		 where kind = 'call' and skill_name = 'memory_write' and status = 'success' and input ->> 'key' = 'counter'
		 group by output ->> 'revision' having count(*) > 1`,
	"no lost update: a step that is reported has its evidence": `
		select format('%s steps were reported done and %s pieces of evidence are kept', n.n, e.n)
		  from (select count(*) as n from agent_activity
		         where skill_name = 'advance_step' and status = 'success' and output ->> 'change' = 'complete step') n,
		       (select count(*) as n from (select distinct step_id, created_at from agent_objective_evidence) x) e
		 where n.n > 0 and e.n < n.n
		union all
		select format('step %s counts %s reports done in its round', s.id, count(*))
		  from agent_objective_steps s join agent_activity a on a.skill_name = 'advance_step' and a.status = 'success'
		   and a.input #>> '{report,step_id}' = s.id::text and a.created_at >= s.started_at
		 group by s.id having count(*) > 1`,

	"one run for each event and automation": `
		select format('event %s started automation %s %s times', e.key, a.name, count(r.id))
		  from agent_events e cross join agent_automations a
		  left join agent_automation_runs r on r.event_id = e.id and r.automation_id = a.id
		 where e.event = 'EVENT_COMPLETED' and a.trigger = 'event' and a.event = 'EVENT_COMPLETED'
		 group by e.key, a.name having count(r.id) <> 1`,
	"a run does what its condition says": `
		select format('run %s of %s for %s ended %s: %s', r.id, a.name, r.payload #>> '{data,type}', r.status,
		              r.error_message)
		  from agent_automation_runs r join agent_automations a on a.id = r.automation_id
		 where r.status <> case when r.cause <> 'event' or r.payload #>> '{data,type}'
		                        = case a.name when 'settle' then 'order.paid' else 'stock.low' end
		                   then 'success' else 'skipped' end`,
	"a run is made once": `
		select format('run %s was made %s times, at attempt %s', r.id, count(a.id), r.attempt)
		  from agent_automation_runs r
		  left join agent_activity a on a.skill_name = 'run_automation' and a.output ->> 'run' = r.id::text
		 where r.status = 'success'
		 group by r.id having count(a.id) <> 1 or r.attempt <> 1
		union all
		select format('%s runs of automation %s were made for %s', count(*), automation_id, scheduled_for)
		  from agent_automation_runs where cause = 'cron' group by automation_id, scheduled_for having count(*) > 1`,
	"an order that was paid is shipped once": `
		select format('order %s was paid %s times and shipped %s times', coalesce(d.n, c.n), d.times, c.times)
		  from (select n, count(distinct id) as times from soak.deliveries where type = 'order.paid' group by n) d
		  full join (select (body ->> 'order')::int as n, count(*) as times from soak.calls where skill = 'ship' group by 1) c
		    on c.n = d.n
		 where d.times is distinct from c.times`,
	"a run's output is that of its event": `
		select format('the run for order %s ended with %s', r.payload #>> '{data,n}', r.output)
		  from agent_automation_runs r join agent_automations a on a.id = r.automation_id
		 where a.name = 'settle' and r.status = 'success'
		   and coalesce(r.output ->> 'text', '') <> format('Shipped order %s.', r.payload #>> '{data,n}')`,
	"a call that is logged was made, and no other": `
		select format('skill %s was called %s times and %s successes are logged', coalesce(c.skill, a.skill_name), c.n, a.n)
		  from (select skill, count(*) as n from soak.calls group by 1) c
		  full join (select skill_name, count(*) as n from agent_activity
		              where kind = 'call' and status = 'success' and skill_name in ('look_up', 'ship', 'restock', 'pulse')
		              group by 1) a on a.skill_name = c.skill
		 where c.n is distinct from a.n
		union all
		select format('skill %s was called %s times under key %s', skill, count(*), key) from soak.calls
		  group by skill, key having count(*) > 1`,
	"a skill's automation calls it once a run": `
		select format('automation %s ran %s times and its skill was called %s times', a.name, r.n, c.n)
		  from agent_automations a
		  cross join lateral (select count(*) as n from agent_automation_runs x where x.automation_id = a.id
		    and x.status = 'success') r
		  cross join lateral (select count(*) as n from soak.calls x where x.skill = a.skill_name) c
		 where a.skill_name <> '' and r.n <> c.n`,

	"no overlap within a lane": `
		with work as (
		  select a.execution_id, a.skill_name, a.created_at, a.finished_at, l.lane
		    from agent_activity a join agent_executions x on x.id = a.execution_id,
		         lateral (values (a.lane), (case when x.flow in ('heartbeat', 'operate') then x.flow end),
		           ('thread:' || x.thread_id),
		                         (case when a.purpose like 'automation %' then a.purpose end)) l (lane)
		   where a.kind in ('call', 'model') and l.lane <> ''),
		ordered as (
		  select w.*, max(finished_at) over before as busy_until, lag(execution_id) over before as earlier
		    from (select distinct * from work) w
		  window before as (partition by lane order by created_at, finished_at
		                    rows between unbounded preceding and 1 preceding))
		select format('lane %s: %s of %s began at %s while that of %s lasted until %s', lane, skill_name, execution_id,
		              created_at, earlier, busy_until)
		  from ordered o
		 where exists (select from work w where w.lane = o.lane and w.execution_id <> o.execution_id
		                and w.created_at < o.finished_at and o.created_at < w.finished_at and w.created_at <= o.created_at)`,
	"a fencing token is given once": `
		select format('token %s of lane %s was given to %s', token, lane, string_agg(owner, ' and '))
		  from soak.lanes group by lane, token having count(*) > 1`,
	"who works holds the lane": `
		select format('execution %s of %s worked and never acquired %s', x.id, x.flow, w.lane)
		  from agent_executions x,
		       lateral (values (case when x.flow = 'heartbeat' then 'heartbeat' end), ('thread:' || x.thread_id)) w (lane)
		 where w.lane is not null and x.flow in ('heartbeat', 'chat') and coalesce(x.result ->> 'skipped', '') = ''
		   and exists (select from agent_activity a where a.execution_id = x.id and a.kind in ('call', 'model', 'phase'))
		   and not exists (select from soak.lanes l where l.lane = w.lane and starts_with(l.owner, x.id || '#'))`,

	"every activity has a trace that something began": `
		select format('activity %s (%s) has trace %s', a.id, a.skill_name, a.trace_id) from agent_activity a
		 where a.trace_id !~ '^(hb|op|ch|wh|fl)_[0-9A-HJKMNP-TV-Z]{26}$'
		    or a.agent <> 'admin' and not exists (select from agent_executions x
		      where x.trace_id = a.trace_id)`, // an admin acts outside of runs
	"an activity has its execution's trace": `
		select format('activity %s (%s) has trace %s, its execution %s', a.id, a.skill_name, a.trace_id, x.trace_id)
		  from agent_activity a left join agent_executions x on x.id = a.execution_id
		 where a.execution_id is not null and x.trace_id is distinct from a.trace_id`,
	"every trace is complete": `
		select format('activity %s (%s) is %s, finished at %s', id, skill_name, status, finished_at) from agent_activity
		 where status in ('running', 'unknown') or finished_at is null
		union all
		select format('activity %s is still listed as under way', activity_id) from agent_activity_open
		union all
		select format('execution %s of %s is %s: %s', id, flow, status, error_message) from agent_executions
		 where status <> 'completed' or completed_at is null
		union all
		select format('lane %s is still held by %s', lane, locked_by) from agent_locks where locked_by <> ''
		union all
		select format('a draft of execution %s is left', execution_id) from agent_message_drafts`,
	"a trace shows what was done": `
		select format('execution %s of %s has no answer of the model', x.id, x.flow) from agent_executions x
		 where (x.flow in ('chat', 'operate') or x.flow = 'automation' and exists (
		          select from agent_automation_runs r join agent_automations a on a.id = r.automation_id
		           where r.id::text = x.input ->> 'run_id' and a.prompt <> ''))
		   and not exists (select from agent_activity a where a.execution_id = x.id and a.kind = 'model'
		     and a.status = 'success')
		union all
		select format('heartbeat %s has the phases %s', x.id, p.names) from agent_executions x,
		       lateral (select string_agg(a.skill_name, ' ' order by a.created_at) as names from agent_activity a
		                 where a.execution_id = x.id and a.kind = 'phase' and a.parent_id is null) p
		 where x.flow = 'heartbeat' and coalesce(x.result ->> 'skipped', '') = ''
		   and p.names is distinct from 'self_heal follow_through advance_plan run_automations reflect save_memories'`,

	"each question is answered once, in order": `
		select format('execution %s of thread %s has %s questions and %s answers', x.id, x.thread_id, m.questions, m.answers)
		  from agent_executions x,
		       lateral (select count(*) filter (where role = 'user') as questions, count(*) filter (where role = 'assistant')
		         as answers
		                  from agent_messages where execution_id = x.id) m
		 where x.flow = 'chat' and (m.questions <> 1 or m.answers <> 1)
		union all
		select format('thread %s: %L is answered with %L', q.thread_id, q.content, a.content)
		  from agent_messages q join agent_messages a on a.execution_id = q.execution_id and a.role = 'assistant'
		 where q.role = 'user' and q.channel = 'chat'
		   and (a.turn is distinct from q.turn or a.interrupted
		        or position(substring(q.content from 'question \d+ of thread \S+\.') in a.content) = 0)
		union all
		select format('thread %s: the answer to turn %s has place %s, after that to turn %s', thread_id, turn, seq, earlier)
		  from (select thread_id, turn, seq, lag(turn) over (partition by thread_id order by seq) as earlier
		          from agent_messages where role = 'assistant' and channel = 'chat') x
		 where earlier > turn`,
	"what a client got is what is stored": `
		select format('question %s of thread %s: the client got %L, stored is %L', s.question, s.thread, s.answer, a.content)
		  from soak.answers s
		  left join agent_messages q on q.thread_id in (select t.id from agent_threads t where t.id = s.thread
		    or t.name = s.thread) and q.role = 'user'
		   and q.content = format('Here is question %s of thread %s.', s.question, s.thread)
		  left join agent_messages a on a.execution_id = q.execution_id and a.role = 'assistant'
		 where a.content is distinct from s.answer`,
	"an admin's answer is that of the turn": `
		select format('turn %s was answered with %L', n, answer) from soak.operated
		  where answer <> format('Counted in turn %s.', n)
		union all
		select format('%s turns were answered and %s were made', o.n, x.n)
		  from (select count(distinct trace_id) as n from soak.operated) o,
		       (select count(*) as n from agent_executions where flow = 'operate') x where o.n <> x.n`,

	"each delivery is handled once": `
		select format('delivery %s was sent %s times, accepted %s times; stored %s with %s repeats, handled %s times, its event raised %s times',
		              s.id, s.sent, s.accepted, d.status, d.repeats, x.n, e.n)
		  from (select id, n, count(*) as sent, count(*) filter (where status = 202) as accepted from soak.deliveries
		    group by id, n) s
		  left join agent_webhook_deliveries d on d.endpoint = 'shop' and d.delivery_id = s.id
		  cross join lateral (select count(*) as n from agent_executions where flow = 'webhook' and trace_id = d.trace_id) x
		  cross join lateral (select count(*) as n from agent_events where event = 'EVENT_COMPLETED'
		    and key = 'shop-' || s.n) e
		 where d.status is distinct from 'done' or s.accepted <> 1 or d.repeats <> s.sent - 1 or x.n <> 1 or e.n <> 1
		    or d.attempts <> 1
		union all
		select format('delivery %s was never sent', d.delivery_id) from agent_webhook_deliveries d
		 where not exists (select from soak.deliveries s where s.id = d.delivery_id)`,

	"budgets are the sum of the model's calls": `
		with used as (
		  select 'day:' || to_char(b.created_at at time zone 'UTC', 'YYYY-MM-DD') as day, a.surface, a.token_usage, a.cost_usd
		    from agent_activity a cross join lateral (select a.created_at) b where a.kind = 'model'),
		sums as (
		  select 'day' as scope, sum((token_usage ->> 'total_tokens')::bigint) as tokens, sum(cost_usd) as usd, count(*) as n
		    from used
		  union all
		  select surface, sum((token_usage ->> 'total_tokens')::bigint), sum(cost_usd), count(*) from used group by surface),
		kept as (
		  select case when scope ~ '^day:[0-9-]+$' then 'day' else substring(scope from '^day:[0-9-]+:(.*)$') end as scope,
		         sum(tokens) as tokens, sum(cost_usd) as usd from agent_budgets where scope like 'day:%' group by 1)
		select format('%s: the budget has %s tokens and $%s, the calls have %s and $%s', coalesce(s.scope, k.scope), k.tokens,
		              k.usd, s.tokens, s.usd)
		  from sums s full join kept k on k.scope = s.scope
		 where coalesce(k.tokens, -1) <> coalesce(s.tokens, 0)
		   or abs(k.usd - coalesce(s.usd, 0)) > 0.000001 * coalesce(s.n, 0)`,
	"nothing stays reserved": `
		select format('scope %s has %s tokens and $%s set aside, %s calls unsettled', scope, reserved_tokens, reserved_usd,
		              unsettled)
		  from agent_budgets where reserved_tokens <> 0 or reserved_usd <> 0 or unsettled <> 0
		union all
		select format('step %s of execution %s is still reserved', step, execution_id) from agent_budget_reservations`,
	"a run's budget is the sum of its calls": `
		select format('scope %s has %s tokens, the calls of its trace have %s', b.scope, b.tokens, coalesce(u.tokens, 0))
		  from agent_budgets b,
		       lateral (select sum((a.token_usage ->> 'total_tokens')::bigint) as tokens from agent_activity a
		                 where a.kind = 'model' and a.trace_id = substring(b.scope from '^run:(.*)$')) u
		 where b.scope ~ '^run:(ch|op)_[0-9A-Z]{26}$' and b.tokens <> coalesce(u.tokens, 0)`,
}
