package automations

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

// Channel is where the database says that a run has become due.
const Channel = "agent_automations"

// Ready returns the runs that are to be taken now, the longest waiting first and one for each automation, because
// an automation runs one at a time: those that an event or a signal made due, failed ones whose retry has come,
// and those by hand, unless they are left to who asked for them. Those of disabled automations wait until they are
// enabled, except those by hand and one with which a skill is tried; those behind a claimed run until it has ended.
// limit is 100 when 0.
func Ready(ctx context.Context, db postgres.DB, limit int) ([]Run, error) {
	rows, err := db.Query(ctx, `
		with ready as (
		  select distinct on (r.automation_id) r.*
		    from agent_automation_runs r join agent_automations a on a.id = r.automation_id
		   where (a.enabled or r.cause = 'manual' or `+tries+`)
		     and (r.status = 'due' and (r.cause <> 'manual' or r.claimed_at <= clock_timestamp())
		          or r.status = 'error' and r.retry_at <= clock_timestamp())
		     and not exists (select from agent_automation_runs c where c.automation_id = r.automation_id and c.status = 'claimed')
		   order by r.automation_id, coalesce(r.retry_at, r.created_at), r.id)
		select id, automation_id, cause, scheduled_for, event_id, status, attempt, retry_at, execution_id, trace_id,
		       error_message, output, created_at, finished_at
		  from ready order by coalesce(retry_at, created_at), id limit @limit`, pgx.StrictNamedArgs{"limit": page(limit)})
	return collectRuns(rows, err, "list runs that are ready")
}

// Take claims a run that is [Ready], before it is run. Of many callers one gets ok. attempt is the one that the
// caller saw; the run returned has the one to be made. traceID is kept only where the run has no trace of its
// own: what an event caused belongs to the event's. A run by an admin's hand needs no enabled automation.
func Take(ctx context.Context, db postgres.DB, runID string, attempt int, executionID, traceID string) (Run, bool, error) {
	rows, err := db.Query(ctx, `
		with run as (
		  update agent_automation_runs r
		     set status = 'claimed', attempt = r.attempt + (r.status = 'error')::int, retry_at = null, execution_id = nullif(@execution, '')::uuid,
		         trace_id = case when r.cause = 'event' and r.trace_id <> '' then r.trace_id else @trace_id end,
		         error_message = null, claimed_at = clock_timestamp(), finished_at = null
		   where r.id = @id and r.attempt = @attempt
		     and (r.status = 'due' or r.status = 'error' and r.retry_at <= clock_timestamp())
		     and (r.cause = 'manual' or exists (select from agent_automations a where a.id = r.automation_id and (a.enabled or `+tries+`)))
		  returning id, automation_id, cause, scheduled_for, event_id, status, attempt, retry_at, execution_id, trace_id, error_message,
		            output, created_at, finished_at),
		noted as (
		  insert into agent_links (cause, kind, effect)
		  select 'run ' || run.id, 'ran', 'execution ' || run.execution_id from run where run.execution_id is not null on conflict do nothing),
		ran as (
		  update agent_automations a set last_run_at = clock_timestamp(), last_trace_id = run.trace_id
		    from run where a.id = run.automation_id)
		select id, automation_id, cause, scheduled_for, event_id, status, attempt, retry_at, execution_id, trace_id, error_message,
		       output, created_at, finished_at
		  from run`,
		pgx.StrictNamedArgs{"id": runID, "attempt": attempt, "execution": executionID, "trace_id": traceID})
	run, ok, err := oneRun(rows, err)
	if err != nil {
		return Run{}, false, fmt.Errorf("take automation run: %w", err)
	}
	return run, ok, nil
}

// Pass ends a due run that is not meant: its condition does not hold. False when it is not due any more.
func Pass(ctx context.Context, db postgres.DB, runID string) (bool, error) {
	tag, err := db.Exec(ctx, `
		update agent_automation_runs
		   set status = 'skipped', finished_at = clock_timestamp(), output = '{"condition": false}'
		 where id = @id and status = 'due'`, pgx.StrictNamedArgs{"id": runID})
	if err != nil {
		return false, fmt.Errorf("pass automation run: %w", err)
	}
	return tag.RowsAffected() > 0, nil
}

// Bury puts a due run whose condition cannot be decided into the dead letter box: trying again decides nothing. False
// when it is not due any more.
func Bury(ctx context.Context, db postgres.DB, runID, why string) (bool, error) {
	tag, err := db.Exec(ctx, `
		update agent_automation_runs set status = 'dead', finished_at = clock_timestamp(), error_message = @why
		 where id = @id and status = 'due'`, pgx.StrictNamedArgs{"id": runID, "why": clip(why)})
	if err != nil {
		return false, fmt.Errorf("bury automation run: %w", err)
	}
	return tag.RowsAffected() > 0, nil
}

// Announce tells whoever listens on [Channel] to look at what is ready, when db commits.
func Announce(ctx context.Context, db postgres.DB) error {
	if _, err := db.Exec(ctx, `select pg_notify(@channel, '')`, pgx.StrictNamedArgs{"channel": Channel}); err != nil {
		return fmt.Errorf("announce automation runs: %w", err)
	}
	return nil
}

// RunByHand makes a run of an automation due, now, also of one that is out of service. It is to be taken by who
// asked for it; when it has not been within a minute, by whoever finds it ready. [ErrNotFound] when there is no such
// automation, [ErrProposal] when it is a proposal that nobody has accepted.
func RunByHand(ctx context.Context, db postgres.DB, nameOrID, traceID string) (Run, error) {
	return byHand(ctx, db, nameOrID, traceID, time.Minute)
}

// Order is [RunByHand] for who does not take the run: it is ready at once.
func Order(ctx context.Context, db postgres.DB, nameOrID, traceID string) (Run, error) {
	return byHand(ctx, db, nameOrID, traceID, 0)
}

// byHand leaves the run to the caller for a while: until then claimed_at says when others may claim it.
func byHand(ctx context.Context, db postgres.DB, nameOrID, traceID string, left time.Duration) (Run, error) {
	a, err := Get(ctx, db, nameOrID)
	if err != nil {
		return Run{}, err
	}
	span, _ := trace.From(ctx)
	rows, err := db.Query(ctx, `
		with run as (
		  insert into agent_automation_runs (automation_id, cause, scheduled_for, status, trace_id, claimed_at)
		  select id, 'manual', clock_timestamp(), 'due', @trace_id, clock_timestamp() + @left::interval
		    from agent_automations where id = @id and disabled_by <> 'proposal'
		  returning id, automation_id, cause, scheduled_for, event_id, status, attempt, retry_at, execution_id, trace_id, error_message,
		            output, created_at, finished_at),
		noted as (
		  insert into agent_links (cause, kind, effect)
		  select 'execution ' || @asker::text, 'started', 'run ' || run.id from run where @asker <> '')
		select id, automation_id, cause, scheduled_for, event_id, status, attempt, retry_at, execution_id, trace_id, error_message,
		       output, created_at, finished_at
		  from run`,
		pgx.StrictNamedArgs{"id": a.ID, "trace_id": traceID, "left": left, "asker": span.ExecutionID})
	run, ok, err := oneRun(rows, err)
	if err == nil && !ok {
		err = ErrProposal
	}
	if err != nil {
		return Run{}, fmt.Errorf("run automation %q by hand: %w", nameOrID, err)
	}
	return run, nil
}

// GetRun returns one run, or [ErrRunNotFound].
func GetRun(ctx context.Context, db postgres.DB, id string) (Run, error) {
	rows, err := db.Query(ctx, `
		select id, automation_id, cause, scheduled_for, event_id, status, attempt, retry_at, execution_id, trace_id, error_message,
		       output, created_at, finished_at
		  from agent_automation_runs where id::text = @id`, pgx.StrictNamedArgs{"id": id})
	run, ok, err := oneRun(rows, err)
	if err == nil && !ok {
		err = ErrRunNotFound
	}
	if err != nil {
		return Run{}, fmt.Errorf("get automation run: %w", err)
	}
	return run, nil
}

// Payload is what caused a run: {"event", "key", "data"}, or a signal's counters. It is as the event brought it,
// secrets included; whoever shows it redacts it.
func Payload(ctx context.Context, db postgres.DB, runID string) (json.RawMessage, error) {
	var raw json.RawMessage
	err := db.QueryRow(ctx, `select payload from agent_automation_runs where id = @id`, pgx.StrictNamedArgs{"id": runID}).Scan(&raw)
	if errors.Is(err, pgx.ErrNoRows) {
		err = ErrRunNotFound
	}
	if err != nil {
		return nil, fmt.Errorf("read payload of run %s: %w", runID, err)
	}
	return raw, nil
}
