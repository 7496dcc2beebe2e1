package monitor

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/internal/human"
)

// Verdict is the judgement whether the agent works.
//
// Stopped: autonomous work is paused, or no process has a live lease (agent_workers). The latter does not count if a
// heartbeat finished within its period and no execution has been pending for more than 2 minutes. Executions for
// outside workers do not count.
//
// Degraded, otherwise: at least one of
//
//   - A flow, a skill, another action or the model fails. Its newest finished run failed, in the last 24 hours, and so
//     did the last 3, or more than half of those that finished in the last hour. The rule ignores evals, cancelled
//     runs, skipped heartbeats, runs whose call a person rejected, calls before their skill was enabled again, and
//     calls that do not count for their skill (agent_skill_calls).
//   - A skill was disabled by self-heal, or is on trial.
//   - A heartbeat is dead: it is due for more than 2 minutes, or it began since and none finished within 2 periods.
//   - An execution is stuck (agent_executions_stuck).
//   - A lane is stuck: a holder that does not wait itself has held it for 15 minutes, and the first of its queue has
//     waited as long.
//   - The budget of the day, or the budget of an agent, is spent.
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
	if c.workers == 0 && (c.queued || !slices.ContainsFunc(c.beats, func(b Beat) bool { return b.recent(c.now) })) {
		v.State = Stopped
		v.Why = append(v.Why, Reason{Text: "no process is running", Link: "/lanes", Since: c.lease})
		return v
	}
	found := slices.Concat(c.failingSubjects(concerns), c.disabledSkills(of), c.deadHeartbeats(concerns),
		c.stuckFindings(concerns), c.brokenChannels(concerns), c.spentBudgets(of))
	var counted []finding
	for _, f := range found {
		if ack, known := c.acknowledged[f.keys[0]]; known {
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
