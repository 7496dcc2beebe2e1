package threads

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Incoming is a message of the participant.
type Incoming struct {
	ThreadID string
	Content  string
	Channel  string // default chat
	// Data is added to that of the event MESSAGE_RECEIVED, which has message_id, thread_id, content and channel.
	Data map[string]any
	// ID deduplicates the message; "" for none. Ids are shared with all events: give them a prefix.
	ID          string
	ExecutionID string // the execution of the message; "" for none
}

// Receipt is the result of Receive.
type Receipt struct {
	MessageID string   `json:"message_id"`
	Seq       int64    `json:"seq"`
	EventID   string   `json:"event_id"`
	Resumed   []string `json:"resumed"` // the executions that waited for it
}

// Receive stores a message of the participant and ends the waits for it, in the caller's transaction. Without a wait,
// the event is kept for the next wait of the last sender. ErrNotFound: there is no such thread. Call it before tx
// locks anything else: it locks the wait, executions, lanes and the thread, in this order.
func Receive(ctx context.Context, e *executions.Engine, tx pgx.Tx, in Incoming) (Receipt, error) {
	in.Channel = cmp.Or(in.Channel, ChannelChat)
	data, err := json.Marshal(in.Data)
	if err != nil {
		return Receipt{}, fmt.Errorf("receive message: encode data: %w", err)
	}
	if in.Data == nil {
		data = []byte("{}")
	}
	content := postgres.Text(in.Content)
	rows, err := tx.Query(ctx, `
		select message_id::text, seq, event_id::text, execution_id::text
		  from lanekeeper.receive_agent_message(@thread, @content, @channel, @data, nullif(@id, ''),
		    nullif(@execution, '')::uuid, @tokens)`,
		postgres.Strict{
			"thread": postgres.Text(in.ThreadID), "content": content, "channel": in.Channel, "data": json.RawMessage(data),
			"id":        postgres.Text(in.ID),
			"execution": in.ExecutionID, "tokens": tokens(User, content),
		})
	if err != nil {
		return Receipt{}, fmt.Errorf("receive message: %w", err)
	}
	var got Receipt
	var woken *string
	_, err = pgx.ForEachRow(rows, []any{&got.MessageID, &got.Seq, &got.EventID, &woken}, func() error {
		if woken != nil {
			got.Resumed = append(got.Resumed, *woken)
		}
		return nil
	})
	if postgres.IsCode(err, "P0002") || err == nil && got.MessageID == "" {
		err = errors.Join(err, ErrNotFound)
	}
	if err != nil {
		return Receipt{}, fmt.Errorf("receive message in thread %q: %w", in.ThreadID, err)
	}
	return got, e.WakeTx(ctx, tx, got.Resumed...)
}
