package automations

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/schedule"
	"github.com/lanekeeper/lanekeeper/internal/textcut"
	"github.com/lanekeeper/lanekeeper/trace"
)

const (
	firstRetry = time.Minute
	lastRetry  = time.Hour
	maxOutput  = 256 << 10
	maxMessage = 2000
)

// Claim claims one time of an automation's schedule. In one transaction it inserts the run and moves the automation
// to its next time. One of several callers gets ok. Otherwise another caller has this time, the automation is
// disabled (and does not try its skill) or has no schedule, or scheduledFor is not its next_run_at. executionID may
// be empty. [ErrNotFound] reports an unknown automation.
func Claim(
	ctx context.Context, db postgres.Beginner, automationID string, scheduledFor time.Time, executionID, traceID string,
) (run Run, ok bool, err error) {
	err = postgres.InTx(ctx, db, func(tx pgx.Tx) error {
		t, err := lockTiming(ctx, tx, automationID)
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
		// Advance also if the run exists already (after a schedule was set back). Otherwise the automation would stay due.
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

// timing is the locked row that a claim depends on.
type timing struct {
	Trigger, Cron, Timezone string
	Enabled                 bool
	NextRunAt               *time.Time
	Now                     time.Time
}

func lockTiming(ctx context.Context, tx pgx.Tx, automationID string) (timing, error) {
	return postgres.RowOr[timing](ctx, tx, ErrNotFound, "lock automation", `
		select trigger, cron, timezone, enabled or `+trialPredicate+` as enabled, next_run_at, clock_timestamp() as now
		  from agent_automations a where id = @id for no key update`, pgx.StrictNamedArgs{"id": automationID})
}

func (t timing) claimable(scheduledFor time.Time) bool {
	return t.Trigger == Cron && t.Enabled && t.NextRunAt != nil && t.NextRunAt.Equal(scheduledFor) &&
		!t.NextRunAt.After(t.Now)
}

// next returns the first time after now. It counts from the claimed time, so that an interval keeps its phase. It
// skips a time far in the past.
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

func insertRun(
	ctx context.Context, tx pgx.Tx, automationID string, scheduledFor time.Time, executionID, traceID string,
) (Run, bool, error) {
	rows, err := tx.Query(ctx, `
		with run as (
		  insert into agent_automation_runs (automation_id, scheduled_for, execution_id, trace_id)
		  values (@automation, @scheduled_for, nullif(@execution, '')::uuid, @trace_id)
		  on conflict (automation_id, scheduled_for) where cause = 'cron' do nothing
		  returning id, automation_id, cause, scheduled_for, event_id, status, attempt, retry_at, execution_id, trace_id,
		            error_message, output, created_at, finished_at),
		linked as (
		  insert into agent_links (cause, kind, effect)
		  select 'run ' || run.id, 'ran', 'execution ' || run.execution_id from run where run.execution_id is not null)
		select `+runColumns+`
		  from run`,
		pgx.StrictNamedArgs{
			"automation": automationID, "scheduled_for": scheduledFor, "execution": executionID, "trace_id": traceID,
		})
	return collectRun(rows, err)
}

func collectRun(rows pgx.Rows, err error) (Run, bool, error) {
	if err != nil {
		return Run{}, false, err
	}
	run, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByName[Run])
	if errors.Is(err, pgx.ErrNoRows) {
		return Run{}, false, nil
	}
	return run, err == nil, err
}

// Result is the outcome of a run. A run with an Error is retried, or dead. A skipped run counts neither as a success
// nor as a failure.
type Result struct {
	Output   any    // encodes as JSON; stored up to 256 KiB
	Error    string // empty for a success
	Skipped  bool   // there was no work, or another run blocked it
	Released bool   // with an Error: the run was interrupted, so it is retried even after its last attempt
}

// Finish ends a claimed run and returns its row. A failed run is retried after 1, 4, 16 and then 60 minutes, until its
// attempts are used up. A released run is always retried. Finish returns false if the caller's attempt does not hold
// the claim any more.
func Finish(ctx context.Context, db postgres.DB, runID string, attempt int, result Result) (Run, bool, error) {
	output, err := result.encode()
	if err != nil {
		return Run{}, false, fmt.Errorf("finish automation run: %w", err)
	}
	rows, err := db.Query(ctx, `
		update agent_automation_runs r
		   set status = case when @skipped::boolean then 'skipped' when @error::text = '' then 'success'
		                     when r.attempt < a.max_attempts or @released::boolean then 'error' else 'dead' end,
		       retry_at = case when not @skipped::boolean and @error::text <> ''
		         and (r.attempt < a.max_attempts or @released::boolean)
		                  then clock_timestamp() + make_interval(secs => @retry) end,
		       error_message = nullif(@error, ''), output = @output, finished_at = clock_timestamp()
		  from agent_automations a
		 where r.id = @id and a.id = r.automation_id and r.status = 'claimed' and r.attempt = @attempt
		returning r.id, r.automation_id, r.cause, r.scheduled_for, r.event_id, r.status, r.attempt, r.retry_at,
		          r.execution_id, r.trace_id, r.error_message, r.output, r.created_at, r.finished_at`,
		pgx.StrictNamedArgs{
			"id": runID, "attempt": attempt, "skipped": result.Skipped, "error": truncate(result.Error), "output": output,
			"retry": backoff(attempt).Seconds(), "released": result.Released,
		})
	run, ok, err := collectRun(rows, err)
	if err != nil {
		return Run{}, false, fmt.Errorf("finish automation run: %w", err)
	}
	return run, ok, nil
}

// Settle ends a run that was skipped for an approval, after its call ended. failure is empty for a success.
func Settle(ctx context.Context, db postgres.DB, approvalID, failure string) error {
	_, err := db.Exec(ctx, `
		update agent_automation_runs
		   set status = case when @failure::text = '' then 'success' else 'dead' end, error_message = nullif(@failure, ''),
		       finished_at = clock_timestamp()
		 where status = 'skipped' and output ? 'approval_id' and output ->> 'approval_id' = @approval`,
		pgx.StrictNamedArgs{"approval": approvalID, "failure": truncate(failure)})
	if err != nil {
		return fmt.Errorf("settle the runs of approval %s: %w", approvalID, err)
	}
	return nil
}

// RecordDenial records why the call of a run that was skipped for an approval was not made.
func RecordDenial(ctx context.Context, db postgres.DB, approvalID, why string) error {
	_, err := db.Exec(ctx, `
		update agent_automation_runs set error_message = @why
		 where status = 'skipped' and output ? 'approval_id' and output ->> 'approval_id' = @approval`,
		pgx.StrictNamedArgs{"approval": approvalID, "why": truncate(why)})
	if err != nil {
		return fmt.Errorf("record the denied approval %s: %w", approvalID, err)
	}
	return nil
}

// Redrive gives a dead run one more attempt, due now. A run that never started is due as before. It returns false if
// the run is not dead.
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
		return nil, fmt.Errorf("encode output: %w", err)
	case len(raw) > maxOutput:
		raw = fmt.Appendf(nil, `{"omitted": "the output has %d bytes of JSON"}`, len(raw))
	case strings.Contains(strings.ReplaceAll(string(raw), `\\`, ""), `\u0000`):
		return nil, errors.New("encode output: it has a NUL character")
	}
	return (*json.RawMessage)(&raw), nil
}

func truncate(text string) string { return textcut.Stored(text, maxMessage) }

// Channel is the notification channel for due runs.
const Channel = "agent_automations"

// Ready returns the runs to claim now, the longest waiting first, at most one per automation, because an automation's
// runs are serial. It returns runs due by an event or a signal, failed runs whose retry is due, and manual runs that
// their caller did not claim within a minute. Runs of disabled automations wait, except manual runs and a trial of
// their skill. limit is 100 when 0.
func Ready(ctx context.Context, db postgres.DB, limit int) ([]Run, error) {
	return postgres.Rows[Run](ctx, db, "list runs that are ready", `
		with ready as (
		  select distinct on (r.automation_id) r.*
		    from agent_automation_runs r join agent_automations a on a.id = r.automation_id
		   where (a.enabled or r.cause = 'manual' or `+trialPredicate+`)
		     and (r.status = 'due' and (r.cause <> 'manual' or r.claimed_at <= clock_timestamp())
		          or r.status = 'error' and r.retry_at <= clock_timestamp())
		     and not exists (select from agent_automation_runs c where c.automation_id = r.automation_id and c.status = 'claimed')
		   order by r.automation_id, coalesce(r.retry_at, r.created_at), r.id)
		select `+runColumns+`
		  from ready order by coalesce(retry_at, created_at),
		    id limit @limit`, pgx.StrictNamedArgs{"limit": postgres.PageSize(limit, defaultPage, maxPage)})
}

// ClaimRun claims a [Ready] run. One of several callers gets ok. attempt is the attempt that the caller read; the
// returned run has the new one. traceID is stored only if the run has no trace: the run of an event belongs to the
// event's. A manual run needs no enabled automation.
func ClaimRun(
	ctx context.Context, db postgres.DB, runID string, attempt int, executionID, traceID string,
) (Run, bool, error) {
	rows, err := db.Query(ctx, `
		with run as (
		  update agent_automation_runs r
		     set status = 'claimed', attempt = r.attempt + (r.status = 'error')::int, retry_at = null,
		         execution_id = nullif(@execution, '')::uuid,
		         trace_id = case when r.cause = 'event' and r.trace_id <> '' then r.trace_id else @trace_id end,
		         error_message = null, claimed_at = clock_timestamp(), finished_at = null
		   where r.id = @id and r.attempt = @attempt
		     and (r.status = 'due' or r.status = 'error' and r.retry_at <= clock_timestamp())
		     and (r.cause = 'manual' or exists (select from agent_automations a where a.id = r.automation_id
		       and (a.enabled or `+trialPredicate+`)))
		  returning id, automation_id, cause, scheduled_for, event_id, status, attempt, retry_at, execution_id, trace_id, error_message,
		            output, created_at, finished_at),
		linked as (
		  insert into agent_links (cause, kind, effect)
		  select 'run ' || run.id, 'ran', 'execution ' || run.execution_id from run where run.execution_id is not null on conflict do nothing),
		ran as (
		  update agent_automations a set last_run_at = clock_timestamp(), last_trace_id = run.trace_id
		    from run where a.id = run.automation_id)
		select `+runColumns+`
		  from run`,
		pgx.StrictNamedArgs{"id": runID, "attempt": attempt, "execution": executionID, "trace_id": traceID})
	run, ok, err := collectRun(rows, err)
	if err != nil {
		return Run{}, false, fmt.Errorf("claim automation run: %w", err)
	}
	return run, ok, nil
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
		 where id = @id and status = 'due'`, pgx.StrictNamedArgs{"id": runID, "why": truncate(why)})
	return postgres.Changed(tag, err, "mark automation run dead")
}

// Notify notifies the listeners on [Channel] when db commits.
func Notify(ctx context.Context, db postgres.DB) error {
	if _, err := db.Exec(ctx, `select pg_notify(@channel, '')`, pgx.StrictNamedArgs{"channel": Channel}); err != nil {
		return fmt.Errorf("notify of automation runs: %w", err)
	}
	return nil
}

// RunManually inserts a manual run that is due now, also for a disabled automation. The caller should claim it; after a
// minute any process may. It returns [ErrNotFound] for an unknown automation, and [ErrProposal] for an undecided
// proposal.
func RunManually(ctx context.Context, db postgres.DB, nameOrID, traceID string) (Run, error) {
	return insertManualRun(ctx, db, nameOrID, traceID, time.Minute)
}

// Enqueue is [RunManually] for a caller that does not claim the run: it is ready at once.
func Enqueue(ctx context.Context, db postgres.DB, nameOrID, traceID string) (Run, error) {
	return insertManualRun(ctx, db, nameOrID, traceID, 0)
}

// insertManualRun inserts a due run and reserves it for its caller: no other process claims it before claimed_at.
func insertManualRun(ctx context.Context, db postgres.DB, nameOrID, traceID string, reserved time.Duration) (
	Run, error,
) {
	a, err := Get(ctx, db, nameOrID)
	if err != nil {
		return Run{}, err
	}
	span, _ := trace.From(ctx)
	rows, err := db.Query(ctx, `
		with run as (
		  insert into agent_automation_runs (automation_id, cause, scheduled_for, status, trace_id, claimed_at)
		  select id, 'manual', clock_timestamp(), 'due', @trace_id, clock_timestamp() + @reserved::interval
		    from agent_automations where id = @id and disabled_by <> 'proposal'
		  returning id, automation_id, cause, scheduled_for, event_id, status, attempt, retry_at, execution_id, trace_id, error_message,
		            output, created_at, finished_at),
		linked as (
		  insert into agent_links (cause, kind, effect)
		  select 'execution ' || @caller::text, 'started', 'run ' || run.id from run where @caller <> '')
		select `+runColumns+`
		  from run`,
		pgx.StrictNamedArgs{"id": a.ID, "trace_id": traceID, "reserved": reserved, "caller": span.ExecutionID})
	run, ok, err := collectRun(rows, err)
	if err == nil && !ok {
		err = ErrProposal
	}
	if err != nil {
		return Run{}, fmt.Errorf("run automation %q manually: %w", nameOrID, err)
	}
	return run, activity.RecordRequester(ctx, db, "run "+run.ID)
}

// GetRun returns one run, or [ErrRunNotFound].
func GetRun(ctx context.Context, db postgres.DB, id string) (Run, error) {
	return postgres.RowOr[Run](ctx, db, ErrRunNotFound, "get automation run", `
		select `+runColumns+`
		  from agent_automation_runs where id::text = @id`, pgx.StrictNamedArgs{"id": id})
}

// Payload returns the cause of a run: {"event", "key", "data"}, or a signal's counters. It is not redacted; redact it
// before display.
func Payload(ctx context.Context, db postgres.DB, runID string) (json.RawMessage, error) {
	rows, err := db.Query(ctx, `select payload from agent_automation_runs where id = @id`,
		pgx.StrictNamedArgs{"id": runID})
	return postgres.CollectOne(rows, err, ErrRunNotFound, "read payload of run "+runID, pgx.RowTo[json.RawMessage])
}

// Watch evaluates the signals of all enabled automations once and returns how many fired. A signal fires when it
// becomes true, and again only after it was false, regardless of the number of watchers. A failing signal does not
// stop the others; the error joins all failures.
func Watch(ctx context.Context, db postgres.DB) (fired int, err error) {
	rows, err := db.Query(ctx, `
		select id, name, signal, signal_armed from agent_automations where enabled and trigger = 'signal' order by id`)
	type watched struct {
		ID, Name, Signal string
		SignalArmed      bool
	}
	all, err := postgres.Collect(rows, err, "watch signals", pgx.RowToStructByPos[watched])
	if err != nil || len(all) == 0 {
		return 0, err
	}
	counters, err := Count(ctx, db)
	if err != nil {
		return 0, fmt.Errorf("watch signals: %w", err)
	}
	var failures []error
	for _, w := range all {
		active, err := evaluate(w.Signal, counters)
		switch {
		case err != nil:
			failures = append(failures, &ConditionError{w.Name, err})
		case active && w.SignalArmed:
			runs, err := fire(ctx, db, w.ID, w.Signal, counters)
			if err != nil {
				return fired, fmt.Errorf("watch signals: %w", err)
			}
			fired += runs
		case !active && !w.SignalArmed:
			if err := rearm(ctx, db, w.ID, w.Signal); err != nil {
				return fired, fmt.Errorf("watch signals: %w", err)
			}
		}
	}
	return fired, errors.Join(failures...)
}

// fire inserts a due run. The flag signal_armed is the claim: of several watchers, one clears it in the statement that
// inserts the run.
func fire(ctx context.Context, db postgres.DB, id, signal string, counters Counters) (int, error) {
	tag, err := db.Exec(ctx, `
		with fired as (
		  update agent_automations set signal_armed = false
		   where id = @id and signal_armed and enabled and signal = @signal returning id),
		run as (
		  insert into agent_automation_runs (automation_id, cause, scheduled_for, status, payload)
		  select id, 'signal', clock_timestamp(), 'due', @counters from fired returning id)
		select pg_notify(@channel, '') from run`,
		pgx.StrictNamedArgs{"id": id, "signal": signal, "counters": counters, "channel": Channel})
	return int(tag.RowsAffected()), err
}

func rearm(ctx context.Context, db postgres.DB, id, signal string) error {
	_, err := db.Exec(ctx, `
		update agent_automations set signal_armed = true where id = @id and not signal_armed and signal = @signal`,
		pgx.StrictNamedArgs{"id": id, "signal": signal})
	return err
}

// SkipOccurrence skips one time of an automation's schedule and stores the reason. It inserts a skipped run and moves
// the automation to its next time. One of several callers gets ok, as with [Claim].
func SkipOccurrence(
	ctx context.Context, db postgres.Beginner, automationID string, scheduledFor time.Time, traceID, reason string,
) (run Run, ok bool, err error) {
	err = postgres.InTx(ctx, db, func(tx pgx.Tx) error {
		if run, ok, err = Claim(ctx, tx, automationID, scheduledFor, "", traceID); err != nil || !ok {
			return err
		}
		result := Result{Skipped: true, Output: map[string]string{"skipped": reason}}
		run, ok, err = Finish(ctx, tx, run.ID, run.Attempt, result)
		return err
	})
	return run, ok && err == nil, err
}
