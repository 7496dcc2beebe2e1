package selfheal

import (
	"fmt"
	"strings"
	"time"
)

// Report is what a run found and did.
type Report struct {
	Checked int      `json:"checked"` // enabled skills that were measured
	Healed  []Healed `json:"healed"`
	Trials  []Trial  `json:"trials"` // skills that are offered for one try
}

// Healed is a skill that this run disabled.
type Healed struct {
	Skill             string   `json:"skill"`
	SkillID           string   `json:"skill_id"`
	Reason            string   `json:"reason"`
	Evidence          Evidence `json:"evidence"`
	AutomationsPaused []string `json:"automations_paused"`
}

// Evidence is why a skill was disabled. It is kept with the skill until it is enabled again.
type Evidence struct {
	Reason   string         `json:"reason"`
	Rule     string         `json:"rule"` // streak or rate: what tripped; streak when both did
	Streak   int            `json:"streak"`
	Calls    int            `json:"calls"`
	Errors   int            `json:"errors"`
	Rate     float64        `json:"rate"`
	Window   string         `json:"window"`
	Since    time.Time      `json:"since"` // the window's start, or the last enabling when that is later
	Classes  map[string]int `json:"classes"`
	Failures []Failure      `json:"failures"` // the newest first, ten or as many as trip the rule
}

// Failure is one failed call.
type Failure struct {
	ActivityID   string    `json:"activity_id"`
	TraceID      string    `json:"trace_id"`
	At           time.Time `json:"at"`
	ErrorClass   string    `json:"error_class"`
	ErrorMessage string    `json:"error_message"`
}

// Trial is a disabled skill that may be tried once.
type Trial struct {
	Skill       string    `json:"skill"`
	Reason      string    `json:"reason"` // for which it was disabled
	OfferedAt   time.Time `json:"offered_at"`
	Taken       bool      `json:"taken"`       // the one call is under way
	Automations []string  `json:"automations"` // that wait for the skill
}

// Prompt is the report for a heartbeat's prompt. Error texts come from outside, so they are quoted: they
// are data for the model, not instructions.
func (r Report) Prompt() string {
	var b strings.Builder
	fmt.Fprintf(&b, "Self-heal checked %d skills.", r.Checked)
	if len(r.Healed) == 0 {
		b.WriteString(" None had to be taken out of service.")
	}
	for _, h := range r.Healed {
		fmt.Fprintf(&b, "\n- %s is now disabled and cannot be called. Reason: %q.", h.Skill, h.Reason)
		if len(h.AutomationsPaused) > 0 {
			fmt.Fprintf(&b, " Paused with it: %s.", quoted(h.AutomationsPaused))
		}
	}
	for _, t := range r.Trials {
		if t.Taken {
			continue
		}
		fmt.Fprintf(&b, "\n- %s is on trial: its next call decides whether it returns to service. It was disabled for %q.", t.Skill, t.Reason)
		if len(t.Automations) > 0 {
			fmt.Fprintf(&b, " Waiting for it: %s.", quoted(t.Automations))
		}
	}
	return b.String()
}

func quoted(names []string) string {
	list := make([]string, 0, len(names))
	for _, name := range names {
		list = append(list, fmt.Sprintf("%q", name))
	}
	return strings.Join(list, ", ")
}
