package chat

import (
	"context"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// span is a range of a thread: the places after After, through Through. An answer starts with the flows' messages in
// it. The span is part of the turn's input, so each run of the turn shows the same messages.
type span struct {
	After   int64 `json:"after"`
	Through int64 `json:"through"`
}

// queueUnseen queues the search for the messages of flows since the last answer. It runs under the lock of lockThread,
// so one turn shows them. One answer shows at most relayBatch of them; the next answer shows the rest. A formatted
// answer shows none. A running relay shows its own: known is false then, and when the thread has no earlier message.
func (c *Chat) queueUnseen(b *pgx.Batch, a *UserMessage, s *span, known *bool) {
	if a.nameGenerated && a.Join == "" {
		return
	}
	b.Queue(`
		with asked as (                                      -- the latest messages of the visitor
		  select m.seq, m.execution_id
		    from agent_messages m
		   where m.thread_id = @thread and m.role = 'user' and m.seq is not null
		   order by m.seq desc
		   limit @turns),
		shown as (                                           -- the last place that the answer to each has shown
		  select a.seq as own,
		         coalesce(e.flow = @relay and e.completed_at is null, false) as relaying,
		         case
		           when e.flow = @relay and e.status = 'completed'
		             then nullif((e.result ->> 'seq')::bigint, 0)
		           -- An active turn will show its span, unless this message interrupts it.
		           when e.flow = @flow and (e.completed_at is null and not @interrupt
		                                    or e.status = 'completed'
		                                       and not coalesce((e.result ->> 'refused')::boolean
		                                                        or (e.result ->> 'formatError')::boolean, false))
		             then coalesce((e.input #>> '{unseen,through}')::bigint, (e.result ->> 'seq')::bigint)
		           -- A failed, cancelled, interrupted or refused turn has shown nothing.
		           when e.flow = any(@own) and e.completed_at is not null or e.flow = @flow
		             then (e.input #>> '{unseen,after}')::bigint
		         end as through
		    from asked a
		    left join agent_executions e on e.id = a.execution_id),
		since as (
		  select greatest(coalesce(max(coalesce(s.through, s.own)), 0), @seen::bigint) as seq,
		         count(*) > 0 as known,
		         coalesce(bool_or(s.relaying), false) as relaying
		    from shown s)
		select s.seq, s.known, s.relaying, coalesce((
		         select max(w.seq) from (
		           select m.seq
		             from agent_messages m
		            where m.thread_id = @thread and m.seq > s.seq and m.role = 'assistant' and m.channel = 'chat'
		              and case
		                    when m.execution_id is null then s.seq > 0 -- not the greeting or an imported history
		                    else exists (select from agent_executions e where e.id = m.execution_id and e.flow <> all(@own))
		                  end
		            order by m.seq
		            limit @most) w), s.seq)
		  from since s`, postgres.Strict{
		"thread": a.thread, "turns": unseenTurnLimit, "relay": RelayFlow, "flow": Flow, "own": ownFlows(), "seen": a.Seen,
		"interrupt": c.DoubleTexting == Interrupt, "most": relayBatch,
	}).QueryRow(func(row pgx.Row) error {
		relaying := false
		err := row.Scan(&s.After, known, &relaying, &s.Through)
		if a.form != nil || relaying {
			s.Through = s.After
		}
		*known = *known && !relaying
		return err
	})
}

// unseenTurnLimit is the number of messages of the visitor that the search for the last shown flow message reads.
const unseenTurnLimit = 20

// flowText returns the flows' messages in the span of a turn, one paragraph each; "" for none.
func (c *Chat) flowText(ctx context.Context, db postgres.DB, in input) (string, error) {
	if in.Unseen == nil || in.Unseen.Through <= in.Unseen.After {
		return "", nil
	}
	rows, err := db.Query(ctx, `
		select m.content
		  from agent_messages m
		 where m.thread_id = @thread
		   and m.seq > @after and m.seq <= @through
		   and m.role = 'assistant' and m.channel = 'chat'
		   and case
		         when m.execution_id is null then @after::bigint > 0
		         else exists (select from agent_executions e where e.id = m.execution_id and e.flow <> all(@own))
		       end
		 order by m.seq`, postgres.Strict{
		"thread": in.Thread, "after": in.Unseen.After, "through": in.Unseen.Through, "own": ownFlows(),
	})
	all, err := postgres.Collect(rows, err, "read messages of flows", pgx.RowTo[string])
	if err != nil {
		return "", err
	}
	for i, text := range all {
		all[i] = cleanText(text)
	}
	return strings.Join(all, "\n\n"), nil
}

// trimFlowText returns the turn's own text: the flows' messages are in the thread already.
func trimFlowText(text, flowText string) string {
	if flowText == "" {
		return text
	}
	return strings.TrimPrefix(strings.TrimPrefix(text, flowText), "\n\n")
}
