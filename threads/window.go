package threads

import (
	"context"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Window returns the summary of a thread and the latest messages within a number of tokens, oldest first. Only whole
// turns before the turn before are returned (0: all), without summarised, failed and withdrawn messages. It reads at
// most 400 rows.
func Window(
	ctx context.Context, db postgres.DB, thread string, before int64, tokens int,
) (summary string, messages []Message, err error) {
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
		select id::text, thread_id, seq, turn, role, content, channel, target, execution_id::text, trace_id, status,
		  interrupted,
		       tokens, attempts, error_message, created_at, sent_at
		  from measured where running <= @tokens order by turn, seq`,
		postgres.Strict{"thread": t.ID, "through": t.SummaryThrough, "before": before, "tokens": tokens})
	messages, err = postgres.Collect(rows, err, fmt.Sprintf("read thread %s", thread), pgx.RowToStructByNameLax[Message])
	if err != nil {
		return "", nil, err
	}
	// A turn that does not fit whole is left out.
	whole := slices.IndexFunc(messages, func(m Message) bool { return *m.Turn == *m.Seq })
	if whole < 0 {
		whole = len(messages)
	}
	return t.Summary, messages[whole:], nil
}

// Backlog returns the turns to summarise, oldest first: those before the latest keep tokens, up to about most tokens.
// It is empty when all turns without a summary fit in limit tokens. before excludes later turns; 0: none.
func Backlog(
	ctx context.Context, db postgres.DB, thread string, before int64, limit, keep, most int,
) ([]Message, error) {
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
		select id::text, thread_id, seq, turn, role, content, channel, target, execution_id::text, trace_id, status,
		  interrupted,
		       tokens, attempts, error_message, created_at, sent_at
		  from folded where earlier < @most and whole order by turn, seq`,
		postgres.Strict{
			"thread": t.ID, "through": t.SummaryThrough, "before": before, "limit": limit, "keep": keep, "most": most,
		})
	return postgres.Collect(rows, err, fmt.Sprintf("read backlog of thread %s", thread), pgx.RowToStructByNameLax[Message])
}

// SaveSummary replaces a summary by a longer one if it still ends at fromThrough; false if another process replaced it.
func SaveSummary(
	ctx context.Context, db postgres.DB, thread string, fromThrough, through int64, text string,
) (bool, error) {
	tag, err := db.Exec(ctx, `
		update agent_threads set summary = @text, summary_through = @through
		 where id = @thread and summary_through = @from and @through > @from`,
		postgres.Strict{"thread": thread, "from": fromThrough, "through": through, "text": postgres.Text(text)})
	if err != nil {
		return false, fmt.Errorf("save summary of thread %s: %w", thread, err)
	}
	return tag.RowsAffected() == 1, nil
}

// Turns reads the messages of the turns from through before-1, up to the place through. It returns the same messages
// each time, at most 400.
func Turns(ctx context.Context, db postgres.DB, thread string, from, before, through int64) ([]Message, error) {
	rows, err := db.Query(ctx, `
		select id::text, thread_id, seq, turn, role, content, channel, target, execution_id::text, trace_id, status,
		  interrupted,
		       tokens, attempts, error_message, created_at, sent_at,
		       (select count(*) from agent_message_images i where i.message_id = agent_messages.id) as images
		  from agent_messages
		 where thread_id = @thread and turn >= @from and turn < @before and seq <= @through
		   and status not in ('failed', 'withdrawn')
		 order by turn, seq limit 400`,
		postgres.Strict{"thread": postgres.Text(thread), "from": from, "before": before, "through": through})
	return postgres.Collect(rows, err, fmt.Sprintf("read thread %s", thread), pgx.RowToStructByName[Message])
}
