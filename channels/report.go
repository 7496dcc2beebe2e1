package channels

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/threads"
	"github.com/lanekeeper/lanekeeper/trace"
)

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
