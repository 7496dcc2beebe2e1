package chat

import (
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// unseenTurns is how many messages of the visitor are read to find the last words that an answer has shown.
const unseenTurns = 20

// span is a part of a thread: the places after After, up to and with Through. An answer shows the flows' words in it
// first. The span is in the input of the turn, so that a repeated run shows the same words.
type span struct {
	After   int64 `json:"after"`
	Through int64 `json:"through"`
}

// queueUnseen queues the search for the words that flows said in a thread since the last answer. It runs under the
// lock of lockThread, so one turn gets them. A failed, cancelled or refused turn has shown nothing. An answer in a
// form shows nothing, and words that a relay may still show are left to it; known is false then, and when the thread
// has no earlier message.
func (c *Chat) queueUnseen(b *pgx.Batch, a Ask, s *span, known *bool) {
	if a.fresh && a.Join == "" {
		return
	}
	b.Queue(`
		with asked as (
		  select m.seq, m.execution_id from agent_messages m
		   where m.thread_id = @thread and m.role = 'user' and m.seq is not null order by m.seq desc limit @turns),
		shown as (
		  select a.seq as own, coalesce(e.flow = @relay and e.completed_at is null, false) as relaying,
		         case when e.flow = @relay and e.status = 'completed' then nullif((e.result ->> 'seq')::bigint, 0)
		              when e.flow = @flow and (e.completed_at is null and not @interrupt or e.status = 'completed'
		                   and not coalesce((e.result ->> 'refused')::boolean or (e.result ->> 'unformed')::boolean, false))
		                then coalesce((e.input #>> '{unseen,through}')::bigint, (e.result ->> 'seq')::bigint)
		              when e.flow = any(@own) and e.completed_at is not null or e.flow = @flow
		                then (e.input #>> '{unseen,after}')::bigint end as through
		    from asked a left join agent_executions e on e.id = a.execution_id),
		since as (
		  select greatest(coalesce(max(coalesce(s.through, s.own)), 0), @seen::bigint) as seq, count(*) > 0 as known,
		         coalesce(bool_or(s.relaying), false) as relaying
		    from shown s)
		select s.seq, s.known, s.relaying, coalesce((
		         select max(w.seq) from (
		           select m.seq from agent_messages m
		            where m.thread_id = @thread and m.seq > s.seq and m.role = 'assistant' and m.channel = 'chat'
		              and case when m.execution_id is null then s.seq > 0
		                       else exists (select from agent_executions e where e.id = m.execution_id and e.flow <> all(@own)) end
		            order by m.seq limit @most) w), s.seq)
		  from since s`, postgres.Strict{
		"thread": a.thread, "turns": unseenTurns, "relay": RelayFlow, "flow": Flow, "own": ownFlows(), "seen": a.Seen,
		"interrupt": c.DoubleTexting == Interrupt, "most": relayMost,
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

// openingOf is what flows said in the span of a turn, one paragraph for each message. It is "" when they said nothing.
func (c *Chat) openingOf(ctx context.Context, db postgres.DB, in input) (string, error) {
	if in.Unseen == nil || in.Unseen.Through <= in.Unseen.After {
		return "", nil
	}
	rows, err := db.Query(ctx, `
		select m.content from agent_messages m
		 where m.thread_id = @thread and m.seq > @after and m.seq <= @through and m.role = 'assistant' and m.channel = 'chat'
		   and case when m.execution_id is null then @after::bigint > 0
		            else exists (select from agent_executions e where e.id = m.execution_id and e.flow <> all(@own)) end
		 order by m.seq`, postgres.Strict{
		"thread": in.Thread, "after": in.Unseen.After, "through": in.Unseen.Through, "own": ownFlows(),
	})
	if err != nil {
		return "", fmt.Errorf("read what flows said: %w", err)
	}
	all, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return "", fmt.Errorf("read what flows said: %w", err)
	}
	for i, words := range all {
		all[i] = clean(words)
	}
	return strings.Join(all, "\n\n"), nil
}

// withoutOpening is what the turn itself said: the flows' words are messages of the thread already.
func withoutOpening(text, opening string) string {
	if opening == "" {
		return text
	}
	return strings.TrimPrefix(strings.TrimPrefix(text, opening), "\n\n")
}
