package executions

import (
	"context"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/trace"
)

// Ended is an execution that a transaction ended.
type Ended struct {
	ID, TraceID   string
	Status        Status
	ReleasedLanes int
	Claim         int64 // the claim that held the lanes
}

// queueEnded queries the executions that the batch's transaction ended by a cancel or a sweep, because no run logs
// those ends. A sweep ends executions in subtransactions, whose ids differ from the transaction's. A visible row of a
// subtransaction in progress belongs to this transaction. xmin has the low 32 bits of an id, so the query adds the
// epoch of the current id, and ignores rows with lower ids: they precede this transaction.
func queueEnded(b *pgx.Batch, dest *[]Ended) {
	b.Queue(`
		select x.id::text, x.trace_id, x.status, coalesce((v.data ->> 'locks_released')::int, 0),
		       -- The end incremented the claim, and so did a loss of the claim just before it.
		       x.claim - 1 - (select count(*) from agent_claims_lost l
		                       where l.execution_id = x.id and l.claim = x.claim - 2)
		  from agent_events v
		  join agent_executions x on x.id = lanekeeper.agent_uuid(v.key)
		 where v.id >= lanekeeper.agent_uuid7_floor(transaction_timestamp()) and v.event = 'AGENT_COMPLETED'
		   and case when v.xmin::text::bigint >= mod(pg_current_xact_id_if_assigned()::text::bigint, 4294967296)
		            then pg_xact_status((div(pg_current_xact_id_if_assigned()::text::numeric, 4294967296) * 4294967296
		                                 + v.xmin::text::bigint)::text::xid8) = 'in progress' end
		 order by v.id`).Query(func(rows pgx.Rows) (err error) {
		*dest, err = pgx.CollectRows(rows, pgx.RowToStructByPos[Ended])
		return err
	})
}

// LogEnded logs the end of executions with the lines that a run logs.
func (e *Engine) LogEnded(ctx context.Context, ended []Ended) {
	for _, x := range ended {
		attrs := executionAttrs(x.TraceID, x.ID)
		e.log.InfoContext(ctx, "execution completed", append(attrs, "result_type", resultType(x.Status), "status",
			string(x.Status))...)
		if trace.ID(x.TraceID).Surface() != trace.Eval {
			e.log.InfoContext(ctx, "event emitted", append(attrs, "event", "AGENT_COMPLETED", "key", x.ID)...)
		}
		e.logReleased(ctx, x.ID, x.Claim, x.ReleasedLanes, attrs...)
	}
}

// releasedLane is a lane that the end of an execution released, or returned to its lender.
type releasedLane struct {
	Lane      string
	Token     int64
	Successor string // the waiter that holds the lane now; "" for none
}

// queueReleasedLanes queries the lanes that the end of an execution released. AGENT_COMPLETED has their number n, and
// the n latest holds are those of the released lanes.
func queueReleasedLanes(b *pgx.Batch, id string, dest *[]releasedLane) {
	b.Queue(`
		select h.lane, h.fencing_token as token, h.successor
		  from (select * from agent_lane_holds o
		         where o.execution_id = @id and o.ended in ('ended', 'given back')
		         order by o.held_until desc
		         limit coalesce((select (v.data ->> 'locks_released')::int from agent_events v
		                          where v.external_id = 'completed ' || @id::text), 0)) h
		 order by h.lane`, postgres.Strict{"id": id}).Query(func(rows pgx.Rows) (err error) {
		*dest, err = pgx.CollectRows(rows, pgx.RowToStructByName[releasedLane])
		return err
	})
}

// logReleased logs the released lanes and their number.
func (e *Engine) logReleased(ctx context.Context, id string, claim int64, n int, attrs ...any) {
	var released []releasedLane
	if n > 0 {
		queryCtx, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		b := &pgx.Batch{}
		queueReleasedLanes(b, id, &released)
		if err := e.pool.SendBatch(queryCtx, b).Close(); err != nil {
			e.log.WarnContext(ctx, "released lanes not read", append(slices.Clip(attrs), "error", err)...)
		}
	}
	e.logReleasedLanes(ctx, lanes.ClaimOwner(id, claim).String(), released, attrs...)
	e.log.InfoContext(ctx, "locks released", append(slices.Clip(attrs), "count", n)...)
}

// logReleasedLanes logs released lanes under their former owner.
func (e *Engine) logReleasedLanes(ctx context.Context, owner string, released []releasedLane, attrs ...any) {
	for _, lane := range released {
		lineAttrs := append(slices.Clip(attrs), "lane", lane.Lane, "owner", owner, "fencing_token", lane.Token)
		if lane.Successor != "" {
			lineAttrs = append(lineAttrs, "to", lane.Successor)
		}
		e.log.InfoContext(ctx, "lane released", lineAttrs...)
	}
}
