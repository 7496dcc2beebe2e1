package automations

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

// Run is a row of agent_automation_runs.
type Run struct {
	ID           string          `json:"id"`
	AutomationID string          `json:"automation_id"`
	Cause        string          `json:"cause"` // cron, event, signal, manual
	ScheduledFor time.Time       `json:"scheduled_for"`
	EventID      *string         `json:"event_id"`
	Status       string          `json:"status"`
	Attempt      int             `json:"attempt"`
	RetryAt      *time.Time      `json:"retry_at"`
	ExecutionID  *string         `json:"execution_id"`
	TraceID      string          `json:"trace_id"`
	ErrorMessage *string         `json:"error_message"`
	Output       json.RawMessage `json:"output"`
	CreatedAt    time.Time       `json:"created_at"`
	FinishedAt   *time.Time      `json:"finished_at"`
}

// AwaitedApproval returns the approval that the run's call waits for; empty for none.
func (r Run) AwaitedApproval() string {
	var output struct {
		ApprovalID string `json:"approval_id"`
	}
	if r.Status != Skipped || json.Unmarshal(r.Output, &output) != nil {
		return ""
	}
	return output.ApprovalID
}

// States of a run. These functions change them:
//
//	due      claimed ([ClaimRun]), skipped ([Skip]), dead ([MarkDead])
//	claimed  success, skipped, error, dead ([Finish])
//	error    claimed ([ClaimRun])
//	skipped  success, dead ([Settle], after an approval)
//	dead     due, error ([Redrive])
const (
	DueNow  = "due"     // requested by an event, a signal or an admin; not claimed yet
	Claimed = "claimed" // running, or its process died
	Success = "success"
	Error   = "error"   // retried at retry_at
	Dead    = "dead"    // its attempts are used up, or a repetition is not safe
	Skipped = "skipped" // did no work, or its call awaits an approval ([Run.AwaitedApproval])
)

// RunFilter narrows [Runs]; the zero value lists the newest 100.
type RunFilter struct {
	AutomationID string
	Status       string // "dead" is the dead letter box
	Before       string // an id; returns only older rows
	Limit        int    // 100 when 0, at most 1000
}

const runColumns = `id, automation_id, cause, scheduled_for, event_id, status, attempt, retry_at, execution_id,
	trace_id, error_message, output, created_at, finished_at`

// Runs returns runs, newest first.
func Runs(ctx context.Context, db postgres.DB, f RunFilter) ([]Run, error) {
	return postgres.Rows[Run](ctx, db, "list automation runs", `
		select `+runColumns+`
		  from agent_automation_runs
		 where (@automation = '' or automation_id = nullif(@automation, '')::uuid) and (@status = '' or status = @status)
		   and (@before = '' or id < nullif(@before, '')::uuid)
		 order by id desc limit @limit`,
		pgx.StrictNamedArgs{
			"automation": f.AutomationID, "status": f.Status, "before": f.Before,
			"limit": postgres.PageSize(f.Limit, defaultPage, maxPage),
		})
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

// Ready returns the runs to claim now, the longest waiting first, at most one per automation, because an automation's
// runs are serial. These are runs of an event or a signal, failed runs whose retry is due, and manual runs whose
// reservation has ended (see [RunManually]). Runs of disabled automations wait, except manual runs and a trial of their
// skill. limit is 100 when 0.
func Ready(ctx context.Context, db postgres.DB, limit int) ([]Run, error) {
	return postgres.Rows[Run](ctx, db, "list runs that are ready", `
		with ready as (
		  select r.*
		    from agent_automations a
		   cross join lateral (
		     select r.*
		       from agent_automation_runs r
		      where r.automation_id = a.id
		        and r.status in ('due', 'error')
		        and coalesce(r.retry_at, r.created_at) <= statement_timestamp()
		        and (r.status = 'due' and (r.cause <> 'manual' or r.claimed_at <= statement_timestamp())
		             or r.status = 'error' and r.retry_at is not null)
		        and (a.enabled or r.cause = 'manual' or `+trialPredicate+`)
		      order by coalesce(r.retry_at, r.created_at), r.id limit 1) r
		   where not exists (
		     select from agent_automation_runs c
		      where c.automation_id = a.id and c.status = 'claimed'))
		select `+runColumns+`
		  from ready
		 order by coalesce(retry_at, created_at), id
		 limit @limit`, pgx.StrictNamedArgs{"limit": postgres.PageSize(limit, defaultPage, maxPage)})
}

// Abandoned returns up to 100 claimed runs that no process will finish, oldest first. Their execution has ended or is
// missing, or they have none and were claimed over a day ago. Call [Finish] for each; one of several callers succeeds.
func Abandoned(ctx context.Context, db postgres.DB) ([]Run, error) {
	return postgres.Rows[Run](ctx, db, "list abandoned runs", `
		select `+runColumns+`
		  from agent_automation_runs r
		 where r.status = 'claimed'
		   and case
		         when r.execution_id is null then r.claimed_at < clock_timestamp() - interval '1 day'
		         else not exists (
		           select from agent_executions e
		            where e.id = r.execution_id and e.status in ('pending', 'running', 'waiting'))
		       end
		 order by r.id
		 limit @limit`, pgx.StrictNamedArgs{"limit": defaultPage})
}

// collectRun reads the row of a statement that claims or ends a run. It returns false without a row.
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

// Channel is the notification channel for due runs.
const Channel = "agent_automations"

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
func RunManually(ctx context.Context, db postgres.Beginner, nameOrID, traceID string) (Run, error) {
	return insertManualRun(ctx, db, nameOrID, traceID, time.Minute)
}

// Enqueue is [RunManually] for a caller that does not claim the run: it is ready at once.
func Enqueue(ctx context.Context, db postgres.Beginner, nameOrID, traceID string) (Run, error) {
	return insertManualRun(ctx, db, nameOrID, traceID, 0)
}

// insertManualRun inserts a due run and reserves it for its caller. The column claimed_at has the end of the
// reservation: [Ready] returns the run from then on.
func insertManualRun(
	ctx context.Context, db postgres.Beginner, nameOrID, traceID string, reserved time.Duration,
) (run Run, err error) {
	a, err := Get(ctx, db, nameOrID)
	if err != nil {
		return Run{}, err
	}
	span, _ := trace.From(ctx)
	err = postgres.InTx(ctx, db, func(tx pgx.Tx) error {
		rows, err := tx.Query(ctx, `
			with run as (
			  insert into agent_automation_runs (automation_id, cause, scheduled_for, status, trace_id, claimed_at)
			  select id, 'manual', clock_timestamp(), 'due', @trace_id, clock_timestamp() + @reserved::interval
			    from agent_automations where id = @id and disabled_by <> 'proposal'
			  returning `+runColumns+`),
			linked as (
			  insert into agent_links (cause, kind, effect)
			  select 'execution ' || @caller::text, 'started', 'run ' || run.id from run where @caller <> '')
			select `+runColumns+`
			  from run`,
			pgx.StrictNamedArgs{"id": a.ID, "trace_id": traceID, "reserved": reserved, "caller": span.ExecutionID})
		var ok bool
		if run, ok, err = collectRun(rows, err); err != nil {
			return err
		}
		if !ok {
			return ErrProposal
		}
		return activity.RecordRequester(ctx, tx, "run "+run.ID)
	})
	if err != nil {
		return Run{}, fmt.Errorf("run automation %q manually: %w", nameOrID, err)
	}
	return run, nil
}
