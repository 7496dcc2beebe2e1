package engineroom

import (
	"fmt"
	"reflect"
	"strings"
)

// look is how a state is shown: a class for its colour and a shape that tells it apart without one.
type look struct{ tone, shape string }

// looks are the states that have more to say than their word. Others are grey, with a dot.
var looks = map[string]look{
	"success": {"tone-good", "✓"}, "completed": {"tone-good", "✓"}, "approved": {"tone-good", "✓"}, "enabled": {"tone-good", "✓"},
	"active": {"tone-good", "✓"}, "delivered": {"tone-good", "✓"}, "healthy": {"tone-good", "✓"}, "consumed": {"tone-good", "✓"},
	"ok": {"tone-good", "✓"}, "handled": {"tone-good", "✓"}, "answered": {"tone-good", "✓"}, "done": {"tone-good", "✓"},
	"running": {"tone-info", "▶"}, "claimed": {"tone-info", "▶"}, "processing": {"tone-info", "▶"}, "on trial": {"tone-info", "◐"}, "trial": {"tone-info", "◐"},
	"pending": {"tone-warn", "○"}, "waiting": {"tone-warn", "◷"}, "pending_approval": {"tone-warn", "◷"}, "proposed": {"tone-warn", "?"},
	"paused": {"tone-warn", "❚❚"}, "queued": {"tone-warn", "○"}, "open": {"tone-warn", "○"}, "parked": {"tone-warn", "❚❚"}, "unknown": {"tone-warn", "?"},
	"error": {"tone-bad", "✕"}, "failed": {"tone-bad", "✕"}, "timeout": {"tone-bad", "◷"}, "rejected": {"tone-bad", "✕"}, "dead": {"tone-bad", "✕"},
	"disabled": {"tone-bad", "⊘"}, "quarantined": {"tone-bad", "⊘"}, "stuck": {"tone-bad", "!"},
	"cancelled": {"", "⊘"}, "skipped": {"", "–"}, "expired": {"", "◷"}, "ignored": {"", "–"}, "duplicate": {"", "–"},
}

// tone is the class of a state's colour; empty for none.
func tone(state any) string { return looks[stateWord(state)].tone }

// shape is the sign before a state's word.
func shape(state any) string {
	if l, has := looks[stateWord(state)]; has {
		return l.shape
	}
	return "·"
}

// words is a state as people write it: pending_approval is pending approval.
func words(state any) string { return strings.ReplaceAll(stateWord(state), "_", " ") }

// class is a state as a part of a class name: what else it has becomes hyphens.
func class(state any) string {
	return strings.Map(func(r rune) rune {
		if (r >= 'a' && r <= 'z') || (r >= '0' && r <= '9') {
			return r
		}
		return '-'
	}, stateWord(state))
}

// stateWord is a state as it is kept, whatever type it has: empty for a nil pointer.
func stateWord(state any) string {
	v := reflect.ValueOf(state)
	if v.Kind() == reflect.Pointer {
		if v.IsNil() {
			return ""
		}
		state = v.Elem().Interface()
	}
	return fmt.Sprint(state)
}
