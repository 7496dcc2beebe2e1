package telemetry

import (
	"context"
	_ "embed"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// batch is the content of one pass.
type batch struct {
	end     string   // id of the last row of the pass
	ended   []string // activities that have ended
	pending []string // activities that have not ended
	runs    []string // executions that have ended
	more    bool     // further rows are ready
}

// maxPending bounds the pending activities that the position stores.
const maxPending = 20000

// writersEnded reports whether all transactions that were writing at the mark have ended. Without a mark, the present
// position becomes the mark. After longestTransaction it no longer waits: rows of a longer transaction are lost to the
// export.
//
// A writer of an activity or an event locks the table before the row gets its id, until the transaction ends. So a
// transaction without such a lock at the mark has committed its rows, or its rows get later ids.
func (e *Exporter) writersEnded(ctx context.Context, pos *position) (bool, error) {
	var writing []string
	err := e.pool.QueryRow(ctx, `
		select array(select distinct l.virtualtransaction from pg_locks l
		              where l.locktype = 'relation' and l.database = (select d.oid from pg_database d
		                where d.datname = current_database())
		                and l.relation in ('agent_activity'::regclass, 'agent_events'::regclass)
		                  and l.mode = 'RowExclusiveLock')`).Scan(&writing)
	if err != nil {
		return false, fmt.Errorf("look for transactions under way: %w", err)
	}
	if e.mark == nil || e.mark.end <= pos.SentUpto {
		e.mark = &mark{pos.Now, writing, time.Now()}
	}
	e.mark.writers = slices.DeleteFunc(e.mark.writers, func(w string) bool { return !slices.Contains(writing, w) })
	return len(e.mark.writers) == 0 || time.Since(e.mark.at) > longestTransaction, nil
}

// collectBatch finds the rows up to the mark, at most rowLimit activities and as many executions. With more rows, the
// batch ends earlier.
func (e *Exporter) collectBatch(ctx context.Context, pos *position) (batch, error) {
	b := batch{end: e.mark.end}
	type activityState struct {
		ID    string
		Ended bool
	}
	rows, err := postgres.Rows[activityState](ctx, e.pool, "look for activities", `
		select a.id::text, a.status <> 'running' as ended from agent_activity a
		 where a.id > @since::uuid and a.id <= @upto::uuid order by a.id limit @most`, customPlan,
		postgres.Strict{"since": pos.SentUpto, "upto": b.end, "most": e.rowLimit})
	if err != nil {
		return b, err
	}
	type end struct{ ID, Run string }
	ends, err := postgres.Rows[end](ctx, e.pool, "look for ends of executions", `
		select v.id::text, v.execution_id::text as run from agent_events v
		 where v.id > @since::uuid and v.id <= @upto::uuid and v.event = 'AGENT_COMPLETED' and v.execution_id is not null
		   and v.key = v.execution_id::text
		 order by v.id limit @most`, customPlan,
		postgres.Strict{"since": pos.SentUpto, "upto": b.end, "most": e.rowLimit})
	if err != nil {
		return b, err
	}
	if len(rows) == e.rowLimit {
		b.end, b.more = rows[len(rows)-1].ID, true
	}
	if len(ends) == e.rowLimit {
		b.end, b.more = min(b.end, ends[len(ends)-1].ID), true
	}
	for _, end := range ends {
		if end.ID <= b.end && !slices.Contains(b.runs, end.Run) {
			b.runs = append(b.runs, end.Run)
		}
	}
	for _, row := range rows {
		switch {
		case row.ID > b.end:
		case row.Ended:
			b.ended = append(b.ended, row.ID)
		default:
			b.pending = append(b.pending, row.ID)
		}
	}
	return b, e.readPending(ctx, pos.Pending, &b)
}

// readPending reads pending activities again. It drops activities that no longer exist. Above maxPending, it forgets
// the oldest and counts them in the metrics.
func (e *Exporter) readPending(ctx context.Context, pending []string, b *batch) error {
	if len(pending) == 0 {
		return nil
	}
	rows, err := e.pool.Query(ctx, `
		select a.id::text, a.status <> 'running' from agent_activity a where a.id = any (@ids::uuid[]) order by a.id`,
		postgres.Strict{"ids": pending})
	if err != nil {
		return fmt.Errorf("look at open activities: %w", err)
	}
	var id string
	var ended bool
	_, err = pgx.ForEachRow(rows, []any{&id, &ended}, func() error {
		switch {
		case !ended || len(b.ended) >= 2*e.rowLimit:
			b.pending = append(b.pending, id)
			b.more = b.more || ended
		default:
			b.ended = append(b.ended, id)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("look at open activities: %w", err)
	}
	if excess := len(b.pending) - maxPending; excess > 0 {
		slices.Sort(b.pending)
		b.pending = b.pending[excess:]
		e.metrics.exported("forgotten", excess)
	}
	return nil
}
