package executions

import (
	"context"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// announce says that the run begins, or goes on. A wait may have been ended by a sweep or by plain SQL, where nobody
// could say so, hence what ended it is said here, by whoever goes on.
func (r *run) announce(ctx context.Context) {
	about := []any{"flow", r.exec.Flow, "claim", r.exec.Claim, "checkpoints", len(r.checkpoints)}
	if r.exec.Claim == 1 {
		r.e.log.InfoContext(ctx, "execution started", about...)
		return
	}
	if step, out, ok := r.lastWait(); ok {
		about = append(about, "step", step, "timed_out", out.TimedOut)
		if !out.TimedOut { // else the outcome names an event that has not come
			about = append(about, "event", out.Event)
		}
	}
	r.e.log.InfoContext(ctx, "execution resumed", about...)
	r.e.log.InfoContext(ctx, "continuing from checkpoint", "checkpoints", len(r.checkpoints))
}

// lastWait is the wait whose end made the execution ready: its outcome was recorded under the number that the park had
// made, and this claim is the next.
func (r *run) lastWait() (step string, out Outcome, ok bool) {
	for _, c := range r.checkpoints {
		if c.Claim != r.exec.Claim-1 || c.Failed {
			continue
		}
		if out, err := decode[Outcome](c.Output); err == nil && out.Event != "" {
			return c.Step, out, true
		}
	}
	return "", Outcome{}, false
}

// ended is an execution that a transaction has ended, and how many lanes that freed.
type ended struct {
	ID, TraceID string
	Status      Status
	Freed       int
}

// endedIn adds the question which executions the batch's transaction has ended: by a cancel or a sweep, where no run
// says so. As part of the batch it holds nothing up, whatever becomes of this process. A sweep ends executions in
// transactions within its own: what is visible and in progress is of one of them.
func endedIn(b *pgx.Batch, into *[]ended) {
	b.Queue(`
		select x.id::text, x.trace_id, x.status, coalesce((v.data ->> 'locks_released')::int, 0)
		  from agent_events v join agent_executions x on x.id = lanekeeper.agent_uuid(v.key)
		 where v.id >= lanekeeper.agent_uuid7_floor(transaction_timestamp()) and v.event = 'AGENT_COMPLETED'
		   and case when v.xmin::text::bigint >= mod(pg_current_xact_id_if_assigned()::text::bigint, 4294967296)
		            then pg_xact_status((div(pg_current_xact_id_if_assigned()::text::numeric, 4294967296) * 4294967296 + v.xmin::text::bigint)::text::xid8)
		                 = 'in progress' end
		 order by v.id`).Query(func(rows pgx.Rows) (err error) {
		*into, err = pgx.CollectRows(rows, pgx.RowToStructByPos[ended])
		return err
	})
}

// announceEnds says that executions have ended, as a run says it of itself.
func (e *Engine) announceEnds(ctx context.Context, ends []ended) {
	for _, x := range ends {
		about := named(x.TraceID, x.ID)
		e.log.InfoContext(ctx, "execution completed", append(about, "result_type", resultType(x.Status), "status", string(x.Status))...)
		e.log.InfoContext(ctx, "event emitted", append(about, "event", "AGENT_COMPLETED", "key", x.ID)...)
		e.logReleased(ctx, x.ID, x.Freed, about...)
	}
}

// freedLane is a lane that the end of an execution has freed, or returned to who lent it.
type freedLane struct {
	Lane      string
	Token     int64
	Successor string // who waited for it and has it now; "" for nobody
}

// queueFreed queues the question which lanes the end of an execution has freed. The end has said in its event how
// many they are, and each was noted in its transaction: the last ones are those.
func queueFreed(b *pgx.Batch, id string, into *[]freedLane) {
	b.Queue(`
		select h.lane, h.fencing_token as token, h.successor from (
		  select * from agent_lane_holds o where o.execution_id = @id and o.ended in ('ended', 'given back')
		   order by o.held_until desc
		   limit coalesce((select (v.data ->> 'locks_released')::int from agent_events v where v.external_id = 'completed ' || @id::text), 0)) h
		 order by h.lane`, postgres.Strict{"id": id}).Query(func(rows pgx.Rows) (err error) {
		*into, err = pgx.CollectRows(rows, pgx.RowToStructByName[freedLane])
		return err
	})
}

// logReleased names the lanes that the end of an execution has freed, and says how many they were.
func (e *Engine) logReleased(ctx context.Context, id string, n int, about ...any) {
	var freed []freedLane
	if n > 0 {
		asking, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		b := &pgx.Batch{}
		queueFreed(b, id, &freed)
		if err := e.pool.SendBatch(asking, b).Close(); err != nil {
			e.log.WarnContext(ctx, "names of released lanes not read", append(slices.Clip(about), "error", err)...)
		}
	}
	e.logFreed(ctx, id, freed, about...)
	e.log.InfoContext(ctx, "locks released", append(slices.Clip(about), "count", n)...)
}

// logFreed names freed lanes.
func (e *Engine) logFreed(ctx context.Context, id string, freed []freedLane, about ...any) {
	for _, f := range freed {
		line := append(slices.Clip(about), "lane", f.Lane, "owner", id, "fencing_token", f.Token)
		if f.Successor != "" {
			line = append(line, "to", f.Successor)
		}
		e.log.InfoContext(ctx, "lane released", line...)
	}
}
