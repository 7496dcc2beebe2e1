package monitor

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/channels"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/human"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/schedule"
)

// Verdict is the judgement whether the agent works.
//
// Stopped: autonomous work is paused, or no process has a live lease (agent_workers) and no heartbeat finished within
// its period.
//
// Degraded, otherwise: at least one of
//
//   - A flow, a skill, another action or the model fails. Its newest finished run failed, in the last 24 hours, and so
//     did the last 3, or more than half of those that finished in the last hour. The rule ignores cancelled runs, runs
//     whose call a person rejected, skipped heartbeats, and calls that do not count for their skill
//     (agent_skill_calls).
//   - A skill was disabled by self-heal, or is on trial.
//   - A heartbeat is dead: it is due for more than 2 minutes, or it began since and none finished within 2 periods.
//   - An execution is stuck (agent_executions_stuck).
//   - A lane is stuck: a holder that does not wait itself has held it for 15 minutes, and the first of its queue has
//     waited as long.
//   - The budget of the day is spent.
//   - A channel is broken (channels.ListBroken).
//
// Working: none of these, or each is acknowledged.
//
// An agent's verdict has the flows that it ran, the skills, actions and models that failed for it, its disabled skills,
// its heartbeat, its stuck executions, its channels and its budget. Pause, processes and lanes concern all agents.
type Verdict struct {
	State string   `json:"state"` // working, degraded or stopped
	Why   []Reason `json:"why"`
	// Known has the reasons that an admin acknowledged. A known reason counts again when it changes.
	Known []Reason `json:"known"`
}

// Reason is one reason of a verdict.
type Reason struct {
	Text  string     `json:"text"`
	Link  string     `json:"link"` // page of the failing subject
	Since *time.Time `json:"since"`
	// By is the person who acknowledged the reason, and Note is the person's reason. Both are empty for a reason that
	// counts.
	By   string `json:"acknowledged_by,omitempty"`
	Note string `json:"acknowledged_reason,omitempty"`

	keys []string // keys of an acknowledgement; the first is the current cause
}

// String returns the verdict as one line.
func (v Verdict) String() string {
	text, why := v.State, make([]string, len(v.Why))
	for i, r := range v.Why {
		why[i] = r.Text
	}
	if len(why) > 0 {
		text += ": " + strings.Join(why, ", ")
	}
	if len(v.Known) > 0 {
		text += fmt.Sprintf(" (%d known)", len(v.Known))
	}
	return text
}

// Mark returns an id of the reasons that count. It changes when they change.
func (v Verdict) Mark() string {
	sum := sha256.New()
	for _, key := range keysOf(v.Why) {
		fmt.Fprintf(sum, "%q", key)
	}
	return hex.EncodeToString(sum.Sum(nil)[:8])
}

// keysOf lists the keys of an acknowledgement of the reasons, sorted.
func keysOf(reasons []Reason) (list []string) {
	for _, r := range reasons {
		list = append(list, r.keys...)
	}
	slices.Sort(list)
	return slices.Compact(list)
}

// The states.
const (
	Working  = "working"
	Degraded = "degraded"
	Stopped  = "stopped"
)

const (
	maxBeats     = 1000             // heartbeats that are read
	countLimit   = 1001             // the smallest count that is written as "1,000+"
	overdueAfter = 2 * time.Minute  // maximum delay of a due heartbeat
	stuckAfter   = 15 * time.Minute // maximum time of a hold while others wait
)

// Beat is an agent's heartbeat: its schedule, and the newest one that ended.
type Beat struct {
	Agent     string     `json:"agent"`
	Cron      string     `json:"cron"`
	Timezone  string     `json:"timezone"`
	NextRunAt time.Time  `json:"next_run_at"`
	LastRunAt *time.Time `json:"last_run_at"` // the last tick
	// The newest heartbeat that ended; empty for none.
	ID      string     `json:"execution_id"`
	TraceID string     `json:"trace_id"`
	Status  string     `json:"status"`
	Result  string     `json:"result"`
	Problem string     `json:"error"`
	EndedAt *time.Time `json:"ended_at"`
}

// Skipped reports that the newest heartbeat ended without work.
func (b Beat) Skipped() bool { return strings.HasPrefix(b.Result, "skipped:") }

// period returns the longer of the last and the next interval of the schedule, or 0 for an invalid schedule.
func (b Beat) period() time.Duration {
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

// recent reports whether a heartbeat finished within the last period.
func (b Beat) recent(now time.Time) bool {
	return b.EndedAt != nil && now.Sub(*b.EndedAt) <= b.period()+overdueAfter
}

// problem returns why a heartbeat is dead, or "".
func (b Beat) problem(now time.Time) (text string, since time.Time) {
	switch {
	case now.Sub(b.NextRunAt) > overdueAfter:
		return "heartbeat overdue", b.NextRunAt
	case b.EndedAt != nil && b.LastRunAt != nil && b.LastRunAt.After(*b.EndedAt) &&
		now.Sub(*b.EndedAt) > 2*b.period()+overdueAfter:
		return "no heartbeat finished", *b.EndedAt
	}
	return "", time.Time{}
}

type disabledSkill struct {
	Name    string
	ByAdmin bool // disabled by an admin, so it is not a reason
	OnTrial bool
	At      *time.Time
}

// stuckWork counts the stuck executions of an agent, or names a stuck lane.
type stuckWork struct {
	Agent, Lane string
	N           int64
	Since       *time.Time
}

// Condition is the data from which verdicts are derived.
type Condition struct {
	Failures
	now          time.Time
	pause        executions.Pause
	workers      int64 // processes with a live lease
	lease        *time.Time
	beats        []Beat
	disabled     []disabledSkill
	stuck        []stuckWork
	broken       []channels.Broken
	overBudget   map[string]bool // agents whose budget of the day is spent; "" is the budget of the day
	acknowledged map[string]acknowledgement
	// Budgets has today's budgets, and AgentBudgets those of agents by name.
	Budgets      []Budget
	AgentBudgets map[string]Budget
}

// readCondition reads the condition, without failures and budgets.
func readCondition(ctx context.Context, db postgres.DB) (c Condition, err error) {
	if c.pause, err = executions.CurrentPause(ctx, db); err != nil {
		return c, err
	}
	err = db.QueryRow(ctx, `
		select (select count(*) from (select from agent_workers w
		         where w.kind = 'process' and w.expires_at > clock_timestamp() limit 1000) x),
		       (select max(w.expires_at) from agent_workers w where w.kind = 'process'),
		       clock_timestamp()`).Scan(&c.workers, &c.lease, &c.now)
	if err != nil {
		return c, fmt.Errorf("count processes: %w", err)
	}
	c.beats, err = postgres.Rows[Beat](ctx, db, "list heartbeats", `
		select left(s.agent, 300) as agent, s.cron, s.timezone, s.next_run_at, s.last_run_at, coalesce(h.id::text, '') as id,
		       coalesce(h.trace_id, '') as trace_id, coalesce(h.status, '') as status, coalesce(h.result, '') as result,
		       coalesce(h.problem, '') as problem, h.ended_at
		  from (select * from agent_schedules where flow = 'heartbeat' order by name limit @limit::int) s
		  left join lateral (
		    select x.id, x.trace_id, x.status::text, left(x.result_summary, 300) as result, left(x.error_message, 300) as problem,
		           x.completed_at as ended_at
		      from (select e.* from agent_executions e where e.flow = 'heartbeat' and e.claimed_by is null
		             order by e.id desc limit 2000) x
		     where x.agent = s.agent and x.completed_at is not null order by x.id desc limit 1) h on true`,
		postgres.Strict{"limit": maxBeats})
	if err != nil {
		return c, err
	}
	c.disabled, err = postgres.Rows[disabledSkill](ctx, db, "list disabled skills", `
		select s.name, s.disabled_by <> 'self_heal' as by_admin, s.trial_at is not null as on_trial, s.disabled_at as at
		  from agent_skills s where not s.enabled order by s.disabled_at limit 1000`)
	if err != nil {
		return c, err
	}
	c.stuck, err = postgres.Rows[stuckWork](ctx, db, "list stuck work", `
		select left(x.agent, 300) as agent, '' as lane, count(*) as n, min(x.waiting_until) as since
		  from (select e.agent, e.waiting_until from agent_executions_stuck e order by e.waiting_until limit @limit::int) x
		 group by x.agent
		union all
		select '', l.lane, 1, w.since
		  from (select k.lane, k.locked_at from agent_locks k
		         where k.locked_by <> '' and not k.parked and k.expires_at > clock_timestamp() limit @limit::int) l
		 cross join lateral (
		   select q.since from agent_lock_waiters q
		    where q.lane = l.lane and q.expires_at > clock_timestamp() order by q.ticket limit 1) w
		 where l.locked_at < @before and w.since < @before`,
		postgres.Strict{"limit": countLimit, "before": c.now.Add(-stuckAfter)})
	if err != nil {
		return c, err
	}
	c.broken, err = channels.ListBroken(ctx, db)
	return c, err
}

// Judge derives the verdict for an agent, or for all agents if of is nil. all has the agents of the installation.
func (c Condition) Judge(of *agents.Agent, all []agents.Agent) Verdict {
	concerns := func(name string) bool { return of == nil || agents.Acting(all, name).Name == of.Name }
	v := Verdict{State: Working, Why: []Reason{}, Known: []Reason{}}
	if c.pause.Paused {
		v.State = Stopped
		v.Why = append(v.Why, Reason{
			Text: "paused by " + human.Cut(60, c.pause.PausedBy), Link: "#pause", Since: c.pause.PausedAt,
		})
		return v
	}
	if c.workers == 0 && !slices.ContainsFunc(c.beats, func(b Beat) bool { return b.recent(c.now) }) {
		v.State = Stopped
		v.Why = append(v.Why, Reason{Text: "no process is running", Link: "/lanes", Since: c.lease})
		return v
	}
	found := slices.Concat(c.failingSubjects(concerns), c.disabledSkills(of), c.deadHeartbeats(concerns),
		c.stuckFindings(concerns), c.brokenChannels(concerns), c.spentBudgets(of))
	var counted []finding
	for _, f := range found {
		if ack, is := c.acknowledged[f.keys[0]]; is {
			f.By, f.Note = ack.AcknowledgedBy, ack.Reason
			v.Known = append(v.Known, f.Reason)
		} else {
			counted = append(counted, f)
		}
	}
	if v.Why = append(v.Why, merge(counted)...); len(v.Why) > 0 {
		v.State = Degraded
	}
	return v
}

// finding is a reason before it is merged with other findings of its class.
type finding struct {
	Reason
	class      string                          // empty: it is not merged
	mergedText func(n int) (text, link string) // of the reason for n findings of the class
}

// merge combines the findings of a class into one reason, at the position of the first.
func merge(found []finding) (why []Reason) {
	places, counts := map[string]int{}, map[string]int{} // by class
	for _, f := range found {
		if counts[f.class]++; f.class == "" || counts[f.class] == 1 {
			places[f.class] = len(why)
			why = append(why, f.Reason)
			continue
		}
		r := &why[places[f.class]]
		r.Text, r.Link = f.mergedText(counts[f.class])
		r.Since = earliest(r.Since, f.Since)
		r.keys = append(slices.Clip(r.keys), f.keys...)
	}
	return why
}

// earliest returns the earlier of two times. A nil time is ignored.
func earliest(a, b *time.Time) *time.Time {
	if a == nil || b != nil && b.Before(*a) {
		return b
	}
	return a
}

// deadHeartbeats returns the findings of dead heartbeats.
func (c Condition) deadHeartbeats(concerns func(string) bool) (found []finding) {
	beats := c.BeatsOf(concerns)
	for _, b := range beats {
		text, since := b.problem(c.now)
		if text == "" {
			continue
		}
		key := fmt.Sprintf("%s %s %d", text, b.Agent, since.Unix())
		if len(beats) > 1 {
			text += " for " + human.Cut(60, b.Agent)
		}
		found = append(found, finding{Reason: Reason{
			Text: text, Link: "/executions?flow=heartbeat", Since: &since, keys: []string{key},
		}})
	}
	return found
}

// brokenChannels returns the findings of broken channels.
func (c Condition) brokenChannels(concerns func(string) bool) (found []finding) {
	for _, b := range c.broken {
		if !concerns(b.Agent) {
			continue
		}
		text := "channel " + b.Name + " " + b.State
		found = append(found, finding{
			Reason: Reason{
				Text: text, Link: "/channels#channel-" + b.Name, Since: &b.Since, keys: []string{text + ": " + errorKey(b.Error)},
			},
			class:      "channel",
			mergedText: func(n int) (string, string) { return fmt.Sprintf("%d channels broken", n), "/channels" },
		})
	}
	return found
}

// spentBudgets returns the finding of a spent budget.
func (c Condition) spentBudgets(of *agents.Agent) []finding {
	text := ""
	if c.overBudget[""] || of != nil && c.overBudget[of.Name] {
		text = "today's budget is spent"
	} else if of == nil && len(c.overBudget) > 0 {
		text = "today's budget is spent by " + agentsText(c.overBudget)
	}
	if text == "" {
		return nil
	}
	day := c.now.UTC().Format(time.DateOnly)
	return []finding{{Reason: Reason{Text: text, Link: "/spend?days=1", keys: []string{text + " " + day}}}}
}

// agentsText names one agent, or counts several.
func agentsText(set map[string]bool) string {
	for name := range set {
		if len(set) == 1 {
			return human.Cut(60, name)
		}
	}
	return fmt.Sprintf("%d agents", len(set))
}

// BeatsOf returns the heartbeats of the agents that concerns accepts.
func (c Condition) BeatsOf(concerns func(string) bool) (list []Beat) {
	for _, b := range c.beats {
		if concerns(b.Agent) {
			list = append(list, b)
		}
	}
	return list
}

// failingSubjects returns the findings of failing flows, skills, actions and models.
func (c Condition) failingSubjects(concerns func(string) bool) (found []finding) {
	disabled := map[string]bool{} // disabled skills have findings of their own
	for _, s := range c.disabled {
		disabled[s.Name] = true
	}
	var roots map[string]string
	for _, kind := range []string{"flow", "skill", "action", "model"} {
		at := map[string]int{}
		for _, f := range c.list {
			o := c.outcomeOf(f)
			if f.Kind != kind || !concerns(f.Agent) || !o.Failing() || kind == "skill" && disabled[f.Name] {
				continue
			}
			if roots == nil {
				roots = c.roots()
			}
			key := kind + " " + f.Name + " fails: " + errorKey(roots[f.ID])
			i, has := at[f.Name]
			if !has {
				i = len(found)
				at[f.Name] = i
				many := func(n int) (string, string) { return fmt.Sprintf("%d %ss failing", n, kind), "#failing" }
				found = append(found, finding{Reason: failingReason(f, o.Since, key), class: kind, mergedText: many})
			}
			found[i].Since = earliest(found[i].Since, o.Since)
			if !slices.Contains(found[i].keys, key) { // the newest failure comes first
				found[i].keys = append(found[i].keys, key)
			}
		}
	}
	return found
}

// failingReason returns the reason of a failure. A model call that a limit refused has its own text, because it did not
// reach the model.
func failingReason(f failure, since *time.Time, key string) Reason {
	text, link := f.Kind+" "+human.Cut(60, f.Name)+" failing", SubjectURL(f.Kind, f.Name)
	switch {
	case f.Kind == "model" && strings.HasPrefix(f.Class, "budget_"):
		text, link = "model calls refused by a limit", "/spend?days=1"
	case f.Kind == "model":
		text = "model calls failing"
	}
	return Reason{Text: text, Link: link, Since: since, keys: []string{key}}
}

// disabledSkills returns the findings of skills that self-heal disabled and that the agent may call.
func (c Condition) disabledSkills(of *agents.Agent) (found []finding) {
	for _, trial := range []bool{false, true} {
		text, link := "disabled by self-heal", "/skills?state=disabled"
		if trial {
			text, link = "on trial", "/skills?state=on+trial"
		}
		for _, s := range c.disabled {
			if s.OnTrial != trial || s.ByAdmin || of != nil && !of.May(s.Name) {
				continue
			}
			found = append(found, finding{
				Reason: Reason{
					Text: "skill " + s.Name + " " + text, Link: SubjectURL("skill", s.Name), Since: s.At,
					keys: []string{fmt.Sprintf("skill %s %s %d", s.Name, text, unixSeconds(s.At))},
				},
				class: text, mergedText: func(n int) (string, string) { return fmt.Sprintf("%d skills %s", n, text), link },
			})
		}
	}
	return found
}

func unixSeconds(at *time.Time) int64 {
	if at == nil {
		return 0
	}
	return at.Unix()
}

// stuckFindings returns the findings of stuck executions of an agent, and of stuck lanes.
func (c Condition) stuckFindings(concerns func(string) bool) (found []finding) {
	var runs, lanes stuckWork
	for _, s := range c.stuck {
		sum := &runs
		if s.Lane != "" {
			sum = &lanes
		} else if !concerns(s.Agent) {
			continue
		}
		sum.N, sum.Since = sum.N+s.N, earliest(sum.Since, s.Since)
	}
	add := func(noun, link string, s stuckWork) {
		if s.N > 0 {
			found = append(found, finding{Reason: Reason{
				Text: Counted(s.N, noun) + " stuck", Link: link, Since: s.Since,
				keys: []string{fmt.Sprintf("%d %s stuck %d", s.N, noun, unixSeconds(s.Since))},
			}})
		}
	}
	add("execution", "/executions?view=stuck", runs)
	add("lane", "/lanes", lanes)
	return found
}

// Counted formats a count with its noun: "1 lane", "2 lanes", "1,000+ lanes".
func Counted(n int64, noun string) string {
	switch {
	case n == 1:
		return "1 " + noun
	case n >= countLimit:
		return human.Count(countLimit-1) + "+ " + noun + "s"
	}
	return human.Count(n) + " " + noun + "s"
}
