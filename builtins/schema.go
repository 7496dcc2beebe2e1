package builtins

import (
	"strings"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/objectives"
)

func object(properties map[string]any) map[string]any {
	return map[string]any{"type": "object", "properties": properties}
}

func text(about string) map[string]any {
	return map[string]any{"type": "string", "maxLength": 500, "description": about}
}

// needed is an object whose first properties must be there.
func needed(properties map[string]any, required ...any) map[string]any {
	o := object(properties)
	o["required"] = required
	return o
}

// words is a text of some length.
func words(about string, most int) map[string]any {
	return map[string]any{"type": "string", "minLength": 1, "maxLength": most, "description": about}
}

func number(about string, least, most int) map[string]any {
	return map[string]any{"type": "integer", "minimum": least, "maximum": most, "description": about}
}

// titles are steps.
func titles(about string) map[string]any {
	return map[string]any{"type": "array", "maxItems": 20, "items": words("", 300), "description": about}
}

func limit() map[string]any {
	return map[string]any{"type": "integer", "minimum": 1, "maximum": maxLimit, "default": defaultLimit}
}

func oneOf[S ~string](states ...S) map[string]any {
	names := make([]any, len(states))
	for i, s := range states {
		names[i] = string(s)
	}
	return map[string]any{"type": "string", "enum": names}
}

func objectiveStates() []string {
	return []string{
		objectives.Proposed, objectives.Active, objectives.Paused, objectives.Completed, objectives.Failed, objectives.Rejected,
	}
}

func activityStates() []activity.Status {
	return []activity.Status{
		activity.Running, activity.Success, activity.Error, activity.PendingApproval, activity.Skipped, activity.Unknown,
	}
}

// clip keeps the beginning of a text.
func clip(s string, most int) string {
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:most], "") + "…"
}
