package reason

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/models"
)

// A model that makes the same call again and again is told after sameTold of them; sameMost are the last.
const (
	sameTold = 3
	sameMost = 5
)

// call is one call of a reply on its way to its result.
type call struct {
	id, name   string
	args       json.RawMessage
	result     string // what the model is told in the tool reply
	correction string // what it is told after the replies, when the call was refused
	advice     string // what it is told after the replies, when the call was made
	leave      *leave // what it waits for, when an admin must decide

	live  bool // made by this process
	began time.Time
}

func newCall(c models.ToolCall) *call {
	args := json.RawMessage(c.Arguments)
	if len(strings.TrimSpace(c.Arguments)) == 0 {
		args = json.RawMessage("{}")
	}
	return &call{id: c.ID, name: c.Name, args: args}
}

// act makes the calls of one reply: first those that need no leave, then, when every approval is asked for,
// the others as they are decided. Every call gets its tool reply, in the reply's order; then come the
// corrections.
func (w *turn) act(ctx context.Context, made []models.ToolCall) error {
	calls := make([]*call, len(made))
	w.made = calls
	for i := range made {
		c := newCall(made[i])
		calls[i] = c
		if w.repeats(c) {
			c.result = `{"error":"REPEATED"}`
			continue
		}
		if err := w.perform(ctx, c); err != nil {
			return err
		}
	}
	if err := w.await(ctx, calls); err != nil {
		return err
	}
	valid := w.hear(calls)
	switch {
	case w.same >= sameMost:
		return w.stall(ctx, calls, "the model made the same call again and again",
			fmt.Sprintf("the model called %s with the same arguments %d times in a row",
				shown(calls[len(calls)-1].name), w.same))
	case valid:
		w.bad = 0
		return nil
	}
	if w.bad++; w.bad > maxRetries {
		return w.stall(ctx, calls, "the model kept calling tools wrongly",
			fmt.Sprintf("the model called tools wrongly %d times in a row", w.bad))
	}
	return nil
}

// hear puts the results into the transcript; true when one of the calls was in order.
func (w *turn) hear(calls []*call) (valid bool) {
	var told []string
	for _, c := range calls {
		w.messages = append(w.messages, models.Message{
			Role: models.RoleTool, ToolCallID: c.id, Name: c.name, Content: c.result,
		})
		w.fresh++
		valid = valid || c.correction == ""
		for _, text := range []string{c.correction, c.advice} {
			if text != "" {
				told = append(told, text)
			}
		}
	}
	for _, text := range told {
		w.say(models.RoleSystem, text)
	}
	return valid
}

// repeats counts equal calls in a row. It is true for one that is too many.
func (w *turn) repeats(c *call) bool {
	key := c.name + " " + canonicalArgs(c.args)
	if key != w.last {
		w.last, w.same = key, 0
	}
	w.same++
	if w.same == sameTold {
		c.advice = fmt.Sprintf("You have called '%s' with the same arguments %d times in a row. "+
			"Use the result you have, call something else, or answer.", shown(c.name), w.same)
	}
	return w.same > sameMost
}

// canonicalArgs is the same for arguments that mean the same.
func canonicalArgs(args json.RawMessage) string {
	if text, err := canonical(args); err == nil {
		return text
	}
	return string(args)
}
