package executions

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

// pauseChannel is where the database says that the agent was paused, or resumed.
const pauseChannel = "agent_pause"

// pausedCode is the SQLSTATE of a claim that a pause refuses.
const pausedCode = "LK003"

// ErrPaused reports autonomous work that does not begin, or go on, because the agent is paused. It comes as a
// *PausedError.
var ErrPaused = errors.New("autonomous work is paused")

// Pause is whether autonomous work is paused, and since when, by whom and why.
//
// While it is, no execution is claimed but those of attended surfaces (see Attended), those that run are handed back
// before their next step as at a shutdown, schedules record their ticks as skipped, and workers outside are refused
// new locks. What arrives is kept in the queue. The state is a row, so it outlives every process.
type Pause struct {
	Paused   bool       `json:"paused"`
	PausedAt *time.Time `json:"paused_at"` // nil unless paused, and so on
	PausedBy string     `json:"paused_by"`
	Reason   string     `json:"reason"`
	TraceID  string     `json:"trace_id"` // of the activity that recorded it
}

// String is the pause in a sentence without a full stop.
func (p Pause) String() string {
	if p.PausedAt == nil {
		return ErrPaused.Error()
	}
	return ErrPaused.Error() + " " + p.since()
}

// since is the end of that sentence.
func (p Pause) since() string {
	if p.PausedAt == nil {
		return "at this moment"
	}
	return fmt.Sprintf("since %s UTC by %s: %s", p.PausedAt.UTC().Format(time.DateTime), p.PausedBy, p.Reason)
}

// PausedError says which pause is in the way. To the engine it means what a shutdown means: the run is handed back.
type PausedError struct{ Pause Pause }

func (e *PausedError) Error() string { return e.Pause.String() + "; agent resume ends that" }

// Is makes it ErrPaused, and ErrDraining for everything that hands a run back.
func (e *PausedError) Is(target error) bool { return target == ErrPaused || target == ErrDraining }

// PauseChange is what pausing or resuming did. Changed is false when it was so already.
type PauseChange struct {
	Pause
	Changed    bool       `json:"changed"`
	ResumedAt  *time.Time `json:"resumed_at"`
	ActivityID string     `json:"activity_id"` // empty when nothing was changed
}

// Attended reports whether a person waits for the executions of a surface, so that a pause leaves them alone. The
// database has the same rule (agent_executions_begins).
func Attended(surface trace.Surface) bool { return surface == trace.Operate || surface == trace.Chat }

// CurrentPause reads whether autonomous work is paused.
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

// PauseAll pauses autonomous work, in all processes, until ResumeAll; it is recorded as an activity. When it returns,
// nothing more is claimed; what runs stops before its next step, which processes hear of within moments where the
// database can notify them, and within their SweepEvery otherwise. Of two at once one is the pause.
func PauseAll(ctx context.Context, db postgres.DB, by, reason string) (PauseChange, error) {
	got := PauseChange{Pause: Pause{Paused: true}}
	err := db.QueryRow(ctx, `
		select changed, paused_at, paused_by, reason, trace_id, coalesce(activity_id::text, '') from pause_agent(@reason, @by)`,
		postgres.Strict{"reason": reason, "by": by}).
		Scan(&got.Changed, &got.PausedAt, &got.PausedBy, &got.Reason, &got.TraceID, &got.ActivityID)
	if err != nil {
		return PauseChange{}, fmt.Errorf("pause the agent: %w", invalidArgument(err))
	}
	return got, nil
}

// ResumeAll ends the pause; what is ready is taken at once. The change tells of the pause that was, with the trace of
// its end. reason may be empty.
func ResumeAll(ctx context.Context, db postgres.DB, by, reason string) (PauseChange, error) {
	var got PauseChange
	err := db.QueryRow(ctx, `
		select changed, paused_at, paused_by, reason, resumed_at, trace_id, coalesce(activity_id::text, '') from resume_agent(@by, @reason)`,
		postgres.Strict{"reason": reason, "by": by}).
		Scan(&got.Changed, &got.PausedAt, &got.PausedBy, &got.Reason, &got.ResumedAt, &got.TraceID, &got.ActivityID)
	if err != nil {
		return PauseChange{}, fmt.Errorf("resume the agent: %w", invalidArgument(err))
	}
	return got, nil
}

// RecordSkipped records, as a skipped activity under a trace of its own, work that does not begin because of a pause,
// and returns the trace. s names it: flow, surface, agent and input.
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

// skipTick moves a schedule on that fell due during a pause: the tick is recorded, and not made good later.
func skipTick(ctx context.Context, tx pgx.Tx, s Schedule, due time.Time, p Pause) error {
	next, err := s.next(ctx, tx)
	if err != nil {
		return err
	}
	_, err = RecordSkipped(ctx, tx, Spec{
		Flow: s.Flow, Surface: s.Surface, Agent: s.Agent, Input: map[string]any{"schedule": s.Name, "scheduled_for": due.UTC()},
	}, p)
	if err != nil {
		return err
	}
	_, err = tx.Exec(ctx, `update agent_schedules set next_run_at = @next, updated_at = clock_timestamp() where name = @name`,
		postgres.Strict{"next": next, "name": s.Name})
	return err
}

// explainPaused is err, or what it means when a pause refused a claim.
func explainPaused(ctx context.Context, db postgres.DB, err error) error {
	if !postgres.IsCode(err, pausedCode) {
		return err
	}
	p, failure := CurrentPause(ctx, db)
	if failure != nil {
		return failure
	}
	p.Paused = true // it was, when the claim was refused
	return &PausedError{p}
}

// Paused reports whether this process knows that the agent is paused. It may learn it some moments later than
// CurrentPause tells.
func (e *Engine) Paused() bool { return e.paused.Load() }

// watchPause keeps this process told whether the agent is paused: as soon as the database says so, and else once in
// SweepEvery.
func (e *Engine) watchPause(ctx context.Context) {
	var notifications <-chan string
	if e.opts.Listener != nil {
		payloads, stop := e.opts.Listener.Subscribe(pauseChannel)
		defer stop()
		notifications = payloads
	}
	ticker := time.NewTicker(e.opts.SweepEvery)
	defer ticker.Stop()
	for {
		e.refreshPause(ctx)
		select {
		case <-ctx.Done():
			return
		case <-notifications:
		case <-ticker.C:
		}
	}
}

// refreshPause asks the database once.
func (e *Engine) refreshPause(ctx context.Context) {
	p, err := CurrentPause(ctx, e.pool)
	switch {
	case err != nil && ctx.Err() == nil:
		e.log.WarnContext(ctx, "not known whether the agent is paused", "error", err)
	case err != nil:
	case e.paused.Swap(p.Paused) == p.Paused:
	case p.Paused:
		e.log.WarnContext(ctx, "autonomous work is paused", "by", p.PausedBy, "reason", p.Reason)
	default:
		e.log.InfoContext(ctx, "autonomous work is resumed")
		e.Poll()
	}
}

// checkPaused is why a run must not take its next step: the agent is paused. What the process knows may be a moment
// old, so the database has the last word.
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
