package activity

import (
	"context"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// AuditEntry is a row of the view agent_audit. Times are UTC; texts are truncated to 300 characters.
type AuditEntry struct {
	ID          string     `json:"id"`
	At          time.Time  `json:"at"`
	FinishedAt  *time.Time `json:"finished_at"`
	Actor       string     `json:"actor"`        // a principal or admin, the agent's name, or the sender of a webhook
	Kind        Kind       `json:"kind"`         // call, model, phase, note
	Act         string     `json:"act"`          // skill, phase or admin action
	Object      string     `json:"object"`       // target: skill pay, lane automation:nightly, memory admin / contact
	Reason      string     `json:"reason"`       // from an admin, or the purpose
	Origin      string     `json:"origin"`       // start of the run: a message, a schedule, an automation, a delivery …
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
	ParentID    *string    `json:"parent_id"` // the containing activity
	CauseID     *string    `json:"cause_id"`  // the model call that requested it
	ThreadID    string     `json:"thread_id"`
	Lane        string     `json:"lane"`
	TokenID     string     `json:"token_id"` // of the API token of a principal's act
	Via         string     `json:"via"`      // of a principal's act: http, page, cli, slack, …
	Message     string     `json:"message"`  // with the button of the act, in the words of the provider
}

// AuditPage is a page of the audit.
type AuditPage struct {
	Rows []AuditEntry
	Next string // cursor of the next page; empty after the last
	// Partial says that the page is short because Window rows were read. Next continues after them.
	Partial bool
}

// Audit lists every kind of row, newest first. Filters, cursors and errors are those of [Lines].
func Audit(ctx context.Context, db postgres.DB, f Filter) (AuditPage, error) {
	page, err := Lines(ctx, db, f)
	if err != nil {
		return AuditPage{}, err
	}
	ids := make([]string, len(page.Lines))
	for i, l := range page.Lines {
		ids[i] = l.ID
	}
	list, err := postgres.Rows[AuditEntry](ctx, db, "read audit", `
		select a.id::text, a.at, a.finished_at, a.actor, a.kind, left(a.act, 300) as act, left(a.object, 300) as object,
		       left(a.reason, 300) as reason, left(a.origin, 300) as origin, left(a.on_behalf_of, 300) as on_behalf_of,
		       a.status, left(a.error_class, 300) as error_class, left(a.error_message, 300) as error,
		       left(a.model, 300) as model, a.tokens, a.cost_usd::float8 as cost_usd, a.duration_ms,
		       left(a.surface, 300) as surface, a.trace_id, a.execution_id::text, a.parent_id::text, a.cause_id::text,
		       left(a.thread_id, 300) as thread_id, left(a.lane, 300) as lane, left(a.token_id, 300) as token_id,
		       left(a.via, 300) as via, left(a.message, 300) as message
		  from agent_audit a where a.id = any (@ids::uuid[]) order by a.id desc`, customPlan, postgres.Strict{"ids": ids})
	if err != nil {
		return AuditPage{}, err
	}
	for i := range list {
		list[i].At, list[i].FinishedAt = list[i].At.UTC(), utc(list[i].FinishedAt)
	}
	return AuditPage{Rows: list, Next: page.Next, Partial: page.Partial}, nil
}
