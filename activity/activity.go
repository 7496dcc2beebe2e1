// Package activity is the structured log of the agent's actions: one row of agent_activity per action.
//
// An action with effects is opened before it acts (status running) and closed afterwards, in the same row. A crash in
// between leaves the running row as evidence; the claim that recovers the run marks it `unknown`. Note writes a
// finished row at once. A row always has a trace id, and a parent where it is part of a larger action, so the rows of
// a trace form a tree.
//
// A row of an execution is written only under that execution's live claim. Fence and row are one statement, so a
// process that was paused past its lease gets ErrStale and changes nothing. Reject then records the rejected write,
// marked stale, so the log is complete. Input and output are redacted and bounded before they leave the process. An
// action that cannot be logged returns an error.
//
// Times are the database's. Ids are time-ordered UUIDs, so newest first is an order by id, and a range of time is a
// range of ids. All functions are safe for concurrent use. The caller decides what commits together: it passes a
// pool, a transaction or a batch.
package activity

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

// ErrStale reports a write under a claim that is no longer live.
var ErrStale = errors.New("stale claim: the run was handed on, has ended, or its worker's lease expired")

// Kind is the kind of a row.
type Kind string

// The kinds of rows. A call becomes unknown when its process dies, because it may have had an effect. A phase only
// groups others, and the next claim continues it.
const (
	KindCall  Kind = "call"
	KindModel Kind = "model"
	KindPhase Kind = "phase"
	KindNote  Kind = "note"
)

// Status is the state of an action.
type Status string

// The states of a row.
const (
	Running         Status = "running"
	Success         Status = "success"
	Error           Status = "error"
	PendingApproval Status = "pending_approval"
	Skipped         Status = "skipped"
	Unknown         Status = "unknown"
)

// Usage is what a model call consumed, in tokens. UnknownTokens and UnknownUSD are the parts of TotalTokens and of
// the cost that the provider may bill but did not report: the worst case of requests without an answer, and the
// estimate of answers without usage. CachedTokens and CacheWriteTokens are parts of PromptTokens.
type Usage struct {
	PromptTokens     int     `json:"prompt_tokens"`
	CachedTokens     int     `json:"cached_tokens,omitempty"`
	CacheWriteTokens int     `json:"cache_write_tokens,omitempty"`
	CompletionTokens int     `json:"completion_tokens"`
	TotalTokens      int     `json:"total_tokens"`
	Estimated        bool    `json:"estimated,omitempty"`
	UnknownTokens    int     `json:"unknown_tokens,omitempty"`
	UnknownUSD       float64 `json:"unknown_usd,omitempty"`
}

// Entry describes an action before it happens. Skill is required. Empty fields for trace, execution, parent, cause,
// surface and agent come from the context's trace.Span.
type Entry struct {
	TraceID        string
	ExecutionID    string
	Claim          int64 // of the execution; 0 writes without a fence (outside executions only)
	ParentID       string
	CauseID        string // the model call that requested it
	Step           string // key of the durable step
	Kind           Kind
	Agent          string
	Surface        string
	Skill          string
	SkillID        string
	Purpose        string
	Input          any
	Model          string
	IdempotencyKey string
	ThreadID       string
	Lane           string
}

// Outcome describes how an action ended.
type Outcome struct {
	Status  Status
	Output  any
	Message string // of the error; empty for none
	Class   string // a stable word for the kind of error: timeout, http_status, invalid_params, …
	Usage   Usage
	CostUSD float64
	Model   string // as answered, where it differs from the requested one
	// LedTo is the number of calls of each skill in a model call's answer, for the attribution of its cost.
	LedTo map[string]int
}

// wrapError maps a stale claim to ErrStale.
func wrapError(verb string, err error) error {
	switch {
	case err == nil:
		return nil
	case postgres.IsCode(err, "LK001"):
		return fmt.Errorf("%s: %w", verb, ErrStale)
	default:
		return fmt.Errorf("%s: %w", verb, err)
	}
}

// Admin is the actor of a person on the command line, over the HTTP API or in the Engine Room.
const Admin = "admin"

// Actor is the principal behind a request or command, as the audit names it.
type Actor struct {
	Name    string // of the principal
	TokenID string // of the API token; empty for a session and for AGENT_ADMIN_TOKEN
	Via     string // http, page, cli, slack, telegram, …
	Message string // the provider's id of the message with the button
}

type actorKey struct{}

// WithActor returns a context whose acts and decisions name their principal.
func WithActor(ctx context.Context, a Actor) context.Context {
	return context.WithValue(ctx, actorKey{}, a)
}

// ActorFrom returns the actor of ctx; without one it is [Admin].
func ActorFrom(ctx context.Context) Actor {
	if a, ok := ctx.Value(actorKey{}).(Actor); ok && a.Name != "" {
		return a
	}
	return Actor{Name: Admin}
}

// SetActor sets the actor for SQL functions in the transaction. They add the same fields as [Describe] to their rows.
func SetActor(ctx context.Context, tx postgres.DB) error {
	b := &pgx.Batch{}
	QueueActor(ctx, b)
	if err := tx.SendBatch(ctx, b).Close(); err != nil {
		return fmt.Errorf("set actor: %w", err)
	}
	return nil
}

// QueueActor is [SetActor] for the statements after it in a batch, which is one transaction.
func QueueActor(ctx context.Context, b *pgx.Batch) {
	actor, err := json.Marshal(Describe(ctx, map[string]any{}))
	if err != nil { // strings cannot fail
		panic(err)
	}
	b.Queue(`select set_config('lanekeeper.actor', @actor, true)`, postgres.Strict{"actor": string(actor)})
}

// HasActor reports whether ctx names an actor.
func HasActor(ctx context.Context) bool {
	a, ok := ctx.Value(actorKey{}).(Actor)
	return ok && a.Name != ""
}

// RecordRequester records that the actor of ctx asked for an execution or a run. Approvals with four eyes refuse that
// actor. effect is a reference such as "execution ID". Without an actor it does nothing.
func RecordRequester(ctx context.Context, db postgres.DB, effect string) error {
	if !HasActor(ctx) {
		return nil
	}
	_, err := db.Exec(ctx, `
		insert into agent_links (cause, kind, effect) values ('principal ' || @name, 'asked', @effect)
		on conflict do nothing`,
		postgres.Strict{"name": ActorFrom(ctx).Name, "effect": effect})
	if err != nil {
		return fmt.Errorf("record who asked: %w", err)
	}
	return nil
}

// Describe adds the actor of ctx to the input of a row: by, key_id (of the token), via, and the message of the channel.
func Describe(ctx context.Context, input map[string]any) map[string]any {
	a, ok := ctx.Value(actorKey{}).(Actor)
	if !ok || a.Name == "" {
		return input
	}
	described := map[string]any{"by": a.Name}
	if a.TokenID != "" {
		described["key_id"] = a.TokenID
	}
	if a.Via != "" {
		described["via"] = a.Via
	}
	if a.Message != "" {
		described["message"] = a.Message
	}
	maps.Copy(described, input)
	return described
}

// Act is an act of an admin. Its row has agent [Admin], and the reason both as purpose and in the input.
type Act struct {
	Within  bool           // bounds each lock wait by postgres.LockTimeout; the caller retries
	Name    string         // of the act: disable_skill, replay_webhook
	Reason  string         // from the admin
	TraceID string         // of the row; empty starts a new op_ trace
	Input   map[string]any // names the object under a key that agent_audit.object knows; the change may add to it
}

// Unchanged is the output of a change without an effect: it writes no row.
var Unchanged any = unchanged{}

type unchanged struct{}

// Recorded identifies the row of an act.
type Recorded struct{ TraceID, ActivityID string }

// Record makes an admin's change and writes its row, in one transaction and under its own trace. change gets that
// trace and returns the output of the row.
func Record(
	ctx context.Context, db postgres.Beginner, a Act, change func(tx pgx.Tx, traceID string) (output any, err error),
) (Recorded, error) {
	r := Recorded{TraceID: cmp.Or(a.TraceID, string(trace.New(trace.Operate)))}
	inTx := postgres.InTx
	if a.Within {
		inTx = postgres.InTxWithin
	}
	err := inTx(ctx, db, func(tx pgx.Tx) error {
		output, err := change(tx, r.TraceID)
		if err != nil || output == Unchanged {
			return err
		}
		r.ActivityID, err = Note(ctx, tx, a.entry(ctx, r.TraceID), Outcome{Output: output})
		return err
	})
	return r, err
}

// RecordAround is [Record] for work beyond one transaction: the row is open meanwhile, and has its error.
func RecordAround(ctx context.Context, db postgres.DB, a Act, work func() (output any, err error)) error {
	e := a.entry(ctx, string(trace.New(trace.Operate)))
	id, err := Open(ctx, db, e)
	if err != nil {
		return err
	}
	output, failure := work()
	o := Outcome{Output: output}
	if failure != nil {
		o.Status, o.Message = Error, failure.Error()
	}
	if err := Close(context.WithoutCancel(ctx), db, id, e, o); failure == nil {
		return err
	}
	return failure
}

func (a Act) entry(ctx context.Context, traceID string) Entry {
	input := Describe(ctx, maps.Clone(a.Input))
	if a.Reason != "" {
		if input == nil {
			input = map[string]any{}
		}
		input["reason"] = a.Reason
	}
	return Entry{
		TraceID: traceID, Surface: string(trace.Operate), Agent: Admin, Kind: KindNote, Skill: a.Name,
		Purpose: a.Reason, Input: input,
	}
}

// Link records the span of another system that requested a trace (see trace.WithCaller). It is external and
// untrusted: it is shown as a link, and the trace keeps its own id. Without a caller Link does nothing.
func Link(ctx context.Context, db postgres.DB, id trace.ID) error {
	traceparent := trace.Caller(ctx)
	if _, ok := trace.ParseTraceparent(traceparent); !ok || id == "" {
		return nil
	}
	_, err := db.Exec(ctx, `insert into agent_trace_links (trace_id, traceparent) values (@trace_id, @traceparent)
		on conflict do nothing`,
		postgres.Strict{"trace_id": string(id), "traceparent": traceparent})
	if err != nil {
		return fmt.Errorf("link trace %s: %w", id, err)
	}
	return nil
}

// LinkExecutions is Link for the traces of executions that an external event resumed.
func LinkExecutions(ctx context.Context, db postgres.DB, ids []string) error {
	traceparent := trace.Caller(ctx)
	if _, ok := trace.ParseTraceparent(traceparent); !ok || len(ids) == 0 {
		return nil
	}
	_, err := db.Exec(ctx, `
		insert into agent_trace_links (trace_id, traceparent)
		select distinct x.trace_id, @traceparent from agent_executions x where x.id = any (@ids::uuid[]) order by 1
		  on conflict do nothing`,
		postgres.Strict{"ids": ids, "traceparent": traceparent})
	if err != nil {
		return fmt.Errorf("link the traces of %d executions: %w", len(ids), err)
	}
	return nil
}

// PruneLinks deletes links older than keep.
func PruneLinks(ctx context.Context, db postgres.DB, keep time.Duration) error {
	_, err := db.Exec(ctx, `delete from agent_trace_links
		where created_at < statement_timestamp() - make_interval(secs => @seconds)`,
		postgres.Strict{"seconds": keep.Seconds()})
	if err != nil {
		return fmt.Errorf("delete links of traces: %w", err)
	}
	return nil
}
