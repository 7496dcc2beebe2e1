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
	Revision *float64        `json:"revision"` // 2.0 is an integer to JSON Schema
}

// memoryWrite keeps a value. A call that is made again after a crash finds what the first one wrote, and says so.
func memoryWrite(ctx context.Context, db postgres.Beginner, who acting, args memoryWriteArgs) (any, error) {
	note := memory.Note{
		Category: args.Category, Key: args.Key, Value: args.Value, TraceID: who.TraceID,
		TTL: time.Duration(args.Days * float64(24*time.Hour)),
	}
	if args.Revision != nil {
		if note.Revision = int(*args.Revision); note.Revision == 0 {
			note.Revision = memory.Absent
		}
	}
	saved, err := memory.Save(ctx, db, note)
	if errors.Is(err, memory.ErrConflict) {
		saved, err = written(ctx, db, note, err)
	}
	if err != nil {
		return nil, mistake(err, memory.ErrConflict, memory.ErrSecret, memory.ErrFull, memory.ErrInvalid)
	}
	return map[string]any{"category": saved.Category, "key": saved.Key, "revision": saved.Revision, "expires_at": saved.ExpiresAt}, nil
}

// written is the entry that this very call has stored before; else the conflict.
func written(ctx context.Context, db postgres.DB, note memory.Note, conflict error) (memory.Entry, error) {
	category := note.Category
	if category == "" {
		category = defaultCategory
	}
	there, err := memory.Get(ctx, db, category, note.Key)
	if errors.Is(err, memory.ErrNotFound) {
		return memory.Entry{}, conflict
	}
	if err != nil {
		return memory.Entry{}, err
	}
	raw, err := json.Marshal(note.Value)
	if err != nil || there.TraceID != note.TraceID || there.Revision != max(note.Revision, 0)+1 || !sameJSON(there.Value, raw) {
		return memory.Entry{}, conflict
	}
	return there, nil
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
	Category string `json:"category"`
	Key      string `json:"key"`
}

func memoryForget(ctx context.Context, db postgres.Beginner, _ acting, args memoryForgetArgs) (any, error) {
	if args.Category == "" {
		args.Category = defaultCategory
	}
	forgotten, err := memory.Forget(ctx, db, args.Category, args.Key)
	return map[string]any{"category": args.Category, "key": args.Key, "forgotten": forgotten}, err
}
