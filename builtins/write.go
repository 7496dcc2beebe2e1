package builtins

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/memory"
	"github.com/lanekeeper/lanekeeper/skills"
)

// classInvalid is the class of what the caller has to say otherwise; it is not the skill's failure.
const classInvalid = "invalid_params"

// mistake tells the caller what to say otherwise, when err is one of its mistakes; other errors stay what they are.
func mistake(err error, mistakes ...error) error {
	for _, m := range mistakes {
		if errors.Is(err, m) {
			return &skills.CallError{Class: classInvalid, Message: err.Error()}
		}
	}
	return err
}

// refuse is a mistake in words.
func refuse(text string) error { return &skills.CallError{Class: classInvalid, Message: text} }

const defaultCategory = "general"

type memoryWriteArgs struct {
	Category string          `json:"category"`
	Key      string          `json:"key"`
	Value    json.RawMessage `json:"value"`
	Days     float64         `json:"expires_in_days"`
	Revision float64         `json:"revision"` // 2.0 is an integer to JSON Schema
}

// memoryWrite keeps a value. A call that is made again after a crash finds what the first one wrote, and says so.
func memoryWrite(ctx context.Context, db postgres.Beginner, who rememberer, args memoryWriteArgs) (any, error) {
	note := memory.Note{
		Owner:    who.owner,
		Category: args.Category, Key: args.Key, Value: args.Value, TraceID: who.traceID,
		TTL: time.Duration(args.Days * float64(24*time.Hour)), Revision: readRevision(args.Revision),
	}
	saved, err := memory.Save(ctx, db, note)
	if conflict, ok := errors.AsType[*memory.ConflictError](err); ok {
		if !written(note, conflict) {
			return conflictAnswer(conflict), nil
		}
		saved, err = *conflict.Theirs, nil
	}
	if err != nil {
		return nil, mistake(err, memory.ErrSecret, memory.ErrFull, memory.ErrInvalid)
	}
	return map[string]any{"category": saved.Category, "key": saved.Key, "revision": saved.Revision, "expires_at": saved.ExpiresAt}, nil
}

// written reports whether what is there was stored by this very call before.
func written(note memory.Note, conflict *memory.ConflictError) bool {
	there := conflict.Theirs
	return there != nil && there.TraceID == note.TraceID && sameJSON(there.Value, conflict.Yours) &&
		(there.Revision == note.Revision+1 || note.Revision == memory.Absent)
}

// sameJSON compares values, not texts: the database keeps JSON in its own spelling.
func sameJSON(a, b json.RawMessage) bool {
	var x, y any
	if json.Unmarshal(a, &x) != nil || json.Unmarshal(b, &y) != nil {
		return false
	}
	left, err := json.Marshal(x)
	if err != nil {
		return false
	}
	right, err := json.Marshal(y)
	return err == nil && string(left) == string(right)
}

type memoryForgetArgs struct {
	Category string  `json:"category"`
	Key      string  `json:"key"`
	Revision float64 `json:"revision"`
}

func memoryForget(ctx context.Context, db postgres.Beginner, who rememberer, args memoryForgetArgs) (any, error) {
	if args.Category == "" {
		args.Category = defaultCategory
	}
	forgotten, err := who.owner.Forget(ctx, db, args.Category, args.Key, readRevision(args.Revision))
	if conflict, ok := errors.AsType[*memory.ConflictError](err); ok {
		return conflictAnswer(conflict), nil
	}
	return map[string]any{"category": args.Category, "key": args.Key, "forgotten": forgotten}, err
}
