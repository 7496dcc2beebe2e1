package executions

import (
	"context"
	"encoding/json"
	"reflect"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// claimedExecution is an execution that this process claimed, with its checkpoints.
type claimedExecution struct {
	Execution
	needsRecovery bool // an earlier claim left lanes, open activities or interrupted calls
	checkpoints   map[string]Checkpoint
	interrupted   map[string]bool
	onCompleted   func(row *Execution) // receives the final row if the run knows it without a query; may be nil
	callerLeft    func() bool          // whether the caller left and the run must be cancelled; may be nil
}

// claim claims up to n ready executions with their checkpoints, in one round trip and one transaction. missed reports
// whether other ready executions were locked.
func (p *workerPool) claim(
	ctx context.Context, n int,
) (worker string, claimed []claimedExecution, missed bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, p.e.opts.LeaseTTL)
	defer cancel()
	if worker, err = p.e.WorkerID(ctx); err != nil {
		return "", nil, false, err
	}
	rows, err := p.e.pool.Query(ctx, `
		select `+columns+`, `+checkpointColumns+`, missed
		  from (select (t.execution).*, t.held, t.steps, t.claims, t.prints, t.failed, t.outputs, t.times, t.missed
		          from lanekeeper.claim_agent_executions(@queue, @worker, @n, @skip) t) x
		 order by priority, id`,
		postgres.Strict{"worker": worker, "queue": p.queue, "n": n, "skip": p.skippedFlows()})
	if err != nil {
		return "", nil, false, err
	}
	defer rows.Close()
	for rows.Next() {
		x, ok, err := scanClaimed(rows, []any{&missed})
		if err != nil {
			return "", nil, false, err
		}
		if ok {
			claimed = append(claimed, x)
		}
	}
	return worker, claimed, missed, rows.Err()
}

// checkpointColumns lists the columns after the execution's own: recovery flag, and checkpoints as arrays.
const (
	checkpointColumns    = `held, steps, claims, prints, failed, outputs, times`
	numCheckpointColumns = 7
)

// scanClaimed reads one claimed execution and the extra columns; false when the row has no execution.
func scanClaimed(rows pgx.Rows, extra []any) (claimedExecution, bool, error) {
	var x claimedExecution
	if rows.RawValues()[0] == nil {
		return x, false, rows.Scan(append(make([]any, numExecutionColumns+numCheckpointColumns), extra...)...)
	}
	var steps, prints []string
	var claims []int64
	var failed []bool
	var outputs []json.RawMessage
	var times []time.Time
	dest := append(x.scanTargets(), &x.needsRecovery, &steps, &claims, &prints, &failed, &outputs, &times)
	if err := rows.Scan(append(dest, extra...)...); err != nil {
		return x, false, err
	}
	x.checkpoints, x.interrupted = make(map[string]Checkpoint, len(steps)), map[string]bool{}
	for i, step := range steps {
		x.checkpoints[step] = Checkpoint{step, claims[i], prints[i], failed[i], outputs[i], times[i]}
	}
	return x, true, nil
}

// numExecutionColumns is the number of columns of an Execution.
var numExecutionColumns = reflect.TypeFor[Execution]().NumField()

// scanTargets returns pointers to the fields, in the order of columns.
func (x *Execution) scanTargets() []any {
	v := reflect.ValueOf(x).Elem()
	dest := make([]any, v.NumField(), v.NumField()+16)
	for i := range dest {
		dest[i] = v.Field(i).Addr().Interface()
	}
	return dest
}
