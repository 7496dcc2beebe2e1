package threads

import (
	"context"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Window is what a model should know of a thread before a turn: the summary of what is long ago, and the latest
// messages, oldest first, that together cost at most so many tokens. before is the turn that is about to be
// taken; 0 is all. Messages that were said but summarised, and those that were never sent, are not in it. It
// begins with a turn's first message. At most 400 rows are looked at.
func Window(ctx context.Context, db postgres.DB, thread string, before int64, tokens int) (summary string, messages []Message, err error) {
	t, err := Get(ctx, db, thread)
	if err != nil {
		return "", nil, err
	}
	rows, err := db.Query(ctx, `
		with latest as (
		  select m.* from agent_messages m
		   where m.thread_id = @thread and m.turn > @through and (@before::bigint = 0 or m.turn < @before)
		     and m.status not in ('failed', 'withdrawn')
		   order by m.turn desc, m.seq desc limit 400),
		measured as (select l.*, sum(l.tokens) over (order by l.turn desc, l.seq desc) as running from latest l)
		select id::text, thread_id, seq, turn, role, content, channel, target, execution_id::text, trace_id, status, interrupted,
		       tokens, attempts, error_message, created_at, sent_at
		  from measured where running <= @tokens order by turn, seq`,
		postgres.Strict{"thread": t.ID, "through": t.SummaryThrough, "before": before, "tokens": tokens})
	if err != nil {
		return "", nil, fmt.Errorf("read thread %s: %w", thread, err)
	}
	messages, err = pgx.CollectRows(rows, pgx.RowToStructByNameLax[Message])
	if err != nil {
		return "", nil, fmt.Errorf("read thread %s: %w", thread, err)
	}
	// A turn of which only the end fits is not shown.
	whole := slices.IndexFunc(messages, func(m Message) bool { return *m.Turn == *m.Seq })
	if whole < 0 {
		whole = len(messages)
	}
	return t.Summary, messages[whole:], nil
}

// Backlog is what has grown old in a thread and is not in its summary yet: whole turns, oldest first, that lie
// before the latest keep tokens, at most about most tokens of them. It is empty when everything that
// is not summarised fits in limit tokens. Turns from before on are left alone; 0 is none.
func Backlog(ctx context.Context, db postgres.DB, thread string, before int64, limit, keep, most int) ([]Message, error) {
	t, err := Get(ctx, db, thread)
	if err != nil {
		return nil, err
	}
	rows, err := db.Query(ctx, `
		with latest as (
		  select m.turn, m.tokens, m.seq from agent_messages m
		   where m.thread_id = @thread and m.turn > @through and (@before::bigint = 0 or m.turn < @before)
		     and m.status not in ('failed', 'withdrawn')
		   order by m.turn desc, m.seq desc limit 400),
		measured as (select l.turn, sum(l.tokens) over (order by l.turn desc, l.seq desc) as running from latest l),
		old as (
		  select max(turn) as through from measured
		   where running > @keep and (select max(running) > @limit or count(*) = 400 from measured)),
		oldest as (
		  select m.* from agent_messages m
		   where m.thread_id = @thread and m.turn > @through and m.status not in ('failed', 'withdrawn')
		   order by m.turn, m.seq limit 400),
		folded as (
		  select o.*, sum(o.tokens) over (order by o.turn) - sum(o.tokens) over (partition by o.turn) as earlier,
		         count(*) over () < 400 or o.turn < max(o.turn) over () as whole -- not cut by the limit
		    from oldest o where o.turn <= (select through from old))
		select id::text, thread_id, seq, turn, role, content, channel, target, execution_id::text, trace_id, status, interrupted,
		       tokens, attempts, error_message, created_at, sent_at
		  from folded where earlier < @most and whole order by turn, seq`,
		postgres.Strict{
			"thread": t.ID, "through": t.SummaryThrough, "before": before, "limit": limit, "keep": keep, "most": most,
		})
	if err != nil {
		return nil, fmt.Errorf("read backlog of thread %s: %w", thread, err)
	}
	got, err := pgx.CollectRows(rows, pgx.RowToStructByNameLax[Message])
	if err != nil {
		return nil, fmt.Errorf("read backlog of thread %s: %w", thread, err)
	}
	return got, nil
}

// SaveSummary replaces a thread's summary by one that reaches further, if it still reaches fromThrough; false
// when somebody else has moved it meanwhile.
func SaveSummary(ctx context.Context, db postgres.DB, thread string, fromThrough, through int64, text string) (bool, error) {
	tag, err := db.Exec(ctx, `
		update agent_threads set summary = @text, summary_through = @through
		 where id = @thread and summary_through = @from and @through > @from`,
		postgres.Strict{"thread": thread, "from": fromThrough, "through": through, "text": postgres.Text(text)})
	if err != nil {
		return false, fmt.Errorf("save summary of thread %s: %w", thread, err)
	}
	return tag.RowsAffected() == 1, nil
}

// Turns reads the messages of the turns from one up to, and not with, another, as far as they were there when
// place through was given: the same each time, because messages do not change. At most 400 are read.
func Turns(ctx context.Context, db postgres.DB, thread string, from, before, through int64) ([]Message, error) {
	rows, err := db.Query(ctx, `
		select id::text, thread_id, seq, turn, role, content, channel, target, execution_id::text, trace_id, status, interrupted,
		       tokens, attempts, error_message, created_at, sent_at,
		       (select count(*) from agent_message_images i where i.message_id = agent_messages.id) as images
		  from agent_messages
		 where thread_id = @thread and turn >= @from and turn < @before and seq <= @through and status not in ('failed', 'withdrawn')
		 order by turn, seq limit 400`,
		postgres.Strict{"thread": postgres.Text(thread), "from": from, "before": before, "through": through})
	if err != nil {
		return nil, fmt.Errorf("read thread %s: %w", thread, err)
	}
	got, err := pgx.CollectRows(rows, pgx.RowToStructByName[Message])
	if err != nil {
		return nil, fmt.Errorf("read thread %s: %w", thread, err)
	}
	return got, nil
}
