package builtins

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/exactjson"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/memory"
)

// recallArgs select entries; empty ones select the newest.
type recallArgs struct {
	Query    string  `json:"query"`
	Category string  `json:"category"`
	Limit    float64 `json:"limit"` // 2.0 is an integer in JSON Schema
}

// memoryView is the agent's view of a memory entry.
type memoryView struct {
	Category  string          `json:"category"`
	Key       string          `json:"key"`
	Value     json.RawMessage `json:"value"`
	Revision  int             `json:"revision"`
	ExpiresAt *time.Time      `json:"expires_at,omitempty"`
	UpdatedAt time.Time       `json:"updated_at"`
	TraceID   string          `json:"trace_id"`
}

// memories is the answer of recall.
type memories struct {
	Memories []memoryView `json:"memories"`
	LeftOut  int          `json:"left_out,omitempty"` // found, but beyond the size limit
}

const maxRecalled = 128 << 10 // bytes of values in one answer; one entry has at most half of it

// recallHandler returns the handler of recall.
func recallHandler(index *memory.Index) func(context.Context, postgres.Beginner, memoryUser, recallArgs) (any, error) {
	return func(ctx context.Context, db postgres.Beginner, who memoryUser, args recallArgs) (any, error) {
		found, err := searchMemory(ctx, db, index, who.owner, args)
		if err != nil {
			return nil, err
		}
		result, size := memories{Memories: []memoryView{}}, 0
		for _, e := range found {
			if size += len(e.Value); size > maxRecalled {
				result.LeftOut++
				continue
			}
			result.Memories = append(result.Memories, memoryView{
				e.Category, e.Key, e.Value, e.Revision, e.ExpiresAt, e.UpdatedAt, e.TraceID,
			})
		}
		return result, nil
	}
}

func searchMemory(
	ctx context.Context, db postgres.DB, index *memory.Index, owner memory.Owner, args recallArgs,
) ([]memory.Entry, error) {
	limit := postgres.PageSize(int(args.Limit), defaultLimit, maxLimit)
	if args.Query == "" {
		return owner.Recent(ctx, db, args.Category, limit)
	}
	return index.SearchIn(ctx, db, owner, args.Category, args.Query, limit)
}

const defaultCategory = "general"

type memoryWriteArgs struct {
	Category string          `json:"category"`
	Key      string          `json:"key"`
	Value    json.RawMessage `json:"value"`
	Days     float64         `json:"expires_in_days"`
	Revision float64         `json:"revision"` // 2.0 is an integer in JSON Schema
}

// memoryWrite stores a value. A repeated call after a crash finds the first call's value and succeeds.
func memoryWrite(ctx context.Context, db postgres.Beginner, who memoryUser, args memoryWriteArgs) (any, error) {
	note := memory.Note{
		Owner:    who.owner,
		Category: args.Category, Key: args.Key, Value: args.Value, TraceID: who.traceID,
		TTL: time.Duration(args.Days * float64(24*time.Hour)), Revision: noteRevision(args.Revision),
	}
	saved, err := memory.Save(ctx, db, note)
	if conflict, ok := errors.AsType[*memory.ConflictError](err); ok {
		if !wroteBefore(note, conflict) {
			return ConflictAnswer(conflict), nil
		}
		saved, err = *conflict.Theirs, nil
	}
	if err != nil {
		return nil, invalidIf(err, memory.ErrSecret, memory.ErrFull, memory.ErrInvalid)
	}
	return map[string]any{
		"category": saved.Category, "key": saved.Key, "revision": saved.Revision,
		"expires_at": saved.ExpiresAt,
	}, nil
}

// wroteBefore reports whether the current value may be from an earlier attempt of the same call: the same trace wrote
// the same value, at the next revision unless the run had read none.
func wroteBefore(note memory.Note, conflict *memory.ConflictError) bool {
	current := conflict.Theirs
	return current != nil && current.TraceID == note.TraceID && exactjson.Equal(current.Value, conflict.Yours) &&
		(current.Revision == note.Revision+1 || note.Revision == memory.Absent)
}

type memoryForgetArgs struct {
	Category string  `json:"category"`
	Key      string  `json:"key"`
	Revision float64 `json:"revision"`
}

// memoryForget deletes an entry. A missing one is no error, so a repeated call succeeds.
func memoryForget(ctx context.Context, db postgres.Beginner, who memoryUser, args memoryForgetArgs) (any, error) {
	args.Category = cmp.Or(args.Category, defaultCategory)
	forgotten, err := who.owner.Forget(ctx, db, args.Category, args.Key, noteRevision(args.Revision))
	if conflict, ok := errors.AsType[*memory.ConflictError](err); ok {
		return ConflictAnswer(conflict), nil
	}
	return map[string]any{"category": args.Category, "key": args.Key, "forgotten": forgotten}, err
}
