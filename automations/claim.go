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
	"github.com/lanekeeper/lanekeeper/internal/schedule"
)

const (
	firstRetry = time.Minute
	lastRetry  = time.Hour
	maxOutput  = 256 << 10
	maxMessage = 2000
)

// Claim takes one time of an automation's schedule, before it is run: it inserts the run and moves the automation to
// its next time, in one transaction. Of many callers one gets ok. Not ok means that somebody else
// has this time, that the automation is disabled (and does not try its skill) or has no schedule, or that scheduledFor is not
// its next_run_at.
// executionID may be empty. [ErrNotFound] when there is no such automation.
func Claim(ctx context.Context, db postgres.Beginner, automationID string, scheduledFor time.Time, executionID, traceID string) (run Run, ok bool, err error) {
	err = postgres.InTx(ctx, db, func(tx pgx.Tx) error {
		t, err := hold(ctx, tx, automationID)
		if err != nil || !t.claimable(scheduledFor) {
			return err
		}
		next, err := t.next()
		if err != nil {
			return err
		}
		if run, ok, err = insertRun(ctx, tx, automationID, scheduledFor, executionID, traceID); err != nil {
			return err
		}
		// Also when the run was there already (a schedule that was set back): else it would be due for ever.
		_, err = tx.Exec(ctx, `
			update agent_automations
			   set next_run_at = @next, last_run_at = case when @ran::boolean then clock_timestamp() else last_run_at end,
			       last_trace_id = case when @ran::boolean then @trace_id else last_trace_id end
			 where id = @id`, pgx.StrictNamedArgs{"id": automationID, "next": next, "ran": ok, "trace_id": traceID})
		return err
	})
	if err != nil {
		return Run{}, false, fmt.Errorf("claim automation: %w", err)
	}
	return run, ok, nil
}

// timing is what decides about a claim, read under the lock of the automation.
type timing struct {
	Trigger, Cron, Timezone string
	Enabled                 bool
	NextRunAt               *time.Time
	Now                     time.Time
}

func hold(ctx context.Context, tx pgx.Tx, automationID string) (timing, error) {
	rows, err := tx.Query(ctx, `
		select trigger, cron, timezone, enabled or `+tries+` as enabled, next_run_at, clock_timestamp() as now
		  from agent_automations a where id = @id for no key update`, pgx.StrictNamedArgs{"id": automationID})
	if err != nil {
		return timing{}, err
	}
	t, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByName[timing])
	if errors.Is(err, pgx.ErrNoRows) {
		err = ErrNotFound
	}
	return t, err
}

func (t timing) claimable(scheduledFor time.Time) bool {
	return t.Trigger == Cron && t.Enabled && t.NextRunAt != nil && t.NextRunAt.Equal(scheduledFor) && !t.NextRunAt.After(t.Now)
}

// next is the first time after now. Counted from the time that is run, so that an interval keeps
// its beat; one far in the past is not walked through.
func (t timing) next() (*time.Time, error) {
	zone, err := schedule.Location(t.Timezone)
	if err != nil {
		return nil, err
	}
	s, err := schedule.Parse(t.Cron, zone)
	if err != nil {
		return nil, err
	}
	const steps = 1000
	next := s.Next(*t.NextRunAt)
	for range steps {
		if next.IsZero() || next.After(t.Now) {
			break
		}
		next = s.Next(next)
	}
	if !next.After(t.Now) {
		next = s.Next(t.Now)
	}
	if next.IsZero() {
		return nil, fmt.Errorf("schedule %q has no next time", t.Cron)
	}
	return &next, nil
}

func insertRun(ctx context.Context, tx pgx.Tx, automationID string, scheduledFor time.Time, executionID, traceID string) (Run, bool, error) {
	rows, err := tx.Query(ctx, `
		with run as (
		  insert into agent_automation_runs (automation_id, scheduled_for, execution_id, trace_id)
		  values (@automation, @scheduled_for, nullif(@execution, '')::uuid, @trace_id)
		  on conflict (automation_id, scheduled_for) where cause = 'cron' do nothing
		  returning id, automation_id, cause, scheduled_for, event_id, status, attempt, retry_at, execution_id, trace_id, error_message, output,
		            created_at, finished_at),
		noted as (
		  insert into agent_links (cause, kind, effect)
		  select 'run ' || run.id, 'ran', 'execution ' || run.execution_id from run where run.execution_id is not null)
		select id, automation_id, cause, scheduled_for, event_id, status, attempt, retry_at, execution_id, trace_id, error_message, output,
		       created_at, finished_at
		  from run`,
		pgx.StrictNamedArgs{
			"automation": automationID, "scheduled_for": scheduledFor, "execution": executionID, "trace_id": traceID,
		})
	return oneRun(rows, err)
}

func oneRun(rows pgx.Rows, err error) (Run, bool, error) {
	if err != nil {
		return Run{}, false, err
	}
	run, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByName[Run])
	if errors.Is(err, pgx.ErrNoRows) {
		return Run{}, false, nil
	}
	return run, err == nil, err
}

// Result is how a run ended. With an Error it is tried again, or dead; Skipped and neither count as
// an attempt that worked nor as one that failed.
type Result struct {
	Output    any    // encodes as JSON; kept up to 256 KiB
	Error     string // empty: it worked
	Skipped   bool   // there was nothing to do, or something else was in the way
	GivenBack bool   // with an Error: it had to give way before its end, so it is tried again though it was its last attempt
}

// Finish ends a claimed run and returns it as it is then. After a failure it is to be tried again
// 1, 4, 16 and then 60 minutes later, until the automation's attempts are used up; one that was given back in any case.
// False when the run is not claimed any more, and then nothing changes. attempt is the one that the caller ran.
func Finish(ctx context.Context, db postgres.DB, runID string, attempt int, result Result) (Run, bool, error) {
	output, err := result.encode()
	if err != nil {
		return Run{}, false, fmt.Errorf("finish automation run: %w", err)
	}
	rows, err := db.Query(ctx, `
		update agent_automation_runs r
		   set status = case when @skipped::boolean then 'skipped' when @error::text = '' then 'success'
		                     when r.attempt < a.max_attempts or @given_back::boolean then 'error' else 'dead' end,
		       retry_at = case when not @skipped::boolean and @error::text <> '' and (r.attempt < a.max_attempts or @given_back::boolean)
		                  then clock_timestamp() + make_interval(secs => @retry) end,
		       error_message = nullif(@error, ''), output = @output, finished_at = clock_timestamp()
		  from agent_automations a
		 where r.id = @id and a.id = r.automation_id and r.status = 'claimed' and r.attempt = @attempt
		returning r.id, r.automation_id, r.cause, r.scheduled_for, r.event_id, r.status, r.attempt, r.retry_at, r.execution_id, r.trace_id,
		          r.error_message, r.output, r.created_at, r.finished_at`,
		pgx.StrictNamedArgs{
			"id": runID, "attempt": attempt, "skipped": result.Skipped, "error": clip(result.Error), "output": output,
			"retry": backoff(attempt).Seconds(), "given_back": result.GivenBack,
		})
	run, ok, err := oneRun(rows, err)
	if err != nil {
		return Run{}, false, fmt.Errorf("finish automation run: %w", err)
	}
	return run, ok, nil
}

// Settle ends a run that was left as skipped because its call awaits an approval, when that call was made: failure is
// why it did not work, empty when it did.
func Settle(ctx context.Context, db postgres.DB, approvalID, failure string) error {
	_, err := db.Exec(ctx, `
		update agent_automation_runs
		   set status = case when @failure::text = '' then 'success' else 'dead' end, error_message = nullif(@failure, ''), finished_at = clock_timestamp()
		 where status = 'skipped' and output ? 'approval_id' and output ->> 'approval_id' = @approval`,
		pgx.StrictNamedArgs{"approval": approvalID, "failure": clip(failure)})
	if err != nil {
		return fmt.Errorf("settle the runs of approval %s: %w", approvalID, err)
	}
	return nil
}

// Denied says of a run that was left as skipped because its call awaits an approval why that is not made.
func Denied(ctx context.Context, db postgres.DB, approvalID, why string) error {
	_, err := db.Exec(ctx, `
		update agent_automation_runs set error_message = @why
		 where status = 'skipped' and output ? 'approval_id' and output ->> 'approval_id' = @approval`,
		pgx.StrictNamedArgs{"approval": approvalID, "why": clip(why)})
	if err != nil {
		return fmt.Errorf("note the denied approval %s: %w", approvalID, err)
	}
	return nil
}

// Redrive gives a dead run one more attempt, due now; one that was never begun is due as it was. False when it is
// not dead.
func Redrive(ctx context.Context, db postgres.DB, runID string) (bool, error) {
	tag, err := db.Exec(ctx, `
		update agent_automation_runs
		   set status = case when cause = 'event' and execution_id is null then 'due' else 'error' end,
		       retry_at = case when cause <> 'event' or execution_id is not null then clock_timestamp() end, finished_at = null
		 where id = @id and status = 'dead'`,
		pgx.StrictNamedArgs{"id": runID})
	if err != nil {
		return false, fmt.Errorf("redrive automation run: %w", err)
	}
	return tag.RowsAffected() > 0, nil
}

func backoff(attempt int) time.Duration {
	wait := firstRetry
	for range attempt - 1 {
		if wait = 4 * wait; wait >= lastRetry {
			return lastRetry
		}
	}
	return wait
}

func (r Result) encode() (*json.RawMessage, error) {
	if r.Output == nil {
		return nil, nil
	}
	raw, err := json.Marshal(r.Output)
	switch {
	case err != nil:
		return nil, fmt.Errorf("write the output: %w", err)
	case len(raw) > maxOutput:
		raw = fmt.Appendf(nil, `{"omitted": "the output has %d bytes of JSON"}`, len(raw))
	case strings.Contains(strings.ReplaceAll(string(raw), `\\`, ""), `\u0000`):
		return nil, errors.New("write the output: it has a NUL character")
	}
	return (*json.RawMessage)(&raw), nil
}

func clip(text string) string {
	text = strings.ReplaceAll(strings.ToValidUTF8(text, "\uFFFD"), "\x00", "\uFFFD")
	if len(text) > maxMessage {
		text = strings.ToValidUTF8(text[:maxMessage], "") + "…"
	}
	return text
}
