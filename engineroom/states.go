package engineroom

import (
	"fmt"
	"reflect"
	"strings"
)

// stateStyle is the display of a state: a class for its colour, and a shape.
type stateStyle struct{ tone, shape string }

// stateStyles has the states with a display of their own. Other states are grey, with a dot.
var stateStyles = byState(map[stateStyle]string{
	{"tone-good", "✓"}: "success, completed, approved, enabled, active, delivered, healthy, consumed, ok, " +
		"handled, answered, done, recovered, passed, pass, good",
	{"tone-good", "●"}:  "working",
	{"tone-good", "▲"}:  "better",
	{"tone-info", "▶"}:  "running, claimed, processing",
	{"tone-info", "◐"}:  "on trial, trial",
	{"tone-warn", "○"}:  "pending, queued, open",
	{"tone-warn", "?"}:  "proposed, unknown, undecided",
	{"tone-warn", "◷"}:  "waiting, pending_approval",
	{"tone-warn", "❚❚"}: "paused, parked",
	{"tone-warn", "◌"}:  "worker lost, interrupted",
	{"tone-warn", "⊘"}:  "refused, denied",
	{"tone-warn", "▲"}:  "degraded",
	{"tone-bad", "✕"}:   "error, failed, rejected, dead, failing, fail, bad",
	{"tone-bad", "⊘"}:   "disabled, quarantined",
	{"tone-bad", "◷"}:   "timeout",
	{"tone-bad", "!"}:   "stuck",
	{"tone-bad", "■"}:   "stopped",
	{"tone-bad", "▼"}:   "worse",
	{"tone-bad", "≠"}:   "diverged",
	{"", "–"}:           "skipped, ignored, duplicate, no turns, no trials",
	{"", "="}:           "not worse",
	{"", "⊘"}:           "cancelled",
	{"", "◷"}:           "expired",
})

// byState returns the style of each state. lists has the states of each style, separated by commas.
func byState(lists map[stateStyle]string) map[string]stateStyle {
	styles := map[string]stateStyle{}
	for style, states := range lists {
		for state := range strings.SplitSeq(states, ", ") {
			styles[state] = style
		}
	}
	return styles
}

// tone returns the class of a state's colour; empty for none.
func tone(state any) string { return stateStyles[stateText(state)].tone }

// shape returns the sign before the word of a state.
func shape(state any) string {
	if style, ok := stateStyles[stateText(state)]; ok {
		return style.shape
	}
	return "·"
}

// words formats a state: pending_approval becomes pending approval.
func words(state any) string { return strings.ReplaceAll(stateText(state), "_", " ") }

// class returns a state as a part of a class name.
func class(state any) string {
	return strings.Map(func(r rune) rune {
		if (r >= 'a' && r <= 'z') || (r >= '0' && r <= '9') {
			return r
		}
		return '-'
	}, stateText(state))
}

// stateText returns a state of any type as text; empty for a nil pointer.
func stateText(state any) string {
	v := reflect.ValueOf(state)
	if v.Kind() == reflect.Pointer {
		if v.IsNil() {
			return ""
		}
		state = v.Elem().Interface()
	}
	return fmt.Sprint(state)
}
