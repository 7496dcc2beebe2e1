package automations

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/internal/textcut"
	"github.com/lanekeeper/lanekeeper/skills"
)

// Result is the outcome of a run. A run with an Error is retried, or dead. A skipped run counts neither as a success
// nor as a failure.
type Result struct {
	Output   any    // encodes as JSON; stored up to 256 KiB
	Error    string // empty for a success
	Skipped  bool   // there was no work, another run blocked it, or its call awaits an approval
	Released bool   // with an Error: the run was interrupted, so it is retried even after its last attempt
}

const (
	minBackoff = time.Minute
	maxBackoff = time.Hour
	maxOutput  = 256 << 10
	maxMessage = 2000
)

// Finish ends a claimed run and returns its row. A failed run is retried after 1, 4, 16 and then 60 minutes, until its
// attempts are used up. A released run is always retried. A run is dead after its attempt made a call that took effect,
// or may have: the next attempt would make the call again, under another key. Calls of idempotent skills do not count.
// Those of flow: skills and of sql: skills that write do, because they are idempotent under one key; a failed query was
// rolled back. Finish returns false if the caller's attempt does not hold the claim any more.
func Finish(ctx context.Context, db postgres.DB, runID string, attempt int, result Result) (Run, bool, error) {
	output, err := result.encode()
	if err != nil {
		return Run{}, false, fmt.Errorf("finish automation run: %w", err)
	}
	rows, err := db.Query(ctx, `
		with last as (
		  select min(x.skill_name) as acted
		    from agent_automation_runs r
		    join agent_automations a on a.id = r.automation_id
		    join agent_activity x on x.execution_id = r.execution_id and x.purpose = 'automation ' || a.name
		    join agent_skills s on s.id = x.skill_id
		   where r.id = @id and @error::text <> '' and x.kind = 'call' and x.created_at >= r.claimed_at
		     and (x.status in ('unknown', 'success')
		          or x.error_class = any(@uncertain::text[]) and s.handler not like 'sql:%')
		     and (not s.idempotent or s.handler like 'flow:%' or s.config @> '{"writes": true}'))
		update agent_automation_runs r
		   set status = case
		                  when @skipped::boolean then 'skipped'
		                  when @error::text = '' then 'success'
		                  when (r.attempt < a.max_attempts or @released::boolean) and last.acted is null then 'error'
		                  else 'dead'
		                end,
		       retry_at = case
		                    when not @skipped::boolean and @error::text <> ''
		                         and (r.attempt < a.max_attempts or @released::boolean) and last.acted is null
		                    then clock_timestamp() + make_interval(secs => @retry)
		                  end,
		       error_message = nullif(@error, '') || coalesce(
		         '; not retried, because it called ' || last.acted || ', which may have acted: check that before a redrive', ''),
		       output = @output, finished_at = clock_timestamp()
		  from agent_automations a, last
		 where r.id = @id and a.id = r.automation_id and r.status = 'claimed' and r.attempt = @attempt
		returning r.id, r.automation_id, r.cause, r.scheduled_for, r.event_id, r.status, r.attempt, r.retry_at,
		          r.execution_id, r.trace_id, r.error_message, r.output, r.created_at, r.finished_at`,
		pgx.StrictNamedArgs{
			"id": runID, "attempt": attempt, "skipped": result.Skipped, "error": failureText(result.Error), "output": output,
			"retry": backoff(attempt).Seconds(), "released": result.Released, "uncertain": skills.UncertainClasses(),
		})
	run, ok, err := collectRun(rows, err)
	if err != nil {
		return Run{}, false, fmt.Errorf("finish automation run: %w", err)
	}
	return run, ok, nil
}

// backoff returns the pause after a failed attempt.
func backoff(attempt int) time.Duration {
	wait := minBackoff
	for range attempt - 1 {
		if wait = 4 * wait; wait >= maxBackoff {
			return maxBackoff
		}
	}
	return wait
}

// encode returns the output as JSON; nil for none. It replaces an output of more than maxOutput bytes by its size.
func (r Result) encode() (*json.RawMessage, error) {
	if r.Output == nil {
		return nil, nil
	}
	raw, err := json.Marshal(r.Output)
	switch {
	case err != nil:
		return nil, fmt.Errorf("encode output: %w", err)
	case len(raw) > maxOutput:
		raw = fmt.Appendf(nil, `{"omitted": "the output has %d bytes of JSON"}`, len(raw))
	case strings.Contains(strings.ReplaceAll(string(raw), `\\`, ""), `\u0000`):
		return nil, errors.New("encode output: it has a NUL character")
	}
	raw = redact.JSON(raw, maxOutput)
	return (*json.RawMessage)(&raw), nil
}

func truncate(text string) string { return textcut.Stored(text, maxMessage) }

// failureText returns the start of an error text, without secrets.
func failureText(text string) string { return truncate(redact.Text(text, 4*maxMessage)) }

// Settle sets the final status of a run that awaited an approval, after the approved call has ended. The run was stored
// as skipped. failure is empty for a success.
func Settle(ctx context.Context, db postgres.DB, approvalID, failure string) error {
	_, err := db.Exec(ctx, `
		update agent_automation_runs
		   set status = case when @failure::text = '' then 'success' else 'dead' end, error_message = nullif(@failure, ''),
		       finished_at = clock_timestamp()
		 where status = 'skipped' and output ? 'approval_id' and output ->> 'approval_id' = @approval`,
		pgx.StrictNamedArgs{"approval": approvalID, "failure": failureText(failure)})
	if err != nil {
		return fmt.Errorf("settle the runs of approval %s: %w", approvalID, err)
	}
	return nil
}

// Redrive gives a dead run one more attempt, due now. If its condition failed before it started, the condition is
// evaluated again. Redrive returns false if the run is not dead.
func Redrive(ctx context.Context, db postgres.DB, runID string) (bool, error) {
	tag, err := db.Exec(ctx, `
		update agent_automation_runs
		   set status = case when cause = 'event' and execution_id is null then 'due' else 'error' end,
		       retry_at = case when cause <> 'event' or execution_id is not null then clock_timestamp() end,
		       finished_at = null
		 where id = @id and status = 'dead'`,
		pgx.StrictNamedArgs{"id": runID})
	return postgres.Changed(tag, err, "redrive automation run")
}

// Skip ends a due run whose condition is false. It returns false if the run is not due any more.
func Skip(ctx context.Context, db postgres.DB, runID string) (bool, error) {
	tag, err := db.Exec(ctx, `
		update agent_automation_runs
		   set status = 'skipped', finished_at = clock_timestamp(), output = '{"condition": false}'
		 where id = @id and status = 'due'`, pgx.StrictNamedArgs{"id": runID})
	return postgres.Changed(tag, err, "skip automation run")
}

// MarkDead makes a due run dead because its condition fails; a retry would fail, too. It returns false if the run is
// not due any more.
func MarkDead(ctx context.Context, db postgres.DB, runID, why string) (bool, error) {
	tag, err := db.Exec(ctx, `
		update agent_automation_runs set status = 'dead', finished_at = clock_timestamp(), error_message = @why
		 where id = @id and status = 'due'`, pgx.StrictNamedArgs{"id": runID, "why": failureText(why)})
	return postgres.Changed(tag, err, "mark automation run dead")
}
