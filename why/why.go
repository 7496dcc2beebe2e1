// Package why answers why a trace is what it is: who began it, across other traces; what it did and waited for; who
// had which lane; what went wrong; what came of it elsewhere; and what it cost.
//
// The answer is the SQL function why(trace), which a person may call in psql; here it is read, redacted and written for
// people. Each row says that one thing caused another (FromRef → ToRef), in parts that follow one another:
//
//	trace    what it was, in a line
//	because  what caused it, from the first cause down to its first execution
//	did      its executions
//	waits    what it waited for, what ended that, and who had the lane that it waited for
//	lanes    which lanes it had, from when to when
//	trouble  workers that were lost, writes that were refused as stale, calls of which nobody knows the end
//	led to   what it caused: events and whom they resumed, automations, forks, messages, approvals, what targets were told
//	spend    calls, tokens and dollars by model
//
// A reference is a word and an id: execution, trace, event, run (of an automation), delivery, approval, request,
// outgoing, thread, lane, schedule, worker, step, model; or one of outside, admin, timer. Lists are bounded, and a
// row of kind more says what was left out. Every read goes by an index, so that the answer does not get slower as the
// log grows.
package why

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/trace"
)

// Part is a part of an answer.
type Part string

// The parts, in their order.
const (
	Head    Part = "trace"
	Because Part = "because"
	Did     Part = "did"
	Waits   Part = "waits"
	Lanes   Part = "lanes"
	Trouble Part = "trouble"
	LedTo   Part = "led to"
	Spend   Part = "spend"
)

// More is the kind of a row that says what was left out.
const More = "more"

// Most is how many rows of each part are read.
const Most = 100

// bounds of what is shown, in bytes.
const (
	maxText   = 1000
	maxDetail = 4 << 10
)

// Reason is a row: FromRef caused ToRef, or, where FromRef is empty, something is so. TraceID and ExecutionID are
// those of the other end where that is in a trace.
type Reason struct {
	Seq         int             `json:"seq"`
	Part        Part            `json:"part"`
	At          *time.Time      `json:"at"`
	Kind        string          `json:"kind"`
	What        string          `json:"what"`
	FromRef     string          `json:"from_ref"`
	ToRef       string          `json:"to_ref"`
	TraceID     string          `json:"trace_id"`
	ExecutionID *string         `json:"execution_id"`
	Detail      json.RawMessage `json:"detail"`
}

// Answer is why a trace is what it is.
type Answer struct {
	TraceID     string   `json:"trace_id"`
	OTelTraceID string   `json:"otel_trace_id"` // the same 16 bytes in hex, as tracing tools show them
	Reasons     []Reason `json:"reasons"`
}

// Of asks about a trace by its id in any form. The error wraps trace.ErrInvalid for what is no id, and
// activity.ErrNotFound.
func Of(ctx context.Context, db postgres.DB, id string) (Answer, error) {
	if _, err := trace.ParseAny(id); err != nil {
		return Answer{}, fmt.Errorf("ask why: %w", err)
	}
	rows, err := db.Query(ctx, `
		select seq, part, at, kind, what, from_ref, to_ref, trace_id, execution_id::text, detail from why(@trace, @most)`,
		postgres.Strict{"trace": id, "most": Most})
	if err != nil {
		return Answer{}, fmt.Errorf("ask why %s: %w", id, err)
	}
	reasons, err := pgx.CollectRows(rows, pgx.RowToStructByName[Reason])
	if err != nil {
		return Answer{}, fmt.Errorf("ask why %s: %w", id, err)
	}
	if len(reasons) == 0 {
		return Answer{}, fmt.Errorf("ask why %s: %w", id, activity.ErrNotFound)
	}
	for i := range reasons {
		reasons[i].show()
	}
	a := Answer{TraceID: reasons[0].TraceID, Reasons: reasons}
	a.OTelTraceID = trace.ID(a.TraceID).OTel()
	return a, nil
}

// show makes a row fit to be shown: what others wrote is in it, such as keys of events and errors.
func (r *Reason) show() {
	for _, text := range []*string{&r.What, &r.FromRef, &r.ToRef} {
		*text = redact.Text(*text, maxText)
	}
	r.Detail = redact.JSON(r.Detail, maxDetail)
	if r.At != nil {
		at := r.At.UTC()
		r.At = &at
	}
}

// Of returns the rows of a part.
func (a Answer) Of(p Part) []Reason {
	var rows []Reason
	for _, r := range a.Reasons {
		if r.Part == p {
			rows = append(rows, r)
		}
	}
	return rows
}
