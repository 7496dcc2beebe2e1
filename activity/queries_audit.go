package activity

import (
	"context"
	"fmt"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Audited is a line of the view agent_audit: who did what, to which object, when, why, on whose behalf, with what
// result. Times are UTC, and texts are cut at 300 characters.
type Audited struct {
	ID          string     `json:"id"`
	At          time.Time  `json:"at"`
	FinishedAt  *time.Time `json:"finished_at"`
	Actor       string     `json:"actor"`        // admin, the agent's name, or the sender of a webhook
	Kind        Kind       `json:"kind"`         // call, model, phase, note
	Act         string     `json:"act"`          // the skill, phase or lever
	Object      string     `json:"object"`       // what it was done to: skill pay, lane automation:nightly, memory admin / contact
	Reason      string     `json:"reason"`       // what an admin gave, or what it was done for
	Origin      string     `json:"origin"`       // what began the run: a message, a schedule, an automation, a delivery …
	OnBehalfOf  string     `json:"on_behalf_of"` // an admin, a visitor in a thread, a sender, or the agent itself
	Status      Status     `json:"status"`
	ErrorClass  string     `json:"error_class"`
	Error       string     `json:"error_message"`
	Model       string     `json:"model"`
	Tokens      int64      `json:"tokens"`
	CostUSD     float64    `json:"cost_usd"`
	DurationMS  *int64     `json:"duration_ms"`
	Surface     string     `json:"surface"`
	TraceID     string     `json:"trace_id"`
	ExecutionID *string    `json:"execution_id"`
	ParentID    *string    `json:"parent_id"` // the activity that it is part of
	CauseID     *string    `json:"cause_id"`  // the model call whose answer asked for it
	ThreadID    string     `json:"thread_id"`
	Lane        string     `json:"lane"`
}

// Audits is a page of the audit.
type Audits struct {
	Rows []Audited
	Next string // cursor of the next page; empty when nothing is left
	// Partial says that the page is short because Window rows were looked at: Next goes on behind them.
	Partial bool
}

// Audit lists what was done, every kind of row of the log, newest first. Filters, cursors and errors are those of
// [Lines].
func Audit(ctx context.Context, db postgres.DB, f Filter) (Audits, error) {
	page, err := Lines(ctx, db, f)
	if err != nil {
		return Audits{}, err
	}
	ids := make([]string, len(page.Lines))
	for i, l := range page.Lines {
		ids[i] = l.ID
	}
	rows, err := db.Query(ctx, `
		select a.id::text, a.at, a.finished_at, a.actor, a.kind, left(a.act, 300) as act, left(a.object, 300) as object, left(a.reason, 300) as reason, left(a.origin, 300) as origin,
		       left(a.on_behalf_of, 300) as on_behalf_of, a.status, left(a.error_class, 300) as error_class, left(a.error_message, 300) as error,
		       left(a.model, 300) as model, a.tokens, a.cost_usd::float8 as cost_usd, a.duration_ms, left(a.surface, 300) as surface, a.trace_id,
		       a.execution_id::text, a.parent_id::text, a.cause_id::text, left(a.thread_id, 300) as thread_id, left(a.lane, 300) as lane
		  from agent_audit a where a.id = any (@ids::uuid[]) order by a.id desc`, perQuery, postgres.Strict{"ids": ids})
	list, err := report[Audited](rows, err, "read audit")
	if err != nil {
		return Audits{}, fmt.Errorf("list what was done: %w", err)
	}
	for i := range list {
		list[i].At, list[i].FinishedAt = list[i].At.UTC(), utc(list[i].FinishedAt)
	}
	return Audits{Rows: list, Next: page.Next, Partial: page.Partial}, nil
}
