package activity

import (
	"context"
	"fmt"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

// Link records the span of another system that requested a trace (see trace.WithCaller). The span is external and
// untrusted, so it is only shown as a link, and the trace keeps its own id. Without a caller Link does nothing.
func Link(ctx context.Context, db postgres.DB, id trace.ID) error {
	traceparent := trace.Caller(ctx)
	if _, ok := trace.ParseTraceparent(traceparent); !ok || id == "" {
		return nil
	}
	_, err := db.Exec(ctx, `
		insert into agent_trace_links (trace_id, traceparent) values (@trace_id, @traceparent)
		on conflict do nothing`,
		postgres.Strict{"trace_id": string(id), "traceparent": traceparent})
	if err != nil {
		return fmt.Errorf("link trace %s: %w", id, err)
	}
	return nil
}

// LinkExecutions is Link for the traces of executions that an external event resumed.
func LinkExecutions(ctx context.Context, db postgres.DB, ids []string) error {
	traceparent := trace.Caller(ctx)
	if _, ok := trace.ParseTraceparent(traceparent); !ok || len(ids) == 0 {
		return nil
	}
	_, err := db.Exec(ctx, `
		insert into agent_trace_links (trace_id, traceparent)
		select distinct x.trace_id, @traceparent from agent_executions x where x.id = any (@ids::uuid[]) order by 1
		on conflict do nothing`,
		postgres.Strict{"ids": ids, "traceparent": traceparent})
	if err != nil {
		return fmt.Errorf("link the traces of %d executions: %w", len(ids), err)
	}
	return nil
}

// PruneLinks deletes links older than keep.
func PruneLinks(ctx context.Context, db postgres.DB, keep time.Duration) error {
	_, err := db.Exec(ctx, `
		delete from agent_trace_links
		 where created_at < statement_timestamp() - make_interval(secs => @seconds)`,
		postgres.Strict{"seconds": keep.Seconds()})
	if err != nil {
		return fmt.Errorf("delete links of traces: %w", err)
	}
	return nil
}
