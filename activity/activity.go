// Package activity is the structured log of what the agent did: one row of agent_activity per action.
//
// An action with effects is opened before it acts (status running) and closed after, as the same row.
// A crash in between leaves the running row, which is honest evidence; the claim that recovers the run
// turns it into `unknown`. What is known at once is written by Note in one go. A row always has a trace
// id, and a parent where the action was part of a larger one, so the rows of a trace form a tree.
//
// What it promises: a row of an execution is written only under that execution's live claim. The fence
// and the row are one statement, so a process that was paused past its lease and wakes gets ErrStale and
// changes nothing; Reject then keeps what it wanted to write, marked stale, so that the ledger is
// complete. Input and output are redacted and bounded before they leave the process. An action that
// cannot be logged is an error for whoever acts: nothing is swallowed.
//
// Times are the database's. Ids are time-ordered uuids, so newest-first is an order by id and a range of
// time is a range of ids. All functions are safe for concurrent use; what commits together is decided
// by the caller, who passes a pool, a transaction or a batch.
package activity

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

// ErrStale reports a write under a claim that is no longer the execution's live one.
var ErrStale = errors.New("stale claim: the run was handed on, has ended, or its worker's lease expired")

// Kind says what sort of action a row is.
type Kind string

// The kinds of rows. A call may have had an effect when its process dies, so it becomes unknown then; a
// phase only groups others, and the next claim goes on with it.
const (
	KindCall  Kind = "call"
	KindModel Kind = "model"
	KindPhase Kind = "phase"
	KindNote  Kind = "note"
)

// Status is how an action stands.
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

// Usage is what a model call consumed, in tokens. UnknownTokens of TotalTokens, and UnknownUSD of the call's cost,
// are what the provider may have billed and did not report: the worst case of requests without an answer, the
// estimate of answers without usage. CachedTokens and CacheWriteTokens are part of PromptTokens: what the provider
// had read before, and what it keeps.
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

// Entry describes an action before it happens. Skill is required; trace, execution, parent, cause,
// surface and agent are taken from the context's trace.Span where they are empty.
type Entry struct {
	TraceID        string
	ExecutionID    string
	Claim          int64 // of the execution; 0 writes without a fence (outside executions only)
	ParentID       string
	CauseID        string // the model call whose answer asked for it
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
	Message string // of the error; empty when there is none
	Class   string // a stable word for the sort of error: timeout, http_status, invalid_params, …
	Usage   Usage
	CostUSD float64
	Model   string // as answered, where it differs from what was asked
	// LedTo is how often the answer of a model call calls each skill: what the call is charged to.
	LedTo map[string]int
}

// translate names what the database refused.
func translate(verb string, err error) error {
	switch {
	case err == nil:
		return nil
	case postgres.IsCode(err, "LK001"):
		return fmt.Errorf("%s: %w", verb, ErrStale)
	default:
		return fmt.Errorf("%s: %w", verb, err)
	}
}

// Admin is the actor of what a person does on the command line, over the HTTP API or in the Engine Room.
const Admin = "admin"

// Act is what an admin does. Its row has agent [Admin], and the reason both as purpose and in the input.
type Act struct {
	Within  bool           // each wait for a lock is bounded by postgres.LockTimeout; the caller tries again
	Name    string         // of the act: disable_skill, replay_webhook
	Reason  string         // as the admin gave it
	TraceID string         // of the row; a new op_ trace when empty
	Input   map[string]any // names the object under a word that the column object of agent_audit knows; the change may add to it
}

// Unchanged is the output of a change that changed nothing: it leaves no row.
var Unchanged any = unchanged{}

type unchanged struct{}

// Recorded says where the row of an act is.
type Recorded struct{ TraceID, ActivityID string }

// Record makes an admin's change and writes its row, in one transaction and under a trace of its own. change gets that
// trace and returns the output of the row.
func Record(ctx context.Context, db postgres.Beginner, a Act, change func(tx pgx.Tx, traceID string) (output any, err error)) (Recorded, error) {
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
		r.ActivityID, err = Note(ctx, tx, a.entry(r.TraceID), Outcome{Output: output})
		return err
	})
	return r, err
}

// RecordAround is [Record] for work that is more than one transaction: the row is open while it lasts, and has its
// error.
func RecordAround(ctx context.Context, db postgres.DB, a Act, work func() (output any, err error)) error {
	e := a.entry(string(trace.New(trace.Operate)))
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

func (a Act) entry(traceID string) Entry {
	input := maps.Clone(a.Input)
	if a.Reason != "" {
		if input == nil {
			input = map[string]any{}
		}
		input["reason"] = a.Reason
	}
	return Entry{TraceID: traceID, Surface: string(trace.Operate), Agent: Admin, Kind: KindNote, Skill: a.Name, Purpose: a.Reason, Input: input}
}

// Link records that a span of another system asked for a trace, as the caller in ctx says (see trace.WithCaller). It
// comes from outside and is not trusted: it is shown as a link, and the trace keeps its own id. Without a caller it
// does nothing.
func Link(ctx context.Context, db postgres.DB, id trace.ID) error {
	traceparent := trace.Caller(ctx)
	if _, ok := trace.ParseTraceparent(traceparent); !ok || id == "" {
		return nil
	}
	_, err := db.Exec(ctx, `insert into agent_trace_links (trace_id, traceparent) values (@trace_id, @traceparent) on conflict do nothing`,
		postgres.Strict{"trace_id": string(id), "traceparent": traceparent})
	if err != nil {
		return fmt.Errorf("link trace %s: %w", id, err)
	}
	return nil
}

// LinkExecutions is Link for the traces of executions, which an event from outside has woken.
func LinkExecutions(ctx context.Context, db postgres.DB, ids []string) error {
	traceparent := trace.Caller(ctx)
	if _, ok := trace.ParseTraceparent(traceparent); !ok || len(ids) == 0 {
		return nil
	}
	_, err := db.Exec(ctx, `
		insert into agent_trace_links (trace_id, traceparent)
		select distinct x.trace_id, @traceparent from agent_executions x where x.id = any (@ids::uuid[]) order by 1 on conflict do nothing`,
		postgres.Strict{"ids": ids, "traceparent": traceparent})
	if err != nil {
		return fmt.Errorf("link the traces of %d executions: %w", len(ids), err)
	}
	return nil
}

// ForgetLinks deletes links that are older than keep, and returns how many.
func ForgetLinks(ctx context.Context, db postgres.DB, keep time.Duration) (int64, error) {
	tag, err := db.Exec(ctx, `delete from agent_trace_links where created_at < statement_timestamp() - make_interval(secs => @seconds)`,
		postgres.Strict{"seconds": keep.Seconds()})
	if err != nil {
		return 0, fmt.Errorf("forget links of traces: %w", err)
	}
	return tag.RowsAffected(), nil
}
