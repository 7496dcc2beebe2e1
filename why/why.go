// Package why explains a trace: its causes, also in other traces; its executions, waits and lanes; its failures; its
// effects; and its cost. [Answer.RootCause] is the failure that the others pass on.
//
// The SQL function why(trace) computes the answer, also in psql. This package reads, redacts and formats it. A row
// records that one thing caused another (FromRef → ToRef). The parts are:
//
//	trace    a summary in one line
//	because  its causes, from the first cause to its first execution
//	did      its executions
//	waits    its waits, what ended them, and the holder of each awaited lane
//	lanes    its lanes, with their times
//	trouble  lost workers, writes rejected by a fence, calls with an unknown outcome
//	led to   its effects: events and resumed executions, automations, forks, messages, approvals, notified targets
//	spend    calls, tokens and dollars by model
//
// A reference is a word and an id: execution, trace, event, run (of an automation), delivery, approval, request,
// outgoing, thread, lane, schedule, worker, step, model; or one of outside, admin, timer. Lists are bounded, and a
// row of kind more reports the omitted rows. Every read uses an index, so the cost does not grow with the log.
package why

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"time"

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

// More is the kind of a row that reports the omitted rows.
const More = "more"

// MaxRows bounds the rows of each part.
const MaxRows = 100

// Bounds of the output, in bytes.
const (
	maxText   = 1000
	maxDetail = 4 << 10
)

// Reason is a row: FromRef caused ToRef, or without FromRef, a fact. TraceID and ExecutionID link to the other end,
// if it has a trace.
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

// Answer explains a trace.
type Answer struct {
	TraceID     string   `json:"trace_id"`
	OTelTraceID string   `json:"otel_trace_id"` // the same 16 bytes in hex, for tracing tools
	Reasons     []Reason `json:"reasons"`
	// RootCause is the failure that made the trace fail; null if it did not fail.
	RootCause *activity.RootCause `json:"root_cause"`
}

// Of explains a trace by its id in any form. The error wraps trace.ErrInvalid for an invalid id, and
// activity.ErrNotFound.
func Of(ctx context.Context, db postgres.DB, id string) (Answer, error) {
	if _, err := trace.ParseAny(id); err != nil {
		return Answer{}, fmt.Errorf("ask why: %w", err)
	}
	reasons, err := postgres.Rows[Reason](ctx, db, "ask why "+id, `
		select seq, part, at, kind, what, from_ref, to_ref, trace_id, execution_id::text, detail from why(@trace, @most)`,
		postgres.Strict{"trace": id, "most": MaxRows})
	if err != nil {
		return Answer{}, err
	}
	if len(reasons) == 0 {
		return Answer{}, fmt.Errorf("ask why %s: %w", id, activity.ErrNotFound)
	}
	if err := hideTexts(ctx, db, reasons); err != nil {
		return Answer{}, fmt.Errorf("ask why %s: %w", id, err)
	}
	for i := range reasons {
		reasons[i].sanitize()
	}
	a := Answer{TraceID: reasons[0].TraceID, Reasons: reasons}
	a.OTelTraceID = trace.ID(a.TraceID).OTel()
	if a.RootCause, err = activity.RootCauseOf(ctx, db, a.TraceID); err != nil {
		return Answer{}, fmt.Errorf("ask why %s: %w", id, err)
	}
	return a, nil
}

// ended comes in What between the flow and the duration of a completed execution. Its result follows the duration.
const ended = " completed after "

// hideTexts removes the results of conversations, if ctx hides them.
func hideTexts(ctx context.Context, db postgres.DB, reasons []Reason) error {
	if !activity.HidesTexts(ctx) {
		return nil
	}
	var ids []string
	for _, r := range reasons {
		if r.ExecutionID != nil {
			ids = append(ids, *r.ExecutionID)
		}
	}
	type run struct {
		ID, Flow, Surface string
		ThreadID          *string
	}
	runs, err := postgres.Rows[run](ctx, db, "read executions of trace", `
		select x.id::text, x.flow, x.surface, x.thread_id from agent_executions x where x.id = any (@ids::text[]::uuid[])`,
		postgres.Strict{"ids": ids})
	if err != nil {
		return err
	}
	shown := map[string]bool{}
	for _, x := range runs {
		shown[x.ID] = !activity.IsConversation(x.Flow, x.Surface, x.ThreadID)
	}
	for i := range reasons {
		r := &reasons[i]
		before, after, found := strings.Cut(r.What, ended)
		if !found || r.ExecutionID != nil && shown[*r.ExecutionID] {
			continue
		}
		if took, _, has := strings.Cut(after, ": "); has {
			r.What = before + ended + took + ": " + activity.HiddenText
		}
	}
	return nil
}

// sanitize prepares a row for display: it may hold foreign text, such as keys of events and errors.
func (r *Reason) sanitize() {
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
