package activity

import (
	"context"
	"encoding/json"
	"slices"

	"github.com/lanekeeper/lanekeeper/trace"
)

// HiddenText stands for a text of a conversation that the caller may not read.
const HiddenText = "[needs the scope threads:read]"

type hiddenTextsKey struct{}

// WithoutTexts hides the texts of conversations in all output under ctx. Package principals sets it for callers without
// the scope.
func WithoutTexts(ctx context.Context) context.Context {
	return context.WithValue(ctx, hiddenTextsKey{}, true)
}

// WithTexts shows the texts again, for reads that the caller does not see.
func WithTexts(ctx context.Context) context.Context {
	return context.WithValue(ctx, hiddenTextsKey{}, false)
}

// HidesTexts reports whether the texts of conversations are hidden under ctx.
func HidesTexts(ctx context.Context) bool {
	hidden, _ := ctx.Value(hiddenTextsKey{}).(bool)
	return hidden
}

// HiddenJSON returns the note in place of a JSON value, of the same type: an object, an array or a string. Numbers and
// booleans become null.
func HiddenJSON(value json.RawMessage) json.RawMessage {
	for _, first := range value {
		switch first {
		case ' ', '\t', '\r', '\n':
			continue
		case '{':
			return json.RawMessage(`{"note":"` + HiddenText + `"}`)
		case '[':
			return json.RawMessage(`["` + HiddenText + `"]`)
		case '"':
			return json.RawMessage(`"` + HiddenText + `"`)
		}
		return json.RawMessage(`null`)
	}
	return value
}

// textSkills are the names of calls and notes with texts: a task in words, memory entries, documents, titles of
// threads, senders of channels, the last messages of a stalled turn, and the output of a rejected write, which may be a
// model's answer.
var textSkills = []string{
	"add_document", "delegate", "delete_document", "document_read", "memory_forget", "memory_search", "memory_write",
	"name_thread", "pair_sender", "reasoning", "recall", "save_memory", "set_memory", "stale_write", "unpair_sender",
}

// HasTexts reports whether reading input and output of an activity needs the scope threads:read: those of a model call,
// of a phase, whose output repeats its checkpoint, and those of textSkills. So do kinds that this package does not
// know.
func HasTexts(kind Kind, skill string) bool {
	switch kind {
	case KindCall, KindNote:
		return slices.Contains(textSkills, skill)
	case KindModel, KindPhase:
	}
	return true
}

// IsConversation reports whether an execution is part of a conversation, so that its values are texts: it has a
// thread, its surface is chat, eval or operate, or it is a delegated task. A skill that an admin calls is no
// conversation.
func IsConversation(flow, surface string, threadID *string) bool {
	switch trace.Surface(surface) {
	case trace.Chat, trace.Eval:
		return true
	case trace.Operate:
		return flow != "skill_call" || threadID != nil
	case trace.Heartbeat, trace.Webhook, trace.Flow:
	}
	return threadID != nil || flow == "delegate"
}

// hideTexts hides the texts of a row under ctx.
func (r *Row) hideTexts(ctx context.Context) {
	if HidesTexts(ctx) && HasTexts(r.Kind, r.SkillName) {
		r.Input, r.Output = HiddenJSON(r.Input), HiddenJSON(r.Output)
	}
}
