package activity

import (
	"context"
	"fmt"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

// Link records that a span of another system asked for a trace, as the caller in ctx says (see trace.WithCaller). It
// comes from outside and is not trusted: it is shown as a link, and the trace keeps its own id. Without a caller it
// does nothing.
func Link(ctx context.Context, db postgres.DB, id trace.ID) error {
	traceparent := trace.Caller(ctx)
	if _, ok := trace.ParseTraceparent(traceparent); !ok || id == "" {
		return nil
	}
	_, err := db.Exec(ctx, `insert into agent_trace_links (trace_id, traceparent) values (@trace_id, @traceparent) on conflict do nothing`,
		postgres.Strict{"trace_id": string(id), "traceparent": traceparent})
	if err != nil {
		return fmt.Errorf("link trace %s: %w", id, err)
	}
	return nil
}

// LinkExecutions is Link for the traces of executions, which an event from outside has woken.
func LinkExecutions(ctx context.Context, db postgres.DB, ids []string) error {
	traceparent := trace.Caller(ctx)
	if _, ok := trace.ParseTraceparent(traceparent); !ok || len(ids) == 0 {
		return nil
	}
	_, err := db.Exec(ctx, `
		insert into agent_trace_links (trace_id, traceparent)
		select distinct x.trace_id, @traceparent from agent_executions x where x.id = any (@ids::uuid[]) order by 1 on conflict do nothing`,
		postgres.Strict{"ids": ids, "traceparent": traceparent})
	if err != nil {
		return fmt.Errorf("link the traces of %d executions: %w", len(ids), err)
	}
	return nil
}

// ForgetLinks deletes links that are older than keep, and returns how many.
func ForgetLinks(ctx context.Context, db postgres.DB, keep time.Duration) (int64, error) {
	tag, err := db.Exec(ctx, `delete from agent_trace_links where created_at < clock_timestamp() - make_interval(secs => @seconds)`,
		postgres.Strict{"seconds": keep.Seconds()})
	if err != nil {
		return 0, fmt.Errorf("forget links of traces: %w", err)
	}
	return tag.RowsAffected(), nil
}
