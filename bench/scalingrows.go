package main

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// bytesOf is what relations take on disk.
type bytesOf struct{ heap, index, toast int64 }

func (s bytesOf) total() int64 { return s.heap + s.index + s.toast }

func (s bytesOf) minus(t bytesOf) bytesOf {
	return bytesOf{s.heap - t.heap, s.index - t.index, s.toast - t.toast}
}

func (s bytesOf) plus(t bytesOf) bytesOf {
	return bytesOf{s.heap + t.heap, s.index + t.index, s.toast + t.toast}
}

// grown is what the rows of a noun take at both sizes.
type grown struct {
	noun string
	rows [2]int64
	size [2]bytesOf
}

// The tables of each noun, as a pattern of their names. Everything is every table, those of River as well.
const (
	logTables       = `^agent_activity($|_\d|_default)`
	executionTables = `^agent_executions$`
	threadTables    = `^agent_(threads|messages)$`
	everything      = ``
)

// size sums the relations whose names match. A partition counts by its own name.
func (b *scalingBench) size(ctx context.Context, tables string) (s bytesOf, err error) {
	err = b.pool.QueryRow(ctx, `
		select coalesce(sum(pg_table_size(c.oid) - t.size), 0)::bigint, coalesce(sum(pg_indexes_size(c.oid)), 0)::bigint,
		       coalesce(sum(t.size), 0)::bigint
		  from pg_class c join pg_namespace n on n.oid = c.relnamespace,
		       lateral (select coalesce(pg_total_relation_size(nullif(c.reltoastrelid, 0)), 0) as size) t
		 where c.relkind = 'r' and n.nspname !~ '^(pg_|information_schema)' and c.relname ~ @tables`,
		postgres.Strict{"tables": tables}).Scan(&s.heap, &s.index, &s.toast)
	if err != nil {
		return s, fmt.Errorf("measure the tables: %w", err)
	}
	return s, nil
}

// grow fills the database from the size before to this one.
func (b *scalingBench) grow(ctx context.Context, at int) error {
	var from scale
	if at > 0 {
		from = b.sizes[at-1]
	}
	to := b.sizes[at]
	for i, n := range []struct {
		noun, tables string
		from, to     int64
		fill         func(ctx context.Context, from, to int64) error
	}{
		{"an execution that waits", executionTables, from.waiting, to.waiting, b.inPieces(madeWaiting, piece/5)},
		{"a thread with ten messages", threadTables, from.threads, to.threads, b.inPieces(madeTalk, piece/10)},
		{"a row of the activity log", logTables, from.log, to.log, b.fill},
	} {
		before, err := b.size(ctx, n.tables)
		if err != nil {
			return err
		}
		if err := n.fill(ctx, n.from, n.to); err != nil {
			return err
		}
		after, err := b.size(ctx, n.tables)
		if err != nil {
			return err
		}
		if at == 0 {
			b.grown = append(b.grown, grown{noun: n.noun})
		}
		g := &b.grown[i]
		g.rows[at], g.size[at] = n.to, after.minus(before)
		if at > 0 {
			g.size[at] = g.size[at].plus(g.size[0])
		}
	}
	return nil
}

// inPieces makes rows by the statements, so many in a transaction. Triggers are left out, as by fill.
func (b *scalingBench) inPieces(statements []string, rows int64) func(ctx context.Context, from, to int64) error {
	return func(ctx context.Context, from, to int64) error {
		began := time.Now()
		for at := from; at < to; at += rows {
			upto := min(at+rows, to)
			err := postgres.InTx(ctx, b.pool, func(tx pgx.Tx) error {
				if _, err := tx.Exec(ctx, "set local session_replication_role = replica"); err != nil {
					return err
				}
				for _, sql := range statements {
					if _, err := tx.Exec(ctx, sql, postgres.Strict{"from": at, "to": upto}); err != nil {
						return err
					}
				}
				return nil
			})
			if err != nil {
				return fmt.Errorf("make rows %d to %d: %w", at, upto, err)
			}
			fmt.Fprintf(b.errw, "made %d of %d (%s)\n", upto, to, time.Since(began).Round(time.Second))
		}
		return nil
	}
}

// madeWaiting are executions as they are left by a flow that waits for an event.
var madeWaiting = []string{`
	insert into agent_executions (trace_id, surface, flow, status, claim, input, waiting_for, waiting_key, waiting_step,
	                              wait_number, started_at)
	select 'fl_02' || lpad(n::text, 24, '0'), 'flow', '` + waitFlow + `', 'waiting', 1, to_jsonb('scaling-' || n), 'event',
	       'scaling-' || n, 'go', 1, clock_timestamp()
	  from generate_series(@from::bigint, @to::bigint - 1) n`}

// madeTalk are threads with ten messages of 200 characters.
var madeTalk = []string{`
	insert into agent_threads (id, channel, participant, next_seq)
	select 'guest:' || n, 'chat', 'Guest ' || n, 11 from generate_series(@from::bigint, @to::bigint - 1) n`, `
	insert into agent_messages (thread_id, seq, turn, role, content, channel, trace_id, status, sent_at)
	select 'guest:' || n, m, m, case when m % 2 = 1 then 'user' else 'assistant' end,
	       repeat(left(md5((n * 10 + m)::text), 20), 10), 'chat', 'ch_02' || lpad(n::text, 24, '0'), 'delivered',
	       clock_timestamp()
	  from generate_series(@from::bigint, @to::bigint - 1) n, generate_series(1, 10) m`}
