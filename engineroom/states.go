package engineroom

import (
	"fmt"
	"reflect"
	"strings"
)

// stateStyle is the display of a state: a class for its colour, and a shape.
type stateStyle struct{ tone, shape string }

// stateStyles has the states with a display of their own. Other states are grey, with a dot.
var stateStyles = map[string]stateStyle{
	"success": {"tone-good", "✓"}, "completed": {"tone-good", "✓"}, "approved": {"tone-good", "✓"},
	"enabled": {"tone-good", "✓"},
	"active":  {"tone-good", "✓"}, "delivered": {"tone-good", "✓"}, "healthy": {"tone-good", "✓"},
	"consumed": {"tone-good", "✓"},
	"ok":       {"tone-good", "✓"}, "handled": {"tone-good", "✓"}, "answered": {"tone-good", "✓"},
	"done":    {"tone-good", "✓"},
	"running": {"tone-info", "▶"}, "claimed": {"tone-info", "▶"}, "processing": {"tone-info", "▶"},
	"on trial": {"tone-info", "◐"}, "trial": {"tone-info", "◐"},
	"pending": {"tone-warn", "○"}, "waiting": {"tone-warn", "◷"}, "pending_approval": {"tone-warn", "◷"},
	"proposed": {"tone-warn", "?"},
	"paused":   {"tone-warn", "❚❚"}, "queued": {"tone-warn", "○"}, "open": {"tone-warn", "○"},
	"parked": {"tone-warn", "❚❚"}, "unknown": {"tone-warn", "?"},
	"error": {"tone-bad", "✕"}, "failed": {"tone-bad", "✕"}, "timeout": {"tone-bad", "◷"}, "rejected": {"tone-bad", "✕"},
	"dead":     {"tone-bad", "✕"},
	"disabled": {"tone-bad", "⊘"}, "quarantined": {"tone-bad", "⊘"}, "stuck": {"tone-bad", "!"},
	"failing": {"tone-bad", "✕"}, "recovered": {"tone-good", "✓"},
	"working": {"tone-good", "●"}, "degraded": {"tone-warn", "▲"}, "stopped": {"tone-bad", "■"},
	"worker lost": {"tone-warn", "◌"},
	"passed":      {"tone-good", "✓"}, "pass": {"tone-good", "✓"}, "better": {"tone-good", "▲"},
	"good": {"tone-good", "✓"},
	"fail": {"tone-bad", "✕"}, "worse": {"tone-bad", "▼"}, "bad": {"tone-bad", "✕"}, "diverged": {"tone-bad", "≠"},
	"undecided": {"tone-warn", "?"}, "refused": {"tone-warn", "⊘"}, "denied": {"tone-warn", "⊘"}, "not worse": {"", "="},
	"cancelled": {"", "⊘"}, "skipped": {"", "–"}, "expired": {"", "◷"}, "ignored": {"", "–"}, "duplicate": {"", "–"},
	"interrupted": {"tone-warn", "◌"}, "no turns": {"", "–"}, "no trials": {"", "–"},
}

// tone returns the class of a state's colour; empty for none.
func tone(state any) string { return stateStyles[stateText(state)].tone }

// shape returns the sign before the word of a state.
func shape(state any) string {
	if l, ok := stateStyles[stateText(state)]; ok {
		return l.shape
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
