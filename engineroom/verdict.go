package engineroom

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/human"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/schedule"
)

// verdict says whether the agent works.
//
// Stopped: autonomous work is paused, or no process has a live lease (agent_workers) and no heartbeat finished within
// its period.
//
// Degraded, otherwise: at least one of
//
//   - A flow, a skill, another action or the model fails. Its newest finished run failed, in the last 24 hours, and so
//     did the last 3, or more than half of those that finished in the last hour. Cancelled runs, skipped heartbeats
//     and calls that say nothing about their skill (agent_skill_calls) are left out.
//   - A skill was disabled by self-heal, or is on trial.
//   - A heartbeat is dead: it is due for more than 2 minutes, or it began since and none finished within 2 periods.
//   - An execution is stuck (agent_executions_stuck).
//   - A lane is stuck: one holder, which does not wait itself, has held it for 15 minutes, and the first of its queue
//     has waited as long.
//   - The budget of the day is spent.
//
// Working: none of these.
//
// An agent's verdict has the flows that it ran, the skills, actions and models that failed for it, its disabled skills,
// its heartbeat, its stuck executions and its budget. Pause, processes and lanes concern all agents.
type verdict struct {
	State string // working, degraded or stopped
	Why   []reason
}

const (
	working  = "working"
	degraded = "degraded"
	stopped  = "stopped"
)

// reason is why the agent does not work as it should.
type reason struct {
	Text  string
	Link  string // to what fails
	Since *time.Time
}

const (
	// overdueAfter is how long a heartbeat may be due, and stuckAfter how long a holder may keep others waiting.
	overdueAfter, stuckAfter = 2 * time.Minute, 15 * time.Minute
)

// beat is an agent's heartbeat: its schedule, and the newest one that ended.
type beat struct {
	Agent, Cron, Timezone                string
	NextRunAt                            time.Time
	LastRunAt                            *time.Time // the last tick
	ID, TraceID, Status, Result, Problem string     // of the newest one; empty for none
	EndedAt                              *time.Time
}

// Skipped reports that the newest heartbeat ended without work.
func (b beat) Skipped() bool { return strings.HasPrefix(b.Result, "skipped:") }

// period is the time from one tick to the next, as long as it can be now; 0 if the schedule cannot be read.
func (b beat) period() time.Duration {
	zone, err := schedule.Location(b.Timezone)
	if err != nil {
		return 0
	}
	plan, err := schedule.Parse(b.Cron, zone)
	if err != nil {
		return 0
	}
	period := plan.Next(b.NextRunAt).Sub(b.NextRunAt)
	if b.LastRunAt != nil {
		period = max(period, b.NextRunAt.Sub(*b.LastRunAt))
	}
	return max(period, 0)
}

// recent reports whether a heartbeat finished within the period.
func (b beat) recent(now time.Time) bool {
	return b.EndedAt != nil && now.Sub(*b.EndedAt) <= b.period()+overdueAfter
}

// problem says why the heartbeat is dead; empty if it is not.
func (b beat) problem(now time.Time) (text string, since time.Time) {
	if period := b.period(); now.Sub(b.NextRunAt) > overdueAfter {
		return "heartbeat overdue", b.NextRunAt
	} else if b.EndedAt != nil && b.LastRunAt != nil && b.LastRunAt.After(*b.EndedAt) &&
		now.Sub(*b.EndedAt) > 2*period+overdueAfter {
		return "no heartbeat finished", *b.EndedAt
	}
	return "", time.Time{}
}

// skillOut is a disabled skill.
type skillOut struct {
	Name    string
	ByAdmin bool // not by self-heal, so no reason
	OnTrial bool
	At      *time.Time
}

// stuckWork is the stuck executions of an agent, or a stuck lane.
type stuckWork struct {
	Agent, Lane string
	N           int64
	Since       *time.Time
}

// condition is what verdicts are derived from.
type condition struct {
	now     time.Time
	pause   executions.Pause
	workers int64 // processes with a live lease
	lease   *time.Time
	failures
	beats []beat
	out   []skillOut
	stuck []stuckWork
	spent map[string]bool // the agents whose budget of the day is spent; "" for the installation's
}

// readCondition reads the condition. Failures and budgets are the caller's.
func readCondition(ctx context.Context, db postgres.DB) (c condition, err error) {
	c.now = time.Now()
	if c.pause, err = executions.CurrentPause(ctx, db); err != nil {
		return c, err
	}
	err = db.QueryRow(ctx, `
		select (select count(*) from (select from agent_workers w
		         where w.kind = 'process' and w.expires_at > clock_timestamp() limit 1000) x),
		       (select max(w.expires_at) from agent_workers w where w.kind = 'process')`).Scan(&c.workers, &c.lease)
	if err != nil {
		return c, fmt.Errorf("count processes: %w", err)
	}
	c.beats, err = postgres.Rows[beat](ctx, db, "list heartbeats", `
		select left(s.agent, 300) as agent, s.cron, s.timezone, s.next_run_at, s.last_run_at, coalesce(h.id::text, '') as id,
		       coalesce(h.trace_id, '') as trace_id, coalesce(h.status, '') as status, coalesce(h.result, '') as result,
		       coalesce(h.problem, '') as problem, h.ended_at
		  from (select * from agent_schedules where flow = 'heartbeat' order by name limit @most::int) s
		  left join lateral (
		    select x.id, x.trace_id, x.status::text, left(x.result_summary, 300) as result, left(x.error_message, 300) as problem,
		           x.completed_at as ended_at
		      from (select e.* from agent_executions e where e.flow = 'heartbeat' and e.claimed_by is null
		             order by e.id desc limit 2000) x
		     where x.agent = s.agent and x.completed_at is not null order by x.id desc limit 1) h on true`,
		postgres.Strict{"most": mostAgents})
	if err != nil {
		return c, err
	}
	c.out, err = postgres.Rows[skillOut](ctx, db, "list disabled skills", `
		select s.name, s.disabled_by <> 'self_heal' as by_admin, s.trial_at is not null as on_trial, s.disabled_at as at
		  from agent_skills s where not s.enabled order by s.disabled_at limit 1000`)
	if err != nil {
		return c, err
	}
	c.stuck, err = postgres.Rows[stuckWork](ctx, db, "list stuck work", `
		select left(x.agent, 300) as agent, '' as lane, count(*) as n, min(x.waiting_until) as since
		  from (select e.agent, e.waiting_until from agent_executions_stuck e order by e.waiting_until limit @most::int) x
		 group by x.agent
		union all
		select '', l.lane, 1, w.since
		  from (select k.lane, k.locked_at from agent_locks k
		         where k.locked_by <> '' and not k.parked and k.expires_at > clock_timestamp() limit @most::int) l
		 cross join lateral (select q.since from agent_lock_waiters q
		    where q.lane = l.lane and q.expires_at > clock_timestamp() order by q.ticket limit 1) w
		 where l.locked_at < @before and w.since < @before`,
		postgres.Strict{"most": beyond, "before": c.now.Add(-stuckAfter)})
	return c, err
}

// judge derives the verdict for an agent, or for all. all are the agents of the installation.
func (c condition) judge(of *agents.Agent, all []agents.Agent) verdict {
	concerns := func(name string) bool { return of == nil || agents.Acting(all, name).Name == of.Name }
	if c.pause.Paused {
		return verdict{stopped, []reason{{"paused by " + cut(60, c.pause.PausedBy), "#pause", c.pause.PausedAt}}}
	}
	beats := c.beatsOf(concerns)
	if c.workers == 0 && !slices.ContainsFunc(c.beats, func(b beat) bool { return b.recent(c.now) }) {
		return verdict{stopped, []reason{{"no process is running", "/lanes", c.lease}}}
	}
	why := c.failing(concerns)
	why = append(why, c.outOfService(of)...)
	for _, b := range beats {
		text, since := b.problem(c.now)
		if text != "" && len(beats) > 1 {
			text += " for " + cut(60, b.Agent)
		}
		if text != "" {
			why = append(why, reason{text, "/executions?flow=heartbeat", &since})
		}
	}
	why = append(why, c.stuckOf(concerns)...)
	if c.spent[""] || of != nil && c.spent[of.Name] {
		why = append(why, reason{"today's budget is spent", "/spend?days=1", nil})
	} else if of == nil && len(c.spent) > 0 {
		why = append(why, reason{"today's budget is spent by " + agentsText(c.spent), "/spend?days=1", nil})
	}
	if len(why) > 0 {
		return verdict{degraded, why}
	}
	return verdict{State: working}
}

// agentsText names one agent, or counts several.
func agentsText(set map[string]bool) string {
	for name := range set {
		if len(set) == 1 {
			return cut(60, name)
		}
	}
	return fmt.Sprintf("%d agents", len(set))
}

// beatsOf are the heartbeats that concern an agent.
func (c condition) beatsOf(concerns func(string) bool) (list []beat) {
	for _, b := range c.beats {
		if concerns(b.Agent) {
			list = append(list, b)
		}
	}
	return list
}

// failing are the reasons for flows, skills, actions and models that fail.
func (c condition) failing(concerns func(string) bool) (why []reason) {
	out := map[string]bool{} // disabled skills are not called any more
	for _, s := range c.out {
		out[s.Name] = true
	}
	for _, kind := range []string{"flow", "skill", "action", "model"} {
		var names []string
		var since *time.Time
		for _, f := range c.list {
			o := c.outcome(f)
			if f.Kind != kind || !concerns(f.Agent) || !o.Failing() || kind == "skill" && out[f.Name] {
				continue
			}
			if !slices.Contains(names, f.Name) {
				names = append(names, f.Name)
			}
			if since == nil || o.Since != nil && o.Since.Before(*since) {
				since = o.Since
			}
		}
		switch {
		case kind == "model" && len(names) > 0:
			why = append(why, reason{"model calls failing", subjectURL(kind, names[0]), since})
		case len(names) == 1:
			why = append(why, reason{kind + " " + cut(60, names[0]) + " failing", subjectURL(kind, names[0]), since})
		case len(names) > 1:
			why = append(why, reason{fmt.Sprintf("%d %ss failing", len(names), kind), "#failing", since})
		}
	}
	return why
}

// outOfService are the reasons for skills that an agent may use and that self-heal disabled.
func (c condition) outOfService(of *agents.Agent) (why []reason) {
	for _, trial := range []bool{false, true} {
		var hit []skillOut
		for _, s := range c.out {
			if s.OnTrial == trial && !s.ByAdmin && (of == nil || of.May(s.Name)) {
				hit = append(hit, s)
			}
		}
		text, link := "disabled by self-heal", "/skills?state=disabled"
		if trial {
			text, link = "on trial", "/skills?state=on+trial"
		}
		switch len(hit) {
		case 0:
		case 1:
			why = append(why, reason{"skill " + hit[0].Name + " " + text, subjectURL("skill", hit[0].Name), hit[0].At})
		default:
			why = append(why, reason{fmt.Sprintf("%d skills %s", len(hit), text), link, hit[0].At})
		}
	}
	return why
}

// stuckOf are the reasons for stuck executions of an agent, and stuck lanes.
func (c condition) stuckOf(concerns func(string) bool) (why []reason) {
	var runs, lanes int64
	var runsSince, lanesSince *time.Time
	earliest := func(since **time.Time, at *time.Time) {
		if *since == nil || at != nil && at.Before(**since) {
			*since = at
		}
	}
	for _, s := range c.stuck {
		switch {
		case s.Lane != "":
			lanes++
			earliest(&lanesSince, s.Since)
		case concerns(s.Agent):
			runs += s.N
			earliest(&runsSince, s.Since)
		}
	}
	if runs > 0 {
		why = append(why, reason{counted(runs, "execution") + " stuck", "/executions?view=stuck", runsSince})
	}
	if lanes > 0 {
		why = append(why, reason{counted(lanes, "lane") + " stuck", "/lanes", lanesSince})
	}
	return why
}

// counted writes a number of things, counted up to beyond.
func counted(n int64, noun string) string {
	switch {
	case n == 1:
		return "1 " + noun
	case n >= beyond:
		return human.Count(beyond-1) + "+ " + noun + "s"
	}
	return human.Count(n) + " " + noun + "s"
}
