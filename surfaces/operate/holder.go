package operate

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/trace"
)

// Holder describes the lane's holder.
type Holder struct {
	Lane      string     `json:"lane"`
	Held      bool       `json:"held"`
	Holder    string     `json:"holder,omitempty"`
	TraceID   string     `json:"trace_id,omitempty"`
	SessionID string     `json:"session_id,omitempty"`
	HeldFor   float64    `json:"held_for,omitempty"`   // seconds
	ExpiresIn *float64   `json:"expires_in,omitempty"` // seconds, unless it is renewed
	began     time.Time  // of the session's last turn; zero if unknown
	ended     *time.Time // of the session's last turn; nil while it runs
	principal string     // that asked for the session's last turn; empty if unknown
}

// Holder returns the current holder of the lane.
func (o *Operate) Holder(ctx context.Context) (Holder, error) {
	h := Holder{Lane: Lane}
	live, err := lanes.Get(ctx, o.Pool, Lane)
	if err != nil || live == nil {
		return h, err
	}
	h.Held, h.Holder, h.TraceID, h.HeldFor, h.ExpiresIn = true, live.LockedBy, postgres.Deref(live.TraceID),
		live.HeldFor, live.ExpiresIn
	if h.TraceID == "" {
		return h, nil
	}
	err = o.Pool.QueryRow(ctx, `
		select s.thread_id, x.created_at, x.completed_at, coalesce(
		           (select min(substr(l.cause, length('principal ') + 1)) from agent_links l
		             where l.effect = 'execution ' || x.id and l.kind = 'asked' and l.cause like 'principal %'), '')
		  from (select thread_id from agent_executions where trace_id = @trace and flow = @flow limit 1) s
		 cross join lateral (select m.execution_id from agent_messages m
		                      where m.thread_id = s.thread_id and m.role = 'user' and m.seq is not null
		                      order by m.turn desc, m.seq desc limit 1) n
		  join agent_executions x on x.id = n.execution_id`, postgres.Strict{"trace": h.TraceID, "flow": Flow},
	).Scan(&h.SessionID, &h.began, &h.ended, &h.principal)
	if errors.Is(err, pgx.ErrNoRows) {
		return h, nil
	}
	return h, err
}

// Explain describes the holder for people.
func (o *Operate) Explain(ctx context.Context, busy *lanes.BusyError) string {
	text := busy.Error()
	h, err := o.Holder(ctx)
	if err != nil || !h.Held {
		return text
	}
	switch {
	case h.principal != "":
		text = "lane busy: held by " + h.principal + ", session " + h.SessionID
	case h.SessionID != "":
		text = "lane busy: held by session " + h.SessionID
	}
	if h.ended != nil {
		return text + fmt.Sprintf("; its last turn ended %s ago, and it keeps the lane for %s after a turn",
			max(0, time.Since(*h.ended)).Round(time.Second), o.Idle)
	}
	atWork := time.Duration(h.HeldFor * float64(time.Second))
	if !h.began.IsZero() {
		atWork = max(0, time.Since(h.began))
	}
	return text + fmt.Sprintf("; at work for %s", atWork.Round(time.Second))
}

// RecordSkipped records a turn skipped because another admin holds the lane, under a separate trace. It returns the
// trace, or nothing if the record failed.
func (o *Operate) RecordSkipped(ctx context.Context, session string, busy *lanes.BusyError) (traceID string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	traceID = string(trace.New(trace.Operate))
	_, err := activity.Note(ctx, o.Pool, activity.Entry{
		TraceID: traceID, Surface: string(trace.Operate), Agent: o.Agent,
		Skill: Flow, Lane: busy.Lane,
		Input: map[string]string{"session": session, "lane": busy.Lane, "holder": busy.Holder},
	}, activity.Outcome{Status: activity.Skipped, Output: busy.Error()})
	if err != nil {
		o.log.WarnContext(ctx, "skipped turn not recorded", "thread", session, "holder", busy.Holder, "error", err)
		return ""
	}
	return traceID
}
