package threads

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/requests"
)

// MaxContent bounds a message that is posted or raised as an event, in bytes.
const MaxContent = 64 << 10

// ErrTooLong reports a message longer than MaxContent.
var ErrTooLong = fmt.Errorf("the message is longer than %d bytes", MaxContent)

// Deliver raises an external event in the caller's transaction, as Engine.Deliver does. A message for an existing
// thread is also stored there, by Receive, whose order of locks holds here too. A message for another key is an event
// like others, because a wait may name a conversation elsewhere.
func Deliver(
	ctx context.Context, e *executions.Engine, tx pgx.Tx, event, key string, data json.RawMessage, id string,
) (executions.Delivered, error) {
	members, content := messageContent(event, data)
	if content == "" {
		return e.Deliver(ctx, tx, event, key, data, id)
	}
	switch _, err := Get(ctx, tx, key); {
	case errors.Is(err, ErrNotFound):
		return e.Deliver(ctx, tx, event, key, data, id)
	case err != nil:
		return executions.Delivered{}, err
	case len(content) > MaxContent:
		return executions.Delivered{}, ErrTooLong
	}
	arrived, err := Receive(ctx, e, tx, Incoming{ThreadID: key, Content: content, Data: members, ID: id})
	return executions.Delivered{EventID: arrived.EventID, Resumed: arrived.Resumed}, err
}

// messageContent returns the text and data of a message; "" for other events.
func messageContent(event string, raw json.RawMessage) (data map[string]any, content string) {
	var members map[string]json.RawMessage // keeps long numbers exact
	if event != "MESSAGE_RECEIVED" || json.Unmarshal(raw, &members) != nil {
		return nil, ""
	}
	vars, err := requests.Variables("response", executions.Outcome{Event: event, Data: raw})
	if err != nil {
		return nil, ""
	}
	content, _ = vars["lastResponse"].(string)
	if strings.TrimSpace(content) == "" {
		return nil, ""
	}
	data = map[string]any{}
	for name, value := range members {
		data[name] = value
	}
	return data, content
}
