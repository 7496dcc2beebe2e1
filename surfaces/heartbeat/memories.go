package heartbeat

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	memories "github.com/lanekeeper/lanekeeper/memory"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/trace"
)

// memory is something a phase wants remembered.
type memory struct {
	Category string          `json:"category"`
	Key      string          `json:"key"`
	Value    json.RawMessage `json:"value"`
	Days     float64         `json:"expires_in_days,omitempty"` // 30.0 is an integer to JSON Schema
}

// Limits of what package memory keeps.
const (
	maxKey   = 255
	maxValue = 64 << 10
)

// check says what the schema of the tool cannot, so that the model hears of it while it can still act.
func (m memory) check() error {
	switch {
	case strings.TrimSpace(m.Key) == "" || strings.TrimSpace(m.Category) == "":
		return errors.New("key and category must not be blank")
	case len(m.Key) > maxKey || len(m.Category) > maxKey:
		return fmt.Errorf("key and category have at most %d bytes", maxKey)
	case len(m.Value) > maxValue:
		return fmt.Errorf("a value has at most %d bytes of JSON", maxValue)
	}
	return nil
}

// remember is the tool with which the model puts something on the list that save_memories stores.
func remember(list *[]memory) reason.Tool {
	return reason.Tool{
		Name:        "remember",
		Description: "Keep a fact for later heartbeats. It is stored at the end of this one.",
		Parameters: json.RawMessage(`{"type":"object","additionalProperties":false,"required":["key","value"],"properties":{
			"category":{"type":"string","minLength":1,"maxLength":60,"description":"what sort of fact, e.g. observation"},
			"key":{"type":"string","minLength":1,"maxLength":200,"description":"a short stable name; the same key replaces the fact"},
			"value":{"description":"the fact, as text or JSON"},
			"expires_in_days":{"type":"integer","minimum":1,"maximum":3650}}}`),
		Do: func(_ context.Context, args json.RawMessage) (any, error) {
			m := memory{Category: "observation"}
			if err := json.Unmarshal(args, &m); err != nil {
				return nil, badArguments(err)
			}
			if err := m.check(); err != nil {
				return nil, badArguments(err)
			}
			*list = append(*list, m)
			return map[string]string{"status": "noted; stored at the end of this heartbeat"}, nil
		},
	}
}

// saveMemories stores what the phases noted and drops what has expired.
func (b *beat) saveMemories(ctx context.Context) (done, error) {
	expired, err := executions.StepTx(ctx, "expire", func(ctx context.Context, tx pgx.Tx) (int, error) {
		n, err := memories.Expire(ctx, tx)
		return int(n), err
	})
	if err != nil {
		return done{}, err
	}
	saved := 0
	var failures []error
	for _, m := range b.memories {
		err := b.save(ctx, m)
		if err != nil && !isResult(err) {
			return done{}, err
		}
		if err == nil {
			saved++
		}
		failures = append(failures, err)
	}
	said := done{Summary: fmt.Sprintf("%d memories saved", saved), Idle: len(b.memories) == 0 && expired == 0}
	if expired > 0 {
		said.Summary += fmt.Sprintf(", %d expired ones dropped", expired)
	}
	return said, errors.Join(failures...)
}

// badArguments tells the model of arguments that its tool's schema lets through and the tool does not take.
func badArguments(err error) error {
	return &executions.StepError{Class: "invalid_params", Message: err.Error()}
}

// save stores one memory and its row in one transaction.
func (b *beat) save(ctx context.Context, m memory) error {
	_, err := executions.StepTx(ctx, "save memory", func(ctx context.Context, tx pgx.Tx) (int, error) {
		saved, err := memories.Save(ctx, tx, memories.Note{
			Category: m.Category, Key: m.Key, Value: m.Value, TTL: time.Duration(m.Days * float64(24*time.Hour)),
			TraceID: string(trace.IDFrom(ctx)),
		})
		if err != nil {
			return 0, err
		}
		current, _ := executions.Current(ctx)
		_, err = activity.Note(ctx, tx, activity.Entry{Skill: "save_memory", Claim: current.Claim, Input: m},
			activity.Outcome{Output: map[string]int{"revision": saved.Revision}})
		return saved.Revision, err
	}, executions.Input(m))
	return err
}
