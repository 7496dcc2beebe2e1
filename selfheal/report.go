package selfheal

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// Report is the outcome of a run.
type Report struct {
	Checked int      `json:"checked"` // enabled skills that were measured
	Healed  []Healed `json:"healed"`
	Trials  []Trial  `json:"trials"` // skills that may be tried once
}

// Healed is a skill that this run disabled.
type Healed struct {
	Skill             string   `json:"skill"`
	SkillID           string   `json:"skill_id"`
	Reason            string   `json:"reason"`
	Evidence          Evidence `json:"evidence"`
	AutomationsPaused []string `json:"automations_paused"`
}

// Evidence is the reason why a skill was disabled. It is stored with the skill until the skill is enabled.
type Evidence struct {
	Reason   string         `json:"reason"`
	Rule     string         `json:"rule"` // streak or rate: the tripped condition; streak if both
	Streak   int            `json:"streak"`
	Calls    int            `json:"calls"`
	Errors   int            `json:"errors"`
	Rate     float64        `json:"rate"`
	Window   string         `json:"window"`
	Since    time.Time      `json:"since"` // start of the window, or the last enabling if later
	Classes  map[string]int `json:"classes"`
	Failures []Failure      `json:"failures"` // newest first, at most ten or as many as trip the rule
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
	Reason      string    `json:"reason"` // why it was disabled
	OfferedAt   time.Time `json:"offered_at"`
	Taken       bool      `json:"taken"`       // a call was admitted and is not settled
	Automations []string  `json:"automations"` // paused for the skill
}

// Prompt returns the report for a heartbeat's prompt. It quotes error texts, because they come from services.
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
		fmt.Fprintf(&b, "\n- %s is on trial: its next call decides whether it returns to service. It was disabled for %q.",
			t.Skill, t.Reason)
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

// evidence returns the data with which an admin can verify the decision.
func (m measured) evidence(p Policy) Evidence {
	e := Evidence{
		Rule: "streak", Streak: m.Decided.Streak, Calls: m.Calls, Errors: m.Errors, Window: p.Window.String(),
		Since: m.Since.UTC(), Classes: m.Classes, Failures: m.Failures,
	}
	if !m.Decided.ByStreak {
		e.Rule = "rate"
	}
	if m.Calls > 0 {
		e.Rate = float64(m.Errors) / float64(m.Calls)
	}
	return e
}

// reason returns the evidence in words.
func (m measured) reason(p Policy) string {
	text := fmt.Sprintf("%d consecutive failures", m.Decided.Streak)
	if !m.Decided.ByStreak {
		text = fmt.Sprintf("%d of %d calls failed (%d %%)", m.Errors, m.Calls, 100*m.Errors/max(m.Calls, 1))
		if float64(m.Errors) < p.Rate*float64(m.Calls) {
			d := m.Decided
			text = fmt.Sprintf("%d of the last %d calls failed (%d %%)", d.Failed, d.Recent, 100*d.Failed/d.Recent)
		}
		if class, n := m.mostCommonClass(); class != "" && len(m.Classes) > 1 {
			text += fmt.Sprintf(", %d of them %s", n, class)
		}
	}
	if len(m.Failures) == 0 {
		return text
	}
	last := m.Failures[0]
	return text + ", last: " + cmp.Or(strings.Trim(last.ErrorClass+": "+oneLine(last.ErrorMessage, 200), ": "),
		"no message")
}

// mostCommonClass returns the most frequent error class. Of equally frequent classes, it returns the first by name.
func (m measured) mostCommonClass() (class string, n int) {
	for _, c := range slices.Sorted(maps.Keys(m.Classes)) {
		if m.Classes[c] > n {
			class, n = c, m.Classes[c]
		}
	}
	return class, n
}

// oneLine returns text without line breaks, of at most n runes.
func oneLine(s string, n int) string {
	runes := []rune(strings.Join(strings.Fields(s), " "))
	if len(runes) <= n {
		return string(runes)
	}
	return string(runes[:n-1]) + "…"
}
