package executions

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/logging"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

// pauseChannel is the notification channel for pauses and resumes.
const pauseChannel = "agent_pause"

// pausedCode is the SQLSTATE of a claim that a pause refuses.
const pausedCode = "LK003"

// ErrPaused reports work that does not start or continue because the agent is paused. Every *PausedError matches it.
var ErrPaused = errors.New("autonomous work is paused")

// Pause is the state of the pause of autonomous work.
//
// During a pause only executions of attended surfaces are claimed (see Attended). The engine releases running
// executions before their next step, as at a shutdown. Schedules record their ticks as skipped, and external workers
// get no new locks. New work stays in the queue. The state is a row of agent_pauses, so it survives restarts.
type Pause struct {
	Paused   bool       `json:"paused"`
	PausedAt *time.Time `json:"paused_at"` // nil unless paused
	PausedBy string     `json:"paused_by"`
	Reason   string     `json:"reason"`
	TraceID  string     `json:"trace_id"` // of the activity that recorded the pause
}

// String returns the pause as a sentence without a full stop.
func (p Pause) String() string {
	if p.PausedAt == nil {
		return ErrPaused.Error()
	}
	return ErrPaused.Error() + " " + p.since()
}

// since returns the end of that sentence: since when, by whom and why.
func (p Pause) since() string {
	if p.PausedAt == nil {
		return "at this moment"
	}
	return fmt.Sprintf("since %s UTC by %s: %s", p.PausedAt.UTC().Format(time.DateTime), p.PausedBy, p.Reason)
}

// PausedError has the pause that prevented the work. The engine handles it like a shutdown: it releases the run.
type PausedError struct{ Pause Pause }

func (e *PausedError) Error() string { return e.Pause.String() + "; run agent resume to end the pause" }

// Is matches ErrPaused. It also matches ErrDraining, which makes the engine release the run.
func (e *PausedError) Is(target error) bool { return target == ErrPaused || target == ErrDraining }

// PauseChange is the result of PauseAll or ResumeAll. Changed is false if the state was the same before.
type PauseChange struct {
	Pause
	Changed    bool       `json:"changed"`
	ResumedAt  *time.Time `json:"resumed_at"`
	ActivityID string     `json:"activity_id"` // empty if Changed is false
}

// Attended reports whether a person waits for the executions of a surface. A pause does not affect such executions. The
// database has the same rule (agent_executions_begins).
func Attended(surface trace.Surface) bool { return surface == trace.Operate || surface == trace.Chat }

// CurrentPause reads the state of the pause.
func CurrentPause(ctx context.Context, db postgres.DB) (Pause, error) {
	p := Pause{Paused: true}
	err := db.QueryRow(ctx, `select paused_at, paused_by, reason, trace_id from agent_pauses where resumed_at is null`).
		Scan(&p.PausedAt, &p.PausedBy, &p.Reason, &p.TraceID)
	if errors.Is(err, pgx.ErrNoRows) {
		return Pause{}, nil
	}
	if err != nil {
		return Pause{}, fmt.Errorf("read whether the agent is paused: %w", err)
	}
	return p, nil
}

// PauseAll pauses autonomous work in all processes until ResumeAll, and records an activity. After the commit, no claim
// for an unattended surface begins. Claims of transactions that were open may still be committed. Executions stop
// before their next step as soon as their process knows of the pause: by a notification, otherwise within SweepEvery.
// Of concurrent calls, one changes the state.
func PauseAll(ctx context.Context, db postgres.DB, by, reason string) (PauseChange, error) {
	change := PauseChange{Pause: Pause{Paused: true}}
	b := &pgx.Batch{}
	activity.QueueActor(ctx, b)
	b.Queue(`
		select changed, paused_at, paused_by, reason, trace_id, coalesce(activity_id::text, '')
		  from pause_agent(@reason, @by)`,
		postgres.Strict{"reason": reason, "by": by}).QueryRow(func(row pgx.Row) error {
		return row.Scan(&change.Changed, &change.PausedAt, &change.PausedBy, &change.Reason, &change.TraceID,
			&change.ActivityID)
	})
	if err := db.SendBatch(ctx, b).Close(); err != nil {
		return PauseChange{}, fmt.Errorf("pause the agent: %w", invalidArgument(err))
	}
	return change, nil
}

// ResumeAll ends the pause, and workers claim ready executions at once. The result describes the ended pause, with the
// trace of the activity that ended it. reason may be empty.
func ResumeAll(ctx context.Context, db postgres.DB, by, reason string) (PauseChange, error) {
	var change PauseChange
	b := &pgx.Batch{}
	activity.QueueActor(ctx, b)
	b.Queue(`
		select changed, paused_at, paused_by, reason, resumed_at, trace_id, coalesce(activity_id::text, '')
		  from resume_agent(@by, @reason)`,
		postgres.Strict{"reason": reason, "by": by}).QueryRow(func(row pgx.Row) error {
		return row.Scan(&change.Changed, &change.PausedAt, &change.PausedBy, &change.Reason, &change.ResumedAt,
			&change.TraceID, &change.ActivityID)
	})
	if err := db.SendBatch(ctx, b).Close(); err != nil {
		return PauseChange{}, fmt.Errorf("resume the agent: %w", invalidArgument(err))
	}
	return change, nil
}

// RecordSkipped records work that a pause prevents as an activity with status skipped. It returns the trace of the
// activity. s has the flow, surface, agent and input of the work.
func RecordSkipped(ctx context.Context, db postgres.DB, s Spec, p Pause) (trace.ID, error) {
	id := trace.New(s.Surface)
	_, err := activity.Note(ctx, db, activity.Entry{
		TraceID: string(id), Surface: string(s.Surface), Agent: s.Agent, Skill: s.Flow, Input: s.Input,
	}, activity.Outcome{Status: activity.Skipped, Output: p.String()})
	if err != nil {
		return "", fmt.Errorf("record %s as skipped: %w", s.Flow, err)
	}
	return id, nil
}

// skipTick advances a schedule past a tick during a pause. It records the tick as skipped, and no later execution makes
// up for it.
func skipTick(ctx context.Context, tx pgx.Tx, s Schedule, due time.Time, p Pause) error {
	next, err := s.next(ctx, tx)
	if err != nil {
		return err
	}
	_, err = RecordSkipped(ctx, tx, Spec{
		Flow: s.Flow, Surface: s.Surface, Agent: s.Agent,
		Input: map[string]any{"schedule": s.Name, "scheduled_for": due.UTC()},
	}, p)
	if err != nil {
		return err
	}
	_, err = tx.Exec(ctx, `
		update agent_schedules set next_run_at = @next, updated_at = clock_timestamp() where name = @name`,
		postgres.Strict{"next": next, "name": s.Name})
	return err
}

// explainPaused replaces the error of a claim that a pause rejected by a *PausedError.
func explainPaused(ctx context.Context, db postgres.DB, err error) error {
	if !postgres.IsCode(err, pausedCode) {
		return err
	}
	p, readErr := CurrentPause(ctx, db)
	if readErr != nil {
		return readErr
	}
	p.Paused = true // the agent was paused when the database rejected the claim
	return &PausedError{p}
}

// Paused reports whether this process knows of a pause. It may lag behind CurrentPause.
func (e *Engine) Paused() bool { return e.paused.Load() }

// watchPause reads the state of the pause after each notification and at each SweepEvery.
func (e *Engine) watchPause(ctx context.Context) {
	var notifications <-chan string
	if e.opts.Listener != nil {
		payloads, stop := e.opts.Listener.Subscribe(pauseChannel)
		defer stop()
		notifications = payloads
	}
	ticker := time.NewTicker(e.opts.SweepEvery)
	defer ticker.Stop()
	var failures logging.Failures
	for {
		failures.Log(ctx, e.log, "pause state not read", e.refreshPause(ctx))
		select {
		case <-ctx.Done():
			return
		case <-notifications:
		case <-ticker.C:
		}
	}
}

// refreshPause reads the state once.
func (e *Engine) refreshPause(ctx context.Context) error {
	p, err := CurrentPause(ctx, e.pool)
	switch {
	case err != nil:
	case e.paused.Swap(p.Paused) == p.Paused:
	case p.Paused:
		e.log.WarnContext(ctx, "autonomous work is paused", "by", p.PausedBy, "reason", p.Reason)
	default:
		e.log.InfoContext(ctx, "autonomous work is resumed")
		e.Poll()
	}
	return err
}

// checkPaused returns an error if a pause prevents the next step. The pause that the process knows may have ended, so
// checkPaused reads the database. If that fails, it assumes the pause.
func (r *run) checkPaused(ctx context.Context) error {
	if r.replay != nil || Attended(trace.Surface(r.exec.Surface)) || !r.e.paused.Load() {
		return nil
	}
	p, err := CurrentPause(ctx, r.e.pool)
	if err == nil && !p.Paused {
		return nil
	}
	return &PausedError{p}
}
