//go:build unix

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

// soakWorkspace is soakYAML with a number of objectives, so that heartbeats have something to pursue all along.
func soakWorkspace() string {
	var yaml strings.Builder
	yaml.WriteString(soakYAML)
	for i := range 12 {
		fmt.Fprintf(&yaml, "---\nkind: objective\nname: stock %d\ngoal: Know the stock.\nreview_every: 1m\nsteps: [Count "+
			"the shelf, Count the cellar]\n", i)
	}
	return yaml.String()
}

// lasts is for how long the load comes.
func lasts(t testing.TB) time.Duration {
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
	w := newWorld(t, soakWorkspace())
	w.model.Handle(think)
	total := lasts(t)
	ctx, end := context.WithTimeout(t.Context(), total)
	defer end()
	l := &load{world: w, ctx: ctx}
	first, base := w.serve("AGENT_HEARTBEAT_CRON=@every 3s")
	l.add(base)
	for _, work := range []func(){l.heartbeats, l.admin, l.storm} {
		l.group.Go(work)
	}
	for i := range 5 {
		l.group.Go(func() { l.visitor(fmt.Sprint("t", i+1), i == 4) })
	}
	l.pause(total / 2)
	second, base := w.serve("AGENT_HEARTBEAT_CRON=@every 3s")
	l.add(base)
	l.group.Wait()
	l.settle(first, second)
	l.noteLanes(append(l.finished, first, second)...)
	for _, name := range slices.Sorted(maps.Keys(checks)) {
		for i, violation := range pgtest.Column[string](t, w.db, checks[name]) {
			if i == 10 {
				t.Errorf("%s: and more", name)
				break
			}
			t.Errorf("%s: %s", name, violation)
		}
	}
	l.tally()
	for _, a := range []*proctest.Process{first, second} {
		n := acquired(a)
		t.Logf("%6d lanes acquired by one of the processes", n)
		assert.True(t, n != 0, "one of the processes did nothing")
	}
	if t.Failed() {
		for _, a := range []*proctest.Process{first, second} {
			t.Logf("agent %s:\n%s", strings.Join(a.Cmd.Args[1:], " "), worst(a))
		}
	}
}

// settle lets what is under way end, and the processes too.
func (l *load) settle(agents ...*proctest.Process) {
	l.t.Helper()
	pgtest.Eventually(l.t, patience, func() bool {
		return pgtest.Value[bool](l.t, l.db, `select exists (select from agent_automation_runs where cause = 'cron')`)
	}, "a heartbeat that no admin keeps away runs what is scheduled")
	pgtest.Exec(l.t, l.db, `update agent_schedules set next_run_at = clock_timestamp() + interval '1 day'`)
	pgtest.Exec(l.t, l.db, `update agent_automations set next_run_at = clock_timestamp() + interval '1 day'
		where trigger = 'cron'`)
	began := time.Now()
	quiet := func() bool { return len(pgtest.Column[string](l.t, l.db, unfinished)) == 0 }
	l.t.Cleanup(func() {
		if !quiet() {
			l.t.Logf("under way: %s", strings.Join(pgtest.Column[string](l.t, l.db, unfinished), ", "))
			l.t.Logf("complaints:\n%s", worst(agents[0]))
		}
	})
	pgtest.Eventually(l.t, patience+lasts(l.t), quiet, "everything that was begun ends")
	l.t.Logf("what was under way ended within %s", time.Since(began).Round(time.Millisecond))
	for _, a := range agents {
		a.Stop()
	}
}

// unfinished counts what has not ended.
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

// tally says how much there was, and fails a soak in which something did not happen at all.
func (l *load) tally() {
	l.t.Helper()
	l.t.Logf("visitors asked %d questions and hung up %d times", l.asked, l.hungUp)
	for _, c := range []struct {
		what, sql string
		most      int // of what must not happen; -1 when at least one is wanted
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
		assert.Truef(l.t, c.most >= 0 || n != 0, "no %s: the soak does not show what it is for", c.what)
	}
}

// acquired counts the lanes that a process took.
func acquired(a *proctest.Process) (n int) {
	for _, l := range a.Lines() {
		if l.Message == "lane acquired" {
			n++
		}
	}
	return n
}

// worst is what a process complained about.
func worst(a *proctest.Process) string {
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
