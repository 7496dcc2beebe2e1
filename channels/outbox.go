package channels

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/threads"
	"github.com/lanekeeper/lanekeeper/trace"
)

// Enqueue adds a message of a thread, with the status sending there, to the outbox of its channel.
func Enqueue(ctx context.Context, tx postgres.DB, messageID string) error {
	return exec(ctx, tx, "send message by channel", `
		with queued as (
		  insert into agent_channel_sends (message_id, channel, thread_id, seq)
		  select m.id, m.target, m.thread_id, m.seq from agent_messages m where m.id = @id returning channel)
		select pg_notify(@notifications, channel) from queued`,
		postgres.Strict{"id": messageID, "notifications": notifications})
}

// Owner returns the owner of the threads of a channel. No chat key has a colon in its name.
func Owner(channel string) string { return "channel:" + channel }

// Report posts a text in the conversations for reports of the channels of an agent, which may have several names: the
// default one is "", too. It returns their number.
func Report(ctx context.Context, tx pgx.Tx, agents []string, text string) (int, error) {
	type to struct{ Name, Type, Agent, ReportTo string }
	all, err := postgres.Rows[to](ctx, tx, "find channels for reports", `
		select name, type, agent, report_to from agent_channels
		 where enabled and report_to <> '' and agent = any(@agents) order by name`, postgres.Strict{"agents": agents})
	if err != nil {
		return 0, err
	}
	for _, c := range all {
		thread, _, err := threads.Open(ctx, tx, threads.Key(Owner(c.Name)), threads.Thread{
			Name: c.ReportTo, Channel: c.Type, Target: c.Name, Agent: c.Agent,
		})
		if err != nil {
			return 0, err
		}
		m, err := threads.Post(ctx, tx, threads.NewMessage{
			ThreadID: thread.ID, Role: threads.Assistant, Content: text, Channel: c.Type, Target: c.Name,
			Status: threads.Sending, TraceID: string(trace.IDFrom(ctx)),
		})
		if err == nil {
			err = Enqueue(ctx, tx, m.ID)
		}
		if err != nil {
			return 0, err
		}
	}
	return len(all), nil
}

// SendFilter narrows [Sends]. Before is the id of the last message of the previous page.
type SendFilter struct {
	Channel, Before string
	Limit           int
}

// Sent is a message that was maybe sent or given up.
type Sent struct {
	MessageID string    `json:"message_id"`
	Channel   string    `json:"channel"`
	ThreadID  string    `json:"thread_id"`
	Status    string    `json:"status"` // maybe_sent or failed
	Attempts  int       `json:"attempts"`
	Error     string    `json:"error"`
	CreatedAt time.Time `json:"created_at"`
}

// Sends lists the messages that were maybe sent or given up, newest first.
func Sends(ctx context.Context, db postgres.DB, f SendFilter) ([]Sent, error) {
	return postgres.Rows[Sent](ctx, db, "list sent messages", `
		select message_id::text, channel, thread_id, status, attempts, error_message as error, created_at
		  from agent_channel_sends
		 where status in ('failed', 'maybe_sent') and (@channel = '' or channel = @channel)
		   and (@before = '' or message_id < nullif(@before, '')::uuid)
		 order by message_id desc limit @limit`,
		postgres.Strict{"channel": f.Channel, "before": f.Before, "limit": postgres.PageSize(f.Limit, 50, 501)})
}
