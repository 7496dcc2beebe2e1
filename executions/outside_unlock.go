package executions

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Release is how a worker outside gives a lock back.
type Release struct {
	Status  Status // Completed, Failed or Waiting
	Summary string // of the result
	Result  json.RawMessage
	Error   string // what failed
	// With Waiting: what for, one of the eight kinds of Limits (response, agent, document, signature, test, event, delay,
	// approval), and for how long. 0 is the kind's standard.
	For     string
	Key     string // not for a delay
	Timeout time.Duration
}

// UnlockRun gives a lock back: the run ends, or waits and can be locked again, by any worker, when the wait is over. Its
// outcome is then among the checkpoints as step "wait KIND N", N counting the run's waits. The status is the run's
// afterwards: Running when what it waits for had come already.
//
// Errors: ErrNotFound, ErrVoid with the reason, ErrMalformed.
func (e *Engine) UnlockRun(ctx context.Context, id, lockID string, r Release) (status Status, traceID string, err error) {
	var timeout any
	if r.Timeout != 0 {
		timeout = r.Timeout.Seconds()
	}
	var failure, result any
	if r.Error != "" || r.Status == Failed {
		failure = r.Error
	}
	if len(r.Result) > 0 {
		result = r.Result
	}
	err = e.pool.QueryRow(ctx, `
		select unlock_agent_execution(@id, @lock, @status, @summary, @error, @kind, @key, make_interval(secs => @timeout::float8), @result),
		       (select trace_id from agent_executions where id = @id)`, postgres.Strict{
		"id": id, "lock": lockID, "status": string(r.Status), "summary": r.Summary, "error": failure, "kind": null(r.For), "key": null(r.Key),
		"timeout": timeout, "result": result,
	}).Scan(&status, &traceID)
	switch {
	case postgres.IsCode(err, "LK001"):
		return "", "", e.refuse(ctx, id, lockID, "release", string(r.Status), r.Result)
	case err != nil:
		return "", "", fmt.Errorf("unlock execution %s: %w", id, malformed(err))
	}
	e.released(ctx, id, traceID, status, r)
	return status, traceID, nil
}

// released says what became of a run, and to whom.
func (e *Engine) released(ctx context.Context, id, traceID string, status Status, r Release) {
	about := named(traceID, id)
	switch {
	case status == Waiting:
		e.log.InfoContext(ctx, "execution waiting", append(about, "waiting_for", r.For, "waiting_key", r.Key)...)
		if r.Timeout > 0 {
			e.soon(r.Timeout)
		}
	case status.Ended():
		e.log.InfoContext(ctx, "execution completed", append(about, "result_type", resultType(status), "status", string(status))...)
		e.log.InfoContext(ctx, "event emitted", append(about, "event", "AGENT_COMPLETED", "key", id)...)
		var freed int
		err := e.pool.QueryRow(ctx, `
			select coalesce((data ->> 'locks_released')::int, 0) from agent_events where external_id = 'completed ' || @id`,
			postgres.Strict{"id": id}).Scan(&freed)
		if err != nil {
			e.log.WarnContext(ctx, "count of released locks not read", append(about, "error", err)...)
		}
		e.logReleased(ctx, id, freed, about...)
		e.deliverCompletion(ctx, id)
	}
}
