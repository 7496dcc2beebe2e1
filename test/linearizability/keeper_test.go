package linearizability_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/trace"
)

// recordingDB is a database that records every statement of package lanes, with its answer. So the history includes
// background renewals.
type recordingDB struct {
	*pgxpool.Pool
	history *history
}

// handsOver matches a release that may hand the lane to a waiter. Without a waiter, its commit is not awaited.
var handsOver = regexp.MustCompile(`\blanekeeper\.release_agent_lock\(`)

var laneFunction = regexp.MustCompile(`\b\w*agent_(execution_)?lock\w*\(`)

// begin records the call of a statement, as one operation for each of its lanes.
func (r recordingDB) begin(sql string, args []any) []*op {
	var a postgres.Strict
	if len(args) == 1 {
		a, _ = args[0].(postgres.Strict)
	}
	one := func(k kind) []*op {
		o := &op{Kind: k, Passes: handsOver.MatchString(sql)}
		o.Lane, _ = a["lane"].(string)
		o.Owner, _ = a["owner"].(string)
		o.Token, _ = a["token"].(int64)
		ttl, _ := a["ttl"].(int32)
		o.TTL = int64(ttl) * 1_000_000
		return []*op{r.history.call(o)}
	}
	lanes, _ := a["lanes"].([]string)
	owners, _ := a["owners"].([]string)
	tokens, _ := a["tokens"].([]int64)
	ttls, _ := a["ttls"].([]int32)
	many := func(k kind) []*op {
		var ops []*op
		for i, lane := range lanes {
			o := &op{Kind: k, Lane: lane, Owner: owners[i], Many: true, Passes: handsOver.MatchString(sql)}
			if tokens != nil {
				o.Token = tokens[i]
			}
			if ttls != nil {
				o.TTL = int64(ttls[i]) * 1_000_000
			}
			ops = append(ops, r.history.call(o))
		}
		return ops
	}
	switch name := laneFunction.FindString(sql); name {
	case "":
		return nil
	case "acquire_agent_lock(", "acquire_agent_execution_lock(":
		return one(kindAcquire)
	case "acquire_agent_locks(":
		return many(kindAcquire)
	case "await_agent_lock(", "acquire_or_enqueue_agent_lock(":
		return one(kindAwait)
	case "release_agent_lock(":
		if lanes != nil {
			return many(kindRelease)
		}
		return one(kindRelease)
	case "leave_agent_lock_queue(":
		return one(kindLeave)
	case "fence_agent_lock(":
		return nil // belongs to a write
	case "renew_agent_locks(":
		return many(kindRenew)
	default:
		return []*op{r.history.call(&op{Kind: kindUnknown, Lane: "unknown", Owner: name})}
	}
}

// end records the answers. An operation of several without an answer had no effect.
func (r recordingDB) end(ops []*op, err error) {
	for _, o := range ops {
		if err == nil && o.Many && !o.answered {
			o.Kind = kindLeave
		}
		r.history.done(o, err)
	}
}

// setHeir notes the new owner from a release's answer: lane, owner, token and end.
func (o *op) setHeir(to string) {
	if parts := strings.Split(to, "\t"); len(parts) == 4 && parts[0] == o.Lane {
		o.Heir = parts[1]
		o.Got, _ = strconv.ParseInt(parts[2], 10, 64)
		o.Ends, _ = strconv.ParseInt(parts[3], 10, 64)
	}
}

func (r recordingDB) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	ops := r.begin(sql, args)
	tag, err := r.Pool.Exec(ctx, sql, args...)
	for _, o := range ops {
		o.Blind = true
	}
	r.end(ops, err)
	return tag, err
}

func (r recordingDB) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	ops := r.begin(sql, args)
	rows, err := r.Pool.Query(ctx, sql, args...)
	if err != nil || ops == nil {
		r.end(ops, err)
		return rows, err
	}
	return &recordingRows{Rows: rows, r: r, ops: ops}, nil
}

func (r recordingDB) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	ops := r.begin(sql, args)
	return recordingRow{r.Pool.QueryRow(ctx, sql, args...), r, ops}
}

// recordingRow records a single yes or no.
type recordingRow struct {
	pgx.Row
	r   recordingDB
	ops []*op
}

func (w recordingRow) Scan(dest ...any) error {
	err := w.Row.Scan(dest...)
	for _, o := range w.ops {
		if yes, ok := dest[0].(*bool); ok {
			o.OK = *yes
		}
		if passed, ok := dest[0].(**string); ok && *passed != nil {
			o.OK = true
			o.setHeir(**passed)
		}
	}
	w.r.end(w.ops, err)
	return err
}

// recordingRows records the rows that the caller reads.
type recordingRows struct {
	pgx.Rows
	r    recordingDB
	ops  []*op
	done bool
}

func (w *recordingRows) Next() bool {
	more := w.Rows.Next()
	if !more {
		w.finish()
	}
	return more
}

func (w *recordingRows) Close() {
	w.Rows.Close()
	w.finish()
}

func (w *recordingRows) finish() {
	if !w.done {
		w.done = true
		w.r.end(w.ops, w.Err())
	}
}

func (w *recordingRows) Scan(dest ...any) error {
	if err := w.Rows.Scan(dest...); err != nil {
		return err
	}
	got := map[string]any{}
	for i, f := range w.FieldDescriptions() {
		got[f.Name] = reflect.Indirect(reflect.ValueOf(dest[i])).Interface()
	}
	token, _ := got["fencing_token"].(int64)
	ends, _ := got["expires_at"].(time.Time)
	holder, _ := got["holder"].(string)
	lane, _ := got["lane"].(string)
	number, _ := got["n"].(int64)
	handover, _ := got["handover"].(string)
	for i, o := range w.ops {
		if o.Many && o.Kind != kindRenew && int64(i) != number-1 {
			continue
		}
		o.answered = true
		if o.Kind == kindRelease {
			o.OK = true
			o.setHeir(handover)
		} else if o.Kind != kindRenew {
			o.OK, _ = got["acquired"].(bool)
			o.Got = token
			o.setResult(ends, holder)
		} else if o.Lane == lane && o.Token == token {
			o.OK, _ = got["renewed"].(bool)
			o.Busy, _ = got["busy"].(bool)
			o.setResult(ends, "")
		}
	}
	return nil
}

// worker uses lanes through package lanes, like a Go program.
type worker struct {
	history *history
	pool    *pgxpool.Pool
	keeper  *lanes.Keeper
	lanes   []string
	rand    *rand.Rand
	runs    int
}

// play takes lanes and works under them until ctx ends.
func (w *worker) play(ctx context.Context) {
	for testkit.Wait(ctx, time.Duration(w.rand.IntN(25))*time.Millisecond) {
		lease, err := w.acquire(ctx)
		if err != nil {
			continue // busy, or the database does not answer
		}
		w.work(ctx, lease)
		if w.rand.IntN(8) == 0 {
			select { // keep it over some renewals
			case <-lease.Lost():
			case <-time.After(time.Duration(w.rand.IntN(1500)) * time.Millisecond):
			}
			w.work(ctx, lease)
		}
		err = lease.Release(ctx)
		for err != nil && !errors.Is(err, lanes.ErrLost) && testkit.Wait(ctx, 50*time.Millisecond) {
			err = lease.Release(ctx)
		}
		if w.rand.IntN(4) == 0 {
			w.write(ctx, lease) // too late
		}
	}
}

func (w *worker) acquire(ctx context.Context) (*lanes.Lease, error) {
	w.runs++
	lane := w.lanes[w.rand.IntN(len(w.lanes))]
	ttl := lanes.WithTTL(time.Duration(1+w.rand.IntN(2)) * time.Second)
	switch w.rand.IntN(4) {
	case 0:
		return w.keeper.AcquireWait(ctx, lane, ttl, lanes.WithTimeout(time.Duration(1+w.rand.IntN(400))*time.Millisecond))
	case 1:
		var id string
		err := w.pool.QueryRow(ctx, `
			with w as (
			  insert into agent_workers (name, expires_at) values ('w', clock_timestamp() + interval '1 hour') returning id)
			insert into agent_executions (trace_id, surface, flow, status, claimed_by, claim)
			select $1, 'flow', 'f', 'running', id, 1 from w returning id::text`, string(trace.New(trace.Flow))).Scan(&id)
		if err != nil {
			return nil, err
		}
		return w.keeper.AcquireAs(ctx, lanes.ClaimOwner(id, 1), lane, ttl)
	}
	return w.keeper.Acquire(ctx, lane, ttl)
}

func (w *worker) work(ctx context.Context, lease *lanes.Lease) {
	for range w.rand.IntN(4) {
		if w.rand.IntN(3) == 0 {
			_ = lease.Renew(ctx) // recorded below
		} else {
			w.write(ctx, lease)
		}
	}
}

func (w *worker) write(ctx context.Context, lease *lanes.Lease) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), waitTimeout)
	defer cancel()
	writeFenced(ctx, w.history, w.pool, grant{lane: lease.Lane(), owner: lease.Owner().String(), token: lease.Token()},
		lease.Fence)
}
