package executions

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

// sweepThreads releases the lanes of abandoned threads and sends queued messages of free threads. The outbox usually
// does both sooner. sweepThreads leaves locked rows to the next sweep.
func (e *Engine) sweepThreads(ctx context.Context) error {
	var freed []ReleasedThread
	b := &pgx.Batch{}
	queueLockTimeout(b)
	b.Queue(ReleaseStaleThreads, postgres.Strict{"grace": 300.0}).Query(func(rows pgx.Rows) (err error) {
		freed, err = pgx.CollectRows(rows, pgx.RowToStructByName[ReleasedThread])
		return err
	})
	err := e.pool.SendBatch(ctx, b).Close()
	for _, f := range freed {
		if err == nil {
			f.Log(ctx, e.log)
		}
	}
	if err == nil || postgres.IsCode(err, "55P03") {
		_, err = FlushThreads(ctx, e.pool, e.log, sweepLimit)
	}
	if err != nil && !postgres.IsCode(err, "55P03") {
		return fmt.Errorf("sweep threads: %w", err)
	}
	return nil
}

const (
	// ReleaseStaleThreads releases the lanes of threads whose holder has ended, or whose lease expired. Without a queued
	// message, it releases an expired lane only after @grace seconds, so people can still see it.
	ReleaseStaleThreads = `
		with stale as materialized (
		  select l.lane, l.locked_by, l.execution_id, l.expires_at, l.ttl_seconds
		    from agent_locks l
		   where l.lane like 'thread:%' and l.locked_by <> '' and not l.parked
		     and (l.expires_at <= clock_timestamp()
		            and (l.expires_at <= clock_timestamp() - make_interval(secs => @grace)
		                 or exists (select from agent_messages m
		                             where m.thread_id = substr(l.lane, 8) and m.status = 'queued'))
		          or l.execution_id is not null
		            and not exists (select from agent_executions x
		                             where x.id = l.execution_id and x.completed_at is null))
		   order by l.lane for update of l skip locked)
		select substr(s.lane, 8) as thread_id, s.locked_by as holder, s.execution_id::text,
		       extract(epoch from clock_timestamp() - s.expires_at
		                          + make_interval(secs => s.ttl_seconds))::bigint as idle_seconds
		  from stale s, lanekeeper.return_agent_lock(s.lane, null, 'expired')`
	flushThreads = `
		with recursive queued as (
		  (select m.thread_id from agent_messages m where m.status = 'queued' order by m.thread_id limit 1)
		  union all
		  select (select m.thread_id from agent_messages m
		           where m.status = 'queued' and m.thread_id > q.thread_id
		           order by m.thread_id limit 1)
		    from queued q where q.thread_id is not null),
		ready as (
		  select q.thread_id
		    from queued q
		    -- ReleaseStaleThreads releases an expired lane first, and logs it.
		    left join agent_locks l on l.lane = 'thread:' || q.thread_id and l.locked_by <> ''
		   where q.thread_id is not null
		     and (l.lane is null
		          or exists (select from agent_messages m
		                       join agent_executions x on x.id = m.execution_id
		                      where m.thread_id = q.thread_id and m.status = 'queued'
		                        and (x.id = l.execution_id or x.inherits)))
		   order by random() limit @max_threads)
		select coalesce(sum(f.n), 0)::int, coalesce(array_agg('thread:' || f.thread_id), '{}')
		  from (select r.thread_id, lanekeeper.flush_agent_thread(r.thread_id, 100, false) as n from ready r) f`
)

// ReleasedThread is a thread whose lane was released because its holder had ended or was idle.
type ReleasedThread struct {
	ThreadID    string  `json:"thread_id"`
	Holder      string  `json:"holder"`
	ExecutionID *string `json:"execution_id"`
	IdleSeconds int64   `json:"idle_seconds"`
}

// Log logs the release. Call Log after the commit.
func (f ReleasedThread) Log(ctx context.Context, log *slog.Logger) {
	log.WarnContext(ctx, "lane stale, clearing", "lane", "thread:"+f.ThreadID, "holder", f.Holder,
		"age", time.Duration(f.IdleSeconds)*time.Second)
}

// FlushThreads sends queued messages of up to maxThreads threads whose lane permits it, and returns their number. It
// logs the lanes that it acquires for these messages. It does not wait for locks. The order of threads is random, so a
// thread with a blocked message does not delay the others.
func FlushThreads(ctx context.Context, db postgres.Beginner, log *slog.Logger, maxThreads int) (n int, err error) {
	type acquiredLane struct {
		Lane, Owner                  string
		Token                        int64
		ExecutionID, TraceID, Lender string
	}
	var acquired []acquiredLane
	err = postgres.InTxWithin(ctx, db, func(tx pgx.Tx) error {
		var laneNames []string
		err := tx.QueryRow(ctx, flushThreads, postgres.Strict{"max_threads": maxThreads}).Scan(&n, &laneNames)
		if err != nil || len(laneNames) == 0 {
			return err
		}
		rows, err := tx.Query(ctx, `
			select l.lane, l.locked_by, l.fencing_token, l.execution_id::text, x.trace_id,
			       coalesce((select o.lender::text from agent_lock_loans o
			                  where o.lane = l.lane order by o.depth desc limit 1), '')
			  from agent_locks l
			  join agent_executions x on x.id = l.execution_id
			 where l.lane = any (@lanes) and l.xmin = pg_current_xact_id()::xid -- written by this transaction
			 order by l.lane`, postgres.Strict{"lanes": laneNames})
		acquired, err = postgres.Collect(rows, err, "read acquired threads", pgx.RowToStructByPos[acquiredLane])
		return err
	})
	if err != nil {
		return 0, err
	}
	for _, l := range acquired {
		ctx := trace.With(ctx, trace.Span{TraceID: trace.ID(l.TraceID), ExecutionID: l.ExecutionID})
		if l.Lender != "" {
			log.InfoContext(ctx, "lane inherited", "lane", l.Lane, "from", l.Lender, "to", l.Owner, "fencing_token", l.Token)
		} else {
			log.InfoContext(ctx, "lane acquired", "lane", l.Lane, "owner", l.Owner, "fencing_token", l.Token)
		}
	}
	return n, nil
}
