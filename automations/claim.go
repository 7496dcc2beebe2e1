package automations

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/schedule"
)

// Claim claims one time of an automation's schedule. In one transaction it inserts the run and moves the automation to
// its next time. Of concurrent callers, at most one gets ok. ok is false for a time that is claimed, lies in the future
// or is not the automation's next_run_at. It is false without a schedule, and for a disabled automation that may not
// try its skill. executionID may be empty. [ErrNotFound] reports an unknown automation.
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

// SkipOccurrence skips one time of an automation's schedule and stores the reason. It inserts a skipped run and moves
// the automation to its next time. Of concurrent callers, at most one gets ok, as with [Claim].
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

// next returns the first time after now. It steps from the claimed time, so an interval such as @every 30m keeps its
// phase. If now is more than 1,000 times later, it steps from now, and the interval begins a new phase.
func (t timing) next() (*time.Time, error) {
	zone, err := schedule.Location(t.Timezone)
	if err != nil {
		return nil, err
	}
	s, err := schedule.Parse(t.Cron, zone)
	if err != nil {
		return nil, err
	}
	const maxSteps = 1000
	next := s.Next(*t.NextRunAt)
	for range maxSteps {
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

// insertRun inserts a claimed run, and links it to its execution. ok is false if the run exists.
func insertRun(
	ctx context.Context, tx pgx.Tx, automationID string, scheduledFor time.Time, executionID, traceID string,
) (Run, bool, error) {
	rows, err := tx.Query(ctx, `
		with run as (
		  insert into agent_automation_runs (automation_id, scheduled_for, execution_id, trace_id)
		  values (@automation, @scheduled_for, nullif(@execution, '')::uuid, @trace_id)
		  on conflict (automation_id, scheduled_for) where cause = 'cron' do nothing
		  returning `+runColumns+`),
		linked as (
		  insert into agent_links (cause, kind, effect)
		  select 'run ' || run.id, 'ran', 'execution ' || run.execution_id
		    from run
		   where run.execution_id is not null)
		select `+runColumns+`
		  from run`,
		pgx.StrictNamedArgs{
			"automation": automationID, "scheduled_for": scheduledFor, "execution": executionID, "trace_id": traceID,
		})
	return collectRun(rows, err)
}

// ClaimRun claims a [Ready] run. Of concurrent callers, at most one gets ok. attempt must equal the stored attempt; a
// retry increments it. executionID and traceID are those of the new attempt and replace the stored ones. The run of an
// event keeps the trace of the event, if that has one. A manual run needs no enabled automation.
func ClaimRun(
	ctx context.Context, db postgres.DB, runID string, attempt int, executionID, traceID string,
) (Run, bool, error) {
	rows, err := db.Query(ctx, `
		with run as (
		  update agent_automation_runs r
		     set status = 'claimed', attempt = r.attempt + (r.status = 'error')::int, retry_at = null,
		         execution_id = nullif(@execution, '')::uuid,
		         trace_id = case
		                      when r.cause = 'event' and r.trace_id <> '' then r.trace_id
		                      else @trace_id
		                    end,
		         error_message = null, claimed_at = clock_timestamp(), finished_at = null
		   where r.id = @id and r.attempt = @attempt
		     and (r.status = 'due' or r.status = 'error' and r.retry_at <= clock_timestamp())
		     and (r.cause = 'manual' or exists (select from agent_automations a where a.id = r.automation_id
		       and (a.enabled or `+trialPredicate+`)))
		  returning `+runColumns+`),
		linked as (
		  insert into agent_links (cause, kind, effect)
		  select 'run ' || run.id, 'ran', 'execution ' || run.execution_id
		    from run
		   where run.execution_id is not null
		  on conflict do nothing),
		ran as (
		  update agent_automations a
		     set last_run_at = clock_timestamp(), last_trace_id = run.trace_id
		    from run
		   where a.id = run.automation_id)
		select `+runColumns+`
		  from run`,
		pgx.StrictNamedArgs{"id": runID, "attempt": attempt, "execution": executionID, "trace_id": traceID})
	run, ok, err := collectRun(rows, err)
	if err != nil {
		return Run{}, false, fmt.Errorf("claim automation run: %w", err)
	}
	return run, ok, nil
}

// trialPredicate matches an automation a that self-heal has paused for its own skill, and whose next time or pending
// run can be the skill's trial. Without such trials, a skill that no model calls would stay disabled. The predicate
// excludes skills that need approval, because nobody knows when the call would be made, and a second concurrent trial.
const trialPredicate = `(a.disabled_by = 'self_heal'
	and a.paused_for = a.skill_name
	and exists (
	  select from agent_skills s
	   where s.name = a.paused_for and not s.enabled and s.disabled_by = 'self_heal' and s.trial_at is not null
	     and s.trust <> 'approve'
	     and coalesce((s.evidence #>> '{trial,until}')::timestamptz <= clock_timestamp(), true))
	and not exists (
	  select from agent_automation_runs c join agent_automations o on o.id = c.automation_id
	   where c.status = 'claimed' and o.paused_for = a.paused_for))`
